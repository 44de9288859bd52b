"""``streamvid bench gpu-stream``: whole streams of a published geometry with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    @app.command("gpu-stream")
    def gpu_stream(
        device: str = typer.Option("cuda", help="cuda, cuda:1; cpu for a trial run."),
        layers: int = typer.Option(30, help="Blocks; the defaults are Wan2.1 1.3B.", min=1),
        heads: int = typer.Option(12, help="Heads.", min=1),
        head_dim: int = typer.Option(128, help="Channels of a head.", min=8),
        ffn: int = typer.Option(8960, help="Width of the feed-forward layer.", min=1),
        latent: str = typer.Option("60x104", help="Latent rows x columns; 60x104 is 480x832 pixels."),
        vae: str = typer.Option("taehv,wan", help="Decoders, separated by commas."),
        memory: str | None = typer.Option(None, help="Memory policy; a window of 21 frames."),
        chunks: int = typer.Option(20, help="Chunks in the steady state.", min=2),
        output: Path | None = typer.Option(None, "--output", "-o", help="Write JSON here."),
    ) -> None:
        """Frames a second of the whole stream with TAEHV and the Wan VAE, eager and compiled, with the floor."""
        import torch

        from streamvid.commands.bench_kernels import parse_grid
        from streamvid.commands.common import check_writable
        from streamvid.errors import StreamvidError
        from streamvid.eval.machine import card_line, machine_card
        from streamvid.eval.random_stream import DECODERS, stream_rows
        from streamvid.eval.store import plain
        from streamvid.memory.files import write_whole

        target = torch.device(device)
        if target.type == "cuda" and not torch.cuda.is_available():
            raise StreamvidError(
                "bench gpu-stream needs a CUDA device and none is visible; --device cpu tries it out"
            )
        decoders = tuple(part.strip() for part in vae.split(","))
        for name in decoders:
            if name not in DECODERS:
                raise StreamvidError(f"--vae {vae!r}: unknown decoder {name!r} (allowed: taehv, wan)")
        if output is not None:
            check_writable(output)
        sizes = {"layers": layers, "heads": heads, "head_dim": head_dim, "ffn": ffn}
        rows = []
        for row in stream_rows(
            sizes, grid=parse_grid(latent), device=target, decoders=decoders, memory=memory, chunks=chunks
        ):
            rows.append(row)
            period, floor = row["period_ms"], row["floor_ms"].get("total")
            typer.echo(
                f"{row['decoder']:6s} {'compiled' if row['compiled'] else 'eager':9s} {row['fps']:8.2f} frames/s, "
                f"chunk {period['p50']:.1f} ms (p95 {period['p95']:.1f})"
                + (f", floor {floor:.1f} ms" if floor else "")
                + f", first frame {row['first_frame_ms']['p50']:.1f} ms"
            )
        card = machine_card()
        typer.echo(f"machine: {card_line(card)}")
        if output is not None:
            write_whole(output, json.dumps(plain({"machine": card, "rows": rows}), indent=1) + "\n")
