"""``streamvid bench stream``: first frame, period, control latency, memory, against the floor."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import typer

from streamvid.commands.common import check_writable
from streamvid.errors import StreamvidError
from streamvid.memory.files import write_whole

SETTINGS = (
    "model",
    "attention",
    "compile",
    "memory",
    "codec",
    "step_cache",
    "steps",
    "height",
    "width",
    "seed",
)
LOADED = ("model", "attention", "compile", "steps")
"""Settings of the pipeline rather than of a stream, and one with another name there."""
CLOCK = (
    "text + denoising + context pass + decoder + frames on the host; loading, compiling and the first stream are "
    "outside; one reader that never waits"
)


def register(app: typer.Typer) -> None:
    @app.command("stream")
    def stream(
        model: str = typer.Option("tiny", help="Name, folder or repository."),
        memory: str | None = typer.Option(None, help="Memory policy."),
        codec: str | None = typer.Option(None, help="KV codec."),
        step_cache: str | None = typer.Option(None, help="Step cache."),
        attention: str | None = typer.Option(None, help="Attention backend."),
        compile: bool = typer.Option(False, "--compile", help="Compile the transformer's blocks."),
        steps: int | None = typer.Option(None, min=1, help="Denoising steps."),
        height: int | None = typer.Option(None, help="Pixels."),
        width: int | None = typer.Option(None, help="Pixels."),
        settings: Path | None = typer.Option(None, help="A TOML file with these settings, instead of flags."),
        vs: Path | None = typer.Option(
            None, help="A TOML file of other settings, measured in turns with these."
        ),
        scale: str | None = typer.Option(None, help="Also the cost along: window, resolution or length."),
        chunks: int = typer.Option(20, min=2, help="Chunks in the steady state."),
        repeats: int = typer.Option(5, min=1, help="Streams opened, and prompt changes."),
        fps: float | None = typer.Option(
            None, help="Rate of playback for late frames; default the model's own."
        ),
        buffer: int = typer.Option(12, min=1, help="Frames that are there before playback starts."),
        output: Path | None = typer.Option(None, "--output", "-o", help="Also write the JSON to this file."),
        as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    ) -> None:
        """How fast a stream is: first frame, chunk period, control latency, late frames, memory, and the floor."""
        from streamvid.video_io import check_fps

        given = {
            name: value
            for name, value in {
                "memory": memory,
                "codec": codec,
                "step_cache": step_cache,
                "attention": attention,
                "steps": steps,
                "height": height,
                "width": width,
            }.items()
            if value is not None
        }
        if compile:
            given["compile"] = True
        if settings is not None and (given or model != "tiny"):
            raise StreamvidError("give settings as flags or as a file, not both")
        if fps is not None:
            check_fps(fps)
        if output is not None:
            check_writable(output)
        first = read_settings(settings) if settings is not None else {"model": model} | given
        second = read_settings(vs) if vs is not None else None
        result = _measure(first, second, scale, chunks, repeats, fps, buffer)
        text = json.dumps(result, indent=1)
        if output is not None:
            write_whole(output, text + "\n")
        if as_json:
            typer.echo(text)
        else:
            _print(result)


def read_settings(path: Path) -> dict[str, Any]:
    """A TOML file of stream settings. Raises StreamvidError on an unknown key, naming the nearest."""
    from streamvid.memory.spec import nearest

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StreamvidError(f"{path}: cannot be read as TOML ({error})") from None
    for key in values:
        if key not in SETTINGS:
            raise StreamvidError(
                f"{path}: unknown key {key!r}{nearest(key, SETTINGS)} (allowed: {', '.join(SETTINGS)})"
            )
    return values


def _open(settings: dict[str, Any], known: dict[tuple, Any]) -> tuple[Any, dict[str, Any]]:
    """The pipeline of some settings, and the options of its streams."""
    import streamvid

    options = {key: value for key, value in settings.items() if key not in LOADED}
    if "steps" in settings:
        options["num_inference_steps"] = settings["steps"]
    place = settings.get("model", "tiny"), settings.get("attention", "auto"), settings.get("compile", False)
    if place not in known:
        known[place] = streamvid.load(place[0], attention=place[1], compile=place[2])
    return known[place], options


def _measure(
    first: dict[str, Any],
    second: dict[str, Any] | None,
    scale: str | None,
    chunks: int,
    repeats: int,
    fps: float | None,
    buffer: int,
) -> dict[str, Any]:
    from dataclasses import asdict

    from streamvid.eval.floor import measure_limits
    from streamvid.eval.machine import machine_card, versions
    from streamvid.eval.speed import PROMPTS, Plan, measure_speed, scaling, versus
    from streamvid.eval.store import plain

    plan = Plan(chunks=chunks, repeats=repeats, target_fps=fps, buffer_frames=buffer)
    known: dict[tuple, Any] = {}
    pipe, options = _open(first, known)
    limits = measure_limits(pipe.device, pipe.dtype)
    result: dict[str, Any] = {
        "machine": machine_card(),
        "versions": versions(),
        "clock": CLOCK,
        "asked": first,
        "speed": asdict(measure_speed(pipe, options, plan, limits)),
    }
    if second is not None:
        other, other_options = _open(second, known)
        result["asked_vs"] = second
        result["speed_vs"] = asdict(measure_speed(other, other_options, plan, limits))
        pair = versus(
            lambda: pipe.stream(PROMPTS[0], **options),
            lambda: other.stream(PROMPTS[0], **other_options),
            plan,
        )
        result["versus"] = asdict(pair)
    if scale is not None:
        result["scaling"] = {"axis": scale, "rows": scaling(pipe, options, scale, plan)}
    return plain(result)


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from streamvid.eval.machine import card_line

    console = Console()
    names = ["speed", "speed_vs"] if "speed_vs" in result else ["speed"]
    table = Table("", *(", ".join(f"{k}={v}" for k, v in result[f"asked{n[5:]}"].items()) for n in names))
    for title, read in _LINES:
        table.add_row(title, *(read(result[name]) for name in names))
    console.print(table)
    if "versus" in result:
        pair = result["versus"]
        low, high = pair["interval"]
        console.print(
            f"in turns, {pair['pairs']} pairs: the second takes 1/{pair['ratio']:.3f} of the first's time "
            f"(middle half {low:.3f} to {high:.3f})",
            highlight=False,
        )
    if "scaling" in result:
        rows = result["scaling"]["rows"]
        lines = Table(
            *(key.replace("_", " ") for key in rows[0]), title=f"by {result['scaling']['axis']}, ms"
        )
        for row in rows:
            lines.add_row(*(f"{value:.4g}" for value in row.values()))
        console.print(lines)
    console.print(f"machine: {card_line(result['machine'])}\nclock: {result['clock']}", highlight=False)


def _three(stat: dict[str, float]) -> str:
    return f"{stat['p50']:.1f} / {stat['p95']:.1f} / {stat['max']:.1f}"


def _parts_line(speed: dict[str, Any]) -> str:
    parts = speed["parts_ms"]
    return ", ".join(
        f"{name} {value:.1f}" for name, value in parts.items() if name not in ("total", "change")
    )


def _memory_line(speed: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value / 2**20:.1f}" for name, value in speed["memory"].items())


def _size_line(speed: dict[str, Any]) -> str:
    s = speed["settings"]
    return (
        f"{s['width']}x{s['height']}, {len(s['timesteps'])} steps, chunk {s['chunk_latents']}, "
        f"sees {speed['visible_latents']} latents, {s['dtype']}, {s['attention']}"
    )


def _floor_line(speed: dict[str, Any]) -> str:
    floor = speed["floor_ms"]
    times = speed["period_ms"]["p50"] / floor["total"]
    return f"{floor['total']:.1f} ({times:.1f}x above it; passes are bound by {floor['bound']})"


_LINES = (
    ("what ran", _size_line),
    ("first frame ms, p50 / p95 / max", lambda s: _three(s["first_frame_ms"])),
    ("chunk period ms, p50 / p95 / max", lambda s: _three(s["period_ms"])),
    ("frames/s, steady", lambda s: f"{s['fps']:.1f}"),
    ("prompt change to frame ms, p50 / p95 / max", lambda s: _three(s["control_ms"])),
    (
        "late frames in playback",
        lambda s: (
            f"{100 * s['playback']['late_frames']:.1f} %, {s['playback']['stalled_seconds']:.2f} s waiting"
        ),
    ),
    ("parts of a chunk, ms", _parts_line),
    ("floor of a chunk, ms", _floor_line),
    ("peak memory, MiB", _memory_line),
)
