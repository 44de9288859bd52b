"""The schedule against the recorded tables of the public code, and the properties of counter-based noise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from streamvid.errors import StreamvidError
from streamvid.noise import CounterNoise, RecordedNoise
from streamvid.schedule import FlowSchedule

GOLDEN = Path(__file__).parent / "golden" / "scheduler"


@pytest.fixture(scope="module")
def case():
    return load_file(GOLDEN / "case.safetensors")


@pytest.mark.parametrize("shift", [3, 5, 8])
def test_tables_and_conversions_equal_the_recorded_ones(case, shift):
    schedule, t = FlowSchedule(float(shift)), case["t"]
    x0, noise = case["x0"], case["noise"]
    want = {k.split("/")[1]: v for k, v in case.items() if k.startswith(f"shift{shift}/")}
    assert torch.equal(schedule.sigmas, want["sigmas"])
    assert torch.equal(schedule.timesteps, want["timesteps"])
    assert torch.equal(schedule.sigma_of(t).flatten(), want["used_sigma"])
    assert [schedule.sigma(float(v)) for v in t] == want["used_sigma"].tolist()
    full, half = (x0.float(), noise.float()), (x0, noise)
    for name, (a, n) in {"fp32": full, "bf16": half}.items():
        assert torch.equal(schedule.add_noise(a, n, t), want[f"add_noise_{name}"])
        assert torch.equal(schedule.flow_to_x0(n, a, t), want[f"flow_to_x0_{name}"])
    assert torch.equal(schedule.x0_to_flow(full[1], full[0], t), want["x0_to_flow_fp32"])
    assert torch.equal(schedule.step(full[1], full[0], t), want["step_fp32"])


def test_warps_equal_the_recorded_ones(case):
    warps = json.loads((GOLDEN / "config.json").read_text())["warps"]
    for name, warp in warps.items():
        schedule = FlowSchedule(float(name.split("/")[0].removeprefix("shift")))
        assert torch.equal(schedule.warp(warp["input"]), case[name])


def test_one_number_equals_a_tensor_of_it():
    schedule = FlowSchedule(5.0)
    x0, noise = torch.randn(2, 2, 3, 4, 4, 4).unbind(0)
    per_frame = torch.full((2, 3), 833.3333)
    assert torch.equal(schedule.add_noise(x0, noise, 833.3333), schedule.add_noise(x0, noise, per_frame))
    assert torch.equal(
        schedule.flow_to_x0(x0, noise, [833.3333] * 3), schedule.flow_to_x0(x0, noise, per_frame)
    )


@settings(max_examples=20, deadline=None)
@given(
    seeds=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=3, unique=True),
    chunk=st.integers(0, 2**40),
    step=st.integers(0, 60),
)
def test_a_clip_and_a_frame_do_not_depend_on_their_neighbours(seeds, chunk, step):
    full = CounterNoise(seeds).noise(chunk, step, (len(seeds), 3, 2, 3, 3))
    for i, seed in enumerate(seeds):
        alone = CounterNoise([seed]).noise(chunk, step, (1, 3, 2, 3, 3))
        assert torch.equal(full[i : i + 1], alone)
        assert torch.equal(CounterNoise([seed]).noise(chunk, step, (1, 2, 2, 3, 3)), alone[:, :2])
    assert not torch.equal(full, CounterNoise(seeds).noise(chunk + 1, step, full.shape))
    assert not torch.equal(full, CounterNoise(seeds).noise(chunk, step + 1, full.shape))


def test_noise_is_standard_normal():
    value = CounterNoise([7]).noise(3, 1, (1, 4, 16, 32, 32))
    assert abs(value.mean()) < 0.02 and abs(value.std() - 1) < 0.02


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True])
def test_a_bad_seed_is_refused(seed):
    with pytest.raises(StreamvidError, match="seed"):
        CounterNoise([seed])


def test_recorded_noise_replays_and_refuses_what_it_lacks():
    initial = torch.randn(1, 6, 2, 2, 2)
    source = RecordedNoise(initial, {(1, 1): torch.ones(1, 3, 2, 2, 2)}, starts=(0, 3))
    assert torch.equal(source.noise(1, 0, (1, 3, 2, 2, 2)), initial[:, 3:])
    assert torch.equal(source.noise(1, 1, (1, 3, 2, 2, 2)), torch.ones(1, 3, 2, 2, 2))
    for chunk, step in [(0, 1), (2, 0)]:
        with pytest.raises(StreamvidError):
            source.noise(chunk, step, (1, 3, 2, 2, 2))
