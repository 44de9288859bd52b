"""Writes the trained parts as one checkpoint in the folder layout of a real model: diffusers' and
`streamvid.json`."""

import copy
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanTransformer3DModel
from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

from streamvid.tiny.dit import CHUNK
from streamvid.tiny.text import TEXT_LEN
from streamvid.tiny.world import FPS, SIDE

STEPS = (1000, 750, 500, 250)
SHIFT = 5.0
SINK_CHUNKS, RECENT_CHUNKS = 1, 4
WINDOW = CHUNK * (1 + SINK_CHUNKS + RECENT_CHUNKS)  # latent frames a chunk sees, itself included
MEMORY = f"window:size={WINDOW},sink={CHUNK * SINK_CHUNKS},positions=slot"


def stream_defaults(vae: AutoencoderKLWan) -> dict:
    """The contents of `streamvid.json`: how this checkpoint is meant to be streamed."""
    return {
        "denoising_steps": list(STEPS),
        "warp_steps": True,
        "timestep_shift": SHIFT,
        "chunk_latents": CHUNK,
        "memory": MEMORY,
        "height": SIDE,
        "width": SIDE,
        "fps": FPS,
        "text_len": TEXT_LEN,
        "trained_latents": WINDOW,
        "vae_scale_temporal": vae.config.scale_factor_temporal,
        "vae_scale_spatial": vae.config.scale_factor_spatial,
    }


def export(
    folder: Path,
    vae: AutoencoderKLWan,
    encoder: UMT5EncoderModel,
    tokenizer: PreTrainedTokenizerFast,
    transformer: WanTransformer3DModel,
    *,
    dtype: torch.dtype = torch.float16,
) -> Path:
    """Writes the checkpoint; an existing folder is replaced only when the new one is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".export-") as temporary:
        new = Path(temporary) / "model"
        for part, name in ((transformer, "transformer"), (vae, "vae"), (encoder, "text_encoder")):
            torch.nn.Module.to(copy.deepcopy(part), dtype).save_pretrained(new / name)
        tokenizer.save_pretrained(new / "tokenizer")
        _tidy(new)
        FlowMatchEulerDiscreteScheduler(shift=SHIFT).save_pretrained(new / "scheduler")
        index = {
            "_class_name": "WanPipeline",
            "transformer": ["diffusers", "WanTransformer3DModel"],
            "vae": ["diffusers", "AutoencoderKLWan"],
            "text_encoder": ["transformers", "UMT5EncoderModel"],
            "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        }
        (new / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
        (new / "streamvid.json").write_text(json.dumps(stream_defaults(vae), indent=2) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(new, folder)
    return folder


def _tidy(folder: Path) -> None:
    """Removes what the libraries note about this machine, and makes the files readable for everyone.

    The tokenizer's class is written as the one that every transformers release knows.
    """
    path = folder / "tokenizer" / "tokenizer_config.json"
    keys = ("eos_token", "pad_token", "unk_token", "model_max_length", "padding_side")
    kept = {k: v for k, v in json.loads(path.read_text()).items() if k in keys}
    path.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **kept}, indent=2) + "\n")
    for config in folder.rglob("config.json"):
        values = json.loads(config.read_text())
        values.pop("_name_or_path", None)
        config.write_text(json.dumps(values, indent=2) + "\n")
    for file in folder.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)
