"""Low-rank adapters merged into a transformer's weights: ``W + scale * alpha / rank * B @ A``.

Reads the layouts of peft (LongLive's ``generator_lora`` among them), diffusers, and the ``diffusion_model.`` and
``lora_unet_`` names of training tools, with ``lora_A/lora_B`` or ``lora_down/lora_up``, ``alpha``, and the whole
differences ``diff`` and ``diff_b``. Merging is strict: a tensor that has no place is an error, never ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from streamvid.checkpoint_formats import WeightFile, read_weights
from streamvid.checkpoint_keys import Contents, clean_name, to_library
from streamvid.errors import CheckpointError

_PARTS = {
    "lora_A.weight": "down",
    "lora_A.default.weight": "down",
    "lora_down.weight": "down",
    "lora.down.weight": "down",
    "lora_B.weight": "up",
    "lora_B.default.weight": "up",
    "lora_up.weight": "up",
    "lora.up.weight": "up",
    "alpha": "alpha",
    "diff": "diff",
    "diff_b": "diff_b",
    "lora_A.bias": "unsupported",
    "lora_B.bias": "diff_b",
}
_PREFIXES = ("base_model.model.", "transformer.", "unet.")
_FLAT = re.compile(r"lora_(?:unet|transformer)_+(.+)")
_ORIGINAL = Contents("transformer", "original")


@dataclass(frozen=True)
class LoraSpec:
    """One adapter to merge."""

    path: Path
    scale: float = 1.0
    alpha: float | None = None
    """Overrides the file's alpha; by default the file's own, else that of ``adapter_config.json`` beside it, else
    the rank (no scaling)."""

    @classmethod
    def parse(cls, text: str | Path | LoraSpec) -> LoraSpec:
        """``PATH`` or ``PATH@SCALE``. Raises CheckpointError when the scale is not a number."""
        if isinstance(text, LoraSpec):
            return text
        path, at, scale = str(text).rpartition("@")
        if not at or Path(str(text)).exists():
            return cls(Path(text))
        try:
            return cls(Path(path), float(scale))
        except ValueError:
            raise CheckpointError(
                f"LoRA {text}: {scale!r} is not a number; write PATH@SCALE, for example x@0.8"
            ) from None


def merge_lora(model: nn.Module, specs: Sequence[str | Path | LoraSpec]) -> None:
    """Merge adapters into ``model`` in order, in float32, in place.

    Raises:
        CheckpointError: not an adapter, or one that does not fit completely; the model is then unchanged by it.
    """
    for text in specs:
        spec = LoraSpec.parse(text)
        for name, delta in lora_deltas(model, spec).items():
            parameter = model.get_parameter(name)
            merged = (parameter.detach().float() + delta.to(parameter.device)).to(parameter.dtype)
            _replace(model, name, merged)


def lora_deltas(model: nn.Module, spec: LoraSpec) -> dict[str, Tensor]:
    """Parameter name to what is added to it, float32, checked against ``model``."""
    weights = read_weights(spec.path)
    modules = _collect(weights)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    by_flat_name = {_flat(name): name for name in _module_names(shapes)}
    out: dict[str, Tensor] = {}
    lost: list[str] = []
    for module, parts in modules.items():
        target = _target(module, by_flat_name)
        for suffix, delta in _deltas(module, parts, spec, _file_alpha(spec.path), str(weights.path)).items():
            name = f"{target}.{suffix}" if f"{target}.{suffix}" in shapes else str(target)
            if shapes.get(name) is None or delta.numel() != torch.Size(shapes[name]).numel():
                lost.append(f"{module} {list(delta.shape)}")
            else:
                out[name] = delta.reshape(shapes[name])
    if lost or not out:
        shown = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
        raise CheckpointError(
            f"{weights.path}: {len(lost)} of {len(modules)} adapted layers have no place of that shape in this model "
            f"({shown}); the LoRA was made for another model, and nothing of it was merged"
        )
    return out


def _collect(weights: WeightFile) -> dict[str, dict[str, Tensor]]:
    """Module (as the file names it, cleaned) to its parts. Raises CheckpointError on a tensor of unknown meaning."""
    modules: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for name, tensor in weights.tensors.items():
        suffix = next((s for s in sorted(_PARTS, key=len, reverse=True) if name.endswith(f".{s}")), None)
        if suffix is None or _PARTS[suffix] == "unsupported":
            unknown.append(name)
            continue
        modules.setdefault(_module(name.removesuffix(f".{suffix}")), {})[_PARTS[suffix]] = tensor
    if unknown:
        raise CheckpointError(
            f"{weights.path}: {len(unknown)} of {len(weights.tensors)} tensors are of no LoRA layout this program "
            f"reads ({', '.join(unknown[:5])}); it reads lora_A/lora_B, lora_down/lora_up, alpha, diff and diff_b"
        )
    return modules


def _module(name: str) -> str:
    stripped = True
    while stripped:
        stripped = False
        for prefix in _PREFIXES:
            if name.startswith(prefix):
                name, stripped = name.removeprefix(prefix), True
        cleaned = clean_name(name)
        name, stripped = cleaned, stripped or cleaned != name
    return name


def _target(module: str, by_flat_name: dict[str, str]) -> str | None:
    """Library module name. Flat names (dots written as ``_``) are looked up in both spellings."""
    match = _FLAT.fullmatch(module)
    if not match:
        return to_library(_ORIGINAL, [f"{module}.weight"])[f"{module}.weight"].removesuffix(".weight")
    return by_flat_name.get(match[1])


def _module_names(shapes: dict[str, tuple[int, ...]]) -> list[str]:
    return sorted({name.rpartition(".")[0] for name in shapes} | {n for n in shapes if n.endswith("table")})


def _flat(name: str) -> str:
    from streamvid.checkpoint_keys import to_original

    weight = to_original("transformer", f"{name}.weight")
    return weight.removesuffix(".weight").replace(".", "_")


def _file_alpha(path: Path) -> float | None:
    file = (path if path.is_dir() else path.parent) / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        value = json.loads(file.read_text()).get("lora_alpha")
    except (OSError, ValueError, AttributeError):
        raise CheckpointError(f"{file}: cannot be read as JSON") from None
    return None if value is None else float(value)


def _deltas(
    module: str, parts: dict[str, Tensor], spec: LoraSpec, folder_alpha: float | None, where: str
) -> dict[str, Tensor]:
    """``weight`` and ``bias`` differences of one module, scaled."""
    out: dict[str, Tensor] = {}
    if ("down" in parts) != ("up" in parts):
        raise CheckpointError(
            f"{where}: {module} has only one of its two low-rank factors; fetch the file again"
        )
    if "down" in parts:
        down, up = parts["down"].float().flatten(1), parts["up"].float().flatten(1)
        rank = down.shape[0]
        if up.shape[1] != rank:
            raise CheckpointError(f"{where}: the factors of {module} have ranks {rank} and {up.shape[1]}")
        stored = float(parts["alpha"]) if "alpha" in parts else folder_alpha
        alpha = spec.alpha if spec.alpha is not None else stored if stored is not None else float(rank)
        out["weight"] = spec.scale * alpha / rank * (up @ down)
    for part, suffix in (("diff", "weight"), ("diff_b", "bias")):
        if part in parts:
            delta = spec.scale * parts[part].float()
            out[suffix] = out[suffix] + delta.reshape(out[suffix].shape) if suffix in out else delta
    return out


def _replace(model: nn.Module, name: str, value: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
