"""What can be said of a frame without trained weights. None of these is a VBench score or replaces one."""

from __future__ import annotations

import cv2
import numpy as np


def sharpness(gray: np.ndarray) -> np.ndarray:
    """log10(1 + variance of the Laplacian) of luma `[n, H, W]`, `[n]`; a flat frame is 0."""
    return np.array([np.log10(1.0 + cv2.Laplacian(image, cv2.CV_32F).var()) for image in gray])


def noise(gray: np.ndarray) -> np.ndarray:
    """Standard deviation of white noise in levels, from the diagonal Haar band: median / 0.6745, `[n]`."""
    height, width = (side - side % 2 for side in gray.shape[1:])
    g = gray[:, :height, :width]
    diagonal = (g[:, ::2, ::2] - g[:, 1::2, ::2] - g[:, ::2, 1::2] + g[:, 1::2, 1::2]) / 2
    return np.median(np.abs(diagonal), axis=(1, 2)) / 0.6745


def exposure(gray: np.ndarray) -> np.ndarray:
    """Mean luma 0..255, `[n]`."""
    return gray.mean(axis=(1, 2))


def contrast(gray: np.ndarray) -> np.ndarray:
    """Standard deviation of luma in levels, `[n]`."""
    return gray.std(axis=(1, 2))


def colourfulness(frames: np.ndarray) -> np.ndarray:
    """Hasler and Suesstrunk's measure of RGB `[n, H, W, 3]`, `[n]`; 0 is grey."""
    result = []
    for frame in frames:
        r, g, b = (frame[..., i].astype(np.float32) for i in range(3))
        rg, yb = r - g, 0.5 * (r + g) - b
        result.append(np.hypot(rg.std(), yb.std()) + 0.3 * np.hypot(rg.mean(), yb.mean()))
    return np.array(result)


def clipping(frames: np.ndarray) -> np.ndarray:
    """Fraction of channel values at 0 or 255, `[n]`."""
    return ((frames == 0) | (frames == 255)).mean(axis=(1, 2, 3))


def blockiness(gray: np.ndarray, period: int = 8) -> np.ndarray:
    """Steps on a grid of `period` pixels against steps off it, -1..1, `[n]`: 0 none, 1 nothing but blocks.

    For each axis (on - off) / (on + off) of the mean absolute difference, then the larger axis.
    """
    scores = []
    for axis in (1, 2):
        step = np.abs(np.diff(gray, axis=axis)).mean(axis=3 - axis)
        on_grid = np.arange(1, gray.shape[axis]) % period == 0
        if not on_grid.any():
            continue
        on, off = step[:, on_grid].mean(1), step[:, ~on_grid].mean(1)
        scores.append((on - off) / np.maximum(on + off, 1e-6))
    return np.max(scores, axis=0) if scores else np.zeros(len(gray))
