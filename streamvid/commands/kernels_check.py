"""``streamvid kernels check``: compile the kernels for GPUs without one, and hold them to their limits."""

from __future__ import annotations

import json
import os
from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    @app.command("check")
    def check(
        full: bool = typer.Option(
            False, "--full", help="Every capability and feature (minutes), not a subset."
        ),
        as_json: bool = typer.Option(
            False, "--json", help="One JSON array on standard output, nothing else."
        ),
        table: Path | None = typer.Option(
            None, "--table", help="Write the table into this Markdown file, between its kernels-check marks."
        ),
    ) -> None:
        """Compile the attention kernels ahead of time; fail on too much shared memory, spills, or no matrix units."""
        os.environ.pop("TRITON_INTERPRET", None)  # compiled code is the subject here
        from streamvid.kernels.build import build, everything, markdown, representative, require_compiler

        require_compiler()
        built = []
        for variant in everything() if full else representative():
            item = build(variant)
            built.append(item)
            if not as_json:
                state = "; ".join(item.problems) or "ok"
                typer.echo(
                    f"{variant.name}: {item.shared / 1024:.0f} KiB shared, {item.registers} registers, "
                    f"{item.spill} B spilled, {item.seconds:.1f} s, {state}"
                )
        if as_json:
            typer.echo(json.dumps([item.row() for item in built], indent=1))
        if table is not None:
            _write(table, markdown(built))
        broken = [item for item in built if item.problems]
        if broken:
            names = "; ".join(f"{item.variant.name}: {', '.join(item.problems)}" for item in broken)
            typer.echo(f"{len(broken)} of {len(built)} kernels break a limit: {names}", err=True)
            raise typer.Exit(1)
        if not as_json:
            typer.echo(f"{len(built)} kernels compiled, all within limits")


def _write(path: Path, table: str) -> None:
    from streamvid.errors import StreamvidError

    start, stop = "<!-- kernels-check -->\n", "<!-- /kernels-check -->"
    text = path.read_text() if path.exists() else ""
    if start not in text or stop not in text:
        raise StreamvidError(
            f"{path} has no lines {start.strip()} and {stop}; add them where the table belongs"
        )
    head, rest = text.split(start, 1)
    path.write_text(head + start + table + stop + rest.split(stop, 1)[1])
