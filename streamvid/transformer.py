"""The causal driver: runs the blocks of diffusers' Wan transformer on one chunk, self-attention answered by the cache.

The model keeps its weights, LoRA layers and quantised linears; this file only decides what is computed. It differs from
the model's own forward in four ways: timesteps are per frame, rotary embedding and history belong to the cache,
cross-attention keys and values come ready from a `PromptState`, and the arithmetic follows the Self-Forcing reference
(sinusoid in float64, RMS statistics in float32, the rest in the compute dtype). Holds no state of a stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from streamvid.block import (
    compiled,
    cross,
    enter,
    feed_forward,
    gated,
    layer_norm,
    leave,
    modulated,
    project,
    rms_norm,
    split,
)
from streamvid.errors import StreamvidError
from streamvid.geometry import ModelGeometry
from streamvid.kernels.cross import AnnCA
from streamvid.memory.cache import KVCache
from streamvid.memory.fused import FusedPass
from streamvid.modulation import Modulation, Timestep, TimeTables
from streamvid.prompt import PromptState

if TYPE_CHECKING:
    from streamvid.stepcache.types import BlockHooks


def _module(hooks: BlockHooks, layer: int, name: str, run: Callable[[], Tensor]) -> Tensor:
    """A module of a block under the hooks of a step cache."""
    replacement = hooks.before_module(layer, name)
    if replacement is not None:
        return replacement
    out = run()
    replacement = hooks.after_module(layer, name, out)
    return out if replacement is None else replacement


def _equal_rows(embeds: Tensor) -> int:
    """How many rows at the end of ``[b, n, dim]`` are zero in every item, 1 if none.

    Only on a CPU: there, fewer keys are less time; on a GPU a call with a bias leaves the fastest kernels, and shapes
    that change with the prompt would be compiled anew.
    """
    if embeds.device.type != "cpu":
        return 1
    written = embeds.any(-1).any(0).nonzero()
    return max(1, embeds.shape[1] - (int(written[-1]) + 1 if len(written) else 0))


class CausalWan:
    """A diffusers ``WanTransformer3DModel`` driven chunk by chunk.

    Args:
        model: the transformer, text-to-video or image-to-video, of any size.
        compile: run the dense parts of the blocks through ``torch.compile`` (see `block.compiled`). Passes of a step
            cache that looks into blocks run as written.

    Attributes:
        geometry: its sizes.
    """

    def __init__(self, model: Any, *, compile: bool = False) -> None:
        self.model = model
        self.geometry = ModelGeometry.from_config(model.config)
        self.compile = compile
        self._times = TimeTables(model)
        self._enter: Callable[..., Any] = enter
        self._leave: Callable[..., Any] = leave
        if compile:
            self._enter, self._leave = compiled(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype: that of the patch embedding."""
        return self.model.patch_embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.model.patch_embedding.weight.device

    def weights_changed(self) -> None:
        """Forget everything derived from the weights (after loading or scaling a LoRA)."""
        self._times.clear()

    @torch.no_grad()
    def prepare_prompt(
        self, text_embeds: Tensor, image_embeds: Tensor | None = None, *, rule: AnnCA | None = None
    ) -> PromptState:
        """Text MLP and the cross-attention keys and values of all layers.

        Args:
            text_embeds: ``[b, text_len, text_dim]``; all rows are attended to, zero rows too, as in the reference.
            image_embeds: ``[b, image_len, image_dim]`` for models that cross-attend to an image.
            rule: chooses the text tokens that are read; None reads all.

        Raises:
            StreamvidError: the widths are not the model's, or the image embedding is missing or not taken.
        """
        if text_embeds.ndim != 3 or text_embeds.shape[-1] != self.geometry.text_dim:
            raise StreamvidError(
                f"text embeddings must be [b, text_len, {self.geometry.text_dim}], got {tuple(text_embeds.shape)}"
            )
        if (image_embeds is None) != (self.geometry.image_dim is None):
            raise StreamvidError(
                "this model takes no image embedding"
                if self.geometry.image_dim is None
                else f"this model needs image embeddings [b, n, {self.geometry.image_dim}]"
            )
        embedder, blocks = self.model.condition_embedder, self.model.blocks
        text = embedder.text_embedder(text_embeds.to(self.device, self.dtype))
        # A compiled block would be compiled anew for every number of words.
        equal = 1 if self.compile else _equal_rows(text_embeds)
        pairs = [self._text_kv(block.attn2, text) for block in blocks]
        k, v = zip(*pairs, strict=True)
        if image_embeds is None:
            return PromptState(k, v, equal_rows=equal, rule=rule)
        image = embedder.image_embedder(image_embeds.to(self.device, self.dtype))
        image_k, image_v = zip(*[self._image_kv(block.attn2, image) for block in blocks], strict=True)
        return PromptState(k, v, image_k, image_v, equal, rule)

    @torch.no_grad()
    def __call__(
        self,
        x: Tensor,
        timestep: Timestep,
        prompt: PromptState,
        cache: KVCache,
        *,
        condition: Tensor | None = None,
        hooks: BlockHooks | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """One pass over the cache's current chunk.

        Args:
            x: ``[b, f, c, h, w]`` latents, noisy or (after ``cache.begin_context()``) clean.
            timestep: 0..1000, not rounded: a number, ``[f]`` or ``[b, f]``.
            prompt: from `prepare_prompt`, of this batch or of one item for all.
            cache: with a chunk of ``f`` frames begun.
            condition: ``[b, f, condition_channels, h, w]`` of image-to-video models, concatenated to the channels.
            hooks: of a step cache; None is the plain path.
            tokens: int64 ``[n]``: recompute only these tokens of the chunk (raster order).

        Returns:
            The flow (noise - x0) ``[b, f, out_channels, h, w]``; with ``tokens``, zero at the other tokens.
        """
        h, modulation = self._embed(x, timestep, condition, tokens)
        for layer in range(self.geometry.layers):
            h = self._block(layer, h, modulation, prompt, cache, hooks, tokens)
        return self._head(h, modulation, x, tokens)

    @torch.no_grad()
    def context_pass(
        self,
        x0: Tensor,
        timestep: Timestep,
        prompt: PromptState,
        cache: KVCache,
        *,
        condition: Tensor | None = None,
    ) -> None:
        """Give the cache the keys and values of the clean latents ``x0 [b, f, c, h, w]``; ``cache.commit()`` follows.

        Skips what only the output needs: attention, cross-attention and FFN of the last layer, and the head.
        """
        cache.begin_context()
        h, modulation = self._embed(x0, timestep, condition, None)
        last = self.geometry.layers - 1
        for layer in range(last):
            h = self._block(layer, h, modulation, prompt, cache, None, None)
        shift, scale, *_ = modulation.blocks[last]
        q, k, v = self._enter(
            self.model.blocks[last], h, shift, scale, self.geometry.heads, need_q=cache.observes
        )
        cache.write(last, k, v, q if cache.observes else None)

    @torch.no_grad()
    def fused_pass(
        self,
        x0: Tensor,
        context_timestep: float,
        x: Tensor,
        timestep: float,
        prompt: PromptState,
        cache: KVCache,
        *,
        condition: Tensor | None = None,
        next_condition: Tensor | None = None,
    ) -> Tensor:
        """Context pass and commit of the chunk in progress, and the first step of the next chunk, in one forward.

        Exact, and for one chunk's latency rather than throughput: the next chunk begins without waiting for a pass of
        its own. Where the cache cannot fuse (see `KVCache.begin_fused`) the passes are run one after the other.

        Args:
            x0: clean latents ``[b, f, c, h, w]`` of the chunk in progress.
            context_timestep: timestep of its context pass.
            x: noisy latents ``[b, f', c, h, w]`` of the next chunk.
            timestep: of its first step.
            prompt: of both chunks.
            cache: with the first chunk in progress; afterwards with the next chunk begun and its first pass done.
            condition, next_condition: of image-to-video models.

        Returns:
            The flow of the next chunk ``[b, f', c, h, w]``.
        """
        frames = x.shape[1]
        fused = cache.begin_fused(frames)
        if fused is None:
            self.context_pass(x0, context_timestep, prompt, cache, condition=condition)
            cache.commit()
            cache.begin_chunk(frames)
            return self(x, timestep, prompt, cache, condition=next_condition)
        both = (
            None
            if condition is None or next_condition is None
            else torch.cat([condition, next_condition], dim=1)
        )
        times = [context_timestep] * x0.shape[1] + [timestep] * frames
        h, modulation = self._embed(torch.cat([x0.to(x.dtype), x], dim=1), times, both, None)
        last = self.geometry.layers - 1
        for layer in range(last):
            h = self._block(layer, h, modulation, prompt, fused, None, None)
        # The last layer: the chunk to commit needs only its keys and values, the next one everything.
        block, skip = self.model.blocks[last], h.shape[1] // len(times) * x0.shape[1]
        shift, scale, *_ = modulation.blocks[last]
        q, k, v = self._enter(block, h, shift, scale, self.geometry.heads)
        assert q is not None
        attended = fused.attend(last, q[:, skip:], k, v)
        modulation = self._times(timestep, x.shape[0], frames, self.dtype, h.device)
        h = self._after_attention(last, h[:, skip:], attended, modulation, prompt)
        cache.finish_fused(fused)
        return self._head(h, modulation, x, None)

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _embed(
        self, x: Tensor, timestep: Timestep, condition: Tensor | None, tokens: Tensor | None
    ) -> tuple[Tensor, Modulation]:
        """Tokens ``[b, n, dim]`` in raster order and their modulation (per frame, or per token for a subset)."""
        b, f, c, height, width = x.shape
        expected = self.geometry.condition_channels
        given = 0 if condition is None else condition.shape[2]
        if c != self.geometry.out_channels or given != expected:
            raise StreamvidError(
                f"the model takes latents of {self.geometry.out_channels} channels and a condition of {expected}, "
                f"got {c} and {given}"
            )
        if condition is not None:
            x = torch.cat([x, condition.to(x.dtype)], dim=2)
        grid = self.geometry.grid(height, width)
        h = (
            self.model.patch_embedding(x.to(self.dtype).transpose(1, 2))
            .flatten(2)
            .transpose(1, 2)
            .contiguous()
        )
        modulation = self._times(timestep, b, f, self.dtype, h.device)
        if tokens is not None:
            frame = tokens // (grid[0] * grid[1])
            modulation = _per_token(modulation, frame)
            h = h.index_select(1, tokens)
        return h, modulation

    def _block(
        self,
        layer: int,
        h: Tensor,
        modulation: Modulation,
        prompt: PromptState,
        cache: KVCache | FusedPass,
        hooks: BlockHooks | None,
        tokens: Tensor | None,
    ) -> Tensor:
        block, heads = self.model.blocks[layer], self.geometry.heads
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.blocks[layer]
        subset = {} if tokens is None else {"tokens": tokens}
        if hooks is None:
            # A subset has another length in every step; compiled blocks are for fixed shapes.
            q, k, v = (self._enter if tokens is None else enter)(block, h, shift1, scale1, heads)
            attended = cache.attend(layer, q, k, v, **subset)
            # So are rules that choose prompt tokens, whose hashes are kept between calls.
            plain = tokens is not None or prompt.rule is not None
            return self._after_attention(layer, h, attended, modulation, prompt, plain=plain)
        h_in = h
        if (replacement := hooks.before_block(layer, h)) is not None:
            return replacement

        def self_attention() -> Tensor:
            q, k, v = enter(block, h, shift1, scale1, heads)
            return project(block.attn1, cache.attend(layer, q, k, v, **subset))

        def cross_attention() -> Tensor:
            x = layer_norm(h, block.norm2)
            return cross(block.attn2, x, heads, prompt.text(layer), prompt.image(layer), prompt.rule)

        h = gated(h, _module(hooks, layer, "self_attn", self_attention), gate1)
        h = h + _module(hooks, layer, "cross_attn", cross_attention)
        h = gated(h, _module(hooks, layer, "ffn", lambda: feed_forward(block, h, shift2, scale2)), gate2)
        replacement = hooks.after_block(layer, h_in, h)
        return h if replacement is None else replacement

    def _after_attention(
        self,
        layer: int,
        h: Tensor,
        attended: Tensor,
        modulation: Modulation,
        prompt: PromptState,
        plain: bool = False,
    ) -> Tensor:
        """The rest of a block once its self-attention ``[b, n, heads, head_dim]`` is known, without hooks."""
        return (leave if plain else self._leave)(
            self.model.blocks[layer],
            h,
            attended,
            modulation.blocks[layer],
            self.geometry.heads,
            prompt.text(layer),
            prompt.image(layer),
            prompt.rule,
        )

    def _text_kv(self, attn: Any, text: Tensor) -> tuple[Tensor, Tensor]:
        if getattr(attn, "fused_projections", False):
            k, v = attn.to_kv(text).chunk(2, dim=-1)
        else:
            k, v = attn.to_k(text), attn.to_v(text)
        heads = self.geometry.heads
        return split(rms_norm(k, attn.norm_k.weight, attn.norm_k.eps), heads), split(v, heads)

    def _image_kv(self, attn: Any, image: Tensor) -> tuple[Tensor, Tensor]:
        if getattr(attn, "fused_projections", False):
            k, v = attn.to_added_kv(image).chunk(2, dim=-1)
        else:
            k, v = attn.add_k_proj(image), attn.add_v_proj(image)
        heads = self.geometry.heads
        return split(rms_norm(k, attn.norm_added_k.weight, attn.norm_added_k.eps), heads), split(v, heads)

    def _head(self, h: Tensor, modulation: Modulation, x: Tensor, tokens: Tensor | None) -> Tensor:
        """Output norm, projection, and tokens back to ``[b, f, out_channels, h, w]``."""
        shift, scale = modulation.head
        y = self.model.proj_out(modulated(layer_norm(h, self.model.norm_out), shift, scale))
        b, f, _, height, width = x.shape
        rows, columns = self.geometry.grid(height, width)
        if tokens is not None:
            full = y.new_zeros(b, f * rows * columns, y.shape[-1])
            y = full.index_copy_(1, tokens, y)
        p, q = self.geometry.patch
        y = y.view(b, f, rows, columns, p, q, self.geometry.out_channels)
        return y.permute(0, 1, 6, 2, 4, 3, 5).reshape(b, f, self.geometry.out_channels, height, width)


def _per_token(modulation: Modulation, frame: Tensor) -> Modulation:
    """Tables with one row a token, for tokens of these frames (the one case where rows are gathered)."""

    def choose(x: Tensor) -> Tensor:
        return x if x.shape[1] == 1 else x.index_select(1, frame)

    blocks = tuple(tuple(choose(x) for x in row) for row in modulation.blocks)
    return Modulation(blocks, (choose(modulation.head[0]), choose(modulation.head[1])))
