"""Which memory policy goes with which codec: the combinations that make no sense, each with its reason.

Everything else works together: a policy moves entries without looking at how they are packed. `KVCache` and
`plan` ask here before anything is allocated, so that a setting without effect is an error and not a surprise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from streamvid.memory.codecs import CODECS, KVCodec, make_codec
from streamvid.memory.codecs.mixed import Mixed
from streamvid.memory.offload import Offload
from streamvid.memory.policies import POLICIES
from streamvid.memory.policy import MemoryPolicy

WHOLE_FRAMES = frozenset({"full", "window", "kv_bias"})
"""Policies that only ever drop the oldest frames, so that a block of many frames does not disturb them."""
WINDOWS = frozenset({"window", "kv_bias", "infinity_rope"})
"""Policies that hold a sink and the newest frames, ``size`` in all with the chunk, and nothing else."""


@dataclass(frozen=True)
class Rule:
    """One kind of combination that is refused."""

    applies: Callable[[str, MemoryPolicy, KVCodec, int], bool]
    """``(policy name, policy, codec, chunk_frames)``."""
    reason: str
    """A sentence for messages, with ``{policy}``, ``{span}``, ``{held}`` and ``{kept}`` filled in."""


def _span(codec: KVCodec) -> int:
    return codec.span_frames


def _held(policy: MemoryPolicy, chunk_frames: int) -> int:
    """Frames outside the sink that a window holds between chunks."""
    return policy.size - policy.sink - chunk_frames  # type: ignore[attr-defined]


def _kept(codec: KVCodec) -> int:
    """Frames that a codec leaves as they are until they are older."""
    if isinstance(codec, Mixed):
        return codec.recent_frames
    return codec.keep_frames if isinstance(codec, Offload) else 0


RULES: tuple[Rule, ...] = (
    Rule(
        lambda name, policy, codec, chunk: _span(codec) > 1 and name not in WHOLE_FRAMES,
        "the codec packs {span} frames as one block, but {policy} chooses, edits or drops single frames or tokens; "
        "use a codec that packs frame by frame (int8, int4, nsnquant), or the policy window or full",
    ),
    Rule(
        lambda name, policy, codec, chunk: name in WINDOWS and 0 <= _held(policy, chunk) < _span(codec),
        "the codec packs {span} frames as one block, but this window never holds more than {held} frames besides sink "
        "and chunk, so nothing would be packed; use a larger window, or a codec that packs frame by frame",
    ),
    Rule(
        lambda name, policy, codec, chunk: (
            _kept(codec) > 0 and name in WINDOWS and 0 <= _held(policy, chunk) <= _kept(codec)
        ),
        "the codec leaves the newest {kept} frames as they are, but this window never holds more than {held} besides "
        "sink and chunk, so it would do nothing; lower recent_frames or keep_frames, or use a larger window",
    ),
)


def refusal(policy: MemoryPolicy, codec: KVCodec | None, chunk_frames: int = 3) -> str | None:
    """Why this combination makes no sense, or None when it does."""
    if codec is None:
        return None
    name = next((key for key, cls in POLICIES.items() if cls is type(policy)), type(policy).__name__)
    for rule in RULES:
        if rule.applies(name, policy, codec, chunk_frames):
            held = _held(policy, chunk_frames) if name in WINDOWS else 0
            return rule.reason.format(policy=name, span=_span(codec), held=held, kept=_kept(codec))
    return None


def check(policy: MemoryPolicy, codec: KVCodec | None, chunk_frames: int) -> None:
    """Raise ValueError with the reason when policy and codec do not go together."""
    reason = refusal(policy, codec, chunk_frames)
    if reason is not None:
        raise ValueError(f"memory policy and codec do not go together: {reason}")


def table(chunk_frames: int = 3) -> dict[str, dict[str, str | None]]:
    """For every policy and codec in their default settings, why not, or None: ``table()[policy][codec]``."""
    return {
        name: {spec: refusal(cls(), make_codec(spec), chunk_frames) for spec in CODECS}
        for name, cls in POLICIES.items()
    }
