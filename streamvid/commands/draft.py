"""``streamvid draft``: a clip whose chunks a cheap model drafts and an expensive one answers for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from streamvid.commands import common


def register(app: typer.Typer) -> None:
    @app.command("draft")
    def draft(
        prompt: Annotated[str, typer.Argument(help="What to show.")],
        drafter: Annotated[str, typer.Option(help="The cheap model: name, file, folder or owner/name.")],
        output: Annotated[Path, typer.Option("--output", "-o", help=".mp4, .gif or .png (a sequence).")],
        router: Annotated[
            str, typer.Option(help="Who judges drafts: quality, imagereward, always, never.")
        ] = "quality",
        num_frames: common.NumFrames = 81,
        seed: common.Seed = 0,
        height: common.Height = None,
        width: common.Width = None,
        fps: common.Fps = None,
        crf: common.Crf = 18,
        enlarge: common.Enlarge = 1,
        memory: common.Memory = None,
        codec: common.Codec = None,
        model: common.Model = "tiny",
        vae: common.Vae = None,
        text_encoder: common.TextEncoder = None,
        device: common.Device = None,
        dtype: common.Dtype = None,
        attention: common.Attention = "auto",
        threads: common.Threads = None,
        as_json: common.AsJson = False,
    ) -> None:
        """Draft each chunk with a cheap model (--drafter); the model (--model) makes the ones that are rejected."""
        from streamvid.clip import ClipRequest, write_clip
        from streamvid.drafting import DraftedPipeline
        from streamvid.timeline import resolve_seed
        from streamvid.video_io import VideoWriter

        options = common.stream_options(
            num_frames=num_frames,
            seed=resolve_seed(seed),
            height=height,
            width=width,
            memory=memory,
            codec=codec,
        )
        request = ClipRequest(prompt=prompt, options=options, fps=fps, crf=crf, enlarge=enlarge)
        VideoWriter(
            output, 16.0 if fps is None else fps, crf=crf
        ).abort()  # a name that cannot be written is told before loading
        common.stop_on_term()
        machine = {"device": device, "dtype": dtype, "attention": attention}
        target = common.load_model(model, threads=threads, vae=vae, text_encoder=text_encoder, **machine)
        cheap = common.load_model(drafter, vae=vae, text_encoder=text_encoder, **machine)
        pipe = DraftedPipeline(target, cheap, router)
        with common.show_progress(output.name, num_frames, quiet=as_json) as progress:
            result = write_clip(pipe, request, output, progress=progress)  # type: ignore[arg-type]
        if as_json:
            typer.echo(json.dumps(result))
            return
        drafting = result["stats"]["drafting"]
        typer.echo(
            f"{output}: {result['frames']} frames in {result['seconds']:.1f} s; drafts accepted "
            f"{drafting['accepted']}, rejected {drafting['rejected']}"
        )
