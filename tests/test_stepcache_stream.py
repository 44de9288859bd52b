"""Step caches on real streams: the random tiny model, the KV cache, snapshots."""

from __future__ import annotations

import dataclasses
import itertools
import warnings

import pytest
import torch

import streamvid
from streamvid.errors import StreamvidError
from streamvid.noise import CounterNoise
from streamvid.sampler import FewStepSampler
from streamvid.stepcache import STEP_CACHES, build_step_cache
from streamvid.stepcache.types import ChunkInfo, Decision

CASES = [
    (name, kind) for name, method in STEP_CACHES.items() for kind in sorted(method.kinds) if method.lively
]
PROMPT = "a red ball moving left"


@pytest.fixture(scope="module")
def pipes(tiny_random_folder):
    few = streamvid.load(str(tiny_random_folder))
    few.config = dataclasses.replace(few.config, denoising_steps=(1000, 750, 500, 250))
    many = streamvid.load(str(tiny_random_folder))
    many.config = dataclasses.replace(many.config, num_inference_steps=8, guidance_scale=2.0)
    return {"fresh": few, "same": many}


@pytest.fixture(scope="module")
def plain(pipes):
    return {kind: run(pipe, "none")[0] for kind, pipe in pipes.items()}


def run(pipe, spec, chunks=2, **options):
    """Latents ``[F, c, h, w]``, the accounting, and the keys and values the last committed chunk left."""
    with (
        warnings.catch_warnings(),
        pipe.stream(PROMPT, step_cache=spec, output_type="latent", height=32, width=32, **options) as stream,
    ):
        warnings.simplefilter("ignore")
        made = [torch.as_tensor(c.frames) for c in itertools.islice(stream.chunks(), chunks)]
        return torch.cat(made), stream.stats()["step_cache"]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_neutral_is_bit_equal_and_lively_skips(pipes, plain, name, kind):
    method = STEP_CACHES[name]
    same, report = run(pipes[kind], method.neutral)
    assert torch.equal(same, plain[kind]) and report["compute_fraction"] == 1
    out, report = run(pipes[kind], method.lively)
    assert report["compute_fraction"] < 1 and out.isfinite().all()
    assert torch.equal(out[:3], plain[kind][:3])


@pytest.mark.parametrize(
    "text", ["mask:full_steps=2", "carry:threshold=1.2,dilate=0", "blockmap:threshold=1"]
)
def test_the_context_pass_leaves_what_a_full_run_leaves_for_the_same_latents(pipes, text):
    options = {"step_cache": text, "output_type": "latent", "height": 32, "width": 32}
    with pipes["fresh"].stream(PROMPT, **options) as stream:
        list(itertools.islice(stream.chunks(), 2))
        engine, state = stream._engine, stream._state
        assert state.step_cache.accounting.compute_fraction < 1
        engine.finish(state)
        side, rows = state.sides["cond"], 6 * 4

        def kept():
            return [t[:, :rows].clone() for bank in side.cache.all_banks() for t in (bank.k, bank.v)]

        after_skips, latents = kept(), torch.cat(state.recent, 1)
        side.cache.reset()
        for start in (0, 3):
            engine.encode_past(side, latents[:, start : start + 3])
    assert all(torch.equal(a, b) for a, b in zip(after_skips, kept(), strict=True))


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_a_subset_of_all_tokens_equals_a_full_step(pipes, order):
    pipe = pipes["fresh"]
    tokens = torch.arange(12)
    if order == "shuffled":
        tokens = tokens[torch.randperm(12, generator=torch.Generator().manual_seed(1))]
    outs = []
    for spec in ("none", "tokens"):
        cache = build_step_cache(spec)
        with pipe.stream(PROMPT, step_cache=cache, output_type="latent", height=32, width=32) as stream:
            if spec == "tokens":
                session = stream._state.step_cache
                session.decide = lambda info, x: Decision(mode="subset", reason="test", tokens=tokens)
            made = [torch.as_tensor(c.frames) for c in itertools.islice(stream.chunks(), 2)]
            outs.append(torch.cat(made))
    torch.testing.assert_close(outs[1], outs[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "spec",
    [
        "tokens:ratio=0.5 + guard",
        "taocache:skip=2",
        "motion:threshold=1.1",
        "carry:threshold=1.2,dilate=0 + blockmap:threshold=1",
    ],
)
def test_a_snapshot_goes_on_bit_for_bit(pipes, spec, tmp_path):
    pipe = pipes["fresh"]
    whole, _ = run(pipe, spec, chunks=4)
    with pipe.stream(PROMPT, step_cache=spec, output_type="latent", height=32, width=32) as stream:
        list(itertools.islice(stream.chunks(), 2))
        stream.snapshot(tmp_path / "s.safetensors")
    with pipe.restore(tmp_path / "s.safetensors") as stream:
        rest = [torch.as_tensor(c.frames) for c in itertools.islice(stream.chunks(), 2)]
    assert torch.equal(torch.cat(rest), whole[6:])


def test_a_guard_after_a_mask_restores_the_spread_of_full_steps():
    sampler = FewStepSampler(
        (1000.0, 900.0, 700.0, 400.0), FewStepSampler.from_config(streamvid_config()).schedule
    )

    def shrinking(x_t, timestep, **_):
        """Answers with content whose spread depends on the step: reuse of an earlier step has the wrong one."""
        spread = 1.0 if timestep < 800 else 0.5
        x0 = spread * torch.linspace(-1, 1, x_t[0].numel()).view(x_t.shape)
        return (x_t - x0) / sampler.schedule.sigma(timestep)

    def spread_of(spec):
        session, noise, steps = build_step_cache(spec).open(sampler.plan()), CounterNoise([0]), []
        for index in range(2):
            chunk = ChunkInfo(index=index, start_latent=3 * index, num_latents=3)
            shape = (1, 3, 2, 8, 8)
            sampler.sample_chunk(shrinking, chunk, noise, shape, step_cache=session, callback=steps.append)
        return float(steps[-2]["x0"].std() / steps[2]["x0"].std())

    assert spread_of("mask:skip=2") == pytest.approx(0.5, rel=1e-3)
    assert spread_of("mask:skip=2 + guard") == pytest.approx(1.0, rel=0.03)


def streamvid_config():
    from streamvid.config import StreamConfig

    return StreamConfig()


def test_a_stack_reports_decides_and_refuses_two_block_methods(pipes):
    _, report = run(pipes["fresh"], "mask:skip=2 + tokens:steps=1")
    assert report["chunks"][1]["modes"] == ["full", "subset", "reuse", "full"]
    with pytest.raises(StreamvidError, match="only one step cache with block hooks"):
        run(pipes["same"], "pab + dbcache")


@pytest.mark.parametrize(
    "spec", ["teacach", "mask:skips=1", "mask:skip=9", "mask:skip=2 + nothing", "tokens:ratio=2"]
)
def test_a_wrong_spec_is_one_clear_sentence(pipes, spec):
    with pytest.raises(StreamvidError) as caught:
        run(pipes["fresh"], spec)
    assert "\n" not in str(caught.value)


def test_fused_context_passes_change_nothing_but_rounding(pipes, plain):
    out, report = run(pipes["fresh"], "fused + mask:skip=2")
    want, _ = run(pipes["fresh"], "mask:skip=2")
    torch.testing.assert_close(out, want, atol=2e-5, rtol=0)
    assert "merge_clean" in run(pipes["fresh"], "fused", chunks=3)[1]["chunks"][2]["modes"]
    with pytest.raises(StreamvidError, match="watches the blocks"):
        run(pipes["same"], "fused + teacache")
