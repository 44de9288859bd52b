"""Head profiles: what each attention head of a model does, as a small file that policies read.

A profile is one JSON object made by ``streamvid profile-heads``. It carries the fingerprint of the weights it was made
with and is refused for any other model. Knows nothing of how labels are found (``memory.head_labels``).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from streamvid.memory.files import write_whole
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.spec import nearest

FORMAT = 1


@dataclass(kw_only=True)
class HeadProfile:
    """Labels and tables of all methods for one model."""

    fingerprint: str | None
    """Of the weights; None fits any model of the same size (for tests and for labels made by hand)."""
    layers: int
    heads: int
    labels: dict[str, list[list[str]]] = field(default_factory=dict)
    """Method to ``[layers][heads]`` of its head types."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """Method to its tables or thresholds."""
    made: dict[str, Any] = field(default_factory=dict)
    """How: prompts, seed, frames, settings of the rules, date."""

    def save(self, path: str | Path) -> None:
        """Write the file; a half-written one never stands under the final name."""
        write_whole(path, json.dumps({"format": FORMAT, **asdict(self)}) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> HeadProfile:
        """Raises ValueError when the file is not a head profile."""
        try:
            values = json.loads(Path(path).read_text())
            if values.pop("format") != FORMAT:
                raise ValueError("another version")
            return cls(**values)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is not a head profile ({error}); make one with streamvid profile-heads CHECKPOINT -o FILE"
            ) from None

    def check(self, geometry: KVGeometry) -> None:
        """Raises ValueError when the profile is of another model."""
        if (self.layers, self.heads) != (geometry.layers, geometry.heads):
            raise ValueError(
                f"the head profile is of a model with {self.layers} layers of {self.heads} heads, this one has "
                f"{geometry.layers} of {geometry.heads}; make one with streamvid profile-heads"
            )
        if self.fingerprint and geometry.fingerprint and self.fingerprint != geometry.fingerprint:
            raise ValueError(
                f"the head profile was made with other weights (fingerprint {self.fingerprint}, the model has "
                f"{geometry.fingerprint}); make one with streamvid profile-heads"
            )

    def of(self, method: str) -> list[list[str]]:
        """The labels of a method, ``[layers][heads]``. Raises ValueError when the profile has none."""
        if method not in self.labels:
            raise ValueError(
                f"the head profile has no labels of {method!r}{nearest(method, self.labels)} "
                f"(it has: {', '.join(sorted(self.labels)) or 'none'})"
            )
        return self.labels[method]

    def table(self, method: str) -> Any:
        """The numbers of a method. Raises ValueError when the profile has none."""
        if method not in self.numbers:
            raise ValueError(
                f"the head profile has no table of {method!r}{nearest(method, self.numbers)} "
                f"(it has: {', '.join(sorted(self.numbers)) or 'none'})"
            )
        return self.numbers[method]


def groups_by_label(labels: list[str], order: tuple[str, ...]) -> list[list[int]]:
    """Head indices of each label of ``order``, empty ones included. Raises ValueError on any other label."""
    strange = sorted(set(labels) - set(order))
    if strange:
        raise ValueError(f"head label {strange[0]!r} is not one of {', '.join(order)}")
    return [[head for head, label in enumerate(labels) if label == name] for name in order]
