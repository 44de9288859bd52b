"""The models that are loaded and the tabs that are open, with limits in number and in bytes.

Knows nothing of the browser; what a tab does is in ``session``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from streamvid.app.settings import TabSettings, memory_cost
from streamvid.app.turns import Turns
from streamvid.errors import MemoryBudgetError, StreamvidError

if TYPE_CHECKING:
    from streamvid.pipeline import StreamPipeline
    from streamvid.stream import VideoStream

Loader = Callable[[str], "StreamPipeline"]


class Tab(Protocol):
    """What the hub asks of a session."""

    def nbytes(self) -> int: ...

    def num_streams(self) -> int: ...

    @property
    def model(self) -> str: ...


class Hub:
    """Loads each model once and opens streams within the limits.

    Args:
        model: name, file, folder or owner/name of the model that every tab starts with.
        load: makes a pipeline of a name.
        max_streams: streams of all tabs together; a comparison counts as two.
        max_bytes: of all tabs together, streams and kept frames; None is no limit.
        keep_bytes: frames that a stream keeps for saving a clip.
        choose_models: whether a tab may load another model.
    """

    def __init__(
        self,
        model: str,
        load: Loader,
        *,
        max_streams: int = 4,
        max_bytes: int | None = None,
        keep_bytes: int = 64 * 2**20,
        choose_models: bool = True,
    ) -> None:
        if max_streams < 1:
            raise StreamvidError(f"--max-streams must be at least 1, got {max_streams}")
        self.default_model = model
        self.max_streams, self.max_bytes, self.keep_bytes = max_streams, max_bytes, keep_bytes
        self.choose_models = choose_models
        self.turns = Turns()
        self._load = load
        self._pipes: dict[str, StreamPipeline] = {}
        self._tabs: set[Any] = set()
        self._lock = threading.RLock()

    def pipe(self, model: str) -> StreamPipeline:
        """The pipeline of a model, loaded at the first call. Others wait meanwhile."""
        with self._lock:
            if model != self.default_model and not self.choose_models:
                raise StreamvidError("this server shows one model only; run your own to load another")
            if model not in self._pipes:
                self._pipes[model] = self._load(model)
            return self._pipes[model]

    def enter(self, tab: Tab) -> None:
        """A tab was opened."""
        with self._lock:
            self._tabs.add(tab)

    def leave(self, tab: Tab) -> None:
        """A tab went away; a model that no tab shows any more is freed, the default one stays."""
        with self._lock:
            self._tabs.discard(tab)
            self.release()

    def release(self) -> None:
        """Free the models that no tab shows."""
        with self._lock:
            used = {tab.model for tab in self._tabs} | {self.default_model}
            for name in [name for name in self._pipes if name not in used]:
                del self._pipes[name]

    def open(
        self, tab: Tab, model: str, settings: TabSettings, *, replaces: int, **start: Any
    ) -> VideoStream:
        """Open a stream for a tab.

        Args:
            replaces: streams of the tab that are closed when this one runs.
            start: ``image=`` or ``video=`` of ``pipe.stream``.

        Raises:
            StreamvidError: a limit is reached, or a setting cannot work; the tab's streams are as before.
        """
        with self._lock:
            pipe = self.pipe(model)
            self.check(tab, pipe, settings, replaces)
            return self._with_attention(pipe, settings).stream(settings.prompt, **settings.options(), **start)

    def restore(self, model: str, settings: TabSettings, path: Path) -> VideoStream:
        """The stream of a snapshot that takes the place of one with these settings."""
        with self._lock:
            return self._with_attention(self.pipe(model), settings).restore(path)

    @staticmethod
    def _with_attention(pipe: StreamPipeline, settings: TabSettings) -> StreamPipeline:
        """The same weights with the attention backend of the settings."""
        if settings.attention == pipe.attention:
            return pipe
        return type(pipe)(pipe.components, attention=settings.attention, max_streams=pipe.sessions.limit)

    def check(self, tab: Tab, pipe: StreamPipeline, settings: TabSettings, replaces: int) -> None:
        """Raises StreamvidError when one more stream is too many, in number or in bytes."""
        open_streams = sum(each.num_streams() for each in self._tabs) - replaces
        if open_streams >= self.max_streams:
            raise StreamvidError(
                f"{open_streams} streams are open and {self.max_streams} are allowed; close a tab or a comparison, "
                "or start the server with a larger --max-streams"
            )
        if self.max_bytes is None:
            return
        from streamvid.memory.plan import format_bytes

        needed = memory_cost(pipe, settings.memory, settings.codec)["peak"]
        held = sum(each.nbytes() for each in self._tabs if not (each is tab and replaces))
        if held + needed > self.max_bytes:
            raise MemoryBudgetError(
                f"this stream needs about {format_bytes(needed)}, {format_bytes(held)} are in use and "
                f"{format_bytes(self.max_bytes)} are allowed; choose a shorter memory or a codec, or close a tab"
            )

    def num_streams(self) -> int:
        """Streams of all tabs."""
        with self._lock:
            return sum(tab.num_streams() for tab in self._tabs)

    def nbytes(self) -> int:
        """Bytes of all tabs."""
        with self._lock:
            return sum(tab.nbytes() for tab in self._tabs)

    def close(self) -> None:
        """Close every tab."""
        for tab in list(self._tabs):
            tab.close()
