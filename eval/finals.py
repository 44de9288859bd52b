"""The second run of a study: its best variants on longer clips. Knows rows, makes none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from streamvid.eval.aggregate import by_variant
from streamvid.eval.grid import AXES, Study

Row = Mapping[str, Any]
QUALITY = ("judge", "psnr", "sharpness")
"""What decides, the first that rows have."""


def ranked(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Settings of the listed variants without failures, best first.

    By the mean of the first figure of `QUALITY` that the rows have, to three digits; of equal ones the better
    last segment and then the fewer bytes come first. Imported clips do not take part.
    """
    groups = [g for g in by_variant(rows).values() if not g[0].get("imported")]
    made = [group for group in groups if all(row["status"] == "done" for row in group)]
    lead = next((n for n in QUALITY if any(n in row["metrics"] for g in made for row in g)), QUALITY[-1])

    def mean(group: Sequence[Row], name: str) -> float:
        values = [float(row["metrics"][name]) for row in group if row["metrics"].get(name) is not None]
        return sum(values) / len(values) if values else 0.0

    def place(group: Sequence[Row]) -> tuple[float, float, float]:
        return (
            -round(mean(group, lead), 3),
            -round(mean(group, f"{lead}_last"), 3),
            mean(group, "kv_peak_bytes"),
        )

    return [dict(group[0]["variant"]) for group in sorted(made, key=place)]


def final_study(study: Study, rows: Sequence[Row]) -> Study | None:
    """The study of the best variants, and of the reference beside them; None when there is nothing to compare.

    Args:
        rows: of the whole study, as `run_study` returns them.
    """
    if study.final is None:
        return None
    listed = {tuple(v.settings().items()): v for v in study.variants}
    best = [listed[key] for settings in ranked(rows) if (key := _key(settings)) in listed]
    chosen = best[: study.final.best]
    if not chosen:
        return None
    reference = study.reference_of(chosen[0])
    if reference is not None:
        reference = listed.get(tuple(reference.settings().items()), reference)
        chosen = list(dict.fromkeys([*chosen, reference]))
    count = study.final.prompts or len(study.prompts)
    return dataclasses.replace(
        study,
        title=f"{study.title}: the best {len(best[: study.final.best])} on {study.final.num_frames} frames",
        variants=tuple(chosen),
        prompts=study.prompts[:count],
        num_frames=study.final.num_frames,
        orderings=(),
        final=None,
    )


def _key(settings: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((axis, settings[axis]) for axis in AXES)
