"""The shipped checkpoint: small, complete, loadable, and no worse than the floor below which it may not ship."""

import json
from importlib.resources import files
from pathlib import Path

import pytest

import streamvid
from streamvid.cli import main
from streamvid.tiny import evaluate
from streamvid.tiny.captions import Attributes
from streamvid.tiny.evaluate import stream_clip, vae_gate
from streamvid.tiny.judge import judge

WEIGHTS = Path(str(files("streamvid.tiny"))) / "weights"


@pytest.fixture(scope="module")
def pipe():
    return streamvid.load("tiny", device="cpu")


def test_it_is_small_and_names_no_machine():
    assert sum(f.stat().st_size for f in WEIGHTS.rglob("*") if f.is_file()) <= 24e6
    for config in WEIGHTS.rglob("*.json"):
        assert "_name_or_path" not in config.read_text()


def test_easy_prompts_are_shown(pipe):
    right = []
    for wanted in (
        Attributes("star", "red", "big", "still", "black"),
        Attributes("ball", "yellow", "big", "sliding", "navy"),
        Attributes("square", "green", "big", "pulsing", "grey"),
    ):
        verdict = judge(stream_clip(pipe, wanted, 57, seed=0), wanted)
        right += [verdict.colour, verdict.background, verdict.shape, verdict.motion]
    assert sum(right) >= 11


def test_the_whole_measure_runs_and_pairs_add_up(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(evaluate, "VERY_LONG_FRAMES", 105)
    monkeypatch.setattr(evaluate, "LONG_FRAMES", 49)
    monkeypatch.setattr(evaluate, "LATE_FRAMES", 48)
    out = tmp_path / "quality.json"
    counts = [
        "--prompts",
        "1",
        "--seeds",
        "1",
        "--long-clips",
        "1",
        "--very-long-clips",
        "2",
        "--switches",
        "1",
    ]
    assert main(["eval", "tiny", *counts, "--no-ceilings", "--threads", "1", "-o", str(out)]) == 0
    found = json.loads(out.read_text())
    keys = "accuracy colour background shape motion identity_240 switch fps identity_1000 sink"
    assert set(keys.split()) <= set(found)
    sink = found["sink"]
    for key, (mean, half) in sink["difference"].items():
        assert mean == pytest.approx(sink["without"][key] - sink["with"][key]) and half >= 0
    assert sink["clips"] == 2 and "a sink beside one chunk" in capsys.readouterr().out


def test_the_vae_keeps_colours_for_long(pipe):
    gate = vae_gate(pipe.vae, clips=2, frames=97, parts=2)
    assert gate.colour_frames > 0.95 and gate.background_frames > 0.95 and gate.shape_frames > 0.8
    assert abs(gate.psnr_parts[0] - gate.psnr_parts[1]) < 1.0
