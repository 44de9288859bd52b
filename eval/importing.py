"""Clips of other projects: folders of videos become rows of the same report.

They are measured and judged like ours. There is no fidelity, since their noise is not ours, and no cost.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamvid.errors import StreamvidError
from streamvid.eval.compare import Row, measured
from streamvid.eval.grid import AXES, SCHEMA, Study
from streamvid.eval.machine import machine_card, now, versions
from streamvid.eval.render import Rendered
from streamvid.eval.store import Store, plain
from streamvid.eval.video import find_videos, read_video, write_lossless

_SEED = re.compile(r"(?:seed[-_ ]?|[-_])(\d{1,19})$", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """A label and its folder, as `--import LABEL=FOLDER` gives them."""

    label: str
    folder: Path

    @classmethod
    def parse(cls, text: str) -> Source:
        """Raises StreamvidError when it is not LABEL=FOLDER or the folder has no videos."""
        label, equals, folder = text.partition("=")
        if not equals or not label.strip() or not folder:
            raise StreamvidError(f"--import takes LABEL=FOLDER, got {text!r}")
        find_videos(Path(folder))
        return cls(label.strip(), Path(folder))


def prompt_and_seed(path: Path, position: int, prompts: Iterable[str], listed: list[str]) -> tuple[str, int]:
    """Which prompt and seed a video was made from.

    In this order: a side-car `NAME.json` with `prompt` and perhaps `seed`; a side-car `NAME.txt` with the
    prompt; the line of the folder's `prompts.txt` at the video's position; a prompt of the study with which the
    name begins (as Self-Forcing names files, cut at 100 characters); otherwise the name. The seed is a number at
    the end of the name (`-0`, `_seed42`), else 0.
    """
    found = _SEED.search(path.stem)
    seed = int(found[1]) if found else 0
    sidecar = path.with_suffix(".json")
    if sidecar.is_file():
        try:
            values = json.loads(sidecar.read_text(encoding="utf-8"))
            return str(values["prompt"]), int(values.get("seed", seed))
        except (ValueError, KeyError, TypeError):
            raise StreamvidError(f"{sidecar}: must be a JSON object with a prompt") from None
    if path.with_suffix(".txt").is_file():
        return path.with_suffix(".txt").read_text(encoding="utf-8").strip(), seed
    if position < len(listed):
        return listed[position], seed
    stem = path.stem[: found.start()] if found else path.stem
    words = _plain_words(stem)
    for prompt in prompts:
        start = _plain_words(prompt)[: len(words)]
        if words and (start == words or words.startswith(_plain_words(prompt)[:100])):
            return prompt, seed
    return stem, seed


def _plain_words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower().replace("_", " ")))


def import_folder(study: Study, source: Source, folder: Path) -> list[Row]:
    """Measure the videos of a folder and keep their rows beside the others; what is known is not measured again.

    Args:
        folder: results, as for `run_study`.
    """
    store = Store(folder)
    known = {row["key"]: row for row in store.rows()}
    list_file = source.folder / "prompts.txt"
    listed = []
    if list_file.is_file():
        listed = [line.strip() for line in list_file.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = []
    for position, path in enumerate(find_videos(source.folder)):
        prompt, seed = prompt_and_seed(path, position, study.prompts, listed)
        key = _key(study, source, path, prompt, seed)
        if key not in known or not store.clip_path(key).exists():
            row = _row(study, source, path, prompt, seed, key, store)
            store.append(row)
            known[key] = plain(row)
        rows.append(known[key] | {"label": source.label, "listed": True, "is_reference": False})
    return rows


def _key(study: Study, source: Source, path: Path, prompt: str, seed: int) -> str:
    measure = [study.num_frames, study.segment_frames, sorted(study.metrics), study.judge]
    content: list[Any] = [SCHEMA, "import", source.label, prompt, seed, measure]
    digest = hashlib.sha256(json.dumps(content).encode())
    digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _row(
    study: Study, source: Source, path: Path, prompt: str, seed: int, key: str, store: Store
) -> dict[str, Any]:
    frames, fps = read_video(path, study.num_frames)
    rendered = Rendered(frames=frames, fps=fps)
    write_lossless(store.clip_path(key), frames, fps)
    return {
        "key": key,
        "status": "done",
        "imported": source.label,
        "variant": dict.fromkeys(AXES, "") | {"model": source.label},
        "prompt": prompt,
        "seed": seed,
        "num_frames": len(frames),
        "segment_frames": study.segment_frames,
        "settings": {"imported": path.name},
        "fps": fps,
        "reference": None,
        "machine": machine_card(),
        "versions": versions(),
        "when": now(),
        **measured(study, rendered, prompt, None),
    }
