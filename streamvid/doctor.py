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
    return [*_machine(), *_devices(), *_attention(), *_codecs(), *_encoders(), *_packages()]


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

    seen = (
        "an Apple GPU is visible, but"
        if torch.backends.mps.is_available()
        else "no Apple GPU is visible, and"
    )
    raise RuntimeError(f"{seen} it has no float64, which the sampler computes in; use cpu")


def _attention() -> Iterator[Finding]:
    """Each backend computes a small case that a plain softmax computes too."""
    import torch

    from streamvid.kernels.attention import choose_backend
    from streamvid.kernels.backends import BACKENDS

    devices = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]
    for device in devices:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        chosen, reason = choose_backend(device, dtype)
        yield Finding("attention", f"auto on {device.type}", True, f"{chosen}: {reason}")
        for name in BACKENDS:
            if name == "shapes":
                continue  # plans memory on meta tensors; nobody chooses it
            remedy = (
                "pip install triton"
                if name == "triton" and importlib.util.find_spec("triton") is None
                else ""
            )
            yield _probe(
                "attention",
                f"{name} on {device.type}",
                lambda n=name, d=device, t=dtype: _check_backend(n, d, t),
                remedy,
            )


def _check_backend(name: str, device: Any, dtype: Any) -> str:
    import torch

    from streamvid.kernels.attention import attend, find_backend
    from streamvid.kernels.types import KVView

    find_backend(name, device, dtype)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 64, generator=generator).to(device, dtype) for n in (33, 130, 130))
    bias = torch.randn(130, generator=generator).to(device)
    got = attend(q, [KVView(k, v, bias=bias)], backend=name).double()
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 8 + bias.double()
    right = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v.double())
    error = float((got - right).abs().max())
    if not error < (1e-4 if dtype == torch.float32 else 0.03):
        raise RuntimeError(f"self-check failed: off by {error:.1e}; do not use it here")
    return f"self-check passed, largest error {error:.1e} in {str(dtype).removeprefix('torch.')}"


def _codecs() -> Iterator[Finding]:
    from streamvid.memory.codecs import CODECS

    for name in CODECS:
        yield _probe("codec", name, lambda name=name: _check_codec(name), "")


def _check_codec(name: str) -> str:
    """Bytes and error on random keys and values, the hardest case for a codec: real ones are far from random."""
    import torch

    from streamvid.memory.codecs import make_codec

    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 24 * 16, 2, 64, generator=generator) for _ in range(2))
    codec = make_codec(name)
    packed = codec.encode(k, v)
    back = codec.decode(packed, None)
    error = max(float((a - b).norm() / a.norm()) for a, b in zip(back, (k, v), strict=True))
    if not error < 1.0:
        raise RuntimeError(f"self-check failed: relative error {error:.2f}")
    bits = codec.nbytes(packed) * 8 / (k.numel() + v.numel())
    return f"{bits:.2f} bits a number, relative error {error:.1e} on random numbers"


def _encoders() -> Iterator[Finding]:
    for suffix, codec in ((".mp4", "libx264"), (".gif", "gif"), (".png", "png")):
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
