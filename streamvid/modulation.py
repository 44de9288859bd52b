"""Time embedding and modulation tables, computed once for each timestep value and kept.

Numerics of the Self-Forcing reference: sinusoid in float64, everything after it in the compute dtype. Tables have one
row a frame (or one for all frames) and are broadcast to tokens; they are never expanded to tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamvid.errors import StreamvidError

Timestep = float | Sequence[float] | Tensor


def sinusoid(timestep: Tensor, dim: int) -> Tensor:
    """``[..., dim]`` float64: cosines, then sines, of ``t * 10000 ** (-j / (dim / 2))``."""
    half = dim // 2
    exponent = torch.arange(half, dtype=torch.float64, device=timestep.device) / half
    angle = timestep.to(torch.float64).unsqueeze(-1) * torch.pow(10000.0, -exponent)
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


@dataclass(frozen=True)
class Modulation:
    """Shifts, scales and gates of one timestep setting."""

    blocks: tuple[tuple[Tensor, ...], ...]
    """Per layer (shift1, 1 + scale1, gate1, shift2, 1 + scale2, gate2), each ``[b | 1, frames | 1, 1, dim]``."""
    head: tuple[Tensor, Tensor]
    """(shift, 1 + scale) of the output head, same shape."""


class TimeTables:
    """Modulation of a model by timestep, least recently used ones forgotten.

    Args:
        model: a diffusers ``WanTransformer3DModel``.
        keep: settings kept.
    """

    def __init__(self, model: Any, keep: int = 64) -> None:
        self._model, self._keep = model, keep
        self._tables: OrderedDict[tuple[Any, ...], Modulation] = OrderedDict()

    def clear(self) -> None:
        """Forget all tables: the weights have changed."""
        self._tables.clear()

    def __call__(
        self, timestep: Timestep, batch: int, frames: int, dtype: torch.dtype, device: torch.device
    ) -> Modulation:
        """Modulation for ``batch`` items of ``frames`` frames.

        Args:
            timestep: one number for all frames, or ``[f]``, ``[b, f]`` or ``[b, 1]`` numbers on the 0..1000 scale, not
                rounded. A tensor on an accelerator is used without being read back, and its table is not kept.
        """
        if isinstance(timestep, Tensor) and timestep.device.type != "cpu":
            return self._compute(_rows(timestep, batch, frames), dtype, device)
        rows = _rows(torch.as_tensor(timestep), batch, frames)
        first = rows.flatten()[0]
        if bool((rows == first).all()):
            rows = rows[:1, :1]
        key = (rows.shape, tuple(rows.double().flatten().tolist()), dtype, device)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = self._compute(rows.to(device), dtype, device)
            while len(self._tables) > self._keep:
                self._tables.popitem(last=False)
        else:
            self._tables.move_to_end(key)
        return table

    def _compute(self, rows: Tensor, dtype: torch.dtype, device: torch.device) -> Modulation:
        embedder = self._model.condition_embedder
        linear = embedder.time_embedder.linear_1
        wide = sinusoid(rows, self._model.config.freq_dim).to(linear.weight.dtype)
        e = embedder.time_embedder(wide).to(dtype)  # [b, f, dim]
        e0 = embedder.time_proj(embedder.act_fn(e)).to(dtype).unflatten(-1, (6, -1))
        blocks = tuple(
            _six((block.scale_shift_table.to(dtype) + e0).unbind(2)) for block in self._model.blocks
        )
        shift, scale = (self._model.scale_shift_table.to(dtype) + e.unsqueeze(2)).unbind(2)
        return Modulation(blocks, (shift.unsqueeze(2), 1 + scale.unsqueeze(2)))


def _six(parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    shift1, scale1, gate1, shift2, scale2, gate2 = (part.unsqueeze(2) for part in parts)
    return shift1, 1 + scale1, gate1, shift2, 1 + scale2, gate2


def _rows(timestep: Tensor, batch: int, frames: int) -> Tensor:
    """``[b | 1, frames | 1]``."""
    rows = timestep.reshape(1, 1) if timestep.ndim == 0 else timestep
    rows = rows.unsqueeze(0) if rows.ndim == 1 else rows
    if rows.ndim != 2 or rows.shape[0] not in (1, batch) or rows.shape[1] not in (1, frames):
        raise StreamvidError(
            f"timestep has shape {tuple(timestep.shape)}; allowed for {batch} items of {frames} frames: a number, "
            f"[{frames}], [{batch}, {frames}] or [{batch}, 1]"
        )
    return rows
