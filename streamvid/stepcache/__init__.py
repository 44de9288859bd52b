"""Step caches: reuse inside and between denoising steps. One file a method; the table is the list of methods.

``STEP_CACHES`` maps the name a user writes to the method's settings; ``build_step_cache`` reads a text such
as ``"mask:skip=2 + guard"``. A new method is a file and a line here, and the property tests then hold it to
account.
"""

from __future__ import annotations

from streamvid.stepcache.adacache import AdaCache
from streamvid.stepcache.adacorrection import AdaCorrection
from streamvid.stepcache.base import NoCache, Session, StepCache
from streamvid.stepcache.block_cache import BlockCache
from streamvid.stepcache.block_map import BlockMap
from streamvid.stepcache.carry import CarriedMaps
from streamvid.stepcache.dbcache import DBCache, FirstBlockCache
from streamvid.stepcache.early_exit import EarlyExit
from streamvid.stepcache.extrapolate import AdamsBashforth, TaoCache
from streamvid.stepcache.fastercache import FasterCache
from streamvid.stepcache.flowcache import FlowCache
from streamvid.stepcache.fused import FusedContext
from streamvid.stepcache.lightningcp import StaticRegions
from streamvid.stepcache.magcache import MagCache
from streamvid.stepcache.mask import StaticMask
from streamvid.stepcache.mixcache import MixCache
from streamvid.stepcache.motion_prior import MotionPrior
from streamvid.stepcache.pab import PyramidBroadcast
from streamvid.stepcache.seacache import SeaCache
from streamvid.stepcache.stack import Stack
from streamvid.stepcache.stack import build_step_cache as _build
from streamvid.stepcache.taylorseer import TaylorSeer
from streamvid.stepcache.teacache import TeaCache
from streamvid.stepcache.tokens import TokenSubset
from streamvid.stepcache.types import BlockHooks, ChunkInfo, Decision, Denoiser, SamplingPlan, StepInfo
from streamvid.stepcache.unicp import UniCP
from streamvid.stepcache.variance_guard import VarianceGuard

_METHODS: tuple[type[StepCache], ...] = (
    # few steps with fresh noise, and any sampling
    NoCache, StaticMask, TokenSubset, CarriedMaps, BlockMap, TaoCache, AdamsBashforth, EarlyExit, MotionPrior,
    VarianceGuard, FusedContext, # many steps
    TeaCache, MagCache, SeaCache, FlowCache, FasterCache, PyramidBroadcast, FirstBlockCache, DBCache,
    TaylorSeer, AdaCache, MixCache, UniCP, AdaCorrection, BlockCache, StaticRegions,
)  # fmt: skip
STEP_CACHES: dict[str, type[StepCache]] = {method.name: method for method in _METHODS}


def build_step_cache(spec: str | StepCache) -> StepCache:
    """The step cache that a text names: ``name:key=value,...``, several joined by `` + ``.

    Raises:
        StreamvidError: unknown name or setting, naming the nearest one.
    """
    return _build(spec, STEP_CACHES)


__all__ = [
    "STEP_CACHES",
    "BlockHooks",
    "ChunkInfo",
    "Decision",
    "Denoiser",
    "SamplingPlan",
    "Session",
    "Stack",
    "StepCache",
    "StepInfo",
    "build_step_cache",
]
