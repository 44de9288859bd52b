"""Turns noise into one chunk of clean latents: few steps with re-noising, or many steps along a flow.

A sampler knows schedules, branches and step caches; it knows neither the model (a :class:`Denoiser` hides
it), nor the memory, nor prompts. It holds no state between chunks. The context pass is the stream's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from streamvid.config import StreamConfig
from streamvid.errors import StreamvidError
from streamvid.noise import Noise
from streamvid.schedule import FlowSchedule
from streamvid.stepcache.base import NoCache, Session
from streamvid.stepcache.driver import run_step
from streamvid.stepcache.types import (
    Branch,
    ChunkInfo,
    Denoiser,
    ModuleShares,
    NoiseKind,
    SamplingPlan,
    StepInfo,
    StepOutput,
)

StepCallback = Callable[[dict[str, Any]], None]
"""Called after each step with ``info``, ``decision``, ``x_t``, ``flow`` and ``x0`` (the guided ones)."""
Solver = Literal["euler", "unipc"]


class Sampler(Protocol):
    """What a stream needs of a sampler."""

    noise_kind: NoiseKind
    timesteps: tuple[float, ...]
    branches: tuple[Branch, ...]

    def plan(
        self,
        *,
        num_layers: int = 1,
        patch: tuple[int, int] = (2, 2),
        shares: ModuleShares | None = None,
        key: dict[str, object] | None = None,
    ) -> SamplingPlan:
        """What step caches are opened with."""
        ...

    def sample_chunk(
        self,
        denoise: Denoiser,
        chunk: ChunkInfo,
        noise: Noise,
        shape: Sequence[int],
        *,
        step_cache: Session | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        fused: Denoiser | None = None,
        callback: StepCallback | None = None,
    ) -> Tensor:
        """Clean latents ``[b, f, c, h, w]`` of one chunk.

        Args:
            denoise: the model, bound to the stream.
            chunk: which chunk; its index is the key of its noise.
            noise: source of noise.
            shape: ``(b, f, c, h, w)``.
            step_cache: the stream's session; None runs every step in full.
            fused: a denoiser for step 0 that also runs the previous chunk's pending context pass.
            callback: called after each step.
        """
        ...


class _Base:
    """Branches, plan and one guided step: what both samplers share."""

    noise_kind: NoiseKind

    def __init__(self, timesteps: Sequence[float], sigmas: Sequence[float], guidance_scale: float):
        self.timesteps = tuple(float(t) for t in timesteps)
        self.sigmas = tuple(float(s) for s in sigmas)
        self.guidance_scale = float(guidance_scale)
        self.branches: tuple[Branch, ...] = ("cond",) if guidance_scale == 1.0 else ("cond", "uncond")

    def plan(
        self,
        *,
        num_layers: int = 1,
        patch: tuple[int, int] = (2, 2),
        shares: ModuleShares | None = None,
        key: dict[str, object] | None = None,
    ) -> SamplingPlan:
        return SamplingPlan(
            timesteps=self.timesteps,
            sigmas=self.sigmas,
            noise_kind=self.noise_kind,
            branches=self.branches,
            num_layers=num_layers,
            patch=patch,
            shares=shares or ModuleShares(),
            key=key,
        )

    def _info(self, chunk: ChunkInfo, step: int, branch: Branch, patch: tuple[int, int]) -> StepInfo:
        following = step + 1 < len(self.timesteps)
        return StepInfo(
            chunk=chunk,
            step=step,
            num_steps=len(self.timesteps),
            timestep=self.timesteps[step],
            sigma=self.sigmas[step],
            sigma_next=self.sigmas[step + 1] if following else 0.0,
            branch=branch,
            noise_kind=self.noise_kind,
            patch=patch,
        )

    def _session(self, session: Session | None) -> Session:
        if session is None:
            return NoCache().open(self.plan())
        if session.plan.timesteps != self.timesteps or session.plan.branches != self.branches:
            raise StreamvidError(
                "the step cache was opened for other steps or branches than this sampler's; "
                "open it with the sampler's plan()"
            )
        return session

    def _guided(
        self,
        denoise: Denoiser,
        chunk: ChunkInfo,
        step: int,
        x_t: Tensor,
        session: Session,
        fused: Denoiser | None,
        callback: StepCallback | None,
    ) -> StepOutput:
        """One step of all branches, combined by classifier-free guidance."""
        outs = []
        for branch in self.branches:
            info = self._info(chunk, step, branch, session.plan.patch)
            out, decision = run_step(denoise, info, x_t, session, fused if step == 0 else None)
            outs.append(out)
        out = outs[0] if len(outs) == 1 else _combine(outs[0], outs[1], self.guidance_scale)
        if callback is not None:
            callback({"info": info, "decision": decision, "x_t": x_t, "flow": out.flow, "x0": out.x0})
        return out


@contextmanager
def _chunk(session: Session, chunk: ChunkInfo) -> Iterator[None]:
    """A chunk of a session; one that is cancelled or fails half-way leaves no trace in it."""
    session.on_chunk_start(chunk)
    try:
        yield
    except BaseException:
        session.abort()
        raise


def _combine(cond: StepOutput, uncond: StepOutput, scale: float) -> StepOutput:
    """Guidance is linear, so combining flows and combining x0 agree; both are kept exact."""
    return StepOutput(
        flow=uncond.flow + scale * (cond.flow - uncond.flow), x0=uncond.x0 + scale * (cond.x0 - uncond.x0)
    )


class FewStepSampler(_Base):
    """The sampler of Self-Forcing class models: predict x0, mix in fresh noise, a few times.

    Args:
        timesteps: what the model is fed, falling, after warping.
        schedule: the sigma table.
        guidance_scale: 1 runs one branch.
    """

    noise_kind: NoiseKind = "fresh"

    def __init__(self, timesteps: Sequence[float], schedule: FlowSchedule, guidance_scale: float = 1.0):
        super().__init__(timesteps, [schedule.sigma(t) for t in timesteps], guidance_scale)
        self.schedule = schedule

    @classmethod
    def from_config(cls, config: StreamConfig) -> FewStepSampler:
        schedule = FlowSchedule(config.timestep_shift, config.num_train_timesteps)
        steps: Sequence[float] = config.denoising_steps
        if config.warp_steps:
            steps = schedule.warp(config.denoising_steps).tolist()
        return cls(steps, schedule, config.guidance_scale)

    def sample_chunk(
        self,
        denoise: Denoiser,
        chunk: ChunkInfo,
        noise: Noise,
        shape: Sequence[int],
        *,
        step_cache: Session | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        fused: Denoiser | None = None,
        callback: StepCallback | None = None,
    ) -> Tensor:
        """See :meth:`Sampler.sample_chunk`."""
        session = self._session(step_cache)
        x_t = noise.noise(chunk.index, 0, shape, device, dtype)
        with _chunk(session, chunk):
            for step in range(len(self.timesteps)):
                out = self._guided(denoise, chunk, step, x_t, session, fused, callback)
                if step + 1 < len(self.timesteps):
                    fresh = noise.noise(chunk.index, step + 1, shape, device, dtype)
                    x_t = self.schedule.add_noise(out.x0, fresh, self.timesteps[step + 1])
        session.on_chunk_end(chunk, out.x0)
        return out.x0


class ManyStepSampler(_Base):
    """Flow sampling through diffusers' schedulers; each chunk starts a fresh scheduler.

    Args:
        num_steps: steps a chunk.
        shift: timestep shift.
        guidance_scale: 1 runs one branch.
        solver: ``euler`` (FlowMatchEulerDiscreteScheduler) or ``unipc`` (UniPCMultistepScheduler).
        num_train_timesteps: scale of the timesteps.
    """

    noise_kind: NoiseKind = "same"

    def __init__(
        self,
        num_steps: int,
        shift: float = 5.0,
        guidance_scale: float = 5.0,
        solver: Solver = "unipc",
        num_train_timesteps: int = 1000,
    ):
        if num_steps < 1:
            raise StreamvidError(f"num_inference_steps must be at least 1, got {num_steps}")
        if solver not in ("euler", "unipc"):
            raise StreamvidError(f"solver must be 'euler' or 'unipc', got {solver!r}")
        self.num_steps, self.shift, self.solver = num_steps, shift, solver
        self.num_train_timesteps = num_train_timesteps
        scheduler = self._scheduler("cpu")
        super().__init__(scheduler.timesteps.tolist(), scheduler.sigmas[:num_steps].tolist(), guidance_scale)

    @classmethod
    def from_config(cls, config: StreamConfig, solver: Solver = "unipc") -> ManyStepSampler:
        return cls(
            config.num_inference_steps or 50,
            config.timestep_shift,
            config.guidance_scale,
            solver,
            config.num_train_timesteps,
        )

    def _scheduler(self, device: torch.device | str) -> Any:
        from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

        if self.solver == "euler":
            scheduler = FlowMatchEulerDiscreteScheduler(self.num_train_timesteps, shift=self.shift)
            sigmas = np.linspace(1.0, 1.0 / self.num_steps, self.num_steps)
            scheduler.set_timesteps(sigmas=sigmas, device=device)
        else:
            scheduler = UniPCMultistepScheduler(
                self.num_train_timesteps,
                prediction_type="flow_prediction",
                use_flow_sigmas=True,
                flow_shift=self.shift,
            )
            scheduler.set_timesteps(self.num_steps, device=device)
        # Without it the scheduler looks its index up by comparing device tensors, a sync a step.
        scheduler.set_begin_index(0)
        return scheduler

    def sample_chunk(
        self,
        denoise: Denoiser,
        chunk: ChunkInfo,
        noise: Noise,
        shape: Sequence[int],
        *,
        step_cache: Session | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        fused: Denoiser | None = None,
        callback: StepCallback | None = None,
    ) -> Tensor:
        """See :meth:`Sampler.sample_chunk`."""
        session = self._session(step_cache)
        x_t = noise.noise(chunk.index, 0, shape, device, dtype)
        scheduler = self._scheduler(device)
        with _chunk(session, chunk):
            for step, timestep in enumerate(scheduler.timesteps):
                out = self._guided(denoise, chunk, step, x_t, session, fused, callback)
                x_t = scheduler.step(out.flow, timestep, x_t, return_dict=False)[0]
        session.on_chunk_end(chunk, x_t)
        return x_t


def make_sampler(config: StreamConfig) -> FewStepSampler | ManyStepSampler:
    """The sampler a checkpoint asks for: few-step unless ``num_inference_steps`` is set."""
    if config.num_inference_steps is None:
        return FewStepSampler.from_config(config)
    return ManyStepSampler.from_config(config)
