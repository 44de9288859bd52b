"""``streamvid bench stepcaches``: what each step cache saves, timed side by side in one process."""

from __future__ import annotations

import json
import statistics
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamvid.commands import common

if TYPE_CHECKING:
    from streamvid.pipeline import StreamPipeline

FEW_STEP = (
    "mask:skip=2", "mask:skip=1", "mask:skip=1+2", "tokens:ratio=0.5", "tokens:ratio=0.25", "carry",
    "carry:refresh=16", "blockmap:threshold=0.2,steps=1", "taocache:skip=2", "adams:skip=2", "exit", "motion",
    "mask:skip=2 + guard", "fused",
)  # fmt: skip
MANY_STEP = (
    "mask:full_steps=16", "taocache:every=3,start=0.2", "adams:every=3,start=0.2", "teacache", "magcache",
    "seacache", "flowcache", "carry:threshold=0.05,scope=chunk",
    "fastercache", "pab", "firstblock", "dbcache", "taylorseer", "adacache", "mixcache",
    "unicp", "adacorrection", "blocks", "lightningcp",
)  # fmt: skip


def register(app: typer.Typer) -> None:
    @app.command("stepcaches")
    def stepcaches(
        model: common.Model = "tiny",
        specs: Annotated[
            list[str] | None,
            typer.Option("--step-cache", help="Step cache; repeatable. Default: all that fit the model."),
        ] = None,
        prompt: Annotated[
            str, typer.Option(help="What to show.")
        ] = "a big red ball sliding from side to side on a navy background",
        chunks: Annotated[int, typer.Option(help="Timed chunks a cache.", min=1)] = 8,
        fewer: Annotated[
            list[int] | None, typer.Option(help="Also the same model with so many steps; repeatable.")
        ] = None,
        seed: common.Seed = 0,
        steps: common.Steps = None,
        guidance: common.Guidance = None,
        memory: common.Memory = None,
        device: common.Device = None,
        dtype: common.Dtype = None,
        threads: common.Threads = None,
        as_json: common.AsJson = False,
    ) -> None:
        """Time step caches against full steps: all streams are open at once and take turns, chunk by chunk.

        Inside the clock: denoising and context pass of one chunk; not the decoder. The first two chunks (always
        full, and where caches learn) are not timed. CPU seconds are those of this process.
        """
        pipe = common.load_model(model, device=device, dtype=dtype, threads=threads, max_streams=64)
        options = common.stream_options(
            num_inference_steps=steps, guidance_scale=guidance, memory=memory, seed=seed
        )
        rows = measure(pipe, prompt, specs or None, fewer or [], chunks, options)
        if as_json:
            typer.echo(json.dumps(rows))
        else:
            show(rows)


def measure(
    pipe: StreamPipeline,
    prompt: str,
    specs: list[str] | None,
    fewer: list[int],
    chunks: int,
    options: dict[str, Any],
) -> list[dict[str, Any]]:
    """One row a step cache, full steps first.

    Each has seconds a chunk, ratios to full steps, the compute fraction, and ``latent_error``: RMS difference of the
    latents from those of full steps with the same noise, relative to their RMS.
    """
    many = pipe.config.num_inference_steps is not None
    listed = list(specs or (MANY_STEP if many else FEW_STEP))
    setups: list[tuple[str, dict[str, Any]]] = [("none", {})]
    setups += [(f"{count} steps", {"num_inference_steps": count}) for count in fewer]
    setups += [(spec, {"step_cache": spec}) for spec in listed]
    streams = [pipe.stream(prompt, output_type="latent", **(options | extra)) for _, extra in setups]
    error = [0.0] * len(setups)
    wall: list[list[float]] = [[] for _ in setups]
    cpu: list[list[float]] = [[] for _ in setups]
    try:
        readers = [stream.chunks() for stream in streams]
        for turn in range(chunks + 2):
            for i, reader in enumerate(readers):
                begun, used = time.perf_counter(), time.process_time()
                latents = next(reader).frames
                if i == 0:
                    plain = latents
                if turn >= 2:
                    error[i] += float(
                        (latents - plain).float().square().mean() / plain.float().square().mean()
                    )
                    wall[i].append(time.perf_counter() - begun)
                    cpu[i].append(time.process_time() - used)
        reports = [stream.stats()["step_cache"] for stream in streams]
    finally:
        for stream in streams:
            stream.close()
    return [
        _row(setups[i][0], wall[i], cpu[i], wall[0], cpu[0], reports[i])
        | {"latent_error": (error[i] / chunks) ** 0.5}
        for i in range(len(setups))
    ]


def _row(
    name: str, wall: list[float], cpu: list[float], wall0: list[float], cpu0: list[float], report: Any
) -> dict[str, Any]:
    timed = report["chunks"][-len(wall) :]
    forwards = sum(chunk["run"] + chunk["skipped"] for chunk in timed)
    return {
        "step_cache": name,
        "wall_seconds": statistics.median(wall),
        "cpu_seconds": statistics.median(cpu),
        # Totals, not medians: some caches skip in some chunks only. Turns alternate, so both met the same load.
        "wall_ratio": sum(wall0) / sum(wall),
        "cpu_ratio": sum(cpu0) / sum(cpu),
        "compute_fraction": sum(chunk["cost"] for chunk in timed) / forwards,
        "forwards_skipped": sum(chunk["skipped"] for chunk in timed) / forwards,
        "chunks": len(wall),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """The rows as a table on standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table("step cache", "ms a chunk", "wall ratio", "CPU ratio", "compute", "skipped", "error")
    for row in rows:
        table.add_row(
            row["step_cache"],
            f"{row['wall_seconds'] * 1e3:.1f}",
            f"{row['wall_ratio']:.2f}",
            f"{row['cpu_ratio']:.2f}",
            f"{row['compute_fraction']:.2f}",
            f"{row['forwards_skipped']:.2f}",
            f"{row['latent_error']:.3f}",
        )
    Console(width=100).print(table)
