"""Video files in and out: one writer whose memory does not grow with length, one reader, one rule for frames.

A file appears under its final name only when it is complete: everything is written beside it under a temporary name
and renamed on close; an error removes the temporary file. Knows nothing of streams or models.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from streamvid.errors import StreamvidError
from streamvid.video_sinks import GifSink, Mp4Sink, PngSink, Sink, sequence_name

__all__ = ["SUFFIXES", "VideoReader", "VideoWriter", "read_image", "sequence_name", "to_uint8"]

SUFFIXES = (".mp4", ".gif", ".png")


def to_uint8(frame: Any) -> np.ndarray:
    """One frame in any of the accepted forms as a contiguous uint8 array ``[H, W, 3]``.

    The rule: a PIL image is converted to RGB; a numpy array is ``[H, W, 3]``; a torch tensor is ``[3, H, W]``. Integer
    frames must be uint8 and are taken as they are; floating frames must lie in 0..1 and are rounded to 0..255.

    Raises:
        StreamvidError: another shape or dtype, values outside 0..1, or not finite.
    """
    if hasattr(frame, "convert") and hasattr(frame, "getbands"):  # a PIL image, without importing PIL
        return np.asarray(frame.convert("RGB"))
    if hasattr(frame, "detach"):
        if frame.ndim != 3 or frame.shape[0] != 3:
            raise StreamvidError(f"a torch frame must be [3, H, W], got {list(frame.shape)}")
        frame = frame.detach().cpu()
        frame = (frame.float() if frame.is_floating_point() else frame).permute(1, 2, 0).numpy()
    frame = np.asarray(frame)
    if frame.ndim != 3 or frame.shape[2] != 3 or 0 in frame.shape:
        raise StreamvidError(f"a numpy frame must be [H, W, 3], got {list(frame.shape)}")
    if frame.dtype == np.uint8:
        return np.ascontiguousarray(frame)
    if not np.issubdtype(frame.dtype, np.floating):
        raise StreamvidError(f"a frame must be uint8 (0..255) or floating (0..1), got {frame.dtype}")
    low, high = float(frame.min()), float(frame.max())
    if not (low >= -1e-3 and high <= 1 + 1e-3):  # written so that NaN fails too
        raise StreamvidError(
            f"a floating frame must lie in 0..1, got {low:.3g}..{high:.3g}; rescale it first"
        )
    whole: np.ndarray = np.rint(np.clip(frame, 0.0, 1.0) * 255.0).astype(np.uint8)
    return whole


def check_enlarge(factor: Any) -> None:
    """Raises StreamvidError unless the factor is a whole number in 1..16."""
    if isinstance(factor, bool) or not isinstance(factor, int) or not 1 <= factor <= 16:
        raise StreamvidError(f"enlarge must be a whole number in 1..16, got {factor!r}")


def check_fps(fps: Any) -> None:
    """Raises StreamvidError unless this is a rate that MP4 and GIF can both hold."""
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0.01 <= fps <= 1000:
        raise StreamvidError(f"fps must be a number in 0.01..1000, got {fps!r}")


def check_crf(crf: Any) -> None:
    """Raises StreamvidError unless this is a quality that H.264 knows."""
    if isinstance(crf, bool) or not isinstance(crf, int) or not 0 <= crf <= 51:
        raise StreamvidError(f"crf must be a whole number in 0..51, got {crf!r}")


class VideoWriter:
    """Writes frames to MP4 (h264, yuv420p, BT.709 limited range), GIF or a PNG sequence, chosen by the suffix.

    ``name.png`` writes ``name-000000.png`` and so on; a ``%06d`` in the name is used instead when there is one. H.264
    in yuv420p needs even sizes: an odd MP4 is padded by repeating its last row or column; GIF and PNG keep any size.

    Args:
        path: final name. An existing file is replaced when the new one is complete.
        fps: frames a second, in the container. A GIF counts in hundredths of a second.
        crf: H.264 quality, 0 lossless .. 51 worst.
        enlarge: whole factor by which pictures are enlarged (bicubic) before they are written; 1..16.

    Use as a context manager: leaving it normally completes the file, leaving it by an exception removes it.
    """

    def __init__(
        self, path: str | os.PathLike[str], fps: float = 16.0, *, crf: int = 18, enlarge: int = 1
    ) -> None:
        self.path = Path(path)
        suffix = self.path.suffix.lower()
        if suffix not in SUFFIXES:
            raise StreamvidError(
                f"{self.path}: cannot write {suffix or 'a name without suffix'!r}, only {', '.join(SUFFIXES)}"
            )
        check_fps(fps)
        check_crf(crf)
        check_enlarge(enlarge)
        self.fps = fps
        self.num_frames = 0
        self._enlarge = enlarge
        self._crf = crf
        self._size: tuple[int, int] | None = None
        self._sink: Sink | None = None
        self._closed = False
        self._part = _reserve(self.path)

    def add(self, frame: Any) -> None:
        """Append one frame (see ``to_uint8``). All frames of a file have one size."""
        if self._closed:
            raise StreamvidError(f"{self.path}: the writer is closed")
        picture = to_uint8(frame)
        if self._enlarge > 1:
            import cv2

            size = (picture.shape[1] * self._enlarge, picture.shape[0] * self._enlarge)
            picture = cv2.resize(picture, size, interpolation=cv2.INTER_CUBIC)
        height, width = picture.shape[:2]
        if self._size is None:
            self._size = (height, width)
            self._sink = self._guard(self._open_sink, height, width)
        elif self._size != (height, width):
            raise StreamvidError(
                f"{self.path}: frame {self.num_frames} is {height}x{width}, the ones before {_by(self._size)}"
            )
        assert self._sink is not None
        self._guard(self._sink.add, picture)
        self.num_frames += 1

    def close(self) -> None:
        """Complete the file and give it its final name. A second call does nothing."""
        if self._closed:
            return
        if self._sink is None:
            self.abort()
            raise StreamvidError(f"{self.path}: no frame was written, so there is no file")
        self._guard(self._sink.close)
        self._guard(self._sink.publish, self.path)
        self._closed = True

    def abort(self) -> None:
        """Remove what was written. Nothing is left under the final name that was not there before."""
        if not self._closed:
            self._closed = True
            if self._sink is not None:
                self._sink.abandon()
            _remove(self._part)

    def _open_sink(self, height: int, width: int) -> Sink:
        suffix = self.path.suffix.lower()
        if suffix == ".png":
            return PngSink(self._part)
        if suffix == ".gif":
            return GifSink(self._part, self.fps, height, width)
        return Mp4Sink(self._part, self.fps, height, width, self._crf)

    def _guard(self, action: Any, *args: Any) -> Any:
        try:
            return action(*args)
        except OSError as error:
            self.abort()
            raise StreamvidError(_os_message(self.path, error)) from error

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        if hasattr(self, "_part"):
            self.abort()


class VideoReader:
    """Iterates over the frames of a video file as uint8 ``[H, W, 3]``, one at a time.

    Raises StreamvidError when the file is missing or holds no video that can be decoded.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        import av

        self.path = Path(path)
        if not self.path.is_file():
            raise StreamvidError(f"{self.path}: no such file")
        try:
            self._container: Any = av.open(str(self.path))
        except (OSError, ValueError) as error:
            raise StreamvidError(f"{self.path}: not a video that can be read ({error})") from None
        if not self._container.streams.video:
            self._container.close()
            raise StreamvidError(f"{self.path}: holds no video stream")
        self._stream = self._container.streams.video[0]
        self.height: int = self._stream.codec_context.height
        self.width: int = self._stream.codec_context.width
        self.fps = float(self._stream.average_rate or self._stream.guessed_rate or 0)
        self.num_frames: int | None = self._stream.frames or None
        """As the container says; None when it does not."""

    def __iter__(self) -> Iterator[np.ndarray]:
        try:
            for frame in self._container.decode(self._stream):
                yield frame.to_ndarray(format="rgb24")
        except (OSError, ValueError) as error:
            raise StreamvidError(f"{self.path}: damaged after some frames ({error})") from None

    def close(self) -> None:
        self._container.close()

    def __enter__(self) -> VideoReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_image(source: Any) -> np.ndarray:
    """A picture as uint8 ``[H, W, 3]`` from a path, a PIL image, an array or a tensor (see ``to_uint8``)."""
    if not isinstance(source, str | os.PathLike):
        return to_uint8(source)
    from PIL import Image, UnidentifiedImageError

    path = Path(source)
    if path.is_dir():
        raise StreamvidError(f"{path}: is a folder; give the picture file itself")
    try:
        with Image.open(path) as picture:
            return to_uint8(picture)
    except FileNotFoundError:
        raise StreamvidError(f"{path}: no such picture") from None
    except (UnidentifiedImageError, OSError) as error:
        raise StreamvidError(f"{path}: not a picture that can be read ({error})") from None


_NUMBER = itertools.count()
"""Tells the writers of one process apart."""


def _reserve(path: Path) -> Path:
    """A temporary file beside ``path`` that proves it can be written; leftovers of killed processes are removed."""
    if path.is_dir():
        raise StreamvidError(f"{path}: is a folder; give the file name too")
    part = path.with_name(f".{path.name}.{os.getpid()}.{next(_NUMBER)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for stale in path.parent.glob(f".{_glob_safe(path.name)}.*.part"):
            pid = stale.name.rsplit(".", 3)[1]
            if pid.isdigit() and not _alive(int(pid)):
                _remove(stale)
        part.touch()
    except OSError as error:
        raise StreamvidError(_os_message(path, error)) from None
    return part


def _glob_safe(name: str) -> str:
    return re.sub(r"([\[\]*?])", r"[\1]", name)


def _alive(pid: int) -> bool:
    import psutil

    return bool(psutil.pid_exists(pid))


def _remove(part: Path) -> None:
    if part.is_dir():
        shutil.rmtree(part, ignore_errors=True)
    else:
        part.unlink(missing_ok=True)


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _os_message(path: Path, error: OSError) -> str:
    why = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EFBIG: "the file would be larger than is allowed here",
    }
    reason = why.get(error.errno or 0, error.strerror or str(error))
    return (
        f"{path}: cannot be written, {reason}; choose another place with -o, nothing was left under that name"
    )
