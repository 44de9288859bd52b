"""The writer: one rule for frames, the right container, and never a half-written file under the final name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from streamvid.errors import StreamvidError
from streamvid.video_io import VideoReader, VideoWriter, read_image, sequence_name, to_uint8

COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (128, 128, 128), (20, 200, 120)]


def chart(height: int = 64, width: int = 112) -> np.ndarray:
    picture = np.zeros((height, width, 3), np.uint8)
    for index, colour in enumerate(COLOURS):
        picture[:, index * 16 : index * 16 + 16] = colour
    return picture


def forms(picture: np.ndarray) -> dict[str, object]:
    return {
        "uint8": picture,
        "float": picture.astype(np.float32) / 255,
        "torch float": torch.from_numpy(picture).permute(2, 0, 1).float() / 255,
        "torch uint8": torch.from_numpy(picture).permute(2, 0, 1),
        "pil": Image.fromarray(picture),
    }


@pytest.mark.parametrize("form", list(forms(chart())))
def test_every_form_of_a_frame_gives_the_same_video(form: str, tmp_path: Path) -> None:
    frame = forms(chart())[form]
    assert np.array_equal(to_uint8(frame), chart())
    path = tmp_path / "chart.mp4"
    with VideoWriter(path, fps=12.5) as writer:
        for _ in range(5):
            writer.add(frame)
    with VideoReader(path) as reader:
        assert (reader.fps, reader.height, reader.width, reader.num_frames) == (12.5, 64, 112, 5)
        frames = list(reader)
    assert len(frames) == 5
    for index, colour in enumerate(COLOURS):
        centre = frames[2][16:48, index * 16 + 6 : index * 16 + 10].astype(int)
        assert np.abs(centre - colour).max() <= 2, colour


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (np.zeros((4, 4, 3), np.int64), "uint8"),
        (np.full((4, 4, 3), 255.0), "0..1"),
        (np.full((4, 4, 3), np.nan), "0..1"),
        (np.full((4, 4, 3), -1.0), "0..1"),
        (np.zeros((4, 4), np.uint8), "[H, W, 3]"),
        (torch.zeros(4, 4, 3), "[3, H, W]"),
    ],
)
def test_a_frame_outside_the_rule_is_refused(frame: object, words: str) -> None:
    with pytest.raises(StreamvidError, match=words.replace("[", r"\[")):
        to_uint8(frame)


def test_container_is_what_browsers_play(tmp_path: Path) -> None:
    import av

    path = tmp_path / "odd.mp4"
    with VideoWriter(path, fps=16) as writer:
        for _ in range(3):
            writer.add(np.full((47, 83, 3), 200, np.uint8))
    with av.open(str(path)) as container:
        context = container.streams.video[0].codec_context
        assert (context.name, context.pix_fmt) == ("h264", "yuv420p")
        assert (context.height, context.width) == (48, 84), "odd sizes are padded to even"
        assert (int(context.color_range), int(context.colorspace)) == (1, 1), "limited range, BT.709"
        assert (int(context.color_primaries), int(context.color_trc)) == (1, 1)
        assert container.streams.video[0].average_rate == 16
    data = path.read_bytes()
    assert data.index(b"moov") < data.index(b"mdat"), "the index comes first"


@pytest.mark.parametrize("fps", [16, 24, 23.976, 8, 29.97])
def test_fps_is_in_the_container(fps: float, tmp_path: Path) -> None:
    path = tmp_path / "fps.mp4"
    with VideoWriter(path, fps=fps) as writer:
        for _ in range(4):
            writer.add(chart())
    with VideoReader(path) as reader:
        assert reader.fps == pytest.approx(fps, rel=1e-4)


def test_gif_and_png_sequence(tmp_path: Path) -> None:
    moving = [np.roll(chart(31, 113), shift, axis=1) for shift in range(4)]
    for name in ("clip.gif", "clip.png", "p_%03d.png"):
        with VideoWriter(tmp_path / name, fps=10) as writer:
            for frame in moving:
                writer.add(frame)
    with VideoReader(tmp_path / "clip.gif") as reader:
        frames = list(reader)
    assert [frame.shape for frame in frames] == [(31, 113, 3)] * 4
    assert max(np.abs(f.astype(int) - m).max() for f, m in zip(frames, moving, strict=True)) <= 8
    for name in ("clip.png", "p_%03d.png"):
        for index, frame in enumerate(moving):
            assert np.array_equal(read_image(sequence_name(tmp_path / name, index)), frame)
    assert (tmp_path / "p_002.png").exists() and (tmp_path / "clip-000003.png").exists()
    assert not list(tmp_path.glob(".*")), "temporary files were left"


@pytest.mark.parametrize("name", ["clip.mp4", "clip.gif", "clip.png"])
def test_an_error_leaves_nothing_and_keeps_the_old_file(name: str, tmp_path: Path) -> None:
    old = tmp_path / "clip.mp4"
    old.write_bytes(b"old")
    with pytest.raises(RuntimeError), VideoWriter(tmp_path / name) as writer:
        writer.add(chart())
        raise RuntimeError("the consumer failed")
    assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]
    assert old.read_bytes() == b"old"


def test_a_change_of_size_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StreamvidError, match="32x32.*64x112"), VideoWriter(tmp_path / "a.mp4") as writer:
        writer.add(chart())
        writer.add(np.zeros((32, 32, 3), np.uint8))
    with pytest.raises(StreamvidError, match="no frame"), VideoWriter(tmp_path / "a.mp4"):
        pass
    assert not list(tmp_path.iterdir())


def test_bad_names_are_refused_before_anything_is_computed(tmp_path: Path) -> None:
    with pytest.raises(StreamvidError, match=r"\.mp4, \.gif, \.png"):
        VideoWriter(tmp_path / "a.avi")
    with pytest.raises(StreamvidError, match="is a folder"):
        (tmp_path / "b.mp4").mkdir()
        VideoWriter(tmp_path / "b.mp4")
    (tmp_path / "file").write_text("")
    with pytest.raises(StreamvidError, match="cannot be written"):
        VideoWriter(tmp_path / "file" / "c.mp4")
    with pytest.raises(StreamvidError, match="fps"):
        VideoWriter(tmp_path / "a.mp4", fps=0)
    VideoWriter(tmp_path / "new" / "d.mp4").abort()
    assert not list((tmp_path / "new").iterdir())


WRITE_FOREVER = """
    import sys, time
    import numpy as np
    from streamvid.video_io import VideoWriter
    rng = np.random.default_rng(0)
    with VideoWriter(sys.argv[1]) as writer:
        while True:
            writer.add(rng.integers(0, 255, (64, 64, 3), np.uint8))
            print(writer.num_frames, flush=True)
"""


def test_a_killed_writer_leaves_no_final_file_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITE_FOREVER), str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(5):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not path.exists() and list(tmp_path.glob(".clip.mp4.*.part"))
    with VideoWriter(path) as writer:
        writer.add(chart())
    assert [found.name for found in tmp_path.iterdir()] == ["clip.mp4"]


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    limited = "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
    code = limited + textwrap.dedent(WRITE_FOREVER)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "clip.mp4")], capture_output=True, text=True, timeout=60
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("streamvid.errors.StreamvidError") and "cannot be written" in last, done.stderr
    assert not list(tmp_path.iterdir())


def test_memory_does_not_grow_with_length(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    process = psutil.Process(os.getpid())
    with VideoWriter(tmp_path / "long.mp4") as writer:
        for count in range(900):
            if count == 300:
                before = process.memory_info().rss
            writer.add(rng.integers(0, 255, (64, 64, 3), np.uint8))
        grown = process.memory_info().rss - before
    assert grown < 6 * 2**20, f"{grown} bytes for 600 frames of {64 * 64 * 3}"


def test_reader_refuses_what_is_no_video(tmp_path: Path) -> None:
    text = tmp_path / "a.mp4"
    text.write_text("not a video")
    with pytest.raises(StreamvidError, match="not a video"):
        VideoReader(text)
    with pytest.raises(StreamvidError, match="no such file"):
        VideoReader(tmp_path / "missing.mp4")
    with pytest.raises(StreamvidError, match="is a folder"):
        read_image(tmp_path)
    with pytest.raises(StreamvidError, match="no such picture"):
        read_image(tmp_path / "missing.png")
    with pytest.raises(StreamvidError, match="not a picture"):
        read_image(text)
