"""One pass for two chunks: the context pass of a chunk and the first step of the next one, exactly.

The next chunk attends to what the cache will hold after the commit, so each layer works out the commit on a copy of the
bank's records (the tensors are shared and only read) and the next chunk's keys and values stay in scratch. The cache
itself changes at the end, as always; an abort before that leaves everything as it was. Possible for policies whose
commit only drops entries and who watch no queries, without a codec; else the caller runs the passes one by one.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from torch import Tensor

from streamvid.kernels.attention import attend
from streamvid.kernels.rope import rotate
from streamvid.kernels.types import KVView
from streamvid.memory.bank import Bank
from streamvid.memory.policy import Chunk
from streamvid.memory.view import View, resolve

if TYPE_CHECKING:
    from streamvid.memory.cache import KVCache


class FusedPass:
    """The state of one such pass. Made by `KVCache.begin_fused`."""

    def __init__(self, cache: KVCache, frames: int) -> None:
        assert cache.chunk is not None
        self.cache, self.now = cache, cache.chunk
        self.next = Chunk(self.now.index + 1, self.now.start + self.now.count, frames, self.now.next_count)
        self.tokens = self.now.count * cache.geometry.tokens_per_frame

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of one layer.

        Args:
            k, v: ``[b, n, heads, d]``: the tokens of the chunk to commit, then those of the next one.
            q: the same tokens, or only the next chunk's (last layer).

        Returns:
            As ``q``.
        """
        here = q.shape[1] - (k.shape[1] - self.tokens)
        k_now, v_now, k_next, v_next = (
            k[:, : self.tokens],
            v[:, : self.tokens],
            k[:, self.tokens :],
            v[:, self.tokens :],
        )
        if here:
            first = self.cache.attend(layer, q[:, :here], k_now, v_now)
        else:
            self.cache.write(layer, k_now, v_now)
        second = self._attend_next(layer, q[:, here:], k_next, v_next)
        if not here:
            return second
        out = q.new_empty(q.shape)
        out[:, :here], out[:, here:] = first, second
        return out

    def _attend_next(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        views, queries = [], []
        self.cache.scratch.begin()
        for bank in self.cache.banks[layer]:
            after, view = self._after_commit(bank)
            keys, values = view.fill(
                after, self.cache.heads(k, bank), self.cache.heads(v, bank), self.cache.scratch
            )
            views.append(KVView(keys, values, heads=bank.heads, bias=view.bias))
            queries.append((bank, rotate(self.cache.heads(q, bank), view.query_table)))
        return attend(self.cache.join(queries, q), views, backend=self.cache.backend)

    def _after_commit(self, bank: Bank) -> tuple[Bank, View]:
        """The bank as it will be, and the next chunk's view of it. Touches no tensor of the bank."""
        after = copy.copy(bank)
        after.entries = [copy.copy(entry) for entry in bank.entries]
        after.current = [copy.copy(entry) for entry in bank.current]
        after.free, after.rotated_t = list(bank.free), list(bank.rotated_t)
        after.notes, after.shadow = {}, False
        after.base = self.cache.views[bank.layer, bank.group].base
        after.promote()
        policy = self.cache.policy
        policy.commit(after, self.now)
        plan = policy.plan(after, self.next)
        after.begin(self.next.frames, slots=False)
        return after, resolve(after, plan, self.cache.rope, self.cache.position_limit, 0)
