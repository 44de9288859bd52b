"""Frames a second of whole streams of a published geometry with random weights: by decoder, eager and compiled.

Everything a viewer waits for is in the clock but the text encoder, which runs once a prompt. Weights are random, so the
figures say nothing of quality; nothing that is computed depends on the values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamvid.checkpoints import Components
from streamvid.config import StreamConfig
from streamvid.eval.floor import measure_limits
from streamvid.eval.speed import Plan, measure_speed
from streamvid.forward_bench import random_model
from streamvid.pipeline import StreamPipeline

DECODERS = ("taehv", "wan")


@dataclass
class _Words:
    """Stands for a text encoder: twenty rows of a prompt, the rest padding."""

    text_len: int
    text_dim: int

    def encode(self, prompts: list[str]) -> Tensor:
        out = torch.zeros(len(prompts), self.text_len, self.text_dim)
        for row, prompt in enumerate(prompts):
            generator = torch.Generator().manual_seed(len(prompt))
            out[row, :20] = torch.randn(20, self.text_dim, generator=generator)
        return out


def random_decoder(name: str, *, device: torch.device, dtype: torch.dtype) -> Any:
    """A VAE of the published size: ``"wan"`` (Wan 2.1) or ``"taehv"``, with the initialisation of its classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "wan":
            from diffusers import AutoencoderKLWan

            vae: Any = AutoencoderKLWan()
        else:
            from streamvid.taehv import TAEHV, TAEHVConfig

            vae = TAEHV(TAEHVConfig())
    return vae.to(device, dtype).eval().requires_grad_(False)


def stream_rows(
    sizes: dict[str, int],
    *,
    grid: tuple[int, int],
    device: torch.device,
    decoders: Sequence[str] = DECODERS,
    memory: str | None = None,
    chunks: int = 20,
) -> Iterator[dict[str, Any]]:
    """One row for each decoder, eager and compiled, measured as ``streamvid bench stream`` measures.

    Args:
        sizes: ``layers``, ``heads``, ``head_dim`` and ``ffn`` of the transformer.
        grid: latent rows and columns.
        device: where; bfloat16 on CUDA, float32 on a CPU.
        decoders: of `DECODERS`.
        memory: policy; None is a window of 21 latent frames.
        chunks: in the steady state.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    transformer = random_model(**sizes, device=device, dtype=dtype).model
    config = StreamConfig(height=grid[0] * 8, width=grid[1] * 8)
    text: Any = _Words(config.text_len, transformer.config.text_dim)
    limits = measure_limits(device, dtype)
    options = {} if memory is None else {"memory": memory}
    for decoder in decoders:
        vae = random_decoder(decoder, device=device, dtype=dtype)
        for compile in (False, True):
            parts = Components(transformer, vae, text, config, "random", "random")
            pipe = StreamPipeline(parts, compile=compile)
            speed = measure_speed(pipe, options, Plan(chunks=chunks, repeats=2), limits)
            yield {
                "decoder": decoder,
                "compiled": compile,
                "fps": speed.fps,
                "period_ms": speed.period_ms,
                "first_frame_ms": speed.first_frame_ms,
                "parts_ms": speed.parts_ms,
                "memory": speed.memory,
                "floor_ms": speed.floor_ms,
            }
        del vae
