"""The table of every figure, and `measure`, which takes them all from one clip.

Three axes that must not be mixed: fidelity to a reference of the same noise, quality of the clip alone, and
drift from its own beginning. Nothing here uses trained weights but LPIPS; nothing here is a VBench score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from streamvid.errors import StreamvidError
from streamvid.eval import fidelity, motion, quality
from streamvid.eval.drift import by_segment, colour_drift, drift, middles, segments
from streamvid.eval.video import as_frames, luma


@dataclass(frozen=True)
class Metric:
    """One figure: which way is better, its unit, and what it says in one line."""

    group: Literal["fidelity", "quality", "motion", "time", "drift", "judge", "cost"]
    better: Literal["higher", "lower", "neither"]
    unit: str
    text: str


_DRIFTING = ("sharpness", "noise", "colourfulness", "contrast", "dynamic_degree")

METRICS: dict[str, Metric] = {
    "psnr": Metric("fidelity", "higher", "dB", "against the reference of the same noise; 100 is identical"),
    "ssim": Metric("fidelity", "higher", "", "structural similarity of luma to the reference"),
    "ms_ssim": Metric("fidelity", "higher", "", "multi-scale structural similarity to the reference"),
    "gradient_similarity": Metric("fidelity", "higher", "", "gradient-magnitude similarity to the reference"),
    "lpips": Metric("fidelity", "lower", "", "LPIPS (AlexNet) to the reference"),
    "sharpness": Metric("quality", "higher", "log10", "log of the variance of the Laplacian"),
    "noise": Metric("quality", "lower", "levels", "noise from the diagonal Haar band"),
    "exposure": Metric("quality", "neither", "levels", "mean luma"),
    "contrast": Metric("quality", "neither", "levels", "standard deviation of luma"),
    "colourfulness": Metric("quality", "neither", "", "Hasler-Suesstrunk"),
    "clipping": Metric("quality", "lower", "", "fraction of values at 0 or 255"),
    "blockiness": Metric("quality", "lower", "", "steps on an 8-pixel grid against steps off it, -1..1"),
    "dynamic_degree": Metric("motion", "neither", "px/pair", "fastest 5 % of the flow, side 256"),
    "mean_flow": Metric("motion", "neither", "px/pair", "mean flow, side 256"),
    "camera_motion": Metric("motion", "neither", "px/pair", "affine part of the flow"),
    "object_motion": Metric("motion", "neither", "px/pair", "fastest 5 % beside the affine part"),
    "smoothness": Metric(
        "motion", "higher", "", "frames predicted from their neighbours by flow; 1 is smooth"
    ),
    "jerk": Metric("motion", "lower", "px/pair", "second difference of the flow"),
    "warp_error": Metric("motion", "lower", "levels", "change left after following the flow"),
    "static_flicker": Metric("time", "lower", "levels", "change where nothing moves"),
    "change": Metric("time", "neither", "levels", "mean change from frame to frame"),
    "freeze": Metric("time", "lower", "", "fraction of pairs that are one picture"),
    "repetition": Metric("time", "lower", "", "SSIM at the most repeating lag, above the median lag"),
    "repetition_lag": Metric("time", "neither", "s", "that lag"),
    "seam_change": Metric("time", "lower", "x", "change into a chunk against change inside; 1 is seamless"),
    "seam_colour": Metric("time", "lower", "x", "step of mean Lab into a chunk against inside"),
    "colour_drift": Metric(
        "drift", "lower", "dE", "Lab distance of the last segment's mean from the first's"
    ),
    "colour_drift_max": Metric("drift", "lower", "dE", "the largest such distance"),
    "lab_spread_drift": Metric("drift", "lower", "dE", "the same for the spread of Lab"),
    "exposure_slope": Metric("drift", "neither", "levels/s", "slope of mean luma; 0 is best"),
    "histogram_drift": Metric("drift", "lower", "levels", "Wasserstein distance of luma histograms"),
    "white_balance_drift": Metric("drift", "lower", "", "shift of ln R/G and ln B/G"),
    "judge": Metric("judge", "higher", "", "colour, shape, background and motion as the prompt says, mean"),
    "judge_last": Metric("judge", "higher", "", "the same in the last segment"),
    "judge_drift": Metric(
        "judge", "neither", "", "judge of the last segment less that of the first; 0 is best"
    ),
    "judge_right": Metric("judge", "higher", "", "1 when all four hold over the clip"),
    "judge_colour": Metric("judge", "higher", "", "part of the frames with the right object colour"),
    "judge_shape": Metric("judge", "higher", "", "part of the frames with the right shape"),
    "judge_background": Metric("judge", "higher", "", "part of the frames with the right background"),
    "judge_motion": Metric("judge", "higher", "", "1 when the motion is the right one"),
    "judge_identity": Metric("judge", "higher", "", "1 when the last second shows the first one's object"),
    "background_error": Metric("judge", "lower", "levels", "RGB error of the background"),
    "kv_bytes": Metric("cost", "lower", "bytes", "keys and values held at the end"),
    "kv_peak_bytes": Metric(
        "cost", "lower", "bytes", "the same at its highest, scratch and staging included"
    ),
    "nominal_over_peak": Metric("cost", "higher", "x", "bytes held over bytes at the peak; 1 is no overhead"),
    "chunk_ms": Metric("cost", "lower", "ms", "median time of a chunk after warm-up"),
    "chunk_ms_p95": Metric("cost", "lower", "ms", "95th percentile of it"),
    "first_frame_ms": Metric("cost", "lower", "ms", "request to first frame, text included"),
    "fps_steady": Metric("cost", "higher", "1/s", "frames of a chunk over its median time"),
    "denoise_ms": Metric("cost", "lower", "ms", "part of chunk_ms in the transformer's denoising steps"),
    "context_ms": Metric("cost", "lower", "ms", "part of chunk_ms in the context pass"),
    "decode_ms": Metric("cost", "lower", "ms", "part of chunk_ms in the decoder"),
    "compute_fraction": Metric("cost", "lower", "", "transformer work done of what full steps would be"),
}
for _name in _DRIFTING:
    METRICS[f"{_name}_drift_absolute"] = Metric("drift", "lower", "", f"|last - first| segment of {_name}")
    METRICS[f"{_name}_drift_slope"] = Metric("drift", "neither", "1/s", f"slope of {_name}; 0 is best")
    METRICS[f"{_name}_drift_maximum"] = Metric("drift", "lower", "", f"largest departure of {_name}")
    METRICS[f"{_name}_drift_last"] = Metric("drift", "neither", "", f"mean of {_name} over the whole clip")

GROUPS = ("fidelity", "quality", "motion", "time", "drift")


@dataclass
class Measurement:
    """Figures of one clip, and curves by segment (None where a segment has no value)."""

    values: dict[str, float] = field(default_factory=dict)
    curves: dict[str, list[float | None]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    """Middles of the segments."""


def measure(
    frames: np.ndarray,
    *,
    fps: float,
    reference: np.ndarray | None = None,
    chunk_starts: Sequence[int] = (),
    segment_frames: int = 48,
    groups: Sequence[str] = GROUPS,
) -> Measurement:
    """Measure a clip.

    Args:
        frames: uint8 `[n, H, W, 3]`.
        fps: frames a second at which it is meant to be seen.
        reference: the clip that the plain method made from the same noise; without it there is no fidelity.
        chunk_starts: first frame of every chunk, for the seam figures; without them there are none.
        segment_frames: frames a segment of the drift curves.
        groups: which of `GROUPS` to take. "drift" takes quality and, when asked for, motion by segments.

    Raises:
        StreamvidError: not a clip, a reference of another size, an unknown group.
    """
    frames = as_frames(frames)
    for group in groups:
        if group not in GROUPS:
            raise StreamvidError(f"unknown group of metrics {group!r} (allowed: {', '.join(GROUPS)})")
    if fps <= 0:
        raise StreamvidError(f"fps must be above 0, got {fps}")
    parts = segments(len(frames), segment_frames)
    result = Measurement(seconds=middles(parts, fps))
    gray = luma(frames)
    if reference is not None and "fidelity" in groups:
        _fidelity(result, frames, as_frames(reference), parts)
    if "quality" in groups:
        _quality(result, frames, gray, parts)
    if "motion" in groups and len(frames) > 1:
        _motion(result, frames, fps, parts)
    lab = None
    if "drift" in groups:
        figures, curves, lab = colour_drift(frames, gray, parts, fps)
        result.values |= figures
        result.curves |= curves
        for name in _DRIFTING:
            if name in result.curves:
                result.values |= drift(result.curves[name], result.seconds).named(name)
    if "time" in groups and len(frames) > 1:
        _time(result, frames, fps, list(chunk_starts), lab)
    return result


def _fidelity(result: Measurement, frames: np.ndarray, reference: np.ndarray, parts: list[slice]) -> None:
    table = {
        "psnr": fidelity.psnr,
        "ssim": fidelity.ssim,
        "ms_ssim": fidelity.ms_ssim,
        "gradient_similarity": fidelity.gradient_similarity,
    }
    if fidelity.lpips_available()[0]:
        table["lpips"] = fidelity.lpips_distance
    for name, function in table.items():
        scores = function(frames, reference)
        result.values[name] = float(scores.mean())
        result.curves[name] = by_segment(scores, parts)


def _quality(result: Measurement, frames: np.ndarray, gray: np.ndarray, parts: list[slice]) -> None:
    scores = {
        "sharpness": quality.sharpness(gray),
        "noise": quality.noise(gray),
        "exposure": quality.exposure(gray),
        "contrast": quality.contrast(gray),
        "colourfulness": quality.colourfulness(frames),
        "clipping": quality.clipping(frames),
        "blockiness": quality.blockiness(gray),
    }
    for name, values in scores.items():
        result.values[name] = float(values.mean())
        result.curves[name] = by_segment(values, parts)


def _motion(result: Measurement, frames: np.ndarray, fps: float, parts: list[slice]) -> None:
    flow = motion.measure_motion(frames, fps)
    scores = {
        "dynamic_degree": flow.dynamic,
        "mean_flow": flow.mean,
        "camera_motion": flow.camera,
        "object_motion": flow.objects,
        "warp_error": flow.warp_error,
        "static_flicker": flow.static_flicker,
    }
    for name, values in scores.items():
        result.values[name] = float(values.mean())
        result.curves[name] = by_segment(values, parts, flow.starts)
    result.values["jerk"] = float(flow.jerk.mean())
    result.values["smoothness"] = motion.smoothness(frames)


def _time(
    result: Measurement, frames: np.ndarray, fps: float, chunk_starts: list[int], lab: np.ndarray | None
) -> None:
    steps = motion.change(frames)
    result.values["change"] = float(steps.mean())
    result.values["freeze"] = motion.freeze(frames)
    result.values["repetition"], result.values["repetition_lag"] = motion.repetition(frames, fps)
    if chunk_starts:
        result.values["seam_change"] = motion.seam_ratio(steps, chunk_starts, floor=0.1)
        if lab is not None:
            colour_steps = np.linalg.norm(np.diff(lab, axis=0), axis=1)
            result.values["seam_colour"] = motion.seam_ratio(colour_steps, chunk_starts, floor=0.01)
