"""Calibration files: what one full run of a model says about its steps, and for which run it holds.

A file is one JSON object: ``key`` (the identity of the run) and ``values``. A key that does not match in
every part makes a step cache run everything in full, with one warning.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streamvid.errors import ProfileError
from streamvid.memory.files import write_whole
from streamvid.stepcache.base import Session

FORMAT = 1


def make_key(
    *,
    weights: str,
    timesteps: Sequence[float],
    shift: float,
    size: Sequence[int],
    window: str,
    codec: str,
    guidance_scale: float = 1.0,
) -> dict[str, Any]:
    """The identity of a run.

    Args:
        weights: the checkpoint's fingerprint.
        timesteps: what the model is fed at each step.
        shift: timestep shift.
        size: latent frames, rows and columns of a chunk.
        window: memory policy in its text form.
        codec: KV codec in its text form.
        guidance_scale: of classifier-free guidance.
    """
    return {
        "weights": weights,
        "timesteps": [round(float(t), 3) for t in timesteps],
        "shift": float(shift),
        "size": list(size),
        "window": window,
        "codec": codec,
        "guidance_scale": float(guidance_scale),
    }


def save(path: str | Path, key: dict[str, Any], values: dict[str, Any]) -> None:
    """Write a calibration file; a half-written one never stands under the final name."""
    write_whole(path, json.dumps({"format": FORMAT, "key": key, "values": values}, indent=1) + "\n")


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """``(key, values)``. Raises ProfileError when the file is missing or is not a calibration."""
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ProfileError(f"{path}: not a readable calibration file ({error})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT or "key" not in content:
        raise ProfileError(f"{path}: not a calibration file of format {FORMAT}; make one with calibrate")
    return content["key"], content["values"]


def load_for(session: Session, path: str, needed: Sequence[str]) -> dict[str, Any] | None:
    """Values for this session's plan, or None after switching the session to full steps with one warning.

    Raises:
        ProfileError: unreadable file, or one that lacks what the method needs.
    """
    key, values = read(path)
    missing = [name for name in needed if name not in values]
    if missing:
        raise ProfileError(f"{path}: holds no {missing[0]!r}; calibrate again")
    have = session.plan.key
    if have is None:
        session.warn(f"{path}: this stream has no fingerprint to compare with; the step cache is off")
        session.disabled = True
        return None
    for name in sorted(set(key) | set(have)):
        if key.get(name) != have.get(name):
            session.warn(
                f"{path}: made for {name}={key.get(name)!r}, this stream has {have.get(name)!r}; "
                "the step cache is off"
            )
            session.disabled = True
            return None
    return values
