"""Step caches: reuse inside and between denoising steps. One file a method; the table is the list of
methods."""

from __future__ import annotations

from streamvid.stepcache.base import NoCache, Session, StepCache
from streamvid.stepcache.types import BlockHooks, ChunkInfo, Decision, Denoiser, SamplingPlan, StepInfo

STEP_CACHES: dict[str, type[StepCache]] = {"none": NoCache}

__all__ = [
    "STEP_CACHES",
    "BlockHooks",
    "ChunkInfo",
    "Decision",
    "Denoiser",
    "SamplingPlan",
    "Session",
    "StepCache",
    "StepInfo",
]
