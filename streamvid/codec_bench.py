"""Every codec on the keys and values of a running model: error, bytes, time; as tables and as a document."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.memory.bank import Bank
from streamvid.memory.codecs import make_codec
from streamvid.memory.codecs.measure import Loss, Sample, loss
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.plan import plan
from streamvid.memory.policies import POLICIES
from streamvid.memory.policies.window import Window
from streamvid.memory.policy import Seen
from streamvid.memory.spec import build, effective
from streamvid.opening import default_memory

if TYPE_CHECKING:
    from streamvid.pipeline import StreamPipeline

CODEC_SPECS = (
    "none",
    "int8",
    "int4",
    "int4:asym=true",
    "int4:center=true",
    "quarot",
    "kivi:bits=4",
    "nvfp4",
    "prq:bits=4",
    "prq:bits=2",
    "rotatekv:bits=4",
    "int2",
    "kivi:bits=2",
    "quarot:bits=2",
    "rotatekv",
    "nsnquant",
    "nsnquant:bits=1",
    "qvg:rule=parity",
    "qvg",
    "qvg:stages=2",
    "qvg:bits=4",
    "mixed:recent_frames=6,older=int4",
)
"""What is measured by default: each codec, and the settings of it that the literature compares."""

MAIN_SPECS = ("none", "int8", "int4", "kivi:bits=4", "quarot", "nvfp4", "nsnquant", "qvg")
"""Those of `CODEC_SPECS` that are timed and planned by default; error is measured for all."""

PROMPTS = (
    "a big red ball sliding from side to side on a navy background",
    "a small green star bouncing on a black background",
    "a big yellow square orbiting on a plum background",
)
"""Prompts of the embedded model."""

WAN_13B = KVGeometry(layers=30, heads=12, head_dim=128, grid=(30, 52), dtype=torch.bfloat16)
"""Keys and values of Wan 2.1 1.3B at 480x832; plans need sizes only."""


@dataclass(kw_only=True)
class Recorder(Window):
    """A window that keeps the queries, keys and values of every context pass."""

    passes: list[dict[int, tuple[Tensor, Tensor, Tensor]]] = field(
        default_factory=list, init=False, repr=False
    )
    grid: tuple[int, int] = field(default=(1, 1), init=False, repr=False)

    def observe(self, bank: Bank, seen: Seen) -> None:
        if seen.stage != "context":
            return
        self.grid = bank.geometry.grid
        while len(self.passes) <= seen.chunk.index:
            self.passes.append({})
        self.passes[seen.chunk.index][bank.layer] = (seen.q.clone(), seen.k.clone(), seen.v.clone())


def record(
    pipe: StreamPipeline, prompts: list[str], frames: int, *, seed: int = 0
) -> tuple[list[Sample], tuple[int, int]]:
    """Keys and values a model really makes, one sample for each prompt and layer.

    Args:
        pipe: the model.
        prompts: one clip each.
        frames: latent frames of history; rounded up to whole chunks.
        seed: of the clips.

    Returns:
        The samples, and the token grid of a latent frame.
    """
    policy = build(default_memory(pipe.config), POLICIES, "memory policy")
    settings = effective(policy) if type(policy) is Window else {"size": 21, "sink": 3}
    chunks = -(-frames // pipe.config.chunk_latents)
    samples, grid = [], (1, 1)
    for prompt in prompts:
        recorder = Recorder(**settings)
        with pipe.stream(prompt, seed=seed, memory=recorder, codec="none", output_type="latent") as stream:
            for number, _ in enumerate(stream.chunks()):
                if number > chunks:
                    break
        grid = recorder.grid
        for layer in sorted(recorder.passes[0]):
            past = [recorder.passes[i][layer] for i in range(chunks)]
            q, k_now, v_now = recorder.passes[chunks][layer]
            k, v = (torch.cat([part[i] for part in past], 1) for i in (1, 2))
            samples.append(Sample(k, v, q, k_now, v_now))
    return samples, grid


def losses(specs: list[str], samples: list[Sample], grid: tuple[int, int]) -> dict[str, Loss]:
    """The error of each codec; see `streamvid.memory.codecs.measure.loss`."""
    return {spec: loss(make_codec(spec), samples, grid) for spec in specs}


def chunk_times(
    pipe: StreamPipeline, specs: list[str], prompt: str, *, memory: str, chunks: int, warm: int
) -> dict[str, dict[str, Any]]:
    """Processor milliseconds a chunk and bytes of the memory, with each codec, after ``warm`` chunks.

    Processor time of all threads: unlike a clock on the wall it does not see what else the machine does.
    """
    found: dict[str, dict[str, Any]] = {}
    for spec in specs:
        with pipe.stream(prompt, seed=0, memory=memory, codec=spec, output_type="latent") as stream:
            clips = stream.chunks()
            for _ in range(warm):
                next(clips)
            start = time.process_time()
            for _ in range(chunks):
                next(clips)
            milliseconds = 1e3 * (time.process_time() - start) / chunks
            held = sum(report["stored"] for report in stream.stats()["memory"].values())
        found[spec] = {"ms": milliseconds, "bytes": held}
    return found


def projected(specs: list[str], frames: int) -> dict[str, dict[str, float]]:
    """Stored and peak bytes of `WAN_13B` holding ``frames`` latent frames, and their ratios to no codec."""

    def sizes(spec: str) -> tuple[int, int]:
        # Layers are alike under the full history, so that two of them tell what thirty need.
        one, two = (
            plan(dataclasses.replace(WAN_13B, layers=layers), None, "full", spec, frames=frames)
            for layers in (1, 2)
        )
        more = WAN_13B.layers - 1
        return one.stored + more * (two.stored - one.stored), one.peak + more * (two.peak - one.peak)

    plain = WAN_13B.frame_bytes() * WAN_13B.layers * frames
    _, peak_plain = sizes("none")
    found = {}
    for spec in specs:
        stored, peak = sizes(spec)
        found[spec] = {
            "stored": stored,
            "peak": peak,
            "stored_ratio": stored / plain,
            "peak_ratio": peak / peak_plain,
        }
    return found


def measure(
    pipe: StreamPipeline,
    specs: list[str],
    prompts: list[str],
    *,
    name: str = "tiny",
    frames: int = 24,
    chunks: int = 8,
) -> dict[str, Any]:
    """Everything ``streamvid bench codecs`` shows, as JSON types.

    Raises:
        StreamvidError: no prompt, or a codec that does not exist.
    """
    if not prompts:
        raise StreamvidError("bench codecs needs at least one prompt; give --prompt")
    for spec in specs:
        make_codec(spec)
    samples, grid = record(pipe, prompts, frames)
    memory = (
        "full"  # so that every codec is read over the same frames; a window drops a span of QVG's as a whole
    )
    specs = ["none", *(spec for spec in specs if spec != "none")]
    main = [spec for spec in specs if spec in MAIN_SPECS] if set(CODEC_SPECS) <= set(specs) else specs
    return {
        "model": name,
        "fingerprint": pipe.components.fingerprint,
        "prompts": prompts,
        "samples": len(samples),
        "history_frames": frames,
        "grid": list(grid),
        "heads": samples[0].k.shape[2],
        "head_dim": samples[0].k.shape[3],
        "memory": memory,
        "timed_frames": [frames, frames + chunks * pipe.config.chunk_latents],
        "threads": torch.get_num_threads(),
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "loss": {spec: dataclasses.asdict(value) for spec, value in losses(specs, samples, grid).items()},
        "time": chunk_times(
            pipe, main, prompts[0], memory=memory, chunks=chunks, warm=-(-frames // pipe.config.chunk_latents)
        ),
        "plan": {str(held): projected(main, held) for held in (21, 120)},
    }
