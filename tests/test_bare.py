"""With every optional package hidden and no CUDA to ask, the package imports, streams and names its fallbacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PREPARE = """
import importlib.abc, sys

class Hide(importlib.abc.MetaPathFinder):
    hidden = {"flash_attn", "triton", "sageattention", "xformers", "gradio", "fastapi", "uvicorn", "matplotlib"}

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name.split(".")[0] in Hide.hidden else find_spec(name, *more)

import streamvid
assert "torch" not in sys.modules

import torch

def refuse(*args, **kwargs):
    raise RuntimeError("asked CUDA")

for name in ("get_device_capability", "get_device_properties", "get_device_name", "current_device", "synchronize",
             "mem_get_info", "memory_allocated", "init", "_lazy_init"):
    setattr(torch.cuda, name, refuse)
torch.cuda.is_available = lambda: False
"""

STREAM = """
frames = list(streamvid.load(sys.argv[1]).stream("a red ball", num_frames=10, height=32, width=32))
assert len(frames) == 10
"""

DOCTOR = """
from streamvid.cli import main
assert main(["doctor", "--json"]) == 0
"""


def run(code: str, *args: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_streams_without_any_optional_package(tiny_random_folder: Path) -> None:
    run(PREPARE + STREAM, tiny_random_folder)


def test_doctor_names_the_fallback_and_what_is_missing() -> None:
    import json

    findings = {(f["kind"], f["name"]): f for f in json.loads(run(PREPARE + DOCTOR))}
    assert "sdpa" in findings["attention", "auto on cpu"]["detail"]
    triton = findings["attention", "triton on cpu"]
    assert (
        not triton["usable"]
        and "not installed" in triton["detail"]
        and triton["remedy"] == "pip install triton"
    )
    assert findings["package", "gradio"]["remedy"] == "pip install 'streamvid[app]'"
    assert findings["attention", "sdpa on cpu"]["usable"]
    assert not findings["device", "cuda"]["usable"]


def test_diffusers_imports_beside_our_folders() -> None:
    """``kernels`` is also a package that diffusers looks for; ours must not be taken for it."""
    code = "import diffusers, streamvid.kernels; diffusers.WanTransformer3DModel"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
