"""Named tensors into models: built without memory, checked completely, then filled tensor by tensor.

A model is either filled whole or not at all. Tensors go from the file's mapping straight to their place, so a model
is never in memory twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from streamvid.checkpoint_formats import WeightFile
from streamvid.checkpoint_geometry import transformer_config, umt5_config, vae_config
from streamvid.checkpoint_keys import Contents, classify, clean_names, to_library, to_original
from streamvid.errors import CheckpointError
from streamvid.taehv import TAEHV, infer_config, trim_grows

SHOWN = 5
ALIGNMENT = 64
"""Bytes; what torch's own allocator gives."""
_NOUN = {
    "transformer": "a Wan video transformer",
    "vae": "a Wan VAE",
    "taehv": "a TAEHV autoencoder",
    "text_encoder": "a UMT5 text encoder",
    "lora": "a LoRA",
}


def identify(weights: WeightFile) -> tuple[Contents, dict[str, str]]:
    """What ``weights`` is, and its library names to the names in the file.

    Raises:
        CheckpointError: of no model that can be streamed.
    """
    cleaned = clean_names(weights.tensors, str(weights.path))
    contents = classify(cleaned)
    if contents is None:
        first = ", ".join(list(weights.tensors)[:3])
        raise CheckpointError(
            f"{weights.path}: not a model this program streams ({len(weights.tensors)} tensors: {first}, ...); "
            "it reads Wan-style video transformers, the Wan VAE, TAEHV, UMT5 encoders and LoRAs for them"
        )
    library = to_library(contents, cleaned)
    return contents, {new: cleaned[old] for old, new in library.items()}


def expect_kind(contents: Contents, allowed: tuple[str, ...], path: Path, argument: str) -> None:
    """Raises CheckpointError when the file holds another part of a model than ``argument`` takes."""
    if contents.kind not in allowed:
        wanted = " or ".join(_NOUN[kind] for kind in allowed)
        raise CheckpointError(f"{path}: holds {_NOUN[contents.kind]}, but {argument} takes {wanted}")


def read_config(path: Path) -> dict[str, Any] | None:
    """The ``config.json`` beside a weight file, or None. Raises CheckpointError when it is not JSON."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: not a configuration (a JSON object is expected)")
    return content


def build_empty(
    contents: Contents, shapes: Mapping[str, tuple[int, ...]], given: Any, where: str
) -> nn.Module:
    """The model that tensors of these library names and shapes belong to, on the meta device.

    Args:
        shapes: library names to shapes.
        given: contents of a ``config.json`` beside the weights, or None.
    """
    with torch.device("meta"):
        if contents.kind == "transformer":
            from diffusers import WanTransformer3DModel

            if given and given.get("_class_name") == "WanTransformer3DModel":
                return WanTransformer3DModel.from_config(given)
            return WanTransformer3DModel(**transformer_config(shapes, given, where))
        if contents.kind == "vae":
            from diffusers import AutoencoderKLWan

            if given and given.get("_class_name") == "AutoencoderKLWan":
                return AutoencoderKLWan.from_config(given)
            return AutoencoderKLWan(**vae_config(shapes, given, where))
        if contents.kind == "text_encoder":
            from transformers import UMT5Config, UMT5EncoderModel

            known = given if given and given.get("model_type") == "umt5" else umt5_config(shapes, where)
            return UMT5EncoderModel(UMT5Config(**known))
        return TAEHV(infer_config(shapes))


def load_model(
    weights: WeightFile,
    allowed: tuple[str, ...],
    argument: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None,
    config: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build and fill the model that ``weights`` holds.

    Args:
        weights: as read; its tensors are released one by one as they are placed.
        allowed: kinds that ``argument`` takes, see `expect_kind`.
        dtype: of all weights; None keeps the file's.
        config: overrides the ``config.json`` beside the file.

    Raises:
        CheckpointError: wrong kind, or names or shapes that do not fit completely.
    """
    where = str(weights.path)
    contents, names = identify(weights)
    expect_kind(contents, allowed, weights.path, argument)
    shapes = {new: tuple(weights.tensors[old].shape) for new, old in names.items()}
    if contents.kind == "text_encoder":
        _drop_tied(names, shapes, weights.tensors)
    given = config if config is not None else read_config(weights.path)
    model = build_empty(contents, shapes, given, where)
    tensors: dict[str, Tensor] = {new: weights.tensors.pop(old) for new, old in names.items()}
    if isinstance(model, TAEHV):
        tensors = trim_grows(tensors, model.config)
    fill(model, tensors, contents, names, where, device=device, dtype=dtype)
    return model


def fill(
    model: nn.Module,
    tensors: dict[str, Tensor],
    contents: Contents,
    names: Mapping[str, str],
    where: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> None:
    """Place ``tensors`` (emptied on the way) into a meta-device ``model``; strict, all or nothing."""
    expected = _expected(model)
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problem = mismatch(expected, given, contents, names)
    if problem:
        raise CheckpointError(f"{where}: does not fit {_NOUN[contents.kind]}: {problem}; nothing was loaded")
    placed = {name: _place(tensors.pop(name), device, dtype) for name in list(tensors)}
    model.load_state_dict(placed, strict=False, assign=True)
    if contents.kind == "text_encoder":
        model.encoder.embed_tokens.weight = model.shared.weight
    _restore_buffers(model, device)
    model.eval().requires_grad_(False)


def mismatch(
    expected: Mapping[str, tuple[int, ...]],
    given: Mapping[str, tuple[int, ...]],
    contents: Contents,
    names: Mapping[str, str],
) -> str:
    """What does not fit, up to five of each sort with the counts, in the file's spelling; empty when all fits."""

    def spell(name: str) -> str:
        if name in names:
            return names[name]
        return to_original(contents.kind, name) if contents.layout == "original" else name

    def show(items: list[str]) -> str:
        more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
        return ", ".join(items[:SHOWN]) + more

    missing = [spell(name) for name in expected if name not in given]
    unexpected = [spell(name) for name in given if name not in expected]
    shaped = [
        f"{spell(name)} {list(given[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in given and given[name] != shape
    ]
    parts = [
        f"{len(items)} {word} ({show(items)})"
        for word, items in (("missing", missing), ("unexpected", unexpected), ("of wrong shape", shaped))
        if items
    ]
    return ", ".join(parts)


def _expected(model: nn.Module) -> dict[str, tuple[int, ...]]:
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if hasattr(model, "shared"):
        shapes.pop("encoder.embed_tokens.weight", None)
    return shapes


def _drop_tied(names: dict[str, str], shapes: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """UMT5 files may name its one embedding table twice or only by its second name."""
    tied = "encoder.embed_tokens.weight"
    if tied not in names:
        return
    if "shared.weight" in names:
        tensors.pop(names.pop(tied))
        shapes.pop(tied)
    else:
        names["shared.weight"], shapes["shared.weight"] = names.pop(tied), shapes.pop(tied)


def _place(tensor: Tensor, device: torch.device | str, dtype: torch.dtype | None) -> Tensor:
    """``tensor`` where it is to stay: in the file's mapping when nothing changes and it is aligned there.

    Matrix products over unaligned memory are slower and differ in the last bit, which would make a model's output
    depend on the layout of its file.
    """
    placed = tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
    aligned = placed.device.type != "cpu" or placed.data_ptr() % ALIGNMENT == 0
    return placed if aligned else placed.clone()


def _restore_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Buffers that no file holds (rotary tables) are computed anew, since a meta model has none."""
    for module in model.modules():
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            fresh = type(module)(module.attention_head_dim, module.patch_size, module.max_seq_len)
            for name, buffer in fresh.named_buffers(recurse=False):
                module.register_buffer(name, buffer.to(device), persistent=False)
