"""Clips of a fixed length within the limits of the hub, for the Gradio page and its API. Knows nothing of Gradio."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from streamvid.app.hub import Hub
from streamvid.app.settings import TabSettings
from streamvid.errors import StreamvidError

if TYPE_CHECKING:
    from streamvid.stream import VideoStream

MAX_FRAMES = 2000
"""Frames of one clip."""


class ClipJob:
    """One clip in the making; to the hub it is a tab like others, so the limits hold for it too."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.stream: VideoStream | None = None

    def num_streams(self) -> int:
        return int(self.stream is not None)

    def nbytes(self) -> int:
        """Bytes of the stream."""
        return self.stream.nbytes() if self.stream is not None else 0

    def close(self) -> None:
        """Free the stream."""
        if self.stream is not None:
            self.stream.close()
            self.stream = None


def make_clip(hub: Hub, settings: TabSettings, num_frames: int, path: Path) -> Iterator[int]:
    """Write a clip of the hub's model to ``path`` (MP4), a chunk at a step; yields the frames written so far.

    An iterator that is closed early leaves no file and no stream. Raises StreamvidError for a limit or a setting.
    """
    from streamvid.video_io import VideoWriter

    if not isinstance(num_frames, int) or not 1 <= num_frames <= MAX_FRAMES:
        raise StreamvidError(f"frames must be a whole number from 1 to {MAX_FRAMES}, got {num_frames!r}")
    job = ClipJob(hub.default_model)
    hub.enter(job)
    try:
        with hub.turns.take():
            job.stream = hub.open(job, job.model, settings, replaces=0, num_frames=num_frames)
        chunks, done = job.stream.chunks(), 0
        with VideoWriter(path, fps=job.stream.settings["fps"]) as writer:
            while done < num_frames:
                with hub.turns.take():
                    chunk = next(chunks)
                for frame in chunk.frames:
                    writer.add(frame)
                done += len(chunk)
                yield done
    finally:
        job.close()
        hub.leave(job)
