"""From rows to what a report shows: means with intervals by variant, paired differences, curves, memory pictures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import t as student

from streamvid.eval.metrics import METRICS

Row = Mapping[str, Any]


def interval(values: Sequence[float]) -> dict[str, float | int | None]:
    """Mean with its 95 % interval (Student). Of fewer than three values there is none: it would span the plot."""
    x = np.asarray(values, np.float64)
    mean = float(x.mean())
    if len(x) < 3:
        return {"mean": mean, "lo": None, "hi": None, "n": len(x)}
    half = float(student.ppf(0.975, len(x) - 1) * x.std(ddof=1) / np.sqrt(len(x)))
    return {"mean": mean, "lo": mean - half, "hi": mean + half, "n": len(x)}


def variant_id(row: Row) -> tuple[str, ...]:
    """What rows of one variant share."""
    return (*(f"{axis}={value}" for axis, value in sorted(row["variant"].items())), row.get("imported", ""))


def by_variant(rows: Iterable[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Rows of each variant that the study lists, in order of appearance."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row.get("listed", True):
            groups[variant_id(row)].append(row)
    return dict(groups)


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry a variant: label, settings, counts, `metrics` and `paired` (difference from its reference)."""
    entries = []
    references = _references(rows)
    for group in by_variant(rows).values():
        made = [row for row in group if row["status"] == "done"]
        names = [name for name in METRICS if any(_value(row, name) is not None for row in made)]
        metrics = {
            name: interval([v for row in made if (v := _value(row, name)) is not None]) for name in names
        }
        entries.append(
            {
                "label": group[0]["label"],
                "variant": group[0]["variant"],
                "imported": group[0].get("imported"),
                "is_reference": bool(group[0].get("is_reference")),
                "settings": made[0].get("settings", {}) if made else {},
                "clips": len(made),
                "failed": len(group) - len(made),
                "metrics": metrics,
                "paired": _paired(made, references, names),
            }
        )
    return entries


def _value(row: Row, name: str) -> float | None:
    value = row["metrics"].get(name)
    return None if value is None else float(value)


def _references(rows: Iterable[Row]) -> dict[str, Row]:
    return {row["key"]: row for row in rows if row["status"] == "done"}


def _paired(made: Sequence[Row], references: Mapping[str, Row], names: Iterable[str]) -> dict[str, Any]:
    pairs = [
        (row, references[row["reference"]])
        for row in made
        if row.get("reference") in references and row["reference"] != row["key"]
    ]
    result = {}
    for name in names:
        values = [(_value(row, name), _value(other, name)) for row, other in pairs]
        differences = [a - b for a, b in values if a is not None and b is not None]
        if differences:
            result[name] = interval(differences)
    return result


def curves(rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """Metric -> one curve a variant: `x` (seconds), `mean`, `lo`, `hi` over prompts and seeds."""
    result: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for index, group in enumerate(by_variant(rows).values()):
        made = [row for row in group if row["status"] == "done"]
        names = {name: None for row in made for name in row["curves"]}
        for name in names:
            points = _points(made, name)
            if points:
                result[name].append({"variant": index} | points)
    return dict(result)


def _points(made: Sequence[Row], name: str) -> dict[str, list[float | None]]:
    columns: dict[float, list[float]] = defaultdict(list)
    for row in made:
        for x, value in zip(row["curve_seconds"], row["curves"].get(name, ()), strict=False):
            if value is not None:
                columns[round(x, 3)].append(value)
    if not columns:
        return {}
    stats = {x: interval(values) for x, values in sorted(columns.items())}
    keys = ("mean", "lo", "hi")
    return {"x": list(stats)} | {key: [s[key] for s in stats.values()] for key in keys}


def memory_pictures(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each variant of which a row has them: `regions` and `attention_mass` of its first such clip."""
    result = []
    for index, group in enumerate(by_variant(rows).values()):
        for row in group:
            if row["status"] == "done" and (row.get("regions") or row.get("attention_mass")):
                picture = {key: row.get(key) or [] for key in ("regions", "attention_mass")}
                result.append({"variant": index} | picture)
                break
    return result


def pareto(points: Sequence[tuple[float, float]], better: tuple[str, str]) -> list[int]:
    """Indices of points that no other beats on both axes, ordered by the first axis.

    Args:
        better: "higher" or "lower" for each axis.
    """
    signs = [1.0 if side == "lower" else -1.0 for side in better]
    costs = [tuple(sign * value for sign, value in zip(signs, point, strict=True)) for point in points]
    front = []
    for i, a in enumerate(costs):
        beaten = any(b[0] <= a[0] and b[1] <= a[1] and b != a for b in costs)
        if not beaten:
            front.append(i)
    return sorted(front, key=lambda i: points[i][0])
