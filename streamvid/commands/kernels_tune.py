"""``streamvid kernels tune``: find the fastest tiles on this GPU and keep them for every later stream."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    @app.command("tune")
    def tune(
        heads: int = typer.Option(12, help="Heads of the model.", min=1),
        head_dim: int = typer.Option(128, help="Channels of a head."),
        grid: str = typer.Option("30x52", help="Token rows x columns of a latent frame."),
        chunk: int = typer.Option(3, help="Latent frames of a chunk.", min=1),
        window: int = typer.Option(21, help="Latent frames a chunk attends to.", min=1),
    ) -> None:
        """Measure tile sizes once, on the GPU the streams will use. Streams themselves never tune."""
        import torch

        from streamvid.commands.bench_kernels import parse_grid
        from streamvid.kernels.configs import save_tuned
        from streamvid.kernels.tune import best, require_gpu
        from streamvid.kernels.tune import tune as measure

        require_gpu()
        timings = []
        rows, columns = parse_grid(grid)
        for timing in measure(heads, head_dim, chunk * rows * columns, window * rows * columns):
            timings.append(timing)
            note = "  (default)" if timing.default else ""
            typer.echo(f"{timing.name} {timing.config}: {timing.milliseconds:.3f} ms{note}")
        path = save_tuned(best(timings), torch.cuda.get_device_name())
        typer.echo(f"kept in {path}")
