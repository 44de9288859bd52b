"""Nothing is fitted to the given cases: new ones, made by an independent plain implementation, verify as well."""

from __future__ import annotations

import json
from pathlib import Path

import plain_rollout
import pytest
import torch

import streamvid
from streamvid import cli
from streamvid.checkpoint_keys import to_original
from streamvid.noise import CounterNoise
from streamvid.verify import verify_case


@pytest.mark.parametrize("seed", range(16))
def test_a_case_of_drawn_sizes_is_reproduced(seed: int, tmp_path: Path) -> None:
    """Heads, widths, grids, chunks, windows, sinks, steps, shifts, given frames, batches, context noise: all drawn."""
    setup = plain_rollout.random_setup(seed)
    result = verify_case(plain_rollout.record(tmp_path / "case", setup, pickled=seed % 3 == 0))
    assert result.problem is None
    worst = max(result.deviations, key=lambda deviation: deviation.value)
    assert result.ok and worst.value < 1e-5, (setup, worst)


@pytest.mark.parametrize(("name", "value"), [("local_attn_size", 6), ("sink_size", 0), ("num_heads", 1)])
def test_a_fresh_case_under_another_model_is_refused(name: str, value: int, tmp_path: Path, capsys) -> None:
    setup = plain_rollout.Setup(
        seed=0,
        batch=1,
        rows=4,
        columns=4,
        chunk=2,
        first_alone=False,
        given=0,
        generated=10,
        window=5,
        sink=1,
        heads=2,
        head_dim=16,
        layers=2,
        channels=16,
        text_len=5,
        steps=(1000, 500),
        shift=5.0,
        context_noise=0,
    )
    folder = plain_rollout.record(tmp_path / "case", setup)
    assert cli.main(["verify", str(folder)]) == 0
    config = json.loads((folder / "config.json").read_text())
    config["model"][name] = value
    (folder / "config.json").write_text(json.dumps(config))
    assert cli.main(["verify", str(folder)]) == 1
    capsys.readouterr()


@pytest.mark.parametrize(("memory", "window", "sink"), [("full", -1, 0), ("window:size=7,sink=1", 7, 1)])
def test_a_stream_is_the_plain_rollout(tiny_random_folder, memory: str, window: int, sink: int) -> None:
    """From a prompt to latents through the public surface, against the plain network, loop and window."""
    pipe = streamvid.load(tiny_random_folder)
    options = {"seed": 5, "output_type": "latent", "memory": memory, "height": 32, "width": 48}
    with pipe.stream("a red ball", **options) as stream:
        ours = torch.cat([chunk.frames for chunk, _ in zip(stream.chunks(), range(5), strict=False)])
        steps = stream.settings["timesteps"]
    geometry, config = pipe.model.geometry, pipe.config
    setup = plain_rollout.Setup(
        seed=5,
        batch=1,
        rows=4,
        columns=6,
        chunk=config.chunk_latents,
        first_alone=False,
        given=0,
        generated=5 * config.chunk_latents,
        window=window,
        sink=sink,
        heads=geometry.heads,
        head_dim=geometry.head_dim,
        layers=geometry.layers,
        channels=geometry.out_channels,
        text_len=config.text_len,
        steps=tuple(int(step) for step in config.denoising_steps),
        shift=config.timestep_shift,
        context_noise=0,
    )
    assert plain_rollout.schedule(setup.shift, setup.steps)[0] == pytest.approx(list(steps))
    weights = {to_original("transformer", k): v for k, v in pipe.transformer.state_dict().items()}
    source = CounterNoise([5])

    def noise(chunk: int, step: int, frames: int) -> torch.Tensor:
        shape = (1, frames, setup.channels, setup.rows, setup.columns)
        return source.noise(chunk, step, shape)

    embeds = pipe.text_encoder.encode(["a red ball"])
    plain, _ = plain_rollout.rollout(
        plain_rollout.PlainWan(setup, weights), embeds, noise, lambda name, tensor: None
    )
    deviation = (ours.double() - plain[0]).norm() / plain.norm()
    assert deviation < 1e-5, deviation
