"""Autoencoder cases in the golden format, checked through the public loading and streaming path.

A case is a folder of ``config.json``, ``weights.safetensors`` and ``case.safetensors``. Nothing here depends on the
sizes of a given case.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from streamvid.checkpoint_formats import read_weights
from streamvid.checkpoints import load_vae
from streamvid.errors import CheckpointError
from streamvid.taehv import TAEHV
from streamvid.vae import make_decoder, make_encoder
from streamvid.vae_taehv import TAEHVDecoder, TAEHVEncoder
from streamvid.vae_wan import WanDecoder

ABSOLUTE_LIMIT = 2e-5
"""Largest absolute deviation of float32 results whose size is about one."""
RELATIVE_LIMIT = 5e-6
"""Root-mean-square deviation relative to the reference, for TAEHV's encoder, whose results are not about one."""


@dataclass(frozen=True)
class Deviation:
    """How far one tensor is from the recorded one."""

    name: str
    value: float
    limit: float
    measure: str
    """``"max abs"`` or ``"rms relative"``."""

    @property
    def ok(self) -> bool:
        """Within the limit; not when the deviation is not a number."""
        return self.value <= self.limit


def verify_wan_vae(folder: Path) -> list[Deviation]:
    """Encode, decode whole, decode in the recorded split and frame by frame, against a ``wan_vae`` case.

    Raises:
        CheckpointError: a file or tensor of the case is missing, or its weights are not a Wan VAE.
    """
    config, case = _read_case(folder, ("latents", "decoded", "video", "encoded"))
    vae = load_vae(folder / "weights.safetensors", dtype=torch.float32, config=config)
    latents = case["latents"].float().transpose(1, 2)
    decoded = case["decoded"].float().transpose(1, 2)
    splits = {
        "whole": [latents.shape[1]],
        "recorded split": config.get("chunk_split") or [latents.shape[1]],
        "frame by frame": [1] * latents.shape[1],
    }
    decoder = make_decoder(vae)
    if not isinstance(decoder, WanDecoder):
        raise CheckpointError(f"{folder}: its weights are a {type(vae).__name__}, not a Wan VAE")
    out = []
    for name, split in splits.items():
        decoder.reset()
        pictures = torch.cat([decoder.decode_raw(part) for part in latents.split(split, dim=1)], dim=1)
        out.append(_absolute(f"decoded, {name}", pictures, decoded))
    decoder.reset()
    final = decoder.decode_chunk(latents)
    out.append(_absolute("frames in 0..1", final, decoded.mul(0.5).add(0.5).clamp(0, 1)))
    video = case["video"].float().transpose(1, 2).mul(0.5).add(0.5)
    encoded = case["encoded"].float().transpose(1, 2)
    for name, split in (("whole", [video.shape[1]]), ("frame by frame", [1] * video.shape[1])):
        encoder = make_encoder(vae)
        latent = torch.cat([encoder.encode(part) for part in video.split(split, dim=1)], dim=1)
        out.append(_absolute(f"encoded, {name}", latent, encoded))
    return out


def verify_taehv(folder: Path) -> list[Deviation]:
    """Decode whole and frame by frame, and encode, against a ``taehv`` case.

    Raises:
        CheckpointError: a file or tensor of the case is missing, or its weights are not a TAEHV.
    """
    _, case = _read_case(folder, ("latents", "decoded_raw", "video", "encoded"))
    model = load_vae(folder / "weights.safetensors", dtype=torch.float32)
    if not isinstance(model, TAEHV):
        raise CheckpointError(f"{folder}: its weights are a {type(model).__name__}, not a TAEHV")
    latents, raw = case["latents"].float(), case["decoded_raw"].float()
    decoder = TAEHVDecoder(model)
    out = []
    for name, split in (("whole", latents.shape[1]), ("frame by frame", 1)):
        decoder.reset()
        pictures = torch.cat([decoder.decode_raw(part) for part in latents.split(split, dim=1)], dim=1)
        out.append(_absolute(f"decoded raw, {name}", pictures, raw))
    decoder.reset()
    final = torch.cat([decoder.decode_chunk(part) for part in latents.split(1, dim=1)], dim=1)
    trimmed = raw[:, model.config.temporal - 1 :].clamp(0, 1)
    out.append(_absolute("frames in 0..1", final, trimmed))
    encoded = TAEHVEncoder(model).encode_reference(case["video"].float())
    out.append(_relative("encoded", encoded, case["encoded"].float()))
    return out


VERIFIERS: dict[str, Callable[[Path], list[Deviation]]] = {"wan_vae": verify_wan_vae, "taehv": verify_taehv}
"""The ``case`` field of a case's ``config.json`` to the function that checks it."""


def _read_case(folder: Path, needed: Iterable[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: its config.json cannot be read ({error})") from None
    case = read_weights(folder / "case.safetensors").tensors
    absent = [name for name in needed if name not in case]
    if absent:
        raise CheckpointError(f"{folder}: case.safetensors has no {', '.join(absent)}")
    return config, case


def _absolute(name: str, ours: Tensor, reference: Tensor) -> Deviation:
    value = (ours - reference).abs().max().item() if ours.shape == reference.shape else float("inf")
    return Deviation(name, value, ABSOLUTE_LIMIT, "max abs")


def _relative(name: str, ours: Tensor, reference: Tensor) -> Deviation:
    if ours.shape != reference.shape:
        return Deviation(name, float("inf"), RELATIVE_LIMIT, "rms relative")
    value = ((ours - reference).square().mean() / reference.square().mean()).sqrt().item()
    return Deviation(name, value, RELATIVE_LIMIT, "rms relative")
