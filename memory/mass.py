"""Where attention goes: the share of each region, for pictures and drift monitors.

Costs a second product of queries and keys on the passes it looks at, so it is attached only when asked for. Knows
nothing of frames or prompts.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from streamvid.memory.bank import Bank
from streamvid.memory.view import View


class RegionMass:
    """Collects the attention of the context passes; set it as `KVCache.watch`.

    The share of a region is the mean over queries, heads and the layers seen since the last `take`.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._heads = 0

    def __call__(
        self, stage: Literal["noisy", "context"], bank: Bank, view: View, queries: Tensor, keys: Tensor
    ) -> None:
        """Look at one attention call of one head group.

        Args:
            queries, keys: rotated, ``[b, n, group heads, d]``.
        """
        if stage != "context":
            return
        q, k = (x.float().transpose(1, 2) for x in (queries, keys))
        logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if view.bias is not None:
            bias = view.bias.float()
            logits = logits + (bias if bias.ndim == 1 else bias[..., None, :])
        mass = logits.softmax(-1).mean((0, 2))  # [heads, keys]
        names, labels = region_labels(view, keys.shape[1])
        heads = mass.shape[0]
        for index, name in enumerate(names):
            share = (mass * (labels.to(mass.device) == index)).sum()
            self._sums[name] = self._sums.get(name, 0.0) + share
        self._heads += heads

    def take(self) -> dict[str, float]:
        """Region -> share, summing to 1; empty when nothing was seen. Starts afresh."""
        result = {name: float(total) / self._heads for name, total in self._sums.items()}
        self._sums, self._heads = {}, 0
        return result


def region_labels(view: View, num_keys: int) -> tuple[list[str], Tensor]:
    """(names of regions, index of the region of each key): ``[n]``, or where tokens are selected per head
    ``[1, n]`` or ``[heads, n]``."""
    order = [(piece.entry.region, piece.length) for piece in view.pieces]
    names = list(dict.fromkeys(region for region, _ in order))
    labels = torch.cat([torch.full((length,), names.index(region)) for region, length in order])
    if view.plan.select is None:
        return names, labels
    select = view.plan.select.cpu()  # [b, n] or [b, n, heads]; the first clip stands for all
    chosen = select[0].T if select.ndim == 3 else select[0][None]
    total = sum(entry.length for entry in view.plan.visible)
    current = labels[total:].expand(chosen.shape[0], -1)
    return names, torch.cat([labels[:total][chosen], current], 1)[:, :num_keys]
