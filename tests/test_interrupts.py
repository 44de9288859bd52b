"""Ctrl-C, kill and power cuts: what is on the disk afterwards, and that running again makes exactly what is missing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from streamvid import cli
from streamvid.video_io import VideoReader

SMALL = ["--height", "32", "--width", "32"]


def start(*words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "streamvid.cli", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], ready) -> None:
    try:
        while not ready():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
    except BaseException:
        process.kill()
        raise


def bytes_in(folder: Path, pattern: str) -> int:
    total = 0
    for path in folder.glob(pattern):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # renamed meanwhile
            continue
    return total


@pytest.mark.parametrize("delay", [0.5, 2.0])
def test_ctrl_c_while_things_are_imported_and_loaded(
    tiny_random_folder, tmp_path: Path, delay: float
) -> None:
    process = start("generate", "a", "-m", tiny_random_folder, "-o", tmp_path / "x.mp4", "-n", 9000, *SMALL)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT) and "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_ctrl_c_completes_a_clip_without_end(tiny_random_folder, tmp_path: Path) -> None:
    path = tmp_path / "x.mp4"
    process = start("generate", "a", "-m", tiny_random_folder, "-o", path, "--endless", *SMALL, "--json")
    wait_for(process, lambda: bytes_in(tmp_path, ".x.mp4.*.part"))
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    with VideoReader(path) as reader:
        assert len(list(reader)) == json.loads(out)["frames"] > 0
    assert [file.name for file in tmp_path.iterdir()] == ["x.mp4"]


def test_ctrl_c_leaves_no_half_of_a_clip_that_has_an_end(tiny_random_folder, tmp_path: Path) -> None:
    process = start("generate", "a", "-m", tiny_random_folder, "-o", tmp_path / "x.mp4", "-n", 90000, *SMALL)
    wait_for(process, lambda: bytes_in(tmp_path, ".x.mp4.*.part"))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_batch_goes_on(tiny_random_folder, tmp_path: Path, capsys, how: signal.Signals) -> None:
    prompts, out = tmp_path / "p.txt", tmp_path / "out"
    prompts.write_text("\n".join(f"prompt {index}" for index in range(5)))
    words = ["batch", prompts, "-m", tiny_random_folder, "-o", out, "-n", 120, *SMALL, "--json"]
    process = start(*words)
    wait_for(process, lambda: len(list(out.glob("*.mp4"))) >= 2 and bytes_in(out, ".*.part"))
    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode in (-how, 128 + how)
    for path in out.glob("*.mp4"):
        with VideoReader(path) as reader:
            assert len(list(reader)) == 120, "what has its final name is whole"
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.mp4")}
    recorded = (out / "manifest.jsonl").read_text().count("\n")
    assert 2 <= len(before) < 5 and recorded >= len(before) - 1

    assert cli.main([str(word) for word in words]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["frames"] for line in lines] == [120] * 5
    kept = [
        line["file"] for line in lines if before.get(line["file"]) == os.stat(out / line["file"]).st_mtime_ns
    ]
    assert len(kept) >= recorded, "finished clips are not made again"
    assert not list(out.glob(".*")) and len(list(out.glob("*.mp4"))) == 5


def test_a_worker_that_is_killed_is_told_and_the_rest_is_kept(tiny_random_folder, tmp_path: Path) -> None:
    prompts, out = tmp_path / "p.txt", tmp_path / "out"
    prompts.write_text("\n".join(f"prompt {index}" for index in range(6)))
    words = ["batch", prompts, "-m", tiny_random_folder, "-o", out, "-n", 200, *SMALL, "--workers", 2]
    process = start(*words)
    wait_for(process, lambda: bytes_in(out, "manifest.jsonl"))
    workers = [
        child for child in psutil.Process(process.pid).children() if "spawn_main" in str(child.cmdline())
    ]
    workers[0].kill()
    _, said = process.communicate(timeout=120)
    assert process.returncode == 2 and "a worker process was ended from outside" in said
    assert "Traceback" not in said
    for line in (out / "manifest.jsonl").read_text().splitlines():
        assert (out / json.loads(line)["file"]).is_file()
