"""Run a study: every cell once, whatever is interrupted, and one row a cell that says all about itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from streamvid.errors import StreamvidError
from streamvid.eval.grid import Cell, Study
from streamvid.eval.judging import judge_clip
from streamvid.eval.machine import machine_card, now, versions
from streamvid.eval.metrics import measure
from streamvid.eval.pool import run_tasks
from streamvid.eval.render import Rendered
from streamvid.eval.store import Store, plain
from streamvid.eval.video import read_video, write_lossless

RENDERER = "streamvid.eval.render:StreamRenderer"
Row = dict[str, Any]


@dataclass(frozen=True)
class Progress:
    """Where a run stands, after each cell."""

    total: int
    kept: int
    """Cells that an earlier run had made."""
    done: int
    """Cells made by this run, failed ones included."""
    failed: int
    row: Row | None
    """The row just made; None at the start."""


def run_study(
    study: Study,
    folder: Path,
    *,
    workers: int = 1,
    retry_failed: bool = False,
    renderer: str = RENDERER,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> list[Row]:
    """Make the rows of a study that are not there yet.

    Args:
        folder: results; run again with the same folder to go on after an interrupt.
        workers: processes. Times are then taken on a shared machine, and every row says so.
        retry_failed: make failed cells again; otherwise they stay failed.
        renderer: ``module:callable``; called once a process without arguments, it returns a function from a Cell
            to `Rendered`.
        watch: called at the start and after each cell.

    Returns:
        the rows of this study's cells, in the study's order, failed ones included.

    Raises:
        StreamvidError: workers under 1, a damaged results file.
    """
    if workers < 1:
        raise StreamvidError(f"workers must be at least 1, got {workers}")
    store = Store(folder)
    store.tidy()
    cells = {study.key(cell): cell for cell in study.cells()}
    rows = {row["key"]: row for row in store.rows()}
    todo = [key for key in cells if not _is_made(rows.get(key), store, retry_failed)]
    kept, done, failed = len(cells) - len(todo), 0, 0
    watch(Progress(len(cells), kept, 0, 0, None))
    references = {key: _reference_key(study, cell) for key, cell in cells.items()}
    tasks = [(key, (key, cells[key], references[key])) for key in todo]
    waits = {key: first for key, first in references.items() if first is not None}
    setup = (renderer, study, folder, workers)
    for key, succeeded, result in run_tasks(tasks, make_runner, setup, workers=workers, after=waits):
        row = result if succeeded else _failed_row(study, key, cells[key], str(result))
        store.append(row)
        rows[key] = plain(row)
        done, failed = done + 1, failed + (not succeeded)
        watch(Progress(len(cells), kept, done, failed, rows[key]))
    labels = {key: _naming(study, cell) for key, cell in cells.items()}
    return [rows[key] | labels[key] for key in cells if key in rows]


def _is_made(row: Row | None, store: Store, retry_failed: bool) -> bool:
    if row is None:
        return False
    if row["status"] == "failed":
        return not retry_failed
    return store.clip_path(row["key"]).exists()


def _reference_key(study: Study, cell: Cell) -> str | None:
    reference = study.reference_of(cell.variant)
    if reference is None:
        return None
    shared = {
        name: getattr(cell, name) for name in ("prompt", "seed", "num_frames", "height", "width", "probe")
    }
    return study.key(Cell(variant=reference, **shared))


def _naming(study: Study, cell: Cell) -> Row:
    """What a row is called in this study; not part of its key, so it is set anew by each run."""
    single = tuple(
        axis for axis in cell.variant.settings() if len({_at(v, axis) for v in study.variants}) == 1
    )
    reference = study.reference_of(cell.variant)
    return {
        "label": cell.variant.describe(hide=single),
        "is_reference": reference is not None and reference == cell.variant,
        "listed": cell.variant in study.variants,
    }


def _at(variant: Any, axis: str) -> str:
    return getattr(variant, axis)


def _base_row(study: Study, key: str, cell: Cell) -> Row:
    return {
        "key": key,
        "variant": cell.variant.settings(),
        "prompt": cell.prompt,
        "seed": cell.seed,
        "num_frames": cell.num_frames,
        "segment_frames": study.segment_frames,
        "machine": machine_card(),
        "versions": versions(),
        "when": now(),
    }


def _failed_row(study: Study, key: str, cell: Cell, error: str) -> Row:
    message, _, trace = error.partition("\n")
    return _base_row(study, key, cell) | {"status": "failed", "error": message, "traceback": trace}


def make_runner(renderer: str, study: Study, folder: Path, workers: int) -> Callable[..., Row]:
    """The function that a worker process runs: (key, cell, key of its reference) -> row."""
    import cv2
    import torch

    if workers > 1:
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cpus // workers))
        cv2.setNumThreads(max(1, cpus // workers))
    module, _, name = renderer.partition(":")
    render = getattr(import_module(module), name)()
    store = Store(folder)

    def run(key: str, cell: Cell, reference: str | None) -> Row:
        began = time.perf_counter()
        rendered = render(cell)
        rendered_at = time.perf_counter()
        write_lossless(store.clip_path(key), rendered.frames, rendered.fps)
        row = _base_row(study, key, cell) | rendered.facts() | {"status": "done", "workers": workers}
        other = None
        if reference is not None and reference != key:
            path = store.clip_path(reference)
            if path.exists():
                other = read_video(path)[0]
            else:
                row["warning"] = "no fidelity: the reference failed"
        row |= measured(study, rendered, cell.prompt, other) | {"reference": reference}
        row["seconds"] = {"render": rendered_at - began, "measure": time.perf_counter() - rendered_at}
        return plain(row)

    return run


def measured(study: Study, rendered: Rendered, prompt: str, reference: np.ndarray | None) -> Row:
    """Figures, curves and their times of a clip: `metrics`, `curves`, `curve_seconds`."""
    result = measure(
        rendered.frames,
        fps=rendered.fps,
        reference=reference,
        chunk_starts=rendered.chunk_starts,
        segment_frames=study.segment_frames,
        groups=study.metrics,
    )
    if study.judge:
        values, curves = judge_clip(rendered.frames, prompt, study.segment_frames)
        result.values |= values
        result.curves |= curves
    return {
        "metrics": result.values | rendered.costs,
        "curves": result.curves,
        "curve_seconds": result.seconds,
    }


def summary(rows: Sequence[Row]) -> dict[str, int]:
    """How many rows were made and how many failed."""
    failed = sum(row["status"] == "failed" for row in rows)
    return {"rows": len(rows), "done": len(rows) - failed, "failed": failed}
