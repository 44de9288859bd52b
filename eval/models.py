"""Models as a study names them: a checkpoint, perhaps with settings of its own, and a mark that changes with its files.

``tiny:num_inference_steps=32,guidance_scale=2.0`` is the embedded model with two values of its ``streamvid.json``
replaced, so that a study needs no copy of a model folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from streamvid.errors import StreamvidError

SAMPLE = 1 << 20
"""Bytes read at the beginning and at the end of each file: training changes all of a file's tensors."""
_SETTINGS = re.compile(r":(\w+=[^:]*)$")


def parse_model(text: str) -> tuple[str, dict[str, Any]]:
    """(checkpoint, settings that replace those of its ``streamvid.json``) of a model's text form."""
    found = _SETTINGS.search(text)
    if found is None:
        return text, {}
    settings: dict[str, Any] = {}
    for piece in found[1].split(","):
        key, equals, value = piece.partition("=")
        if not equals:
            raise StreamvidError(f"model {text!r}: {piece!r} is not key=value")
        try:
            settings[key.strip()] = json.loads(value)
        except ValueError:
            settings[key.strip()] = value.strip()
    return text[: found.start()], settings


def load_pipe(text: str, **options: Any) -> Any:
    """The pipeline of a model's text form; `options` go to `streamvid.load`."""
    import streamvid
    from streamvid.config import StreamConfig

    name, settings = parse_model(text)
    pipe = streamvid.load(name, **options)
    if settings:
        pipe.config = StreamConfig.from_dict(pipe.config.to_dict() | settings, f"model {text!r}")
    return pipe


UNREAD = frozenset({".md", ".csv", ".gif", ".jpg", ".mp4", ".png"})
"""Files beside a model that no run reads: its card, logs and pictures."""


@cache
def files_mark(text: str) -> str:
    """Hexadecimal digits that change when the files of a model do; empty for one that is not on this machine."""
    from streamvid.locate import NAMED, resolve

    name, _ = parse_model(text)
    path = resolve(name) if name in NAMED else Path(name).expanduser()
    if not path.exists():
        return ""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if not file.is_file() or file.suffix in UNREAD:
            continue
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path) if path.is_dir() else file.name} {size}\n".encode())
        with file.open("rb") as content:
            digest.update(content.read(SAMPLE))
            content.seek(max(SAMPLE, size - SAMPLE))
            digest.update(content.read(SAMPLE))
    return digest.hexdigest()[:16]
