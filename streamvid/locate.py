"""Where the parts of a model are: names, folders of several layouts and repositories to paths.

Reads only directory listings and, to tell a lone file's kind, tensor names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from streamvid.checkpoint_formats import WEIGHT_SUFFIXES, read_weights
from streamvid.checkpoint_models import identify
from streamvid.config import CONFIG_NAME
from streamvid.errors import CheckpointError
from streamvid.hub import fetch, looks_like_repository
from streamvid.memory.spec import nearest

NAMED: dict[str, tuple[str, str]] = {"tiny": ("streamvid.tiny", "weights")}
"""Models that ship with the package: name to (package, folder in it)."""

_NO_VAE = "has no autoencoder; give one with vae= (--vae), a Wan VAE or a TAEHV file or folder"
_NO_TEXT = "has no text encoder; give one with text_encoder= (--text-encoder), a UMT5 file or folder"


@dataclass
class Source:
    """Paths of a model's parts; ``missing`` says of each absent one why and what to do."""

    transformer: Path | None = None
    vae: Path | None = None
    text_encoder: Path | None = None
    tokenizer: Path | None = None
    config: Path | None = None
    """``streamvid.json``."""
    layout: str = ""
    """The layout in words, for ``streamvid info``."""
    missing: dict[str, str] = field(default_factory=dict)


def resolve(path_or_name: str | Path) -> Path:
    """The path that a name, a path or a repository stands for.

    A name wins over a folder of the same name here, which is reached as ``./name``.

    Raises:
        CheckpointError: none of these.
    """
    text = str(path_or_name)
    if not text:
        raise CheckpointError(
            f"the model's name is empty (allowed: a path, owner/name, or {', '.join(NAMED)})"
        )
    path = Path(path_or_name).expanduser()
    if path.exists() and text not in NAMED:
        return path
    if text in NAMED:
        package, folder = NAMED[text]
        path = Path(str(files(package))) / folder
        if not path.is_dir():
            raise CheckpointError(
                f"the embedded model {text!r} is not in this installation; install streamvid anew"
            )
        return path
    if (
        looks_like_repository(text)
        and path.suffix not in WEIGHT_SUFFIXES
        or text.count("/") >= 2
        and _is_remote(text)
    ):
        return fetch(text)
    raise CheckpointError(
        f"{text}: no such file, folder or model{nearest(text, NAMED)} (give a weight file, a model folder, a Hugging "
        f"Face repository as owner/name, or a name: {', '.join(sorted(NAMED))})"
    )


def _is_remote(text: str) -> bool:
    """``owner/name/file.pt`` with no folder of that owner here."""
    return looks_like_repository(text) and not Path(text.split("/")[0]).exists()


def locate(path: Path) -> Source:
    """The parts in ``path``. Raises CheckpointError when it holds nothing to load, or a choice."""
    source = _locate_folder(path) if path.is_dir() else _locate_file(path)
    source.missing.setdefault("transformer", "has no video transformer; give a model's file or folder")
    source.missing.setdefault("vae", _NO_VAE)
    source.missing.setdefault("text_encoder", _NO_TEXT)
    return source


def tokenizer_beside(path: Path) -> Path | None:
    """The tokenizer that belongs to a text encoder's file or folder, by the layouts' conventions."""
    folder = path if path.is_dir() else path.parent
    for candidate in (
        folder / "tokenizer",
        folder.parent / "tokenizer",
        folder / "google" / "umt5-xxl",
        folder,
    ):
        if any(
            (candidate / name).is_file()
            for name in ("tokenizer.json", "spiece.model", "tokenizer_config.json")
        ):
            return candidate
    return None


def _locate_file(path: Path) -> Source:
    contents, _ = identify(read_weights(path))
    config = path.parent / CONFIG_NAME
    source = Source(config=config if config.is_file() else None, layout=f"one file, {contents.layout} names")
    if contents.kind == "transformer":
        source.transformer = path
    elif contents.kind in ("vae", "taehv"):
        source.vae = path
    elif contents.kind == "text_encoder":
        source.text_encoder, source.tokenizer = path, tokenizer_beside(path)
    else:
        source.missing["transformer"] = "is a LoRA; give its base model, and this file with lora= (--lora)"
    return source


def _locate_folder(folder: Path) -> Source:
    if not any(folder.iterdir()):
        raise CheckpointError(f"{folder}: an empty folder; give a model's file or folder")
    config = folder / CONFIG_NAME
    found = {name: folder / name for name in ("transformer", "vae", "text_encoder", "tokenizer")}
    parts: dict[str, Any] = {name: path for name, path in found.items() if path.is_dir()}
    if "transformer" in parts or (folder / "model_index.json").is_file():
        source = Source(**parts, layout="diffusers folder")
    else:
        source = _locate_original(folder)
    source.config = config if config.is_file() else None
    return source


def _locate_original(folder: Path) -> Source:
    """The original Wan layout: parts as files in one folder; or a single part's folder."""
    vae = sorted(folder.glob("*VAE*.pth")) or sorted(folder.glob("*VAE*.safetensors"))
    text = sorted(folder.glob("models_t5*.pth")) or sorted(folder.glob("models_t5*.safetensors"))
    tokenizer = folder / "google" / "umt5-xxl"
    if not vae and not text:
        return _locate_file(folder)
    transformer = sorted(folder.glob("diffusion_pytorch_model*"))
    return Source(
        transformer=folder if transformer else None,
        vae=vae[0] if vae else None,
        text_encoder=text[0] if text else None,
        tokenizer=tokenizer if tokenizer.is_dir() else None,
        layout="original Wan folder",
    )
