"""``streamvid bench kernels``: attention alone, at the size a stream calls it."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import typer


def register(app: typer.Typer) -> None:
    @app.command("kernels")
    def kernels(
        device: str = typer.Option("cpu", help="cpu or cuda."),
        heads: int | None = typer.Option(None, help="Heads; default 8 on a CPU, 12 on a GPU.", min=2),
        head_dim: int | None = typer.Option(
            None, help="Channels of a head; default 64 on a CPU, 128 on a GPU."
        ),
        grid: str | None = typer.Option(
            None, help="Token rows x columns of a frame; default 8x8, 30x52 on a GPU."
        ),
        chunk: int = typer.Option(3, help="Latent frames of the queries.", min=1),
        window: int = typer.Option(21, help="Latent frames of the keys.", min=2),
        rounds: int = typer.Option(30, help="Runs of each case.", min=3),
        threads: int = typer.Option(1, help="CPU threads.", min=1),
        output: Path | None = typer.Option(
            None, "--output", "-o", help="Write JSON here, and a plot beside it."
        ),
        as_json: bool = typer.Option(
            False, "--json", help="One JSON object on standard output, nothing else."
        ),
    ) -> None:
        """Grouped and block-sparse attention against dense; on a GPU a density sweep, FlexAttention and the floor."""
        import torch

        from streamvid.errors import StreamvidError
        from streamvid.kernels import bench

        target = torch.device(device)
        if target.type not in ("cpu", "cuda") or (target.type == "cuda" and not torch.cuda.is_available()):
            raise StreamvidError(
                f"bench kernels cannot run on {device!r}: choose cpu, or cuda where there is a GPU"
            )
        gpu = target.type == "cuda"
        torch.set_num_threads(threads)
        shape = bench.Shape(
            heads=heads or (12 if gpu else 8),
            head_dim=head_dim or (128 if gpu else 64),
            grid=parse_grid(grid or ("30x52" if gpu else "8x8")),
            chunk=chunk,
            window=window,
        )
        if window <= chunk:
            raise StreamvidError(
                f"the window ({window} frames) must be longer than the chunk ({chunk}); raise --window"
            )
        cases = list(bench.gpu_cases(shape, torch.bfloat16)) if gpu else bench.cpu_cases(shape)
        clock = bench.run(cases, rounds, target)
        name = torch.cuda.get_device_name() if gpu else _cpu_name()
        found = {
            "device": name,
            "torch": torch.__version__,
            "dtype": "bfloat16" if gpu else "float32",
            "clock": clock,
            "shape": {**shape.__dict__, "queries": shape.queries, "keys": shape.keys},
            "rows": bench.rows(cases, shape, 2 if gpu else 4, bench.peak_of(name) if gpu else None),
        }
        if output is not None:
            output.write_text(json.dumps(found, indent=1) + "\n")
            _plot(found, output.with_suffix(".png"))
        if as_json:
            typer.echo(json.dumps(found))
        else:
            _show(found)


def parse_grid(text: str) -> tuple[int, int]:
    """``ROWSxCOLUMNS`` as two numbers."""
    from streamvid.errors import StreamvidError

    rows, cross, columns = text.partition("x")
    if not cross or not rows.isdigit() or not columns.isdigit() or not int(rows) * int(columns):
        raise StreamvidError(f"--grid {text!r} is not ROWSxCOLUMNS; for example 30x52")
    return int(rows), int(columns)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    floor = any("floor_ms" in row for row in found["rows"])
    table = Table("case", "density", "ms (quartiles)", "of dense", "GFLOP", *(["floor ms"] if floor else []))
    for row in found["rows"]:
        cells = [
            row["case"],
            f"{row['density']:.2f}",
            f"{row['ms']:.2f} ({row['ms_q1']:.2f}-{row['ms_q3']:.2f})",
            f"{row['of_dense']:.2f}",
            f"{row['gflop']:.2f}",
        ]
        table.add_row(*cells, *([f"{row['floor_ms']:.2f}"] if "floor_ms" in row else []))
    shape = found["shape"]
    console = Console()
    console.print(
        f"{found['device']}, torch {found['torch']}, {found['dtype']}; {found['clock']}. {shape['heads']} heads of "
        f"{shape['head_dim']}, {shape['queries']} queries, {shape['keys']} keys."
    )
    console.print(table)


def _plot(found: dict[str, Any], path: Path) -> None:
    """Time against density; skipped with a note where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        typer.echo("no plot: matplotlib is not installed (pip install streamvid[eval])", err=True)
        return
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for row in found["rows"]:
        if row["density"]:
            axes.errorbar(
                row["density"],
                row["ms"],
                yerr=[[row["ms"] - row["ms_q1"]], [row["ms_q3"] - row["ms"]]],
                marker="o",
                capsize=3,
            )
            axes.annotate(
                row["case"],
                (row["density"], row["ms"]),
                fontsize=8,
                xytext=(4, 4),
                textcoords="offset points",
            )
    dense = found["rows"][0]["ms"]
    axes.plot([0, 1], [0, dense], "--", color="grey", label="proportional to density")
    floors = [
        (row["density"], row["floor_ms"]) for row in found["rows"] if row.get("floor_ms") and row["density"]
    ]
    if floors:
        axes.plot(*zip(*sorted(floors), strict=True), ":", color="black", label="floor")
    axes.set(xlabel="share of keys read", ylabel="milliseconds a call", title=found["device"], xlim=(0, 1.15))
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
