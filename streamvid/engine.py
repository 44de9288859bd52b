"""Runs the transformer for one stream: noisy passes, context passes and re-encodings, for every guidance branch.

Holds the model and no state of a stream; that is passed in. Knows nothing of frames, files or who reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from streamvid.config import StreamConfig
from streamvid.errors import StreamvidError
from streamvid.kernels.cross import AnnCA
from streamvid.memory.policy import overrides
from streamvid.prompt import PromptState
from streamvid.rolling import JointDenoiser, joint_denoiser
from streamvid.state import Blend, Side, StreamState
from streamvid.timeline import ChunkPlan, Place
from streamvid.transformer import CausalWan

_WATCHING = ("observe", "refine")
"""Hooks with which a memory policy looks into a pass; it must then be a pass of its own."""


class Engine:
    """The model as streams use it.

    Args:
        model: the causal driver.
        text: ``TextEncoder``, or None when the checkpoint has none.
        config: the stream's configuration.
        condition: ``[1, n, c, h, w]``, what an image-to-video model reads beside latent frame 0, 1, ...; from ``n - 1``
            on it stays the same. None for other models.
        cross: which tokens of a prompt are read; None is all.
    """

    def __init__(
        self,
        model: CausalWan,
        text: Any,
        config: StreamConfig,
        condition: Tensor | None = None,
        cross: AnnCA | None = None,
    ) -> None:
        self.model = model
        self.text = text
        self.config = config
        self.condition = condition
        self.cross = cross
        self.passes = 0
        """Context passes run, re-encodings included."""

    # ---- text ---------------------------------------------------------------------------------------------------

    def encode(self, prompt: str) -> Tensor:
        """Text embedding ``[1, text_len, text_dim]``, rows after the prompt zero."""
        if self.text is None:
            raise StreamvidError(
                "this checkpoint has no text encoder; give one with load(..., text_encoder=FOLDER) (--text-encoder)"
            )
        return self.text.encode([prompt]).to(self.model.device, self.model.dtype)

    def read(self, embeds: Tensor) -> PromptState:
        """What the model's layers take of a text embedding."""
        return self.model.prepare_prompt(embeds, rule=self.cross)

    def set_embeds(self, side: Side, embeds: Tensor) -> None:
        """Make ``embeds`` what a side reads of the text from now on."""
        side.embeds, side.prompt = embeds, self.read(embeds)

    def signature(self, embeds: Tensor) -> Tensor:
        """Prompts as ``[b, heads, head_dim]``: the rows of each after the model's text layers, averaged (SWIFT)."""
        written = embeds.any(dim=-1, keepdim=True)
        written[:, :1] |= ~written.any(dim=1, keepdim=True)  # of an empty prompt, its first row
        hidden = self.model.model.condition_embedder.text_embedder(embeds)
        mean = (hidden * written).sum(1) / written.sum(1)
        return mean.unflatten(-1, (self.model.geometry.heads, self.model.geometry.head_dim))

    # ---- passes -------------------------------------------------------------------------------------------------

    def begin(self, state: StreamState, plan: ChunkPlan) -> None:
        """Open the next chunk in every memory."""
        for cache in state.caches():
            cache.begin_chunk(plan.num_latents)

    def abort(self, state: StreamState) -> None:
        """Leave every memory as it was before the chunk; one that was still owed a context pass is owed it again."""
        for name, side in state.sides.items():
            side.cache.abort()
            if state.owed is not None and name in state.owed.branches:
                side.cache.begin_chunk(state.owed.latents.shape[1])

    def denoiser(self, state: StreamState) -> Callable[..., Tensor]:
        """The stream's model at its current chunk, as samplers call it (``Denoiser``)."""

        def denoise(
            x_t: Tensor,
            timestep: float,
            *,
            branch: str = "cond",
            hooks: Any = None,
            tokens: Tensor | None = None,
        ) -> Tensor:
            side = state.sides[branch]
            condition = self._condition(side, x_t.shape[1])
            return self.model(
                x_t, timestep, side.prompt, side.cache, condition=condition, hooks=hooks, tokens=tokens
            )

        return denoise

    def joint(self, state: StreamState) -> JointDenoiser:
        """The model over a joint window; the chunk that was begun is given up for it and must be begun again."""
        self.abort(state)
        side = state.sides["cond"]
        return joint_denoiser(self.model, side.prompt, side.cache)

    def fused(self, state: StreamState) -> Callable[..., Tensor]:
        """As ``denoiser``, for the first step of a chunk, with the context pass that the chunk before owes in it."""

        def denoise(
            x_t: Tensor,
            timestep: float,
            *,
            branch: str = "cond",
            hooks: Any = None,
            tokens: Tensor | None = None,
        ) -> Tensor:
            assert state.owed is not None and hooks is None and tokens is None
            side, owed = state.sides[branch], state.owed
            count = owed.latents.shape[1]
            flow = self.model.fused_pass(
                owed.latents,
                self.config.context_noise,
                x_t,
                timestep,
                side.prompt,
                side.cache,
                condition=self._condition(side, count),
                next_condition=self._condition(side, x_t.shape[1], after=count),
            )
            self._paid(state, branch)
            self.passes += 1
            return flow

        return denoise

    def finish(self, state: StreamState) -> None:
        """Run the context pass that the last chunk still owes: its clean keys and values enter the memory."""
        while state.owed is not None:
            branch = state.owed.branches[0]
            try:
                self._commit(state.sides[branch], state.owed.latents)
            except BaseException:
                self.abort(state)
                raise
            self._paid(state, branch)

    @contextmanager
    def between_chunks(self, state: StreamState, *, keep_owed: bool) -> Iterator[None]:
        """Every memory idle, as a snapshot needs it.

        The owed context pass is run first. With ``keep_owed`` it stays owed, because fused into the next chunk it
        rounds differently; the chunk in progress is begun anew afterwards (it has no state of its own yet).
        """
        if keep_owed:
            for cache in state.caches():
                cache.abort()
        else:
            self.finish(state)
        try:
            yield
        finally:
            self.abort(state)

    def _paid(self, state: StreamState, branch: str) -> None:
        assert state.owed is not None
        state.owed.branches.remove(branch)
        if not state.owed.branches:
            state.owed = None

    def encode_past(self, side: Side, latents: Tensor, *, skip: int = 0) -> None:
        """Encode clean latents ``[b, f, c, h, w]`` as one chunk of the past; the first ``skip`` only as queries."""
        side.cache.begin_chunk(latents.shape[1], skip=skip)
        try:
            self._commit(side, latents)
        except BaseException:
            side.cache.abort()
            raise

    def _commit(self, side: Side, latents: Tensor) -> None:
        condition = self._condition(side, latents.shape[1])
        self.model.context_pass(
            latents, self.config.context_noise, side.prompt, side.cache, condition=condition
        )
        side.cache.commit()
        self.passes += 1

    def _condition(self, side: Side, count: int, after: int = 0) -> Tensor | None:
        """The condition of ``count`` latent frames, ``after`` frames into the chunk in progress."""
        if self.condition is None:
            return None
        start, last = side.cache.chunk.start + after, self.condition.shape[1] - 1
        return self.condition[:, [min(index, last) for index in range(start, start + count)]]

    # ---- between chunks -----------------------------------------------------------------------------------------

    def reset(self, state: StreamState, place: Place) -> None:
        """Back to the place where the stream began, with the current prompt."""
        for cache in state.caches():
            cache.reset()
        if state.decoder is not None:
            state.decoder.reset()
        if isinstance(state.blend, Blend):
            self.set_embeds(state.sides["cond"], state.blend.target)
        state.step_cache.on_context_change("reset")
        state.at, state.owed, state.blend = place, None, None
        state.recent.clear()
        if state.rolling is not None:
            state.rolling.chunks.clear()

    def fuses(self, state: StreamState) -> bool:
        """Whether a context pass may share a forward with the next chunk's first step, exactly."""
        session = state.step_cache
        if session.needs_block_hooks or "residual" in session.keeps:  # they look inside the first step
            return False
        return all(
            cache.codec is None
            and cache.sparse is None
            and cache.policy.fusable
            and not any(overrides(cache.policy, hook) for hook in _WATCHING)
            for cache in state.caches()
        )

    def cut_restarts(self, state: StreamState) -> bool:
        """Whether a cut forgets the past, rather than the memory policy making it by a gap in time."""
        return not any(overrides(cache.policy, "on_cut") for cache in state.caches())

    def reach(self, state: StreamState) -> int | None:
        """Latent frames whose clean latents a re-encoding of the past may need; None: all."""
        cache = state.sides["cond"].cache
        sizes = [bank.capacity for bank in cache.all_banks()]
        return None if None in sizes else max(sizes)
