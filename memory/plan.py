"""What a memory setting will cost, before anything is allocated: bytes by region, scratch, peak, longest window.

Nothing here knows a layout. The cache itself runs a few chunks on ``meta`` tensors (shapes without data) and its own
report is read off, so a plan cannot drift from what a run does, and every policy and codec is covered by being
written. Not counted: the tensors of one attention call, and two or three fp32 copies of one frame of one layer
while a codec packs or unpacks it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from streamvid.memory.cache import KVCache
from streamvid.memory.codecs import CODECS, KVCodec, PackedKV, make_codec, packed_bytes
from streamvid.memory.codecs.base import Places
from streamvid.memory.codecs.none import NoCodec
from streamvid.memory.compat import check
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.policies import POLICIES
from streamvid.memory.policy import MemoryPolicy, overrides
from streamvid.memory.report import MemoryReport
from streamvid.memory.spec import build, effective

SIMULATED_FRAMES = 96
"""Latent frames simulated at most; a history that still grows then is continued as a straight line."""


class BudgetError(ValueError):
    """A memory setting does not fit its budget; the message carries the numbers."""


@dataclass(frozen=True)
class MemoryPlan:
    """What a cache will hold once its window is full (or, if it grows, after ``frames`` latent frames)."""

    regions: dict[str, int]
    """Bytes of committed tokens by region, all layers."""
    stored: int
    """Bytes between chunks: regions, empty slots, tensors of the policy."""
    scratch: int
    """Bytes of the one layer's scratch that all layers share, and of the rotation tables."""
    peak: int
    """Largest number of bytes at any moment, scratch and the chunk in progress included."""
    held: int
    """Latent frames held between chunks."""
    dense: int
    """Bytes of the committed tokens without a codec."""
    host: int
    """Bytes of the archive on the host (codec ``offload``); the staging of up to two layers' packed blocks on the
    device is not part of ``peak``."""
    frames: int
    """Latent frames of the stream that the plan is for."""
    grows: bool
    """Whether the bytes grow with the length of the stream."""
    budget: int | None
    """The budget it was checked against."""
    longest: int | None
    """With a budget: the largest window (policies with a ``size``), or the longest history (those that grow), in
    latent frames, that fits; None where the policy has no such number."""

    def rows(self) -> list[tuple[str, str]]:
        """Names and values for printing."""
        rows = [(f"region {name}", format_bytes(size)) for name, size in self.regions.items()]
        rows += [
            ("stored", f"{format_bytes(self.stored)} ({self.held} latent frames)"),
            ("layer scratch", format_bytes(self.scratch)),
            ("peak", format_bytes(self.peak) + (f" after {self.frames} latent frames" if self.grows else "")),
        ]
        if self.host:
            rows.append(("on the host", format_bytes(self.host)))
        if self.budget is not None:
            rows.append(("budget", format_bytes(self.budget)))
        if self.longest is not None:
            rows.append(("fits", f"{self.longest} latent frames"))
        return rows


def format_bytes(size: float) -> str:
    """Bytes for people, decimal units: ``1.73 GB``."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size:.0f} B"


def plan(
    geometry: KVGeometry,
    budget_bytes: int | None = None,
    policy: str | MemoryPolicy = "window",
    codec: str | KVCodec | None = None,
    *,
    chunk_frames: int = 3,
    frames: int | None = None,
    **settings: Any,
) -> MemoryPlan:
    """Work out what a cache of these settings will hold, and refuse it when that is over the budget.

    Args:
        geometry: sizes and dtype of the model's keys and values; its device plays no part.
        budget_bytes: the most that keys, values and scratch may take; None only computes.
        policy: a memory policy or its text form.
        codec: a codec or its text form; None holds plain tensors.
        chunk_frames: latent frames of the usual chunk.
        frames: latent frames the stream will run; needed only where the history grows without end.
        settings: further settings of `KVCache` (``retain``, ``shadow``, ...).

    Raises:
        BudgetError: over the budget; names what would fit.
        ValueError: a setting that cannot work, or ``frames`` missing.
    """
    policy = build(policy, POLICIES, "memory policy")
    codec = None if codec is None else make_codec(codec)
    if isinstance(codec, NoCodec):
        codec = None  # as the cache takes it: plain slots
    check(policy, codec, chunk_frames)
    setup = _Setup(geometry, policy, codec, chunk_frames, tuple(sorted(settings.items())))
    result = _project(setup, frames)
    if budget_bytes is None:
        return result
    result = dataclasses.replace(result, budget=budget_bytes, longest=_longest(setup, budget_bytes, result))
    if result.peak > budget_bytes:
        raise BudgetError(_refusal(setup, result))
    return result


@dataclass(frozen=True, eq=False)
class _Setup:
    geometry: KVGeometry
    policy: MemoryPolicy
    codec: KVCodec | None
    chunk_frames: int
    settings: tuple[tuple[str, Any], ...]

    def key(self) -> tuple:
        """Equal for equal setups; policies and codecs are dataclasses that cannot be hashed themselves."""
        plugins = ((type(p), tuple(effective(p).items())) for p in (self.policy, self.codec) if p is not None)
        return (self.geometry, *plugins, self.chunk_frames, self.settings)

    def __hash__(self) -> int:
        return hash(self.key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Setup) and self.key() == other.key()


@dataclasses.dataclass(eq=False)
class _Sizes:
    """Stands in for a codec in a simulation: blocks of the right size, made without running the codec."""

    codec: KVCodec

    def __post_init__(self) -> None:
        self.span_frames = self.codec.span_frames
        self.token_wise, self.lossless = self.codec.token_wise, self.codec.lossless

    def tier(self, region: str, age: int) -> str:
        return self.codec.tier(region, age)

    def encode(self, k: Tensor, v: Tensor, *, region: str = "recent", age: int = 0) -> PackedKV:
        size = packed_bytes(self.codec, tuple(k.shape), k.dtype, region=region, age=age)
        part = torch.empty(size, dtype=torch.uint8, device="meta")
        return PackedKV({"k.all": part}, tuple(k.shape), k.dtype, self.tier(region, age))

    def decode(self, packed: PackedKV, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        if out is not None:
            return out
        k, v = (torch.empty(packed.shape, dtype=packed.dtype, device="meta") for _ in range(2))
        return k, v

    def nbytes(self, packed: PackedKV) -> int:
        return packed.nbytes

    def recode(self, packed: PackedKV, *, region: str, age: int) -> PackedKV:
        same = self.tier(region, age) == packed.tier
        return packed if same else self.encode(*self.decode(packed), region=region, age=age)

    def prefetch(self, blocks: Sequence[PackedKV]) -> None: ...

    def settle(self) -> None: ...

    def host_nbytes(self, packed: PackedKV) -> int:
        return self.codec.host_nbytes(packed) if isinstance(self.codec, Places) else 0

    @property
    def staged_nbytes(self) -> int:
        return 0


@lru_cache(maxsize=64)
def _simulate(setup: _Setup, frames: int) -> tuple[list[MemoryReport], bool]:
    """Reports after each chunk, until the bytes stand still or ``frames`` have run; and whether they stood still."""
    geometry = dataclasses.replace(setup.geometry, device="meta")
    codec = None if setup.codec is None else _Sizes(setup.codec)
    cache = KVCache(
        geometry,
        setup.policy,
        codec,
        chunk_frames=setup.chunk_frames,
        **dict(setup.settings),
    )
    patience = max(6, 3 * _span(setup))
    reports: list[MemoryReport] = []
    for _ in range(math.ceil(frames / setup.chunk_frames)):
        _run_chunk(cache)
        reports.append(cache.report())
        recent = reports[-patience:]
        if len(reports) > patience and recent[0].peak == recent[-1].peak:
            return reports, True
    return reports, False


def _run_chunk(cache: KVCache) -> None:
    """One noisy pass and the context pass: all layers where the policy watches them, else one of each kind."""
    geometry = cache.geometry
    shape = (
        geometry.batch,
        cache.chunk_frames * geometry.tokens_per_frame,
        geometry.heads,
        geometry.head_dim,
    )
    x = torch.empty(shape, dtype=geometry.dtype, device="meta")
    watched = overrides(cache.policy, "observe") or overrides(cache.policy, "refine")
    cache.begin_chunk(cache.chunk_frames)
    for layer in range(geometry.layers) if watched else _kinds(cache):
        cache.attend(layer, x, x, x)
    cache.begin_context()
    for layer in range(geometry.layers):
        if watched and layer + 1 < geometry.layers:
            cache.attend(layer, x, x, x)
        else:
            cache.write(layer, x, x, x if cache.observes else None)
    cache.commit()


def _kinds(cache: KVCache) -> list[int]:
    """The first layer of each kind: layers that show this chunk equally many tokens need the same scratch."""
    kinds: dict[tuple, int] = {}
    for layer, banks in enumerate(cache.banks):
        views = [cache.views[layer, bank.group] for bank in banks]
        shown = ((b.heads, v.rows, v.committed) for b, v in zip(banks, views, strict=True))
        kinds.setdefault(tuple(shown), layer)
    return list(kinds.values())


def _project(setup: _Setup, frames: int | None) -> MemoryPlan:
    """The plan without a budget."""
    most = SIMULATED_FRAMES + 2 * getattr(setup.policy, "size", 0)
    reports, still = _simulate(setup, most if frames is None else min(frames, most))
    last, grows = reports[-1], not still
    if grows and frames is None:
        raise ValueError(
            f"memory plan: the history of policy {type(setup.policy).__name__} grows with the stream; say for how "
            "many latent frames to plan (frames=...), or choose a policy with a window"
        )
    # Frames that wait for their span come and go: what a window holds is the most of one such round.
    around = reports[-1:] if grows else reports[-_span(setup) :]
    level = max(around, key=lambda report: report.stored)
    result = MemoryPlan(
        regions={name: size for name, size in level.regions.items() if size},
        stored=level.stored,
        scratch=max(report.scratch for report in around),
        peak=last.peak,
        held=level.frames,
        dense=level.dense,
        host=level.host,
        frames=setup.chunk_frames * len(reports),
        grows=grows,
        budget=None,
        longest=None,
    )
    if grows and frames > result.frames:
        return _extend(setup, result, reports, frames)
    return result


def _span(setup: _Setup) -> int:
    """Chunks after which a codec that packs spans of frames is where it was."""
    frames = 1 if setup.codec is None else setup.codec.span_frames
    return math.lcm(frames, setup.chunk_frames) // setup.chunk_frames


def _extend(setup: _Setup, result: MemoryPlan, reports: list[MemoryReport], frames: int) -> MemoryPlan:
    """Continue a growing history as a straight line through its second half."""
    half = len(reports) // 2 // _span(setup) * _span(setup)
    before = reports[-1 - half]
    times = (frames - result.frames) / (setup.chunk_frames * half)

    def further(now: int, then: int) -> int:
        return round(now + (now - then) * times)

    last = reports[-1]
    grown = {name: further(size, before.regions.get(name, 0)) for name, size in last.regions.items() if size}
    return dataclasses.replace(
        result,
        regions=grown,
        stored=further(result.stored, result.stored - last.stored + before.stored),
        scratch=further(last.scratch, before.scratch),
        peak=further(last.peak, before.peak),
        held=further(last.frames, before.frames),
        dense=further(last.dense, before.dense),
        host=further(last.host, before.host),
        frames=frames,
    )


def _longest(setup: _Setup, budget: int, result: MemoryPlan) -> int | None:
    """The largest window or, for a history that grows, the longest one that fits; 0 when not even a chunk does."""
    if result.grows:
        return _longest_history(setup, budget)
    size = getattr(setup.policy, "size", None)
    return None if size is None else _longest_window(setup, budget, size, result.peak)


def _longest_history(setup: _Setup, budget: int) -> int:
    reports, _ = _simulate(setup, SIMULATED_FRAMES)
    chunk = setup.chunk_frames
    fitting = sum(report.peak <= budget for report in reports)
    if fitting < len(reports):
        return fitting * chunk
    half = len(reports) // 2 // _span(setup) * _span(setup)
    slope = (reports[-1].peak - reports[-1 - half].peak) / half
    return chunk * (len(reports) + int((budget - reports[-1].peak) / slope))


def _longest_window(setup: _Setup, budget: int, size: int, peak: int) -> int:
    """By the straight line through two windows, then tried and shortened until it really fits."""

    def tried(frames: int) -> float:
        try:
            policy = dataclasses.replace(setup.policy, size=frames)
            policy.validate(setup.geometry, setup.chunk_frames)
        except ValueError:
            return -math.inf  # smaller than the policy's sink and a chunk
        return _project(dataclasses.replace(setup, policy=policy), None).peak

    step = max(setup.chunk_frames, 1 if setup.codec is None else setup.codec.span_frames)
    slope = (tried(size + step) - peak) / step
    frames = max(0, math.floor(size + (budget - peak) / slope))
    if frames > SIMULATED_FRAMES:
        return frames
    while frames > 0 and (needed := tried(frames)) > budget:
        frames -= max(1, math.ceil((needed - budget) / slope))
    return frames if frames > 0 and tried(frames) > 0 else 0


def _refusal(setup: _Setup, result: MemoryPlan) -> str:
    assert result.budget is not None
    what = type(setup.policy).__name__.lower()
    text = (
        f"memory plan: {what} with codec {codec_name(setup.codec)} needs {format_bytes(result.peak)} at its peak "
        f"(stored {format_bytes(result.stored)} for {result.held} latent frames, layer scratch "
        f"{format_bytes(result.scratch)}), but the budget is {format_bytes(result.budget)}"
    )
    ways = []
    if result.longest:
        ways.append(f"{result.longest} latent frames instead" if result.grows else f"size={result.longest}")
    for spec in ("int8", "int4"):
        if setup.codec is None and "shadow" not in dict(setup.settings):
            smaller = _project(dataclasses.replace(setup, codec=make_codec(spec)), result.frames)
            if smaller.peak <= result.budget:
                ways.append(f"codec {spec} ({format_bytes(smaller.peak)})")
    return f"{text}; what fits: {' or '.join(ways) if ways else 'a larger budget only'}"


def codec_name(codec: KVCodec | None) -> str:
    """The registered name of a codec."""
    names = {cls: name for name, cls in CODECS.items()}
    return "none" if codec is None else names.get(type(codec), type(codec).__name__)
