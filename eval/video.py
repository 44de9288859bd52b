"""Clips as arrays: checking, reading, lossless keeping, and small H.264 copies for a page.

Everything in `streamvid.eval` takes a clip as uint8 RGB `[n, H, W, 3]`. Knows nothing of models.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from streamvid.errors import StreamvidError
from streamvid.video_io import VideoReader

VIDEO_SUFFIXES = (".mp4", ".mkv", ".webm", ".mov", ".avi", ".gif")


def as_frames(frames: Any) -> np.ndarray:
    """A clip as uint8 `[n, H, W, 3]`.

    Args:
        frames: an array of that layout, or an iterable of `[H, W, 3]` frames of one size. Floats are not
            guessed at: 0..1 and 0..255 cannot be told apart on a dark clip.

    Raises:
        StreamvidError: empty, another layout or dtype, or frames of several sizes.
    """
    if not isinstance(frames, np.ndarray):
        items = [np.asarray(frame) for frame in frames]
        if not items:
            raise StreamvidError("the clip has no frames; at least one is needed")
        if len({item.shape for item in items}) > 1:
            raise StreamvidError("the frames of a clip differ in size; all must have one size")
        frames = np.stack(items)
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not len(frames):
        raise StreamvidError(
            f"a clip must be uint8 [frames, height, width, 3], got {frames.dtype} {list(frames.shape)}"
        )
    return np.ascontiguousarray(frames)


def luma(frames: np.ndarray) -> np.ndarray:
    """Luma (BT.601 weights) of a clip, float32 0..255, `[n, H, W]`."""
    return np.stack([cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY) for frame in frames]).astype(np.float32)


def lab_means(frames: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of CIELAB (L 0..100, a, b) of each frame, both `[n, 3]`."""
    means, deviations = [], []
    for frame in frames:
        lab = cv2.cvtColor(frame.astype(np.float32) / 255.0, cv2.COLOR_RGB2LAB).reshape(-1, 3)
        means.append(lab.mean(0))
        deviations.append(lab.std(0))
    return np.array(means, np.float64), np.array(deviations, np.float64)


def resize(frames: np.ndarray, long_side: int) -> np.ndarray:
    """The clip scaled so that its longer side is `long_side` pixels (area filter down, linear up)."""
    height, width = frames.shape[1:3]
    scale = long_side / max(height, width)
    if scale == 1:
        return frames
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    method = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    return np.stack([cv2.resize(frame, size, interpolation=method) for frame in frames])


def read_video(path: Path, max_frames: int | None = None) -> tuple[np.ndarray, float]:
    """A whole file as (uint8 `[n, H, W, 3]`, frames a second). Raises StreamvidError when it cannot be read."""
    with VideoReader(path) as reader:
        return as_frames(islice(reader, max_frames)), reader.fps or 16.0


def _encode(target: Any, frames: np.ndarray, fps: float, container: str, **stream: Any) -> None:
    import av

    pixel = stream.pop("pix_fmt")
    options = stream.pop("options", {})
    with av.open(target, "w", format=container) as output:
        track = output.add_stream(stream.pop("codec"), rate=Fraction(fps).limit_denominator(1000))
        track.height, track.width, track.pix_fmt, track.options = *frames.shape[1:3], pixel, options
        for frame in frames:
            output.mux(track.encode(av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format=pixel)))
        output.mux(track.encode())


def write_lossless(path: Path, frames: np.ndarray, fps: float) -> None:
    """Keep a clip bit for bit (FFV1 in Matroska), atomically: fidelity must not measure a video codec."""
    temporary = path.with_suffix(
        f".{os.getpid()}.part"
    )  # a killed run may still have a process at work on it
    try:
        _encode(str(temporary), as_frames(frames), fps, "matroska", codec="ffv1", pix_fmt="bgr0")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def small_mp4(frames: np.ndarray, fps: float, long_side: int = 256, quality: int = 26) -> bytes:
    """An H.264 copy for a page: at most `long_side` pixels, key frames close together for scrubbing.

    A clip of half that size or less is enlarged by whole pixels first: yuv420p halves the resolution of colour.
    """
    side = max(frames.shape[1:3])
    if side > long_side:
        frames = resize(frames, long_side)
    elif long_side // side > 1:
        frames = frames.repeat(long_side // side, axis=1).repeat(long_side // side, axis=2)
    height, width = (side - side % 2 for side in frames.shape[1:3])
    frames = np.ascontiguousarray(frames[:, : max(2, height), : max(2, width)])
    buffer = io.BytesIO()
    options = {"crf": str(quality), "preset": "veryfast", "g": "16", "movflags": "faststart"}
    _encode(buffer, frames, fps, "mp4", codec="libx264", pix_fmt="yuv420p", options=options)
    return buffer.getvalue()


def find_videos(folder: Path) -> list[Path]:
    """Video files of a folder in natural order of their names. Raises StreamvidError when there are none."""
    if not folder.is_dir():
        raise StreamvidError(f"{folder} is not a folder of videos")
    found: Iterable[Path] = (path for path in folder.iterdir() if path.suffix.lower() in VIDEO_SUFFIXES)
    result = sorted(found, key=lambda path: path.name)
    if not result:
        raise StreamvidError(f"{folder} has no videos (looked for {', '.join(VIDEO_SUFFIXES)})")
    return result
