"""Rolling Forcing: several chunks in flight, each one step further than the next, denoised in one forward.

The oldest chunk of the joint window is at its last step, the newest is pure noise; each forward finishes one chunk
and lets a new one in. Noise is keyed by (chunk, step) as everywhere, so a stream does not depend on when it was asked
for. The chunks in flight are the stream's state (:class:`RollingState`), not the sampler's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from streamvid.config import StreamConfig
from streamvid.errors import StreamvidError
from streamvid.memory.cache import KVCache
from streamvid.memory.policies.rolling_forcing import JOINT
from streamvid.noise import Noise
from streamvid.prompt import PromptState
from streamvid.sampler import SampleBase, StepCallback
from streamvid.schedule import FlowSchedule
from streamvid.stepcache.types import ChunkInfo, NoiseKind
from streamvid.transformer import CausalWan


class JointDenoiser(Protocol):
    """The model over a window of several chunks that starts at the next absolute frame and is never committed."""

    def __call__(self, x_t: Tensor, timesteps: Tensor) -> Tensor:
        """Flow ``[b, f, c, h, w]``; ``timesteps`` ``[f]``, one a latent frame."""
        ...


def joint_denoiser(model: CausalWan, prompt: PromptState, cache: KVCache) -> JointDenoiser:
    """The model over windows that begin where ``cache`` ends; the cache is idle before and after each call."""

    def denoise(x_t: Tensor, timesteps: Tensor) -> Tensor:
        for bank in cache.all_banks():
            bank.notes[JOINT] = True
        cache.begin_chunk(x_t.shape[1])
        try:
            return model(x_t, timesteps, prompt, cache)
        finally:
            cache.abort()

    return denoise


@dataclass
class InFlight:
    """One chunk of the window."""

    index: int
    step: int
    x: Tensor
    """Its input at ``step``, ``[b, f, c, h, w]``."""


@dataclass
class RollingState:
    """The chunks in flight, oldest first."""

    chunks: list[InFlight] = field(default_factory=list)

    def state_dict(self) -> list[dict[str, Any]]:
        return [vars(chunk).copy() for chunk in self.chunks]

    def load_state_dict(self, values: list[dict[str, Any]], device: torch.device | str = "cpu") -> None:
        self.chunks = [InFlight(v["index"], v["step"], v["x"].to(device)) for v in values]


class RollingSampler(SampleBase):
    """Joint denoising of as many chunks as there are steps.

    Args:
        timesteps: what the model is fed, falling, after warping; their number is the length of the window.
        schedule: the sigma table.
        last_chunk: index after which no new chunk enters, so that the window closes (the reference's behaviour for
            clips); None keeps it full for ever, so that a clip's beginning does not depend on its length.
    """

    noise_kind: NoiseKind = "fresh"

    def __init__(
        self, timesteps: Sequence[float], schedule: FlowSchedule, last_chunk: int | None = None
    ) -> None:
        super().__init__(timesteps, [schedule.sigma(t) for t in timesteps], 1.0)
        self.schedule, self.last_chunk = schedule, last_chunk

    @classmethod
    def from_config(cls, config: StreamConfig, last_chunk: int | None = None) -> RollingSampler:
        if config.num_inference_steps is not None or config.independent_first_frame:
            raise StreamvidError(
                "joint_window works with denoising_steps and equal chunks; leave out num_inference_steps and "
                "independent_first_frame"
            )
        if config.guidance_scale != 1.0:
            raise StreamvidError(
                f"a joint window takes no guidance, got guidance_scale={config.guidance_scale}; set it to 1"
            )
        schedule = FlowSchedule(config.timestep_shift, config.num_train_timesteps)
        steps: Sequence[float] = config.denoising_steps
        if config.warp_steps:
            steps = schedule.warp(config.denoising_steps).tolist()
        return cls(steps, schedule, last_chunk)

    def sample_chunk(
        self,
        denoise: JointDenoiser,
        chunk: ChunkInfo,
        noise: Noise,
        shape: Sequence[int],
        *,
        state: RollingState,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        callback: StepCallback | None = None,
    ) -> Tensor:
        """Clean latents of one chunk; the first call runs as many forwards as there are steps, later ones one.

        Args:
            denoise: the model over joint windows.
            chunk: the chunk to finish; one of kind ``first`` empties the window.
            noise: keyed by (chunk, step).
            shape: ``(b, f, c, h, w)`` of one chunk.
            state: the stream's chunks in flight; changed only when the call succeeds.
            callback: called after each forward with ``window`` (chunk indices), ``timesteps``, ``x_t``,
            ``flow``, ``x0``.
        """
        flying = [] if chunk.kind == "first" else list(state.chunks)
        if flying and flying[0].index != chunk.index:
            raise StreamvidError(
                f"the joint window begins with chunk {flying[0].index}, not {chunk.index}; begin a new scene"
            )
        entering = flying[-1].index + 1 if flying else chunk.index
        while True:
            if self.last_chunk is None or entering <= self.last_chunk:
                flying.append(InFlight(entering, 0, noise.noise(entering, 0, shape, device, dtype)))
                entering += 1
            x0, flying = self._forward(denoise, flying, noise, shape, callback)
            if x0 is not None:
                state.chunks = flying
                return x0

    def _forward(
        self,
        denoise: JointDenoiser,
        flying: list[InFlight],
        noise: Noise,
        shape: Sequence[int],
        callback: StepCallback | None,
    ) -> tuple[Tensor | None, list[InFlight]]:
        """One pass over the window: the finished chunk, if any, and what is still in flight."""
        frames = shape[1]
        x_t = torch.cat([chunk.x for chunk in flying], 1)
        times = torch.tensor([self.timesteps[chunk.step] for chunk in flying]).repeat_interleave(frames)
        flow = denoise(x_t, times)
        x0 = self.schedule.flow_to_x0(flow, x_t, times)
        if callback is not None:
            window = [chunk.index for chunk in flying]
            callback({"window": window, "timesteps": times, "x_t": x_t, "flow": flow, "x0": x0})
        finished, following = None, []
        for place, chunk in enumerate(flying):
            clean = x0[:, place * frames : (place + 1) * frames]
            if chunk.step + 1 == len(self.timesteps):
                finished = clean
                continue
            step = chunk.step + 1
            fresh = noise.noise(chunk.index, step, shape, x0.device, x0.dtype)
            x = self.schedule.add_noise(clean, fresh, self.timesteps[step])
            following.append(InFlight(chunk.index, step, x))
        return finished, following
