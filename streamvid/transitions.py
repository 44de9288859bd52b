"""What a prompt change does to a stream, between two chunks: one function a transition, and the table of them.

The context pass of the chunk before has been run, under the old prompt. Sources: re-cache of LongLive, flush of
Infinity-RoPE, the tiers of SWIFT. Knows nothing of when a change applies.

The sink at a re-encoding: while the re-encoded range begins at the first frame held, everything is encoded anew; later
the sink keeps its entries, made under the prompt of their time, and the frames after it are encoded anew (LongLive
with a global sink).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from streamvid.prompts import Change, Transition
from streamvid.recache import RecacheMode, recache
from streamvid.state import Blend, StreamState

if TYPE_CHECKING:
    from streamvid.engine import Engine

MICRO_LATENTS = 3
"""Latent frames that ``micro`` encodes anew, as in SWIFT."""
RECACHE_ABOVE, MICRO_ABOVE = 0.8, 0.7
"""SWIFT's tiers of the distance between prompts: re-cache, micro re-cache, nothing."""


def apply_change(state: StreamState, change: Change | None, engine: Engine) -> None:
    """Bring a stream to the prompt of its next chunk: a waiting change, or one more step of a blend."""
    if change is None:
        if state.blend is not None:
            _blend_step(state, engine)
        return
    embeds = engine.encode(change.receipt.text)
    state.text, state.blend = change.receipt.text, None
    if change.transition is None:
        _cut(state, embeds, engine)
    else:
        _announce(state, embeds, engine)
        _TRANSITIONS[change.transition.kind](state, embeds, engine, change.transition)
    state.step_cache.on_context_change("cut" if change.transition is None else "prompt")
    change.receipt.status = "applied"


def _cut(state: StreamState, embeds: Tensor, engine: Engine) -> None:
    engine.set_embeds(state.sides["cond"], embeds)
    kept = [cache.scene_cut() for cache in state.caches()]  # every one is told, whatever the first answers
    if all(kept):
        return  # the policy itself makes the cut, by a gap in time (Infinity-RoPE), and its history goes on
    if state.decoder is not None:
        state.decoder.reset()
    if state.rolling is not None:
        state.rolling.chunks.clear()
    state.recent.clear()
    state.at = replace(state.at, restart=True)


def _cross(state: StreamState, embeds: Tensor, engine: Engine, how: Transition) -> None:
    engine.set_embeds(state.sides["cond"], embeds)


def _recache(state: StreamState, embeds: Tensor, engine: Engine, how: Transition) -> None:
    _again(state, embeds, engine, "window", state.recent)


def _causal(state: StreamState, embeds: Tensor, engine: Engine, how: Transition) -> None:
    _again(state, embeds, engine, "causal", state.recent)


def _micro(state: StreamState, embeds: Tensor, engine: Engine, how: Transition) -> None:
    _again(state, embeds, engine, "micro", state.recent[-MICRO_LATENTS:])


def _again(state: StreamState, embeds: Tensor, engine: Engine, mode: RecacheMode, past: list[Tensor]) -> None:
    """Take the new prompt and encode ``past`` under it, clean latents of one frame each, newest last."""
    side = state.sides["cond"]
    engine.set_embeds(side, embeds)
    if past:
        recache(
            side.cache,
            torch.cat(past, dim=1),
            lambda latents, skip: engine.encode_past(side, latents, skip=skip),
            mode=mode,
            keep_sink=True,
        )


def _flush(state: StreamState, embeds: Tensor, engine: Engine, how: Transition) -> None:
    engine.set_embeds(state.sides["cond"], embeds)
    keep = how.number or 0
    for cache in state.caches():
        cache.flush(keep, sink=keep > 0)
    del state.recent[: len(state.recent) - keep]


def _swift(state: StreamState, embeds: Tensor, engine: Engine, how: Transition) -> None:
    distance = _distance(engine, state.sides["cond"].embeds, embeds)
    if distance >= RECACHE_ABOVE:
        _recache(state, embeds, engine, how)
    elif distance >= MICRO_ABOVE:
        _micro(state, embeds, engine, how)
    else:
        _cross(state, embeds, engine, how)


def _blend(state: StreamState, embeds: Tensor, engine: Engine, how: Transition) -> None:
    assert how.number is not None
    state.blend = Blend(state.sides["cond"].embeds, embeds, how.number)
    _blend_step(state, engine)


def _blend_step(state: StreamState, engine: Engine) -> None:
    assert state.blend is not None
    engine.set_embeds(state.sides["cond"], state.blend.step())
    if state.blend.done >= state.blend.chunks:
        state.blend = None


_TRANSITIONS: dict[str, Callable[[StreamState, Tensor, Engine, Transition], None]] = {
    "cross": _cross,
    "recache": _recache,
    "causal": _causal,
    "micro": _micro,
    "flush": _flush,
    "swift": _swift,
    "blend": _blend,
}


def _announce(state: StreamState, embeds: Tensor, engine: Engine) -> None:
    """Tell the memory policies of the new prompt, with what SWIFT's bridge tokens need."""
    side = state.sides["cond"]
    event: dict[str, Any] = {
        "old": engine.signature(side.embeds),
        "new": engine.signature(embeds),
        "rho": _distance(engine, side.embeds, embeds),
    }
    side.cache.prompt_changed(event)


def _distance(engine: Engine, old: Tensor, new: Tensor) -> float:
    """``1 - cos`` between two prompts after the model's text layers, clipped to 0..1."""
    a, b = (engine.signature(embeds).flatten().double() for embeds in (old, new))
    return float((1 - torch.nn.functional.cosine_similarity(a, b, dim=0)).clamp(0, 1))
