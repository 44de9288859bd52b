"""Noise as a function of (seed, chunk, step), so that skipping, resuming or batching never shifts it.

Knows nothing of schedules or models. Step 0 is a chunk's initial noise; step ``i`` is what is mixed in after
step ``i - 1``. Values are drawn on the CPU in fp32 and then moved, so they do not depend on the device.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from streamvid.errors import StreamvidError

MAX_SEED = 2**64 - 1


class Noise(Protocol):
    """Where a sampler gets its Gaussian noise from."""

    def noise(
        self,
        chunk: int,
        step: int,
        shape: Sequence[int],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Standard normal values of ``shape`` ``[b, f, c, h, w]`` for this chunk and step."""
        ...


def _key(seed: int, chunk: int, step: int) -> int:
    """A 64-bit generator seed; a hash, so that neighbouring keys give unrelated streams."""
    packed = struct.pack("<QqQ", seed, chunk, step)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


class CounterNoise:
    """Counter-based noise, one seed a clip of the batch.

    A clip's values depend on its own seed only, never on its place in the batch, and each latent frame is one
    draw, so a chunk that is cut short has the same noise in the frames it keeps.

    Args:
        seeds: one Python int a clip, 0 to 2**64 - 1.
    """

    def __init__(self, seeds: Sequence[int]):
        for seed in seeds:
            if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
                raise StreamvidError(f"a seed must be a whole number from 0 to 2**64 - 1, got {seed!r}")
        if not seeds:
            raise StreamvidError("at least one seed is needed, one a clip")
        self.seeds = tuple(seeds)

    def noise(
        self,
        chunk: int,
        step: int,
        shape: Sequence[int],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """See :class:`Noise`. Raises StreamvidError when the batch does not match the seeds."""
        batch, frames, *rest = shape
        if batch != len(self.seeds):
            raise StreamvidError(f"a batch of {batch} clips needs {batch} seeds, got {len(self.seeds)}")
        out = torch.empty(tuple(shape), dtype=torch.float32)
        generator = torch.Generator()
        for clip, seed in enumerate(self.seeds):
            generator.manual_seed(_key(seed, chunk, step))
            for frame in range(frames):
                out[clip, frame] = torch.randn(rest, generator=generator)
        return out.to(device=device, dtype=dtype)


class RecordedNoise:
    """Replays recorded tensors, for checking against a reference.

    Args:
        initial: ``[b, F, c, h, w]`` initial noise of all generated latent frames, in order.
        renoise: ``(chunk, step) -> [b, f, c, h, w]`` for steps of 1 and more.
        starts: first frame of each chunk inside ``initial``.
    """

    def __init__(self, initial: Tensor, renoise: Mapping[tuple[int, int], Tensor], starts: Sequence[int]):
        self.initial, self.renoise, self.starts = initial, dict(renoise), tuple(starts)

    def noise(
        self,
        chunk: int,
        step: int,
        shape: Sequence[int],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """See :class:`Noise`. Raises StreamvidError for noise that was not recorded, or has another shape."""
        if step == 0:
            start = self.starts[chunk] if 0 <= chunk < len(self.starts) else self.initial.shape[1]
            value = self.initial[:, start : start + shape[1]]
        elif (chunk, step) in self.renoise:
            value = self.renoise[chunk, step]
        else:
            raise StreamvidError(f"no noise was recorded for chunk {chunk}, step {step}")
        if tuple(value.shape) != tuple(shape):
            raise StreamvidError(
                f"recorded noise of chunk {chunk}, step {step} is {list(value.shape)}, needed {list(shape)}"
            )
        return value.to(device=device, dtype=dtype)
