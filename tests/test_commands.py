"""``generate`` and ``batch`` from the command line, and every mistake a user can make there."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from streamvid import cli
from streamvid.video_io import VideoReader, read_image

SMALL = ["--height", "32", "--width", "32"]


def run(*words: object) -> int:
    return cli.main([str(word) for word in words])


def clip(path: Path) -> list[np.ndarray]:
    with VideoReader(path) as reader:
        return list(reader)


# ---- generate -----------------------------------------------------------------------------------------------------


def test_generate_writes_what_was_asked_and_reports_it(tiny_random_folder, tmp_path: Path, capsys) -> None:
    path = tmp_path / "a.mp4"
    words = ["generate", "a red ball", "-m", tiny_random_folder, "-o", path, "-n", 21, *SMALL]
    words += [
        "--prompt-at",
        "10:a blue star",
        "--transition",
        "recache",
        "--fps",
        10,
        "--memory",
        "window:size=9",
    ]
    assert run(*words, "--json") == 0
    shown = capsys.readouterr()
    assert "'a blue star' was not shown" in shown.err
    report = json.loads(shown.out)
    assert (report["frames"], report["bytes"]) == (21, path.stat().st_size)
    assert report["settings"]["memory"]["size"] == 9 and report["settings"]["height"] == 32
    assert [(r["chunk"], r["frame"], r["status"]) for r in report["receipts"]] == [(2, 21, "dropped")]
    with VideoReader(path) as reader:
        assert (reader.fps, reader.height, reader.num_frames) == (10, 32, 21)
    assert run(*words) == 0
    shown = capsys.readouterr()
    assert "21 frames" in shown.out and "Window(size=9" in shown.err.replace("\n", "")


def test_generate_names_its_file_and_writes_sequences(
    tiny_random_folder, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = ["generate", "A red/ball & more", "-m", tiny_random_folder, "-n", 2, *SMALL, "--json"]
    assert run(*base, "--seed", 2**64 - 1) == 0
    assert Path(f"a-red-ball-more_seed{2**64 - 1}.mp4").is_file()
    assert run(*base, "-o", "p.png") == 0
    assert read_image("p-000001.png").shape == (32, 32, 3)


BAD = {
    "no such model": (["-m", "nowhere"], "no such file, folder or model"),
    "size": (["--height", "40"], "multiple of 16, got 40; the nearest allowed sizes are 32 and 48"),
    "frames": (["-n", "0"], "num_frames must be"),
    "seed": (["--seed", "-7"], "seed must be"),
    "policy": (["--memory", "windw"], "did you mean 'window'"),
    "setting": (["--memory", "window:sise=2"], "no setting 'sise'"),
    "codec": (["--codec", "int44"], "int4"),
    "step cache": (["--step-cache", "xyz"], "unknown step cache"),
    "transition": (["--prompt-at", "9:b", "--transition", "cros"], "did you mean 'cross'"),
    "prompt-at": (["--prompt-at", "b"], "FRAME:PROMPT"),
    "late prompt": (["--prompt-at", "90:b"], "never shows"),
    "setting given twice": (["--memory", "window:size=9,size=12"], "'size' is given twice"),
    "rate 0": (["--fps", "0"], "fps must be a number in 0.01..1000"),
    "rate too low": (["--fps", "0.001"], "fps must be a number in 0.01..1000"),
    "rate not a number": (["--fps", "nan"], "fps must be a number in 0.01..1000"),
    "quality": (["--crf", "52"], "crf must be"),
    "guidance": (["--guidance", "nan"], "guidance_scale must be a number in 0..100"),
    "steps": (["--steps", "0"], "num_inference_steps must be"),
    "threads": (["--threads", "9999999999"], "--threads"),
    "huge size": (["--height", "1600000000"], "GB are free"),
    "no name": (["-m", ""], "name is empty"),
    "superscript": (["--prompt-at", "\u00b2:b"], "FRAME:PROMPT"),
    "long number": (["--transition", "blend:" + "9" * 5000], "N from 1 to 1000"),
    "suffix": (["-o", "x.avi"], "only .mp4, .gif, .png"),
    "device": (["--device", "cuda:99"], "cuda:99"),
    "unknown device": (["--device", "gpu"], "unknown device"),
    "device without numbers": (["--device", "meta"], "not supported (allowed: cpu"),
    "other device": (["--device", "xpu"], "not supported (allowed: cpu"),
    "second cpu": (["--device", "cpu:1"], "not supported (allowed: cpu"),
    "apple": (["--device", "mps"], "has no float64"),
    "dtype": (["--dtype", "int3"], "unknown dtype"),
    "prompt tokens": (["--cross", "annca:density=2"], "density must be above 0"),
    "block maps": (["--sparse", "topk:refresh=0"], "refresh must be 1 or more"),
    "image": (["--image", "x.png"], "this model takes no image"),
    "video": (["--video", "x.mp4"], "no such file"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_a_mistake_is_one_line_exit_2_and_no_file(
    name, tiny_random_folder, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    words, said = BAD[name]
    assert run("generate", "a", "-m", tiny_random_folder, *SMALL, *words) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1 and not shown.out
    assert not list(tmp_path.iterdir())


def test_checkpoints_that_are_none_are_refused(tiny_random_folder, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    weights = next((Path(tiny_random_folder) / "transformer").glob("*.safetensors")).read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(weights[: len(weights) // 2])
    (tmp_path / "text.pt").write_text("hello")
    torch.save({"weight": torch.zeros(3)}, tmp_path / "other.pt")
    (tmp_path / "empty").mkdir()
    for name in ("cut.safetensors", "text.pt", "other.pt", "empty"):
        assert run("generate", "a", "-m", name, "-o", "x.mp4") == 2, name
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and name in message, message
    assert not (tmp_path / "x.mp4").exists() and not list(tmp_path.glob(".*"))


def test_an_output_that_cannot_be_written_is_told_before_anything_is_loaded(tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    assert run("generate", "a", "-m", "nowhere", "-o", tmp_path / "file" / "x.mp4") == 2
    assert "cannot be written" in capsys.readouterr().err
    assert run("generate", "a", "-m", "nowhere", "-o", tmp_path) == 2
    assert "x" not in capsys.readouterr().out


FULL_DISK = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from streamvid.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tiny_random_folder, tmp_path: Path) -> None:
    words = [
        "generate",
        "a",
        "-m",
        tiny_random_folder,
        "-o",
        tmp_path / "x.mp4",
        "-n",
        400,
        "--crf",
        0,
        *SMALL,
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, *map(str, words)], capture_output=True, text=True, timeout=280
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 2 and len(lines) == 1 and "cannot be written" in lines[0], done.stderr
    assert not list(tmp_path.iterdir())


def test_pictures_are_enlarged_in_the_file_only(tiny_random_folder, tmp_path: Path, capsys) -> None:
    line = ["generate", "a", "-m", tiny_random_folder, "-n", 5, *SMALL, "--json", "-o"]
    assert run(*line, tmp_path / "a.png") == 0
    assert run(*line, tmp_path / "b.png", "--enlarge", 3) == 0
    small, large = (read_image(tmp_path / f"{name}-000004.png") for name in "ab")
    assert large.shape == (3 * small.shape[0], 3 * small.shape[1], 3)
    assert np.abs(large[1::3, 1::3].astype(int) - small).mean() < 8
    assert run(*line, tmp_path / "c.png", "--enlarge", 17) == 2
    assert "1..16" in capsys.readouterr().err


def _started(folder: Path) -> bool:
    """Whether a half-written x.mp4 has bytes; the probe for a writable folder may vanish meanwhile."""
    try:
        return any(path.stat().st_size for path in folder.glob(".x.mp4.*.part"))
    except FileNotFoundError:
        return False


def test_a_polite_kill_leaves_nothing(tiny_random_folder, tmp_path: Path) -> None:
    words = [
        "generate",
        "a",
        "-m",
        tiny_random_folder,
        "-o",
        tmp_path / "x.mp4",
        "--endless",
        *SMALL,
        "--json",
    ]
    process = subprocess.Popen([sys.executable, "-m", "streamvid.cli", *map(str, words)])
    try:
        while not _started(tmp_path):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert not list(tmp_path.iterdir())


# ---- batch --------------------------------------------------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "a red ball"},
        {"prompt": "a blue star", "num_frames": 5, "seed": 4},
        {"prompt": "a red ball"},
    ]
    path.write_text("\n# comment\n".join(json.dumps(line) for line in lines))
    return path


def batch(folder, prompts: Path, out: Path, *more: object) -> int:
    return run("batch", prompts, "-o", out, "-m", folder, "-n", 3, *SMALL, "--json", *more)


def test_batch_is_resumable_and_its_clips_equal_solo_runs(
    tiny_random_folder, prompts, tmp_path, capsys
) -> None:
    out = tmp_path / "out"
    assert batch(tiny_random_folder, prompts, out) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["index"], line["frames"], line["settings"]["seed"]) for line in lines] == [
        (1, 3, 0),
        (3, 5, 4),
        (5, 3, 0),
    ]
    assert [line["file"] for line in lines] == [
        "0001_a-red-ball_seed0.mp4",
        "0003_a-blue-star_seed4.mp4",
        "0005_a-red-ball_seed0.mp4",
    ]
    manifest = (out / "manifest.jsonl").read_text()
    assert [json.loads(line)["key"] for line in manifest.splitlines()] == [line["key"] for line in lines]
    solo = [
        "generate",
        "a blue star",
        "-m",
        tiny_random_folder,
        "-n",
        5,
        "--seed",
        4,
        "-o",
        tmp_path / "solo.mp4",
    ]
    assert run(*solo, *SMALL, "--json") == 0
    assert all(map(np.array_equal, clip(tmp_path / "solo.mp4"), clip(out / lines[1]["file"])))

    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.mp4")}
    (out / lines[2]["file"]).unlink()
    (out / ".0005_a-red-ball_seed0.mp4.999999.0.part").write_bytes(b"half")
    (out / "manifest.jsonl").write_text(manifest + '{"key": "cut sho')
    assert batch(tiny_random_folder, prompts, out) == 0
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("*.mp4")}
    assert [name for name in sorted(after) if after[name] != before[name]] == [lines[2]["file"]]
    assert not list(out.glob(".*"))
    assert json.loads((out / "manifest.jsonl").read_text().splitlines()[-1])["index"] == 5
    capsys.readouterr()
    assert batch(tiny_random_folder, prompts, out, "--memory", "window:size=6") == 0
    assert all(path.stat().st_mtime_ns != after[path.name] for path in out.glob("*.mp4")), (
        "other settings, other clips"
    )


def test_two_workers_make_the_same_clips(tiny_random_folder, prompts, tmp_path, capsys) -> None:
    assert batch(tiny_random_folder, prompts, tmp_path / "one") == 0
    assert batch(tiny_random_folder, prompts, tmp_path / "two", "--workers", 2) == 0
    names = sorted(path.name for path in (tmp_path / "one").glob("*.mp4"))
    assert len(names) == 3 and names == sorted(path.name for path in (tmp_path / "two").glob("*.mp4"))
    for name in names:
        one, two = clip(tmp_path / "one" / name), clip(tmp_path / "two" / name)
        assert len(one) == len(two) and all(map(np.array_equal, one, two))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.txt", "", "holds no prompt"),
        ("a.txt", "# only\n\n", "holds no prompt"),
        (
            "a.jsonl",
            '{"prompt": "a"}\n{"prompt": "a", "num_frame": 3}',
            "line 2: unknown key 'num_frame'; did you mean",
        ),
        ("a.jsonl", '{"prompt": ', "line 1: is not JSON"),
        ("a.jsonl", "[" * 100_000, "line 1: is not JSON"),
        ("a.jsonl", '{"prompt": "a", "seed": ' + "9" * 5000 + "}", "line 1: is not JSON"),
        ("a.jsonl", '{"prompt": "a", "fps": "x"}', "line 1: fps must be a number"),
        ("a.jsonl", '{"prompt": "a", "crf": 1.5}', "line 1: crf must be a whole number"),
        ("a.jsonl", '{"prompt": "a", "enlarge": true}', "line 1: enlarge must be"),
        ("a.jsonl", '{"prompt": "a", "transition": 3}', "line 1: a transition must be a text"),
        ("a.jsonl", '{"prompt": "a", "prompt_at": "1:b"}', "line 1: prompt_at must be a list"),
        ("a.jsonl", '{"prompt": "a", "num_frames": null}', "line 1: a clip of a batch has an end"),
        ("a.jsonl", '{"prompt": "a", "height": "32"}', "line 1: height must be a whole number"),
        ("a.jsonl", '{"prompt": "a", "guidance_scale": "x"}', "line 1: guidance_scale must be"),
        ("a.jsonl", '{"prompt": "a", "fuse_context": "maybe"}', "line 1: fuse_context must be true or false"),
        ("a.jsonl", '{"prompt": "a", "negative_prompt": 3}', "line 1: negative_prompt must be a text"),
        (
            "a.jsonl",
            '{"prompt": "a"}\n{"prompt": "a", "height": 33}',
            "line 2: height must be a multiple of 16",
        ),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": "a", "memory": "windw"}', "line 2: unknown memory policy"),
        ("a.jsonl", '{"prompt": "a", "memory": 3}', "line 1: memory policy must be a text"),
        ("a.jsonl", '{"prompt": "a", "step_cache": null}', "line 1: step cache must be a text"),
        ("a.txt", "a\0b", "line 1: holds a zero byte"),
        ("a.jsonl", '["a"]', "line 1: is not a JSON object"),
        ("a.jsonl", '{"num_frames": 3}', "needs a prompt"),
        ("a.jsonl", '{"prompt": "a", "num_frames": 0}', "line 1: num_frames must be"),
        ("a.jsonl", '{"prompt": "a", "seed": -1}', "line 1: a batch needs a seed"),
        ("a.txt", b"\xff\xfe\x00", "not a text file"),
    ],
)
def test_a_bad_prompts_file_is_refused_whole(name, text, said, tiny_random_folder, tmp_path, capsys) -> None:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert batch(tiny_random_folder, tmp_path / name, tmp_path / "out") == 2
    message = capsys.readouterr().err
    assert said in message and message.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_line_is_a_line_whatever_is_in_it(tiny_random_folder, tmp_path, capsys) -> None:
    """A byte order mark, Windows line ends, and separators that JSON allows inside a text."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(
        '\ufeff# first\r\n{"prompt": "a\u2028b"}\r\n\r\n{"prompt": "\U0001f388\\u0007"}'.encode()
    )
    assert batch(tiny_random_folder, path, tmp_path / "out") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["index"], line["prompt"]) for line in lines] == [(2, "a\u2028b"), (4, "\U0001f388\u0007")]


def test_one_batch_at_a_time_writes_into_a_folder(tiny_random_folder, prompts, tmp_path, capsys) -> None:
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / "out").mkdir()
    with open(tmp_path / "out" / "manifest.jsonl", "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert batch(tiny_random_folder, prompts, tmp_path / "out") == 2
    assert "another batch is writing there" in capsys.readouterr().err
    assert batch(tiny_random_folder, prompts, tmp_path / "out") == 0


def test_workers_tell_a_mistake_as_one_does(tiny_random_folder, prompts, tmp_path, capfd) -> None:
    out = tmp_path / "out"
    assert batch("nowhere", prompts, out, "--workers", 2) == 2
    message = capfd.readouterr().err
    assert message.startswith("error: nowhere: no such file") and message.count("\n") == 1
    assert batch(tiny_random_folder, prompts, out, "--workers", 2, "--codec", "int44") == 2
    message = capfd.readouterr().err
    assert "error: line 1: unknown codec 'int44'" in message and message.count("\n") == 1
    assert not out.exists()


def test_a_folder_that_cannot_be_written(tiny_random_folder, prompts, tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        assert batch(tiny_random_folder, prompts, out) == 2
        message = capsys.readouterr().err
        assert "clips cannot be written there" in message and message.count("\n") == 1


def test_a_prompts_file_that_is_not_there(tiny_random_folder, tmp_path, capsys) -> None:
    assert batch(tiny_random_folder, tmp_path / "none.txt", tmp_path / "out") == 2
    assert "cannot be read" in capsys.readouterr().err
