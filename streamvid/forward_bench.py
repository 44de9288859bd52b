"""Time of one forward of a model of a given geometry with random weights, over a filled window, by attention method.

Measures the transformer alone: no text encoder, no autoencoder, no sampler. Weights and history are random, so the
figures say nothing of quality; a selection rule finds no structure, which does not change what it costs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from streamvid.kernels.bench import Shape, peak_of
from streamvid.memory.cache import KVCache
from streamvid.transformer import CausalWan


@dataclass(frozen=True)
class Method:
    """One way to attend to the window."""

    name: str
    density: float = 1.0
    codec: str | None = None
    backend: str = "auto"

    @property
    def sparse(self) -> str | None:
        return None if self.density == 1.0 else f"topk:density={self.density}"


METHODS = (
    Method("dense"),
    Method("blocks, density 0.43", 0.43),
    Method("blocks, density 0.25", 0.25),
    Method("int4 through scratch", codec="int4", backend="sdpa"),
    Method("int4 fused", codec="int4", backend="triton"),
)


def random_model(
    layers: int, heads: int, head_dim: int, ffn: int, *, device: torch.device, dtype: torch.dtype
) -> CausalWan:
    """A Wan transformer of these sizes; every weight is drawn at a small scale, so that nothing overflows."""
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        model = WanTransformer3DModel(
            num_layers=layers, num_attention_heads=heads, attention_head_dim=head_dim, ffn_dim=ffn
        )
    model = model.to_empty(device=device).to(dtype).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.02, generator=generator)
    # Rotary tables of the model are buffers without data now; the cache has its own.
    return CausalWan(model)


def _filled(net: CausalWan, grid: tuple[int, int], window: int, chunk: int, method: Method) -> KVCache:
    """A cache whose window is full of random history, with a chunk begun."""
    geometry = net.geometry.kv(1, *grid, dtype=net.dtype, device=net.device)
    policy = f"window:size={window},sink={min(chunk, window - chunk)}"
    cache = KVCache(
        geometry, policy, method.codec, chunk_frames=chunk, backend=method.backend, sparse=method.sparse
    )
    shape = (1, chunk * geometry.tokens_per_frame, geometry.heads, geometry.head_dim)
    while cache.next_frame < window:
        cache.begin_chunk(chunk)
        cache.begin_context()
        k, v = (torch.randn(shape, device=net.device, dtype=net.dtype) for _ in range(2))
        for layer in range(geometry.layers):
            cache.write(layer, k, v)
        cache.commit()
    cache.begin_chunk(chunk)
    return cache


def _timed(call: Any, rounds: int, device: torch.device) -> list[float]:
    if device.type == "cuda":
        from streamvid.kernels.tune import milliseconds

        return milliseconds(call, rounds, warm_up=2)
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1e3)
    return sorted(times)


def forward_times(
    net: CausalWan,
    *,
    grid: tuple[int, int],
    windows: tuple[int, ...],
    chunk: int,
    rounds: int,
    methods: tuple[Method, ...] = METHODS,
) -> Iterator[dict[str, Any]]:
    """One row for each window and method that can run here.

    Args:
        net: the model.
        grid: latent rows and columns.
        windows: latent frames a chunk attends to, itself included.
        chunk: latent frames of a chunk.
        rounds: forwards timed for each row, after the first, which chooses block maps and is reported apart.
        methods: what to compare; the first is what the others are compared with.
    """
    device, geometry = net.device, net.geometry
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    peak = peak_of(name)
    prompt = net.prepare_prompt(torch.randn(1, 512, geometry.text_dim, device=device, dtype=net.dtype))
    x = torch.randn(1, chunk, geometry.out_channels, *grid, device=device, dtype=net.dtype)
    for window in windows:
        dense = None
        for method in methods:
            try:
                cache = _filled(net, grid, window, chunk, method)
                first = _timed(lambda c=cache: net(x, 750.0, prompt, c), 1, device)[0]
            except ValueError as error:
                yield {"window": window, "method": method.name, "skipped": str(error)}
                continue
            times = _timed(lambda c=cache: net(x, 750.0, prompt, c), rounds, device)
            middle = times[len(times) // 2]
            dense = dense or middle
            kv = cache.geometry
            shape = Shape(kv.heads, kv.head_dim, kv.grid, chunk, window)
            attention = shape.floor(method.density, 2, None)["gflop"] * geometry.layers
            linear = 2 * sum(p.numel() for p in net.model.blocks.parameters()) * shape.queries / 1e9
            row = {
                "window": window, "method": method.name, "device": name, "ms": middle, "ms_min": times[0],
                "ms_max": times[-1], "first_ms": first, "speedup": dense / middle,
                "attention_tflop": attention / 1e3, "linear_tflop": linear / 1e3,
                "cache_gib": cache.report().total / 2**30,
            }  # fmt: skip
            if peak is not None:
                row["floor_ms"] = (attention + linear) / peak[0]
            yield row
            del cache
