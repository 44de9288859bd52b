"""Measure tile sizes of the attention kernel on the GPU at hand, outside any stream. Needs CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .backends import BACKENDS
from .build import candidates
from .configs import Config, default_config, key
from .quantise import quantise
from .types import KVView


@dataclass(frozen=True)
class Timing:
    """One configuration of one kind of call."""

    name: str
    config: Config
    milliseconds: float
    """Median; infinite when the configuration does not run."""
    default: bool


def milliseconds(call: Callable[[], object], repeats: int = 20, warm_up: int = 3) -> list[float]:
    """Durations of single calls on the current CUDA device, sorted."""
    for _ in range(warm_up):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, stop in events:
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(stop) for start, stop in events)


def require_gpu() -> torch.device:
    """The CUDA device kernels can be tuned on, or ValueError."""
    device = torch.device("cuda")
    missing = (
        BACKENDS["triton"].missing(device, torch.bfloat16) if torch.cuda.is_available() else "no CUDA device"
    )
    if missing:
        raise ValueError(
            f"kernels cannot be tuned here: {missing}; run this command on the GPU the stream will use"
        )
    return device


def tune(heads: int, head_dim: int, queries: int, keys: int) -> Iterator[Timing]:
    """Time every candidate for plain, 8-bit and 4-bit keys; the fastest of a name is the one to keep.

    Args:
        heads: of the model.
        head_dim: of the model.
        queries: tokens of a chunk.
        keys: tokens of the window.

    Raises:
        ValueError: no usable GPU.
    """
    device = require_gpu()
    from .triton_launch import attend_views, capability

    cc = capability(device)
    q = torch.randn(1, queries, heads, head_dim, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(1, keys, heads, head_dim, device=device, dtype=torch.bfloat16) for _ in range(2))
    for bits in (0, 8, 4):
        stored = (
            (k, v) if not bits else tuple(quantise(x, bits, group_size=min(64, head_dim)) for x in (k, v))
        )
        view = KVView(*stored)
        usual = default_config(cc, head_dim, bits, bits)
        for config in dict.fromkeys([usual, *candidates(cc, head_dim)]):
            try:
                times = milliseconds(lambda c=config, w=view: attend_views(q, [w], head_dim**-0.5, c))
                middle = times[len(times) // 2]
            except Exception as error:  # a tile that needs more than the GPU has is a candidate that loses
                if "out of resource" not in str(error).lower():
                    raise
                middle = float("inf")
            yield Timing(key(cc, head_dim, bits, bits, False), config, middle, config == usual)


def best(timings: list[Timing]) -> dict[str, Config]:
    """The fastest configuration of each name."""
    fastest: dict[str, Timing] = {}
    for timing in timings:
        if timing.name not in fastest or timing.milliseconds < fastest[timing.name].milliseconds:
            fastest[timing.name] = timing
    return {name: timing.config for name, timing in fastest.items()}
