"""From a cell to its clip, by the public interface of streamvid: `load`, `stream`, `stats`."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from streamvid.eval.grid import DEFAULT, Cell
from streamvid.eval.models import load_pipe

PROFILE_PROMPTS = (
    "a big red ball sliding from side to side on a grey background",
    "a small blue star spinning on a black background",
)
PROBED = 24
"""Chunks whose attention is looked at."""
HEADS = "{heads}"
"""Stands in a memory's text for a head profile of the model at hand, as in ``dummy_forcing:profile={heads}``."""
WARM_UP = 3
"""First chunks whose time is left out of medians: the memory is still filling."""


@dataclass
class Rendered:
    """A clip and what making it cost."""

    frames: np.ndarray
    """uint8 `[n, H, W, 3]`."""
    fps: float
    chunk_starts: list[int] = field(default_factory=list)
    """First frame of every chunk."""
    costs: dict[str, float] = field(default_factory=dict)
    """Figures of the group "cost"."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What really ran, with every default filled in."""
    regions: list[dict[str, Any]] = field(default_factory=list)
    """What memory held when each chunk was made: `chunk`, and region -> latent frames."""
    attention_mass: list[dict[str, float]] = field(default_factory=list)
    """Share of attention each region got, a chunk."""
    kv: dict[str, int] = field(default_factory=dict)
    """Bytes of keys and values by region, and the parts of the whole, at the end."""

    def facts(self) -> dict[str, Any]:
        """All but the frames and the costs, for the row."""
        facts = asdict(self)
        del facts["frames"], facts["costs"]
        return facts


class StreamRenderer:
    """Renders cells with streamvid. Models stay loaded, one of each (model, attention)."""

    def __init__(self) -> None:
        self._pipes: dict[tuple[str, str], Any] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="streamvid-")

    def pipe(self, model: str, attention: str) -> Any:
        """The pipeline of a model, loaded on first use; another model pushes it out, so that memory is bounded."""
        place = model, attention
        if place not in self._pipes:
            self._pipes.clear()
            options = {} if attention == DEFAULT else {"attention": attention}
            self._pipes[place] = load_pipe(model, **options)
        return self._pipes[place]

    def __call__(self, cell: Cell) -> Rendered:
        variant = cell.variant
        pipe = self.pipe(variant.model, variant.attention)
        options = stream_options(cell)
        profiled = HEADS in str(options.get("memory"))
        if profiled:
            options["memory"] = options["memory"].replace(HEADS, str(self.head_profile(pipe)))
        with pipe.stream(cell.prompt, **options) as stream:
            rendered = watch_stream(stream)
        if variant.steps != DEFAULT:  # the stream counts by its own steps, a table by the checkpoint's
            full = pipe.config.num_inference_steps or len(pipe.config.denoising_steps)
            rendered.costs["compute_fraction"] *= int(variant.steps) / full
        if cell.probe:
            with pipe.stream(cell.prompt, **options) as stream:
                rendered.attention_mass = attention_mass(stream)
        if profiled:  # where this process keeps the file says nothing about the clip
            text = json.dumps(rendered.settings, default=str)
            rendered.settings = json.loads(text.replace(str(self.head_profile(pipe)), HEADS))
        return rendered

    def head_profile(self, pipe: Any) -> Path:
        """The head profile of a model, made once a process, from prompts that no study measures."""
        path = Path(self._folder.name) / f"{pipe.components.fingerprint}.json"
        if not path.exists():
            from streamvid.head_profiler import profile_heads

            profile_heads(pipe, PROFILE_PROMPTS).save(path)
        return path


def stream_options(cell: Cell) -> dict[str, Any]:
    """The keyword arguments of `StreamPipeline.stream` for a cell; what is left to the checkpoint is left out."""
    variant = cell.variant
    named = {axis: getattr(variant, axis) for axis in ("memory", "codec", "step_cache")}
    options: dict[str, Any] = {axis: value for axis, value in named.items() if value != DEFAULT}
    if variant.steps != DEFAULT:
        options["num_inference_steps"] = int(variant.steps)
    sizes = {"height": cell.height, "width": cell.width}
    options |= {name: value for name, value in sizes.items() if value is not None}
    return options | {"num_frames": cell.num_frames, "seed": cell.seed}


def watch_stream(stream: Any) -> Rendered:
    """Read a stream to its end, and note what memory held and what each chunk took."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    parts, starts, regions = [], [], []
    periods: list[tuple[int, dict[str, float]]] = []
    stats: dict[str, Any] = {}
    for chunk in stream.chunks():
        parts.append(chunk.frames)
        starts.append(chunk.start_frame)
        periods.append((len(chunk), chunk.seconds))
        stats = stream.stats()
        current = list(range(chunk.start_latent, chunk.start_latent + chunk.num_latents))
        # The context pass of this chunk is still owed: what is held is what this chunk saw.
        regions.append({"chunk": chunk.index} | stats["held"] | {"current": current})
    kv = _memory(stats)
    return Rendered(
        frames=np.concatenate(parts),
        fps=stream.settings["fps"],
        chunk_starts=starts,
        costs=_costs(stats, kv, periods),
        settings=stream.settings,
        regions=regions,
        kv=kv,
    )


def attention_mass(stream: Any, chunks: int = PROBED) -> list[dict[str, float]]:
    """Share of attention of each region in the context pass of each of the first chunks."""
    from streamvid.memory.mass import RegionMass

    mass = RegionMass()
    stream.watch_attention(mass)
    shares = []
    for _, chunk in zip(range(chunks + 1), stream.chunks(), strict=False):
        if chunk.index:  # a chunk's context pass is run when the next one is asked for
            shares.append(mass.take())
    return shares


def _memory(stats: dict[str, Any]) -> dict[str, int]:
    """Bytes of all guidance branches: by region, and `stored`, `scratch`, `peak`, `dense`."""
    total: dict[str, int] = {}
    for report in stats["memory"].values():
        flat = report["regions"] | {
            key: report[key] for key in ("stored", "scratch", "peak", "dense", "free")
        }
        for key, value in flat.items():
            total[key] = total.get(key, 0) + value
    return total


def _costs(
    stats: dict[str, Any], kv: dict[str, int], periods: list[tuple[int, dict[str, float]]]
) -> dict[str, float]:
    steady = periods[WARM_UP:] if len(periods) > WARM_UP + 1 else periods[1:] or periods
    totals = np.array([seconds["total"] for _, seconds in steady])
    frames = max(len_ for len_, _ in steady)

    def stage(name: str) -> float:
        return 1000 * float(np.median([seconds.get(name, 0.0) for _, seconds in steady]))

    held = kv["stored"]
    return {
        "kv_bytes": held,
        "kv_peak_bytes": kv["peak"],
        "nominal_over_peak": held / kv["peak"] if kv["peak"] else 1.0,
        "chunk_ms": 1000 * float(np.median(totals)),
        "chunk_ms_p95": 1000 * float(np.percentile(totals, 95)),
        "fps_steady": frames / float(np.median(totals)),
        "first_frame_ms": 1000 * stats["first_frame_seconds"],
        "denoise_ms": stage("denoise"),
        "context_ms": stage("context"),
        "decode_ms": stage("decode"),
        "compute_fraction": stats["step_cache"]["compute_fraction"],
    }
