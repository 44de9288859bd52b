"""What step caches are told of a real stream: the model's sizes, its time embedding, and the identity of the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from streamvid.config import StreamConfig
from streamvid.modulation import sinusoid
from streamvid.stepcache.calibration import make_key
from streamvid.stepcache.types import ModuleShares, SamplingPlan
from streamvid.transformer import CausalWan


@torch.no_grad()
def time_change(model: CausalWan, timesteps: Sequence[float]) -> tuple[float, ...]:
    """Relative L1 change of the projected time embedding from step to step; 0 for the first."""
    embedder = model.model.condition_embedder
    weight = embedder.time_embedder.linear_1.weight
    times = torch.tensor(list(timesteps), dtype=torch.float64, device=weight.device)
    wide = sinusoid(times, model.model.config.freq_dim).to(weight.dtype)
    table = embedder.time_proj(embedder.act_fn(embedder.time_embedder(wide).to(model.dtype))).float()
    change = (table[1:] - table[:-1]).abs().mean(1) / table[:-1].abs().mean(1).clamp_min(1e-12)
    return (0.0, *change.tolist())


def plan_for(
    sampler: Any,
    model: CausalWan,
    config: StreamConfig,
    *,
    grid: tuple[int, int],
    fingerprint: str,
    memory: str,
    codec: str,
) -> SamplingPlan:
    """The plan of a stream.

    Args:
        sampler: the stream's sampler.
        model: its model.
        config: the stream's configuration.
        grid: latent rows and columns.
        fingerprint: of the weights.
        memory: policy with its settings, as text.
        codec: codec with its settings, as text.
    """
    geometry = model.geometry
    rows, cols = geometry.grid(*grid)
    tokens = config.chunk_latents * rows * cols
    shares = ModuleShares.of(
        dim=geometry.dim,
        ffn_dim=geometry.ffn_dim,
        tokens=tokens,
        keys=config.trained_latents * rows * cols,
        text_len=config.text_len,
    )
    key = make_key(
        weights=fingerprint,
        timesteps=sampler.timesteps,
        shift=config.timestep_shift,
        size=(config.chunk_latents, *grid),
        window=memory,
        codec=codec,
        guidance_scale=config.guidance_scale,
    )
    plan = sampler.plan(num_layers=geometry.layers, patch=geometry.patch, shares=shares, key=key)
    return plan.replace(time_change=time_change(model, sampler.timesteps))
