"""``streamvid convert``: any checkpoint to one folder."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    @app.command("convert")
    def convert(
        source: str = typer.Argument(
            ..., metavar="IN", help="A weight file, a folder, owner/name, or a name."
        ),
        target: Path = typer.Argument(..., metavar="OUT", help="The folder to make."),
        which: str | None = typer.Option(None, "--which", help="ema or generator, of a training checkpoint."),
        dtype: str | None = typer.Option(
            None, "--dtype", help="float32, bfloat16 or float16; default: as it is."
        ),
        lora: list[str] = typer.Option([], "--lora", help="PATH or PATH@SCALE, merged in order."),
        vae: str | None = typer.Option(None, "--vae", help="Autoencoder to put in: Wan VAE or TAEHV."),
        text_encoder: str | None = typer.Option(None, "--text-encoder", help="UMT5 to put in."),
        tokenizer: str | None = typer.Option(None, "--tokenizer", help="Its tokenizer's folder."),
        as_json: bool = typer.Option(False, "--json", help="One JSON object, for scripts."),
    ) -> None:
        """Write any checkpoint as a diffusers-layout folder with streamvid.json."""
        from streamvid.convert import convert as write
        from streamvid.convert import parse_dtype

        written = write(
            source,
            target,
            which=which,
            dtype=parse_dtype(dtype),
            lora=lora,
            vae=vae,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
        )
        if as_json:
            typer.echo(json.dumps({"path": str(target), "written": written}))
        else:
            typer.echo(f"{target}: {', '.join(written)}")
