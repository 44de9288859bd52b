"""What a stream starts from besides noise: an image as its first frame, or a clip that it goes on from.

Both become clean latents, adopted chunk by chunk in place of generated ones. An image is frame 0 of the output; for an
image-to-video model of the Wan kind it is a condition beside every latent frame instead. A clip's newest frames that
fill whole chunks are used, and not given out again: the output begins with the frame after its last. Knows nothing of
the chunk loop.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.timeline import ChunkRule, Place, pixel_frames
from streamvid.video_io import VideoReader, read_image, to_uint8

if TYPE_CHECKING:
    from streamvid.options import StreamOptions
    from streamvid.pipeline import StreamPipeline

MOST_CONDITION_LATENTS = 64
"""Latent frames of grey after which an encoder is taken to have settled."""


@dataclass
class Start:
    """Latents of the first chunks, and where the output begins."""

    chunks: list[Tensor] = field(default_factory=list)
    """``[1, f, c, h, w]``, one a chunk."""
    place: Place = Place()
    """Frames before 0 are not given out."""
    condition: Tensor | None = None
    """What an image-to-video model reads beside its latents, see ``engine.Engine``."""

    def latents(self, chunk: int) -> Tensor | None:
        """What chunk number ``chunk`` adopts; None: it is generated."""
        return self.chunks[chunk] if chunk < len(self.chunks) else None

    @property
    def hidden(self) -> int:
        """Latent frames that are not given out."""
        return sum(part.shape[1] for part in self.chunks) if self.place.frame < 0 else 0


def prepare_start(
    pipe: StreamPipeline, options: StreamOptions, rule: ChunkRule, size: tuple[int, int]
) -> Start:
    """Read and encode ``image=`` or ``video=``.

    Raises StreamvidError when the model takes none, or when it cannot be read, has another size or is too short.
    """
    extra = pipe.model.geometry.condition_channels
    if extra and options.image is None:
        raise StreamvidError("this is an image-to-video model and needs a picture; pass image= (--image)")
    if options.image is None and options.video is None:
        return Start()
    if pipe.vae is None:
        raise StreamvidError(f"a start from pictures needs an autoencoder: {pipe.components.missing['vae']}")
    if extra:
        return Start(condition=_image_condition(pipe, _fit(read_image(options.image), size, "image"), extra))
    if options.image is not None:
        if not pipe.config.independent_first_frame:
            raise StreamvidError(
                "this model takes no image: it was not trained to start from one frame (independent_first_frame); "
                "leave image= out, or give a clip with video="
            )
        pictures = [_fit(read_image(options.image), size, "image")]
        return Start([_encode(pipe, pictures)])
    pictures = [_fit(picture, size, "video") for picture in _newest(options.video, rule)]
    latents = _encode(pipe, pictures)
    first, rest = latents[:, : rule.first_latents], latents[:, rule.first_latents :]
    chunks = [first, *(rest.split(rule.latents, dim=1) if rest.shape[1] else ())]
    return Start(chunks, Place(frame=-len(pictures)))


def _image_condition(pipe: StreamPipeline, picture: np.ndarray, channels: int) -> Tensor:
    """Mask and latents of Wan's image-to-video models ``[1, n, channels, h, w]``.

    The picture followed by grey, encoded as one video; the mask has ones at the first latent frame. A causal encoder
    that sees nothing but grey settles, exactly, so the first ``n`` frames are all there is.
    """
    from streamvid.vae import make_encoder

    if pipe.model.geometry.image_dim is not None:
        raise StreamvidError("this model also reads a CLIP embedding of the picture, which is not supported")
    encoder = make_encoder(pipe.vae)
    scale = encoder.geometry
    if channels != scale.temporal + scale.latent_channels:
        raise StreamvidError(
            f"this model reads {channels} condition channels beside its latents; only Wan's "
            f"{scale.temporal} + {scale.latent_channels} (mask and picture) are supported"
        )
    video = torch.from_numpy(picture.copy()).to(pipe.device).permute(2, 0, 1)[None, None].float() / 255
    grey = torch.full_like(video, 0.5).expand(-1, scale.temporal, -1, -1, -1)
    frames = [encoder.encode(video)]
    while len(frames) < MOST_CONDITION_LATENTS:
        frames.append(encoder.encode(grey))
        if torch.equal(frames[-1], frames[-2]):
            break
    latents = torch.cat(frames, dim=1)
    mask = torch.zeros_like(latents[:, :, :1]).expand(-1, -1, scale.temporal, -1, -1).clone()
    mask[:, 0] = 1
    return torch.cat([mask, latents], dim=2).to(pipe.dtype)


def _newest(video: Any, rule: ChunkRule) -> list[np.ndarray]:
    """The newest frames of a clip that fill whole chunks."""
    if isinstance(video, str | os.PathLike):
        with VideoReader(video) as reader:
            frames = list(reader)
    else:
        if not hasattr(video, "__iter__"):
            raise StreamvidError(f"video must be a path or a list of frames, got {type(video).__name__}")
        frames = [to_uint8(frame) for frame in video]
    least = pixel_frames(rule.first_latents, first=True, temporal=rule.temporal)
    if len(frames) < least:
        raise StreamvidError(
            f"the video has {len(frames)} frames and at least {least} are needed to go on from"
        )
    step = rule.latents * rule.temporal
    return frames[-(least + (len(frames) - least) // step * step) :]


def _fit(picture: np.ndarray, size: tuple[int, int], name: str) -> np.ndarray:
    if picture.shape[:2] != size:
        have = f"{picture.shape[0]}x{picture.shape[1]}"
        raise StreamvidError(
            f"the {name} is {have} pixels (height x width), the stream {size[0]}x{size[1]}; resize or crop it first, "
            f"or pass height={picture.shape[0]}, width={picture.shape[1]}"
        )
    return picture


def _encode(pipe: StreamPipeline, pictures: list[np.ndarray]) -> Tensor:
    """Latents ``[1, f, c, h, w]`` in the model's dtype."""
    from streamvid.vae import make_encoder

    encoder = make_encoder(pipe.vae)
    parts = []
    for start in range(
        0, len(pictures), 32
    ):  # in pieces, so that a long clip needs no more memory than a short one
        block = torch.from_numpy(np.stack(pictures[start : start + 32])).to(pipe.device)
        parts.append(encoder.encode(block.permute(0, 3, 1, 2)[None].float() / 255))
    return torch.cat(parts, dim=1).to(pipe.dtype)
