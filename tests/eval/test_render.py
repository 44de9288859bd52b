"""Cells rendered by the real runtime on the random tiny model."""

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
