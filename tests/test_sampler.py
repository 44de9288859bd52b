"""The two samplers over a mock model: the reference loop, guidance, branches, cancellation."""

from __future__ import annotations

import pytest
import torch
from mock_denoiser import ConstantX0, MockDenoiser

from streamvid.config import StreamConfig
from streamvid.errors import StreamvidError
from streamvid.noise import CounterNoise
from streamvid.sampler import FewStepSampler, ManyStepSampler, make_sampler
from streamvid.schedule import FlowSchedule
from streamvid.stepcache.base import NoCache
from streamvid.stepcache.types import ChunkInfo

SHAPE = (2, 3, 4, 4, 4)
CHUNK = ChunkInfo(index=2, start_latent=6, num_latents=3)
NOISE = CounterNoise([1, 2])


def test_few_step_equals_the_loop_written_out():
    model, schedule = MockDenoiser(), FlowSchedule(5.0)
    sampler = FewStepSampler.from_config(StreamConfig())
    assert sampler.timesteps == (1000.0, 937.5, 833.3333129882812, 625.0)
    x = NOISE.noise(2, 0, SHAPE)
    for step, t in enumerate(sampler.timesteps):
        x0 = schedule.flow_to_x0(model(x, t), x, t)
        if step < 3:
            x = schedule.add_noise(x0, NOISE.noise(2, step + 1, SHAPE), sampler.timesteps[step + 1])
    assert torch.equal(sampler.sample_chunk(model, CHUNK, NOISE, SHAPE), x0)


@pytest.mark.parametrize("solver", ["euler", "unipc"])
def test_many_step_reaches_the_answer_of_a_constant_model(solver):
    sampler = ManyStepSampler(8, shift=3.0, guidance_scale=4.0, solver=solver)
    x0 = torch.randn(SHAPE)
    sigma_of = dict(zip(sampler.timesteps, sampler.sigmas, strict=True)).__getitem__
    out = sampler.sample_chunk(ConstantX0(x0, sigma_of), CHUNK, NOISE, SHAPE)
    torch.testing.assert_close(out, x0, atol=1e-4, rtol=0)


def test_many_step_euler_equals_the_loop_written_out():
    model = MockDenoiser()
    sampler = ManyStepSampler(6, shift=5.0, guidance_scale=3.0, solver="euler")
    raw = torch.linspace(1, 1 / 6, 6, dtype=torch.float64)
    want = 5 * raw / (1 + 4 * raw)
    torch.testing.assert_close(torch.tensor(sampler.sigmas, dtype=torch.float64), want, atol=1e-6, rtol=0)
    x = NOISE.noise(2, 0, SHAPE)
    for i, t in enumerate(sampler.timesteps):
        cond, uncond = model(x, t), model(x, t, branch="uncond")
        following = sampler.sigmas[i + 1] if i < 5 else 0.0
        x = x + (following - sampler.sigmas[i]) * (uncond + 3.0 * (cond - uncond))
    out = sampler.sample_chunk(model, CHUNK, NOISE, SHAPE)
    torch.testing.assert_close(out, x, atol=1e-5, rtol=0)


def test_each_chunk_starts_a_fresh_scheduler():
    sampler = ManyStepSampler(5, solver="unipc")
    first = sampler.sample_chunk(MockDenoiser(), CHUNK, NOISE, SHAPE)
    assert torch.equal(first, sampler.sample_chunk(MockDenoiser(), CHUNK, NOISE, SHAPE))


def test_guidance_of_one_runs_one_branch_and_others_run_two():
    for scale, branches in [(1.0, {"cond"}), (2.0, {"cond", "uncond"})]:
        model = MockDenoiser()
        make_sampler(StreamConfig(guidance_scale=scale)).sample_chunk(model, CHUNK, NOISE, SHAPE)
        assert {branch for _, branch, _ in model.log} == branches


def test_config_selects_the_sampler():
    assert isinstance(make_sampler(StreamConfig()), FewStepSampler)
    assert isinstance(make_sampler(StreamConfig(num_inference_steps=8)), ManyStepSampler)
    assert FewStepSampler.from_config(StreamConfig(warp_steps=False)).timesteps == (1000, 750, 500, 250)


def test_a_clip_does_not_depend_on_its_batch():
    sampler = make_sampler(StreamConfig())
    both = sampler.sample_chunk(MockDenoiser(), CHUNK, NOISE, SHAPE)
    alone = sampler.sample_chunk(MockDenoiser(), CHUNK, CounterNoise([2]), (1, *SHAPE[1:]))
    torch.testing.assert_close(both[1:], alone, atol=1e-6, rtol=0)


def test_the_callback_sees_every_step():
    seen = []
    sampler = make_sampler(StreamConfig())
    out = sampler.sample_chunk(MockDenoiser(), CHUNK, NOISE, SHAPE, callback=seen.append)
    assert [s["info"].step for s in seen] == [0, 1, 2, 3] and torch.equal(seen[-1]["x0"], out)
    assert torch.equal(seen[0]["x_t"], NOISE.noise(2, 0, SHAPE))


def test_the_fused_denoiser_serves_the_first_step_only():
    model, fused = MockDenoiser(), MockDenoiser()
    sampler = make_sampler(StreamConfig())
    session = NoCache().open(sampler.plan())
    out = sampler.sample_chunk(model, CHUNK, NOISE, SHAPE, fused=fused, step_cache=session)
    assert (len(fused.log), len(model.log)) == (1, 3)
    assert session.report()["chunks"][0]["modes"] == ["merge_clean", "full", "full", "full"]
    assert torch.equal(out, sampler.sample_chunk(MockDenoiser(), CHUNK, NOISE, SHAPE))


def test_a_session_of_another_plan_is_refused():
    session = NoCache().open(ManyStepSampler(4).plan())
    with pytest.raises(StreamvidError, match="other steps"):
        make_sampler(StreamConfig()).sample_chunk(MockDenoiser(), CHUNK, NOISE, SHAPE, step_cache=session)


def test_bad_settings_are_refused():
    with pytest.raises(StreamvidError, match="at least 1"):
        ManyStepSampler(0)
    with pytest.raises(StreamvidError, match="solver"):
        ManyStepSampler(4, solver="heun")  # type: ignore[arg-type]
