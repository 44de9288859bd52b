"""FasterCache (ICLR 2025): attention outputs extrapolated every other step, and the unconditional branch
rebuilt.

Dynamic reuse: attention keeps its last two computed outputs; on the steps between, ``F1 + w (F1 - F2)``
with ``w`` rising over the run. CFG-cache: every ``cfg_every`` steps both branches run and the difference of
their spectra is kept; on the steps between, ``uncond`` is the conditional answer plus that difference, its
low or high frequencies strengthened early or late. Unlike the released port the kept difference is not
multiplied in place, so the weights do not compound. diffusers' hook is bound to a batch of both branches in
one call and to its own attention modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.stepcache.base import Footprint, Session, StepCache, full
from streamvid.stepcache.hooks import ModuleStore
from streamvid.stepcache.types import BlockHooks, Decision, StepInfo, StepOutput


def split_spectrum(x: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """2-D spectra of ``[b, f, c, h, w]``, below and above ``radius`` (in bins); complex."""
    spectrum = torch.fft.fftshift(torch.fft.fft2(x.float()), dim=(-2, -1))
    height, width = x.shape[-2:]
    rows = torch.arange(height, device=x.device) - height // 2
    cols = torch.arange(width, device=x.device) - width // 2
    low = (rows[:, None] ** 2 + cols[None] ** 2).sqrt() <= radius
    return spectrum * low, spectrum * ~low


class _Session(Session):
    static = True
    needs_block_hooks = True
    per_branch = True

    def reset(self) -> None:
        self.outputs: dict[str, dict[str, list[Tensor]]] = {}
        self.ages: dict[str, int] = {}
        self.delta: tuple[Tensor, Tensor] | None = None
        self.delta_step = -1
        self.cond_flow: Tensor | None = None

    def decide(self, info: StepInfo, x_t: Tensor) -> Decision:
        s = self.settings
        if info.branch == "uncond" and self._cfg_cached(info):
            return Decision(mode="reuse", space="velocity", reason="cfg")
        age = self.ages.get(info.branch, 0)
        if info.timestep < s.attention_below and age + 1 < s.attention_every:
            return Decision(mode="blocks", reason="mask")
        return full("mask")

    def _cfg_cached(self, info: StepInfo) -> bool:
        s = self.settings
        known = self.delta is not None and self.cond_flow is not None
        return known and info.timestep < s.cfg_below and info.step - self.delta_step < s.cfg_every

    def predict(self, info: StepInfo, x_t: Tensor, decision: Decision) -> Tensor:
        """The unconditional flow from this step's conditional one."""
        assert self.delta is not None and self.cond_flow is not None
        low, high = self.delta
        strength = 1 + self.settings.strength
        low_weight = strength if 99 < info.timestep < 901 else 1.0
        high_weight = strength if info.timestep < 301 else 1.0
        change = torch.fft.ifftshift(low_weight * low + high_weight * high, dim=(-2, -1))
        return (self.cond_flow.float() + torch.fft.ifft2(change).real).to(self.cond_flow.dtype)

    def observe(self, info: StepInfo, x_t: Tensor, out: StepOutput, decision: Decision) -> Tensor | None:
        if info.branch == "cond":
            self.cond_flow = out.flow
        elif decision.mode != "reuse" and self.cond_flow is not None:
            radius = min(out.flow.shape[-2:]) / 5
            self.delta = split_spectrum(out.flow - self.cond_flow, radius)
            self.delta_step = info.step
        return None

    def block_hooks(self, info: StepInfo, decision: Decision) -> BlockHooks:
        store = self.outputs.setdefault(info.branch, {})
        if decision.mode != "blocks":
            self.ages[info.branch] = 0
            return ModuleStore(store, ("self_attn",), depth=2)
        self.ages[info.branch] = self.ages.get(info.branch, 0) + 1
        weight = info.step / max(1, info.num_steps - 1)
        return ModuleStore(store, (), ("self_attn",), (1 + weight, -weight), 2)

    def footprint(self) -> Footprint:
        # The spectra are complex64: four latents' worth for fp32 latents, twice that for half precision.
        return Footprint(latents=9, hiddens=2 * self.plan.num_layers)


@dataclass(kw_only=True)
class FasterCache(StepCache):
    """Extrapolate self attention between computed steps and rebuild the unconditional branch."""

    kinds: ClassVar[frozenset[str]] = frozenset({"same"})
    name: ClassVar[str] = "fastercache"
    neutral: ClassVar[str] = "fastercache:attention_every=1,cfg_every=1"
    lively: ClassVar[str] = "fastercache:attention_below=1001,cfg_below=1001"
    session_type = _Session

    attention_every: int = 2
    """Self attention is computed every so many steps; 1 always."""
    attention_below: float = 681.0
    """Timestep below which attention is reused."""
    cfg_every: int = 5
    """The unconditional branch runs every so many steps; 1 always."""
    cfg_below: float = 641.0
    """Timestep below which the unconditional branch is rebuilt."""
    strength: float = 0.1
    """How much the emphasised frequencies of the kept difference are strengthened."""

    def __post_init__(self) -> None:
        if self.attention_every < 1 or self.cfg_every < 1:
            raise StreamvidError("step cache 'fastercache': intervals must be at least 1")
