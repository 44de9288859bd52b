"""One browser tab: its streams, the thread that makes their chunks, and what the page can do to them.

A chunk is made when the page has shown all but one of those it was sent, so the page always has a chunk in hand, a
prompt is never more than two chunks away, and a tab in the background costs nothing. Knows nothing of sockets:
messages leave through ``emit``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from typing import TYPE_CHECKING, Any

from streamvid.app.hub import Hub
from streamvid.app.lane import Lane, pack
from streamvid.app.settings import TabSettings, check_prompt
from streamvid.app.turns import Turns
from streamvid.errors import StreamvidError

if TYPE_CHECKING:
    from streamvid.output import VideoChunk
    from streamvid.prompts import Receipt

Emit = Callable[["dict[str, Any] | bytes"], None]
MAX_SNAPSHOTS = 6
"""Snapshots a tab keeps; the oldest goes first."""
MAX_PROMPTS = 200
"""Entries of a timeline."""
MAX_FRAME = 1_000_000
"""Largest frame number of a timeline entry."""

FOLDER = "streamvid-tab"
"""Beginning of the name of a tab's temporary folder, before the number of its process."""

log = logging.getLogger(__name__)


def sweep() -> int:
    """Remove the folders that killed servers left behind. Returns how many there were."""
    import psutil

    left = [
        path
        for path in Path(gettempdir()).glob(f"{FOLDER}-*-*")
        if (pid := path.name.removeprefix(f"{FOLDER}-").split("-")[0]).isdigit()
        and not psutil.pid_exists(int(pid))
    ]
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return len(left)


class Session:
    """The streams of one tab. Methods may be called from any thread; ``close`` frees everything.

    Args:
        hub: models and limits.
        emit: takes a JSON-ready message or a packed chunk (``lane.pack``); must not block.
        idle_after: seconds without a word from the page after which the streams are closed.
    """

    def __init__(self, hub: Hub, emit: Emit, *, idle_after: float = 900.0) -> None:
        self.token = secrets.token_urlsafe(16)
        self.model = hub.default_model
        self.settings: TabSettings | None = None
        self.lanes: list[Lane] = []
        self.epoch = 0
        """Counts the beginnings: frames of another epoch are not of the stream that runs."""
        self.folder = Path(mkdtemp(prefix=f"{FOLDER}-{os.getpid()}-"))
        self._hub, self._emit, self._idle_after = hub, emit, idle_after
        self._snapshots: dict[str, dict[str, Any]] = {}
        self._shown: list[int] = []
        self._chunk_frames = 0
        self._playing, self._steps, self._closed = False, 0, False
        self._heard = time.monotonic()
        self._busy = Turns()
        """Held while a chunk is made, and while the streams are changed."""
        self._wake = threading.Condition()
        hub.enter(self)
        self._thread = threading.Thread(target=self._run, name="streamvid-tab", daemon=True)
        self._thread.start()

    # ---- beginning and ending ---------------------------------------------------------------------------------------

    def start(
        self,
        settings: TabSettings,
        *,
        compare: TabSettings | None = None,
        prompts: Sequence[dict[str, Any]] = (),
        **begin: Any,
    ) -> None:
        """Open the stream of these settings, or two, in place of what runs.

        Args:
            compare: settings of a second stream, shown beside the first with the same noise.
            prompts: later prompts: ``{"frame", "prompt", "transition"}``, the last may be ``cut``.
            begin: ``image=`` or ``video=``, see ``streamvid.options``.

        Raises:
            StreamvidError: a setting that cannot work or a limit; what ran goes on.
        """
        wanted = [settings] if compare is None else [settings, compare]
        entries = [_entry(values) for values in prompts]
        if len(entries) > MAX_PROMPTS:
            raise StreamvidError(f"a timeline may have {MAX_PROMPTS} prompts, this one has {len(entries)}")
        with self._busy.take():
            opened: list[Lane] = []
            try:
                for number, each in enumerate(wanted):
                    replaces = len(self.lanes) - len(opened)
                    with self._hub.turns.take():
                        stream = self._hub.open(self, self.model, each, replaces=replaces, **begin)
                    opened.append(Lane(stream, number, self._hub.keep_bytes))
                for lane in opened:
                    for entry in entries:
                        lane.receipts.append(_change(lane, **entry))
            except BaseException:
                for lane in opened:
                    lane.close()
                raise
            self._replace(opened, settings)
            self._announce("started", playing=True)
        self.play()

    def choose(self, model: str) -> None:
        """Use another model from the next ``start`` on. Raises StreamvidError when it cannot be loaded."""
        self._hub.pipe(model)
        with self._busy.take():
            self._replace([], None)
            self.model = model
        self._hub.release()

    def _replace(self, lanes: list[Lane], settings: TabSettings | None) -> None:
        for lane in self.lanes:
            lane.close()
        self.lanes, self.settings = lanes, settings
        self._begin()

    def _begin(self) -> None:
        """A new epoch: nothing of it has been shown yet."""
        self.epoch += 1
        self._shown = [0] * len(self.lanes)
        self._chunk_frames = self._steps = 0

    def _announce(self, kind: str, **more: Any) -> None:
        self._emit(
            {
                "type": kind,
                "epoch": self.epoch,
                "lanes": [lane.stream.settings for lane in self.lanes],
                "settings": self.settings and self.settings.to_dict(),
                **more,
            }
        )

    def close(self) -> None:
        """Free everything. A second call does nothing."""
        with self._wake:
            if self._closed:
                return
            self._closed = True
            self._wake.notify_all()
        with self._busy.take():
            for lane in self.lanes:
                lane.close()
            self.lanes = []
        self._hub.leave(self)
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _due(self) -> bool:
        """Whether a chunk is to be made now."""
        if not self.lanes:
            return False
        if self._steps:
            return True
        waiting = max(lane.sent - shown for lane, shown in zip(self.lanes, self._shown, strict=True))
        return self._playing and waiting <= self._chunk_frames

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._closed and not self._due():
                    self._wake.wait(1.0)
                    if self.lanes and time.monotonic() - self._heard > self._idle_after:
                        break
                if self._closed:
                    return
            with self._busy.take():
                if self._closed:
                    return
                if not self._due():
                    self._retire()
                    continue
                self._guarded_advance()

    def _retire(self) -> None:
        """Close the streams of a page that has said nothing for long; it can start again."""
        if self.lanes and time.monotonic() - self._heard > self._idle_after:
            self._replace([], None)
            self._announce("idle", seconds=self._idle_after)

    def _guarded_advance(self) -> None:
        """Make a chunk of every lane. What goes wrong is told to the page and pauses the tab."""
        self._steps = max(0, self._steps - 1)
        try:
            self._advance()
        except StopIteration:
            self._playing = False
        except Exception as error:  # the outermost layer: the server and the other tabs go on
            self._playing = False
            if not isinstance(error, ValueError):
                log.exception("a chunk could not be made")
            self._emit({"type": "error", "text": f"the stream stopped: {error}"})

    def _advance(self) -> None:
        begun = time.perf_counter()
        made = []
        for lane in self.lanes:
            with self._hub.turns.take():
                made.append((lane, *lane.make()))
        period = time.perf_counter() - begun
        for lane, chunk, seconds in made:
            self._chunk_frames = len(chunk)
            self._emit(pack(self._header(lane, chunk, seconds, period), chunk.frames))

    def _header(self, lane: Lane, chunk: VideoChunk, seconds: float, period: float) -> dict[str, Any]:
        """What the page shows beside the frames of a chunk."""
        stats = lane.stream.stats()
        return {
            "type": "chunk",
            "epoch": self.epoch,
            "lane": lane.number,
            "index": chunk.index,
            "start_frame": chunk.start_frame,
            "start_latent": chunk.start_latent,
            "num_latents": chunk.num_latents,
            "prompt": chunk.prompt,
            "transition": chunk.transition,
            "seconds": chunk.seconds,
            "made_seconds": seconds,
            "period": period,
            "drift": lane.drift(chunk),
            "memory": stats["memory"]["cond"],
            "held": stats["held"],
            "groups": stats["held_by_group"],
            "bytes": stats["bytes"],
            "steps": chunk.steps,
            "compute": stats["step_cache"]["compute_fraction"],
            "kept_frames": lane.kept_frames,
            "receipts": [vars(receipt) for receipt in lane.receipts[-8:]],
        }

    # ---- what the page can do ---------------------------------------------------------------------------------------

    def heard(self) -> None:
        """The page said something: it is not idle."""
        self._heard = time.monotonic()

    def acknowledge(self, epoch: int, lane: int, shown: int) -> None:
        """The page has shown ``shown`` frames of a lane since the epoch began."""
        with self._wake:
            if epoch == self.epoch and 0 <= lane < len(self._shown):
                self._shown[lane] = max(self._shown[lane], shown)
                self._wake.notify_all()

    def play(self) -> None:
        """Make chunks as the page shows them."""
        with self._wake:
            self._playing = True
            self._wake.notify_all()

    def pause(self) -> None:
        """Make no further chunk; one that is being made is finished."""
        with self._wake:
            self._playing, self._steps = False, 0

    def step(self) -> None:
        """Make one chunk, whether paused or not."""
        with self._wake:
            self._steps = min(self._steps + 1, 2)
            self._wake.notify_all()

    def prompt(self, text: str, transition: str = "cross", frame: int | None = None) -> dict[str, Any]:
        """Change the prompt of every lane at the next chunk that has not begun, or the first at or after ``frame``.

        The transition ``cut`` begins a new scene.

        Returns the receipt of the first lane.
        """
        self._check_started()
        entry = _entry({"frame": frame, "prompt": text, "transition": transition})
        receipts = []
        for lane in self.lanes:
            receipt = _change(lane, **entry)
            lane.receipts.append(receipt)
            receipts.append(receipt)
        return vars(receipts[0]).copy()

    def reset(self) -> None:
        """Start again at frame 0 with the current prompt and seed."""
        self._check_started()
        with self._busy.take():
            for lane in self.lanes:
                lane.stream.reset()
                lane.forget()
            self._begin()
            self._announce("started", playing=self._playing)
        self.step()  # so that a paused page shows the beginning

    def snapshot(self) -> dict[str, Any]:
        """Keep the whole state of the streams, to return to. Returns ``{"id", "frame", "bytes"}``."""
        self._check_started()
        with self._busy.take():
            name = secrets.token_hex(4)
            paths = [self.folder / f"{name}-{lane.number}.safetensors" for lane in self.lanes]
            size = sum(lane.snapshot(path) for lane, path in zip(self.lanes, paths, strict=True))
            frame = self.lanes[0].stream.stats()["frame"]
            timeline = self.timeline()
        while len(self._snapshots) >= MAX_SNAPSHOTS:
            oldest = self._snapshots.pop(next(iter(self._snapshots)))
            for path in oldest["paths"]:
                path.unlink(missing_ok=True)
        self._snapshots[name] = {"paths": paths, "settings": self.settings, "model": self.model}
        return {"id": name, "frame": frame, "bytes": size, "prompts": timeline["prompts"]}

    def restore(self, name: str) -> None:
        """Go on from a snapshot, bit for bit. Raises StreamvidError when there is none of this name."""
        kept = self._snapshots.get(name)
        if kept is None or kept["model"] != self.model:
            raise StreamvidError("this snapshot is gone, or was made with another model")
        with self._busy.take():
            streams = [self._hub.restore(self.model, kept["settings"], path) for path in kept["paths"]]
            lanes = [Lane(stream, n, self._hub.keep_bytes) for n, stream in enumerate(streams)]
            self._replace(lanes, kept["settings"])
            self._announce("started", playing=True)
        self.play()

    def timeline(self) -> dict[str, Any]:
        """The prompts of the first lane by frame, with the settings: what ``start`` takes again, JSON-ready."""
        self._check_started()
        assert self.settings is not None
        done = [r for r in self.lanes[0].receipts if r.status in ("applied", "waiting")]
        prompts = [{"frame": r.frame, "prompt": r.text, "transition": r.transition} for r in done]
        return {"settings": self.settings.to_dict(), "prompts": prompts}

    def _check_started(self) -> None:
        if not self.lanes:
            raise StreamvidError("no stream is open; start one first")

    # ---- looking ----------------------------------------------------------------------------------------------------

    def num_streams(self) -> int:
        return len(self.lanes)

    def nbytes(self) -> int:
        """Bytes of the streams and of the frames kept for saving."""
        total = 0
        for lane in list(self.lanes):
            with contextlib.suppress(AttributeError):  # closed between the look and the count
                total += lane.nbytes()
        return total


def _entry(values: Any) -> dict[str, Any]:
    """One prompt of a timeline, checked."""
    from streamvid.prompts import Transition

    if not isinstance(values, dict) or set(values) - {"frame", "prompt", "transition"}:
        raise StreamvidError("a timeline entry has frame, prompt and transition")
    frame, transition = values.get("frame"), values.get("transition", "cross")
    if frame is not None and (
        isinstance(frame, bool) or not isinstance(frame, int) or not 0 <= frame <= MAX_FRAME
    ):
        raise StreamvidError(f"frame must be a whole number from 0 to {MAX_FRAME}, got {frame!r}")
    if transition != "cut":
        Transition.parse(str(transition))
    return {"frame": frame, "text": check_prompt(values.get("prompt")), "transition": transition}


def _change(lane: Lane, *, frame: int | None, text: str, transition: str) -> Receipt:
    if transition == "cut":
        return lane.stream.cut(text, at_frame=frame)
    return lane.stream.set_prompt(text, transition, at_frame=frame)
