"""One HTML page from the rows of a comparison: nothing outside it is needed, now or later.

Data, style, script and clips are inside the page. Knows nothing of how rows were made.
"""

from __future__ import annotations

import base64
import html
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from streamvid.errors import StreamvidError
from streamvid.eval.aggregate import curves, memory_pictures, table, variant_id
from streamvid.eval.grid import Study
from streamvid.eval.machine import card_line, counted
from streamvid.eval.metrics import METRICS
from streamvid.eval.orderings import check_orderings
from streamvid.eval.store import Store, plain
from streamvid.eval.video import read_video, small_mp4

HERE = Path(__file__).parent
QUALITY = ("judge", "judge_last", "psnr", "ssim", "sharpness")
"""Figures that may lead the page, the first that is there does."""
COSTS = ("kv_bytes", "chunk_ms", "kv_peak_bytes", "compute_fraction")
SUMMARY = (
    *("judge", "judge_right", "judge_last", "judge_drift", "psnr", "kv_bytes", "kv_peak_bytes", "chunk_ms"),
    *("ssim", "compute_fraction", "sharpness", "colour_drift", "dynamic_degree", "static_flicker"),
    *("seam_change", "denoise_ms", "fps_steady"),
)
Row = Mapping[str, Any]


def build_report(
    study: Study,
    rows: Sequence[Row],
    folder: Path,
    *,
    clips: int = 3,
    max_variants: int = 24,
    long_side: int | None = None,
) -> str:
    """The page as text.

    Args:
        study: for its title, its orderings and which cost comes first.
        rows: rows of `compare.run_study`, and of `importing.import_folder`.
        folder: where the kept clips are.
        clips: how many prompts are shown as clips; 0 leaves them out.
        max_variants: clips side by side, at most.
        long_side: largest side of a clip in the page, pixels; None: 256, or 128 for over twelve variants.

    Raises:
        StreamvidError: no rows.
    """
    if not rows:
        raise StreamvidError("there are no rows to report; run the comparison first")
    made = [row for row in rows if row["status"] == "done"]
    variants = table(rows)
    if long_side is None:
        long_side = 256 if len(variants) <= 12 else 128
    data = {
        "notes": study.notes,
        "chips": _chips(variants, rows, made),
        "metrics": {name: asdict(metric) for name, metric in METRICS.items()},
        "variants": variants,
        "summary": SUMMARY,
        "quality": QUALITY,
        "costs": [study.axis_x, *(name for name in COSTS if name != study.axis_x)],
        "curves": curves(rows),
        "clips": _clips(rows, Store(folder), clips, max_variants, long_side),
        "pictures": memory_pictures(rows),
        "orderings": [result.to_dict() for result in check_orderings(made, study.orderings)],
        "failures": [
            {key: row.get(key) for key in ("label", "prompt", "seed", "error", "traceback")}
            for row in rows
            if row["status"] != "done"
        ],
        "card": _card(study, made or rows),
        "footer": "Made by streamvid compare. No figure on this page is a VBench score.",
    }
    return _fill(study.title, data)


def write_report(
    study: Study, rows: Sequence[Row], folder: Path, *, name: str = "report.html", **options: Any
) -> Path:
    """Write the page in `folder` (complete or not at all) and return its path. Options: `build_report`."""
    path = folder / name
    temporary = path.with_suffix(".tmp")
    temporary.write_text(build_report(study, rows, folder, **options), encoding="utf-8")
    os.replace(temporary, path)
    return path


def _fill(title: str, data: Mapping[str, Any]) -> str:
    page = (HERE / "report.html").read_text(encoding="utf-8")
    script = (HERE / "report_clips.js").read_text(encoding="utf-8"), (HERE / "report.js").read_text("utf-8")
    # "<" inside the data could end the script element or begin a comment; in JSON it may be written as an escape.
    text = json.dumps(plain(data), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "@@CSS@@": (HERE / "report.css").read_text(encoding="utf-8"),
        "@@JS@@": script[1].replace("/* ---- start ---- */", script[0] + "\n/* ---- start ---- */"),
        "@@TITLE@@": html.escape(title),
        "@@DATA@@": text,
    }
    for mark, content in parts.items():  # the data comes last: nothing in it is taken for a mark
        page = page.replace(mark, content)
    return page


def _chips(variants: Sequence[Row], rows: Sequence[Row], made: Sequence[Row]) -> list[tuple[str, bool]]:
    prompts = {row["prompt"] for row in rows}
    seeds = {row["seed"] for row in rows}
    failed = len(rows) - len(made)
    chips = [
        (counted(len(variants), "variant"), False),
        (f"{counted(len(prompts), 'prompt')} × {counted(len(seeds), 'seed')}", False),
        (f"{max((row['num_frames'] for row in rows), default=0)} frames a clip", False),
        (counted(len(made), "clip"), False),
    ]
    return chips + ([(f"{failed} failed", True)] if failed else [])


def _card(study: Study, rows: Sequence[Row]) -> list[tuple[str, str]]:
    machines = dict.fromkeys(card_line(row["machine"]) for row in rows)
    software = dict.fromkeys(
        ", ".join(f"{name} {number}" for name, number in row["versions"].items()) for row in rows
    )
    workers = {row.get("workers", 1) for row in rows}
    shared = max(workers) > 1
    reference = ", ".join(f"{axis} = {value}" for axis, value in study.reference.items())
    return [
        ("Machine", " | ".join(machines)),
        ("Software", " | ".join(software)),
        (
            "Noise",
            "clips of one prompt and seed share their noise: it is a function of seed, chunk and step, "
            "so a skipped step shifts nothing",
        ),
        ("Reference", f"the same settings with {reference}" if reference else "none: no fidelity is given"),
        (
            "Times",
            "from the stream's own clock around denoising, context pass and decoder; the first three chunks are "
            "left out of medians; loading and compiling are not in it. "
            + (
                f"Up to {max(workers)} processes shared the machine: compare times with care."
                if shared
                else "One process ran at a time."
            ),
        ),
        ("Intervals", "95 %, Student, over prompts and seeds; differences from the reference are paired"),
        ("Segments", f"{study.segment_frames} frames each"),
        ("When", " to ".join(dict.fromkeys((min(r["when"] for r in rows), max(r["when"] for r in rows))))),
    ]


def _clips(
    rows: Sequence[Row], store: Store, count: int, max_variants: int, long_side: int
) -> list[dict[str, Any]]:
    """The first clips by prompt and seed, each variant's beside the others'; prompts first, then seeds."""
    numbers: dict[tuple, int] = {}
    for row in rows:
        if row.get("listed", True):
            numbers.setdefault(variant_id(row), len(numbers))
    sets: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        listed = row["status"] == "done" and variant_id(row) in numbers
        if listed and store.clip_path(row["key"]).exists():
            sets.setdefault((row["seed"], row["prompt"]), []).append(row)
    seeds = list(dict.fromkeys(seed for seed, _ in sets))
    chosen = sorted(sets, key=lambda place: (seeds.index(place[0]), -len(sets[place])))[:count]
    return [
        {
            "prompt": prompt,
            "seed": seed,
            "fps": max(row.get("fps", 16.0) for row in sets[seed, prompt]),
            "items": [
                _clip(row, store, numbers[variant_id(row)], long_side)
                for row in sets[seed, prompt][:max_variants]
            ],
        }
        for seed, prompt in chosen
    ]


def _clip(row: Row, store: Store, number: int, long_side: int) -> dict[str, Any]:
    frames, fps = read_video(store.clip_path(row["key"]))
    lead = next((name for name in QUALITY if name in row["metrics"]), None)
    return {
        "variant": number,
        "seconds": len(frames) / fps,
        "score": f"{lead.replace('_', ' ')} {row['metrics'][lead]:.2f}" if lead else "",
        "mp4": base64.b64encode(small_mp4(frames, fps, long_side)).decode(),
    }
