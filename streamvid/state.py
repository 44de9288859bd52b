"""All that one stream remembers. The model remembers nothing.

A snapshot is ``state_dict()``; a stream resumed from it goes on bit for bit. Knows nothing of frames' forms, files or
of who reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from streamvid.rolling import RollingState
from streamvid.timeline import ChunkPlan, ChunkRule, Place


@dataclass
class Side:
    """One guidance branch: what it reads of the text, and its own keys and values of the past."""

    cache: Any
    """``KVCache``."""
    embeds: Tensor
    """``[b, text_len, text_dim]``."""
    prompt: Any
    """``PromptState`` made from ``embeds``."""


@dataclass
class Blend:
    """A text embedding on its way from one prompt to another."""

    start: Tensor
    target: Tensor
    chunks: int
    done: int = 0

    def step(self) -> Tensor:
        """The embedding for the next chunk."""
        self.done += 1
        return torch.lerp(self.start, self.target, min(1.0, self.done / self.chunks))


@dataclass
class Owed:
    """A finished chunk whose context pass has been put off, so that its frames leave first."""

    latents: Tensor
    """``[b, f, c, h, w]``, clean."""
    branches: list[str]
    """Guidance branches whose memory still waits for it; the chunk is in progress there."""


@dataclass
class StreamState:
    """Everything that changes while a stream runs."""

    sides: dict[str, Side]
    """``cond``, and ``uncond`` when there is guidance."""
    decoder: Any
    """``Decoder``, or None when latents are the output."""
    step_cache: Any
    """The step cache's ``Session``; one that skips nothing when there is no method."""
    text: str
    at: Place = Place()
    owed: Owed | None = None
    blend: Blend | None = None
    recent: list[Tensor] = field(default_factory=list)
    """Clean latents ``[b, 1, c, h, w]`` of the newest frames, oldest first; what a re-encoding of the past reads."""
    rolling: RollingState | None = None
    """The chunks in flight of a joint window; None where chunks are denoised one by one."""

    def advance(self, plan: ChunkPlan, latents: Tensor, keep: int | None) -> None:
        """A chunk is made: move on, owe its context pass, and remember ``keep`` latent frames (None: all)."""
        self.at = ChunkRule.after(plan)
        self.owed = Owed(latents, list(self.sides))
        self.recent.extend(latents[:, index : index + 1] for index in range(latents.shape[1]))
        if keep is not None:
            del self.recent[: max(0, len(self.recent) - keep)]

    def caches(self) -> Iterator[Any]:
        """The memory of each guidance branch."""
        for side in self.sides.values():
            yield side.cache

    def report(self) -> dict[str, Any]:
        """Where the stream is, what it holds of the past and what that costs: JSON-ready."""
        cache = self.sides["cond"].cache
        return {
            "chunk": self.at.chunk,
            "frame": self.at.frame,
            "latent": self.at.latent,
            "prompt": self.text,
            "memory": {name: side.cache.report().to_dict() for name, side in self.sides.items()},
            "held": cache.held(),
            "held_by_group": cache.held_by_group(),
            "bytes": self.nbytes(),
            "step_cache": self.step_cache.accounting.report(),
        }

    def nbytes(self) -> int:
        """Bytes of all tensors the stream holds, counted from the tensors themselves."""
        held = [
            [side.embeds for side in self.sides.values()],
            None if self.decoder is None else self.decoder.state_dict(),
            None if self.owed is None else self.owed.latents,
            None if self.blend is None else vars(self.blend),
            self.recent,
            None if self.rolling is None else self.rolling.state_dict(),
        ]
        others = sum(side.prompt.nbytes + side.cache.report().total for side in self.sides.values())
        return sum(storage_bytes(held).values()) + others + self.step_cache.nbytes()

    def state_dict(self) -> dict[str, Any]:
        """A tree of tensors and plain values; see ``snapshot``."""
        return {
            "sides": {
                name: {"embeds": side.embeds, "cache": side.cache.state_dict()}
                for name, side in self.sides.items()
            },
            "decoder": None if self.decoder is None else self.decoder.state_dict(),
            "step_cache": self.step_cache.state_dict(),
            "text": self.text,
            "at": vars(self.at).copy(),
            "owed": None if self.owed is None else vars(self.owed).copy(),
            "blend": None if self.blend is None else vars(self.blend).copy(),
            "recent": list(self.recent),
            "rolling": None if self.rolling is None else self.rolling.state_dict(),
        }

    def load_state_dict(self, values: dict[str, Any], device: torch.device | str) -> None:
        """Take over a saved state. The prompts of the sides are made anew by the caller, from their ``embeds``."""
        for name, side in self.sides.items():
            saved = values["sides"][name]
            side.embeds = saved["embeds"].to(device)
            side.cache.load_state_dict(saved["cache"])
        if self.decoder is not None:
            self.decoder.load_state_dict(values["decoder"])
        self.step_cache.load_state_dict(values["step_cache"])
        self.text = values["text"]
        self.at = Place(**values["at"])
        owed = values["owed"]
        self.owed = owed and Owed(owed["latents"].to(device), owed["branches"])
        blend = values["blend"]
        self.blend = blend and Blend(
            blend["start"].to(device), blend["target"].to(device), blend["chunks"], blend["done"]
        )
        self.recent = [latent.to(device) for latent in values["recent"]]
        if self.rolling is not None:
            self.rolling.load_state_dict(values["rolling"], device)


def storage_bytes(node: Any, found: dict[int, int] | None = None) -> dict[int, int]:
    """Bytes by storage of all tensors in a tree; a storage that several tensors share is counted once."""
    found = {} if found is None else found
    if isinstance(node, Tensor):
        storage = node.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    elif isinstance(node, dict):
        for value in node.values():
            storage_bytes(value, found)
    elif isinstance(node, list | tuple):
        for value in node:
            storage_bytes(value, found)
    return found
