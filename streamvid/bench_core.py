"""``streamvid bench cpu-core``: the chunk loop against plain diffusers blocks, on random weights of a middle size.

Ours: every chunk through the public stream, four steps and the context pass, attention to a window of 21 latent frames
through the cache. Plain: the model's own forward over the same window of 21 latent frames at each of the four steps,
nothing kept (and no context pass, as it needs none). Text encoding and VAE are in neither.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

MODEL: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 8,
    "attention_head_dim": 64,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 512,
    "freq_dim": 256,
    "ffn_dim": 2048,
    "num_layers": 8,
}
LATENT = 16
"""Latent rows and columns: 64 tokens a frame with the patch."""
TEXT_LEN = 64
WINDOW = 21
STEPS = (1000, 750, 500, 250)
CHUNK = 3


@dataclass
class _FixedText:
    """Stands for a text encoder, which is not measured."""

    text_len: int = TEXT_LEN
    text_dim: int = MODEL["text_dim"]

    def encode(self, prompts: list[str]) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(len(prompts), self.text_len, self.text_dim, generator=generator)


def measure(threads: int, chunks: int = 10, memory: str | None = None) -> dict[str, Any]:
    """Seconds a chunk of both, the window full. JSON-ready, with what is in the clock.

    Args:
        threads: of torch, within an operation.
        chunks: to run; those that see the full window are the last ``chunks - 6``.
        memory: policy; None is a plain window of 21 frames.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        pipe = _pipeline()
        ours = _ours(pipe, chunks, memory or f"window:size={WINDOW}")
        plain = _plain(pipe.transformer)
    finally:
        torch.set_num_threads(before)
    full = ours["seconds"][WINDOW // CHUNK - 1 :]
    steady = statistics.median(full)
    return {
        "threads": threads,
        "seconds_per_chunk": steady,
        "seconds_of_each_chunk": ours["seconds"],
        "passes_per_chunk": len(STEPS) + 1,
        "plain_seconds_per_chunk": plain,
        "ratio": plain / steady,
        "memory_bytes": ours["bytes"],
        "card": card(threads),
    }


def card(threads: int) -> dict[str, Any]:
    """Machine, versions and what the clock covers."""
    return {
        "cpu": _cpu_name(),
        "threads": threads,
        "torch": torch.__version__,
        "dtype": "float32",
        "model": "random, " + ", ".join(f"{key}={value}" for key, value in MODEL.items()),
        "latent": f"{LATENT}x{LATENT}, {CHUNK} frames a chunk, window {WINDOW}",
        "steps": list(STEPS),
        "in_the_clock": "denoising steps, context pass, noise; not text encoding, not the VAE",
    }


def _pipeline() -> Any:
    from diffusers import WanTransformer3DModel

    from streamvid.checkpoints import Components
    from streamvid.config import StreamConfig
    from streamvid.pipeline import StreamPipeline

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = WanTransformer3DModel(**MODEL).eval().requires_grad_(False)
    config = StreamConfig(
        denoising_steps=STEPS,
        chunk_latents=CHUNK,
        height=LATENT * 8,
        width=LATENT * 8,
        text_len=TEXT_LEN,
        trained_latents=WINDOW,
    )
    parts = Components(model, None, _FixedText(), config, "random", "random", {"vae": "not measured"})
    return StreamPipeline(parts)


def _ours(pipe: Any, chunks: int, memory: str) -> dict[str, Any]:
    with pipe.stream("x", output_type="latent", memory=memory) as stream:
        made = list(islice(stream.chunks(), chunks))
    # The clock of a chunk has the context pass of the chunk before in it: the first one has none.
    return {"seconds": [chunk.seconds["total"] for chunk in made], "bytes": made[-1].memory_bytes}


@torch.no_grad()
def _plain(model: Any) -> float:
    text = _FixedText().encode(["x"])
    latents = torch.randn(1, MODEL["in_channels"], WINDOW, LATENT, LATENT)

    def chunk() -> None:
        for step in STEPS:
            model(latents, torch.tensor([float(step)]), text, return_dict=False)

    return min(_seconds(chunk) for _ in range(2))


def _seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
