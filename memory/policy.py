"""What a memory policy decides, and how to write one.

A policy is ONE keyword-only dataclass in ``memory/policies/<name>.py`` plus one line in ``POLICIES``. Its fields are
its settings. It holds no state of a stream: everything that must survive a chunk lives in ``bank.entries`` and
``bank.state`` (named tensors), which the cache snapshots, counts and restores for it.

The store is a list of `Bank`s, one for every layer and group of heads. A bank holds `Entry` records in READ ORDER
(chronological unless the policy orders them otherwise): runs of tokens, normally one latent frame each, with un-rotated
keys, values, temporal position, source frame and region. Where the tokens lie physically is the bank's business.

One chunk, and the hooks in the order in which they are called (all optional; the defaults are the full cache):

1. ``plan(bank, chunk) -> Plan``, at ``begin_chunk``, once a bank: which entries the chunk sees and at which temporal
   positions. Must not change the bank: what is left out of the plan is *staged* for eviction, still held, and can be
   used by ``commit``; an aborted chunk forgets it.
2. noisy passes, any number: attention over the planned view and the current chunk.
   ``refine(bank, plan, seen) -> Plan | None`` in the FIRST noisy pass only, before attention: the same plan with other
   positions or with a token selection (``Plan.select``), frozen for the rest of the chunk. Deep Forcing's parity mode.
   ``observe(bank, seen)`` in every pass over all tokens (not of a token subset) and in the context pass: accumulate
   statistics of queries into ``bank.notes`` (dropped with the chunk unless ``commit`` copies them into ``bank.state``).
   Never keep whole queries without need.
3. the context pass (clean latents): attention once more, ``observe`` with ``seen.stage == "context"``.
4. ``commit(bank, chunk)``, once a bank, in order of layers, after the whole context pass: the ONLY place that may
   change a bank. The chunk's frames have been appended to ``bank.entries`` with region "recent"; now score, select,
   merge, edit or drop. ``bank.drop``, ``bank.read``, ``bank.overwrite`` and ``bank.add`` move the data.
   Decisions shared by layers go into ``chunk.shared`` (a dict that dies with the chunk).
   Afterwards at most ``capacity - chunk.next_count`` frames may be left: the next chunk is written into the slots that
   were freed, so that nothing is ever shifted or cloned, and an aborted chunk needs no undo.

What else a policy may say: ``groups`` (head groups a layer: each gets its own bank, so pruning frees memory for real),
``capacity`` (frames of storage a bank, current chunk included; None grows), ``validate`` (refuse settings that cannot
work with this geometry), ``on_prompt`` (a new prompt without re-cache), ``fusable`` (False if ``commit`` edits data).

Batch items are independent: a decision is made per item (index tensors ``[b, n]``), or from positions alone.
Determinism: ties by lowest index (``torch.sort(..., stable=True)``), no ``.item()`` on device tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from streamvid.memory.geometry import KVGeometry
from streamvid.memory.rope import Times, absolute

if TYPE_CHECKING:
    from streamvid.memory.bank import Bank, Entry

Stage = Literal["noisy", "context"]


@dataclass
class Chunk:
    """The chunk in progress, as policies see it."""

    index: int
    """Chunks committed before this one."""
    start: int
    """Absolute latent frame of its first frame."""
    count: int
    """Latent frames."""
    next_count: int
    """Frames to leave free at commit for the next chunk; 0 if the cache keeps staged entries (``retain``)."""
    skip: int = 0
    """Leading frames computed as queries only, their keys and values neither seen nor kept (re-cache, kept sink)."""
    shared: dict[str, Any] = field(default_factory=dict)
    """Decisions shared between layers; dropped with the chunk."""

    @property
    def frames(self) -> tuple[int, ...]:
        """Absolute indices of its frames."""
        return tuple(range(self.start, self.start + self.count))


@dataclass
class Plan:
    """What a chunk sees of one bank: fixed for the chunk."""

    visible: list[Entry]
    """Entries of the bank, in read order."""
    t: list[Times]
    """Temporal position of each frame of each visible entry. Of one with ``positions``: one number, added to them."""
    query_t: Times
    """Temporal position of each frame of the chunk (queries and their own keys)."""
    bias: list[float] | None = None
    """Additive logit of each visible entry, on top of the log of token counts."""
    select: Tensor | None = None
    """Tokens of the visible entries (concatenated) to keep: int64 ``[b | 1, n]`` or ``[b | 1, n, group heads]``."""
    sees: list[tuple[int, ...]] | None = None
    """For each latent frame of the chunk, the visible entries it reads (ascending; the chunk itself is always read);
    None: all of them. Entries must be whole frames, and the policy must say ``per_frame``."""


@dataclass
class Seen:
    """What ``observe`` and ``refine`` may look at during one attention call. Valid only during the call."""

    q: Tensor
    """Un-rotated queries of the group ``[b, n, group heads, d]``."""
    k: Tensor
    """Un-rotated keys of the current chunk, same shape."""
    v: Tensor
    """Values of the current chunk, same shape."""
    chunk: Chunk
    stage: Stage
    passes: int
    """Passes of this chunk before this one: 0 in the first noisy pass."""
    rotate_q: Any
    """``rotate_q() -> Tensor``: the queries at their planned positions."""
    view: Any
    """``view() -> (k, v)``: rotated keys and values this pass attends to."""


class MemoryPolicy:
    """Base of all policies: the full cache. Override what differs."""

    fusable = True
    """True if ``commit`` only drops entries, so that a context pass may share a forward with the next chunk."""

    per_frame = False
    """True if plans may use ``sees``: such a policy takes no block-sparse rule and no token subsets beside it."""

    def validate(self, geometry: KVGeometry, chunk_frames: int) -> None:
        """Raise ValueError when the settings cannot work with this geometry and chunk size."""

    def groups(self, geometry: KVGeometry) -> Sequence[Sequence[Sequence[int]]] | None:
        """For each layer, the groups of head indices (a partition). None: one group of all heads everywhere."""
        return None

    def capacity(self, geometry: KVGeometry, layer: int, group: int, chunk_frames: int) -> int | None:
        """Frames of storage to allocate for a bank, the current chunk included. None: grow as needed."""
        return None

    def reach(self) -> int | None:
        """Newest latent frames that a re-cache must encode again to fill what this policy shows; None: all of them."""
        return None

    def plan(self, bank: Bank, chunk: Chunk) -> Plan:
        """What the chunk sees. The bank must not be changed."""
        times, query = absolute(bank.entries, chunk)
        return Plan(list(bank.entries), times, query)

    def refine(self, bank: Bank, plan: Plan, seen: Seen) -> Plan | None:
        """Change the plan in the first noisy pass; None keeps it."""
        return None

    def observe(self, bank: Bank, seen: Seen) -> None:
        """Accumulate statistics into ``bank.notes``."""

    def commit(self, bank: Bank, chunk: Chunk) -> None:
        """Decide what stays after the chunk."""

    def on_prompt(self, bank: Bank, event: dict[str, Any]) -> None:
        """React to a new prompt between chunks; ``event``: what the stream knows (see `KVCache.prompt_changed`)."""

    def on_cut(self, bank: Bank) -> bool:
        """Prepare for a scene cut between chunks. True: the policy keeps its history (a gap in time makes the cut).

        False, the default: the cache forgets everything and the next chunk starts a new clip.
        """
        return False


def overrides(policy: MemoryPolicy, hook: str) -> bool:
    """Whether a policy implements an optional hook (so that the cache may skip preparing its arguments)."""
    return getattr(type(policy), hook) is not getattr(MemoryPolicy, hook)
