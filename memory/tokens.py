"""Token-granular history for policies: candidates out of a bank, choices among them, and the store they go back to.

All choices are index tensors per batch item and head, so nothing waits for the device. Positions are absolute here;
the store keeps them relative to an origin near the newest frame, so that fp32 holds them exactly however long a stream
runs. Knows banks and entries; not what makes a token worth keeping.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from streamvid.memory.bank import Bank, Entry


@dataclass
class Tokens:
    """``n`` tokens of one bank."""

    k: Tensor
    """Un-rotated ``[b, n, group heads, d]``."""
    v: Tensor
    positions: Tensor
    """fp32 ``[b, n, group heads, 3]``: frame, row, column."""
    count: Tensor
    """fp32 ``[b, n, group heads]``: tokens each stands for; 0 is an empty place."""

    def take(self, index: Tensor) -> Tokens:
        """The tokens ``index``, int64 ``[b, m, group heads]``."""
        wide = index[..., None]
        return Tokens(
            self.k.gather(1, wide.expand(-1, -1, -1, self.k.shape[-1])),
            self.v.gather(1, wide.expand(-1, -1, -1, self.v.shape[-1])),
            self.positions.gather(1, wide.expand(-1, -1, -1, 3)),
            self.count.gather(1, index),
        )


def join(parts: Sequence[Tokens]) -> Tokens:
    """All tokens, in order."""
    fields = ("k", "v", "positions", "count")
    return Tokens(*(torch.cat([getattr(part, name) for part in parts], dim=1) for name in fields))


def tokens_of(bank: Bank, entries: Sequence[Entry]) -> Tokens:
    """The tokens of some entries: whole frames, or runs with positions of their own."""
    return join([_tokens(bank, entry) for entry in entries])


def _tokens(bank: Bank, entry: Entry) -> Tokens:
    k, v = bank.read(entry)
    b, n, heads = k.shape[:3]
    if entry.positions is not None:
        origin = torch.tensor([entry.t[0], 0.0, 0.0], device=k.device)
        positions = (entry.positions + origin).expand(b, n, heads, 3)
    else:
        positions = raster(entry.t, bank.geometry.grid, k.device)[None, :, None].expand(b, n, heads, 3)
    count = torch.ones(1, 1, 1, device=k.device) if entry.count is None else entry.count
    return Tokens(k, v, positions, count.expand(b, n, heads))


def raster(t: Sequence[float], grid: tuple[int, int], device: torch.device | str) -> Tensor:
    """fp32 ``[len(t) * rows * columns, 3]``: positions of whole frames."""
    axes = (
        torch.tensor(t, dtype=torch.float32, device=device),
        torch.arange(grid[0], dtype=torch.float32, device=device),
        torch.arange(grid[1], dtype=torch.float32, device=device),
    )
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 3)


def store(
    bank: Bank, tokens: Tokens, old: Entry | None, *, region: str, origin: float, at: int | None = None
) -> Entry:
    """Put tokens into ``old`` (of the same length), or into a new entry at index ``at`` of the read order."""
    positions = tokens.positions - torch.tensor([origin, 0.0, 0.0], device=tokens.positions.device)
    if old is None:
        return bank.add(
            tokens.k, tokens.v, region=region, t=(origin,), positions=positions, count=tokens.count, at=at
        )
    bank.overwrite(old, tokens.k, tokens.v)
    old.t, old.positions, old.count = (origin,), positions, tokens.count
    return old


def empty(bank: Bank, n: int) -> Tokens:
    """``n`` empty places: count 0, so that attention gives them no weight."""
    g = bank.geometry
    shape = (g.batch, n, bank.num_heads)
    zeros = torch.zeros(*shape, g.head_dim, dtype=g.dtype, device=g.device)
    return Tokens(
        zeros,
        zeros.clone(),
        torch.zeros(*shape, 3, device=g.device),
        torch.zeros(shape, device=g.device),
    )


def top(scores: Tensor, n: int) -> Tensor:
    """Indices of the ``n`` highest scores along dim 1, ascending; ties go to the lower index. ``[b, n, ...]``."""
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :n]
    return order.sort(dim=1).values
