"""Frames on the host: an archive in (pinned) CPU memory around any codec, brought back a layer ahead of its reading.

``offload:codec=int4,keep_frames=6`` packs with int4 and moves every frame that is older than 6 frames, and not in
the sink, to the host. A kept frame and an archived one decode to the same bits. The device then holds the recent
frames, one layer's scratch, and the packed blocks of at most two layers: the one being read and the next one.

Each pass of a chunk reads the whole archive, so a link of 25 GB/s and a pass of 0.1 s allow about 2.5 GB of it: use
it with a codec, for histories that do not fit otherwise. Without CUDA the archive is plain memory and nothing is
copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from streamvid.kernels.types import PackedTensor
from streamvid.memory.codecs.base import KVCodec, PackedKV

HOST = "@host"


class Staging:
    """Copies of archived blocks on their way to the device: this batch and the one before, no more.

    Args:
        device: where the blocks are read. On CUDA the copies run on a stream of their own.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._batches: deque[dict[int, tuple[PackedKV, PackedKV]]] = deque(maxlen=2)
        self._events: deque[torch.cuda.Event | None] = deque(maxlen=2)

    def start(self, blocks: Sequence[PackedKV]) -> None:
        """Begin to copy ``blocks``; what was begun two calls ago and never taken is dropped."""
        if self._stream is None:
            self._batches.append({id(block): (block, self._copy(block)) for block in blocks})
            self._events.append(None)
            return
        # A block may still be on its way down, on the stream that archived it.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            self._batches.append({id(block): (block, self._copy(block)) for block in blocks})
            self._events.append(self._stream.record_event())

    def take(self, block: PackedKV) -> PackedKV:
        """The block on the device: the copy that was begun, or a new one."""
        for batch, event in zip(self._batches, self._events, strict=True):
            held = batch.get(id(block))
            if held is None or held[0] is not block:  # a number may have been given to a new object
                continue
            del batch[id(block)]
            if event is not None:
                stream = torch.cuda.current_stream(self.device)
                stream.wait_event(event)
                for part in held[1].parts.values():
                    part.record_stream(stream)
            return held[1]
        return self._copy(block)

    def _copy(self, block: PackedKV) -> PackedKV:
        return block.map(lambda part: part.to(self.device, non_blocking=True, copy=True))

    @property
    def nbytes(self) -> int:
        """Bytes of copies that wait to be taken."""
        return sum(copy.nbytes for batch in self._batches for _, copy in batch.values())


@dataclass(kw_only=True)
class Offload:
    """Any codec, with the blocks of older frames on the host."""

    codec: str = "int8"
    """The codec that packs; its settings are separated by semicolons."""
    keep_frames: int = 6
    """Latent frames younger than this stay on the device, as do sink and synthetic tokens (region side)."""

    lossless: ClassVar[bool] = False
    _device: torch.device | None = field(default=None, init=False, repr=False, compare=False)
    _staging: Staging | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        from streamvid.memory.codecs import make_codec  # the table imports this file

        if self.keep_frames < 0:
            raise ValueError(f"codec offload: keep_frames={self.keep_frames} (allowed: 0 and more)")
        if self.codec.partition(":")[0] == "offload":
            raise ValueError("codec offload: its codec cannot be offload again; name the codec that packs")
        self.inner: KVCodec = make_codec(self.codec.replace(";", ","))

    @property
    def span_frames(self) -> int:
        """As the codec that packs."""
        return self.inner.span_frames

    @property
    def token_wise(self) -> bool:  # type: ignore[override]
        """As the codec that packs."""
        return self.inner.token_wise

    def tier(self, region: str, age: int) -> str:
        """The inner codec's tier, marked when the block belongs on the host."""
        # What a policy chose from the past (region memory) has no age of its own, but is old.
        far = region == "memory" or (region != "sink" and age >= self.keep_frames)
        return self.inner.tier(region, age) + (HOST if far else "")

    def encode(self, k: Tensor, v: Tensor, *, region: str = "recent", age: int = 0) -> PackedKV:
        """Pack, and archive if the block is old; see `Codec.encode`."""
        self._device = k.device
        packed = self.inner.encode(k, v, region=region, age=age)
        return self._place(packed, self.tier(region, age))

    def recode(self, packed: PackedKV, *, region: str, age: int) -> PackedKV:
        """The block at its new place: moved without unpacking where only the place changes."""
        tier = self.tier(region, age)
        if tier.removesuffix(HOST) != packed.tier.removesuffix(HOST):
            return self.encode(*self.decode(packed), region=region, age=age)
        if tier == packed.tier and (packed.device.type == "cpu" or not tier.endswith(HOST)):
            return packed
        return self._place(self._here(packed, packed.device), tier)

    def decode(self, packed: PackedKV, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Unpack, from a copy on the device if the block is archived; see `Codec.decode`."""
        device = out[0].device if out is not None else (self._device or packed.device)
        return self.inner.decode(self._here(packed, device), out)

    def prefetch(self, blocks: Sequence[PackedKV]) -> None:
        """Begin to bring archived blocks to the device; called one layer ahead, and before the first one."""
        if self._device is not None and self._device.type == "cuda":
            archived = [block for block in blocks if self.host_nbytes(block)]
            self._stage(self._device).start(archived)

    def settle(self) -> None:
        """Wait until what was sent to the host has arrived, before it is read there (snapshots)."""
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def nbytes(self, packed: PackedKV) -> int:
        """Bytes the block holds, wherever."""
        return packed.nbytes

    def host_nbytes(self, packed: PackedKV) -> int:
        """Bytes of it that are on the host: all or none."""
        return packed.nbytes if packed.tier.endswith(HOST) else 0

    @property
    def staged_nbytes(self) -> int:
        """Bytes of blocks on their way to the device."""
        return 0 if self._staging is None else self._staging.nbytes

    def bytes_per_token(
        self, heads: int, head_dim: int, *, tokens: int = 1560, dtype: torch.dtype = torch.bfloat16
    ) -> float:
        """As the codec that packs."""
        return self.inner.bytes_per_token(heads, head_dim, tokens=tokens, dtype=dtype)

    def error_bound(self, packed: PackedKV) -> tuple[Tensor, Tensor]:
        """As in `Codec.error_bound`."""
        return self.inner.error_bound(replace(packed, tier=packed.tier.removesuffix(HOST)))

    def kernel_view(self, packed: PackedKV) -> tuple[PackedTensor, PackedTensor] | None:
        """As in `Codec.kernel_view`, of a copy on the device if the block is archived."""
        return self.inner.kernel_view(self._here(packed, self._device or packed.device))

    def _place(self, packed: PackedKV, tier: str) -> PackedKV:
        if tier.endswith(HOST) and packed.device.type == "cuda":
            packed = packed.map(_to_pinned)
        return replace(packed, tier=tier)

    def _here(self, packed: PackedKV, device: torch.device) -> PackedKV:
        """The block as the inner codec knows it, on ``device``."""
        if packed.device != device:
            packed = self._stage(device).take(packed)
        return replace(packed, tier=packed.tier.removesuffix(HOST))

    def _stage(self, device: torch.device) -> Staging:
        if self._staging is None or self._staging.device != device:
            self._staging = Staging(device)
        return self._staging


def _to_pinned(part: Tensor) -> Tensor:
    held = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return held.copy_(part, non_blocking=True)
