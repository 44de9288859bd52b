"""Any checkpoint to one folder: diffusers' layout, safetensors, ``streamvid.json``.

The folder appears under its name complete or not at all. diffusers' own `WanPipeline.from_pretrained` loads it when
it has all parts.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from streamvid.checkpoints import Components, load_components, load_text_encoder, load_vae
from streamvid.config import CONFIG_NAME
from streamvid.errors import StreamvidError
from streamvid.locate import locate, resolve
from streamvid.memory.spec import nearest
from streamvid.taehv import TAEHV
from streamvid.text import UMT5TextEncoder

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def parse_dtype(name: str | None) -> torch.dtype | None:
    """A dtype by name; None for None. Raises StreamvidError naming the nearest one."""
    if name is None:
        return None
    if name not in DTYPES:
        raise StreamvidError(
            f"dtype {name!r} is unknown{nearest(name, DTYPES)} (allowed: {', '.join(DTYPES)})"
        )
    return DTYPES[name]


def convert(
    source: str | Path,
    target: Path,
    *,
    which: str | None = None,
    dtype: torch.dtype | None = None,
    lora: Sequence[str | Path] = (),
    vae: str | Path | None = None,
    text_encoder: str | Path | None = None,
    tokenizer: str | Path | None = None,
) -> list[str]:
    """Write ``source`` as a folder ``target``; returns the names of the parts written.

    Args:
        source: anything `streamvid.checkpoints.load_components` takes, or a lone VAE or text encoder.
        target: a folder that does not exist yet (or an empty one).
        which, lora, vae, text_encoder, tokenizer: as there.
        dtype: of the weights written; None keeps the file's own.

    Raises:
        StreamvidError: ``target`` has content, or the source cannot be loaded; nothing is left under ``target``.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise StreamvidError(f"{target}: exists already; give the name of a new folder")
    path = resolve(source)
    parts = locate(path)
    with _new_folder(target) as folder:
        if parts.transformer is None:
            written = _convert_parts(
                parts.vae, parts.text_encoder, tokenizer or parts.tokenizer, dtype, folder
            )
        else:
            components = load_components(
                source,
                dtype=dtype,
                which=which,
                lora=lora,
                vae=vae,
                text_encoder=text_encoder,
                tokenizer=tokenizer,
            )
            components.transformer.save_pretrained(folder / "transformer")
            written = ["transformer"]
            if components.vae is not None:
                written += _save_vae(components.vae, folder)
            if isinstance(components.text, UMT5TextEncoder):
                written += _save_text(components.text, folder)
            written += _save_indices(components, written, folder)
    return written


def _convert_parts(vae: Path | None, text: Path | None, words: Any, dtype: Any, folder: Path) -> list[str]:
    written: list[str] = []
    if vae is not None:
        written += _save_vae(load_vae(vae, dtype=dtype), folder)
    if text is not None:
        written += _save_text(load_text_encoder(text, words and resolve(words), dtype=dtype), folder)
    if not written:
        raise StreamvidError("a LoRA alone is no model; convert its base model with --lora FILE")
    return written


def _save_vae(vae: Any, folder: Path) -> list[str]:
    if isinstance(vae, TAEHV):
        from safetensors.torch import save_file

        (folder / "vae").mkdir()
        save_file(
            {k: v.contiguous() for k, v in vae.state_dict().items()}, folder / "vae" / "model.safetensors"
        )
    else:
        vae.save_pretrained(folder / "vae")
    return ["vae"]


def _save_text(text: UMT5TextEncoder, folder: Path) -> list[str]:
    text.model.save_pretrained(folder / "text_encoder")
    text.tokenizer.save_pretrained(folder / "tokenizer")
    return ["text_encoder", "tokenizer"]


def _save_indices(components: Components, written: list[str], folder: Path) -> list[str]:
    """``streamvid.json``, and what diffusers needs to open the folder as a `WanPipeline`."""
    from diffusers import UniPCMultistepScheduler

    config = components.config
    (folder / CONFIG_NAME).write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=config.timestep_shift
    )
    scheduler.save_pretrained(folder / "scheduler")
    classes = {
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", _tokenizer_class(components.text)],
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    }
    present = {*written, "scheduler"} - ({"vae"} if isinstance(components.vae, TAEHV) else set())
    index: dict[str, Any] = {"_class_name": "WanPipeline"}
    index |= {name: pair if name in present else [None, None] for name, pair in classes.items()}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    return ["scheduler", CONFIG_NAME]


def _tokenizer_class(text: Any) -> str:
    """The tokenizer's class as diffusers looks it up: by name in transformers."""
    import transformers

    name = type(getattr(text, "tokenizer", None)).__name__
    return name if hasattr(transformers, name) else "PreTrainedTokenizerFast"


@contextlib.contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside ``target`` that takes its name when the block ends well, and vanishes otherwise."""
    from safetensors import SafetensorError

    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        yield folder
        folder.chmod(0o755)
        if target.is_dir():
            target.rmdir()
        os.replace(folder, target)
    except SafetensorError as error:
        reason = str(error).splitlines()[0]
        raise StreamvidError(
            f"{target}: could not be written ({reason}); nothing was left under that name"
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
