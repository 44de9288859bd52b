"""Which tokens move: maps from clean predictions, selection of a fixed share, and the prior across chunks.

Knows latents only. Everything stays on the device and has static sizes, so that nothing waits for it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def pool_tokens(values: Tensor, patch: tuple[int, int]) -> Tensor:
    """Latent places ``[f, h, w]`` averaged to tokens ``[f, rows, cols]``."""
    frames, height, width = values.shape
    return values.view(frames, height // patch[0], patch[0], width // patch[1], patch[1]).mean((2, 4))


def motion_map(x0: Tensor, last_frame: Tensor | None, patch: tuple[int, int]) -> Tensor:
    """Change between neighbouring latent frames by token.

    Args:
        x0: ``[1, f, c, h, w]``.
        last_frame: ``[1, c, h, w]``, the newest frame of the previous chunk; None copies frame 1's map.

    Returns:
        fp32 ``[f, rows, cols]``.
    """
    frames = x0[0].float()
    before = frames[:1] if last_frame is None else last_frame.float()
    previous = torch.cat([before, frames[:-1]])
    moved = (frames - previous).abs().mean(1)
    if last_frame is None and len(frames) > 1:
        moved = torch.cat([moved[1:2], moved[1:]])
    return pool_tokens(moved, patch)


def change_map(new: Tensor, old: Tensor, patch: tuple[int, int]) -> Tensor:
    """Change between two predictions of one chunk by token: fp32 ``[f, rows, cols]``."""
    return pool_tokens((new[0].float() - old[0].float()).abs().mean(1), patch)


def normalise(score: Tensor) -> Tensor:
    """Each frame to 0..1; a frame without differences becomes 0."""
    low, high = score.amin((1, 2), keepdim=True), score.amax((1, 2), keepdim=True)
    return (score - low) / (high - low).clamp_min(1e-12)


def spread(score: Tensor, radius: int) -> Tensor:
    """Each place of maps ``[n, rows, cols]`` or ``[rows, cols]`` takes the highest value within ``radius`` of it."""
    if not radius:
        return score
    maps = score if score.ndim == 3 else score[None]
    wide = torch.nn.functional.max_pool2d(maps[:, None], 2 * radius + 1, stride=1, padding=radius)[:, 0]
    return wide.view_as(score)


def select_tokens(score: Tensor, ratio: float, *, vote: bool, dilate: int, multiple: int = 1) -> Tensor:
    """The ``ratio`` of tokens with the highest score, as ascending raster indices ``[n]`` int64.

    Args:
        score: ``[f, rows, cols]``.
        ratio: share of tokens; the count is rounded up to ``multiple`` (tidy matrix sizes) and never 0.
        vote: choose places rather than tokens, by the median over frames: a place's median exceeds a
            threshold exactly when more than half of its frames do.
        dilate: radius by which high scores spread over neighbours, so that edges are refreshed with their
        object.
    """
    frames, rows, cols = score.shape
    score = spread(score, dilate)
    if vote:
        places = rows * cols
        count = min(places, max(1, math.ceil(ratio * places / multiple) * multiple))
        chosen = score.median(0).values.flatten().topk(count).indices
        chosen = (chosen[None] + torch.arange(frames, device=score.device)[:, None] * places).flatten()
    else:
        count = min(score.numel(), max(1, math.ceil(ratio * score.numel() / multiple) * multiple))
        chosen = score.flatten().topk(count).indices
    return chosen.sort().values


def mean_motion(x0: Tensor) -> Tensor:
    """How much a chunk moves: ``sum |frame' - frame| / (sum |frame'| + sum |frame|)``, a device scalar in
    0..1.

    The relative frame difference of AdaCache's motion regularisation, on clean latents ``[b, f, c, h, w]``.
    """
    new, old = x0[:, 1:].float(), x0[:, :-1].float()
    return (new - old).abs().sum() / (new.abs().sum() + old.abs().sum()).clamp_min(1e-12)
