"""Timing of attention: grouped and block-sparse against dense, on a CPU or a GPU. Random tensors, no model.

Cases take turns, so that a change of clock speed or load meets all of them; figures are medians with quartiles.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .attention import attend
from .layout import Layout, Run
from .selectors import TopK
from .types import KVView

PEAKS = {"H100": (989, 3.35), "H200": (989, 4.8), "H20": (148, 4.0), "A100": (312, 2.0), "L40S": (362, 0.86),
         "L4": (121, 0.30), "4090": (165, 1.0), "3090": (71, 0.94), "B200": (2250, 8.0)}  # fmt: skip
"""Dense bf16 TFLOP/s and TB/s of memory by a part of the device's name, from the vendors' data sheets."""


@dataclass(frozen=True)
class Shape:
    """One attention call of a stream."""

    heads: int = 8
    head_dim: int = 64
    grid: tuple[int, int] = (8, 8)
    chunk: int = 3
    window: int = 21
    """Latent frames attended to, the chunk included."""

    @property
    def layout(self) -> Layout:
        """A sink frame, the recent past, the current chunk."""
        past = [Run("sink", 0.0), *(Run("recent", float(t)) for t in range(1, self.window - self.chunk))]
        current = [float(t) for t in range(self.window - self.chunk, self.window)]
        runs = [*past[: max(0, self.window - self.chunk)], *(Run("current", t) for t in current)]
        return Layout(self.grid, tuple(current), tuple(runs))

    @property
    def queries(self) -> int:
        return self.chunk * self.grid[0] * self.grid[1]

    @property
    def keys(self) -> int:
        return self.window * self.grid[0] * self.grid[1]

    def floor(self, density: float, element_bytes: int, peak: tuple[float, float] | None) -> dict[str, float]:
        """FLOPs and bytes of one call, and the milliseconds neither can undercut at these peaks."""
        width = self.heads * self.head_dim
        flops = 4 * self.queries * self.keys * width * density
        moved = (2 * self.queries + 2 * self.keys) * width * element_bytes
        found = {"gflop": flops / 1e9, "mbyte": moved / 1e6}
        if peak is not None:
            found["floor_ms"] = max(flops / (peak[0] * 1e12), moved / (peak[1] * 1e12)) * 1e3
        return found


@dataclass
class Case:
    """One thing to time."""

    name: str
    call: Callable[[], object]
    density: float = 1.0
    milliseconds: list[float] = field(default_factory=list)

    def row(self, shape: Shape, element_bytes: int, peak: tuple[float, float] | None, dense: float) -> dict:
        """Median, quartiles, ratio to dense, and the floor."""
        times = sorted(self.milliseconds)
        middle = times[len(times) // 2]
        return {
            "case": self.name, "density": round(self.density, 4), "ms": middle, "ms_q1": times[len(times) // 4],
            "ms_q3": times[3 * len(times) // 4], "runs": len(times), "of_dense": middle / dense,
            **shape.floor(self.density, element_bytes, peak),
        }  # fmt: skip


def peak_of(name: str) -> tuple[float, float] | None:
    """Peaks of the device with this name, None if it is not in the table."""
    return next(
        (peak for part, peak in sorted(PEAKS.items(), key=lambda p: -len(p[0])) if part in name), None
    )


def tensors(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    sizes = (shape.queries, shape.keys, shape.keys)
    made = [torch.randn(1, n, shape.heads, shape.head_dim, generator=generator) for n in sizes]
    q, k, v = (x.to(device, dtype) for x in made)
    return q, k, v


def cpu_cases(shape: Shape) -> list[Case]:
    """Dense, dense with a mask, ragged heads as groups, and block-sparse at three densities.

    Half of the heads are static in two ways: they alone keep little (the other half reads the whole window), and as
    Forcing-KV keeps keys: static heads the sink, the newest committed frame and the current chunk, dynamic heads one
    frame more.
    """
    q, k, v = tensors(shape, torch.device("cpu"), torch.float32)
    size = shape.grid[0] * shape.grid[1]
    half = shape.heads // 2
    # Static heads read the sink frame and the current chunk.
    kept = torch.cat([torch.arange(size), torch.arange(shape.keys - shape.queries, shape.keys)])
    bias = torch.zeros(shape.heads, shape.keys)
    hidden = torch.ones(shape.keys, dtype=torch.bool)
    hidden[kept] = False
    bias[half:, hidden] = -torch.inf
    dynamic = KVView(k[:, :, :half].contiguous(), v[:, :, :half].contiguous(), heads=range(half))
    static = KVView(
        k[:, kept, half:].contiguous(), v[:, kept, half:].contiguous(), heads=range(half, shape.heads)
    )
    share = (half * shape.keys + (shape.heads - half) * len(kept)) / (shape.heads * shape.keys)
    forcing, frames = [], 0
    for past, heads in ((2, range(half)), (1, range(half, shape.heads))):
        recent = torch.arange(shape.keys - shape.queries - past * size, shape.keys)
        rows = torch.cat([torch.arange(size), recent])
        forcing.append(KVView(*(x[:, rows][:, :, list(heads)] for x in (k, v)), heads=heads))
        frames += len(rows) * len(heads)
    cases = [
        Case("dense", lambda: attend(q, [KVView(k, v)])),
        Case("half static, dense with mask", lambda: attend(q, [KVView(k, v, bias=bias)])),
        Case("half static, grouped", lambda: attend(q, [dynamic, static]), share),
        Case("forcing_kv, grouped", lambda: attend(q, forcing), frames / (shape.heads * shape.keys)),
    ]
    for density in (0.5, 0.25, 0.125):
        rule = TopK(density=density, sink=density >= 0.25, current=density >= 0.25, last=int(density >= 0.25))
        blocks = rule.select(q, k, shape.layout)
        view = KVView(k, v, blocks=blocks)
        cases.append(Case(f"blocks {density:.3g}", lambda w=view: attend(q, [w]), blocks.density().item()))
    rule = TopK(density=0.25)
    cases.append(Case("choosing the blocks", lambda: rule.select(q, k, shape.layout), 0.0))
    return cases


def gpu_cases(shape: Shape, dtype: torch.dtype) -> Iterator[Case]:
    """Dense SDPA and FlexAttention, then the Triton kernel over densities, and 4-bit keys fused and unpacked."""
    from .quantise import dequantise, quantise

    device = torch.device("cuda")
    q, k, v = tensors(shape, device, dtype)
    yield Case("sdpa dense", lambda: attend(q, [KVView(k, v)], backend="sdpa"))
    yield Case("triton dense", lambda: attend(q, [KVView(k, v)], backend="triton"))
    for density in (1.0, 0.75, 0.5, 0.43, 0.25, 0.125):
        blocks = TopK(density=density, current=density > 0.2).select(q, k, shape.layout)
        view = KVView(k, v, blocks=blocks)
        found = blocks.density().item()
        yield Case(f"triton blocks {density:.3g}", lambda w=view: attend(q, [w], backend="triton"), found)
        yield Case(f"flex blocks {density:.3g}", lambda w=view: attend(q, [w], backend="flex"), found)
    packed = tuple(quantise(x, 4, group_size=min(64, shape.head_dim)) for x in (k, v))
    yield Case("triton int4 fused", lambda: attend(q, [KVView(*packed)], backend="triton"))
    scratch = torch.empty_like(k), torch.empty_like(v)

    def unpack() -> Tensor:
        return attend(
            q, [KVView(*(dequantise(p, s) for p, s in zip(packed, scratch, strict=True)))], backend="sdpa"
        )

    yield Case("sdpa int4 through scratch", unpack)


def run(cases: list[Case], rounds: int, device: torch.device) -> str:
    """Time all cases in turns; returns what the clock was.

    With one thread the clock is the CPU time of the process, so that other programs on the machine count less.
    """
    for case in cases:
        for _ in range(3):
            case.call()
    if device.type == "cuda":
        from .tune import milliseconds

        for case in cases:
            case.milliseconds = milliseconds(case.call, rounds)
        return "CUDA events, one call each"
    single = torch.get_num_threads() == 1
    clock = time.process_time if single else time.perf_counter
    for _ in range(rounds):
        for case in cases:
            started = clock()
            case.call()
            case.milliseconds.append((clock() - started) * 1e3)
    return "CPU time of the process, one thread" if single else f"wall, {torch.get_num_threads()} threads"


def rows(cases: list[Case], shape: Shape, element_bytes: int, peak: tuple[float, float] | None) -> list[dict]:
    """One dictionary a case; the first case is the dense one all are compared with."""
    times = sorted(cases[0].milliseconds)
    dense = times[len(times) // 2]
    return [case.row(shape, element_bytes, peak, dense) for case in cases]
