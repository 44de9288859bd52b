"""Several step caches on one stream, and the text form for them: ``"mask:skip=2 + guard + fused"``.

The first session that does not want a full step decides; every session sees every step. A session that
corrects x0 hands the corrected value to the ones after it. Only one of them may use block hooks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.memory.spec import build
from streamvid.stepcache.base import Footprint, Session, StepCache, full
from streamvid.stepcache.state import pack, unpack
from streamvid.stepcache.types import (
    BlockHooks,
    ChunkInfo,
    Decision,
    SamplingPlan,
    StepInfo,
    StepOutput,
)


class StackSession(Session):
    """Owns the sessions of a :class:`Stack` and speaks for them."""

    def __init__(self, settings: Stack, plan: SamplingPlan):
        self.parts: list[Session] = [part.open(plan) for part in settings.parts]
        if sum(part.needs_block_hooks for part in self.parts) > 1:
            raise StreamvidError("only one step cache with block hooks can run at a time")
        self._decider: dict[str, Session] = {}
        super().__init__(settings, plan)
        self.static = all(part.static for part in self.parts)
        self.needs_block_hooks = any(part.needs_block_hooks for part in self.parts)
        self.selects_tokens = any(part.selects_tokens for part in self.parts)
        self.fuses_context = any(part.fuses_context for part in self.parts)
        self.keeps = tuple(sorted({space for part in self.parts for space in part.keeps}))

    def on_chunk_start(self, chunk: ChunkInfo) -> None:
        for part in self.parts:
            part.on_chunk_start(chunk)

    def before_step(self, info: StepInfo, x_t: Tensor) -> Decision:
        chosen = full("none")
        self._decider.pop(info.branch, None)
        for part in self.parts:
            decision = part.before_step(info, x_t)
            if chosen.mode == "full" and decision.mode != "full":
                chosen, self._decider[info.branch] = decision, part
            elif chosen.mode == "full" and chosen.reason == "none":
                chosen = decision
        return chosen

    def predict(self, info: StepInfo, x_t: Tensor, decision: Decision) -> Tensor:
        return self._decider[info.branch].predict(info, x_t, decision)

    def block_hooks(self, info: StepInfo, decision: Decision) -> BlockHooks | None:
        for part in self.parts:
            if part.needs_block_hooks:
                return part.block_hooks(info, decision)
        return None

    def after_step(self, info: StepInfo, x_t: Tensor, out: StepOutput, decision: Decision) -> Tensor | None:
        corrected = None
        for part in self.parts:
            value = part.after_step(info, x_t, out, decision)
            if value is not None:
                flow = ((x_t.double() - value.double()) / info.sigma).to(value.dtype)
                corrected, out = value, StepOutput(x0=value, flow=flow, residual=out.residual)
        return corrected

    def on_chunk_end(self, chunk: ChunkInfo, x0: Tensor) -> None:
        for part in self.parts:
            part.on_chunk_end(chunk, x0)

    def on_context_change(self, kind: str) -> None:
        for part in self.parts:
            part.on_context_change(kind)

    def abort(self) -> None:
        for part in self.parts:
            part.abort()

    def footprint(self) -> Footprint:
        sizes = [part.footprint() for part in self.parts]
        return Footprint(latents=sum(s.latents for s in sizes), hiddens=sum(s.hiddens for s in sizes))

    def nbytes(self) -> int:
        return sum(part.nbytes() for part in self.parts)

    def state_dict(self) -> dict[str, Tensor]:
        packed: dict[str, Tensor] = {}
        for i, part in enumerate(self.parts):
            packed.update({f"{i}.{key}": value for key, value in part.state_dict().items()})
        own = pack(self.accounting.state_dict())
        return packed | {f"own.{key}": value for key, value in own.items()}

    def load_state_dict(self, packed: dict[str, Tensor]) -> None:
        for i, part in enumerate(self.parts):
            part.load_state_dict(_under(packed, f"{i}."))
        self.accounting.load_state_dict(unpack(_under(packed, "own.")))


def _under(packed: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in packed.items() if key.startswith(prefix)}


@dataclass(kw_only=True)
class Stack(StepCache):
    """Several step caches as one."""

    parts: Sequence[StepCache] = field(default_factory=tuple)

    def open(self, plan: SamplingPlan) -> Session:
        return StackSession(self, plan)


def build_step_cache(spec: str | StepCache, table: Mapping[str, type[StepCache]]) -> StepCache:
    """The step cache a text names; several joined by ``+`` between spaces.

    Raises:
        StreamvidError: unknown name or setting, naming the nearest one.
    """
    if isinstance(spec, StepCache):
        return spec
    if not isinstance(spec, str):
        raise StreamvidError(
            f"step cache must be a text (name or name:key=value) or an object of one, got {spec!r}"
        )
    try:
        parts: list[Any] = [build(part.strip(), table, "step cache") for part in re.split(r"\s\+\s", spec)]
    except StreamvidError:
        raise
    except ValueError as error:
        raise StreamvidError(str(error)) from None
    return parts[0] if len(parts) == 1 else Stack(parts=parts)
