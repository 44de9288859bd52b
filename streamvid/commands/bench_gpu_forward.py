"""``streamvid bench gpu-forward``: a whole forward of a published geometry with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    @app.command("gpu-forward")
    def gpu_forward(
        device: str = typer.Option("cuda", help="cuda, cuda:1; cpu for a trial run."),
        layers: int = typer.Option(30, help="Blocks; the defaults are Wan2.1 1.3B.", min=1),
        heads: int = typer.Option(12, help="Heads.", min=1),
        head_dim: int = typer.Option(128, help="Channels of a head.", min=8),
        ffn: int = typer.Option(8960, help="Width of the feed-forward layer.", min=1),
        latent: str = typer.Option("60x104", help="Latent rows x columns; 60x104 is 480x832 pixels."),
        windows: str = typer.Option("6,12,21", help="Latent frames attended to, separated by commas."),
        chunk: int = typer.Option(3, help="Latent frames of a chunk.", min=1),
        rounds: int = typer.Option(10, help="Forwards of each row.", min=1),
        output: Path | None = typer.Option(None, "--output", "-o", help="Write JSON here."),
    ) -> None:
        """Forward time dense, block-sparse and with 4-bit keys, by window, with the arithmetic's floor beside it."""
        import torch

        from streamvid.commands.bench_kernels import parse_grid
        from streamvid.errors import StreamvidError
        from streamvid.forward_bench import forward_times, random_model

        target = torch.device(device)
        if target.type == "cuda" and not torch.cuda.is_available():
            raise StreamvidError(
                "bench gpu-forward needs a CUDA device and none is visible; --device cpu tries it out"
            )
        try:
            sizes = tuple(int(part) for part in windows.split(","))
        except ValueError:
            raise StreamvidError(
                f"--windows {windows!r} is not a list of whole numbers such as 6,12,21"
            ) from None
        if min(sizes) < 2 * chunk:
            raise StreamvidError(
                f"--windows {windows}: a window must hold at least two chunks of {chunk} frames"
            )
        dtype = torch.bfloat16 if target.type == "cuda" else torch.float32
        net = random_model(layers, heads, head_dim, ffn, device=target, dtype=dtype)
        rows = []
        for row in forward_times(net, grid=parse_grid(latent), windows=sizes, chunk=chunk, rounds=rounds):
            rows.append(row)
            typer.echo(_line(row))
        if output is not None:
            output.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


def _line(row: dict) -> str:
    head = f"window {row['window']:3d}  {row['method']:22s}"
    if "skipped" in row:
        return f"{head} not run: {row['skipped']}"
    floor = f", floor {row['floor_ms']:.1f} ms" if "floor_ms" in row else ""
    return (
        f"{head} {row['ms']:9.2f} ms ({row['ms_min']:.2f}-{row['ms_max']:.2f}){floor}, {row['speedup']:.2f}x of dense, "
        f"first {row['first_ms']:.1f} ms, cache {row['cache_gib']:.2f} GiB"
    )
