"""Many clips from one file of prompts, resumably. Knows no command line.

A clip is finished when the manifest has a line for it and its file is there; the line is written after the file has got
its final name, so whatever stops a batch, running it again makes exactly what is missing. A line is known by everything
that decides its frames: change a setting and the clip is made again.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamvid.clip import ClipRequest, clip_name, write_clip
from streamvid.errors import StreamvidError

MANIFEST = "manifest.jsonl"


@dataclass(frozen=True)
class Job:
    """One clip of a batch."""

    index: int
    """Line of the prompts file, from 1."""
    request: ClipRequest
    path: Path
    key: str
    """Digest of the file name, the request and the model."""


def read_requests(path: str | os.PathLike[str], defaults: ClipRequest) -> list[tuple[int, ClipRequest]]:
    """Requests with their line numbers, from a text file (a prompt a line) or JSONL (an object a line).

    Blank lines and lines that begin with ``#`` are skipped. Every line is checked before anything is made.
    Raises StreamvidError naming the line.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise StreamvidError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise StreamvidError(f"{path}: is not a text file in UTF-8") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            values = json.loads(line) if path.suffix == ".jsonl" else {"prompt": line.strip()}
            if not isinstance(values, dict):
                raise StreamvidError("is not a JSON object")
            found.append((number, ClipRequest.from_dict(values, defaults)))
        except (StreamvidError, json.JSONDecodeError) as error:
            raise StreamvidError(f"{path}, line {number}: {error}") from None
    if not found:
        raise StreamvidError(f"{path}: holds no prompt; write one a line, or JSON objects in a .jsonl file")
    return found


def plan_jobs(requests: list[tuple[int, ClipRequest]], folder: Path, model: dict[str, Any]) -> list[Job]:
    """A file name and a key for every request. ``model`` is what ``load`` is called with."""
    jobs = []
    for number, request in requests:
        seed = request.options.get("seed", 0)
        if seed == -1:
            raise StreamvidError(
                f"line {number}: a batch needs a seed that is the same when it is resumed, not -1"
            )
        name = clip_name(request.prompt, seed, number)
        text = json.dumps([name, asdict(request), model], sort_keys=True, default=str)
        jobs.append(Job(number, request, folder / name, hashlib.sha256(text.encode()).hexdigest()[:16]))
    return jobs


def finished(folder: Path) -> dict[str, dict[str, Any]]:
    """Manifest lines by key. A line cut short by a kill is as if it had not been written."""
    manifest = folder / MANIFEST
    lines = {}
    for line in manifest.read_text().splitlines() if manifest.is_file() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        lines[entry["key"]] = entry
    return lines


def run_batch(
    jobs: list[Job],
    folder: Path,
    model: dict[str, Any],
    *,
    workers: int = 1,
    on_done: Callable[[Job, dict[str, Any], bool], None] | None = None,
) -> list[dict[str, Any]]:
    """Make what is missing; returns the manifest lines of all jobs, in their order.

    Args:
        jobs: from ``plan_jobs``.
        folder: where the manifest is kept.
        model: keyword arguments of ``streamvid.load``.
        workers: processes, each with its own copy of the model (on CUDA spread over the devices). A clip is the same
            whichever process makes it.
        on_done: called after each clip with its manifest line, and whether it had been there already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = finished(folder)
    lines: dict[str, dict[str, Any]] = {}
    todo = []
    for job in jobs:
        entry = known.get(job.key)
        if entry is not None and (folder / entry["file"]).is_file():
            lines[job.key] = entry
            if on_done is not None:
                on_done(job, entry, True)
        else:
            todo.append(job)
    with open(folder / MANIFEST, "a", encoding="utf-8") as manifest:
        if manifest.tell():
            _end_line(folder / MANIFEST, manifest)
        for job, result in _make(todo, model, workers):
            entry = {"key": job.key, "index": job.index, "file": job.path.name, **result}
            manifest.write(json.dumps(entry) + "\n")
            manifest.flush()
            lines[job.key] = entry
            if on_done is not None:
                on_done(job, entry, False)
    return [lines[job.key] for job in jobs]


def _end_line(path: Path, manifest: Any) -> None:
    """A kill may have left half a line; the next one must not be glued to it."""
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            manifest.write("\n")


def _make(todo: list[Job], model: dict[str, Any], workers: int) -> Iterator[tuple[Job, dict[str, Any]]]:
    if not todo:
        return
    if workers == 1:
        from streamvid.pipeline import load

        pipe = load(**model)
        for job in todo:
            yield job, write_clip(pipe, job.request, job.path)
        return
    context = multiprocessing.get_context("spawn")
    ranks = context.Queue()
    for rank in range(workers):
        ranks.put(rank)
    import torch

    start = (ranks, model, torch.get_num_threads())
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=start) as pool:
        futures = {pool.submit(_work, job): job for job in todo}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


_PIPE: Any = None
"""The model of a worker process."""


def _start_worker(ranks: Any, model: dict[str, Any], threads: int) -> None:
    import torch

    from streamvid.pipeline import load

    global _PIPE
    torch.set_num_threads(threads)  # as in the parent: the number of threads can change the last bit
    rank = ranks.get()
    if torch.cuda.is_available() and model.get("device") in (None, "cuda"):
        model = model | {"device": f"cuda:{rank % torch.cuda.device_count()}"}
    _PIPE = load(**model)


def _work(job: Job) -> dict[str, Any]:
    return write_clip(_PIPE, job.request, job.path)
