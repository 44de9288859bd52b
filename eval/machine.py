"""The card of the machine and the versions that stand beside every figure."""

from __future__ import annotations

import os
import platform
import time
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "streamvid",
    "torch",
    "diffusers",
    "transformers",
    "numpy",
    "opencv-python-headless",
    "av",
    "triton",
)


def now() -> str:
    """The time in UTC, as rows carry it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a figure; those not installed are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@cache
def machine_card() -> dict[str, Any]:
    """What the figures were measured on. `cpus` are those this process may use."""
    import psutil
    import torch

    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    card: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cpus": affinity,
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        card |= {
            "gpu": properties.name,
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return card


def counted(number: int, name: str) -> str:
    """A number with its noun, in the plural where it is not one."""
    return f"{number} {name}" + ("" if number == 1 else "s")


def card_line(card: dict[str, Any]) -> str:
    """The card in one line."""
    cores = f"{counted(card['cpus'], 'CPU')}, {counted(card['threads'], 'thread')}"
    parts = [str(card.get("gpu", "")), str(card["cpu"]), cores]
    return " · ".join(part for part in parts if part)
