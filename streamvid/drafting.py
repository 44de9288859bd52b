"""Drafting (SDVG): a cheap model proposes each chunk, a router looks at it, an expensive model stands behind.

For every chunk but the first of a scene: the drafter samples it, it is decoded and scored; an accepted
draft becomes the chunk, and the target only runs its context pass on it; a rejected one is sampled again by
the target from the same noise. Whoever made the chunk, both models commit the same latents, so both always
share one past.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.memory.spec import build
from streamvid.noise import Noise
from streamvid.output import VideoChunk
from streamvid.pipeline import StreamPipeline
from streamvid.prompts import Receipt
from streamvid.routers import ROUTERS, Router
from streamvid.stepcache.types import ChunkInfo, Denoiser
from streamvid.stream import VideoStream
from streamvid.transitions import apply_change

VERDICTS = ("first", "accepted", "rejected")


class DraftedPipeline:
    """Two models that are used as one: has what clips and streams need of a ``StreamPipeline``.

    Args:
        target: the model whose quality is wanted.
        drafter: the cheap model; same latent space and chunk length.
        router: text form (``"quality:threshold=0.2"``) of :data:`streamvid.routers.ROUTERS`.

    Raises:
        StreamvidError: the two do not share a latent space, or the router is unknown or cannot run here.
    """

    def __init__(self, target: StreamPipeline, drafter: StreamPipeline, router: str = "quality") -> None:
        self.target, self.drafter, self.router = target, drafter, router
        for what, ours, theirs in (
            ("latent channels", target.model.geometry.out_channels, drafter.model.geometry.out_channels),
            ("latent frames a chunk", target.config.chunk_latents, drafter.config.chunk_latents),
            ("spatial scale", target.config.vae_scale_spatial, drafter.config.vae_scale_spatial),
            ("temporal scale", target.config.vae_scale_temporal, drafter.config.vae_scale_temporal),
            ("first chunk", target.config.independent_first_frame, drafter.config.independent_first_frame),
        ):
            if ours != theirs:
                raise StreamvidError(f"drafter and target differ in {what}: {theirs} and {ours}")
        if target.config.joint_window or drafter.config.joint_window:
            raise StreamvidError("a joint window has no chunk of its own to draft; use another checkpoint")
        self._router()
        self.config = target.config

    def _router(self) -> Router:
        try:
            return build(self.router, ROUTERS, "router")
        except StreamvidError:
            raise
        except ValueError as error:
            raise StreamvidError(str(error)) from None

    def stream(self, prompt: str, **options: Any) -> DraftedStream:
        """Open a drafted stream at frame 0; options as for ``StreamPipeline.stream``, used for both models."""
        for name, value in (("output_type", "latent"), ("fuse_context", True)):
            if options.get(name) == value:
                raise StreamvidError(
                    f"a drafted stream decodes every draft at once; leave out {name}={value}"
                )
        if options.get("ahead"):
            raise StreamvidError("a drafted stream cannot run ahead of its reader; leave out ahead")
        target = self.target.stream(prompt, **options)
        try:
            shared = options | {"output_type": "latent", "seed": target.seed, "num_frames": None}
            drafter = self.drafter.stream(prompt, **shared)
        except BaseException:
            target.close()
            raise
        return DraftedStream(target, drafter, self._router())


class DraftedStream:
    """A target's stream whose chunks are drafted; reads and is controlled like a ``VideoStream``."""

    def __init__(self, target: VideoStream, drafter: VideoStream, router: Router) -> None:
        self._target, self._drafter = target, drafter
        decoder = PeekingDecoder(target._state.decoder)
        target._state.decoder = decoder
        self._sampler = DraftingSampler(target._sampler, drafter, decoder, router, lambda: target._state.text)
        target._sampler = self._sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._target)

    def __next__(self) -> Any:
        return next(self._target)

    def __enter__(self) -> DraftedStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def chunks(self) -> Iterator[VideoChunk]:
        """As ``VideoStream.chunks``."""
        return self._target.chunks()

    def set_prompt(self, text: str, transition: str = "cross", **place: Any) -> Receipt:
        """As ``VideoStream.set_prompt``, for both models at the same chunk."""
        receipt = self._target.set_prompt(text, transition, **place)
        self._drafter.set_prompt(text, transition, at_chunk=receipt.chunk)
        return receipt

    def cut(self, text: str, **place: Any) -> Receipt:
        """As ``VideoStream.cut``; the first chunk of the new scene is the target's."""
        receipt = self._target.cut(text, **place)
        self._drafter.cut(text, at_chunk=receipt.chunk)
        return receipt

    def reset(self) -> None:
        """As ``VideoStream.reset``."""
        self._target.reset()
        self._drafter.reset()

    def snapshot(self, path: str) -> int:
        """Not for drafted streams."""
        raise StreamvidError("a drafted stream cannot be saved; save a stream of the target alone")

    def stats(self) -> dict[str, Any]:
        """The target's statistics, and ``drafting``: chunks by verdict, share accepted, the drafter's step cache."""
        counts = self._sampler.counts
        judged = counts["accepted"] + counts["rejected"]
        drafting = {
            **counts,
            "acceptance": counts["accepted"] / judged if judged else None,
            "last_score": self._sampler.last_score,
        }
        return self._target.stats() | {"drafting": drafting}

    def close(self) -> None:
        """Free both models' streams."""
        self._drafter.close()
        self._target.close()


class PeekingDecoder:
    """A decoder that can show what a chunk would look like before it is decided on."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._before: Any = None
        self._shown: tuple[Tensor, Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def peek(self, latents: Tensor) -> Tensor:
        """Pictures of ``latents`` as the next chunk; what was peeked at before is undone."""
        if self._shown is not None and self._shown[0] is latents:
            return self._shown[1]
        self.forget()
        self._before = self._inner.state_dict()
        self._shown = (latents, self._inner.decode_chunk(latents))
        return self._shown[1]

    def forget(self) -> None:
        """Undo a peek."""
        if self._shown is not None:
            self._inner.load_state_dict(self._before)
            self._before = self._shown = None

    def decode_chunk(self, latents: Tensor) -> Tensor:
        """The pictures of the next chunk: those peeked at, if it is that one."""
        frames = self.peek(latents)
        self._before = self._shown = None
        return frames


class DraftingSampler:
    """Stands where the target's sampler stood: drafts, judges, and falls back to it."""

    def __init__(
        self,
        target: Any,
        drafter: VideoStream,
        decoder: PeekingDecoder,
        router: Router,
        prompt: Callable[[], str],
    ) -> None:
        self._target, self._drafter, self._decoder = target, drafter, decoder
        self._router, self._prompt = router, prompt
        self.counts = dict.fromkeys(VERDICTS, 0)
        self.last_score: float | None = None

    def sample_chunk(
        self, denoise: Denoiser, chunk: ChunkInfo, noise: Noise, shape: Sequence[int], **rest: Any
    ) -> Tensor:
        """Clean latents of one chunk, drafted or not; see ``Sampler.sample_chunk``."""
        drafter, state, engine = self._drafter, self._drafter._state, self._drafter._engine
        engine.finish(state)
        apply_change(state, drafter._queue.begin(state.at), engine)
        plan = drafter._rule.plan(state.at)
        engine.begin(state, plan)
        try:
            latents = None
            if chunk.kind != "first":
                latents = self._draft(drafter._denoise(plan, fused=False))
            verdict = "first" if chunk.kind == "first" else "rejected" if latents is None else "accepted"
            if latents is None:
                latents = self._target.sample_chunk(denoise, chunk, noise, shape, **rest)
            else:
                rest["step_cache"].on_chunk_start(chunk)
                rest["step_cache"].on_chunk_end(chunk, latents)
            frames = self._decoder.peek(latents)[0]
        except BaseException:
            self._decoder.forget()
            engine.abort(state)
            raise
        state.advance(plan, latents, engine.reach(state))
        self._router.accepted(frames)
        self.counts[verdict] += 1
        return latents

    def _draft(self, latents: Tensor) -> Tensor | None:
        """The draft if the router accepts it."""
        frames = self._decoder.peek(latents)[0]
        score = self._router.score(frames, self._prompt())
        self.last_score = score if math.isfinite(score) else None
        return latents if score > self._router.threshold else None
