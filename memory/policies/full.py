"""Full history: every committed frame stays visible. The definition of right for every other policy."""

from __future__ import annotations

from dataclasses import dataclass

from streamvid.memory.bank import Bank
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.policy import Chunk, MemoryPolicy, Plan


@dataclass(kw_only=True)
class Full(MemoryPolicy):
    """Keep everything at absolute positions (Self-Forcing with ``local_attn_size`` -1, without its limit of 21 frames).

    Bytes grow with the length of the stream; set ``limit`` to have it refuse beyond that many frames.
    """

    limit: int | None = None
    """Latent frames after which a chunk is refused; None grows for ever."""

    def validate(self, geometry: KVGeometry, chunk_frames: int) -> None:
        if self.limit is not None and self.limit < chunk_frames:
            raise ValueError(
                f"full: limit={self.limit} is smaller than one chunk of {chunk_frames} latent frames"
            )

    def capacity(self, geometry: KVGeometry, layer: int, group: int, chunk_frames: int) -> int | None:
        return self.limit

    def plan(self, bank: Bank, chunk: Chunk) -> Plan:
        held = bank.num_frames + chunk.count - chunk.skip
        if self.limit is not None and held > self.limit:
            raise ValueError(
                f"full: {held} latent frames exceed limit={self.limit}; raise the limit or use the window policy"
            )
        return super().plan(bank, chunk)
