"""``streamvid profile-heads``: what every attention head of a model does, as a file that memory policies read."""

from __future__ import annotations

import json
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from streamvid.commands import common
from streamvid.commands.calibrate import read_prompts
from streamvid.errors import StreamvidError


def register(app: typer.Typer) -> None:
    @app.command("profile-heads")
    def profile_heads(
        checkpoint: Annotated[str, typer.Argument(help="Name, file, folder or owner/name.")],
        output: Annotated[Path, typer.Option("--output", "-o", help="JSON file to write.")],
        prompts: Annotated[
            Path | None, typer.Option(help="Text file, one prompt a line; two built-in ones by default.")
        ] = None,
        latents: Annotated[int, typer.Option(help="Latent frames a clip.", min=6)] = 21,
        threshold: Annotated[
            float, typer.Option(help="Forcing-KV: attention to the last 4 frames of a static head.")
        ] = 0.8,
        skip: Annotated[
            int, typer.Option(help="Forcing-KV: leading frames left out of that share.", min=0)
        ] = 1,
        dummy_share: Annotated[
            float, typer.Option(help="Dummy Forcing: part of all heads.", min=0.0, max=1.0)
        ] = 0.5,
        picture: Annotated[Path | None, typer.Option(help="PNG of the head types to write.")] = None,
        seed: common.Seed = 0,
        height: common.Height = None,
        width: common.Width = None,
        device: common.Device = None,
        dtype: common.Dtype = None,
        attention: common.Attention = "auto",
        threads: common.Threads = None,
        as_json: common.AsJson = False,
    ) -> None:
        """Label the heads of a model for forcing_kv, dummy_forcing and tri_attention (profile=FILE)."""
        from streamvid.head_profiler import draw_labels
        from streamvid.head_profiler import profile_heads as measure

        texts = read_prompts(prompts)
        common.check_writable(output)
        if picture is not None:
            common.check_writable(picture)
            if find_spec("matplotlib") is None:
                raise StreamvidError(
                    "--picture needs matplotlib; install it with: pip install 'streamvid[eval]'"
                )
        pipe = common.load_model(checkpoint, device=device, dtype=dtype, attention=attention, threads=threads)
        profile = measure(
            pipe,
            texts,
            latents=latents,
            seed=seed,
            threshold=threshold,
            skip=skip,
            dummy_share=dummy_share,
            progress=None if as_json else lambda text: typer.echo(text, err=True),
            **common.stream_options(height=height, width=width),
        )
        profile.save(output)
        if picture is not None:
            draw_labels(profile, str(picture))
        counts = {
            method: dict(Counter(label for row in rows for label in row))
            for method, rows in profile.labels.items()
        }
        if as_json:
            typer.echo(
                json.dumps({"path": str(output), "labels": counts, "tempcache": profile.table("tempcache")})
            )
        else:
            for method, kinds in counts.items():
                typer.echo(
                    f"{method:14}" + ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
                )
            typer.echo(f"tempcache     similarity {profile.table('tempcache')['similarity']}")
            typer.echo(f"written to {output}")
