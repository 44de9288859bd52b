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
from streamvid.state import Blend, Side, StreamState

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
    for cache in state.caches():
        cache.reset()
    if state.decoder is not None:
        state.decoder.reset()
    state.recent.clear()
    state.at = replace(state.at, restart=True)


def _cross(state: StreamState, embeds: Tensor, engine: Engine, how: Transition) -> None:
    engine.set_embeds(state.sides["cond"], embeds)


def _recache(state: StreamState, embeds: Tensor, engine: Engine, how: Transition) -> None:
    side = state.sides["cond"]
    engine.set_embeds(side, embeds)
    past = _past(state, engine)
    if past is None:
        return
    if past.shape[1] >= side.cache.next_frame:
        side.cache.rebuild(0)
        engine.encode_past(side, past)
        return
    sink = _sink_frames(side)
    side.cache.rebuild(side.cache.next_frame - past.shape[1], keep_sink=True)
    # The oldest of these frames stand where the sink is held: they are seen as queries, and not kept.
    engine.encode_past(side, past, skip=min(sink, past.shape[1] - 1))


def _causal(state: StreamState, embeds: Tensor, engine: Engine, how: Transition) -> None:
    side = state.sides["cond"]
    engine.set_embeds(side, embeds)
    past = _past(state, engine)
    if past is None:
        return
    end = side.cache.next_frame
    if past.shape[1] >= end:
        side.cache.rebuild(0)
    else:
        past = past[:, min(_sink_frames(side), past.shape[1] - 1) :]
        side.cache.rebuild(end - past.shape[1], keep_sink=True)
    # Chunks are counted from the newest end, so that their borders are those of the chunks as they were made.
    size = engine.config.chunk_latents
    first = past.shape[1] % size or size
    for part in (past[:, :first], *past[:, first:].split(size, dim=1)):
        if part.shape[1]:
            engine.encode_past(side, part)


def _micro(state: StreamState, embeds: Tensor, engine: Engine, how: Transition) -> None:
    side = state.sides["cond"]
    engine.set_embeds(side, embeds)
    count = min(MICRO_LATENTS, len(state.recent))
    if count:
        side.cache.rewind(count)
        engine.encode_past(side, torch.cat(state.recent[-count:], dim=1))


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


def _past(state: StreamState, engine: Engine) -> Tensor | None:
    """The clean latents ``[b, n, c, h, w]`` that the memory can reach, newest last; None at the start."""
    return torch.cat(state.recent, dim=1) if state.recent else None


def _sink_frames(side: Side) -> int:
    """Latent frames that the memory holds in its sink."""
    bank = next(side.cache.all_banks())
    return sum(entry.num_frames for entry in bank.entries if entry.region == "sink")


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
