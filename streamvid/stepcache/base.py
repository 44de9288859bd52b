"""The step cache protocol: settings that a user writes, and a session that one stream owns.

A method is one file with a settings dataclass (a :class:`StepCache`) and a :class:`Session` that fills in
``decide``; everything that every method must respect lives here: the first step of a chunk and the first
chunk are full, a change of shape or a gap between steps falls back to full, branches and chunks never share
state, and what is kept is bounded and can be written to a snapshot. Knows no model; sees latents and, when
it asks, hidden states.

The five hooks are called by the sampler in this order: ``on_chunk_start``; for each step and branch
``before_step``, the block hooks during the forward, ``after_step``; then ``on_chunk_end``.
``on_context_change`` (prompt switch, cut, seek, window change) may come between chunks.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.stepcache.accounting import Accounting
from streamvid.stepcache.state import pack, state_type, tensor_bytes, unpack
from streamvid.stepcache.types import (
    BlockHooks,
    ChunkInfo,
    Decision,
    SamplingPlan,
    Space,
    StepInfo,
    StepOutput,
)

FEW_STEP_CACHES = "mask, tokens, carry, blockmap, taocache, adams, exit, motion, guard, fused"


@state_type
@dataclass
class Entry:
    """One full step that a prediction may build on."""

    step: int
    sigma: float
    values: dict[str, Tensor]
    """By space: x0, eps, velocity ``[b, f, c, h, w]``, residual ``[b, n, dim]``."""


@dataclass(frozen=True)
class Footprint:
    """Upper bound of what a session holds, in tensors a branch (one chunk's latents, one hidden state)."""

    latents: int = 0
    hiddens: int = 0


@dataclass(kw_only=True)
class StepCache:
    """Settings of a method; the fields are what the text form accepts. ``open`` gives a stream its
    session."""

    name: ClassVar[str] = ""
    neutral: ClassVar[str] = ""
    """A text that makes the method run every step in full; the property tests use it."""
    lively: ClassVar[str] = ""
    """A text that surely skips something; empty for methods that never do."""
    knob: ClassVar[tuple[str, ...]] = ()
    """Texts of rising aggressiveness: compute must never rise along them."""
    kinds: ClassVar[frozenset[str]] = frozenset({"fresh", "same"})
    """Kinds of sampling the method is valid for: ``fresh`` noise (few-step) or ``same`` (many-step)."""
    why_not: ClassVar[str] = "it reuses predictions that carry the previous step's noise"
    session_type: ClassVar[type[Session]]

    def open(self, plan: SamplingPlan) -> Session:
        """A fresh session. Raises StreamvidError when the method cannot be valid for this sampling."""
        if plan.noise_kind not in self.kinds:
            if plan.noise_kind == "fresh":
                raise StreamvidError(
                    f"step cache {self.name!r} does not fit few-step sampling with fresh noise: {self.why_not}; "
                    f"use one of {FEW_STEP_CACHES}"
                )
            raise StreamvidError(f"step cache {self.name!r} does not fit many-step sampling: {self.why_not}")
        return self.session_type(self, plan)


class Session:
    """State of one stream. Subclasses write ``decide`` and, where needed, ``observe`` and ``block_hooks``.

    All attributes but ``settings`` and ``plan`` are state: see :mod:`streamvid.stepcache.state`.
    """

    static: bool = False
    """``decide`` looks at the step index only: no device-to-host sync, ever."""
    ties_clips: bool | None = None
    """A decision or a learned number would depend on all clips of a batch, so that a clip would not equal
    its solo run; such sessions stay full in batches. None: true unless ``static``."""
    per_branch: bool = False
    """Each branch decides for itself; otherwise the unconditional one follows the conditional one."""
    needs_block_hooks: bool = False
    selects_tokens: bool = False
    """Some decisions run a subset of the tokens; a memory with a codec must then keep the chunk in progress."""
    fuses_context: bool = False
    """The stream should run a chunk's context pass together with the next chunk's first step."""
    keeps: tuple[Space, ...] = ()
    """Spaces whose last ``depth`` full steps are kept for predictions."""
    depth: int = 1

    def __init__(self, settings: Any, plan: SamplingPlan):
        self.settings, self.plan = settings, plan
        self.accounting = Accounting()
        self.disabled = False
        self.chunks_done = 0
        self._history: dict[str, list[Entry]] = {}
        self._followed: dict[int, Decision] = {}
        self._last_step: dict[str, int] = {}
        self._signature: tuple[Any, ...] | None = None
        self._warned = False
        self.start()

    # What a method fills in -------------------------------------------------------------------------------

    def start(self) -> None:
        """Set up attributes once, when the session is opened."""

    def reset(self) -> None:
        """Forget everything about the chunk in progress."""

    def decide(self, info: StepInfo, x_t: Tensor) -> Decision:
        """The method's rule; called only where every general guard allows a skip."""
        return full("none")

    def observe(self, info: StepInfo, x_t: Tensor, out: StepOutput, decision: Decision) -> Tensor | None:
        """Update accumulators after a step; may return a corrected ``x0``."""
        return None

    def watch(self, info: StepInfo, x_t: Tensor) -> None:
        """See each step's input before any decision, full steps included (indicators)."""

    def block_hooks(self, info: StepInfo, decision: Decision) -> BlockHooks | None:
        """Hooks for this forward; replacing anything is allowed only when ``decision.mode`` is ``blocks``."""
        return None

    def coefficients(self, info: StepInfo) -> tuple[float, ...]:
        """Weights of the newest full steps in a prediction for ``info``; order 0 by default."""
        return (1.0,)

    def finish(self, chunk: ChunkInfo, x0: Tensor) -> None:
        """Publish what the next chunk may use (motion maps, statistics)."""

    def footprint(self) -> Footprint:
        """Declared bound on what is held between calls, a branch."""
        latent = sum(space != "residual" for space in self.keeps)
        return Footprint(latents=latent * self.depth, hiddens=(len(self.keeps) - latent) * self.depth)

    @property
    def watches_blocks(self) -> bool:
        """Whether its forwards run with hooks; such a session cannot share a forward with a context pass."""
        return self.needs_block_hooks or "residual" in self.keeps

    # The hooks that a sampler calls -----------------------------------------------------------------------

    def on_chunk_start(self, chunk: ChunkInfo) -> None:
        """Drop per-chunk state. A chunk of kind ``first`` also drops what earlier chunks published."""
        if chunk.kind == "first":
            self.on_context_change("first")
        self._drop()

    def before_step(self, info: StepInfo, x_t: Tensor) -> Decision:
        """Decide, on the host. See the module docstring for the guards that come before the method's rule."""
        self.watch(info, x_t)
        decision = self._guard(info, x_t)
        if decision is None and info.branch != "cond" and not self.per_branch:
            decision = self._followed.get(info.step) or full("shape")
        if decision is None:
            decision = self.decide(info, x_t)
            if decision.mode == "reuse":
                self._check_space(decision.space)
        if info.branch == "cond":
            self._followed = {info.step: decision}
        return decision

    def predict(self, info: StepInfo, x_t: Tensor, decision: Decision) -> Tensor:
        """The value of a reuse decision in its space: the weighted sum of the newest full steps."""
        entries = self._history[info.branch]
        space = decision.space or "x0"
        value = entries[0].values[space]
        if decision.coefficients == (1.0,):
            return value
        terms = [c * e.values[space].float() for c, e in zip(decision.coefficients, entries, strict=False)]
        return torch.stack(terms).sum(0).to(value.dtype)

    def after_step(self, info: StepInfo, x_t: Tensor, out: StepOutput, decision: Decision) -> Tensor | None:
        """Keep history, then let the method observe. Returns a corrected ``x0`` or None."""
        corrected = self.observe(info, x_t, out, decision)
        self._last_step[info.branch] = info.step
        if decision.mode in ("full", "merge_clean", "subset") and self.keeps:
            self._keep(info, x_t, out)
        return corrected

    def on_chunk_end(self, chunk: ChunkInfo, x0: Tensor) -> None:
        """The chunk's clean latents ``[b, f, c, h, w]`` are known."""
        self.finish(chunk, x0)
        self.chunks_done += 1
        self._drop()

    def on_context_change(self, kind: str) -> None:
        """Prompt switch, cut, seek or window change: everything observed so far is void; settings stay."""
        self.chunks_done = 0
        self._drop()

    def abort(self) -> None:
        """The chunk in progress was dropped; the session stands as before it."""
        self._drop()

    # State ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Flat tensors, safetensors-ready."""
        state = {
            k: v for k, v in vars(self).items() if k not in ("settings", "plan", "accounting", "_followed")
        }
        return pack({"state": state, "accounting": self.accounting.state_dict()})

    def load_state_dict(self, packed: dict[str, Tensor]) -> None:
        """Inverse of :meth:`state_dict`, on a session of the same settings and plan."""
        values = unpack(packed)
        vars(self).update(values["state"])
        self._followed = {}
        self.accounting.load_state_dict(values["accounting"])

    def nbytes(self) -> int:
        """Bytes of tensors held now."""
        return tensor_bytes({k: v for k, v in vars(self).items() if k not in ("settings", "plan")})

    def report(self) -> dict[str, Any]:
        """JSON-ready accounting."""
        return self.accounting.report()

    # Internals --------------------------------------------------------------------------------------------

    def history(self, branch: str) -> list[Entry]:
        """Full steps of this chunk, newest first."""
        return self._history.get(branch, [])

    def warn(self, message: str) -> None:
        """One warning a session; later ones are silent."""
        if not self._warned:
            self._warned = True
            warnings.warn(message, stacklevel=3)

    def _drop(self) -> None:
        self._history, self._last_step, self._followed = {}, {}, {}
        self._signature = None
        self.reset()

    def _keep(self, info: StepInfo, x_t: Tensor, out: StepOutput) -> None:
        values: dict[str, Tensor] = {}
        for space in self.keeps:
            if space == "x0":
                values[space] = out.x0
            elif space == "velocity":
                values[space] = out.flow
            elif space == "eps":
                values[space] = out.x0 + out.flow
            elif out.residual is not None:
                values[space] = out.residual
        entries = self._history.setdefault(info.branch, [])
        entries.insert(0, Entry(info.step, info.sigma, values))
        del entries[self.depth :]

    def _guard(self, info: StepInfo, x_t: Tensor) -> Decision | None:
        """A full decision where no method may skip; None where it may."""
        if self.disabled:
            return full("disabled")
        signature = (*x_t.shape, str(x_t.dtype), str(x_t.device))
        if self._signature not in (None, signature):
            self._drop()
            self._signature = signature
            self.warn(
                "the latents changed shape, dtype or device inside a chunk; the step cache starts again"
            )
            return full("shape")
        self._signature = signature
        last = self._last_step.get(info.branch, -1)
        if info.step != last + 1:
            self._drop()
            self._signature = signature
            if info.step != 0:
                self.warn(f"step {info.step} follows step {last}; the step cache starts again")
            return full("shape" if info.step else "warmup")
        if info.step == 0:
            return full("warmup")
        if info.chunk.kind == "first" or self.chunks_done == 0:
            return full("first")
        ties = not self.static if self.ties_clips is None else self.ties_clips
        if ties and x_t.shape[0] > 1:
            self.warn("this step cache would tie the clips of a batch together; it is off for batches")
            return full("batch")
        if self.keeps and not self._history.get(info.branch):
            return full("warmup")
        return None

    def _check_space(self, space: Space | None) -> None:
        if self.plan.noise_kind == "fresh" and space != "x0":
            raise StreamvidError(
                f"reuse in {space} space is wrong when each step gets fresh noise: the kept value carries the "
                "previous step's noise (error sigma * sqrt(2)); reuse x0 instead"
            )


def full(reason: str) -> Decision:
    """A decision to run the whole model."""
    return Decision(mode="full", reason=reason)


@dataclass(kw_only=True)
class NoCache(StepCache):
    """Every step in full: the plain loop."""

    name: ClassVar[str] = "none"
    neutral: ClassVar[str] = "none"


class _NoSession(Session):
    static = True


NoCache.session_type = _NoSession
