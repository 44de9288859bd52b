"""Published orderings, checked on our own rows: what the claim is, whose it is, and whether we see it.

Rows are compared in pairs of the same prompt and seed, so that the spread between prompts does not hide a
difference. Where the interval holds zero we say so: that is no agreement.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np

Row = Mapping[str, Any]

MIN_PAIRS = 6
"""Fewer cannot reach 95 % even when all point one way (a sign test gives 2 / 2**6 = 3 % for six)."""


@dataclass(frozen=True)
class Clause:
    """`metric` of the variants that match `low` is below (`<`) or equal within `margin` (`~`) of `high`.

    Patterns are shell patterns on the axes' text, for example ``{"codec": "int4*"}``.
    """

    metric: str
    low: Mapping[str, str]
    relation: Literal["<", "~"]
    high: Mapping[str, str]
    margin: float = 0.0
    differ: str = ""
    """A regular expression: only variants whose settings are equal but for what it matches are compared."""


@dataclass(frozen=True)
class Ordering:
    claim: str
    source: str
    clauses: tuple[Clause, ...]


_STUDY = "33-variant study of KV quantisation on Self-Forcing"

ORDERINGS: dict[str, Ordering] = {
    "sink": Ordering(
        "a window without a sink is worse than the same window with one",
        "StreamingLLM, LongLive, Rolling Forcing",
        (
            Clause(
                "judge_last",
                {"memory": "window:size=*sink=0*"},
                "<",
                {"memory": "window:size=*sink=[1-9]*"},
                differ=r"sink=\d+",
            ),
        ),
    ),
    "bits": Ordering(
        "fidelity of round-to-nearest rises with its bits: int2 < int4 < int8",
        _STUDY,
        (
            Clause("psnr", {"codec": "int2*"}, "<", {"codec": "int4*"}),
            Clause("psnr", {"codec": "int4*"}, "<", {"codec": "int8*"}),
        ),
    ),
    "soft_prune": Ordering(
        "soft pruning keeps quality but makes another video",
        _STUDY,
        (
            Clause("psnr", {"memory": "soft_prune*"}, "<", {"codec": "int4*"}),
            Clause("judge", {"memory": "soft_prune*"}, "~", {"codec": "int4*"}, 0.05),
        ),
    ),
    "prq": Ordering(
        "progressive residual quantisation is nearer to the original than round-to-nearest of the same bits",
        _STUDY,
        (Clause("psnr", {"codec": "int4"}, "<", {"codec": "prq"}),),
    ),
    "peak": Ordering(
        "the nominal saving of a codec is not its peak: scratch and staging come on top",
        _STUDY,
        (Clause("nominal_over_peak", {"codec": "int4"}, "<", {"codec": "none"}),),
    ),
}


@dataclass(frozen=True)
class Agreement:
    """The outcome of one clause. `difference` is high - low (mean over pairs), with a 95 % interval."""

    ordering: str
    claim: str
    source: str
    clause: str
    pairs: int
    low: float | None
    high: float | None
    difference: float | None
    interval: tuple[float, float] | None
    verdict: Literal["agrees", "contradicts", "not distinguishable", "too few pairs", "not tested"]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def paired_interval(differences: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the mean of paired differences; of one pair, the pair itself."""
    values = np.asarray(differences, np.float64)
    if len(values) == 1:
        return float(values[0]), float(values[0])
    rng = np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (draws, len(values)))].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def _matching(
    rows: Iterable[Row], pattern: Mapping[str, str], metric: str, differ: str
) -> dict[tuple, float]:
    """Mean of the metric over the matching variants for each (model, prompt, seed), and for each of the settings
    without what `differ` matches, when it is given."""
    found: dict[tuple, list[float]] = defaultdict(list)
    for row in rows:
        variant = row["variant"]
        if row["status"] != "done" or metric not in row["metrics"]:
            continue
        if all(fnmatchcase(str(variant.get(axis, "")), text) for axis, text in pattern.items()):
            rest = re.sub(differ, "", "|".join(map(str, variant.values()))) if differ else ""
            found[variant.get("model"), row["prompt"], row["seed"], rest].append(
                float(row["metrics"][metric])
            )
    return {place: float(np.mean(values)) for place, values in found.items()}


def _verdict(clause: Clause, interval: tuple[float, float], pairs: int) -> str:
    low, high = interval
    if pairs < MIN_PAIRS:
        return "too few pairs"
    if clause.relation == "~":
        if -clause.margin <= low and high <= clause.margin:
            return "agrees"
        return "contradicts" if low > clause.margin or high < -clause.margin else "not distinguishable"
    if low <= 0 <= high:
        return "not distinguishable"
    return "agrees" if low > 0 else "contradicts"


def check_orderings(rows: Sequence[Row], names: Iterable[str] | None = None) -> list[Agreement]:
    """Check published orderings on rows of a comparison.

    Args:
        rows: rows as `compare` writes them (`status`, `variant`, `prompt`, `seed`, `metrics`).
        names: which of `ORDERINGS`; all when None.

    Returns:
        one Agreement a clause. "agrees" and "contradicts" need an interval that excludes zero (for ``~``: that
        lies within or outside the margin) and `MIN_PAIRS` pairs; a clause whose variants are not both there is
        "not tested".
    """
    result = []
    for name in ORDERINGS if names is None else names:
        ordering = ORDERINGS[name]
        for clause in ordering.clauses:
            low = _matching(rows, clause.low, clause.metric, clause.differ)
            high = _matching(rows, clause.high, clause.metric, clause.differ)
            places = [place for place in low if place in high]
            text = f"{clause.metric}: {_say(clause.low)} {clause.relation} {_say(clause.high)}"
            shared = {"ordering": name, "claim": ordering.claim, "source": ordering.source, "clause": text}
            if not places:
                nothing = dict.fromkeys(("low", "high", "difference", "interval"))
                result.append(Agreement(**shared, **nothing, pairs=0, verdict="not tested"))
                continue
            differences = [high[place] - low[place] for place in places]
            interval = paired_interval(differences)
            result.append(
                Agreement(
                    **shared,
                    pairs=len(places),
                    low=float(np.mean([low[place] for place in places])),
                    high=float(np.mean([high[place] for place in places])),
                    difference=float(np.mean(differences)),
                    interval=interval,
                    verdict=_verdict(clause, interval, len(places)),
                )
            )
    return result


def _say(pattern: Mapping[str, str]) -> str:
    return ", ".join(text.strip("*").replace("*", "..") for text in pattern.values())
