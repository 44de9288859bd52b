"""``streamvid train-tiny``: the embedded model's recipe, from nothing to a loadable checkpoint."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated

import typer

from streamvid.commands import common


def register(app: typer.Typer) -> None:
    @app.command("train-tiny")
    def train_tiny(
        out: Annotated[
            Path, typer.Option("--out", "-o", help="Folder of the run; the model goes to OUT/model.")
        ],
        minutes: Annotated[float, typer.Option(help="Time for everything.", min=0.1)] = 240.0,
        device: Annotated[str, typer.Option(help="cpu, cuda.")] = "cpu",
        seed: common.Seed = 0,
        init_vae: Annotated[
            Path | None, typer.Option(help="VAE folder to start from instead of from nothing.")
        ] = None,
        resume: Annotated[
            bool, typer.Option(help="Go on with the run in OUT; --no-resume refuses a folder that has one.")
        ] = True,
        as_json: common.AsJson = False,
    ) -> None:
        """Train the embedded model: VAE, text encoder, transformer, few steps; go on after a kill by the same line.

        Data-parallel over cores or GPUs: `torchrun --nproc-per-node 2 -m streamvid.cli train-tiny …`.
        """
        from streamvid.tiny.train import last_losses, main

        logging.basicConfig(level=logging.WARNING if as_json else logging.INFO, format="%(message)s")
        folder = main(minutes, out, device=device, seed=seed, init_vae=init_vae, resume=resume)
        losses = last_losses(out)
        if as_json:
            typer.echo(json.dumps({"path": str(folder), "losses": losses}))
            return
        for stage, (first, last) in losses.items():
            typer.echo(f"{stage:5} loss {first:.4f} -> {last:.4f}")
        typer.echo(f'written to {folder}; try: streamvid generate -m {folder} "a big red ball" -o out.mp4')
