"""The tensors attention reads: views of a cache, and packed (quantised) tensors. Knows no frames, no policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedTensor:
    """A tensor ``[b, n, h, d]`` stored as integer codes with one scale (and offset) per group.

    Value of a code ``c``: ``c * scale + zero``, or ``(c - 2 ** (bits - 1)) * scale`` when ``zero`` is None
    (symmetric). ``zero`` is the float value of code 0, not an integer zero-point: a group whose values lie far from
    0 then keeps its full resolution.
    """

    codes: Tensor
    """uint8. 8 bits: ``[b, n, h, d]``. 4 bits: ``[b, n, h, d/2]``, low nibble = channel 2j, high nibble = 2j+1."""
    scale: Tensor
    """fp16, bf16 or fp32. Axis 3: ``[b, n, h, d/group_size]``. Axis 1: ``[b, ceil(n/group_size), h, d]``."""
    zero: Tensor | None
    """Same shape as ``scale``; None = symmetric."""
    bits: int
    group_size: int
    """Elements that share a scale, along ``axis``."""
    axis: int
    """3: groups of channels of one token. 1: groups of tokens of one channel."""
    shape: tuple[int, int, int, int]
    """The shape ``[b, n, h, d]`` of the tensor that the codes stand for."""
    dtype: torch.dtype
    """What dequantising gives."""

    def __post_init__(self) -> None:
        b, n, h, d = self.shape
        if self.bits not in (4, 8):
            raise ValueError(f"packed tensor: bits={self.bits} (allowed: 4, 8)")
        if self.axis not in (1, 3):
            raise ValueError(f"packed tensor: axis={self.axis} (allowed: 1 = tokens, 3 = channels)")
        if self.axis == 3 and d % self.group_size:
            raise ValueError(f"packed tensor: group_size={self.group_size} does not divide head_dim={d}")
        codes = (b, n, h, d * self.bits // 8)
        groups = (b, n, h, d // self.group_size) if self.axis == 3 else (b, -(-n // self.group_size), h, d)
        for name, tensor, expected in (("codes", self.codes, codes), ("scale", self.scale, groups)):
            if tuple(tensor.shape) != expected:
                raise ValueError(
                    f"packed tensor: {name} has shape {tuple(tensor.shape)}, expected {expected}"
                )
        if self.codes.dtype != torch.uint8:
            raise ValueError(f"packed tensor: codes are {self.codes.dtype}, expected torch.uint8")
        if self.zero is not None and self.zero.shape != self.scale.shape:
            raise ValueError(f"packed tensor: zero {tuple(self.zero.shape)} differs from scale {groups}")

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes really held, scales and offsets included."""
        zero = 0 if self.zero is None else self.zero.nbytes
        return self.codes.nbytes + self.scale.nbytes + zero


@dataclass(frozen=True)
class Blocks:
    """A division of ``num_tokens`` tokens into blocks of ``size`` places.

    Without a table, block i holds tokens ``i * size`` to ``(i + 1) * size``; the last may be short.
    """

    num_tokens: int
    size: int
    table: Tensor | None = None
    """int32 ``[blocks, size]``, the token at each place, -1 = none: cubes of a frame grid, or pages of a pool."""

    @property
    def count(self) -> int:
        return -(-self.num_tokens // self.size) if self.table is None else self.table.shape[0]

    def tokens(self, device: torch.device) -> Tensor:
        """int32 ``[blocks, size]``, -1 where there is no token."""
        if self.table is not None:
            return self.table
        places = torch.arange(self.count * self.size, dtype=torch.int32, device=device)
        return places.masked_fill(places >= self.num_tokens, -1).view(self.count, self.size)


@dataclass(frozen=True)
class BlockMap:
    """Which key blocks of a view each block of queries reads.

    A query block may read nothing; it then gives output 0 and log-sum-exp ``-inf``.
    """

    indices: Tensor
    """int32 ``[b or 1, hg, query blocks, width]``; the first ``counts`` entries of a row are key blocks, ascending."""
    counts: Tensor
    """int32 ``[b or 1, hg, query blocks]``."""
    queries: Blocks
    keys: Blocks
    bias: Tensor | None = None
    """fp32 ``[hg, key blocks]``, added to every logit of a block."""
    plans: dict[tuple, list] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What a backend worked out from the map; a map lives for a chunk, and all its steps reuse this."""

    def __post_init__(self) -> None:
        if self.indices.dim() != 4 or self.counts.shape != self.indices.shape[:3]:
            raise ValueError(
                f"block map: indices {tuple(self.indices.shape)} must be [b, heads, query blocks, width] and "
                f"counts {tuple(self.counts.shape)} the same without width"
            )
        if self.indices.shape[2] != self.queries.count:
            raise ValueError(f"block map: {self.indices.shape[2]} rows for {self.queries.count} query blocks")
        for name, tensor in (("indices", self.indices), ("counts", self.counts)):
            if tensor.dtype != torch.int32:
                raise ValueError(f"block map: {name} are {tensor.dtype}, expected torch.int32")
        expected = (self.indices.shape[1], self.keys.count)
        if self.bias is not None and tuple(self.bias.shape) != expected:
            raise ValueError(f"block map: bias {tuple(self.bias.shape)} must be {expected}")

    def density(self) -> Tensor:
        """Share of (query block, key block) pairs that are computed; a scalar on the map's device."""
        return self.counts.float().mean() / self.keys.count


class KVView:
    """Keys and values of some tokens for some heads, as one attention call reads them.

    Args:
        k: ``[b, n, hg, d]`` tensor or PackedTensor; rotated already, unless ``rope`` is given.
        v: like ``k``.
        heads: the ``hg`` query heads this view serves, ascending; None = all heads. A sequence of ints or a
            LongTensor on the CPU: grouping happens on the host and must not wait for a device.
        bias: fp32 logits added to each key, ``[n]``, ``[hg, n]`` or ``[b, hg, n]`` (log counts, log decay;
            ``-inf`` drops a key).
        rope: complex ``[n, d/2]`` (`rope.rope_table`) that turns un-rotated keys; None = ``k`` is rotated.
        blocks: the blocks that each block of queries reads; None = every query reads every key.

    Raises:
        ValueError: shapes that do not fit each other, or ``heads`` on a device.
    """

    __slots__ = ("k", "v", "heads", "bias", "rope", "blocks", "_trig")

    def __init__(
        self,
        k: Tensor | PackedTensor,
        v: Tensor | PackedTensor,
        heads: Tensor | Sequence[int] | None = None,
        bias: Tensor | None = None,
        rope: Tensor | None = None,
        blocks: BlockMap | None = None,
    ) -> None:
        self.k, self.v, self.bias, self.rope, self.blocks = k, v, bias, rope, blocks
        self._trig: tuple[Tensor, Tensor] | None = None
        if isinstance(heads, Tensor):
            if heads.device.type != "cpu":
                raise ValueError(
                    f"KVView: heads must be on the CPU (got {heads.device}); pass heads.cpu() once"
                )
            heads = heads.tolist()
        self.heads: tuple[int, ...] | None = None if heads is None else tuple(heads)
        if tuple(k.shape) != tuple(v.shape) or len(k.shape) != 4:
            raise ValueError(
                f"KVView: k {tuple(k.shape)} and v {tuple(v.shape)} must be equal [b, n, heads, d]"
            )
        b, n, hg, d = k.shape
        if self.heads is not None and (
            len(self.heads) != hg or any(a >= b for a, b in zip(self.heads, self.heads[1:], strict=False))
        ):
            raise ValueError(
                f"KVView: heads {self.heads} must be {hg} ascending head numbers, one for each in k"
            )
        if bias is not None and tuple(bias.shape) not in ((n,), (hg, n), (b, hg, n)):
            raise ValueError(
                f"KVView: bias {tuple(bias.shape)} must be [{n}], [{hg}, {n}] or [{b}, {hg}, {n}]"
            )
        if rope is not None and tuple(rope.shape) != (n, d // 2):
            raise ValueError(f"KVView: rope {tuple(rope.shape)} must be [{n}, {d // 2}]")
        if blocks is not None and (
            blocks.indices.shape[0] not in (1, b)
            or blocks.indices.shape[1] != hg
            or blocks.keys.num_tokens != n
        ):
            raise ValueError(
                f"KVView: a block map {tuple(blocks.indices.shape)} over {blocks.keys.num_tokens} keys does not fit "
                f"k {tuple(k.shape)}"
            )

    @property
    def num_tokens(self) -> int:
        return self.k.shape[1]

    def trig(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine of ``rope``, fp32 ``[n, d/2]`` each; made once, as a view lives for a whole chunk."""
        if self._trig is None:
            if self.rope is None:
                raise ValueError("KVView: the keys are rotated already; there is no table")
            self._trig = self.rope.real.float().contiguous(), self.rope.imag.float().contiguous()
        return self._trig
