"""Recorded tables and small functions: noise schedule, rotary embedding, time sinusoid, RMS norm."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from streamvid.block import rms_norm
from streamvid.checkpoint_formats import read_weights
from streamvid.kernels.rope import GridRope, rotate
from streamvid.modulation import sinusoid
from streamvid.schedule import FlowSchedule
from streamvid.verify_vae import ABSOLUTE_LIMIT, Deviation


def max_abs(name: str, ours: Tensor, reference: Tensor, limit: float = ABSOLUTE_LIMIT) -> Deviation:
    """Largest absolute deviation; infinite when shapes or dtypes differ."""
    same = ours.shape == reference.shape and ours.dtype == reference.dtype
    value = float("inf")
    if same:
        equal = ours == reference  # infinities of one sign included
        value = (ours.double() - reference.double()).masked_fill(equal, 0.0).abs().max().item()
    return Deviation(name, value, limit, "max abs")


def verify_schedule(folder: Path) -> list[Deviation]:
    """Tables, warped step lists and conversions of every recorded shift."""
    config = json.loads((folder / "config.json").read_text())
    case = read_weights(folder / "case.safetensors").tensors
    t, x0, noise = case["t"], case["x0"], case["noise"]
    out = []
    for name in sorted({key.split("/")[0] for key in case if "/" in key}):
        schedule = FlowSchedule(float(name.removeprefix("shift")))
        ours = {
            "sigmas": schedule.sigmas,
            "timesteps": schedule.timesteps,
            "used_sigma": schedule.sigma_of(t).flatten(),
            "add_noise_fp32": schedule.add_noise(x0.float(), noise.float(), t),
            "add_noise_bf16": schedule.add_noise(x0, noise, t),
            "flow_to_x0_fp32": schedule.flow_to_x0(noise.float(), x0.float(), t),
            "flow_to_x0_bf16": schedule.flow_to_x0(noise, x0, t),
            "x0_to_flow_fp32": schedule.x0_to_flow(noise.float(), x0.float(), t),
            "step_fp32": schedule.step(noise.float(), x0.float(), t),
        }
        for key, warp in config.get("warps", {}).items():
            if key.startswith(f"{name}/"):
                ours[key.split("/")[1]] = schedule.warp(warp["input"])
        out += [
            max_abs(f"{name}/{k}", v, case[f"{name}/{k}"]) for k, v in ours.items() if f"{name}/{k}" in case
        ]
    return out


def verify_units(folder: Path) -> list[Deviation]:
    """Rotary embedding (float64 and fast), sinusoid and RMS norm."""
    config = json.loads((folder / "config.json").read_text())
    case = read_weights(folder / "case.safetensors").tensors
    out = []
    for record in config.get("rope", []):
        head_dim, (frames, *grid) = record["head_dim"], record["grid"]
        x = case[f"rope{head_dim}/x"].float()
        for key in sorted(k for k in case if k.startswith(f"rope{head_dim}/y_start")):
            start = int(key.rsplit("start", 1)[1])
            for dtype, word in ((torch.complex128, "float64"), (torch.complex64, "fast")):
                rope = GridRope(head_dim, (grid[0], grid[1]), dtype=dtype)
                table = rope.table(tuple(range(start, start + frames)))
                out.append(max_abs(f"{key}, {word}", rotate(x, table), case[key]))
    for key in sorted(k for k in case if k.startswith("sinusoid") and k != "sinusoid_t"):
        ours = sinusoid(case["sinusoid_t"], int(key.removeprefix("sinusoid")))
        out.append(max_abs(key, ours, case[key], limit=1e-9))
    for key in sorted(k for k in case if k.startswith("rms/y_")):
        x = case["rms/x"].to(case[key].dtype)
        out.append(max_abs(key, rms_norm(x, case["rms/w"].to(x.dtype), 1e-6), case[key]))
    return out
