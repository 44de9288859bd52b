"""``streamvid bench codecs`` on a random model: the record is of the model, the tables hold what was measured."""

import json

import pytest
import torch

from streamvid import cli
from streamvid.codec_bench import projected, record
from streamvid.codec_report import document, findings, markdown
from streamvid.memory.codecs import make_codec
from streamvid.memory.codecs.measure import Sample, loss


def sample(frames=4, tokens=8):
    generator = torch.Generator().manual_seed(0)
    past, now = (1, frames * tokens, 2, 32), (1, tokens, 2, 32)
    return Sample(*(torch.randn(shape, generator=generator) for shape in (past, past, now, now, now)))


def test_errors_order_codecs_by_their_bits():
    losses = {spec: loss(make_codec(spec), [sample()], (2, 4)) for spec in ("none", "int8", "int4", "int2")}
    assert losses["none"].attention == losses["none"].keys == 0
    order = [losses[spec].attention for spec in ("int8", "int4", "int2")]
    assert order == sorted(order) and 0 < order[0] < 0.01 < order[2]
    assert losses["none"].ratio == 1 and losses["int8"].ratio == pytest.approx(9 / 16 - 1 / 32)


def test_only_the_history_is_packed():
    given = sample()
    far = Sample(given.k, given.v, given.q, given.k_now * 50, given.v_now)
    assert (
        loss(make_codec("int4"), [far], (2, 4)).attention
        < loss(make_codec("int4"), [given], (2, 4)).attention
    )


def test_planned_sizes_are_those_of_the_literature():
    planned = projected(["int8", "qvg"], 24)
    assert planned["int8"]["stored_ratio"] == pytest.approx(0.516, abs=1e-3)
    assert planned["qvg"]["stored_ratio"] <= 0.15


def test_command(tiny_random_folder, tmp_path, capsys):
    page = tmp_path / "docs" / "codecs.md"
    specs = ["int4", "int4:center=true", "qvg:span_frames=3"]
    words = [
        "bench",
        "codecs",
        "-m",
        str(tiny_random_folder),
        "--prompt",
        "a ball",
        "--write",
        str(page),
        "--json",
    ]
    words += [*(word for spec in specs for word in ("--codec", spec)), "--frames", "6", "--chunks", "1"]
    assert cli.main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["loss"]) == list(result["time"]) == ["none", *specs]
    assert 0 < result["loss"]["int4"]["attention"] < 1
    text = page.read_text()
    assert document(result) == text and findings(result)[0] in text
    assert f"{result['loss']['int4']['attention']:.4f}" in text


def test_an_unknown_codec_is_one_line(tiny_random_folder, capsys):
    assert cli.main(["bench", "codecs", "-m", str(tiny_random_folder), "--codec", "int5"]) == 2
    assert "unknown codec 'int5'" in capsys.readouterr().err


def test_markdown_columns_line_up():
    assert markdown(["a", "bb"], [["ccc", "d"]]) == "| a   | bb |\n|-----|----|\n| ccc | d  |"


def test_record_follows_the_model(tiny_random_folder):
    import streamvid

    pipe = streamvid.load(tiny_random_folder)
    samples, grid = record(pipe, ["a ball"], 6)
    again, _ = record(pipe, ["a ball"], 6)
    geometry = pipe.model.geometry
    assert len(samples) == geometry.layers
    assert samples[0].k.shape[1:] == (6 * grid[0] * grid[1], geometry.heads, geometry.head_dim)
    assert all(torch.equal(a.k, b.k) and torch.equal(a.q, b.q) for a, b in zip(samples, again, strict=True))
