"""``streamvid info``: what a checkpoint is, and what it lacks to run."""

from __future__ import annotations

import json
from typing import Any

import typer


def register(app: typer.Typer) -> None:
    @app.command("info")
    def info(
        path: str = typer.Argument(
            ..., metavar="PATH", help="A weight file, a folder, owner/name, or a name."
        ),
        which: str | None = typer.Option(None, "--which", help="ema or generator, of a training checkpoint."),
        as_json: bool = typer.Option(False, "--json", help="One JSON object, for scripts."),
    ) -> None:
        """What a checkpoint is: kind, geometry, size, memory by window, and what it lacks to run."""
        from streamvid.inspect_checkpoint import inspect_checkpoint

        found = inspect_checkpoint(path, which)
        if as_json:
            typer.echo(json.dumps(found.to_dict(), indent=2))
        else:
            _show(found)


def _show(found: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"[bold]{found.path}[/bold]: {found.layout}", highlight=False)
    for part in found.parts:
        table = Table(
            title=f"{part.part} ({part.kind}, {part.names} names)", title_justify="left", show_header=False
        )
        table.add_row("file", part.path)
        if part.section:
            table.add_row("section", f"{part.section} (of {', '.join(part.sections)})")
        table.add_row(
            "parameters", f"{part.parameters:,} in {part.tensors} tensors, {readable(part.num_bytes)}"
        )
        table.add_row("dtypes", ", ".join(f"{name} {count:,}" for name, count in part.dtypes.items()))
        for name, value in part.geometry.items():
            table.add_row(name, str(value))
        console.print(table)
    if found.cache_bytes:
        height, width = found.native_size
        table = Table(title=f"keys and values at {width}x{height}, bfloat16, no codec", title_justify="left")
        table.add_column("latent frames held", justify="right")
        table.add_column("tokens", justify="right")
        table.add_column("memory", justify="right")
        for window, size in found.cache_bytes.items():
            table.add_row(str(window), f"{window * found.tokens_per_frame:,}", readable(size))
        console.print(table)
    for reason in found.missing.values():
        console.print(f"[yellow]missing:[/yellow] it {reason}", highlight=False)


def readable(size: int) -> str:
    """Bytes in the largest binary unit that keeps the number at least one."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.2f} {units[0]}"
