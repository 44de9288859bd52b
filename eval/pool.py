"""Processes that each run one task after another. A process that dies fails its task, not the run.

`concurrent.futures` gives up the whole pool when a process is killed, for example by the out-of-memory killer; a
comparison of many hours must not. Tasks may wait for other tasks. Knows nothing of what the tasks are.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

Task = tuple[str, tuple]
"""A name and the arguments of the function."""


def _serve(connection: Connection, setup: Callable[..., Callable[..., Any]], setup_args: tuple) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    function = setup(*setup_args)
    while True:
        try:
            args = connection.recv()
        except EOFError:
            return
        connection.send(attempt(function, args))


def attempt(function: Callable[..., Any], args: tuple) -> tuple[bool, Any]:
    """(True, result) or (False, "Type: message\\ntraceback"). Memory errors are failures like any other."""
    try:
        return True, function(*args)
    except Exception as error:
        text = " ".join(str(error).split())
        return False, f"{type(error).__name__}: {text}\n{traceback.format_exc()}"


def run_tasks(
    tasks: Sequence[Task],
    setup: Callable[..., Callable[..., Any]],
    setup_args: tuple = (),
    *,
    workers: int = 1,
    after: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, bool, Any]]:
    """Run tasks and yield (name, succeeded, result or error text) as they end.

    Args:
        tasks: in the order in which they should start.
        setup: called once a process, returns the function that a task's arguments go to. Must be importable.
        workers: processes; 1 runs in this process, one task after another.
        after: task name -> name of a task that must have ended first (whatever its outcome). Names that are not
            among the tasks count as ended.
    """
    names = {name for name, _ in tasks}
    waits = {name: first for name, first in (after or {}).items() if first in names and first != name}
    if workers <= 1:
        function = setup(*setup_args)
        ended: set[str] = set()
        todo = list(tasks)
        while todo:
            task = _next(todo, waits, ended)
            assert task is not None, "tasks wait for each other in a circle"
            succeeded, result = attempt(function, task[1])
            ended.add(task[0])
            yield task[0], succeeded, result
        return
    yield from _run_processes(list(tasks), setup, setup_args, min(workers, len(tasks)), waits)


def _next(todo: list[Task], waits: Mapping[str, str], ended: set[str]) -> Task | None:
    for position, (name, _) in enumerate(todo):
        if name not in waits or waits[name] in ended:
            return todo.pop(position)
    return None


class _Worker:
    def __init__(self, setup: Callable[..., Any], setup_args: tuple) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, child = context.Pipe()
        self.process = context.Process(target=_serve, args=(child, setup, setup_args), daemon=True)
        self.process.start()
        child.close()
        self.task: str | None = None

    def give(self, task: Task) -> None:
        self.task = task[0]
        self.connection.send(task[1])

    def take(self) -> tuple[bool, Any] | None:
        """The outcome of the task, or None when the process has died."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return None

    def stop(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.join(5)


def _run_processes(
    todo: list[Task],
    setup: Callable[..., Any],
    setup_args: tuple,
    count: int,
    waits: Mapping[str, str],
) -> Iterator[tuple[str, bool, Any]]:
    idle = [_Worker(setup, setup_args) for _ in range(count)]
    busy: dict[Connection, _Worker] = {}
    ended: set[str] = set()
    try:
        while todo or busy:
            while idle and (task := _next(todo, waits, ended)):
                worker = idle.pop()
                try:
                    worker.give(task)
                except OSError:  # it died before its first task: its end of the pipe is read below
                    worker.task = task[0]
                busy[worker.connection] = worker
            assert busy, "tasks wait for each other in a circle"
            for connection in wait(list(busy)):
                worker = busy.pop(connection)  # type: ignore[arg-type]
                name, outcome = worker.task, worker.take()
                if outcome is None:
                    worker.process.join(5)
                    outcome = False, f"the worker process died (exit code {worker.process.exitcode})"
                    worker.stop()
                    worker = _Worker(setup, setup_args)
                idle.append(worker)
                ended.add(name)  # type: ignore[arg-type]
                yield name, *outcome  # type: ignore[misc]
    finally:
        for worker in [*idle, *busy.values()]:
            worker.stop()
