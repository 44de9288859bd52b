"""Statistics of every attention head, streamed out of one run with a full cache: what head profiles are made from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from streamvid.memory.bank import Bank
from streamvid.memory.policies.full import Full
from streamvid.memory.policy import Seen


@dataclass
class LayerStats:
    """Of one layer; ``L`` latent frames in all. Means over prompts, queries and tokens, fp64 on the CPU."""

    mass: Tensor
    """``[heads, L, L]``: attention of the queries of a chunk (row: its first frame) to each key frame. Clean pass."""
    logits: Tensor
    """``[heads, L, L]``: mean logit before the softmax, same layout."""
    likeness: Tensor
    """``[heads, L]``: cosine of un-rotated keys at one place, by distance in frames."""
    channels: Tensor
    """``[heads, head_dim]``: mean absolute un-rotated key."""
    query_mean: Tensor
    """complex ``[heads, head_dim / 2]``: mean un-rotated query, by rotary pair."""
    query_abs: Tensor
    """``[heads, head_dim / 2]``: mean modulus of the same."""
    clips: int = 0


class Profiler(Full):
    """The full cache that watches: pass it as the memory of a stream, read ``layers`` afterwards.

    Only what is summed up is kept; attention is computed again in fp32, a head at a time, in the context pass.
    """

    def __init__(self, latents: int) -> None:
        super().__init__()
        self.latents = latents
        self.layers: dict[int, LayerStats] = {}
        self._past: dict[int, list[Tensor]] = {}

    def observe(self, bank: Bank, seen: Seen) -> None:
        """Add the clean pass of a chunk."""
        if seen.stage != "context" or seen.chunk.start + seen.chunk.count > self.latents:
            return
        stats = self.layers.setdefault(bank.layer, self._empty(bank))
        size, start = bank.tokens_per_frame, seen.chunk.start
        if start == 0:
            self._past[bank.layer] = []
            stats.clips += 1
        q, (k, _) = seen.rotate_q().float(), seen.view()
        for head in range(q.shape[2]):
            logits = q[:, :, head] @ k[:, :, head].float().transpose(1, 2) / q.shape[-1] ** 0.5
            frames = logits.unflatten(2, (-1, size))
            mass = frames.flatten(2).softmax(-1).unflatten(2, (-1, size)).sum(-1)
            shown = frames.shape[2]
            stats.mass[head, start, :shown] += mass.mean(dim=(0, 1)).double().cpu()
            stats.logits[head, start, :shown] += frames.mean(dim=(0, 1, 3)).double().cpu()
        self._add_keys(stats, bank, seen)

    def _add_keys(self, stats: LayerStats, bank: Bank, seen: Seen) -> None:
        k = seen.k.float()
        pairs = torch.view_as_complex(seen.q.float().unflatten(-1, (-1, 2)).contiguous())
        share = seen.chunk.count / self.latents
        stats.channels += share * k.abs().mean(dim=(0, 1)).double().cpu()
        stats.query_mean += share * pairs.mean(dim=(0, 1)).to(torch.complex128).cpu()
        stats.query_abs += share * pairs.abs().mean(dim=(0, 1)).double().cpu()
        past = self._past[bank.layer]
        for frame in k.split(bank.tokens_per_frame, dim=1):
            past.append(frame)
            for distance in range(len(past)):
                cosine = F.cosine_similarity(frame, past[-1 - distance], dim=-1)
                weight = 1 / (self.latents - distance)
                stats.likeness[:, distance] += weight * cosine.mean(dim=(0, 1)).double().cpu()

    def finish(self) -> list[LayerStats]:
        """Means over the clips, in order of layers. Raises ValueError when nothing has been seen."""
        if not self.layers:
            raise ValueError("no clean pass was observed; run a stream with this memory first")
        for stats in self.layers.values():
            for name in ("mass", "logits", "likeness", "channels", "query_mean", "query_abs"):
                setattr(stats, name, getattr(stats, name) / stats.clips)
            stats.clips = 1
        self._past.clear()
        return [self.layers[layer] for layer in sorted(self.layers)]

    def _empty(self, bank: Bank) -> LayerStats:
        h, n, d = bank.num_heads, self.latents, bank.geometry.head_dim
        kind = {"dtype": torch.float64}
        return LayerStats(
            torch.zeros(h, n, n, **kind),
            torch.zeros(h, n, n, **kind),
            torch.zeros(h, n, **kind),
            torch.zeros(h, d, **kind),
            torch.zeros(h, d // 2, dtype=torch.complex128),
            torch.zeros(h, d // 2, **kind),
        )
