"""How fast a chunk could be: operations and bytes from the geometry, and what this machine can do at most.

Counts are of the transformer's matrix products (2 operations a multiply-add) and of the decoder's, the latter counted
by torch on one real chunk. Norms, embeddings and activations are left out: the floor is a lower bound.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """What decides the work of one transformer pass over a chunk."""

    layers: int
    width: int
    """heads * head_dim."""
    ffn: int
    text_tokens: int
    queries: int
    """Tokens of the chunk."""
    keys: int
    """Tokens that the chunk attends to, itself included."""
    parameters: int
    """Of the transformer blocks."""
    element_bytes: int

    @classmethod
    def of(
        cls, transformer: Any, *, frames: int, visible: int, height: int, width: int, text_tokens: int
    ) -> Shape:
        """From a diffusers Wan transformer.

        Args:
            frames, visible: latent frames of the chunk, and that it attends to (itself included).
            height, width: of the latent.
        """
        config = transformer.config
        _, rows, columns = config.patch_size
        tokens = (height // rows) * (width // columns)
        weights = [p for block in transformer.blocks for p in block.parameters()]
        return cls(
            layers=config.num_layers,
            width=config.num_attention_heads * config.attention_head_dim,
            ffn=config.ffn_dim,
            text_tokens=text_tokens,
            queries=frames * tokens,
            keys=visible * tokens,
            parameters=sum(p.numel() for p in weights),
            element_bytes=weights[0].element_size(),
        )


@dataclass(frozen=True)
class PassCost:
    """Operations and bytes of one transformer pass over a chunk."""

    linear: float
    self_attention: float
    cross_attention: float
    weight_bytes: float
    kv_bytes: float

    @property
    def operations(self) -> float:
        return self.linear + self.self_attention + self.cross_attention


def pass_cost(shape: Shape) -> PassCost:
    """Cost of one pass: q, k, v, o of self-attention, q, o of cross-attention (its k, v are kept a prompt), FFN."""
    per_token = 8 * shape.width**2 + 4 * shape.width**2 + 4 * shape.width * shape.ffn
    return PassCost(
        linear=float(per_token * shape.queries * shape.layers),
        self_attention=float(4 * shape.queries * shape.keys * shape.width * shape.layers),
        cross_attention=float(4 * shape.queries * shape.text_tokens * shape.width * shape.layers),
        weight_bytes=float(shape.parameters * shape.element_bytes),
        kv_bytes=float(2 * shape.keys * shape.width * shape.layers * shape.element_bytes),
    )


@dataclass(frozen=True)
class Limits:
    """What the machine does at most, measured: operations a second of a large matrix product, bytes a second."""

    operations: float
    bandwidth: float


def measure_limits(device: Any, dtype: Any, seconds: float = 0.4) -> Limits:
    """Best of repeated runs of a square matrix product and of a copy, on `device` with `dtype`."""
    import torch

    cuda = torch.device(device).type == "cuda"
    size = 4096 if cuda else 768

    def best(work: Any) -> float:
        quickest, end = float("inf"), time.perf_counter() + seconds
        while True:
            begin = time.perf_counter()
            work()
            if cuda:
                torch.cuda.synchronize()
            quickest = min(quickest, time.perf_counter() - begin)
            if time.perf_counter() > end:
                return quickest

    with torch.inference_mode():
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        operations = 2 * size**3 / best(lambda: torch.mm(a, b, out=out))
        # Larger than any cache: 256 MB on a GPU, 64 MB on a CPU. A copy reads and writes.
        source = torch.empty((256 if cuda else 64) * 2**20, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        bandwidth = 2 * source.nbytes / best(lambda: target.copy_(source))
    return Limits(operations, bandwidth)


def decoder_operations(decode: Any) -> float:
    """Operations of one call of `decode()`, counted by torch (convolutions and matrix products)."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        decode()
    return float(counter.get_total_flops())


@dataclass(frozen=True)
class Floor:
    """Least time of a chunk in seconds, by part. Each part is bound by its operations or by its bytes."""

    denoise: float
    context: float
    decode: float
    bound: str
    """What binds a transformer pass here: "compute" or "memory"."""

    @property
    def total(self) -> float:
        return self.denoise + self.context + self.decode

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"total": self.total}


def chunk_floor(cost: PassCost, decoder: float, limits: Limits, *, steps: int, branches: int = 1) -> Floor:
    """The floor of a chunk of `steps` passes and one context pass for each guidance branch."""
    compute = cost.operations / limits.operations
    memory = (cost.weight_bytes + cost.kv_bytes) / limits.bandwidth
    one = max(compute, memory) * branches
    return Floor(
        denoise=steps * one,
        context=one,
        decode=decoder / limits.operations,
        bound="compute" if compute >= memory else "memory",
    )
