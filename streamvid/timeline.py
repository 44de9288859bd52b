"""Pixels, latent frames and chunks: every conversion between them, and the sizes and counts that are allowed.

The first latent frame after a start is one picture, each later one ``temporal`` pictures. Knows no tensors.
"""

from __future__ import annotations

import operator
import secrets
from dataclasses import dataclass
from typing import Any

from streamvid.errors import StreamvidError

MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class ChunkPlan:
    """One chunk before it is made."""

    index: int
    """Counts from 0, over the whole stream."""
    start_latent: int
    """Absolute index of its first latent frame."""
    num_latents: int
    start_frame: int
    """Absolute index of its first pixel frame."""
    num_frames: int
    """Pixel frames that its latents decode to."""
    first: bool
    """Decoding starts afresh here: the first chunk of a stream, and the one after a cut."""


@dataclass(frozen=True)
class Place:
    """Where a stream is, before its next chunk."""

    chunk: int = 0
    latent: int = 0
    frame: int = 0
    restart: bool = True
    """Decoding starts afresh with the next chunk."""


@dataclass(frozen=True)
class ChunkRule:
    """How long chunks are: the arithmetic of one checkpoint."""

    latents: int
    """Latent frames of a chunk."""
    first_latents: int
    """Latent frames of a chunk with which decoding starts afresh."""
    temporal: int = 4
    """Pixel frames a latent frame."""

    @property
    def frames(self) -> int:
        """Pixel frames of a chunk with which decoding goes on."""
        return pixel_frames(self.latents, first=False, temporal=self.temporal)

    def plan(self, place: Place) -> ChunkPlan:
        """The chunk that comes at ``place``."""
        count = self.first_latents if place.restart else self.latents
        return ChunkPlan(
            index=place.chunk,
            start_latent=place.latent,
            num_latents=count,
            start_frame=place.frame,
            num_frames=pixel_frames(count, first=place.restart, temporal=self.temporal),
            first=place.restart,
        )

    def latents_for(self, num_frames: int) -> int:
        """Latent frames that hold the first ``num_frames`` pixel frames of a stream without cuts."""
        return 1 + -(-(num_frames - 1) // self.temporal)

    @staticmethod
    def after(plan: ChunkPlan) -> Place:
        """The place after a chunk."""
        return Place(
            chunk=plan.index + 1,
            latent=plan.start_latent + plan.num_latents,
            frame=plan.start_frame + plan.num_frames,
            restart=False,
        )


def pixel_frames(num_latents: int, *, first: bool, temporal: int = 4) -> int:
    """Pixel frames that ``num_latents`` latent frames decode to."""
    return num_latents * temporal - (temporal - 1 if first and num_latents else 0)


def whole(value: Any) -> int | None:
    """A whole number of Python's, NumPy's or PyTorch's as an int; None when it is none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_num_frames(num_frames: Any) -> int | None:
    """Any whole number from 1 is allowed; None is an endless stream."""
    if num_frames is None:
        return None
    count = whole(num_frames)
    if count is None or count < 1:
        raise StreamvidError(f"num_frames must be a whole number of at least 1, got {num_frames!r}")
    return count


def check_pixels(name: str, value: Any, unit: int = 1) -> int:
    """A height or width in pixels must be a multiple of ``unit`` (VAE scale times patch)."""
    pixels = whole(value)
    if pixels is None or pixels < 1:
        raise StreamvidError(f"{name} must be a whole number of pixels, got {value!r}")
    if pixels % unit:
        below, above = pixels // unit * unit, (pixels // unit + 1) * unit
        near = f"{below} and {above}" if below else f"{above}"
        raise StreamvidError(
            f"{name} must be a multiple of {unit}, got {pixels}; the nearest allowed sizes are {near}"
        )
    return pixels


def resolve_seed(seed: Any) -> int:
    """The seed that is used: 0 to 2**64 - 1 as given, -1 draws one (read it from ``stream.seed``)."""
    number = whole(seed)
    if number is None or not -1 <= number <= MAX_SEED:
        raise StreamvidError(
            f"seed must be a whole number from 0 to 2**64 - 1, or -1 to draw one, got {seed!r}"
        )
    return secrets.randbits(64) if number == -1 else number
