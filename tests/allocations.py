"""Counts the bytes of tensor storages that are alive, and their peak, by watching every operator."""

import weakref
from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """``with Allocations(tensors) as used: ...; used.peak``.

    ``tensors`` count from the start. What else existed before, and what lives within one operator, is not seen.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet = weakref.WeakSet()
        for tensor in tensors:
            self._count(tensor.untyped_storage())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor.untyped_storage() not in self._known:
                self._known.add(tensor.untyped_storage())  # made before
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.now -= size


def reachable(root: object) -> Iterator[Tensor]:
    """Every tensor reachable from an object through attributes, lists, tuples and dictionaries of our own classes."""
    seen, waiting = set(), [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, (list, tuple, set, frozenset)):
            waiting += item
        elif type(item).__module__.startswith("streamvid"):
            waiting += getattr(item, "__dict__", {}).values()


def held_bytes(root: object) -> int:
    """Bytes of the storages behind those tensors, each counted once."""
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in reachable(root)
    }
    return sum(storages.values())
