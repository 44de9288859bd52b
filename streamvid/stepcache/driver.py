"""Runs one step of one branch as a session decided, and counts it. Knows every mode and no method."""

from __future__ import annotations

import torch
from torch import Tensor

from streamvid.stepcache.accounting import CountingHooks
from streamvid.stepcache.base import Session
from streamvid.stepcache.types import Decision, Denoiser, StepInfo, StepOutput


def to_x0(flow: Tensor, x_t: Tensor, sigma: float) -> Tensor:
    """``x_t - sigma flow`` in float64, in ``flow``'s dtype, as the Self-Forcing reference."""
    return (x_t.double() - sigma * flow.double()).to(flow.dtype)


def to_flow(x0: Tensor, x_t: Tensor, sigma: float) -> Tensor:
    """``(x_t - x0) / sigma`` in float64, in ``x0``'s dtype."""
    return ((x_t.double() - x0.double()) / sigma).to(x0.dtype)


class _ReuseTrunk:
    """Adds a kept trunk residual to the embedding and skips all blocks."""

    def __init__(self, residual: Tensor):
        self.residual = residual

    def before_block(self, layer: int, h: Tensor) -> Tensor | None:
        return h + self.residual if layer == 0 else h

    def after_block(self, layer: int, h_in: Tensor, h_out: Tensor) -> Tensor | None:
        return None

    def before_module(self, layer: int, name: str) -> Tensor | None:
        return None

    def after_module(self, layer: int, name: str, out: Tensor) -> Tensor | None:
        return None


def token_mask(tokens: Tensor, shape: tuple[int, ...], patch: tuple[int, int]) -> Tensor:
    """Latent places that raster ``tokens`` ``[n]`` cover, as bool ``[1, f, 1, h, w]``."""
    _, frames, _, height, width = shape
    rows, cols = height // patch[0], width // patch[1]
    mask = torch.zeros(frames * rows * cols, dtype=torch.bool, device=tokens.device)
    mask = mask.index_fill(0, tokens, True).view(frames, rows, cols)
    return mask.repeat_interleave(patch[0], 1).repeat_interleave(patch[1], 2)[None, :, None]


def run_step(
    denoise: Denoiser, info: StepInfo, x_t: Tensor, session: Session, fused: Denoiser | None = None
) -> tuple[StepOutput, Decision]:
    """Decide, run, let the session see the result, count. ``fused`` replaces the forward of a first step."""
    decision = session.before_step(info, x_t)
    if fused is not None and decision.mode == "full":
        decision = Decision(mode="merge_clean", reason=decision.reason)
    if decision.mode == "reuse":
        out, cost = _reuse(denoise, info, x_t, session, decision)
    else:
        out, cost = _forward(fused or denoise, info, x_t, session, decision)
    corrected = session.after_step(info, x_t, out, decision)
    if corrected is not None:
        out = StepOutput(x0=corrected, flow=to_flow(corrected, x_t, info.sigma), residual=out.residual)
    session.accounting.add(info, decision, cost)
    return out, decision


def _reuse(
    denoise: Denoiser, info: StepInfo, x_t: Tensor, session: Session, decision: Decision
) -> tuple[StepOutput, float]:
    value = session.predict(info, x_t, decision)
    if decision.space == "x0":
        return StepOutput(x0=value, flow=to_flow(value, x_t, info.sigma)), 0.0
    if decision.space == "residual":
        flow = denoise(x_t, info.timestep, branch=info.branch, hooks=_ReuseTrunk(value))
    elif decision.space == "eps":
        x0 = (x_t.double() - info.sigma * value.double()) / (1 - info.sigma)
        flow = (value.double() - x0).to(value.dtype)
    else:
        flow = value
    return StepOutput(x0=to_x0(flow, x_t, info.sigma), flow=flow), 0.0


def _forward(
    denoise: Denoiser, info: StepInfo, x_t: Tensor, session: Session, decision: Decision
) -> tuple[StepOutput, float]:
    inner = session.block_hooks(info, decision) if session.needs_block_hooks else None
    want_residual = "residual" in session.keeps
    hooks = None
    if inner is not None or want_residual:
        hooks = CountingHooks(inner, session.plan.num_layers, session.plan.shares, want_residual)
    kwargs = {} if hooks is None else {"hooks": hooks}
    if decision.tokens is None:
        flow = denoise(x_t, info.timestep, branch=info.branch, **kwargs)
        out = StepOutput(flow=flow, x0=to_x0(flow, x_t, info.sigma))
        share = 1.0
    else:
        flow = denoise(x_t, info.timestep, branch=info.branch, tokens=decision.tokens, **kwargs)
        kept = session.predict(info, x_t, decision)
        mask = token_mask(decision.tokens, x_t.shape, info.patch)
        x0 = torch.where(mask, to_x0(flow, x_t, info.sigma), kept)
        out = StepOutput(x0=x0, flow=torch.where(mask, flow, to_flow(kept, x_t, info.sigma)))
        share = len(decision.tokens) * info.patch[0] * info.patch[1] / (x_t[0, :, 0].numel())
    if hooks is None:
        return out, share
    out.residual = hooks.residual
    return out, share * hooks.cost
