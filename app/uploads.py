"""Pictures and clips that a page sends to start from, fitted to the size of the stream.

Knows nothing of requests.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np

from streamvid.errors import StreamvidError
from streamvid.video_io import VideoReader, VideoWriter, read_image

MAX_UPLOAD = 32 * 2**20
"""Bytes of one upload."""
MAX_FRAMES = 161
"""Newest frames of a clip that are kept to start from."""
IMAGES = (".png", ".jpg", ".jpeg", ".webp")
VIDEOS = (".mp4", ".gif", ".webm", ".mov", ".mkv")


def store_start(data: bytes, name: str, folder: Path, size: tuple[int, int]) -> str:
    """Write an upload to ``folder`` as ``start.png`` or ``start.mp4`` of ``size`` (height, width) pixels.

    Returns the kind, ``image`` or ``video``. Raises StreamvidError when it is neither, or cannot be read.
    """
    suffix = Path(name).suffix.lower()
    if suffix not in IMAGES + VIDEOS:
        raise StreamvidError(
            f"{suffix or 'a file without suffix'!r} is not taken, only {', '.join(IMAGES + VIDEOS)}"
        )
    source = folder / f"upload{suffix}"
    source.write_bytes(data)
    try:
        for earlier in folder.glob("start.*"):
            earlier.unlink()
        if suffix in IMAGES:
            from PIL import Image

            Image.fromarray(fit(read_image(source), size)).save(folder / "start.png")
            return "image"
        with VideoReader(source) as reader:
            frames = deque((fit(frame, size) for frame in reader), maxlen=MAX_FRAMES)
        with VideoWriter(folder / "start.mp4", crf=6) as writer:
            for frame in frames:
                writer.add(frame)
        return "video"
    finally:
        source.unlink(missing_ok=True)


def fit(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The middle of a picture ``[h, w, 3]`` in the proportions of ``size``, resized to it."""
    import cv2

    height, width = picture.shape[:2]
    scale = max(size[0] / height, size[1] / width)
    rows, columns = (
        min(side, round(wanted / scale)) for side, wanted in zip((height, width), size, strict=True)
    )
    top, left = (height - rows) // 2, (width - columns) // 2
    part = np.ascontiguousarray(picture[top : top + rows, left : left + columns])
    return cv2.resize(part, size[::-1], interpolation=cv2.INTER_AREA)
