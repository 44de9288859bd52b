"""The tensors attention reads: views of a cache, and packed (quantised) tensors. Knows no frames and no policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedTensor:
    """A tensor ``[b, n, h, d]`` stored as integer codes with one scale (and offset) per group.

    Value of a code ``c``: ``c * scale + zero``, or ``(c - 2 ** (bits - 1)) * scale`` when ``zero`` is None
    (symmetric). ``zero`` is the float value of code 0, not an integer zero-point: a group whose values lie far
    from 0 then keeps its full resolution.
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


class KVView:
    """Keys and values of some tokens for some heads, as one attention call reads them.

    Args:
        k: ``[b, n, hg, d]`` tensor or PackedTensor; rotated already, unless ``positions`` is given.
        v: like ``k``.
        heads: the ``hg`` query heads this view serves, ascending; None = all heads. A sequence of ints or a
            LongTensor on the CPU: grouping happens on the host and must not wait for a device.
        bias: fp32 logits added to each key, ``[n]`` or ``[hg, n]`` (log counts, log decay; ``-inf`` drops a key).
        positions: fp32 ``[n, 3]`` positions t, y, x of un-rotated keys; None = ``k`` is rotated.

    Raises:
        ValueError: shapes that do not fit each other, or ``heads`` on a device.
    """

    __slots__ = ("k", "v", "heads", "bias", "positions")

    def __init__(
        self,
        k: Tensor | PackedTensor,
        v: Tensor | PackedTensor,
        heads: Tensor | Sequence[int] | None = None,
        bias: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> None:
        self.k, self.v, self.bias, self.positions = k, v, bias, positions
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
        _, n, hg, _ = k.shape
        if self.heads is not None and (
            len(self.heads) != hg or any(a >= b for a, b in zip(self.heads, self.heads[1:], strict=False))
        ):
            raise ValueError(
                f"KVView: heads {self.heads} must be {hg} ascending head numbers, one for each in k"
            )
        if bias is not None and tuple(bias.shape) not in ((n,), (hg, n)):
            raise ValueError(f"KVView: bias {tuple(bias.shape)} must be [{n}] or [{hg}, {n}]")
        if positions is not None and tuple(positions.shape) != (n, 3):
            raise ValueError(f"KVView: positions {tuple(positions.shape)} must be [{n}, 3]")

    @property
    def num_tokens(self) -> int:
        return self.k.shape[1]
