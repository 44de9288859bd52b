"""Speed figures: arithmetic with known answers, and the whole on the random tiny model."""

import json
import time

import pytest
import torch

from streamvid.errors import StreamvidError
from streamvid.eval.floor import Limits, Shape, chunk_floor, decoder_operations, measure_limits, pass_cost
from streamvid.eval.speed import Plan, measure_speed, peak_rss, playback, scaling, spread, versus


def wan(queries, keys, layers=30, width=1536, ffn=8960, text=512):
    return Shape(
        layers=layers,
        width=width,
        ffn=ffn,
        text_tokens=text,
        queries=queries,
        keys=keys,
        parameters=1_390_000_000,
        element_bytes=2,
    )


@pytest.mark.parametrize("frames, total", [(3, 16.2), (6, 20.2), (12, 28.3), (21, 40.4)])
def test_operations_of_wan_1_3b_at_480p_are_the_known_ones(frames, total):
    cost = pass_cost(wan(3 * 1560, frames * 1560))
    assert cost.operations / 1e12 == pytest.approx(total, abs=0.06)
    assert cost.linear / 1e12 == pytest.approx(11.7, abs=0.01)
    assert cost.kv_bytes / 1e9 == pytest.approx(6.04 * frames / 21, rel=0.01)


def test_floor_takes_the_tighter_bound_and_counts_passes_and_branches():
    cost = pass_cost(wan(4680, 32760))
    quick = chunk_floor(cost, 40.65e12, Limits(989e12, 3.35e12), steps=4)
    assert quick.bound == "compute"
    assert quick.denoise + quick.context == pytest.approx(0.204, abs=0.002)
    assert quick.total == pytest.approx(0.204 + 40.65 / 989, abs=0.002)
    slow = chunk_floor(cost, 0, Limits(989e12, 1e9), steps=4, branches=2)
    assert slow.bound == "memory" and slow.denoise == pytest.approx(4 * slow.context)
    assert slow.context == pytest.approx(2 * (cost.weight_bytes + cost.kv_bytes) / 1e9)


def test_decoder_operations_are_counted():
    a, b = torch.ones(8, 16), torch.ones(16, 4)
    assert decoder_operations(lambda: a @ b) == 2 * 8 * 16 * 4


def test_limits_of_this_machine_are_plausible():
    limits = measure_limits("cpu", torch.float32, seconds=0.05)
    assert 1e8 < limits.operations < 1e14 and 1e7 < limits.bandwidth < 1e13


def test_spread():
    assert spread([1, 2, 3, 10])["p50"] == 2.5 and spread([1, 2, 3, 10])["max"] == 10


def test_playback_at_the_rate_of_arrival_never_stalls_and_a_slow_chunk_stalls_once():
    steady = playback([1, 2, 3, 4], [12] * 4, fps=12, buffer_frames=12)
    assert steady == {"late_frames": 0, "stalls": 0, "stalled_seconds": 0}
    slow = playback([1, 2, 4, 5], [12] * 4, fps=12, buffer_frames=12)
    assert slow["stalls"] == 1 and slow["stalled_seconds"] == pytest.approx(1.0)
    assert slow["late_frames"] == pytest.approx(1 / 48)
    buffered = playback([1, 2, 4, 5], [12] * 4, fps=12, buffer_frames=24)
    assert buffered["stalls"] == 0
    with pytest.raises(StreamvidError, match="do not fill"):
        playback([1], [12], fps=12, buffer_frames=24)


def test_peak_rss_is_in_bytes_and_sees_an_allocation():
    before = peak_rss()
    held = bytearray(200 * 2**20)
    held[::4096] = b"x" * len(held[::4096])
    assert 20 * 2**20 < before <= peak_rss() and peak_rss() >= 200 * 2**20


class FakeStream:
    """A stream whose chunks take a known time."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def stats(self):
        return {"memory": {"cond": {"frames": 3}}}

    def chunks(self):
        while True:
            time.sleep(self.seconds)
            yield None


def test_versus_gives_the_ratio_and_not_the_reverse():
    result = versus(lambda: FakeStream(0.06), lambda: FakeStream(0.02), Plan(chunks=6, warm_up=0))
    assert 1.8 < result.ratio < 3.6 and result.pairs == 6
    assert result.interval[0] <= result.ratio <= result.interval[1]


@pytest.mark.parametrize("change", [{"chunks": 1}, {"repeats": 0}, {"target_fps": 0}, {"buffer_frames": 0}])
def test_a_plan_that_measures_nothing_is_refused(change):
    with pytest.raises(StreamvidError, match="must be"):
        Plan(**change)


@pytest.fixture(scope="module")
def pipe(tiny_random_folder):
    import streamvid

    return streamvid.load(str(tiny_random_folder))


def test_all_figures_of_the_random_model(pipe):
    plan = Plan(chunks=3, repeats=2, warm_up=0)
    speed = measure_speed(pipe, {"memory": "window:size=6,sink=1"}, plan, Limits(1e11, 1e10))
    assert speed.visible_latents == 6 and speed.period_ms["n"] == 3 and speed.first_frame_ms["n"] == 2
    parts = speed.parts_ms
    assert {"context", "denoise", "decode", "total", "text", "pass_2"} <= set(parts)
    assert parts["denoise"] + parts["decode"] + parts["context"] <= 1.2 * parts["total"]
    assert speed.fps == pytest.approx(12_000 / speed.period_ms["p50"])
    assert 0 < speed.floor_ms["total"] < speed.period_ms["p50"]
    assert speed.memory["kv_peak"] >= speed.memory["kv_stored"] > 0 and speed.memory["rss"] > 2**20
    assert speed.control_ms["p50"] > 0 and 0 <= speed.playback["late_frames"] <= 1


def test_scaling_by_window_reads_the_window_and_an_unknown_axis_is_named(pipe):
    rows = scaling(pipe, {}, "window", Plan(chunks=2, warm_up=0))
    assert [row["latents"] for row in rows] == [6, 9, 12, 15, 21]
    with pytest.raises(StreamvidError, match="unknown scale"):
        scaling(pipe, {}, "depth", Plan())


def test_the_command_measures_two_settings_in_turns(tiny_random_folder, tmp_path, capsys):
    from streamvid.cli import main

    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text(f'model = "{tiny_random_folder}"\nmemory = "window:size=6"\n')
    second.write_text(f'model = "{tiny_random_folder}"\nmemory = "window:size=6"\ncodec = "int8"\n')
    out = tmp_path / "speed.json"
    words = ["bench", "stream", "--settings", str(first), "--vs", str(second), "--chunks", "2"]
    assert main([*words, "--repeats", "1", "--output", str(out)]) == 0
    text = capsys.readouterr().out
    assert "frames/s, steady" in text and "in turns, 2 pairs" in text and "clock:" in text
    result = json.loads(out.read_text())
    assert result["speed_vs"]["settings"]["codec"]["name"] == "Int8" and result["versus"]["pairs"] == 2
    second.write_text('memroy = "full"')
    assert main(words) == 2
    assert "did you mean 'memory'" in capsys.readouterr().err
