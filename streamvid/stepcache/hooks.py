"""Base classes for block hooks: one that does nothing, and one that keeps and replays module outputs."""

from __future__ import annotations

from torch import Tensor

MODULES = ("self_attn", "cross_attn", "ffn")


class NullHooks:
    """Goes on as usual everywhere; methods override what they need."""

    def before_block(self, layer: int, h: Tensor) -> Tensor | None:
        return None

    def after_block(self, layer: int, h_in: Tensor, h_out: Tensor) -> Tensor | None:
        return None

    def before_module(self, layer: int, name: str) -> Tensor | None:
        return None

    def after_module(self, layer: int, name: str, out: Tensor) -> Tensor | None:
        return None


class ModuleStore(NullHooks):
    """Keeps the outputs of ``modules`` in ``store`` by (layer, name); replays them where ``replay`` says so.

    Args:
        store: newest outputs first, at most ``depth`` a key; owned by the session.
        modules: which modules to keep.
        replay: names of the modules to replay in this forward.
        weights: of the newest, second newest, ... kept output in the replayed value.
    """

    def __init__(
        self,
        store: dict[str, list[Tensor]],
        modules: tuple[str, ...],
        replay: tuple[str, ...] = (),
        weights: tuple[float, ...] = (1.0,),
        depth: int = 1,
    ):
        self.store, self.modules, self.replay = store, modules, replay
        self.weights, self.depth = weights, depth

    def before_module(self, layer: int, name: str) -> Tensor | None:
        kept = self.store.get(f"{layer}.{name}")
        if name not in self.replay or not kept:
            return None
        if len(kept) < len(self.weights):
            return kept[0]
        return weighted(kept, self.weights)

    def after_module(self, layer: int, name: str, out: Tensor) -> Tensor | None:
        if name in self.modules:
            kept = self.store.setdefault(f"{layer}.{name}", [])
            kept.insert(0, out)
            del kept[self.depth :]
        return None


def weighted(values: list[Tensor], weights: tuple[float, ...]) -> Tensor:
    """``sum_j weights[j] values[j]``, newest first; exactly the newest for weights (1,)."""
    total = values[0] * weights[0] if weights[0] != 1.0 else values[0]
    for value, weight in zip(values[1:], weights[1:], strict=False):
        if weight:
            total = total + weight * value
    return total


def relative_change(new: Tensor, old: Tensor) -> Tensor:
    """``mean|new - old| / mean|old|`` as an fp32 scalar on the device."""
    old = old.float()
    return (new.float() - old).abs().mean() / old.abs().mean().clamp_min(1e-12)
