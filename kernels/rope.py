"""Rotary embedding over (frame, row, column) as in the Wan transformer.

A head of ``d`` elements is ``c = d / 2`` complex pairs of adjacent elements, divided into frame, row and column parts
of ``c - 2 * (c // 3)``, ``c // 3`` and ``c // 3`` pairs. A part of n pairs turns by ``position * 10000 ** (-j / n)``.
Angles are always float64, so that any position works; the dtype of the table chooses the arithmetic of the rotation:
complex128 computes in float64 as the public reference does, complex64 in float32 (deviation about 1e-7, half the cost).

Knows tensors only: which position a token has is decided by the memory.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def axis_pairs(head_dim: int) -> tuple[int, int, int]:
    """Number of complex pairs turned by the frame, row and column position.

    Raises:
        ValueError: ``head_dim`` is odd or not positive.
    """
    if head_dim <= 0 or head_dim % 2:
        raise ValueError(f"head_dim must be a positive even number for rotary embedding, got {head_dim}")
    pairs = head_dim // 2
    return pairs - 2 * (pairs // 3), pairs // 3, pairs // 3


@lru_cache(maxsize=64)
def _frequencies(pairs: int, device: torch.device) -> Tensor:
    exponent = torch.arange(pairs, dtype=torch.float64, device=device) / max(pairs, 1)
    return torch.pow(torch.tensor(10000.0, dtype=torch.float64, device=device), -exponent)


def axis_table(position: Tensor, pairs: int, dtype: torch.dtype = torch.complex64) -> Tensor:
    """Unit complex numbers ``[..., pairs]`` that turn one axis part by ``position [...]`` (any real dtype)."""
    angle = position.to(torch.float64).unsqueeze(-1) * _frequencies(pairs, position.device)
    return torch.polar(torch.ones_like(angle), angle).to(dtype)


def rope_table(positions: Tensor, head_dim: int, dtype: torch.dtype = torch.complex64) -> Tensor:
    """Rotation table of tokens.

    Args:
        positions: ``[..., 3]`` (frame, row, column) of each token, any real dtype, fractions allowed.
        head_dim: elements a head.
        dtype: ``torch.complex64`` (fast) or ``torch.complex128`` (parity).

    Returns:
        ``[..., head_dim / 2]`` unit complex numbers.
    """
    parts = [
        axis_table(positions[..., axis], pairs, dtype) for axis, pairs in enumerate(axis_pairs(head_dim))
    ]
    return torch.cat(parts, dim=-1)


def rotate(x: Tensor, table: Tensor, *, out: Tensor | None = None, inverse: bool = False) -> Tensor:
    """Turn the adjacent pairs of ``x`` by ``table``.

    Args:
        x: ``[b, n, h, d]``, any floating dtype; computed in the precision of the table and cast back.
        table: complex, broadcastable to ``[b, n, h, d / 2]``.
        out: where to write; may be ``x`` itself.
        inverse: turn back.
    """
    wide = torch.float64 if table.dtype == torch.complex128 else torch.float32
    if inverse:
        table = table.conj().resolve_conj()
    pairs = torch.view_as_complex(x.to(wide).unflatten(-1, (-1, 2)))
    if out is not None and out.dtype == wide and out.stride(-1) == 1:
        torch.mul(pairs, table, out=torch.view_as_complex(out.unflatten(-1, (-1, 2))))
        return out
    turned = torch.view_as_real(pairs * table).flatten(-2)
    return turned.to(x.dtype) if out is None else out.copy_(turned)


class GridRope:
    """Rotation tables of whole frames on one grid, built once per set of frame positions and kept for a few sets.

    Args:
        head_dim: elements a head.
        grid: token (rows, columns) of a frame.
        device: where the tables live.
        dtype: complex64 (fast) or complex128 (parity).
    """

    KEEP = 8  # sets of frames: the keys and queries of one chunk for up to four groups of heads

    def __init__(
        self,
        head_dim: int,
        grid: tuple[int, int],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.complex64,
    ) -> None:
        self.head_dim, self.grid, self.device, self.dtype = head_dim, grid, torch.device(device), dtype
        self._pairs = axis_pairs(head_dim)
        rows = axis_table(torch.arange(grid[0], device=device), self._pairs[1], dtype)
        columns = axis_table(torch.arange(grid[1], device=device), self._pairs[2], dtype)
        self._space = torch.cat(
            [
                rows[:, None].expand(-1, grid[1], -1),
                columns[None].expand(grid[0], -1, -1),
            ],
            dim=-1,
        ).flatten(0, 1)  # [rows * columns, pairs of both spatial axes]
        self._tables: dict[tuple[float, ...], Tensor] = {}

    def table(self, frames: tuple[float, ...]) -> Tensor:
        """``[len(frames) * rows * columns, 1, head_dim / 2]`` for frames at these positions, in raster order."""
        found = self._tables.pop(frames, None)
        if found is None:
            time = axis_table(torch.tensor(frames, dtype=torch.float64), self._pairs[0], self.dtype)
            time = time.to(self.device, non_blocking=True)
            found = torch.cat(
                [
                    time[:, None].expand(-1, len(self._space), -1),
                    self._space[None].expand(len(frames), -1, -1),
                ],
                dim=-1,
            ).reshape(-1, 1, self.head_dim // 2)
        self._tables[frames] = found
        while len(self._tables) > self.KEEP:
            del self._tables[next(iter(self._tables))]
        return found

    def tensors(self) -> list[Tensor]:
        """Every table held, for byte accounting."""
        return [self._space, *self._tables.values()]
