"""``streamvid compare``: run a study, go on after an interrupt, write the report."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from streamvid.errors import StreamvidError

if TYPE_CHECKING:
    from streamvid.eval.compare import Progress, Row
    from streamvid.eval.grid import Study


def register(app: typer.Typer) -> None:
    @app.command("compare")
    def compare(
        config: Path | None = typer.Argument(None, help="A TOML file: grid, prompts, seeds. See --preset."),
        preset: str | None = typer.Option(None, help="A study that comes with streamvid, instead of a file."),
        output: Path | None = typer.Option(
            None, "--output", "-o", help="Folder of the results; the default is runs/NAME."
        ),
        workers: int = typer.Option(
            1, min=1, help="Processes at once. Times are then shared, and marked so."
        ),
        quick: bool = typer.Option(False, help="A small one of the same shape: 4 variants, 2 prompts."),
        prompts: int | None = typer.Option(None, min=1, help="Only the study's first so many prompts."),
        imports: list[str] = typer.Option(
            [], "--import", help="LABEL=FOLDER of videos from elsewhere, into the same report. Repeatable."
        ),
        retry_failed: bool = typer.Option(False, help="Make cells again that failed."),
        clips: int = typer.Option(3, min=0, help="Prompts shown as clips in the report."),
        docs: Path | None = typer.Option(
            None, help="Markdown page whose section on this study is written anew, with a picture beside it."
        ),
        as_json: bool = typer.Option(False, "--json", help="One JSON object with the table, for scripts."),
    ) -> None:
        """Compare settings on the same prompts, seeds and noise; a report and one row a clip.

        Run it again with the same folder to go on after an interrupt: what is made is not made again.
        """
        if find_spec("scipy") is None:
            raise StreamvidError("compare needs scipy; install it with: pip install 'streamvid[eval]'")
        from streamvid.eval.document import write_document
        from streamvid.eval.finals import final_study
        from streamvid.eval.importing import Source, import_folder
        from streamvid.eval.report import write_report

        study, name = _study(config, preset, quick)
        if prompts is not None:
            study = replace(study, prompts=study.prompts[:prompts])
        sources = [Source.parse(text) for text in imports]
        if docs is not None and not docs.parent.is_dir():
            raise StreamvidError(f"--docs {docs}: the folder {docs.parent} does not exist")
        folder = output or Path("runs") / name
        rows = _run(study, folder, workers, retry_failed, as_json)
        parts = [(study, rows)]
        longer = final_study(study, rows)
        if longer is not None:
            parts.append((longer, _run(longer, folder, workers, retry_failed, as_json)))
        for source in sources:
            rows += import_folder(study, source, folder)
        pages = [
            write_report(one, made, folder, name=file, clips=clips)
            for (one, made), file in zip(parts, ("report.html", "report-final.html"), strict=False)
        ]
        if docs is not None:
            command = _command(config, preset, quick, prompts, workers, imports, docs)
            write_document(docs, name, command, parts)
        _tell(parts, pages, as_json)


def _study(config: Path | None, preset: str | None, quick: bool) -> tuple[Study, str]:
    from streamvid.eval import grid

    if (config is None) == (preset is None):
        names = ", ".join(sorted(path.stem for path in grid.PRESETS.glob("*.toml")))
        raise StreamvidError(f"give a TOML file or --preset, one of: {names}")
    path = config if config is not None else grid.preset(preset or "")
    study = grid.load_study(path)
    return (grid.quick(study), f"{path.stem}-quick") if quick else (study, path.stem)


def _command(
    config: Path | None,
    preset: str | None,
    quick: bool,
    prompts: int | None,
    workers: int,
    imports: list[str],
    docs: Path,
) -> str:
    words = ["streamvid compare", f"--preset {preset}" if preset else config.name if config else ""]
    words += ["--quick"] if quick else []
    words += [f"--prompts {prompts}"] if prompts else []
    words += [f"--workers {workers}"] if workers > 1 else []
    words += [f"--import {text.partition('=')[0]}=FOLDER" for text in imports]
    place = docs.resolve()
    shown = place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else Path(docs.name)
    return " ".join([*words, f"--docs {shown.as_posix()}"])


def _run(study: Study, folder: Path, workers: int, retry_failed: bool, silent: bool) -> list[Row]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar

    from streamvid.eval.compare import run_study

    console = Console(stderr=True, quiet=silent)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, speed_estimate_period=3600) as bar:
        task: Any = None

        def watch(progress: Progress) -> None:
            nonlocal task
            if task is None:
                task = bar.add_task("clips", total=progress.total - progress.kept)
                if progress.kept:
                    console.print(f"{progress.kept} of {progress.total} clips are there from an earlier run")
            bar.update(task, completed=progress.done)
            row = progress.row
            if row is not None and row["status"] == "failed":
                where = " · ".join(v for v in row["variant"].values() if v != "default")
                console.print(
                    f"[red]failed[/red] {where} · seed {row['seed']}: {row['error']}", highlight=False
                )

        try:
            return run_study(study, folder, workers=workers, retry_failed=retry_failed, watch=watch)
        except KeyboardInterrupt:
            bar.stop()
            console.print(f"interrupted; the rows in {folder} are kept, run the same command to go on")
            raise typer.Exit(130) from None


def _tell(parts: list[tuple[Study, list[Row]]], pages: list[Path], as_json: bool) -> None:
    from streamvid.eval.document import ordered
    from streamvid.eval.orderings import check_orderings
    from streamvid.eval.report import SUMMARY
    from streamvid.eval.store import plain

    contents = []
    for (study, rows), page in zip(parts, pages, strict=True):
        entries = ordered(study, rows)
        made = [row for row in rows if row["status"] == "done"]
        orderings = check_orderings(made, study.orderings)
        contents.append(
            {
                "title": study.title,
                "report": str(page),
                "variants": entries,
                "orderings": [ordering.to_dict() for ordering in orderings],
            }
        )
        if as_json:
            continue
        _print_table(entries, SUMMARY)
        for result in orderings:
            by = "" if result.difference is None else f", by {result.difference:.3g} on the mean"
            typer.echo(f"{result.verdict}: {result.claim} ({result.clause}{by}, {result.pairs} pairs)")
        typer.echo(f"report: {page}")
    if as_json:
        content = contents[0] | ({"final": contents[1]} if len(contents) > 1 else {})
        typer.echo(json.dumps(plain(content), indent=1))
    if not any(row["status"] == "done" for row in parts[0][1]):
        raise typer.Exit(1)


def _print_table(entries: list[dict[str, Any]], summary: tuple[str, ...]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    fitting = max(2, (console.width - 70) // 12)
    names = [name for name in summary if any(name in entry["metrics"] for entry in entries)][:fitting]
    judged = any(len(entry["segments"]) > 1 for entry in entries)
    heads = ["by segment"] if judged else []
    table = Table("variant", "clips", "failed", *heads, *(name.replace("_", " ") for name in names))
    for entry in entries:
        stats = [entry["metrics"].get(name) for name in names]
        values = ["-" if stat is None else f"{stat['mean']:.4g}" for stat in stats]
        scores = [" ".join("-" if v is None else f"{v:.2f}" for v in entry["segments"])] if judged else []
        table.add_row(entry["label"], str(entry["clips"]), str(entry["failed"]), *scores, *values)
    console.print(table)
