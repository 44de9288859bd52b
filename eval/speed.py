"""Speed of a stream: what the viewer waits for, what it costs, and how far from the floor it is.

Definitions. *First frame*: from the request to the first decoded frame on the host, text encoding included. *Period*:
time between the ends of consecutive chunks once the memory is full, context pass and decoding included, read without
pause. *Frames a second*: frames of a chunk over the median period. *Control*: from `set_prompt` to the first frame made
under the new prompt. Loading and compiling are outside every clock; the first stream is a warm-up and is not counted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from streamvid.errors import StreamvidError
from streamvid.eval.floor import Limits, Shape, chunk_floor, decoder_operations, measure_limits, pass_cost

PROMPTS = ("a big red star spinning on a black background", "a big blue ball bouncing on a grey background")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long to measure."""

    chunks: int = 20
    """Chunks in the steady state."""
    repeats: int = 5
    """Streams opened for the first-frame figures, and prompt changes for the control figures."""
    warm_up: int = 2
    """Chunks before the clock, besides those that fill the memory."""
    target_fps: float | None = None
    """Rate of playback for the deadline figures; None is the checkpoint's own."""
    buffer_frames: int = 12
    """Frames that must be there before playback starts."""

    def __post_init__(self) -> None:
        for name, least in (("chunks", 2), ("repeats", 1), ("warm_up", 0), ("buffer_frames", 1)):
            if getattr(self, name) < least:
                raise StreamvidError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.target_fps is not None and self.target_fps <= 0:
            raise StreamvidError(f"target_fps must be above 0, got {self.target_fps}")


@dataclass
class Speed:
    """All figures of one setting. Times in milliseconds, bytes in bytes."""

    settings: dict[str, Any]
    first_frame_ms: dict[str, float] = field(default_factory=dict)
    period_ms: dict[str, float] = field(default_factory=dict)
    fps: float = 0.0
    control_ms: dict[str, float] = field(default_factory=dict)
    playback: dict[str, float] = field(default_factory=dict)
    parts_ms: dict[str, float] = field(default_factory=dict)
    floor_ms: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    visible_latents: int = 0
    chunks: int = 0


def spread(values: Sequence[float]) -> dict[str, float]:
    """p50, p95, max and count."""
    x = np.asarray(values, np.float64)
    return {
        "p50": float(np.median(x)),
        "p95": float(np.percentile(x, 95)),
        "max": float(x.max()),
        "n": len(x),
    }


def playback(
    ends: Sequence[float], frames: Sequence[int], fps: float, buffer_frames: int
) -> dict[str, float]:
    """What a viewer sees who plays at `fps` and starts when `buffer_frames` are there.

    A frame that is not there when it is due is late; playback waits for it and goes on from there.

    Args:
        ends: when each chunk was complete, seconds; frames: how many it brought.

    Returns:
        `late_frames` (fraction), `stalls` (times that playback stopped), `stalled_seconds`.
    """
    arrivals = np.repeat(np.asarray(ends, np.float64), frames)
    if len(arrivals) < buffer_frames:
        raise StreamvidError(
            f"{len(arrivals)} frames do not fill a buffer of {buffer_frames}; measure longer"
        )
    due = arrivals[buffer_frames - 1]
    late, stalls, stalled = 0, 0, 0.0
    for arrival in arrivals:
        if arrival > due + 1e-9:
            late, stalls, stalled = late + 1, stalls + 1, stalled + arrival - due
            due = arrival
        due += 1 / fps
    return {"late_frames": late / len(arrivals), "stalls": stalls, "stalled_seconds": stalled}


def _synchronise(pipe: Any) -> None:
    if pipe.device.type == "cuda":
        import torch

        torch.cuda.synchronize(pipe.device)


def measure_speed(pipe: Any, options: dict[str, Any], plan: Plan, limits: Limits | None = None) -> Speed:
    """All figures of one setting.

    Args:
        pipe: a loaded pipeline.
        options: keyword arguments of `pipe.stream`, without prompt, `num_frames` and `ahead`.
        limits: of the machine, as `measure_limits` gives them; measured here when None.
    """
    firsts = [_first_frame(pipe, options) for _ in range(plan.repeats + 1)][1:]
    _reset_peak(pipe)
    with pipe.stream(PROMPTS[0], **options) as stream:
        reader = stream.chunks()
        _fill(stream, reader, plan.warm_up)
        ends, frames, seconds = [], [], []
        begin = time.perf_counter()
        for _ in range(plan.chunks):
            chunk = next(reader)
            ends.append(time.perf_counter() - begin)
            frames.append(len(chunk))
            seconds.append(chunk.seconds)
        control = [_control(stream, reader, PROMPTS[(turn + 1) % 2]) for turn in range(plan.repeats)]
        periods = 1000 * np.diff([0.0, *ends])
        stats = stream.stats()
        visible = stats["memory"]["cond"]["frames"] + stream.settings["chunk_latents"]
        speed = Speed(
            settings=stream.settings,
            first_frame_ms=spread(1000 * np.array(firsts)),
            period_ms=spread(periods),
            fps=1000 * frames[-1] / float(np.median(periods)),
            control_ms=spread(1000 * np.array(control)),
            playback=playback(ends, frames, plan.target_fps or stream.settings["fps"], plan.buffer_frames),
            parts_ms=_parts(pipe, stream, reader, seconds),
            memory=_memory(pipe, stats),
            visible_latents=visible,
            chunks=plan.chunks,
        )
    speed.floor_ms = floor_of(pipe, speed.settings, visible, limits)
    return speed


def _first_frame(pipe: Any, options: dict[str, Any]) -> float:
    begin = time.perf_counter()
    with pipe.stream(PROMPTS[0], **options) as stream:
        next(stream)
        return time.perf_counter() - begin


def _fill(stream: Any, reader: Any, warm_up: int, most: int = 64) -> None:
    """Read until the memory no longer grows, then `warm_up` chunks. A memory without bound is left at `most`."""
    held = -1
    for _ in range(most):
        next(reader)
        now = stream.stats()["memory"]["cond"]["frames"]
        if now == held:
            break
        held = now
    for _ in range(warm_up):
        next(reader)


def _control(stream: Any, reader: Any, prompt: str) -> float:
    begin = time.perf_counter()
    receipt = stream.set_prompt(prompt)
    while next(reader).index < receipt.chunk:
        pass
    return time.perf_counter() - begin


def _parts(pipe: Any, stream: Any, reader: Any, seconds: list[dict[str, float]]) -> dict[str, float]:
    """Median milliseconds of each stage, of each denoising pass, and of encoding a new text.

    The passes are timed on one further chunk, with a wait for the device after each.
    """
    stages = {name: None for chunk in seconds for name in chunk}
    parts = {name: 1000 * float(np.median([c.get(name, 0.0) for c in seconds])) for name in stages}
    marks: list[float] = []

    def mark(event: Any) -> None:
        _synchronise(pipe)
        marks.append(time.perf_counter())

    before, stream.on_step = stream.on_step, mark
    try:
        next(reader)
    finally:
        stream.on_step = before
    for index, span in enumerate(np.diff(marks), 2):
        parts[f"pass_{index}"] = 1000 * float(span)
    if pipe.text_encoder is not None:
        begin = time.perf_counter()
        pipe.text_encoder.encode([f"a text that no cache knows, number {time.time_ns()}"])
        _synchronise(pipe)
        parts["text"] = 1000 * (time.perf_counter() - begin)
    return parts


def _reset_peak(pipe: Any) -> None:
    if pipe.device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(pipe.device)


def peak_rss() -> int:
    """Largest resident size of this process so far, loading included; where the system keeps none, the size now."""
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return int(psutil.Process().memory_info().rss)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _memory(pipe: Any, stats: dict[str, Any]) -> dict[str, int]:
    """Peak bytes: of the process, of the device, of keys and values, and of all tensors of the stream."""
    found = {
        "rss": peak_rss(),
        "kv_stored": sum(report["stored"] for report in stats["memory"].values()),
        "kv_peak": sum(report["peak"] for report in stats["memory"].values()),
        "stream": stats["bytes"],
    }
    if pipe.device.type == "cuda":
        import torch

        found["allocated_peak"] = torch.cuda.max_memory_allocated(pipe.device)
        found["reserved_peak"] = torch.cuda.max_memory_reserved(pipe.device)
    return found


def floor_of(
    pipe: Any, settings: dict[str, Any], visible: int, limits: Limits | None = None
) -> dict[str, Any]:
    """The floor of a chunk of a stream with these settings, milliseconds, and what it is made of."""
    import torch

    from streamvid.vae import make_decoder

    limits = limits or measure_limits(pipe.device, pipe.dtype)
    config, frames = pipe.config, settings["chunk_latents"]
    rows, columns = (settings[side] // config.vae_scale_spatial for side in ("height", "width"))
    shape = Shape.of(
        pipe.transformer,
        frames=frames,
        visible=visible,
        height=rows,
        width=columns,
        text_tokens=config.text_len,
    )
    branches = 1 if settings["guidance_scale"] == 1.0 else 2
    decoder, operations = make_decoder(pipe.vae), 0.0
    channels = pipe.transformer.config.out_channels
    latents = torch.zeros(1, frames, channels, rows, columns, device=pipe.device, dtype=pipe.dtype)
    decoder.decode_chunk(latents)  # the first chunk of a clip has fewer frames
    operations = decoder_operations(lambda: decoder.decode_chunk(latents))
    cost = pass_cost(shape)
    floor = chunk_floor(cost, operations, limits, steps=len(settings["timesteps"]), branches=branches)
    times = {name: value if name == "bound" else 1000 * value for name, value in floor.to_dict().items()}
    return times | {
        "gflop_per_pass": cost.operations / 1e9,
        "gflop_decode": operations / 1e9,
        "machine_gflops": limits.operations / 1e9,
        "machine_gbytes_per_s": limits.bandwidth / 1e9,
    }


@dataclass(frozen=True)
class Versus:
    """Two settings measured in turns, chunk by chunk. `ratio` is time of the first over time of the second."""

    first_ms: dict[str, float]
    second_ms: dict[str, float]
    ratio: float
    """Median over pairs of chunks; above 1 the second is faster."""
    interval: tuple[float, float]
    """Middle half of the pairs' ratios."""
    pairs: int


def versus(open_first: Callable[[], Any], open_second: Callable[[], Any], plan: Plan) -> Versus:
    """Measure two streams in turns (A B, B A, ...), so that what else the machine does falls on both.

    Args:
        open_first, open_second: make the streams; both are open at once.
    """
    with open_first() as first, open_second() as second:
        readers = [first.chunks(), second.chunks()]
        for stream, reader in zip((first, second), readers, strict=True):
            _fill(stream, reader, plan.warm_up)
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(plan.chunks):
            for side in ((0, 1), (1, 0))[turn % 2]:
                begin = time.perf_counter()
                next(readers[side])
                times[side].append(1000 * (time.perf_counter() - begin))
    ratios = np.array(times[0]) / np.array(times[1])
    low, high = np.percentile(ratios, [25, 75])
    return Versus(
        spread(times[0]), spread(times[1]), float(np.median(ratios)), (float(low), float(high)), len(ratios)
    )


def scaling(pipe: Any, options: dict[str, Any], axis: str, plan: Plan) -> list[dict[str, float]]:
    """Median chunk period along one axis, others fixed.

    Args:
        axis: "window" (latent frames seen: 2, 3, 4, 5, 7 chunks), "resolution" (1/2, 1 and 3/2 of the side, where
            the model can), or "length" (by tenths of a run of 10 x `plan.chunks` chunks: flat or not).
    """
    if axis == "length":
        return _by_length(pipe, options, plan)
    chunk, config = pipe.config.chunk_latents, pipe.config
    points: list[tuple[str, float, dict[str, Any]]] = []
    if axis == "window":
        for count in (2, 3, 4, 5, 7):
            points.append(("latents", count * chunk, {"memory": f"window:size={count * chunk},sink=1"}))
    elif axis == "resolution":
        unit = config.vae_scale_spatial * pipe.transformer.config.patch_size[1]
        for part in (0.5, 1.0, 1.5):
            height, width = (
                max(unit, round(side * part / unit) * unit) for side in (config.height, config.width)
            )
            points.append(("pixels", height * width, {"height": height, "width": width}))
    else:
        raise StreamvidError(f"unknown scale {axis!r} (allowed: window, resolution, length)")
    rows = []
    for name, value, change in points:
        with pipe.stream(PROMPTS[0], **(options | change)) as stream:
            reader = stream.chunks()
            _fill(stream, reader, plan.warm_up)
            rows.append({name: value, **spread([_timed(reader) for _ in range(plan.chunks)])})
    return rows


def _timed(reader: Any) -> float:
    begin = time.perf_counter()
    next(reader)
    return 1000 * (time.perf_counter() - begin)


def _by_length(pipe: Any, options: dict[str, Any], plan: Plan) -> list[dict[str, float]]:
    rows = []
    with pipe.stream(PROMPTS[0], **options) as stream:
        reader = stream.chunks()
        for part in range(10):
            times = [_timed(reader) for _ in range(plan.chunks)]
            held = sum(report["total"] for report in stream.stats()["memory"].values())
            rows.append({"chunk": (part + 1) * plan.chunks, **spread(times), "kv_bytes": held})
    return rows
