"""The ``streamvid`` command: one table of commands, each in its own file, imported only when it is run.

``streamvid --help`` therefore imports no torch. A mistake of the user (an error raised by our own code, a file that
cannot be written) prints one line and exits with 2; ``--debug``, anywhere on the line, shows the traceback instead.

To add a command: write ``streamvid/commands/<file>.py`` with ``register(app)``, which adds one command of the
table's name to the typer app it is given, and add one line to ``COMMANDS``. Knows nothing of what commands do.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer

from streamvid import __version__
from streamvid.errors import StreamvidError, raised_by_us
from streamvid.memory.spec import nearest

COMMANDS: dict[str, tuple[str, str]] = {
    "generate": ("generate", "Make a video from a prompt, written as its frames arrive."),
    "batch": ("batch", "Make a clip for every prompt of a file; run it again to make what is missing."),
    "app": ("app", "The interactive demo in a browser: a live stream and everything it can do."),
    "info": ("info", "What a checkpoint is: geometry, size, memory by window, and what it lacks to run."),
    "convert": ("convert", "Write any checkpoint as one folder: diffusers' layout and streamvid.json."),
    "verify": ("verify", "Replay recorded cases and print the largest deviation of every tensor."),
    "calibrate": ("calibrate", "Measure a model's steps once, for step caches."),
    "bench stepcaches": ("bench_stepcaches", "What each step cache saves, timed side by side."),
    "profile-heads": ("profile_heads", "Label the attention heads of a model once, for memory policies."),
    "bench cpu-core": ("bench_cpu_core", "Seconds a chunk on a CPU, against plain diffusers blocks."),
    "bench codecs": ("bench_codecs", "Error, bytes and time of every KV codec on a model's keys and values."),
    "draft": ("draft", "A clip whose chunks a cheap model drafts and another answers for."),
    "doctor": ("doctor", "What is usable on this machine, why not, and the one command that adds it."),
    "kernels check": (
        "kernels_check",
        "Compile the GPU kernels without a GPU and hold them to their limits.",
    ),
    "kernels tune": ("kernels_tune", "Measure tile sizes on this GPU, once, and keep the fastest."),
    "bench kernels": (
        "bench_kernels",
        "Attention: grouped and block-sparse against dense, with the floor on a GPU.",
    ),
    "bench gpu-forward": (
        "bench_gpu_forward",
        "Whole forward of the 1.3B geometry with random weights, on a GPU.",
    ),
    "bench gpu-stream": (
        "bench_gpu_stream",
        "Whole streams of the 1.3B geometry with random weights, by decoder, eager and compiled.",
    ),
    "train-tiny": ("train_tiny", "Train the embedded model from nothing; goes on after a kill."),
    "eval tiny": ("eval_tiny", "Judge the embedded model on held-out prompts, beside its ceilings."),
    "compare": (
        "compare",
        "Settings side by side on the same prompts and noise: rows, tables, one report page.",
    ),
    "bench stream": (
        "bench_stream",
        "First frame, chunk period, control latency, memory, against the floor.",
    ),
}
"""Words typed -> (file in ``streamvid/commands``, one line of help). Two words make a group: ``bench cpu-core``."""

GROUPS: dict[str, str] = {
    "bench": "Measure; every figure prints the card of what was inside the clock.",
    "eval": "Judge quality: the embedded model's own measure.",
    "kernels": "Kernels: which are usable, and ahead-of-time compile checks.",
}
"""One line of help for each group that ``COMMANDS`` uses."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, 1 for a fault of ours, 2 for a mistake of the user's."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    debug = "--debug" in words[:end]
    words = [word for word in words[:end] if word != "--debug"] + words[end:]
    problem = _unknown_command(words)
    if problem:
        typer.echo(problem, err=True)
        return 2
    try:
        code = build_app(words)(args=words, prog_name="streamvid", standalone_mode=False)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if hasattr(
            error, "format_message"
        ):  # of click, or of typer's copy of it: the words do not fit the options
            return _usage(error, words)
        if _stopped:  # an import that is interrupted may tell of anything but the interrupt
            return 130
        message = None if debug else user_message(error)
        if message is None:
            traceback.print_exc()
            return 2 if user_message(error) is not None else 1
        typer.echo(f"error: {message}", err=True)
        return 2
    return code if isinstance(code, int) else 0


def _usage(error: Any, words: Sequence[str]) -> int:
    """Words that do not fit a command's options, as one line that ends with where to read about them."""
    message = " ".join(error.format_message().split()).rstrip(".")
    if message:  # empty when a group was called alone: its help has been shown
        command = " ".join(["streamvid", _named_command(words) or words[0]])
        typer.echo(f"error: {_one_line(message)}; see {command} --help", err=True)
    return 2


def build_app(words: Sequence[str]) -> typer.Typer:
    """The typer app in which the command named by ``words`` is real and all others are only their line of help."""
    app = typer.Typer(
        help="An endless, real-time stream of frames from an autoregressive video diffusion model.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(_root)
    named = _named_command(words)
    groups: dict[str, typer.Typer] = {}
    for name, (module, text) in COMMANDS.items():
        parent = app
        group, _, leaf = name.partition(" ")
        if leaf:
            if group not in groups:
                groups[group] = typer.Typer(help=GROUPS[group], no_args_is_help=True)
                groups[group].callback()(_empty)
                app.add_typer(groups[group], name=group)
            parent = groups[group]
        if name == named:
            import_module(f"streamvid.commands.{module}").register(parent)
        else:
            parent.command(leaf or group, help=text)(_empty)
    return app


def user_message(error: BaseException) -> str | None:
    """The one line for an error that the user can mend, or None when it is a fault of ours."""
    if isinstance(error, StreamvidError):
        return _one_line(error)
    if isinstance(error, ValueError) and raised_by_us(error):
        return _one_line(error)
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}; nothing was left under the final name"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return (
            f"{_one_line(error).split('. ')[0]}; choose a smaller size, a shorter memory or a codec (--codec)"
        )
    return None


def _one_line(error: BaseException | str) -> str:
    """Line breaks become spaces, and what would steer the terminal is spelled out."""
    text = " ".join(str(error).split())
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def _named_command(words: Sequence[str]) -> str | None:
    plain = [word for word in words if not word.startswith("-")]
    for length in (2, 1):
        name = " ".join(plain[:length])
        if name in COMMANDS:
            return name
    return None


def _unknown_command(words: Sequence[str]) -> str | None:
    """A message naming the nearest command, when the first word is none."""
    first = next((word for word in words if not word.startswith("-")), None)
    known = {name.split()[0] for name in COMMANDS}
    if first is None or first in known:
        return None
    return f"error: no command {first!r}{nearest(first, known)} (allowed: {', '.join(sorted(known))})"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", is_eager=True, callback=_print_version
    ),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
) -> None:
    """Options that every command shares; ``main`` has already taken ``--debug`` out of the words."""


def _empty() -> None:
    """Stands in the help for a command that this run does not need."""


_stopped: list[int] = []
"""Signals that asked this process to stop."""


def _interrupt(signum: int, frame: object) -> None:
    _stopped.append(signum)
    raise KeyboardInterrupt


def run() -> None:
    """Entry point of the console script."""
    signal.signal(signal.SIGINT, _interrupt)
    sys.exit(main())


if __name__ == "__main__":
    run()
