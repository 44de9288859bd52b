"""``streamvid bench codecs``: error, bytes and time of every KV codec on the keys and values of a running model."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from streamvid.commands import common


def register(app: typer.Typer) -> None:
    @app.command("codecs")
    def codecs(
        model: common.Model = "tiny",
        prompt: Annotated[list[str] | None, typer.Option(help="Repeatable; one clip each.")] = None,
        codec: Annotated[
            list[str] | None, typer.Option(help="Repeatable; by default every codec in its usual settings.")
        ] = None,
        frames: Annotated[int, typer.Option(help="Latent frames of history.", min=6)] = 24,
        chunks: Annotated[int, typer.Option(help="Chunks timed with each codec.", min=1)] = 8,
        device: common.Device = None,
        dtype: common.Dtype = None,
        threads: common.Threads = None,
        write: Annotated[
            str | None, typer.Option(help="Write the tables as a Markdown document here.")
        ] = None,
        as_json: common.AsJson = False,
    ) -> None:
        """Error, bytes and time of every KV codec on the keys and values of a running model."""
        from streamvid.codec_bench import CODEC_SPECS, PROMPTS, measure
        from streamvid.codec_report import document, tables, write_document

        pipe = common.load_model(model, device=device, dtype=dtype, threads=threads)
        result = measure(
            pipe,
            codec or list(CODEC_SPECS),
            prompt or list(PROMPTS),
            name=model,
            frames=frames,
            chunks=chunks,
        )
        if write is not None:
            write_document(write, document(result))
        if as_json:
            typer.echo(json.dumps(result))
        else:
            typer.echo("\n\n".join(f"{title}\n\n{table}" for title, table in tables(result)))
