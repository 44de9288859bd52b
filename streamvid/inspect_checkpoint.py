"""What a checkpoint is, without loading it: kind, geometry, size, memory by window, and what it lacks to run.

Only names, shapes and dtypes are looked at; tensors stay in their files.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from streamvid.checkpoint_formats import WeightFile, read_weights
from streamvid.checkpoint_geometry import transformer_config, umt5_config, vae_config
from streamvid.checkpoint_keys import Contents
from streamvid.checkpoint_models import identify, read_config
from streamvid.config import StreamConfig
from streamvid.locate import Source, locate, resolve
from streamvid.taehv import infer_config

WINDOWS = (3, 6, 9, 12, 21)
"""Latent frames whose cache size is listed."""
CACHE_BYTES = 2
"""Bytes a number of an uncompressed bfloat16 cache."""


@dataclass
class Part:
    """One model in a checkpoint."""

    part: str
    path: str
    kind: str
    names: str
    """``original`` or ``library`` spelling."""
    section: str | None
    """The part of a training checkpoint described here."""
    sections: list[str]
    tensors: int
    parameters: int
    num_bytes: int
    dtypes: dict[str, int]
    """Dtype to number of parameters."""
    geometry: dict[str, Any]


@dataclass
class Inspection:
    """All that `inspect_checkpoint` finds."""

    path: str
    layout: str
    parts: list[Part] = field(default_factory=list)
    stream: dict[str, Any] = field(default_factory=dict)
    """The stream configuration (`StreamConfig`) it runs with, when it has a transformer."""
    native_size: list[int] = field(default_factory=list)
    """Pixel height and width of the memory figures."""
    tokens_per_frame: int = 0
    cache_bytes: dict[int, int] = field(default_factory=dict)
    """Latent frames held to bytes of keys and values of all layers, bfloat16, one clip, no codec."""
    missing: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def geometry(self, kind: str) -> dict[str, Any] | None:
        """The geometry of the part of this kind, or None."""
        return next((part.geometry for part in self.parts if part.kind == kind), None)


def inspect_checkpoint(path_or_name: str | Path, which: str | None = None) -> Inspection:
    """Describe a file, folder, repository or name.

    Raises:
        CheckpointError: it cannot be read, or is no part of a model that can be streamed.
    """
    path = resolve(path_or_name)
    source = locate(path)
    found = Inspection(str(path_or_name), source.layout)
    for part in ("transformer", "vae", "text_encoder"):
        place = getattr(source, part)
        if place is not None:
            found.parts.append(_describe(part, read_weights(place, which if part == "transformer" else None)))
        else:
            found.missing[part] = source.missing[part]
    if not found.parts:
        found.parts.append(_describe("lora", read_weights(path)))
    elif source.text_encoder is not None and source.tokenizer is None:
        found.missing["tokenizer"] = "has no tokenizer beside its text encoder; give one with --tokenizer"
    _add_memory(found, source)
    return found


def _describe(part: str, weights: WeightFile) -> Part:
    contents, names = identify(weights)
    dtypes: Counter[str] = Counter()
    for tensor in weights.tensors.values():
        dtypes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    shapes = {new: tuple(weights.tensors[old].shape) for new, old in names.items()}
    return Part(
        part=part,
        path=str(weights.path),
        kind=contents.kind,
        names=contents.layout,
        section=weights.section,
        sections=list(weights.sections),
        tensors=len(weights.tensors),
        parameters=sum(dtypes.values()),
        num_bytes=sum(t.numel() * t.element_size() for t in weights.tensors.values()),
        dtypes=dict(dtypes.most_common()),
        geometry=_geometry(contents, shapes, weights),
    )


def _geometry(contents: Contents, shapes: dict[str, tuple[int, ...]], weights: WeightFile) -> dict[str, Any]:
    where, given = str(weights.path), read_config(weights.path)
    if contents.kind == "transformer":
        return transformer_config(shapes, given, where)
    if contents.kind == "vae":
        return vae_config(shapes, given, where)
    if contents.kind == "text_encoder":
        shared = shapes.get("shared.weight", shapes.get("encoder.embed_tokens.weight"))
        return umt5_config(shapes | ({"shared.weight": shared} if shared else {}), where)
    if contents.kind == "taehv":
        config = infer_config(shapes)
        return asdict(config) | {
            "scale_factor_temporal": config.temporal,
            "scale_factor_spatial": config.spatial,
        }
    ranks = {
        shape[0] for name, shape in shapes.items() if name.endswith(("lora_A.weight", "lora_down.weight"))
    }
    return {"ranks": sorted(ranks)}


def _add_memory(found: Inspection, source: Source) -> None:
    geometry = found.geometry("transformer")
    if geometry is None:
        return
    config = StreamConfig.from_file(source.config) if source.config else StreamConfig()
    scales = found.geometry("vae") or found.geometry("taehv")
    spatial = scales["scale_factor_spatial"] if scales else config.vae_scale_spatial
    patch = geometry["patch_size"]
    found.stream = config.to_dict()
    found.native_size = [config.height, config.width]
    rows, columns = (side // spatial // p for side, p in zip(found.native_size, patch[1:], strict=True))
    found.tokens_per_frame = rows * columns
    width = geometry["num_attention_heads"] * geometry["attention_head_dim"]
    per_frame = 2 * geometry["num_layers"] * found.tokens_per_frame * width * CACHE_BYTES
    found.cache_bytes = {window: math.ceil(window / patch[0]) * per_frame for window in WINDOWS}
