"""One clip from a request to a finished file, written as its frames arrive. Knows no command line.

Bytes do not grow with length: a frame is encoded and forgotten.
"""

from __future__ import annotations

import dataclasses
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamvid.errors import StreamvidError
from streamvid.memory.spec import nearest
from streamvid.options import StreamOptions
from streamvid.prompts import Receipt, Transition
from streamvid.video_io import VideoWriter, check_crf, check_enlarge, check_fps

if TYPE_CHECKING:
    from streamvid.pipeline import StreamPipeline
    from streamvid.stream import VideoStream

Progress = Callable[[int, "VideoStream"], None]
"""Called with the number of frames written so far, after each chunk."""


@dataclass(frozen=True, kw_only=True)
class ClipRequest:
    """What one file is to show."""

    prompt: str
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of ``options.StreamOptions``, ``num_frames`` among them; None there is a file without end."""
    prompt_at: tuple[tuple[int, str], ...] = ()
    """Later prompts with the pixel frame from which each applies (the next chunk boundary)."""
    transition: str = "cross"
    fps: float | None = None
    """None takes the model's own."""
    crf: int = 18
    enlarge: int = 1
    """Whole factor by which the pictures in the file are larger than the frames."""

    def __post_init__(self) -> None:
        options = StreamOptions.make(self.prompt, self.options | {"output_type": "uint8"})
        Transition.parse(self.transition)
        if self.fps is not None:
            check_fps(self.fps)
        check_crf(self.crf)
        check_enlarge(self.enlarge)
        for frame, _ in self.prompt_at:
            if options.num_frames is not None and frame >= options.num_frames:
                raise StreamvidError(
                    f"a prompt at frame {frame} of a clip of {options.num_frames} frames never shows"
                )

    @classmethod
    def from_dict(cls, values: dict[str, Any], defaults: ClipRequest) -> ClipRequest:
        """A request from one line of a batch; what it does not name is taken from ``defaults``.

        Raises StreamvidError on an unknown key, naming the nearest one.
        """
        stream_names = {f.name for f in dataclasses.fields(StreamOptions)} - {
            "prompt",
            "output_type",
            "ahead",
        }
        own = {"prompt", "prompt_at", "transition", "fps", "crf", "enlarge"}
        unknown = [name for name in values if name not in own | stream_names]
        if unknown:
            raise StreamvidError(f"unknown key {unknown[0]!r}{nearest(unknown[0], own | stream_names)}")
        if not isinstance(values.get("prompt"), str) or not values["prompt"].strip():
            raise StreamvidError("needs a prompt that is a text")
        changes = {name: values[name] for name in own & values.keys()}
        if "prompt_at" in changes:
            later = changes["prompt_at"]
            if not isinstance(later, list):
                raise StreamvidError(f"prompt_at must be a list of FRAME:PROMPT texts, got {later!r}")
            changes["prompt_at"] = tuple(parse_prompt_at(text) for text in later)
        options = defaults.options | {name: values[name] for name in stream_names & values.keys()}
        return dataclasses.replace(defaults, options=options, **changes)


def parse_prompt_at(text: str) -> tuple[int, str]:
    """``"60:a blue ball"`` as ``(60, "a blue ball")``."""
    frame, colon, prompt = str(text).partition(":")
    frame = frame.strip()
    if not colon or not frame.isdecimal() or len(frame) > 15 or not prompt.strip():
        raise StreamvidError(f'{text!r} is not FRAME:PROMPT, for example "60:a blue ball"')
    return int(frame), prompt.strip()


def clip_name(prompt: str, seed: int, index: int | None = None) -> str:
    """A file name that two prompts with one beginning do not share, and that any file system takes."""
    words = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60].rstrip("-")
    number = "" if index is None else f"{index:04d}_"
    return f"{number}{words or 'clip'}_seed{seed}.mp4"


def write_clip(
    pipe: StreamPipeline,
    request: ClipRequest,
    path: str | Path,
    *,
    on_start: Callable[[VideoStream], None] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Make a clip and write it to ``path``; the file appears under that name when it is complete.

    A clip without end is completed by KeyboardInterrupt; any other exception leaves no file.

    Returns:
        JSON-ready: ``path``, ``frames``, ``seconds``, ``bytes``, ``settings``, ``receipts``, ``stats``.
    """
    begun = time.perf_counter()
    fps = pipe.config.fps if request.fps is None else request.fps
    writer = VideoWriter(path, fps, crf=request.crf, enlarge=request.enlarge)
    with writer, pipe.stream(request.prompt, **request.options) as stream:
        receipts = [
            stream.set_prompt(text, request.transition, at_frame=frame) for frame, text in request.prompt_at
        ]
        if on_start is not None:
            on_start(stream)
        if progress is not None:
            progress(0, stream)
        stats = _write(stream, writer, progress)
    return {
        "path": str(path),
        "prompt": request.prompt,
        "frames": writer.num_frames,
        "seconds": round(time.perf_counter() - begun, 3),
        "bytes": _size(Path(path), writer.num_frames),
        "settings": stream.settings,
        "receipts": [_receipt(receipt) for receipt in receipts],
        "stats": stats,
    }


def _write(stream: VideoStream, writer: VideoWriter, progress: Progress | None) -> dict[str, Any]:
    stats: dict[str, Any] = {}
    try:
        for chunk in stream.chunks():
            for frame in chunk.frames:
                with _uninterrupted():
                    writer.add(frame)
            stats = stream.stats()
            if progress is not None:
                progress(writer.num_frames, stream)
    except KeyboardInterrupt:
        if stream.options.num_frames is not None or not writer.num_frames:
            raise
    return stats


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the frame is written and counted, so that the count is that of the file."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *event: came.append(event))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
    if came:
        if callable(before):
            before(*came[0])
        else:
            raise KeyboardInterrupt


def _receipt(receipt: Receipt) -> dict[str, Any]:
    return {key: value for key, value in vars(receipt).items() if value is not None}


def _size(path: Path, num_frames: int) -> int:
    from streamvid.video_io import sequence_name

    if path.is_file():
        return path.stat().st_size
    return sum(sequence_name(path, index).stat().st_size for index in range(num_frames))
