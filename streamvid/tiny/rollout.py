"""A minimal cached sampler for training and for checks: chunk by chunk, sink and recent chunks, slot
positions.

The product's sampler, with its policies and codecs, is streamvid's; this one exists so that training can
roll the model out without it. Keys are kept before rotation and rotated by their slot, so positions never
leave the trained range.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from diffusers import WanTransformer3DModel

from streamvid.tiny.dit import CHUNK, rotate, rotation, run, softmax_attention, text_keys

Layers = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Cache:
    """Keys and values of past chunks: for each kept chunk a list over layers of [b, tokens, heads,
    head_dim] pairs."""

    sink: int = 1
    recent: int = 4
    chunks: list[Layers] = field(default_factory=list)

    def push(self, layers: Layers) -> None:
        """Adds the newest chunk and drops the oldest beyond sink and recent ones."""
        self.chunks.append(layers)
        if len(self.chunks) > self.sink + self.recent:
            del self.chunks[self.sink]


class _Attend:
    """Attention of one chunk to the cache and to itself; remembers the chunk's own keys and values."""

    def __init__(self, model: WanTransformer3DModel, cache: Cache, size: tuple[int, int], device):
        self.cache = cache
        self.own: list[Any] = []
        bases = torch.arange(len(cache.chunks) + 1, device=device) * CHUNK
        factors = rotation(model, bases, *size)
        self.now, self.all = factors[-1:], factors.flatten(0, 1)[None]

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.own.append((k, v))
        past = [chunk[layer] for chunk in self.cache.chunks]
        keys = torch.cat([*(p[0] for p in past), k], 1)
        values = torch.cat([*(p[1] for p in past), v], 1)
        q, keys = rotate(q, self.now), rotate(keys, self.all)
        return softmax_attention(*(t.transpose(1, 2) for t in (q, keys, values))).transpose(1, 2)


def sigmas_for(steps: int | Sequence[float], shift: float) -> list[float]:
    """The sigmas of a sampler: `steps` equal ones from 1 down, or a list of timesteps, warped by the
    shift."""
    if isinstance(steps, int):
        steps = [1000 * (1 - i / steps) for i in range(steps)]
    return [shift * (t / 1000) / (1 + (shift - 1) * (t / 1000)) for t in steps]


def noise_like(shape: Sequence[int], seed: int, chunk: int, step: int) -> torch.Tensor:
    """Noise as a function of (seed, chunk, step)."""
    generator = torch.Generator().manual_seed((seed * 100_003 + chunk) * 101 + step)
    return torch.randn(tuple(shape), generator=generator)


@torch.no_grad()
def generate(
    model: WanTransformer3DModel,
    texts: torch.Tensor | Sequence[torch.Tensor],
    num_chunks: int,
    *,
    size: tuple[int, int] = (4, 4),
    sigmas: Sequence[float] = (1.0, 0.9375, 5 / 6, 0.625),
    seed: int = 0,
    guidance: float = 1.0,
    empty: torch.Tensor | None = None,
    ode: bool = False,
    cache: Cache | None = None,
) -> torch.Tensor:
    """Latents [b, num_chunks * CHUNK, c, h, w] for texts [b, text_len, text_dim] (or one such tensor a
    chunk).

    Re-noises with fresh noise at every step (Self-Forcing); with `ode` takes Euler steps instead. A
    guidance above 1 needs the embedding of the empty prompt, [1, text_len, text_dim].
    """
    cache = Cache() if cache is None else cache
    per_chunk = [texts] * num_chunks if isinstance(texts, torch.Tensor) else list(texts)
    batch, guided = len(per_chunk[0]), guidance != 1.0
    device = per_chunk[0].device
    rows = torch.arange(batch, device=device)
    which = torch.cat([rows, torch.full_like(rows, batch)]) if guided else rows
    out = []
    for chunk in range(num_chunks):
        text = torch.cat([per_chunk[chunk], cast(torch.Tensor, empty)]) if guided else per_chunk[chunk]
        keys = text_keys(model, text)

        def passes(x, sigma, cache=cache, keys=keys):
            both = torch.cat([x, x]) if guided else x
            attend = _Attend(model, cache, size, device)
            times = torch.full((len(both),), 1000.0 * sigma, device=device)
            flow = run(model, both, times, keys, which, attend)
            if guided:
                with_text, without = flow.chunk(2)
                flow = without + guidance * (with_text - without)
            return flow, attend.own

        shape = (batch, CHUNK, model.config.in_channels, *size)
        x = noise_like(shape, seed, chunk, 0).to(device)
        for step, sigma in enumerate(sigmas):
            flow, _ = passes(x, sigma)
            clean = x - sigma * flow
            after = sigmas[step + 1] if step + 1 < len(sigmas) else 0.0
            if ode or after == 0.0:
                x = x + (after - sigma) * flow
            else:
                x = (1 - after) * clean + after * noise_like(shape, seed, chunk, step + 1).to(device)
        cache.push(passes(x, 0.0)[1])
        out.append(x)
    return torch.cat(out, 1)
