"""``streamvid calibrate``: one run of a model, one JSON file that step caches read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from streamvid.commands import common

DEFAULT_PROMPTS = (
    "a big red ball sliding from side to side on a grey background",
    "a small blue star spinning on a black background",
)


def register(app: typer.Typer) -> None:
    @app.command("calibrate")
    def calibrate(
        checkpoint: Annotated[str, typer.Argument(help="Name, file, folder or owner/name.")],
        output: Annotated[Path, typer.Option("--output", "-o", help="JSON file to write.")],
        prompts: Annotated[
            Path | None, typer.Option(help="Text file, one prompt a line; two built-in ones by default.")
        ] = None,
        chunks: Annotated[int, typer.Option(help="Chunks a prompt; the first is not measured.", min=2)] = 3,
        masks: Annotated[bool, typer.Option(help="Also search static masks.")] = True,
        seed: common.Seed = 0,
        height: common.Height = None,
        width: common.Width = None,
        steps: common.Steps = None,
        guidance: common.Guidance = None,
        memory: common.Memory = None,
        codec: common.Codec = None,
        vae: common.Vae = None,
        text_encoder: common.TextEncoder = None,
        lora: common.Lora = None,
        device: common.Device = None,
        dtype: common.Dtype = None,
        attention: common.Attention = "auto",
        threads: common.Threads = None,
        as_json: common.AsJson = False,
    ) -> None:
        """Measure a model's steps for step caches (file=... of mask, magcache, taocache, teacache, blocks)."""
        from streamvid.calibrator import calibrate as measure
        from streamvid.stepcache.calibration import save

        texts = read_prompts(prompts)
        common.check_writable(output)
        pipe = common.load_model(
            checkpoint,
            device=device,
            dtype=dtype,
            attention=attention,
            threads=threads,
            vae=vae,
            text_encoder=text_encoder,
            lora=lora,
        )
        options = common.stream_options(
            height=height,
            width=width,
            num_inference_steps=steps,
            guidance_scale=guidance,
            memory=memory,
            codec=codec,
        )
        tell = None if as_json else lambda text: typer.echo(text, err=True)
        key, values = measure(pipe, texts, chunks=chunks, seed=seed, masks=masks, progress=tell, **options)
        save(output, key, values)
        if as_json:
            typer.echo(json.dumps({"path": str(output), "key": key, "values": values}))
        else:
            typer.echo(f"{output}: {len(key['timesteps'])} steps, {len(texts)} prompts")


def read_prompts(path: Path | None) -> list[str]:
    """Prompts of a file, one a line, empty lines left out. Raises StreamvidError when there are none."""
    from streamvid.errors import StreamvidError

    if path is None:
        return list(DEFAULT_PROMPTS)
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").split("\n")]
    except OSError as error:
        raise StreamvidError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise StreamvidError(f"{path}: is not a text file in UTF-8") from None
    prompts = [line for line in lines if line]
    if not prompts:
        raise StreamvidError(f"{path} holds no prompt; write one a line")
    return prompts
