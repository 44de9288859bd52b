"""``streamvid generate``: prompt in, video file out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from streamvid.commands import common


def register(app: typer.Typer) -> None:
    @app.command("generate")
    def generate(
        prompt: Annotated[str, typer.Argument(help="What to show.")],
        output: Annotated[
            Path | None,
            typer.Option(
                "--output", "-o", help=".mp4, .gif or .png (a sequence); by default named after the prompt."
            ),
        ] = None,
        num_frames: common.NumFrames = 81,
        endless: Annotated[
            bool,
            typer.Option(
                "--endless", help="Until Ctrl-C, which completes the file.", rich_help_panel=common.VIDEO
            ),
        ] = False,
        prompt_at: Annotated[
            list[str] | None,
            typer.Option(
                help="FRAME:PROMPT, a later prompt; repeatable.",
                metavar="FRAME:PROMPT",
                rich_help_panel=common.VIDEO,
            ),
        ] = None,
        transition: common.Transition = "cross",
        seed: common.Seed = 0,
        height: common.Height = None,
        width: common.Width = None,
        fps: common.Fps = None,
        crf: common.Crf = 18,
        enlarge: common.Enlarge = 1,
        steps: common.Steps = None,
        guidance: common.Guidance = None,
        negative_prompt: common.Negative = None,
        image: Annotated[
            Path | None,
            typer.Option(help="First frame, for image-to-video models.", rich_help_panel=common.VIDEO),
        ] = None,
        video: Annotated[
            Path | None, typer.Option(help="Clip to go on from.", rich_help_panel=common.VIDEO)
        ] = None,
        memory: common.Memory = None,
        codec: common.Codec = None,
        sparse: common.Sparse = None,
        cross: common.Cross = None,
        step_cache: common.StepCache = "none",
        fuse_context: common.FuseContext = False,
        model: common.Model = "tiny",
        vae: common.Vae = None,
        text_encoder: common.TextEncoder = None,
        lora: common.Lora = None,
        device: common.Device = None,
        dtype: common.Dtype = None,
        attention: common.Attention = "auto",
        compile: common.Compile = False,
        threads: common.Threads = None,
        as_json: common.AsJson = False,
    ) -> None:
        """Make a video from a prompt, written as its frames arrive."""
        from streamvid.clip import ClipRequest, clip_name, parse_prompt_at, write_clip
        from streamvid.timeline import resolve_seed
        from streamvid.video_io import VideoWriter

        seed = resolve_seed(seed)
        request = ClipRequest(
            prompt=prompt,
            options=common.stream_options(
                num_frames=None if endless else num_frames,
                seed=seed,
                height=height,
                width=width,
                num_inference_steps=steps,
                guidance_scale=guidance,
                negative_prompt=negative_prompt,
                image=image,
                video=video,
                memory=memory,
                codec=codec,
                sparse=sparse,
                cross=cross,
                step_cache=step_cache,
                fuse_context=fuse_context,
            ),
            prompt_at=tuple(parse_prompt_at(text) for text in prompt_at or ()),
            transition=transition,
            fps=fps,
            crf=crf,
            enlarge=enlarge,
        )
        path = output or Path(clip_name(prompt, seed))
        # A name that cannot be written is told before loading.
        VideoWriter(path, 16.0 if fps is None else fps, crf=crf).abort()
        common.stop_on_term()
        pipe = common.load_model(
            model,
            device=device,
            dtype=dtype,
            attention=attention,
            compile=compile,
            threads=threads,
            vae=vae,
            text_encoder=text_encoder,
            lora=lora,
        )
        with common.show_progress(path.name, None if endless else num_frames, quiet=as_json) as progress:
            result = write_clip(
                pipe,
                request,
                path,
                on_start=None if as_json else lambda stream: common.show_settings(stream.settings),
                progress=progress,
            )
        for receipt in result["receipts"]:
            if receipt["status"] == "dropped":
                typer.echo(
                    f"note: {receipt['text']!r} was not shown: it would have begun with the chunk at frame "
                    f"{receipt['frame']}, and the clip has {result['frames']} frames",
                    err=True,
                )
        if as_json:
            typer.echo(json.dumps(result))
        else:
            first = result["stats"]["first_frame_seconds"]
            typer.echo(
                f"{path}: {result['frames']} frames in {result['seconds']:.1f} s, first frame after {first:.2f} s, "
                f"seed {seed}"
            )
