"""``streamvid verify``: recorded cases against this installation."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    @app.command("verify")
    def verify(
        path: Path = typer.Argument(..., help="A case, or a folder of cases."),
        as_json: bool = typer.Option(False, "--json", help="One JSON object a case, one a line."),
    ) -> None:
        """Replay recorded cases and print the largest deviation of every tensor; 0 only if all are within tolerance."""
        from streamvid.verify import verify as run

        failed = 0
        for result in run(path):
            failed += not result.ok
            if as_json:
                typer.echo(json.dumps(_record(result)))
                continue
            typer.echo(f"{'ok  ' if result.ok else 'FAIL'} {result.folder.name} ({result.kind})")
            for d in result.deviations:
                mark = "" if d.ok else "   <-- out of tolerance"
                typer.echo(f"     {d.name:<32} {d.value:.3e}  (limit {d.limit:g}, {d.measure}){mark}")
            if result.problem:
                typer.echo(f"     {result.problem}")
        if failed:
            raise typer.Exit(1)


def _record(result) -> dict:
    return {
        "case": result.folder.name,
        "kind": result.kind,
        "ok": result.ok,
        "problem": result.problem,
        "deviations": {f"{d.name} ({d.measure})": d.value for d in result.deviations},
    }
