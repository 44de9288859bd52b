"""One picture on the stage: a stream, the frames it has shown, and how far its colours have moved.

Knows nothing of the browser or of other lanes.
"""

from __future__ import annotations

import json
import struct
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from streamvid.errors import StreamvidError

if TYPE_CHECKING:
    from streamvid.output import VideoChunk
    from streamvid.prompts import Receipt
    from streamvid.stream import VideoStream

RAW_PIXELS = 128 * 128
"""Frames up to this many pixels go to the browser uncompressed; larger ones as JPEG."""
JPEG_QUALITY = 90


class Lane:
    """A running stream and its recent past.

    Args:
        stream: the stream; the lane closes it.
        number: 0, or 1 for the right side of a comparison.
        keep_bytes: of frames kept for saving a clip; the oldest go first.
    """

    def __init__(self, stream: VideoStream, number: int, keep_bytes: int) -> None:
        self.stream = stream
        self.number = number
        self.receipts: list[Receipt] = []
        self.sent = 0
        """Frames sent to the browser since the stream was opened."""
        self._keep_bytes = keep_bytes
        self._kept: deque[np.ndarray] = deque()
        self._kept_bytes = 0
        self._chunks = stream.chunks()
        self._reference: np.ndarray | None = None
        self._changed = False

    def make(self) -> tuple[VideoChunk, float]:
        """The next chunk, and the seconds it took. Raises StopIteration when the stream has ended."""
        start = time.perf_counter()
        chunk = next(self._chunks)
        seconds = time.perf_counter() - start
        self._keep(chunk.frames)
        self.sent += len(chunk)
        return chunk, seconds

    def _keep(self, frames: np.ndarray) -> None:
        self._kept.append(frames)
        self._kept_bytes += frames.nbytes
        while self._kept_bytes > self._keep_bytes and len(self._kept) > 1:
            self._kept_bytes -= self._kept.popleft().nbytes

    def forget(self) -> None:
        """The stream starts again at frame 0: nothing of the past can be saved any more."""
        self._kept.clear()
        self._kept_bytes = self.sent = 0
        self._reference = None
        self.receipts.clear()
        self._chunks = self.stream.chunks()

    def frames(self, last: int | None) -> np.ndarray:
        """The newest ``last`` frames (None: all that are kept), ``[n, H, W, 3]`` uint8."""
        parts = list(self._kept)
        if not parts:
            raise StreamvidError("no frame has been made yet; press play first")
        frames = np.concatenate(parts)
        return frames if last is None else frames[-last:]

    @property
    def kept_frames(self) -> int:
        """Frames that a saved clip can have."""
        return sum(len(part) for part in list(self._kept))

    def drift(self, chunk: VideoChunk) -> float:
        """Distance of the chunk's mean colour from that of the scene's first chunk, in 8-bit steps.

        A scene begins with the stream, and with the chunk after a change of prompt: in the chunk of the change itself
        colours still move on purpose.
        """
        colour = chunk.frames.mean(axis=(0, 1, 2))
        if self._reference is None or self._changed or chunk.transition is not None:
            self._reference = colour
        self._changed = chunk.transition is not None
        return float(np.linalg.norm(colour - self._reference))

    def nbytes(self) -> int:
        """Bytes of the stream and of the kept frames."""
        return self.stream.nbytes() + self._kept_bytes

    def close(self) -> None:
        """Free everything."""
        self.stream.close()
        self._kept.clear()
        self._kept_bytes = 0

    def snapshot(self, path: Path) -> int:
        """Write the stream's state. Returns the bytes of the file."""
        return self.stream.snapshot(str(path))


def pack(header: dict[str, Any], frames: np.ndarray) -> bytes:
    """A chunk as one binary message: uint32 length, JSON header, then frames.

    Small frames are raw RGB. Larger ones are JPEG, each behind a uint32 with its length.
    """
    count, height, width, _ = frames.shape
    raw = height * width <= RAW_PIXELS
    header |= {"count": count, "height": height, "width": width, "encoding": "rgb" if raw else "jpeg"}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)  # pictures start on a multiple of four
    parts = [struct.pack("<I", len(text)), text]
    if raw:
        parts.append(np.ascontiguousarray(frames).tobytes())
    else:
        for frame in frames:
            data = _jpeg(frame)
            parts += [struct.pack("<I", len(data)), data]
    return b"".join(parts)


def _jpeg(frame: np.ndarray) -> bytes:
    import cv2

    done, data = cv2.imencode(".jpg", frame[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    assert done, "a uint8 picture of three channels can always be encoded"
    return data.tobytes()


def write_mp4(path: Path, lanes: list[Lane], last: int | None) -> int:
    """Write the kept frames as MP4, lanes side by side. Returns the number of frames."""
    from streamvid.video_io import VideoWriter

    if not lanes:
        raise StreamvidError("no stream is open; start one first")
    clips = [lane.frames(last) for lane in lanes]
    count = min(len(clip) for clip in clips)
    pictures = np.concatenate([clip[-count:] for clip in clips], axis=2)
    with VideoWriter(path, fps=lanes[0].stream.settings["fps"]) as writer:
        for picture in pictures:
            writer.add(picture)
    return count
