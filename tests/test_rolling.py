"""The joint window of Rolling Forcing as a stream. The recorded rollout is replayed in test_verify."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import streamvid
from streamvid.errors import StreamvidError
from streamvid.memory.cache import KVCache
from streamvid.noise import CounterNoise
from streamvid.rolling import RollingSampler, RollingState, joint_denoiser
from streamvid.schedule import FlowSchedule
from streamvid.stepcache.types import ChunkInfo
from streamvid.transformer import CausalWan


def roll(net, prompt, sampler, noise, shape, chunks, *, parity=False, on_chunk=None, callback=None):
    cache = KVCache(net.geometry.kv(1, *shape[3:]), "rolling_forcing", parity=parity)
    state, outs = RollingState(), []
    for index in range(chunks):
        info = ChunkInfo(
            index=index, start_latent=3 * index, num_latents=3, kind="first" if index == 0 else "normal"
        )
        x0 = sampler.sample_chunk(
            joint_denoiser(net, prompt, cache), info, noise, shape, state=state, callback=callback
        )
        cache.begin_chunk(3)
        net.context_pass(x0, 0.0, prompt, cache)
        cache.commit()
        outs.append(x0)
        if on_chunk is not None:
            on_chunk(index, cache)
    return torch.cat(outs, 1), cache, state


SHAPE = (1, 3, 4, 4, 4)


@pytest.fixture
def parts(tiny_random_model):
    net = CausalWan(tiny_random_model)
    prompt = net.prepare_prompt(
        torch.randn(1, 8, net.geometry.text_dim, generator=torch.Generator().manual_seed(0))
    )
    return net, prompt, FlowSchedule(5.0)


def test_an_endless_window_does_not_depend_on_how_long_it_runs(parts):
    net, prompt, schedule = parts
    sampler = RollingSampler((1000.0, 900.0, 700.0), schedule)
    short, _, _ = roll(net, prompt, sampler, CounterNoise([1]), SHAPE, 3)
    long, cache, state = roll(net, prompt, sampler, CounterNoise([1]), SHAPE, 12)
    assert torch.equal(long[:, :9], short)
    held = [frame for entry in cache.banks[0][0].entries for frame in entry.frames]
    assert held == [0, 1, 2, *range(18, 36)] and len(state.chunks) == 2


def test_a_stored_window_goes_on_bit_for_bit(parts):
    net, prompt, schedule = parts
    sampler, noise = RollingSampler((1000.0, 900.0, 700.0), schedule), CounterNoise([4])
    state, again = RollingState(), RollingState()
    calls = []

    def model(x_t, timesteps):
        calls.append(x_t.shape[1])
        return 0.5 * x_t + timesteps[:, None, None, None] / 1000

    def chunk(index, kind="normal"):
        return ChunkInfo(index=index, start_latent=3 * index, num_latents=3, kind=kind)

    sampler.sample_chunk(model, chunk(0, "first"), noise, SHAPE, state=state)
    again.load_state_dict(state.state_dict())
    one = sampler.sample_chunk(model, chunk(1), noise, SHAPE, state=state)
    assert torch.equal(sampler.sample_chunk(model, chunk(1), noise, SHAPE, state=again), one)
    assert calls == [3, 6, 9, 9, 9]
    with pytest.raises(StreamvidError, match="begins with chunk 2, not 5"):
        sampler.sample_chunk(model, chunk(5), noise, SHAPE, state=state)
    sampler.sample_chunk(model, chunk(5, "first"), noise, SHAPE, state=state)
    assert [c.index for c in state.chunks] == [6, 7]


@pytest.fixture(scope="module")
def rolling_pipe(tiny_random_folder):
    pipe = streamvid.load(str(tiny_random_folder))
    pipe.config = dataclasses.replace(pipe.config, joint_window=True, denoising_steps=(1000, 800, 600))
    return pipe


def frames_of(stream, chunks):
    return torch.cat([torch.as_tensor(c.frames) for c in itertools.islice(stream.chunks(), chunks)])


def test_a_stream_rolls_restores_and_resets(rolling_pipe, tmp_path):
    options = {"output_type": "latent", "height": 32, "width": 32}
    with rolling_pipe.stream("a red ball", **options) as stream:
        whole = frames_of(stream, 5)
        assert "'name': 'RollingForcing'" in str(stream.settings["memory"])
    with rolling_pipe.stream("a red ball", **options) as stream:
        assert torch.equal(frames_of(stream, 2), whole[:6])
        stream.snapshot(tmp_path / "s.safetensors")
        stream.reset()
        assert torch.equal(frames_of(stream, 1), whole[:3])
    with rolling_pipe.restore(tmp_path / "s.safetensors") as stream:
        assert torch.equal(frames_of(stream, 3), whole[6:])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"memory": "window"}, "needs memory 'rolling_forcing'"),
        ({"step_cache": "mask:skip=1"}, "does not fit a joint window"),
        ({"guidance_scale": 2.0}, "takes no guidance"),
    ],
)
def test_what_a_joint_window_cannot_do_is_refused(rolling_pipe, options, text):
    with pytest.raises(StreamvidError, match=text):
        rolling_pipe.stream("a red ball", **options)
