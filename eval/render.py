"""From a cell to its clip, by the public interface of streamvid: `load`, `stream`, `stats`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np


@dataclass
class Rendered:
    """A clip and what making it cost."""

    frames: np.ndarray
    """uint8 `[n, H, W, 3]`."""
    fps: float
    chunk_starts: list[int] = field(default_factory=list)
    """First frame of every chunk."""
    costs: dict[str, float] = field(default_factory=dict)
    """Figures of the group "cost"."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What really ran, with every default filled in."""
    regions: list[dict[str, Any]] = field(default_factory=list)
    """What memory held at some chunks: region -> frame indices."""
    attention_mass: list[dict[str, float]] = field(default_factory=list)
    """Share of attention each region got, a chunk."""

    def facts(self) -> dict[str, Any]:
        """All but the frames and the costs, for the row."""
        facts = asdict(self)
        del facts["frames"], facts["costs"]
        return facts
