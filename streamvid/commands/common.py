"""Options and output that several commands share: opening a model, what a stream runs with, progress.

Imports no torch until a command runs.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from streamvid.clip import Progress
    from streamvid.pipeline import StreamPipeline
    from streamvid.stream import VideoStream

MODEL, VIDEO, PLUGINS, MACHINE = "Model", "Video", "Memory and speed", "Machine"

Model = Annotated[
    str, typer.Option("--model", "-m", help="Name, file, folder or owner/name.", rich_help_panel=MODEL)
]
Vae = Annotated[str | None, typer.Option(help="Autoencoder file or folder.", rich_help_panel=MODEL)]
TextEncoder = Annotated[str | None, typer.Option(help="UMT5 file or folder.", rich_help_panel=MODEL)]
Lora = Annotated[
    list[str] | None, typer.Option(help="PATH or PATH@SCALE; repeatable.", rich_help_panel=MODEL)
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1.", rich_help_panel=MACHINE)]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or float16.", rich_help_panel=MACHINE),
]
Attention = Annotated[str, typer.Option(help="Attention backend; see doctor.", rich_help_panel=MACHINE)]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile", help="Compile the transformer's blocks; the first chunk waits.", rich_help_panel=MACHINE
    ),
]
Threads = Annotated[int | None, typer.Option(help="CPU threads.", min=1, max=1024, rich_help_panel=MACHINE)]

NumFrames = Annotated[
    int, typer.Option("--num-frames", "-n", help="Pixel frames, any number.", rich_help_panel=VIDEO)
]
Seed = Annotated[int, typer.Option(help="0 to 2**64-1; -1 draws one.", rich_help_panel=VIDEO)]
Height = Annotated[int | None, typer.Option(help="Pixels.", rich_help_panel=VIDEO)]
Width = Annotated[int | None, typer.Option(help="Pixels.", rich_help_panel=VIDEO)]
Fps = Annotated[float | None, typer.Option(help="Frames a second in the file.", rich_help_panel=VIDEO)]
Crf = Annotated[int, typer.Option(help="H.264 quality, 0 lossless .. 51.", rich_help_panel=VIDEO)]
Enlarge = Annotated[
    int, typer.Option(help="Enlarge the pictures in the file, 1..16 times.", rich_help_panel=VIDEO)
]
Steps = Annotated[int | None, typer.Option(help="Transformer passes a chunk.", rich_help_panel=VIDEO)]
Guidance = Annotated[float | None, typer.Option(help="Guidance scale; 1 is off.", rich_help_panel=VIDEO)]
Negative = Annotated[str | None, typer.Option(help="Negative prompt (with guidance).", rich_help_panel=VIDEO)]
Transition = Annotated[
    str,
    typer.Option(
        help="Treatment of the past at a later prompt: cross, recache, blend:N.", rich_help_panel=VIDEO
    ),
]

Memory = Annotated[
    str | None, typer.Option(help="KV memory policy, e.g. window:size=12,sink=3.", rich_help_panel=PLUGINS)
]
Codec = Annotated[str | None, typer.Option(help="KV codec.", rich_help_panel=PLUGINS)]
Sparse = Annotated[
    str | None, typer.Option(help="Block-sparse attention, e.g. topk:density=0.25.", rich_help_panel=PLUGINS)
]
Cross = Annotated[
    str | None,
    typer.Option(help="Prompt tokens that are read, e.g. annca:density=0.25.", rich_help_panel=PLUGINS),
]
StepCache = Annotated[str, typer.Option(help="Step cache.", rich_help_panel=PLUGINS)]
FuseContext = Annotated[
    bool,
    typer.Option(
        "--fuse-context", help="Context pass with the next chunk's first step.", rich_help_panel=PLUGINS
    ),
]

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]


def model_arguments(
    model: str,
    *,
    device: str | None = None,
    dtype: str | None = None,
    attention: str = "auto",
    compile: bool = False,
    threads: int | None = None,
    **parts: Any,
) -> dict[str, Any]:
    """Keyword arguments of ``streamvid.load``; ``parts`` that are None were not given. Sets the CPU threads."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    given = {name: value for name, value in parts.items() if value is not None}
    place = {"device": device, "dtype": dtype, "attention": attention, "compile": compile}
    return {"path_or_name": model, **place, **given}


def load_model(model: str, **options: Any) -> StreamPipeline:
    """The pipeline of the shared options; see ``model_arguments``."""
    from streamvid import load

    return load(**model_arguments(model, **options))


def stream_options(**values: Any) -> dict[str, Any]:
    """Keyword arguments of ``pipe.stream`` without those that were not given."""
    return {name: value for name, value in values.items() if value is not None}


def show_settings(settings: dict[str, Any]) -> None:
    """What a stream really runs with, on standard error."""
    from rich.console import Console
    from rich.markup import escape

    def text(value: Any) -> str:
        if isinstance(value, dict):
            rest = ", ".join(f"{key}={item}" for key, item in value.items() if key != "name")
            return f"{value['name']}({rest})"
        return ", ".join(f"{item:.4g}" for item in value) if isinstance(value, list) else str(value)

    console = Console(stderr=True, highlight=False)
    shown = {key: value for key, value in settings.items() if key not in ("fingerprint", "output_type")}
    console.print(
        "[dim]"
        + "  ".join(f"{key} [/dim]{escape(text(value))}[dim]" for key, value in shown.items())
        + "[/dim]"
    )


@contextmanager
def show_progress(label: str, total: int | None, *, quiet: bool) -> Iterator[Progress | None]:
    """A bar on standard error with frames a second and the bytes of the memory of the past.

    It appears with the first report, so that a mistake found before is nothing but its sentence.
    """
    if quiet:
        yield None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}" + ("/{task.total}" if total else "") + " frames"),
        TextColumn("{task.fields[speed]} frames/s"),
        TextColumn("memory {task.fields[memory]}"),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task(escape(label), total=total, speed="-", memory="-")

    def update(frames: int, stream: VideoStream) -> None:
        if not frames:
            bar.reset(task)
            bar.start()
            return
        stats = stream.stats()
        held = sum(report["total"] for report in stats["memory"].values())
        bar.update(task, completed=frames, speed=f"{stats['fps']:.1f}", memory=f"{held / 2**20:.1f} MiB")

    try:
        yield update
    finally:
        if bar.live.is_started:  # stopping prints a line
            bar.stop()


def check_writable(path: Path) -> None:
    """Fail before a model is loaded. Raises StreamvidError when a file of that name cannot be written."""
    from streamvid.errors import StreamvidError

    if path.is_dir() or not path.parent.is_dir():
        raise StreamvidError(f"{path} cannot be written: give a file name in a folder that exists")
    probe = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StreamvidError(f"{path} cannot be written ({error.strerror}); choose another place") from None


def stop_on_term() -> None:
    """Make a polite kill unwind the stack, so that a half-written file is removed."""

    def stop(signum: int, frame: object) -> None:
        sys.exit(128 + signum)

    signal.signal(signal.SIGTERM, stop)
