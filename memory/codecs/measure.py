"""What a codec does to attention on given keys and values. Knows tensors; no model, no cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from streamvid.kernels.attention import attend
from streamvid.kernels.rope import GridRope, rotate
from streamvid.kernels.types import KVView
from streamvid.memory.codecs.base import KVCodec, packed_bytes


@dataclass(frozen=True)
class Sample:
    """One layer at one moment: a history and the chunk that attends to it and to itself. All un-rotated."""

    k: Tensor
    """Keys of the history ``[b, frames * tokens, heads, head_dim]``."""
    v: Tensor
    """Values of the history, same shape."""
    q: Tensor
    """Queries of the chunk ``[b, m, heads, head_dim]``."""
    k_now: Tensor
    """Keys of the chunk, which are never packed while it runs."""
    v_now: Tensor
    """Values of the chunk."""


@dataclass(frozen=True)
class Loss:
    """Relative errors ``|x' - x| / |x|`` over some samples, and the bytes."""

    keys: float
    """Root mean square over the samples, as all but ``worst``."""
    values: float
    attention: float
    """Of the attention output, against the same attention over the history as it was."""
    worst: float
    """The largest ``attention`` of a sample."""
    ratio: float
    """Bytes of the packed history over those in bf16."""


def blocks(sample: Sample, tokens: int) -> list[slice]:
    """The history in blocks of ``tokens``; what is left at the end is a shorter block."""
    n = sample.k.shape[1]
    return [slice(start, min(start + tokens, n)) for start in range(0, n, tokens)]


def reconstruct(codec: KVCodec, sample: Sample, tokens_per_frame: int) -> tuple[Tensor, Tensor, int]:
    """Keys and values of the history after packing block by block as a cache does, and the bytes of bf16 blocks."""
    size = codec.span_frames * tokens_per_frame
    k, v, held = torch.empty_like(sample.k), torch.empty_like(sample.v), 0
    for rows in blocks(sample, size):
        age = (sample.k.shape[1] - rows.stop) // tokens_per_frame
        packed = codec.encode(sample.k[:, rows], sample.v[:, rows], region="recent", age=age)
        codec.decode(packed, (k[:, rows], v[:, rows]))
        held += packed_bytes(codec, packed.shape, torch.bfloat16, region="recent", age=age)
    return k, v, held


def loss(codec: KVCodec, samples: Sequence[Sample], grid: tuple[int, int]) -> Loss:
    """Errors of a codec on ``samples`` of frames of ``grid`` tokens."""
    tokens = grid[0] * grid[1]
    squares, held, plain = [], 0, 0
    for sample in samples:
        k, v, size = reconstruct(codec, sample, tokens)
        wanted, got = (_attention(sample, *pair, grid) for pair in ((sample.k, sample.v), (k, v)))
        squares.append([_relative(k, sample.k), _relative(v, sample.v), _relative(got, wanted)])
        held, plain = held + size, plain + 4 * sample.k.numel()
    table = torch.tensor(squares, dtype=torch.float64)
    keys, values, attention = table.mean(0).sqrt().tolist()
    return Loss(keys, values, attention, table[:, 2].max().sqrt().item(), held / plain)


def _relative(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).square().sum() / wanted.double().square().sum())


def _attention(sample: Sample, k: Tensor, v: Tensor, grid: tuple[int, int]) -> Tensor:
    """Attention of the chunk over the history ``k``, ``v`` and itself, at absolute positions."""
    tokens = grid[0] * grid[1]
    past, now = k.shape[1] // tokens, sample.q.shape[1] // tokens
    rope = GridRope(k.shape[3], grid, k.device)
    frames = tuple(float(t) for t in range(past + now))
    keys = rotate(torch.cat([k, sample.k_now], 1), rope.table(frames))
    queries = rotate(sample.q, rope.table(frames[past:]))
    return attend(queries, [KVView(keys, torch.cat([v, sample.v_now], 1))])
