"""``streamvid batch``: many clips from a file of prompts, resumable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from streamvid.commands import common


def register(app: typer.Typer) -> None:
    @app.command("batch")
    def batch(
        prompts: Annotated[
            Path,
            typer.Argument(
                help="A prompt a line; or .jsonl: an object a line with prompt and its own options."
            ),
        ],
        output: Annotated[
            Path, typer.Option("--output", "-o", help="Folder for the clips and manifest.jsonl.")
        ] = Path("clips"),
        workers: Annotated[
            int,
            typer.Option(help="Processes, each with its own model.", min=1, rich_help_panel=common.MACHINE),
        ] = 1,
        num_frames: common.NumFrames = 81,
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
        """Make a clip for every prompt of a file. Run it again to make what is missing."""
        from streamvid.batch import Job, plan_jobs, read_requests, run_batch
        from streamvid.clip import ClipRequest
        from streamvid.errors import StreamvidError

        if seed == -1:
            raise StreamvidError(
                "a batch needs a seed that is the same when it is resumed; give one, or one a line"
            )
        defaults = ClipRequest(
            prompt="",
            options=common.stream_options(
                num_frames=num_frames,
                seed=seed,
                height=height,
                width=width,
                num_inference_steps=steps,
                guidance_scale=guidance,
                negative_prompt=negative_prompt,
                memory=memory,
                codec=codec,
                sparse=sparse,
                cross=cross,
                step_cache=step_cache,
                fuse_context=fuse_context,
            ),
            transition=transition,
            fps=fps,
            crf=crf,
            enlarge=enlarge,
        )
        source = common.model_arguments(
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
        jobs = plan_jobs(read_requests(prompts, defaults), output, source)
        common.stop_on_term()
        begun = 0

        def done(job: Job, entry: dict[str, Any], before: bool) -> None:
            nonlocal begun
            begun += 1
            if not as_json:
                state = "there already" if before else f"{entry['seconds']:.1f} s"
                typer.echo(
                    f"[{begun}/{len(jobs)}] {entry['file']}: {entry['frames']} frames, {state}", err=True
                )

        lines = run_batch(jobs, output, source, workers=workers, on_done=done)
        if as_json:
            for line in lines:
                typer.echo(json.dumps(line))
        else:
            typer.echo(f"{len(lines)} clips in {output}")
