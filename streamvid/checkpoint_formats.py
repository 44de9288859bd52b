"""Bytes to named tensors: safetensors (single, sharded) and PyTorch files, memory-mapped, never running their code.

Knows containers, not models: which file is a checkpoint, which of its sections is asked for, and how to say in one
line why it cannot be read.
"""

from __future__ import annotations

import json
import pickle
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from streamvid.errors import CheckpointError

EMA_SECTIONS = ("generator_ema", "model_ema", "ema")
PLAIN_SECTIONS = ("generator", "model", "state_dict")
LORA_SECTIONS = ("generator_lora", "lora")
WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")


@dataclass
class WeightFile:
    """Tensors by the names they have in the file (or in the shards of one folder)."""

    path: Path
    tensors: dict[str, Tensor]
    section: str | None = None
    """The part of a training checkpoint that was taken, ``None`` when the file is one flat set of tensors."""
    sections: tuple[str, ...] = ()
    """All parts that hold tensors."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Numbers and texts stored beside the tensors."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}


def read_weights(path: Path, which: str | None = None) -> WeightFile:
    """Read a weight file, or a folder that holds one (sharded or not).

    Args:
        path: a file, or a folder with ``*.index.json`` or one weight file.
        which: ``"ema"`` or ``"generator"`` demands that part of a training checkpoint; ``None`` takes the averaged
            weights when there are any (what Self-Forcing's own inference is run with), else the others.

    Raises:
        CheckpointError: missing, damaged, not a checkpoint, would run code, or without the part asked for.
    """
    if which not in (None, "ema", "generator"):
        raise CheckpointError(f"which={which!r} is not a part of a checkpoint (allowed: 'ema', 'generator')")
    if path.is_dir():
        path = weights_in_folder(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    content: Mapping[str, Any]
    if path.name.endswith(".index.json"):
        content, metadata = _read_shards(path)
    else:
        content, metadata = _read_one(path)
    return _choose_section(path, content, metadata, which)


def weights_in_folder(folder: Path) -> Path:
    """The index or the one weight file of ``folder``. Raises CheckpointError when there is none or a choice."""
    indices = sorted(folder.glob("*.index.json"))
    if len(indices) == 1:
        return indices[0]
    files = sorted(p for p in folder.iterdir() if p.suffix in WEIGHT_SUFFIXES)
    for name in ("diffusion_pytorch_model.safetensors", "model.safetensors"):
        if folder / name in files:
            return folder / name
    safe = [p for p in files if p.suffix == ".safetensors"]
    files = safe if len(safe) == 1 else files
    if len(files) == 1:
        return files[0]
    if not files:
        raise CheckpointError(
            f"{folder}: no weight file in this folder (looked for {', '.join(WEIGHT_SUFFIXES)})"
        )
    raise CheckpointError(
        f"{folder}: {len(files)} weight files ({', '.join(p.name for p in files[:5])}); give the path of one"
    )


def _read_one(path: Path) -> tuple[Mapping[str, Any], dict[str, Any]]:
    with path.open("rb") as file:
        head = file.read(16)
    if len(head) > 8 and head[8:9] == b"{":
        return _read_safetensors(path)
    if head[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04"):
        return _read_torch(path), {}
    if path.suffix in WEIGHT_SUFFIXES:
        raise CheckpointError(f"{path}: damaged or truncated; its first bytes are those of no weight file")
    raise CheckpointError(f"{path}: not a weight file (allowed: {', '.join(WEIGHT_SUFFIXES)})")


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError, struct.error, ValueError) as error:
        raise CheckpointError(
            f"{path}: damaged or truncated ({_first_line(error)}); fetch it again"
        ) from None


_DAMAGE = (
    pickle.UnpicklingError,
    struct.error,
    EOFError,
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    AssertionError,
    OverflowError,
    MemoryError,
)
"""What PyTorch's reader raises on bytes that are not as they were written; found by cutting and changing files."""


def _read_torch(path: Path) -> Mapping[str, Any]:
    """Tensors stay in the file's mapping until they are used; old files without an archive are read whole."""
    try:
        try:
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (RuntimeError, ValueError) as error:
            if "mmap" not in str(error):
                raise
            content = torch.load(path, map_location="cpu", weights_only=True)
    except _DAMAGE as error:
        raise CheckpointError(_torch_problem(path, error)) from None
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not named tensors")
    return content


def _torch_problem(path: Path, error: Exception) -> str:
    text = str(error)
    refused = re.search(
        r"GLOBAL ([\w.]+)|unsupported (?:operand|class|global)s?:? ?([\w.]*)", text, re.IGNORECASE
    )
    if isinstance(error, pickle.UnpicklingError) and (
        refused or "eights only" in text and "truncated" not in text
    ):
        what = next((group for group in refused.groups() if group), "") if refused else ""
        named = f" ({what})" if what and not what.isdigit() else ""  # a bare number is a pickle opcode
        return (
            f"{path}: refused, because it holds Python objects{named} besides tensors and reading those can run "
            "code; use a safetensors version of it"
        )
    return f"{path}: damaged or truncated ({_first_line(error)}); fetch it again"


def _read_shards(index: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"{index}: not an index of weight files (a 'weight_map' is missing)") from None
    shards = sorted(set(weight_map.values()))
    absent = [name for name in shards if not (index.parent / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{index}: {len(absent)} of {len(shards)} weight files are missing ({', '.join(absent[:5])})"
        )
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, Any] = {}
    for name in shards:
        content, meta = _read_one(index.parent / name)
        tensors.update({key: value for key, value in content.items() if isinstance(value, Tensor)})
        metadata.update(meta)
    lost = [name for name in weight_map if name not in tensors]
    if lost:
        raise CheckpointError(f"{index}: {len(lost)} tensors it lists are in no file ({', '.join(lost[:5])})")
    return tensors, metadata


def _choose_section(
    path: Path, content: Mapping[str, Any], metadata: dict[str, Any], which: str | None
) -> WeightFile:
    sections = {
        str(name): {key: value for key, value in part.items() if _is_named_tensor(key, value)}
        for name, part in content.items()
        if isinstance(part, Mapping)
    }
    sections = {name: part for name, part in sections.items() if part}
    scalars = {k: v for k, v in content.items() if isinstance(k, str) and isinstance(v, (int, float, str))}
    metadata = metadata | scalars
    if not sections:
        flat = {name: value for name, value in content.items() if _is_named_tensor(name, value)}
        if not flat:
            raise CheckpointError(f"{path}: holds no tensors with names")
        if which == "ema":
            raise CheckpointError(f"{path}: has no averaged (EMA) weights, it is one flat set of tensors")
        return WeightFile(path, flat, metadata=metadata)
    wanted = {"ema": EMA_SECTIONS, "generator": PLAIN_SECTIONS}.get(
        which or "", EMA_SECTIONS + PLAIN_SECTIONS + LORA_SECTIONS
    )
    chosen = next((name for name in wanted if name in sections), None)
    if chosen is None:
        kind = {"ema": "averaged (EMA) weights", "generator": "generator weights"}.get(
            which or "", "generator"
        )
        raise CheckpointError(f"{path}: has no {kind}; it holds {_listing(sections)}")
    return WeightFile(path, sections[chosen], chosen, tuple(sections), metadata)


def _is_named_tensor(name: Any, value: Any) -> bool:
    """An optimiser's state has tensors too, under numbers."""
    return isinstance(name, str) and isinstance(value, Tensor)


def _listing(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(repr(name) for name in names[:5]) + (
        f" and {len(names) - 5} more" if len(names) > 5 else ""
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    first = lines[0] if lines else type(error).__name__
    return first.split(". This is an internal")[0][
        :160
    ]  # what follows in PyTorch is advice to its developers
