"""``streamvid doctor``: what is usable here."""

from __future__ import annotations

import json

import typer


def register(app: typer.Typer) -> None:
    @app.command("doctor")
    def doctor(
        as_json: bool = typer.Option(False, "--json", help="One JSON object, for scripts."),
    ) -> None:
        """What is usable on this machine, why not, and the one command that adds it."""
        from streamvid.doctor import examine

        findings = examine()
        if as_json:
            typer.echo(json.dumps([finding.to_dict() for finding in findings], indent=2))
            return
        from rich.console import Console
        from rich.table import Table

        table = Table("what", "usable", "detail", "to add it")
        for finding in findings:
            mark = "[green]yes[/green]" if finding.usable else "[yellow]no[/yellow]"
            table.add_row(f"{finding.kind} {finding.name}", mark, finding.detail, finding.remedy)
        Console().print(table)
