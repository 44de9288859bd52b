"""Many clips from one file of prompts, resumably. Knows no command line.

A clip is finished when the manifest has a line for it and its file is there; the line is written after the file has got
its final name, so whatever stops a batch, running it again makes exactly what is missing. A line is known by everything
that decides its frames: change a setting and the clip is made again. One batch at a time writes into a folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamvid.clip import ClipRequest, clip_name, write_clip
from streamvid.errors import StreamvidError, raised_by_us
from streamvid.options import StreamOptions

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
        # Not splitlines(): it also cuts at characters that JSON allows inside a text.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise StreamvidError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise StreamvidError(f"{path}: is not a text file in UTF-8") from None
    found = []
    for number, line in enumerate(lines, 1):
        if "\0" in line:
            raise StreamvidError(f"{path}, line {number}: holds a zero byte, so this is not a text file")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            values = _parse(line) if path.suffix.lower() == ".jsonl" else {"prompt": line.strip()}
            if not isinstance(values, dict):
                raise StreamvidError("is not a JSON object")
            found.append((number, ClipRequest.from_dict(values, defaults)))
        except StreamvidError as error:
            raise StreamvidError(f"{path}, line {number}: {error}") from None
    if not found:
        raise StreamvidError(f"{path}: holds no prompt; write one a line, or JSON objects in a .jsonl file")
    return found


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise StreamvidError(f"is not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, thousands of brackets
        raise StreamvidError("is not JSON that can be read") from None


def plan_jobs(requests: list[tuple[int, ClipRequest]], folder: Path, model: dict[str, Any]) -> list[Job]:
    """A file name and a key for every request. ``model`` is what ``load`` is called with."""
    jobs = []
    for number, request in requests:
        seed = request.options.get("seed", 0)
        if seed == -1:
            raise StreamvidError(
                f"line {number}: a batch needs a seed that is the same when it is resumed, not -1"
            )
        if request.options.get("num_frames") is None:
            raise StreamvidError(f"line {number}: a clip of a batch has an end; give num_frames")
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

    Raises:
        StreamvidError: the folder cannot be written or another batch is writing there, or a request does not fit the
            model; then nothing is made, and a folder that was not there before is not there afterwards.
    """
    fresh = not folder.exists()
    try:
        with _open_manifest(folder) as manifest:
            return _run(jobs, folder, model, manifest, workers, on_done)
    except BaseException:
        if fresh:
            _forget(folder)
        raise


def _open_manifest(folder: Path) -> Any:
    """The manifest, held by this process until it is closed, however that happens."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        manifest = open(folder / MANIFEST, "a", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise StreamvidError(
            f"{folder}: clips cannot be written there ({error.strerror}); choose another folder with -o"
        ) from None
    try:
        import fcntl

        fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # not on Windows: there two batches would do the work twice, and nothing worse
        pass
    except BlockingIOError:
        manifest.close()
        raise StreamvidError(
            f"{folder}: another batch is writing there; wait for it or choose another folder with -o"
        ) from None
    except OSError:  # a file system without locks
        pass
    return manifest


def _forget(folder: Path) -> None:
    """Remove a folder that was made for nothing."""
    manifest = folder / MANIFEST
    with contextlib.suppress(OSError):
        if manifest.stat().st_size == 0:
            manifest.unlink()
        folder.rmdir()  # refused when it holds a clip


def _run(
    jobs: list[Job],
    folder: Path,
    model: dict[str, Any],
    manifest: Any,
    workers: int,
    on_done: Callable[[Job, dict[str, Any], bool], None] | None,
) -> list[dict[str, Any]]:
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
        _check(pipe, todo)
        for job in todo:
            yield job, _clip(pipe, job)
        return
    context = multiprocessing.get_context("spawn")
    ranks = context.Queue()
    for rank in range(workers):
        ranks.put(rank)
    import torch

    start = (ranks, model, torch.get_num_threads())
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=start) as pool:
        try:
            pool.submit(_check_in_worker, todo).result()
            futures = {pool.submit(_work, job): job for job in todo}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool:
            raise StreamvidError(
                "a worker process was ended from outside, most likely for want of memory; run the same line again, "
                "with fewer --workers, to make what is missing"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


_PIPE: Any = None
"""The model of a worker process, or the error that loading it raised: an initializer must not raise itself."""


def _start_worker(ranks: Any, model: dict[str, Any], threads: int) -> None:
    import torch

    from streamvid.pipeline import load

    global _PIPE
    torch.set_num_threads(threads)  # as in the parent: the number of threads can change the last bit
    rank = ranks.get()
    if torch.cuda.is_available() and model.get("device") in (None, "cuda"):
        model = model | {"device": f"cuda:{rank % torch.cuda.device_count()}"}
    try:
        _PIPE = load(**model)
    except (StreamvidError, OSError) as error:
        _PIPE = error


def _check_in_worker(jobs: Sequence[Job]) -> None:
    _check(_loaded(), jobs)


def _work(job: Job) -> dict[str, Any]:
    return _clip(_loaded(), job)


def _loaded() -> Any:
    if isinstance(_PIPE, Exception):
        raise _PIPE
    return _PIPE


def _check(pipe: Any, jobs: Sequence[Job]) -> None:
    """Every request against the model, so that the last line's mistake is told before the first clip is made."""
    from streamvid.opening import plan_stream

    for job in jobs:
        with _named(job):
            plan_stream(pipe, StreamOptions.make(job.request.prompt, job.request.options))


def _clip(pipe: Any, job: Job) -> dict[str, Any]:
    with _named(job):
        return write_clip(pipe, job.request, job.path)


@contextlib.contextmanager
def _named(job: Job) -> Iterator[None]:
    """A mistake is told with the line it is in."""
    try:
        yield
    except StreamvidError as error:
        raise type(error)(f"line {job.index}: {error}") from None
    except ValueError as error:
        if not raised_by_us(error):
            raise
        raise StreamvidError(f"line {job.index}: {error}") from None
