"""How a clip changes from its beginning on: any per-frame score by segments, colour and exposure in Lab."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from scipy.stats import wasserstein_distance

from streamvid.errors import StreamvidError
from streamvid.eval.video import lab_means


def segments(num_frames: int, length: int) -> list[slice]:
    """Consecutive segments of `length` frames; a remainder under half a segment joins the last one."""
    if length < 1:
        raise StreamvidError(f"a segment must have at least 1 frame, got {length}")
    count = max(1, int(num_frames / length + 0.5))
    edges = [i * length for i in range(count)] + [num_frames]
    return [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]


def by_segment(
    values: np.ndarray, parts: list[slice], positions: np.ndarray | None = None
) -> list[float | None]:
    """Mean of a score in each segment; None where it has no value.

    Args:
        values: the score at `positions` (frames), or at every frame when positions is None.
    """
    if positions is None:
        positions = np.arange(len(values))
    result: list[float | None] = []
    for part in parts:
        inside = values[(positions >= part.start) & (positions < part.stop)]
        result.append(float(np.mean(inside)) if len(inside) else None)
    return result


@dataclass(frozen=True)
class Drift:
    """Drift of a score over segments q_1..q_M."""

    absolute: float
    """|q_M - q_1|, "first against last segment"."""
    slope: float
    """Least-squares slope, score a second."""
    maximum: float
    """max |q_m - q_1|."""
    last: float
    """Score of the whole clip, the last point of the prefix curve."""

    def named(self, name: str) -> dict[str, float]:
        return {f"{name}_drift_{key}": value for key, value in asdict(self).items()}


def drift(values: list[float | None], seconds: list[float]) -> Drift:
    """Drift of segment means at the segments' middles in seconds. Segments without a value do not count."""
    known = [(t, v) for t, v in zip(seconds, values, strict=True) if v is not None]
    if not known:
        raise StreamvidError("drift needs at least one segment with a value")
    t, v = (np.array(column, np.float64) for column in zip(*known, strict=True))
    slope = float(np.polyfit(t - t.mean(), v, 1)[0]) if len(v) > 1 else 0.0
    return Drift(abs(float(v[-1] - v[0])), slope, float(np.abs(v - v[0]).max()), float(v.mean()))


def middles(parts: list[slice], fps: float) -> list[float]:
    """Middle of each segment in seconds."""
    return [(part.start + part.stop) / 2 / fps for part in parts]


def colour_drift(
    frames: np.ndarray, gray: np.ndarray, parts: list[slice], fps: float
) -> tuple[dict[str, float], dict[str, list[float | None]], np.ndarray]:
    """Colour and exposure from the first segment on.

    Args:
        frames: uint8 `[n, H, W, 3]`.
        gray: its luma `[n, H, W]`.

    Returns:
        (figures, curves by segment, Lab means `[n, 3]`). Figures: `colour_drift` and `colour_drift_max` (Lab
        dE76 of segment means from the first), `lab_spread_drift` (the same of the standard deviations),
        `exposure_slope` (levels of luma a second), `histogram_drift` (1-Wasserstein between the luma
        histograms of first and last segment, levels), `white_balance_drift` (distance in (ln R/G, ln B/G)).
    """
    means, deviations = lab_means(frames)
    segment_means = np.array([means[part].mean(0) for part in parts])
    spreads = np.array([deviations[part].mean(0) for part in parts])
    distance = np.linalg.norm(segment_means - segment_means[0], axis=1)
    times = middles(parts, fps)
    brightness = [float(gray[part].mean()) for part in parts]
    levels = np.arange(256)
    first, last = (
        np.bincount(gray[part].round().astype(np.int64).ravel(), minlength=256)
        for part in (parts[0], parts[-1])
    )
    channel = np.array([frames[part].reshape(-1, 3).mean(0) + 1.0 for part in (parts[0], parts[-1])])
    balance = np.log(channel[:, [0, 2]] / channel[:, 1:2])
    figures = {
        "colour_drift": float(distance[-1]),
        "colour_drift_max": float(distance.max()),
        "lab_spread_drift": float(np.linalg.norm(spreads[-1] - spreads[0])),
        "exposure_slope": drift(list(brightness), times).slope,
        "histogram_drift": float(wasserstein_distance(levels, levels, first, last)),
        "white_balance_drift": float(np.linalg.norm(balance[1] - balance[0])),
    }
    return figures, {"colour_distance": [float(d) for d in distance]}, means
