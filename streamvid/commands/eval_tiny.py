"""``streamvid eval tiny``: the embedded model measured on held-out prompts, beside its ceilings."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from streamvid.commands import common


def register(app: typer.Typer) -> None:
    @app.command("tiny")
    def eval_tiny(
        model: common.Model = "tiny",
        prompts: Annotated[int, typer.Option(help="Held-out prompts, 81 frames each.", min=1)] = 100,
        seeds: Annotated[int, typer.Option(help="Seeds a prompt.", min=1)] = 3,
        long_clips: Annotated[int, typer.Option(help="Clips of 240 frames.", min=0)] = 40,
        very_long_clips: Annotated[int, typer.Option(help="Clips of 1,000 frames.", min=0)] = 20,
        switches: Annotated[int, typer.Option(help="Prompt changes.", min=0)] = 100,
        ceilings: Annotated[
            bool, typer.Option(help="Also judge clean renders and renders sent through the VAE.")
        ] = True,
        memory: common.Memory = None,
        codec: common.Codec = None,
        step_cache: common.StepCache = "none",
        steps: common.Steps = None,
        device: common.Device = None,
        dtype: common.Dtype = None,
        threads: common.Threads = None,
        output: Annotated[
            Path | None, typer.Option("--output", "-o", help="Also write the JSON to this file.")
        ] = None,
        as_json: common.AsJson = False,
    ) -> None:
        """Judge the embedded model (or one in its words) frame by frame: does a video show what its prompt says?"""
        from streamvid.commands.common import check_writable
        from streamvid.tiny.evaluate import evaluate

        if output is not None:
            check_writable(output)
        began = time.perf_counter()
        pipe = common.load_model(model, device=device, dtype=dtype, threads=threads)
        loaded = time.perf_counter() - began
        options = common.stream_options(memory=memory, codec=codec, num_inference_steps=steps)
        if step_cache != "none":
            options["step_cache"] = step_cache
        with _bar(quiet=as_json) as progress:
            result = evaluate(
                pipe,
                prompts=prompts,
                seeds=seeds,
                long_clips=long_clips,
                very_long_clips=very_long_clips,
                switches=switches,
                with_ceilings=ceilings,
                progress=progress,
                **options,
            )
        result["load_seconds"] = loaded
        result["options"] = options
        text = json.dumps(result, indent=None if as_json else 2)
        if output is not None:
            output.write_text(json.dumps(result, indent=2) + "\n")
        if as_json:
            typer.echo(text)
        else:
            _show(result)


def _bar(*, quiet: bool) -> Any:
    from contextlib import contextmanager

    @contextmanager
    def bar() -> Any:
        if quiet:
            yield None
            return
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True)) as shown:
            tasks: dict[tuple[str, int], Any] = {}

            def update(part: str, done: int, total: int) -> None:
                if done == 1 or (part, total) not in tasks:
                    tasks[part, total] = shown.add_task(part, total=total)
                shown.update(tasks[part, total], completed=done)

            yield update

    return bar()


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = ("accuracy", "colour", "background", "shape", "motion", "size")
    table = Table("part of clips", *columns, title="first 81 frames")
    rows = {"model": result, **result.get("ceilings", {})}
    for name, row in rows.items():
        table.add_row(name, *(f"{row[column]:.3f}" for column in columns))
    console = Console()
    console.print(table)
    skip = {*columns, "ceilings", "gate", "counts", "options", "sink"}
    for key, value in result.items():
        if key not in skip:
            console.print(f"{key:26} {value:.3f}", highlight=False)
    if "sink" in result:
        found = result["sink"]
        table = Table(
            "", "with", "without", "difference, 95 %", title="a sink beside one chunk, 1,000 frames"
        )
        for key, (mean, half) in found["difference"].items():
            values = (f"{found[name][key]:.3f}" for name in ("with", "without"))
            table.add_row(key, *values, f"{mean:+.3f} ± {half:.3f}")
        console.print(table)
    for key, value in result.get("gate", {}).items():
        shown = ", ".join(f"{v:.2f}" for v in value) if isinstance(value, tuple | list) else f"{value:.3f}"
        console.print(f"VAE alone, 241 frames: {key:16} {shown}", highlight=False)
    counts = ", ".join(f"{key} {value}" for key, value in result["counts"].items())
    console.print(f"counts: {counts}", highlight=False)
