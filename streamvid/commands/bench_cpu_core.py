"""``streamvid bench cpu-core``: seconds a chunk on a CPU, and against plain diffusers blocks."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    @app.command("cpu-core")
    def cpu_core(
        threads: Annotated[
            list[int] | None, typer.Option(help="Repeatable; by default 1 and 2.", min=1)
        ] = None,
        chunks: Annotated[
            int, typer.Option(help="Chunks to run; the window is full from the 7th on.", min=8)
        ] = 10,
        memory: Annotated[str | None, typer.Option(help="Memory policy; by default a window of 21.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    ) -> None:
        """Seconds a chunk of the core on a CPU, and the ratio to recomputing the window with plain diffusers blocks."""
        from streamvid.bench_core import measure

        results = [measure(count, chunks, memory) for count in threads or (1, 2)]
        if as_json:
            typer.echo(json.dumps(results))
            return
        for result in results:
            typer.echo(
                f"threads {result['threads']}: {result['seconds_per_chunk']:.3f} s a chunk "
                f"({result['passes_per_chunk']} passes), plain diffusers {result['plain_seconds_per_chunk']:.3f} s, "
                f"ratio {result['ratio']:.2f}, memory {result['memory_bytes'] / 2**20:.1f} MiB"
            )
        typer.echo(
            "\n".join(f"  {key}: {value}" for key, value in results[0]["card"].items() if key != "threads")
        )
