"""Motion by classical dense flow (OpenCV DIS), and faults in time: flicker, freezing, repeating, chunk seams.

Flow is computed at 8 frames a second or less on luma of 128..512 pixels. Lengths are in pixels of a frame
whose shorter side is 256, so that sizes can be compared. In the manner of VBench's dynamic degree and motion
smoothness, but with other estimators: never to be reported as those scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
from scipy.ndimage import gaussian_filter

from streamvid.eval.video import luma, resize

FLOW_FPS = 8.0
STATIC_PIXELS = 0.5
FREEZE_LEVEL = 0.2
"""Mean absolute change in levels under which two frames are the same picture."""


def _dis() -> cv2.DISOpticalFlow:
    return cv2.DISOpticalFlow_create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)


def _warp(image: np.ndarray, flow: np.ndarray) -> np.ndarray:
    """`image` sampled at p + flow(p)."""
    height, width = flow.shape[:2]
    x, y = np.meshgrid(np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32))
    return cv2.remap(
        image, x + flow[..., 0], y + flow[..., 1], cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE
    )


@dataclass(frozen=True)
class Motion:
    """Per pair of sampled frames, all `[pairs]`; `starts` are the frames at which the pairs begin."""

    starts: np.ndarray
    seconds: float
    """Time between the frames of a pair."""
    dynamic: np.ndarray
    """Mean of the fastest 5 % of the flow."""
    mean: np.ndarray
    camera: np.ndarray
    """Mean length of the affine part (RANSAC)."""
    objects: np.ndarray
    """Mean of the fastest 5 % of what the affine part leaves."""
    warp_error: np.ndarray
    """Mean |I(t+1, p + flow) - I(t, p)| in levels over pixels that pass the forward-backward check."""
    static_flicker: np.ndarray
    """Mean |I(t+1) - I(t)| in levels where the flow is under half a pixel."""
    jerk: np.ndarray
    """Mean length of the second difference of the flow, `[pairs - 2]`."""


def _fastest(length: np.ndarray) -> float:
    count = max(1, length.size // 20)
    return float(np.partition(length.ravel(), -count)[-count:].mean())


def _affine(flow: np.ndarray) -> np.ndarray:
    """The affine part of a flow field, `[H, W, 2]`."""
    height, width = flow.shape[:2]
    x, y = np.meshgrid(np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32))
    points = np.stack([x, y], -1)
    step = max(1, min(height, width) // 24)
    source = points[::step, ::step].reshape(-1, 2)
    target = source + flow[::step, ::step].reshape(-1, 2)
    cv2.setRNGSeed(0)
    matrix, _ = cv2.estimateAffine2D(source, target, ransacReprojThreshold=1.0)
    if matrix is None:
        return np.zeros_like(flow)
    return (points @ matrix[:, :2].T + matrix[:, 2] - points).astype(np.float32)


def measure_motion(frames: np.ndarray, fps: float) -> Motion:
    """All flow figures of a clip of at least two frames."""
    step = max(1, round(fps / FLOW_FPS))
    starts = np.arange(0, len(frames) - step, step) if len(frames) > step else np.array([0])
    picked = frames[np.append(starts, min(starts[-1] + step, len(frames) - 1))]
    gray = luma(resize(picked, int(np.clip(max(frames.shape[1:3]), 128, 512))))
    unit = 256 / min(gray.shape[1:])
    estimator = _dis()
    bytes_ = gray.round().astype(np.uint8)
    columns: dict[str, list[float]] = {name: [] for name in ("dynamic", "mean", "camera", "objects")}
    warp_error, static, jerk = [], [], []
    flows: list[np.ndarray] = []
    for now, then, gray_now, gray_then in zip(bytes_, bytes_[1:], gray, gray[1:], strict=False):
        forward, backward = estimator.calc(now, then, None), estimator.calc(then, now, None)
        length = np.hypot(forward[..., 0], forward[..., 1])
        affine = _affine(forward)
        rest = forward - affine
        columns["dynamic"].append(_fastest(length) * unit)
        columns["mean"].append(float(length.mean()) * unit)
        columns["camera"].append(float(np.hypot(affine[..., 0], affine[..., 1]).mean()) * unit)
        columns["objects"].append(_fastest(np.hypot(rest[..., 0], rest[..., 1])) * unit)
        closing = forward + _warp(backward, forward)
        valid = np.hypot(closing[..., 0], closing[..., 1]) < 1.0
        error = np.abs(_warp(gray_then, forward) - gray_now)
        warp_error.append(float(error[valid].mean()) if valid.any() else float(error.mean()))
        still = length < STATIC_PIXELS
        static.append(float(np.abs(gray_then - gray_now)[still].mean()) if still.any() else 0.0)
        flows = [*flows[-2:], forward]
        if len(flows) == 3:
            bend = flows[2] - 2 * flows[1] + flows[0]
            jerk.append(float(np.hypot(bend[..., 0], bend[..., 1]).mean()) * unit)
    arrays = {name: np.array(values) for name, values in columns.items()}
    return Motion(
        starts=starts,
        seconds=step / fps,
        warp_error=np.array(warp_error),
        static_flicker=np.array(static),
        jerk=np.array(jerk) if jerk else np.zeros(1),
        **arrays,
    )


def smoothness(frames: np.ndarray, max_triples: int = 96) -> float:
    """1 - mean error / 255 of every other frame predicted from its neighbours by half the flow; 1 is smooth.

    At most `max_triples` triples, spread evenly. A clip under three frames is smooth by definition.
    """
    middles = np.arange(1, len(frames) - 1, 2)
    if not len(middles):
        return 1.0
    if len(middles) > max_triples:
        middles = middles[np.linspace(0, len(middles) - 1, max_triples).round().astype(int)]
    side = int(np.clip(max(frames.shape[1:3]), 128, 512))
    estimator, errors = _dis(), []
    for middle in middles:
        before, now, after = luma(resize(frames[middle - 1 : middle + 2], side))
        flow = estimator.calc(before.round().astype(np.uint8), after.round().astype(np.uint8), None)
        guess = 0.5 * (_warp(before, -flow / 2) + _warp(after, flow / 2))
        errors.append(float(np.abs(guess - now).mean()))
    return 1.0 - float(np.mean(errors)) / 255.0


def change(frames: np.ndarray) -> np.ndarray:
    """Mean absolute change of RGB from each frame to the next, in levels, `[n - 1]`."""
    pairs = zip(frames, frames[1:], strict=False)
    return np.array([np.abs(b.astype(np.int16) - a).mean() for a, b in pairs])


def freeze(frames: np.ndarray) -> float:
    """Fraction of frame pairs that are the same picture. A clip of one frame is not frozen."""
    steps = change(frames)
    return float((steps < FREEZE_LEVEL).mean()) if len(steps) else 0.0


def repetition(frames: np.ndarray, fps: float, thumbnails: int = 160) -> tuple[float, float]:
    """(score, lag in seconds) of the most repeating lag above one second; score 0 is none.

    Mean SSIM of 64-pixel thumbnails at a lag, less the median over lags. A periodic motion scores too.
    """
    step = max(1, round(fps / 8), int(np.ceil(len(frames) / thumbnails)))
    small = luma(resize(frames[::step], 64)).astype(np.float32)
    first_lag = int(np.floor(fps / step)) + 1
    lags = range(first_lag, len(small) * 3 // 4)
    if len(lags) < 3:
        return 0.0, 0.0

    def blur(images: np.ndarray) -> np.ndarray:
        return gaussian_filter(images, (0, 1.5, 1.5), truncate=3.0)

    mean = blur(small)
    variance = blur(small * small) - mean**2
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    scores = []
    for lag in lags:
        a, b = slice(lag, None), slice(None, -lag)
        covariance = blur(small[a] * small[b]) - mean[a] * mean[b]
        bright = (2 * mean[a] * mean[b] + c1) / (mean[a] ** 2 + mean[b] ** 2 + c1)
        scores.append(float((bright * (2 * covariance + c2) / (variance[a] + variance[b] + c2)).mean()))
    best = int(np.argmax(scores))
    return scores[best] - float(np.median(scores)), lags[best] * step / fps


def seam_ratio(steps: np.ndarray, chunk_starts: list[int], floor: float) -> float:
    """Mean step into a chunk's first frame over the mean step inside chunks; 1 is seamless.

    Args:
        steps: size of the change from each frame to the next, `[n - 1]`.
        chunk_starts: first frame of every chunk; 0 and what lies outside the clip do not count.
        floor: added to both, so that a still clip gives 1 and not 0 / 0.
    """
    seams = np.zeros(len(steps), bool)
    inside = [start - 1 for start in chunk_starts if 0 < start <= len(steps)]
    seams[inside] = True
    if not seams.any() or seams.all():
        return 1.0
    return float((steps[seams].mean() + floor) / (steps[~seams].mean() + floor))
