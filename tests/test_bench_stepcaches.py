"""The step cache bench: a row each, full steps first, fractions that the accounting also gives."""

from __future__ import annotations

import json

from streamvid.cli import main


def test_the_bench_prints_one_row_a_cache(tiny_random_folder, capsys):
    words = [
        "bench",
        "stepcaches",
        "-m",
        str(tiny_random_folder),
        "--steps",
        "4",
        "--fewer",
        "3",
        "--chunks",
        "2",
    ]
    words += ["--step-cache", "mask:skip=2", "--step-cache", "tokens:ratio=0.5"]
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["step_cache"] for row in rows] == ["none", "3 steps", "mask:skip=2", "tokens:ratio=0.5"]
    assert [row["compute_fraction"] for row in rows] == [1.0, 1.0, 0.75, 0.75]
    assert [row["forwards_skipped"] for row in rows] == [0, 0, 0.25, 0]
    assert rows[0]["latent_error"] == 0 and all(0 < row["latent_error"] < 10 for row in rows[1:])
    assert rows[0]["wall_ratio"] == 1 and all(row["wall_seconds"] > 0 and row["chunks"] == 2 for row in rows)
    assert main(words) == 0
    assert "mask:skip=2" in capsys.readouterr().out
