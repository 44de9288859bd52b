"""The result of ``streamvid bench codecs`` as Markdown tables and as the page ``docs/codecs.md``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from streamvid.memory.compat import table
from streamvid.memory.plan import format_bytes

Row = list[str]

METHOD = (
    "Error: the history is packed and unpacked as the cache does it; the next chunk's queries then attend to it and to "
    "their own chunk. Bytes include scales, offsets, centroids and exact tokens. A codec's fixed costs (centroids, "
    "channel means, exact tokens, one factor a head) weigh more on frames of few tokens and on small heads than on a "
    "large model: the planned tables are those of the large one. Time: processor time of the whole chunk, all passes, "
    "so that what else the machine does hardly counts."
)
PLANNED = (
    "The planned peak holds the packed frames, one layer unpacked, the rotation tables and the chunk in progress, not "
    "the tensors of the attention call itself. A codec that packs spans of frames (QVG) keeps up to a span minus one "
    "unpacked while it waits, and its peak with them; "
    "a window drops such a block as a whole as soon as one of its frames has left."
)


def markdown(head: Row, rows: Iterable[Row]) -> str:
    """A table, every column padded to its widest cell."""
    table = [head, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in table
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def tables(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Title and table of each part of the result."""
    grid, head_dim = result["grid"], result["head_dim"]
    shape = f"{result['heads']} heads of {head_dim}, {grid[0] * grid[1]} tokens a frame"
    found = [
        (
            f"Relative error over {result['history_frames']} latent frames of history ({shape}; "
            f"{result['samples']} samples: layers x prompts)",
            markdown(
                ["codec", "bytes of bf16", "keys", "values", "attention output", "worst layer"],
                _losses(result["loss"]),
            ),
        ),
        (
            f"Processor time of a chunk and bytes at the end (policy {result['memory']}, latent frames "
            f"{result['timed_frames'][0]} to {result['timed_frames'][1]}, {result['threads']} thread(s), "
            f"{result['dtype']})",
            markdown(["codec", "ms a chunk", "more than none", "memory"], _times(result["time"])),
        ),
    ]
    for frames, plans in result["plan"].items():
        found.append(
            (
                f"Planned for Wan 2.1 1.3B at 480x832, {frames} latent frames of full history, bf16",
                markdown(["codec", "stored", "of bf16", "peak", "of bf16's peak"], _plans(plans)),
            )
        )
    return found


def _losses(losses: dict[str, dict[str, float]]) -> list[Row]:
    ordered = sorted(losses.items(), key=lambda item: item[1]["attention"])
    keys = ("keys", "values", "attention", "worst")
    return [
        [f"`{spec}`", f"{loss['ratio']:.3f}", *(f"{loss[key]:.4f}" for key in keys)] for spec, loss in ordered
    ]


def _times(times: dict[str, dict[str, float]]) -> list[Row]:
    base = times["none"]["ms"]
    return [
        [
            f"`{spec}`",
            f"{row['ms']:.0f}",
            f"{row['ms'] - base:+.0f} ms ({row['ms'] / base - 1:+.0%})",
            format_bytes(row["bytes"]),
        ]
        for spec, row in times.items()
    ]


def _plans(plans: dict[str, dict[str, float]]) -> list[Row]:
    return [
        [
            f"`{spec}`",
            format_bytes(row["stored"]),
            f"{row['stored_ratio']:.3f}",
            format_bytes(row["peak"]),
            f"{row['peak_ratio']:.3f}",
        ]
        for spec, row in plans.items()
    ]


def findings(result: dict[str, Any]) -> list[str]:
    """What the numbers say, each sentence with its numbers; a claim that they do not bear out says so."""
    losses = result["loss"]
    said: list[str] = []

    def compare(a: str, b: str, say: Callable[[float, float], str]) -> None:
        if a in losses and b in losses:
            said.append(say(losses[a]["attention"], losses[b]["attention"]))

    compare(
        "qvg",
        "qvg:rule=parity",
        lambda ours, published: (
            f"QVG's scale search {'beats' if ours < published else 'does not beat'} its published rule at the same "
            f"bytes: error of the attention output {ours:.4f} against {published:.4f}."
        ),
    )
    compare(
        "int4:center=true",
        "int4",
        lambda centred, plain: (
            f"Taking each key channel's mean away first changes int4 from {plain:.4f} to {centred:.4f}."
        ),
    )
    compare(
        "kivi:bits=2",
        "int2",
        lambda kivi, rounded: f"Two bits: keys per channel (KIVI) {kivi:.4f}, plain rounding {rounded:.4f}.",
    )
    compare(
        "quarot",
        "int4",
        lambda rotated, plain: (
            f"Hadamard rotation alone (QuaRot) changes int4 from {plain:.4f} to {rotated:.4f}."
        ),
    )
    return said


def _refused() -> str:
    """The table of ``memory/compat.py`` in default settings, one row for each reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for policy, row in table().items():
        for codec, reason in row.items():
            if reason is not None:
                general = reason.replace(f"but {policy} chooses", "but the policy chooses")
                reasons.setdefault((codec, general), []).append(policy)
    rows = [[f"`{codec}`", ", ".join(policies), reason] for (codec, reason), policies in reasons.items()]
    return "In default settings; every other pair of policy and codec runs.\n\n" + markdown(
        ["codec", "policies", "why"], rows
    )


def document(result: dict[str, Any]) -> str:
    """The page: how it was made, what the numbers say, the tables."""
    parts = [
        "# KV codecs, measured",
        "Made by `streamvid bench codecs --write docs/codecs.md` on the keys and values of "
        f"`{result['model']}` ({result['fingerprint']}), prompts "
        + "; ".join(f"*{prompt}*" for prompt in result["prompts"])
        + ".",
        METHOD,
        *(
            ["What the numbers say:\n\n" + "\n".join(f"- {line}" for line in findings(result))]
            if findings(result)
            else []
        ),
        *(f"## {title}\n\n{table}" for title, table in tables(result)),
        PLANNED,
        f"## Combinations that are refused\n\n{_refused()}",
    ]
    return "\n\n".join(parts) + "\n"


def write_document(path: str | os.PathLike[str], text: str) -> None:
    """Write the page; a half-written one never stands under the final name."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, target)
