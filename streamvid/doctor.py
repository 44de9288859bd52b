"""What is usable on this machine: devices, attention backends, codecs, video encoders, optional packages.

Each finding says why something is not usable and the one command that adds it. Reads the machine, changes nothing.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table."""

    kind: str
    name: str
    usable: bool
    detail: str
    remedy: str = ""
    """The one command that would make it usable; empty when there is none."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def examine() -> list[Finding]:
    """Every finding, in the order in which they are shown."""
    return [*_machine(), *_devices(), *_encoders(), *_packages()]


def _machine() -> Iterator[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    detail = (
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, "
        f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores, "
        f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB memory free"
    )
    yield Finding("machine", platform.node() or "this", True, detail)


def _devices() -> Iterator[Finding]:
    import torch

    yield Finding("device", "cpu", True, f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    yield _probe("device", "cuda", _cuda, "pip install --force-reinstall --no-deps torch")
    yield _probe("device", "mps", _mps, "")


def _cuda() -> str:
    import torch

    if not torch.backends.cuda.is_built():
        raise RuntimeError("this torch is built without CUDA")
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device is visible")
    names = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        names.append(f"{properties.name} {properties.total_memory / 2**30:.0f} GiB")
    return ", ".join(names)


def _mps() -> str:
    import torch

    if not torch.backends.mps.is_available():
        raise RuntimeError("no Apple GPU is visible")
    return "Apple GPU"


def _encoders() -> Iterator[Finding]:
    for suffix, codec in ((".mp4", "libx264"), (".mp4", "h264"), (".gif", "gif"), (".png", "png")):
        yield _probe(
            "encoder", f"{codec} ({suffix})", lambda codec=codec: _encoder(codec), "pip install -U av"
        )


def _encoder(codec: str) -> str:
    import av

    if codec not in av.codecs_available:
        raise RuntimeError(f"this PyAV {av.__version__} has no {codec}")
    return f"PyAV {av.__version__}: {av.codec.Codec(codec, 'w').long_name}"


def _packages() -> Iterator[Finding]:
    extras = {
        "triton": "gpu",
        "gradio": "app",
        "fastapi": "serve",
        "uvicorn": "serve",
        "matplotlib": "eval",
    }
    for name, extra in extras.items():
        found = importlib.util.find_spec(name) is not None
        detail = importlib.metadata.version(name) if found else "not installed"
        yield Finding("package", name, found, detail, "" if found else f"pip install 'streamvid[{extra}]'")


def _probe(kind: str, name: str, check: Any, remedy: str) -> Finding:
    """Run a check that returns its detail, or raises with the reason. A broken driver may raise anything."""
    try:
        return Finding(kind, name, True, check())
    except Exception as error:
        return Finding(kind, name, False, " ".join(str(error).split()) or type(error).__name__, remedy)
