"""Prompt changes waiting for their chunk, and the receipts that say when they apply.

A change applies at a chunk boundary, never inside a chunk. Two changes for one chunk: the last wins and the earlier
receipt says so. Knows nothing of models: what a change does to the stream is in ``transitions``.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Literal

from streamvid.errors import StreamvidError
from streamvid.memory.spec import nearest
from streamvid.timeline import ChunkRule, Place, whole

TRANSITIONS = {
    "cross": "the new prompt from that chunk on; keys and values of the past stay as they are",
    "recache": "also re-encodes the clean frames in memory under the new prompt, in one pass (LongLive)",
    "causal": "as recache, chunk by chunk, so that the past is encoded as it would have been",
    "micro": "as recache, but only the newest three latent frames",
    "flush": "forgets the past; flush:K keeps the sink and the newest K latent frames (Infinity-RoPE)",
    "swift": "chooses cross, micro or recache by how far apart the two prompts are (SWIFT)",
    "blend": "blend:N moves the text embedding to the new prompt over N chunks",
}
"""Ways to change the prompt, with what each does."""


@dataclass(frozen=True)
class Transition:
    """How the past is treated at a prompt change."""

    kind: str
    number: int | None = None
    """Chunks over which ``blend`` moves; latent frames that ``flush`` keeps."""

    @classmethod
    def parse(cls, text: str) -> Transition:
        """From ``"cross"``, ``"flush:2"``, ``"blend:4"``, ... Raises StreamvidError naming the nearest."""
        if not isinstance(text, str):
            raise StreamvidError(
                f"a transition must be a text, got {text!r} (allowed: {', '.join(sorted(TRANSITIONS))})"
            )
        kind, colon, rest = text.partition(":")
        if kind not in TRANSITIONS:
            raise StreamvidError(
                f"unknown transition {text!r}{nearest(kind, TRANSITIONS)} (allowed: {', '.join(sorted(TRANSITIONS))})"
            )
        if kind not in ("blend", "flush") and colon:
            raise StreamvidError(f"transition {kind!r} takes no number, got {text!r}")
        if kind == "flush" and not colon:
            return cls(kind)
        if kind in ("blend", "flush"):
            if not rest.isdecimal() or len(rest) > 4 or not 1 <= int(rest) <= 1000:
                unit = "chunks" if kind == "blend" else "latent frames"
                raise StreamvidError(f"transition {text!r}: write {kind}:N with N from 1 to 1000 {unit}")
            return cls(kind, int(rest))
        return cls(kind)

    def __str__(self) -> str:
        return self.kind if self.number is None else f"{self.kind}:{self.number}"


@dataclass
class Receipt:
    """What ``set_prompt`` and ``cut`` promise. ``status`` changes as the stream goes on."""

    text: str
    transition: str
    """As in ``TRANSITIONS``, or ``cut``."""
    chunk: int
    """Index of the chunk from which it applies."""
    frame: int
    """Index of that chunk's first pixel frame."""
    status: Literal["waiting", "applied", "superseded", "dropped"] = "waiting"
    """``dropped``: the stream was reset or ended before that chunk."""
    superseded_by: str | None = None
    """The prompt that took its place."""


@dataclass
class Change:
    """One waiting change."""

    receipt: Receipt
    transition: Transition | None
    """None for a cut."""


class PromptQueue:
    """Changes by the chunk at which they apply. Safe to use from several threads.

    Args:
        rule: how long chunks are, to name the frame at which a chunk starts.
        cut_restarts: whether decoding starts afresh at a cut, which shortens that chunk.
    """

    def __init__(self, rule: ChunkRule, place: Place, cut_restarts: bool = True) -> None:
        self._rule = rule
        self._place = place
        self._cut_restarts = cut_restarts
        self._waiting: dict[int, Change] = {}
        self._lock = threading.RLock()

    def put(
        self,
        text: str,
        transition: Transition | None,
        *,
        at_frame: int | None = None,
        at_chunk: int | None = None,
    ) -> Receipt:
        """Add a change for the next chunk that has not begun, or for the first one at or after the given place.

        One that waited for the same chunk is superseded. Raises StreamvidError when the place has passed.
        """
        with self._lock:
            chunk = self._find(at_frame, at_chunk)
            receipt = Receipt(text, "cut" if transition is None else str(transition), chunk, 0)
            earlier = self._waiting.get(chunk)
            if earlier is not None:
                earlier.receipt.status = "superseded"
                earlier.receipt.superseded_by = text
            self._waiting[chunk] = Change(receipt, transition)
            for change in self._waiting.values():  # a cut shortens its chunk and so moves all later ones
                change.receipt.frame = self._place_of(change.receipt.chunk).frame
        return receipt

    def begin(self, place: Place) -> Change | None:
        """The chunk at ``place`` begins: the change for it, and nothing can be added to it any more."""
        with self._lock:
            self._place = self._next(place)
            return self._waiting.pop(place.chunk, None)

    def put_back(self, place: Place, change: Change | None) -> None:
        """The chunk at ``place`` did not begin after all."""
        with self._lock:
            self._place = place
            if change is not None:
                self._waiting.setdefault(place.chunk, change)

    def waiting(self) -> list[Change]:
        """All changes, by chunk."""
        with self._lock:
            return [self._waiting[chunk] for chunk in sorted(self._waiting)]

    def restart(self, place: Place) -> None:
        """The stream goes on from another place: forget all changes; their receipts say so."""
        with self._lock:
            self.drop()
            self._place = place

    def drop(self) -> None:
        """Forget all changes; their receipts say so."""
        with self._lock:
            for change in self._waiting.values():
                change.receipt.status = "dropped"
            self._waiting.clear()

    def restore(self, changes: list[Change]) -> None:
        """Take over changes that waited when a snapshot was made."""
        with self._lock:
            self._waiting = {change.receipt.chunk: change for change in changes}

    def _find(self, at_frame: int | None, at_chunk: int | None) -> int:
        if at_frame is not None and at_chunk is not None:
            raise StreamvidError("give at_frame or at_chunk, not both")
        for name, value in (("at_frame", at_frame), ("at_chunk", at_chunk)):
            number = 0 if value is None else whole(value)
            if number is None or number < 0:
                raise StreamvidError(f"{name} must be a whole number of at least 0, got {value!r}")
        if at_chunk is not None:
            if at_chunk < self._place.chunk:
                raise StreamvidError(f"chunk {at_chunk} has begun; the next one is {self._place.chunk}")
            return at_chunk
        place = self._place
        while at_frame is not None and place.frame < at_frame:
            place = self._next(place)
            equal = max(0, at_frame - place.frame - 1) // self._rule.frames
            place = self._skip(place, equal)
        return place.chunk

    def _place_of(self, chunk: int) -> Place:
        place = self._place
        while place.chunk < chunk:
            place = self._next(place)
            place = self._skip(place, chunk - place.chunk)
        return place

    def _skip(self, place: Place, chunks: int) -> Place:
        """The place so many chunks later, or that of the next cut; they have one length, however many they are."""
        cuts = [chunk for chunk, change in self._waiting.items() if change.transition is None]
        chunks = min([chunks, *(chunk - place.chunk for chunk in cuts if chunk >= place.chunk)])
        if place.restart or chunks <= 0:
            return place
        latents = chunks * self._rule.latents
        frames = chunks * self._rule.frames
        return replace(
            place, chunk=place.chunk + chunks, latent=place.latent + latents, frame=place.frame + frames
        )

    def _next(self, place: Place) -> Place:
        change = self._waiting.get(place.chunk)
        if change is not None and change.transition is None and self._cut_restarts:
            place = replace(place, restart=True)
        return self._rule.after(self._rule.plan(place))
