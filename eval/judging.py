"""The embedded model's judge as figures of a row. Only prompts of its little world can be judged."""

from __future__ import annotations

import numpy as np

from streamvid.errors import StreamvidError
from streamvid.eval.drift import by_segment, segments

MOTION_FRAMES = 32
"""Frames that a motion needs to be recognised."""
IDENTITY_FRAMES = 48

Curves = dict[str, list[float | None]]


def judge_clip(frames: np.ndarray, prompt: str, segment_frames: int) -> tuple[dict[str, float], Curves]:
    """(figures, curves by segment) of a clip; both empty when the prompt is not one of the embedded world.

    `judge` is the mean of the parts of frames whose colour, shape and background are right and, in clips and
    segments of at least `MOTION_FRAMES`, of whether the motion is (0 or 1); `judge_right` is 1 when all hold.
    `judge_last` is `judge` of the last segment, `judge_drift` that less the first segment's.

    Args:
        frames: uint8 `[n, H, W, 3]`.
    """
    from streamvid.tiny.captions import parse

    try:
        wanted = parse(prompt)
    except StreamvidError:
        return {}, {}
    from streamvid.tiny.judge import judge, observe

    seen = observe(frames)
    parts = segments(len(frames), segment_frames)
    curves: Curves = {"judge": []}
    for part in parts:
        inside = seen.part(part)
        curves["judge"].append(_score(judge(frames[part], wanted, seen=inside), part.stop - part.start))
    verdict = judge(frames, wanted, seen=seen)
    values = {
        "judge": _score(verdict, len(frames)),
        "judge_right": float(verdict.right),
        "judge_colour": verdict.colour_frames,
        "judge_shape": verdict.shape_frames,
        "judge_background": verdict.background_frames,
        "background_error": verdict.background_error,
    }
    first, last = curves["judge"][0], curves["judge"][-1]
    values["judge_last"], values["judge_drift"] = last, last - first  # type: ignore[assignment, operator]
    if len(frames) >= MOTION_FRAMES:
        values["judge_motion"] = float(verdict.motion)
    if len(frames) >= IDENTITY_FRAMES:
        values["judge_identity"] = float(verdict.identity)
    curves["judge_fit"] = by_segment(seen.fit, parts)
    return values, curves


def _score(verdict, num_frames: int) -> float:
    scores = [verdict.colour_frames, verdict.shape_frames, verdict.background_frames]
    if num_frames >= MOTION_FRAMES:
        scores.append(float(verdict.motion))
    return float(np.mean(scores))
