"""A comparison as a section of a Markdown page: tables, one picture, what was checked, and the command that made it.

The section stands between two marks and is replaced as a whole; what else a page says stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streamvid.errors import StreamvidError
from streamvid.eval.aggregate import by_variant, curves, pareto, table
from streamvid.eval.finals import ranked
from streamvid.eval.grid import Study
from streamvid.eval.machine import card_line, counted
from streamvid.eval.metrics import METRICS
from streamvid.eval.orderings import check_orderings
from streamvid.eval.picture import Panel, Point, draw

Row = Mapping[str, Any]
Entry = dict[str, Any]
LEADS = ("judge", "sharpness")
"""Quality shown first, the first that is there."""
CLOSE = 0.02
"""Judge score that counts as equal where the cheapest good variant is named."""
COLUMNS = {
    "judge_right": "All right",
    "judge_drift": "Change",
    "psnr": "PSNR",
    "ssim": "SSIM",
    "kv_bytes": "Stored",
    "kv_peak_bytes": "Peak",
    "chunk_ms": "ms a chunk",
    "denoise_ms": "denoising ms",
    "compute_fraction": "Compute",
    "colour_drift": "Colour drift",
}
"""Figures of the table beside judge and its segments. The two of denoising are shown where steps or caches differ."""


def size_text(value: float) -> str:
    """Bytes with their unit, powers of ten."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.0f} B"


def figure(value: float | None, name: str) -> str:
    """A figure as a table shows it."""
    if value is None:
        return "–"
    unit = METRICS[name].unit if name in METRICS else ""
    if unit == "bytes":
        return size_text(value)
    return f"{value:.0f}" if unit == "ms" else f"{value:.1f}" if unit == "dB" else f"{value:.2f}"


def write_section(page: Path, name: str, body: str) -> None:
    """Put `body` between the marks of `name` in a page, at its end when it has none; the page may be new.

    Raises:
        StreamvidError: one mark without the other, or a folder that does not exist.
    """
    begin, end = f"<!-- compare:{name} -->", f"<!-- /compare:{name} -->"
    if not page.parent.is_dir():
        raise StreamvidError(f"{page}: the folder {page.parent} does not exist")
    text = page.read_text(encoding="utf-8") if page.exists() else "# Comparison\n"
    if (begin in text) != (end in text):
        raise StreamvidError(f"{page}: has one of the marks {begin} and {end} but not the other")
    section = f"{begin}\n{body.strip()}\n{end}"
    if begin in text:
        before, rest = text.split(begin, 1)
        text = before + section + rest.split(end, 1)[1]
    else:
        text = f"{text.rstrip()}\n\n{section}\n"
    temporary = page.with_name(page.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, page)


def write_document(page: Path, name: str, command: str, parts: Sequence[tuple[Study, Sequence[Row]]]) -> Path:
    """Write the section of a study, and of its final, into a page, and its picture into `images` beside it.

    Args:
        name: of the section and of the picture.
        command: the line that made it.
        parts: the study with its rows, then its final with its own.

    Returns:
        the picture.
    """
    picture = page.parent / "images" / f"{name}.png"
    texts = [_origin(parts[0][1], command)]
    for number, (study, rows) in enumerate(parts):
        entries = ordered(study, rows)
        texts.append(f"### {study.title}\n\n{_scope(study, rows, brief=number > 0)}")
        texts.append(markdown(_table(study, rows, entries)))
        if number == 0:
            draw_tradeoff(study, entries, picture)
            texts.append(f"![{study.title}: quality and fidelity against cost](images/{picture.name})")
        texts.append(_findings(study, rows, entries))
    write_section(page, name, "\n\n".join(filter(None, texts)))
    return picture


def ordered(study: Study, rows: Sequence[Row]) -> list[Entry]:
    """The entries of `aggregate.table` with `segments`, best first where the study asks for it."""
    judged = {c["variant"]: c["mean"] for c in curves(rows).get("judge", [])}
    entries = [entry | {"segments": judged.get(i, [])} for i, entry in enumerate(table(rows))]
    if not study.ranked:
        return entries
    places = {tuple(s.items()): place for place, s in enumerate(ranked(rows))}
    last = len(places)
    return sorted(entries, key=lambda e: places.get(tuple(e["variant"].items()), last))


def _mean(entry: Entry, name: str) -> float | None:
    stat = entry["metrics"].get(name)
    return None if stat is None else stat["mean"]


def _origin(rows: Sequence[Row], command: str) -> str:
    made = [row for row in rows if row["status"] == "done"] or list(rows)
    machines = ", ".join(dict.fromkeys(card_line(row["machine"]) for row in made))
    weights = dict.fromkeys(str(row.get("settings", {}).get("fingerprint", "")) for row in made)
    named = ", ".join(w for w in weights if w)
    workers = max(row.get("workers", 1) for row in made)
    shared = f"; {workers} processes at once, so times are of a shared machine" if workers > 1 else ""
    day = max(row["when"] for row in made)[:10]
    return f"```bash\n{command}\n```\n\nMade by this line, {day}; weights {named or 'not named'}; {machines}{shared}."


def _scope(study: Study, rows: Sequence[Row], brief: bool) -> str:
    prompts, seeds = len({r["prompt"] for r in rows}), len({r["seed"] for r in rows})
    clips = (
        f"{counted(prompts, 'prompt')} x {counted(seeds, 'seed')}, {study.num_frames} frames, segments of "
        f"{study.segment_frames}."
    )
    if brief:
        return clips
    reference = ", ".join(f"{axis} = {value}" for axis, value in study.reference.items())
    fidelity = f" PSNR and SSIM are to the same noise with {reference}." if reference else ""
    steps = {(row["variant"].get("steps"), row["variant"].get("step_cache")) for row in rows}
    pairs = (
        ", *to full steps* its difference from full steps of the same prompt and noise (± the same of the pairs)"
        if reference and len(steps) > 1
        else ""
    )
    return (
        f"{study.notes} {clips}{fidelity} *Judge* is the mean share of what the prompt says that holds (± half the "
        f"95 % interval over clips){pairs}, *all right* the share of clips in which everything does, *change* the last "
        "segment's judge less the first's. *Peak* counts scratch and staging."
    ).strip()


def _table(study: Study, rows: Sequence[Row], entries: Sequence[Entry]) -> list[list[str]]:
    lead = next((name for name in LEADS if any(_mean(e, name) is not None for e in entries)), LEADS[0])
    stepping = len({(e["variant"].get("steps"), e["variant"].get("step_cache")) for e in entries}) > 1
    names = [
        name
        for name in COLUMNS
        if any(_mean(e, name) is not None for e in entries)
        and (stepping or name not in ("denoise_ms", "compute_fraction"))
    ]
    varied = [a for a in study.variants[0].settings() if len({e["variant"].get(a) for e in entries}) > 1]
    head = ["#", "Variant", lead.capitalize(), *(COLUMNS[n] for n in names)]
    segments = any(len(entry["segments"]) > 1 for entry in entries)
    if segments:
        head.insert(3, "By segment")
    paired = stepping and any(lead in entry["paired"] for entry in entries)
    if paired:
        head.insert(3, "To full steps")
    notes = _notes(entries)
    if any(notes):
        head.append("")
    lines = [head]
    for number, entry in enumerate(entries, 1):
        line = [str(number), _named(entry, varied), _with_half(entry, lead)]
        if paired:
            line.append(_difference(entry, lead))
        if segments:
            line.append(" ".join(_two(v) for v in entry["segments"]) or "–")
        line += [figure(_mean(entry, name), name) for name in names]
        if any(notes):
            line.append(notes[number - 1])
        lines.append(line)
    return lines


def _two(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}".removeprefix("0") if value < 0.995 else "1.0"


def _with_half(entry: Entry, name: str) -> str:
    stat = entry["metrics"].get(name)
    if stat is None:
        return "–"
    spread = "" if stat["lo"] is None else f" ±{stat['mean'] - stat['lo']:.2f}"
    return f"{stat['mean']:.3f}{spread}"


def _difference(entry: Entry, name: str) -> str:
    """Against the reference of the same prompt and noise: the mean difference and half its 95 % interval."""
    stat = entry["paired"].get(name)
    if stat is None:
        return "–"
    if stat["lo"] is None:
        return f"{stat['mean']:+.3f}"
    return f"{stat['mean']:+.3f} ±{stat['mean'] - stat['lo']:.3f}"


def _named(entry: Entry, varied: Sequence[str]) -> str:
    """The label and, in code, the settings in which the variants differ."""
    settings = {axis: str(entry["variant"].get(axis, "")) for axis in varied}
    shown = {a: v for a, v in settings.items() if v and v not in ("default", "none", entry["label"])}
    text = " ".join(f"`steps={v}`" if axis == "steps" else f"`{v}`" for axis, v in shown.items())
    return f"{entry['label']}<br>{text}" if text else entry["label"]


def _notes(entries: Sequence[Entry]) -> list[str]:
    """What is to be said of a variant: failures, and whether the same model with fewer steps does as well."""
    fewer = [e for e in entries if e["variant"].get("steps") not in (None, "default") and not _cached(e)]
    notes = []
    for entry in entries:
        words = [f"{entry['failed']} failed"] if entry["failed"] else []
        if _cached(entry) and any(_beats(other, entry) for other in fewer):
            words.append("loses to fewer steps")
        notes.append("; ".join(words))
    return notes


def _cached(entry: Entry) -> bool:
    return entry["variant"].get("step_cache") not in (None, "", "none", "default")


def _beats(other: Entry, entry: Entry) -> bool:
    """No more work (within 3 %, for the full first chunk of a cache) and as near to the full run."""
    values = [_mean(e, n) for n in ("compute_fraction", "psnr") for e in (other, entry)]
    if any(v is None for v in values):
        return False
    little, much, near, far = (float(v) for v in values if v is not None)
    return little <= 1.03 * much and near >= far


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first line is its head. Columns of words stand at the left, others at the right."""
    words = ["", "Variant", "Published ordering", "Checked as", "Here"]
    rule = ["---" if head in words else "---:" for head in lines[0]]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])


def draw_tradeoff(study: Study, entries: Sequence[Entry], path: Path) -> None:
    """Judge and PSNR against the study's first cost, numbered as in the table."""
    names = [n for n in (*LEADS[:1], "psnr") if any(_mean(e, n) is not None for e in entries)]
    panels = [_panel(entries, study.axis_x, name) for name in names or ["sharpness"]]
    draw(panels, [entry["label"] for entry in entries], study.title, path)


_SAID = {
    "judge": "judge score (higher is better)",
    "psnr": "PSNR to the reference, dB",
    "kv_bytes": "stored keys and values",
    "kv_peak_bytes": "peak of keys and values",
    "chunk_ms": "ms a chunk",
    "denoise_ms": "denoising, ms a chunk",
    "compute_fraction": "transformer work, of full steps",
}


def _panel(entries: Sequence[Entry], x: str, y: str) -> Panel:
    points: list[Point | None] = []
    for entry in entries:
        at, stat = _mean(entry, x), entry["metrics"].get(y)
        points.append(
            Point(entry["label"], at, stat["mean"], stat["lo"], stat["hi"])
            if at is not None and stat
            else None
        )
    known = [i for i, point in enumerate(points) if point is not None]
    front = pareto([(p.x, p.y) for p in points if p is not None], ("lower", "higher"))
    return Panel(
        points,
        _SAID.get(x, x),
        _SAID.get(y, y),
        lambda value: figure(value, x),
        [known[i] for i in front],
    )


def _findings(study: Study, rows: Sequence[Row], entries: Sequence[Entry]) -> str:
    lines = []
    judged = [e for e in entries if _mean(e, "judge") is not None]
    if len(judged) > 1:
        best = max(judged, key=lambda e: _mean(e, "judge") or 0.0)
        top = _mean(best, "judge") or 0.0
        close = [e for e in judged if (_mean(e, "judge") or 0.0) >= top - CLOSE]
        cost = "kv_peak_bytes" if study.axis_x == "kv_bytes" else study.axis_x
        cheap = min(close, key=lambda e: _mean(e, cost) or float("inf"))
        value = _mean(cheap, cost)
        if value is not None:
            lines.append(
                f"- Within {CLOSE} of it: {len(close)} of {len(judged)}; the cheapest of them by "
                f"{_SAID.get(cost, cost)}: {cheap['label']}, {figure(value, cost)}."
            )
    bytes_matter = study.axis_x in ("kv_bytes", "kv_peak_bytes")
    coded = [e for e in entries if bytes_matter and _mean(e, "nominal_over_peak") is not None]
    if len(coded) > 1:
        worst = min(coded, key=lambda e: _mean(e, "nominal_over_peak") or 1.0)
        lines.append(
            f"- Nominal against peak: {worst['label']} stores {figure(_mean(worst, 'kv_bytes'), 'kv_bytes')} and peaks "
            f"at {figure(_mean(worst, 'kv_peak_bytes'), 'kv_peak_bytes')}, the largest gap here."
        )
    failed = sum(row["status"] != "done" for row in rows)
    if failed:
        lines.append(f"- {failed} clips failed; the report page names them.")
    return "\n".join(lines) + ("\n\n" + _orderings(study, rows) if study.orderings else "")


def _orderings(study: Study, rows: Sequence[Row]) -> str:
    made = [row for group in by_variant(rows).values() for row in group if row["status"] == "done"]
    lines = [["Published ordering", "Checked as", "Difference (95 %)", "Pairs", "Here"]]
    for result in check_orderings(made, study.orderings):
        difference = "–"
        if result.difference is not None and result.interval is not None:
            low, high = result.interval
            difference = f"{result.difference:.3g} ({low:.3g} to {high:.3g})"
        claim = f"{result.claim} ({result.source})"
        lines.append(
            [claim, result.clause.replace("|", "\\|"), difference, str(result.pairs), result.verdict]
        )
    return markdown(lines)
