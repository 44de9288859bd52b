"""The kernel commands: compile check, tuning without a GPU, and both benchmarks at sizes a test can afford."""

import json
import subprocess
import sys

import pytest

from streamvid.cli import main
from streamvid.kernels import configs
from streamvid.kernels.configs import Config, config_for, default_config, save_tuned, shared_limit


def test_a_kernel_compiles_for_a_gpu_that_is_not_there(monkeypatch):
    """One variant of the subset that `streamvid kernels check` compiles: 4-bit keys on the smallest shared memory."""
    pytest.importorskip("triton")
    script = (
        "from streamvid.kernels.build import Variant, build, markdown\n"
        "built = build(Variant(89, 'bf16', 4))\n"
        "assert not built.problems, built.problems\n"
        "assert 0 < built.shared <= 99 * 1024 and 0 < built.registers <= 255 and built.spill <= 64\n"
        "assert '| 89 | bf16 | int4 |' in markdown([built])\n"
    )
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_broken_limit_fails_the_check(monkeypatch, capsys):
    from streamvid.kernels import build

    variant = build.Variant(89, "bf16", 4)
    good = build.Built(variant, 1024, 100, 0, 0.0, ())
    bad = build.Built(variant, 1 << 20, 255, 400, 0.0, ("400 bytes spilled a thread, 64 allowed",))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(build, "require_compiler", lambda: None)
    monkeypatch.setattr(build, "representative", lambda: [variant])
    monkeypatch.setattr(build, "build", lambda v: bad)
    assert main(["kernels", "check"]) == 1
    assert "400 bytes spilled" in capsys.readouterr().err
    monkeypatch.setattr(build, "build", lambda v: good)
    assert main(["kernels", "check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["shared"] == 1024


def test_the_table_replaces_what_is_between_its_marks(tmp_path, monkeypatch, capsys):
    from streamvid.kernels import build

    page = tmp_path / "kernels.md"
    page.write_text("before\n<!-- kernels-check -->\nold\n<!-- /kernels-check -->\nafter\n")
    variant = build.Variant(80, "fp16", 0)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(build, "require_compiler", lambda: None)
    monkeypatch.setattr(build, "representative", lambda: [variant])
    monkeypatch.setattr(build, "build", lambda v: build.Built(v, 2048, 90, 0, 0.0, ()))
    assert main(["kernels", "check", "--table", str(page)]) == 0
    text = page.read_text()
    assert (
        "old" not in text
        and "| 80 | fp16 |" in text
        and text.startswith("before")
        and text.endswith("after\n")
    )
    page.write_text("nothing")
    assert main(["kernels", "check", "--table", str(page)]) == 2
    assert "no lines" in capsys.readouterr().err


def test_tuned_tiles_are_kept_and_damage_counts_as_none(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMVID_CACHE", str(tmp_path))
    configs.tuned.cache_clear()
    chosen = Config(64, 32, 4, 3)
    save_tuned({configs.key(89, 128, 0, 0, False): chosen}, "a card")
    assert config_for(89, 128) == chosen and config_for(89, 64) == default_config(89, 64)
    configs.cache_path().write_text("{")
    configs.tuned.cache_clear()
    assert config_for(89, 128) == default_config(89, 128)
    configs.tuned.cache_clear()


def test_limits_of_an_unknown_capability_are_not_guessed():
    with pytest.raises(ValueError, match="known"):
        shared_limit(75)


def test_tuning_without_a_gpu_is_one_line(capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["kernels", "tune"]) == 2
    assert "cannot be tuned here" in capsys.readouterr().err


def test_bench_kernels_writes_json_and_rows_add_up(tmp_path, capsys):
    out = tmp_path / "bench.json"
    assert main(["bench", "kernels", "--rounds", "3", "--heads", "2", "--head-dim", "16", "--grid", "4x4",
                 "--window", "9", "-o", str(out)]) == 0  # fmt: skip
    found = json.loads(out.read_text())
    rows = {row["case"]: row for row in found["rows"]}
    assert rows["dense"]["of_dense"] == 1 and rows["half static, grouped"]["density"] < 1
    assert rows["blocks 0.5"]["gflop"] < rows["dense"]["gflop"]
    assert main(["bench", "kernels", "--grid", "axb"]) == 2
    assert "ROWSxCOLUMNS" in capsys.readouterr().err


def test_bench_gpu_forward_runs_small_on_a_cpu(tmp_path, capsys):
    out = tmp_path / "forward.json"
    small = [
        "--device",
        "cpu",
        "--layers",
        "1",
        "--heads",
        "2",
        "--head-dim",
        "16",
        "--ffn",
        "32",
        "--latent",
        "4x8",
    ]
    assert main(["bench", "gpu-forward", *small, "--windows", "6", "--rounds", "1", "-o", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["method"] for row in rows][:3] == ["dense", "blocks, density 0.43", "blocks, density 0.25"]
    assert all(row["ms"] > 0 for row in rows if "skipped" not in row)
    assert main(["bench", "gpu-forward", *small, "--windows", "3"]) == 2
    assert "two chunks" in capsys.readouterr().err


def test_bench_gpu_stream_runs_small_on_a_cpu(tmp_path, capsys):
    out = tmp_path / "stream.json"
    sizes = ["--layers", "1", "--heads", "2", "--head-dim", "16", "--ffn", "32", "--latent", "4x8"]
    run = ["bench", "gpu-stream", *sizes, "--memory", "window:size=6", "--chunks", "2", "-o", str(out)]
    assert main([*run, "--device", "cpu", "--vae", "taehv"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["decoder"], row["compiled"]) for row in rows] == [("taehv", False), ("taehv", True)]
    assert all(row["fps"] > 0 and row["floor_ms"]["total"] > 0 for row in rows)
    assert main([*run, "--device", "cpu", "--vae", "vqgan"]) == 2
    assert "allowed: taehv, wan" in capsys.readouterr().err
