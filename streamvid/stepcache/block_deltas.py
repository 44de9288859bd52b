"""Hooks that keep what chosen blocks added to the stream, and add it again instead of running them."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from streamvid.stepcache.hooks import NullHooks


class BlockDeltas(NullHooks):
    """Keeps ``h_out - h_in`` of ``keep`` layers in ``store``; layers in ``skip`` are replaced by it.

    Args:
        store: by layer; owned by the session.
        keep: layers whose delta is kept when they run.
        skip: layers to skip in this forward; one without a kept delta is run.
    """

    def __init__(self, store: dict[int, Tensor], keep: Collection[int], skip: Collection[int] = ()):
        self.store, self.keep, self.skip = store, frozenset(keep), frozenset(skip)

    def before_block(self, layer: int, h: Tensor) -> Tensor | None:
        delta = self.store.get(layer)
        if layer in self.skip and delta is not None and delta.shape == h.shape:
            return h + delta
        return None

    def after_block(self, layer: int, h_in: Tensor, h_out: Tensor) -> Tensor | None:
        if layer in self.keep:
            self.store[layer] = h_out - h_in
        return None
