"""Every checkpoint layout in, one set of components out.

A path may be a weight file (Self-Forcing and its relatives' ``.pt``, original Wan, diffusers), a folder of any of
these layouts, our own folder (diffusers' layout and ``streamvid.json``), a Hugging Face repository, or a name in
`NAMED`. Files are recognised by the names of their tensors, never by their own names.

Part of a checkpoint: Self-Forcing writes ``generator`` and ``generator_ema`` and runs its inference on the averaged
weights, so those are taken when present; ``which`` asks for one of them and fails when it is absent.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from streamvid.checkpoint_formats import WeightFile, read_weights
from streamvid.checkpoint_models import load_model, read_config
from streamvid.config import CONFIG_NAME, StreamConfig
from streamvid.errors import CheckpointError
from streamvid.fingerprint import fingerprint
from streamvid.locate import NAMED, Source, locate, resolve, tokenizer_beside
from streamvid.lora import LoraSpec, merge_lora
from streamvid.text import TextEncoder, UMT5TextEncoder
from streamvid.vae import vae_geometry
from streamvid.vae_cpu import use_onednn

__all__ = ["NAMED", "Components", "load_components", "load_text_encoder", "load_transformer", "load_vae"]

_CHUNK_NAMES = ("chunk_latents", "num_frame_per_block")


@dataclass
class Components:
    """What a stream needs. A part that the checkpoint does not have is None, with the reason in ``missing``."""

    transformer: Any
    """`WanTransformer3DModel`, in evaluation mode."""
    vae: Any
    """`AutoencoderKLWan` or `TAEHV`; `streamvid.vae.make_decoder` and `make_encoder` take it. Or None."""
    text: TextEncoder | None
    config: StreamConfig
    fingerprint: str
    """Of the transformer, adapters included; see `streamvid.fingerprint`."""
    path: str
    missing: dict[str, str] = field(default_factory=dict)
    """``"vae"`` or ``"text"`` to one sentence: why it is None and what to give."""


def load_components(
    path_or_name: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    which: str | None = None,
    lora: str | Path | LoraSpec | Sequence[str | Path | LoraSpec] = (),
    vae: str | Path | None = None,
    text_encoder: str | Path | None = None,
    tokenizer: str | Path | None = None,
    model_config: Mapping[str, Any] | None = None,
) -> Components:
    """Load a model for streaming.

    Args:
        path_or_name: see the module's text.
        device: where all parts go.
        dtype: of all weights; None keeps each file's own.
        which: ``"ema"`` or ``"generator"`` of a training checkpoint; None prefers the averaged weights.
        lora: adapters merged in order: a path, ``PATH@SCALE`` or `LoraSpec`.
        vae: an autoencoder's file or folder (Wan VAE or TAEHV), in place of the checkpoint's own.
        text_encoder: a UMT5 file or folder, in place of the checkpoint's own.
        tokenizer: a tokenizer folder; by default the one beside the text encoder.
        model_config: the transformer's configuration, in place of the ``config.json`` beside its weights.

    Raises:
        CheckpointError: one sentence on what does not exist, is damaged, would run code, or does not fit.
    """
    source = locate(resolve(path_or_name))
    if source.transformer is None:
        raise CheckpointError(f"{path_or_name}: {source.missing['transformer']}")
    weights = read_weights(source.transformer, which)
    config = _stream_config(source, weights)
    transformer = load_transformer(weights, device=device, dtype=dtype, config=model_config)
    adapters = [lora] if isinstance(lora, (str, Path, LoraSpec)) else list(lora)
    merge_lora(transformer, adapters)

    missing = {}
    vae_model = text = None
    vae_path = resolve(vae) if vae is not None else source.vae
    if vae_path is not None:
        vae_model = load_vae(vae_path, device=device, dtype=dtype)
        config = _fit_vae(config, transformer, vae_model, vae_path, source)
    else:
        missing["vae"] = f"{path_or_name} {source.missing['vae']}"
    text_path = resolve(text_encoder) if text_encoder is not None else source.text_encoder
    if text_path is not None:
        words = resolve(tokenizer) if tokenizer is not None else None
        if words is None and text_encoder is None:
            words = source.tokenizer
        text = load_text_encoder(text_path, words, text_len=config.text_len, device=device, dtype=dtype)
        if text.text_dim != transformer.config.text_dim:
            raise CheckpointError(
                f"{text_path}: a text encoder of width {text.text_dim}, but the transformer takes "
                f"{transformer.config.text_dim}; give the text encoder it was trained with"
            )
    else:
        missing["text"] = f"{path_or_name} {source.missing['text_encoder']}"
    return Components(
        transformer, vae_model, text, config, fingerprint(transformer), str(path_or_name), missing
    )


def load_transformer(
    source: Path | WeightFile,
    *,
    which: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    config: Mapping[str, Any] | None = None,
) -> Any:
    """A `WanTransformer3DModel` from a file, a component folder, or weights already read. Raises CheckpointError."""
    weights = source if isinstance(source, WeightFile) else read_weights(source, which)
    return load_model(weights, ("transformer",), "a model path", device=device, dtype=dtype, config=config)


def load_vae(
    path: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    config: Mapping[str, Any] | None = None,
) -> Any:
    """An `AutoencoderKLWan` or `TAEHV` from a file, its folder, or a whole model's folder. Raises CheckpointError."""
    if (path / "vae").is_dir():
        path = path / "vae"
    model = load_model(read_weights(path), ("vae", "taehv"), "vae", device=device, dtype=dtype, config=config)
    return use_onednn(model)


def load_text_encoder(
    path: Path,
    tokenizer: Path | None = None,
    *,
    text_len: int = 512,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> UMT5TextEncoder:
    """UMT5 and its tokenizer from a file, its folder, or a whole model's folder. Raises CheckpointError."""
    from transformers import AutoTokenizer

    if (path / "text_encoder").is_dir():
        path = path / "text_encoder"
    tokenizer = tokenizer or tokenizer_beside(path)
    if tokenizer is None:
        raise CheckpointError(
            f"{path}: no tokenizer beside it (looked for tokenizer/ and google/umt5-xxl/); give tokenizer="
        )
    try:
        words = AutoTokenizer.from_pretrained(str(tokenizer), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{tokenizer}: not a tokenizer folder ({reason:.160})") from None
    model = load_model(read_weights(path), ("text_encoder",), "text_encoder", device=device, dtype=dtype)
    return UMT5TextEncoder(model, words, text_len)


def _stream_config(source: Source, weights: WeightFile) -> StreamConfig:
    """``streamvid.json``, or the defaults with the chunk size that the weights' own metadata states."""
    beside = read_config(weights.path) or {}
    stated = {
        f"{where} ({name}={values[name]})": int(values[name])
        for where, values in (("the file's metadata", weights.metadata), ("its config.json", beside))
        for name in _CHUNK_NAMES
        if name in values
    }
    if source.config is None:
        base = StreamConfig()
        ours = {}
    else:
        base = StreamConfig.from_file(source.config)
        said = _stated_keys(source.config)
        ours = {CONFIG_NAME: base.chunk_latents} if "chunk_latents" in said else {}
    if len(set((stated | ours).values())) > 1:
        raise CheckpointError(
            f"{weights.path}: chunk sizes disagree: {'; '.join(f'{w}: {n}' for w, n in (stated | ours).items())}; "
            "a model streams only in chunks of the size it was trained with, so mend the wrong one"
        )
    if stated and not ours:
        base = dataclasses.replace(base, chunk_latents=next(iter(stated.values())))
    text_len = beside.get("text_len")
    if text_len is not None and (source.config is None or "text_len" not in said):
        base = dataclasses.replace(base, text_len=int(text_len))
    return base


def _fit_vae(config: StreamConfig, transformer: Any, vae: Any, path: Path, source: Source) -> StreamConfig:
    """Check the autoencoder against the transformer; take its scales unless ``streamvid.json`` states others."""
    geometry = vae_geometry(vae)
    if geometry.latent_channels != transformer.config.out_channels:
        raise CheckpointError(
            f"{path}: an autoencoder of {geometry.latent_channels} latent channels, but the transformer makes "
            f"{transformer.config.out_channels}; give the autoencoder it was trained with"
        )
    found = (geometry.temporal, geometry.spatial)
    names = ("vae_scale_temporal", "vae_scale_spatial")
    stated = _stated_keys(source.config) if source.config is not None else set()
    for name, scale in zip(names, found, strict=True):
        if name in stated and getattr(config, name) != scale:
            raise CheckpointError(
                f"{path}: its {name.removeprefix('vae_scale_')} scale is {scale}, but {CONFIG_NAME} says "
                f"{getattr(config, name)}; give the autoencoder the model was trained with"
            )
    scales: dict[str, Any] = dict(zip(names, found, strict=True))
    return dataclasses.replace(config, **scales)


def _stated_keys(path: Path) -> set[str]:
    """The keys that a ``streamvid.json`` (already read once without error) states itself."""
    return set(json.loads(path.read_text()))
