"""What a KV codec is: keys and values of some tokens in, a few small tensors out, and back.

A codec sees un-rotated keys and values ``[b, n, heads, head_dim]`` and nothing else: no cache, no layer, no
position. It returns a `PackedKV`, a flat dictionary of tensors, so that bytes are counted on what is really held
and a block can be moved to the host, saved, or cut by heads without knowing how it was made.

A new codec is one dataclass with `Codec.pack` and `Codec.unpack`, and one line in the ``CODECS`` table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from streamvid.kernels.types import PackedTensor
from streamvid.memory.spec import effective

Shape = tuple[int, int, int, int]
Side = Literal["k", "v"]
SIDES: tuple[Side, Side] = ("k", "v")


@dataclass(frozen=True)
class PackedKV:
    """Keys and values of one block of tokens as a codec stores them.

    Every part has the heads on axis 2, and the tokens on axis 1 unless it is named in ``shared``.
    """

    parts: Mapping[str, Tensor]
    """``"k.codes"``, ``"k.scale"``, ``"v.codes"``, ...: contiguous tensors that own their storage."""
    shape: Shape
    """``[b, n, heads, head_dim]`` of the keys, and of the values."""
    dtype: torch.dtype
    """What decoding gives when no scratch is handed in."""
    tier: str = ""
    """Which of a mixed codec's tiers wrote the block; empty for every other codec."""
    shared: frozenset[str] = field(default_factory=frozenset)
    """Parts that all tokens of the block share (centroids, channel means): no token axis."""

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor held, for byte accounting and snapshots."""
        return dict(self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes held, counted on the tensors."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def device(self) -> torch.device:
        """The device the parts live on."""
        return next(iter(self.parts.values())).device

    def side(self, side: Side) -> dict[str, Tensor]:
        """The parts of the keys (``"k"``) or of the values (``"v"``), named without their prefix."""
        return {name[2:]: part for name, part in self.parts.items() if name.startswith(f"{side}.")}

    def take_tokens(self, index: Tensor) -> PackedKV:
        """The tokens in ``index`` (1-D, int64) as a block of its own; only for codecs that are ``token_wise``."""
        parts = {
            name: part if name in self.shared else part.index_select(1, index)
            for name, part in self.parts.items()
        }
        b, _, h, d = self.shape
        return replace(self, parts=parts, shape=(b, index.numel(), h, d))

    def take_heads(self, index: Tensor) -> PackedKV:
        """The heads in ``index`` (1-D, int64) as a block of its own; exact for every codec."""
        parts = {name: part.index_select(2, index) for name, part in self.parts.items()}
        b, n, _, d = self.shape
        return replace(self, parts=parts, shape=(b, n, index.numel(), d))

    def map(self, move: Any) -> PackedKV:
        """The same block with ``move(tensor)`` in place of each part: another device, a copy, a host buffer."""
        return replace(self, parts={name: move(part) for name, part in self.parts.items()})

    def meta(self) -> dict[str, Any]:
        """Everything but the tensors, as JSON types, for snapshots."""
        return {
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "tier": self.tier,
            "shared": sorted(self.shared),
        }

    @classmethod
    def restore(cls, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> PackedKV:
        """The block that ``meta()`` and ``tensors()`` were taken from."""
        b, n, h, d = meta["shape"]
        return cls(
            parts=dict(tensors),
            shape=(b, n, h, d),
            dtype=getattr(torch, meta["dtype"]),
            tier=meta["tier"],
            shared=frozenset(meta["shared"]),
        )


@runtime_checkable
class KVCodec(Protocol):
    """The calls a cache makes. `Codec` implements all but two of them."""

    span_frames: int
    """Latent frames the codec wants in one `encode`; until so many are there the cache keeps them as they are."""
    token_wise: ClassVar[bool]
    """Whether single tokens can be cut out of a block (`PackedKV.take_tokens`) without decoding it."""
    lossless: ClassVar[bool]
    """Whether decoding gives the very bits that were encoded."""

    def encode(self, k: Tensor, v: Tensor, *, region: str = "recent", age: int = 0) -> PackedKV:
        """Pack ``k`` and ``v`` ``[b, n, h, d]``; ``age`` = latent frames committed after the block's newest."""
        ...

    def decode(self, packed: PackedKV, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values ``[b, n, h, d]``, written into ``out`` when given."""
        ...

    def nbytes(self, packed: PackedKV) -> int:
        """Bytes the block holds."""
        ...

    def bytes_per_token(
        self, heads: int, head_dim: int, *, tokens: int = 1560, dtype: torch.dtype = torch.bfloat16
    ) -> float:
        """Bytes of keys and values of one token in a block of ``tokens``."""
        ...

    def tier(self, region: str, age: int) -> str:
        """Which tier a block of that region and age belongs to; a block is re-encoded when this changes."""
        ...


@dataclass(kw_only=True)
class Codec(ABC):
    """A codec that treats keys and values one after the other; subclasses supply `pack`, `unpack` and `bound`."""

    check: Literal["auto", "always", "never"] = "auto"
    """Reject NaN and infinity when packing. ``auto``: on the CPU only, as the answer costs a wait on a device."""

    span_frames: ClassVar[int] = 1  # type: ignore[misc]
    token_wise: ClassVar[bool] = True
    lossless: ClassVar[bool] = False
    shared: ClassVar[frozenset[str]] = frozenset()
    """Names of parts (without side) that have no token axis."""
    shift_invariant: ClassVar[bool] = False
    """Whether one constant added to every number leaves the error as it was."""
    exact_constants: ClassVar[bool] = True
    """Whether a block of one repeated bf16 number comes back as it was."""

    @abstractmethod
    def pack(self, x: Tensor, side: Side) -> dict[str, Tensor]:
        """The parts that stand for ``x`` ``[b, n, h, d]``. No wait on the device; runs on ``meta`` tensors too."""

    @abstractmethod
    def unpack(self, parts: dict[str, Tensor], side: Side, out: Tensor) -> None:
        """Write what ``parts`` stand for into ``out`` ``[b, n, h, d]``, any float dtype, strided in b and n."""

    @abstractmethod
    def bound(self, parts: dict[str, Tensor], side: Side, shape: Shape) -> Tensor:
        """The largest Euclidean error of each token and head that the stored numbers allow, fp32 ``[b, n, h]``."""

    def encode(self, k: Tensor, v: Tensor, *, region: str = "recent", age: int = 0) -> PackedKV:
        """Pack ``k`` and ``v``.

        Args:
            k: un-rotated keys ``[b, n, h, d]``, any float dtype and device.
            v: values, same shape.
            region: the region of the cache the block lies in; only ``mixed`` looks at it.
            age: latent frames committed after the newest frame of the block; only ``mixed`` looks at it.

        Raises:
            ValueError: shapes differ, a size the codec cannot group, or (see ``check``) NaN or infinity.
        """
        if k.shape != v.shape or k.dim() != 4 or k.shape[1] == 0:
            raise ValueError(
                f"codec: k {tuple(k.shape)} and v {tuple(v.shape)} must be equal [b, n, heads, head_dim], n > 0"
            )
        self._require_finite(k, v)
        parts = {
            f"{side}.{name}": part
            for side, x in zip(SIDES, (k, v), strict=True)
            for name, part in self.pack(x, side).items()
        }
        shared = frozenset(name for name in parts if name[2:] in self.shared)
        return PackedKV(parts=parts, shape=tuple(k.shape), dtype=k.dtype, shared=shared)

    def decode(self, packed: PackedKV, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Unpack a block.

        Args:
            packed: what `encode` of a codec with the same settings gave.
            out: scratch for keys and values, each ``[b, n, h, d]``; a slice of a larger buffer will do.

        Returns:
            ``out``, or new tensors of the block's dtype. Read-only: they may be the stored ones (``none``).
        """
        if out is None:
            out = tuple(torch.empty(packed.shape, dtype=packed.dtype, device=packed.device) for _ in SIDES)
        for side, target in zip(SIDES, out, strict=True):
            self.unpack(packed.side(side), side, target)
        return out

    def nbytes(self, packed: PackedKV) -> int:
        """Bytes the block holds."""
        return packed.nbytes

    def bytes_per_token(
        self, heads: int, head_dim: int, *, tokens: int = 1560, dtype: torch.dtype = torch.bfloat16
    ) -> float:
        """Bytes of keys and values of one token, all heads of one layer, in a block of ``tokens``."""
        return packed_bytes(self, (1, tokens, heads, head_dim), dtype) / tokens

    def tier(self, region: str, age: int) -> str:
        """One tier for everything."""
        return ""

    def error_bound(self, packed: PackedKV) -> tuple[Tensor, Tensor]:
        """Largest Euclidean error of each token and head of keys and values, fp32 ``[b, n, h]`` each."""
        k, v = (self.bound(packed.side(side), side, packed.shape) for side in SIDES)
        return k, v

    def kernel_view(self, packed: PackedKV) -> tuple[PackedTensor, PackedTensor] | None:
        """Keys and values for a kernel that reads packed blocks; None when the layout is not one it knows."""
        return None

    def _require_finite(self, k: Tensor, v: Tensor) -> None:
        if self.check == "never" or (self.check == "auto" and k.device.type != "cpu"):
            return
        if k.device.type == "meta":
            return
        for side, x in zip(SIDES, (k, v), strict=True):
            # One pass and no mask: a sum is finite exactly when no term is NaN or infinite (fp64 cannot overflow).
            if not bool(x.sum(dtype=torch.float64).isfinite()):
                word = "keys" if side == "k" else "values"
                raise ValueError(
                    f"codec {type(self).__name__}: {word} hold NaN or infinity; only finite numbers can be "
                    "quantised, so look for the step that made them (a half-precision overflow is the usual one)"
                )


def joinable(codec: KVCodec, first: PackedKV, second: PackedKV) -> bool:
    """Whether two neighbouring blocks can be one: made of single tokens, with nothing that only one of them shares."""
    return (
        codec.token_wise
        and not isinstance(codec, Places)
        and not (first.shared or second.shared)
        and (first.tier, first.dtype, first.shape[2]) == (second.tier, second.dtype, second.shape[2])
    )


def join(blocks: Sequence[PackedKV]) -> PackedKV:
    """Neighbouring blocks as one; see `joinable`."""
    first = blocks[0]
    parts = {name: torch.cat([block.parts[name] for block in blocks], dim=1) for name in first.parts}
    b, _, h, d = first.shape
    return replace(first, parts=parts, shape=(b, sum(block.shape[1] for block in blocks), h, d))


@runtime_checkable
class Places(Protocol):
    """A codec that also decides where a block lies (`streamvid.memory.offload`). Every call is optional to others."""

    def recode(self, packed: PackedKV, *, region: str, age: int) -> PackedKV:
        """The block at its new region and age, moved rather than packed anew where that is all that changes."""
        ...

    def prefetch(self, blocks: Sequence[PackedKV]) -> None:
        """These blocks will be read next."""
        ...

    def settle(self) -> None:
        """Finish all moves: the blocks are about to be read by somebody else."""
        ...

    def host_nbytes(self, packed: PackedKV) -> int:
        """Bytes of the block that are not on the device."""
        ...

    @property
    def staged_nbytes(self) -> int:
        """Bytes on the device that belong to blocks on their way."""
        ...


def recode(codec: KVCodec, packed: PackedKV, *, region: str, age: int) -> PackedKV:
    """The block as the codec wants it at its new place: the same object, or a re-encoded one in a new tier."""
    if isinstance(codec, Places):
        return codec.recode(packed, region=region, age=age)
    if codec.tier(region, age) == packed.tier:
        return packed
    k, v = codec.decode(packed)
    return codec.encode(k, v, region=region, age=age)


def packed_bytes(
    codec: KVCodec, shape: Shape, dtype: torch.dtype = torch.bfloat16, *, region: str = "recent", age: int = 0
) -> int:
    """Bytes that encoding ``[b, n, heads, head_dim]`` will hold, without encoding anything.

    The codec runs on ``meta`` tensors (shapes without data), so the figure cannot drift from the layout.
    """
    settings = tuple(effective(codec).items())
    return _packed_bytes(type(codec), settings, shape, dtype, region, age)


@lru_cache(maxsize=1024)
def _packed_bytes(
    cls: type, settings: tuple[tuple[str, Any], ...], shape: Shape, dtype: torch.dtype, region: str, age: int
) -> int:
    x = torch.empty(shape, dtype=dtype, device="meta")
    return cls(**dict(settings)).encode(x, x, region=region, age=age).nbytes
