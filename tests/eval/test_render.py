"""Cells rendered by the real runtime on the random tiny model."""

import dataclasses

import numpy as np
import pytest

from streamvid.eval.compare import run_study
from streamvid.eval.grid import Cell, Variant, parse_study
from streamvid.eval.metrics import METRICS
from streamvid.eval.render import StreamRenderer, stream_options


def cell(folder, **changes):
    return Cell(variant=Variant(model=str(folder), **changes), prompt="a red ball", seed=3, num_frames=33)


def test_what_is_left_to_the_checkpoint_is_not_passed():
    assert stream_options(cell("m")) == {"num_frames": 33, "seed": 3}
    options = stream_options(cell("m", memory="full", codec="int4", steps="2"))
    assert options == {
        "num_frames": 33,
        "seed": 3,
        "memory": "full",
        "codec": "int4",
        "num_inference_steps": 2,
    }


def test_a_cell_is_the_stream_of_the_public_interface(tiny_random_folder):
    import streamvid

    renderer = StreamRenderer()
    rendered = renderer(cell(tiny_random_folder, memory="window:size=6,sink=1"))
    pipe = streamvid.load(str(tiny_random_folder))
    with pipe.stream("a red ball", num_frames=33, seed=3, memory="window:size=6,sink=1") as stream:
        expected = np.stack(list(stream))
    assert np.array_equal(rendered.frames, expected)
    assert rendered.chunk_starts == [0, 9, 21] and rendered.fps == 8.0
    assert rendered.settings["memory"]["size"] == 6 and rendered.settings["seed"] == 3
    assert set(rendered.costs) <= set(METRICS) and all(np.isfinite(v) for v in rendered.costs.values())
    assert rendered.costs["kv_peak_bytes"] >= rendered.costs["kv_bytes"] > 0
    last = rendered.regions[-1]
    assert last["current"] == [6, 7, 8] and last["sink"] == [0] and last["recent"] == [4, 5]


def test_fewer_steps_count_as_less_work(tiny_random_folder):
    full = StreamRenderer().pipe(str(tiny_random_folder), "default").config.denoising_steps
    costs = StreamRenderer()(cell(tiny_random_folder, steps="2")).costs
    assert costs["compute_fraction"] == pytest.approx(2 / len(full))


@pytest.mark.parametrize("memory", ["window:size=6,sink=1", "window:size=9,positions=slot"])
def test_attention_mass_is_the_share_of_the_real_softmax(tiny_random_folder, memory):
    """The last layer only writes in the context pass, so of two layers the first is seen."""
    import torch

    import streamvid
    from streamvid.memory.mass import RegionMass

    calls, mass = [], RegionMass()

    def look(stage, bank, view, queries, keys):
        mass(stage, bank, view, queries, keys)
        if stage == "context":
            calls.append((queries.clone(), keys.clone(), [(p.entry.region, p.length) for p in view.pieces]))

    with streamvid.load(str(tiny_random_folder)).stream("a red ball", num_frames=57, memory=memory) as stream:
        stream.watch_attention(look)
        for chunk in stream.chunks():
            shares = mass.take()
            assert len(calls) == (1 if chunk.index else 0)
            if not calls:
                assert shares == {}
                continue
            queries, keys, pieces = calls.pop()
            weights = torch.einsum("bqhd,bkhd->bhqk", queries, keys) * queries.shape[-1] ** -0.5
            expected, at = {}, 0
            for region, length in pieces:
                part = float(weights.softmax(-1)[..., at : at + length].sum(-1).mean())
                expected[region] = expected.get(region, 0) + part
                at += length
            assert shares == pytest.approx(expected, abs=1e-5)
            assert sum(shares.values()) == pytest.approx(1, abs=1e-4)


def test_a_probed_cell_has_attention_and_the_same_clip(tiny_random_folder):
    renderer = StreamRenderer()
    plain = renderer(cell(tiny_random_folder, memory="window:size=6,sink=1"))
    probed = renderer(
        dataclasses.replace(cell(tiny_random_folder, memory="window:size=6,sink=1"), probe=True)
    )
    assert np.array_equal(plain.frames, probed.frames) and plain.attention_mass == []
    assert [set(share) for share in probed.attention_mass] == [{"current"}, {"sink", "recent", "current"}]


def test_codecs_on_the_real_runtime_order_by_bits_and_a_bad_one_fails_alone(tiny_random_folder, tmp_path):
    study = parse_study(
        {
            "prompts": ["a red ball", "blue sea"],
            "num_frames": 33,
            "segment_frames": 12,
            "metrics": ["fidelity"],
            "orderings": ["bits"],
            "grid": {"model": str(tiny_random_folder), "codec": ["none", "int8", "int4", "nonsense"]},
            "reference": {"codec": "none"},
        }
    )
    rows = run_study(study, tmp_path)
    by_codec = {row["variant"]["codec"]: row for row in rows}
    assert by_codec["nonsense"]["status"] == "failed" and "unknown" in by_codec["nonsense"]["error"]
    psnr = {codec: by_codec[codec]["metrics"]["psnr"] for codec in ("int8", "int4")}
    assert psnr["int8"] > psnr["int4"] > 10
    assert by_codec["int4"]["metrics"]["kv_bytes"] < by_codec["none"]["metrics"]["kv_bytes"]


def test_an_unknown_model_is_the_cells_failure(tmp_path):
    with pytest.raises(ValueError, match="no-such-model"):
        StreamRenderer()(cell("no-such-model"))
