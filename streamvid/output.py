"""The forms in which frames leave a stream. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.memory.spec import nearest

OUTPUT_TYPES = {
    "uint8": "numpy uint8 [H, W, 3]",
    "np": "numpy float32 [H, W, 3] in 0..1",
    "pt": "torch float32 [3, H, W] in 0..1",
    "pil": "PIL image",
    "latent": "torch [c, h, w], one a latent frame, without decoding",
}
"""Output types, with what one frame is."""


@dataclass
class VideoChunk:
    """The frames of one chunk, or what is unread of them, and how they were made."""

    index: int
    """Index of the chunk, from 0."""
    start_frame: int
    """Index of the first of ``frames``, in the unit of ``frames``: pixel frames, or latent frames for ``latent``."""
    frames: Any
    """``[n, ...]`` array or tensor, or a list of PIL images; see ``OUTPUT_TYPES``."""
    start_latent: int
    num_latents: int
    prompt: str
    """The prompt under which it was made."""
    transition: str | None = None
    """How the prompt changed just before this chunk; None when it did not."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by stage: ``context`` (of the chunk before), ``change``, ``denoise``, ``decode``, ``total``."""
    steps: dict[str, int] = field(default_factory=dict)
    """Transformer passes: ``computed``, ``skipped`` by the step cache, ``context``."""
    memory_bytes: int = 0
    """Bytes that the memory of the past holds after the chunk's plan was made."""

    def __len__(self) -> int:
        return len(self.frames)

    def after(self, count: int) -> VideoChunk:
        """The same chunk without its first ``count`` frames."""
        from dataclasses import replace

        return replace(self, start_frame=self.start_frame + count, frames=self.frames[count:])

    def head(self, count: int) -> VideoChunk:
        """The same chunk cut to its first ``count`` frames."""
        from dataclasses import replace

        return replace(self, frames=self.frames[:count])


def check_output_type(name: str) -> str:
    if not isinstance(name, str) or name not in OUTPUT_TYPES:
        raise StreamvidError(
            f"unknown output_type {name!r}{nearest(str(name), OUTPUT_TYPES)} (allowed: {', '.join(OUTPUT_TYPES)})"
        )
    return name


def convert(frames: Tensor, output_type: str) -> Any:
    """Decoded frames ``[n, 3, H, W]`` in 0..1 (or latents ``[f, c, h, w]``) in the form of ``output_type``."""
    if output_type == "latent":
        return frames
    if output_type == "pt":
        return frames.float().cpu()
    pictures = frames.permute(0, 2, 3, 1)
    if output_type == "np":
        return pictures.float().cpu().numpy()
    # Rounded on the device: a quarter of the bytes cross to the host.
    array = (pictures.float().clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()
    if output_type == "uint8":
        return np.ascontiguousarray(array)
    from PIL import Image

    return [Image.fromarray(picture) for picture in array]


def join(parts: list[Any], output_type: str) -> Any:
    """The frames of several chunks as one ``[n, ...]`` array, tensor or list."""
    if output_type == "pil":
        return [picture for part in parts for picture in part]
    if output_type in ("pt", "latent"):
        return torch.cat(parts)
    return np.concatenate(parts)


@dataclass
class StreamOutput:
    """What ``pipe(...)`` returns, as diffusers users expect it."""

    frames: Any
    """One entry a clip: ``[b, n, ...]`` array or tensor, or a list of lists of PIL images."""
    seeds: list[int]
    """The seed of each clip, also when it was drawn."""

    def __getitem__(self, index: int) -> Any:
        return (self.frames,)[index]
