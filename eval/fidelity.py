"""How near a clip is to a reference clip of the same prompt, seed and noise. One number a frame.

Fidelity is not quality: a good method may answer the same prompt with another, equally good video.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import cv2
import numpy as np

from streamvid.errors import StreamvidError
from streamvid.eval.video import luma

PSNR_CAP = 100.0
"""Decibels reported for identical frames."""
MS_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
_C1, _C2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
_GMS_C = 170.0


def _pair(frames: np.ndarray, reference: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if frames.shape[1:] != reference.shape[1:]:
        raise StreamvidError(
            f"clip and reference differ in size: {frames.shape[2]}x{frames.shape[1]} against "
            f"{reference.shape[2]}x{reference.shape[1]}"
        )
    n = min(len(frames), len(reference))
    return frames[:n], reference[:n]


def psnr(frames: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Peak signal-to-noise ratio of RGB in dB, `[n]`, capped at `PSNR_CAP`."""
    frames, reference = _pair(frames, reference)
    error = np.array(
        [np.mean((a.astype(np.float32) - b) ** 2) for a, b in zip(frames, reference, strict=True)]
    )
    with np.errstate(divide="ignore"):
        return np.minimum(10 * np.log10(255.0**2 / error), PSNR_CAP)


def _blur(image: np.ndarray) -> np.ndarray:
    return cv2.GaussianBlur(image, (11, 11), 1.5)


def _ssim_terms(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """(SSIM, contrast-structure) of two luma images: 11-pixel Gaussian, sigma 1.5, without its rim."""
    mean_a, mean_b = _blur(a), _blur(b)
    var_a, var_b = _blur(a * a) - mean_a**2, _blur(b * b) - mean_b**2
    structure = (2 * (_blur(a * b) - mean_a * mean_b) + _C2) / (var_a + var_b + _C2)
    brightness = (2 * mean_a * mean_b + _C1) / (mean_a**2 + mean_b**2 + _C1)
    inner = (slice(5, -5), slice(5, -5))
    return float((structure * brightness)[inner].mean()), float(structure[inner].mean())


def _luma_pair(frames: np.ndarray, reference: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    frames, reference = _pair(frames, reference)
    if min(frames.shape[1:3]) < 11:
        raise StreamvidError(f"SSIM needs frames of at least 11 pixels a side, got {frames.shape[1:3]}")
    return list(zip(luma(frames), luma(reference), strict=True))


def ssim(frames: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Structural similarity of luma, `[n]` (the numbers of scikit-image's Gaussian form, quicker)."""
    return np.array([_ssim_terms(a, b)[0] for a, b in _luma_pair(frames, reference)])


def ms_ssim(frames: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Multi-scale SSIM of luma (Wang 2003), `[n]`.

    Deviation: a frame under 176 pixels a side has fewer than five scales; the weights of those that exist are
    scaled to sum to 1. Negative structure terms count as 0.
    """
    result = []
    for a, b in _luma_pair(frames, reference):
        scales = min(len(MS_WEIGHTS), int(np.log2(min(a.shape) / 11)) + 1)
        weights = np.array(MS_WEIGHTS[:scales]) / sum(MS_WEIGHTS[:scales])
        value = 1.0
        for scale, weight in enumerate(weights):
            full, structure = _ssim_terms(a, b)
            value *= max(full if scale == scales - 1 else structure, 0.0) ** weight
            half = (a.shape[1] // 2, a.shape[0] // 2)
            a, b = (cv2.resize(image, half, interpolation=cv2.INTER_AREA) for image in (a, b))
        result.append(value)
    return np.array(result)


def gradient_similarity(frames: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Mean gradient-magnitude similarity of luma at half size (Xue 2014: Prewitt, c = 170), `[n]`."""
    prewitt = np.array([[1, 0, -1]] * 3, np.float32) / 3

    def magnitude(image: np.ndarray) -> np.ndarray:
        half = cv2.resize(image, (image.shape[1] // 2, image.shape[0] // 2), interpolation=cv2.INTER_AREA)
        across, down = cv2.filter2D(half, -1, prewitt), cv2.filter2D(half, -1, prewitt.T)
        return np.hypot(across, down)

    result = []
    for a, b in _luma_pair(frames, reference):
        ga, gb = magnitude(a), magnitude(b)
        result.append(float(np.mean((2 * ga * gb + _GMS_C) / (ga**2 + gb**2 + _GMS_C))))
    return np.array(result)


def lpips_available() -> tuple[bool, str]:
    """Whether LPIPS can be computed without a download, and why not."""
    try:
        import lpips  # noqa: F401
    except ImportError:
        return False, "the package lpips is not installed"
    import torch

    folder = Path(torch.hub.get_dir()) / "checkpoints"
    if not list(folder.glob("alexnet-*.pth")):
        return False, f"the AlexNet weights are not in {folder}"
    return True, ""


@cache
def _lpips_model() -> object:
    import lpips

    return lpips.LPIPS(net="alex", verbose=False).eval()


def lpips_distance(frames: np.ndarray, reference: np.ndarray, batch: int = 16) -> np.ndarray:
    """LPIPS (AlexNet), `[n]`, 0 is equal. Raises StreamvidError when its weights are not on this machine."""
    ready, reason = lpips_available()
    if not ready:
        raise StreamvidError(f"LPIPS cannot be computed: {reason}")
    import torch

    frames, reference = _pair(frames, reference)
    model = _lpips_model()
    result = []
    with torch.inference_mode():
        for start in range(0, len(frames), batch):
            parts = (clip[start : start + batch] for clip in (frames, reference))
            a, b = (torch.from_numpy(part).permute(0, 3, 1, 2).float() / 127.5 - 1 for part in parts)
            result.append(model(a, b).flatten().numpy())  # type: ignore[operator]
    return np.concatenate(result)
