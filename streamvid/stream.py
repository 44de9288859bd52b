"""The stream: prompt in, frames out, for as long as they are read.

Pull-based: a chunk is made when its first frame is asked for, so nothing runs ahead of a reader, nothing depends on
timing, and a reader that stops costs nothing. Its context pass is put off until the next chunk is asked for: frames
leave before it. With ``ahead=1`` or ``2`` a thread makes that many chunks in advance, and no more.

Threads: a frame goes to one reader, however many there are; ``set_prompt``, ``cut``, ``reset``, ``pause``, ``resume``,
``stats``, ``snapshot``, ``close`` may be called from others. Knows nothing of files, checkpoints or how attention is
computed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from streamvid.engine import Engine
from streamvid.errors import StreamvidError
from streamvid.meter import Clock, Meter
from streamvid.noise import CounterNoise
from streamvid.options import StreamOptions
from streamvid.output import VideoChunk, convert
from streamvid.prompts import PromptQueue, Receipt, Transition
from streamvid.sampler import StepCallback
from streamvid.starts import Start
from streamvid.state import StreamState
from streamvid.stepcache.types import ChunkInfo
from streamvid.timeline import ChunkPlan, ChunkRule
from streamvid.transitions import apply_change

if TYPE_CHECKING:
    from streamvid.pipeline import StreamPipeline


class VideoStream:
    """An endless iterator over frames; ``num_frames`` ends it. Made by ``StreamPipeline.stream``.

    Use as a context manager, or call ``close``; dropping the last reference closes it too.
    """

    def __init__(
        self,
        pipe: StreamPipeline,
        options: StreamOptions,
        *,
        engine: Engine,
        sampler: Any,
        state: StreamState,
        rule: ChunkRule,
        grid: tuple[int, int],
        start: Start,
        settings: dict[str, Any],
    ) -> None:
        self.options = options
        self.settings = settings
        """What this stream really runs with, for printing and for keeping with results."""
        self.seed = options.seed
        self._pipe, self._engine, self._sampler, self._state, self._rule = pipe, engine, sampler, state, rule
        self.on_step: StepCallback | None = None
        """Called after each denoising step; see ``sampler.StepCallback``."""
        self._start = start
        self._shape = (engine.model.geometry.out_channels, *grid)
        self._fuses = (options.fuse_context or state.step_cache.fuses_context) and engine.fuses(state)
        self._noise = CounterNoise([options.seed])
        self._queue = PromptQueue(rule, state.at, engine.cut_restarts(state))
        self._meter = Meter()
        self._unread: list[VideoChunk] = []
        self._lock = threading.RLock()
        self._running = threading.Event()
        self._running.set()
        self._paused_by: int | None = None
        self._closed = self._damaged = False
        self._busy: int | None = None
        """The thread that is making a chunk."""
        self._maker: Any = None
        pipe.sessions.enter(self)
        self.prefetch(options.ahead)

    def prefetch(self, chunks: int) -> None:
        """Have a thread make up to ``chunks`` chunks (0 to 2) in advance of the reader; 0 ends it."""
        self._check_open()
        if chunks not in (0, 1, 2):
            raise StreamvidError(f"ahead must be 0, 1 or 2 chunks, got {chunks!r}")
        if self._maker is not None:
            self._maker.stop()
            self._maker = None
        if chunks:
            from streamvid.ahead import Ahead

            self._maker = Ahead(self, chunks)

    # ---- one chunk, in the order in which it happens ------------------------------------------------------------

    @torch.no_grad()
    def _make_chunk(self) -> VideoChunk:
        """Make the next chunk. Whatever stops it half-way leaves the stream as it was before."""
        state, clock, before = self._state, Clock(), self._passes()
        change = self._queue.begin(state.at)
        given = self._start.latents(state.at.chunk)
        steady = change is None and state.blend is None and given is None
        fused = self._fuses and steady and state.owed is not None
        if not fused:
            try:
                self._engine.finish(state)
            except BaseException:
                self._queue.put_back(state.at, change)
                raise
        clock.lap("context")
        apply_change(state, change, self._engine)
        plan = self._rule.plan(state.at)
        clock.lap("change")
        if not fused:
            self._engine.begin(state, plan)
        latents = self._denoise(plan, fused=fused) if given is None else given
        clock.lap("denoise")
        output = convert(self._decode(latents), self.options.output_type)
        clock.lap("decode")
        state.advance(plan, latents, self._engine.reach(state))
        return VideoChunk(
            index=plan.index,
            start_frame=plan.start_latent - self._start.hidden if state.decoder is None else plan.start_frame,
            frames=output,
            start_latent=plan.start_latent,
            num_latents=plan.num_latents,
            prompt=state.text,
            transition=None if change is None else change.receipt.transition,
            seconds=clock.seconds,
            steps={name: count - before[name] for name, count in self._passes().items()},
            memory_bytes=sum(cache.report().total for cache in state.caches()),
        )

    def _passes(self) -> dict[str, int]:
        """Transformer passes so far."""
        counts = self._state.step_cache.accounting
        return {"computed": counts.run, "skipped": counts.skipped, "context": self._engine.passes}

    def _denoise(self, plan: ChunkPlan, *, fused: bool) -> Tensor:
        """Noise to clean latents ``[1, f, c, h, w]``; ``fused``: with the context pass that is owed."""
        state, engine = self._state, self._engine
        info = ChunkInfo(
            index=plan.index,
            start_latent=plan.start_latent,
            num_latents=plan.num_latents,
            kind="first" if plan.first else "normal",
        )
        latents: Tensor
        shape, model = (1, plan.num_latents, *self._shape), engine.model
        common: dict[str, Any] = {"device": model.device, "dtype": model.dtype, "callback": self.on_step}
        try:
            if state.rolling is not None:
                joint = engine.joint(state)
                latents = self._sampler.sample_chunk(
                    joint, info, self._noise, shape, state=state.rolling, **common
                )
                engine.begin(state, plan)
                return latents
            rides = engine.fused(state) if fused else None
            denoise = engine.denoiser(state)
            latents = self._sampler.sample_chunk(
                denoise, info, self._noise, shape, step_cache=state.step_cache, fused=rides, **common
            )
            return latents
        except BaseException:
            engine.abort(state)
            raise

    def _decode(self, latents: Tensor) -> Tensor:
        """Frames ``[n, 3, H, W]`` in 0..1; latents ``[f, c, h, w]`` as they are when they are the output."""
        decoder = self._state.decoder
        if decoder is None:
            return latents[0]
        try:
            frames: Tensor = decoder.decode_chunk(latents)[0]
            return frames
        except BaseException:
            self._engine.abort(self._state)
            self._damaged = True  # some of the decoder's layers have seen the chunk and some have not
            raise

    # ---- reading ------------------------------------------------------------------------------------------------

    def __iter__(self) -> VideoStream:
        return self

    def __next__(self) -> Any:
        """The next frame, in the form of ``output_type``."""
        return self._take(whole=False).frames[0]

    def chunks(self) -> Iterator[VideoChunk]:
        """Blocks of frames with their metadata: what is unread of the current chunk, then chunk by chunk."""
        while True:
            try:
                chunk = self._take(whole=True)
            except StopIteration:
                return
            yield chunk

    def _take(self, *, whole: bool) -> VideoChunk:
        """The oldest unread chunk, of which all frames or the first one are read now."""
        while True:
            chunk = self._next_unread()
            with self._lock:
                if (
                    self._unread and self._unread[0] is chunk
                ):  # else another reader had it, or a reset dropped it
                    self._unread[:1] = [] if whole or len(chunk) == 1 else [chunk.after(1)]
                    self._meter.delivered(len(chunk) if whole else 1)
                    return chunk

    def _next_unread(self) -> VideoChunk:
        """The oldest chunk with unread frames; makes one when there is none."""
        while True:
            self._wait_while_paused()
            with self._lock:
                if self._unread:
                    return self._unread[0]
                ended = self._closed or self._ended()
                if not ended and self._maker is None:
                    self._unread.append(self._produce())
                    continue
            if ended:
                self.close()  # outside the lock: the thread that it ends may be waiting for it
                raise StopIteration
            self._maker.wait()

    def _produce(self) -> VideoChunk:
        """Make a chunk and cut it to ``num_frames``. The caller holds the lock."""
        self._check_open()
        if self._damaged:
            raise StreamvidError("decoding was stopped half-way through a chunk; call reset() to start again")
        self._check_idle("read on")
        self._busy = threading.get_ident()
        try:
            chunk = self._make_chunk()
            while chunk.start_frame < 0:  # frames of a clip that is only gone on from
                chunk = self._make_chunk()
        finally:
            self._busy = None
        self._meter.made(chunk)
        limit = self._limit()
        if limit is not None and chunk.start_frame + len(chunk) > limit:
            chunk = chunk.head(limit - chunk.start_frame)
        return chunk

    def _limit(self) -> int | None:
        """Frames after which the stream ends, in the unit of its output."""
        count = self.options.num_frames
        if count is None or self._state.decoder is not None:
            return count
        return self._rule.latents_for(count)

    def _ended(self) -> bool:
        """Whether every chunk that ``num_frames`` needs has been made."""
        limit = self._limit()
        at = self._state.at
        return limit is not None and (at.latent if self._state.decoder is None else at.frame) >= limit

    def _wait_while_paused(self) -> None:
        while not self._running.is_set() and not self._closed:
            if self._paused_by == threading.get_ident():
                raise StreamvidError("the stream was paused by this thread; call resume() before reading on")
            self._running.wait(0.2)

    # ---- control ------------------------------------------------------------------------------------------------

    def set_prompt(
        self,
        text: str,
        transition: str = "cross",
        *,
        at_frame: int | None = None,
        at_chunk: int | None = None,
    ) -> Receipt:
        """Change the prompt at the next chunk that has not begun, or at the first one at or after the given place.

        Args:
            text: the new prompt.
            transition: what happens to the past; see ``prompts.TRANSITIONS``.
            at_frame: pixel frame, counted over the whole stream.
            at_chunk: chunk index.

        Returns:
            A receipt that names the chunk and its first frame, and later tells whether it was applied.
        """
        return self._change(text, Transition.parse(transition), at_frame, at_chunk)

    def cut(self, text: str, *, at_frame: int | None = None, at_chunk: int | None = None) -> Receipt:
        """A new scene: memory and decoder start afresh with ``text``, so nothing of the old scene is left.

        Frame and chunk numbers go on, and so does the noise. The first chunk of a scene is a few frames shorter. A
        memory policy may make the cut its own way and keep its history across it (``infinity_rope``).
        """
        return self._change(text, None, at_frame, at_chunk)

    def _change(self, text: str, how: Transition | None, at_frame: Any, at_chunk: Any) -> Receipt:
        self._check_open()
        if not isinstance(text, str):
            raise StreamvidError(f"a prompt must be a text, got {type(text).__name__}")
        return self._queue.put(text, how, at_frame=at_frame, at_chunk=at_chunk)

    @torch.no_grad()
    def reset(self) -> None:
        """Start again at frame 0 with the current prompt and seed. Unread frames and waiting changes are dropped."""
        self._check_open()
        with self._lock:
            self._check_idle("reset")
            self._unread.clear()
            self._damaged = False
            self._engine.reset(self._state, self._start.place)
            self._queue.restart(self._state.at)
            self._meter = Meter()

    def pause(self) -> None:
        """Reading waits until ``resume``. The thread that paused cannot wait for itself: reading there is an error."""
        self._paused_by = threading.get_ident()
        self._running.clear()

    def resume(self) -> None:
        """Go on after ``pause``."""
        self._paused_by = None
        self._running.set()

    def snapshot(self, path: str) -> int:
        """Write the whole state, unread frames included, so that ``pipe.restore(path)`` goes on bit for bit.

        Returns the bytes of the file. Raises StreamvidError when it cannot be written; nothing is left then.
        """
        from streamvid.resume import save_stream

        self._check_open()
        with self._lock, torch.no_grad():
            self._check_idle("snapshot")
            return save_stream(path, self)

    def close(self) -> None:
        """Free everything the stream holds. A second call does nothing."""
        self._check_idle("close")
        self._closed = True
        self._running.set()
        if self._maker is not None:
            self._maker.stop()
        with self._lock:
            self._unread.clear()
            self._queue.drop()
            self._state = None  # type: ignore[assignment]
        self._pipe.sessions.leave(self)

    def _check_idle(self, what: str) -> None:
        if self._busy == threading.get_ident():
            raise StreamvidError(
                f"a step callback cannot {what} the stream that calls it; raise an exception there to stop the chunk"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise StreamvidError("the stream is closed; open another with pipe.stream(...)")

    def __enter__(self) -> VideoStream:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_maker") and not self._closed:
            with contextlib.suppress(Exception):  # the interpreter may be half gone
                self.close()

    # ---- looking ------------------------------------------------------------------------------------------------

    @property
    def prompt(self) -> str:
        """The prompt of the chunk made last."""
        self._check_open()
        return self._state.text

    def watch_attention(self, look: Any) -> None:
        """Let ``look`` see each attention call (as ``memory.mass.RegionMass`` does); None ends it."""
        self._check_open()
        self._state.sides["cond"].cache.watch = look

    def nbytes(self) -> int:
        """Bytes of tensors that the stream holds."""
        return 0 if self._closed else self._state.nbytes()

    def stats(self) -> dict[str, Any]:
        """Where the stream is and what it costs: JSON-ready."""
        self._check_open()
        with self._lock:
            return {
                **self._state.report(),
                "seed": self.seed,
                "waiting": [vars(change.receipt).copy() for change in self._queue.waiting()],
                "paused": not self._running.is_set(),
                "context_passes": self._engine.passes,
                **self._meter.report(),
            }
