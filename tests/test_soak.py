"""Ten thousand frames: bytes, time and resident memory stay flat, and the file is complete. Run with ``-m slow -s``."""

from __future__ import annotations

import gc
import os
import statistics
import time
from pathlib import Path

import psutil
import pytest

import streamvid
from streamvid.video_io import VideoReader, VideoWriter

FRAMES = 10_000


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_thousand_frames(tiny_random_folder, tmp_path: Path) -> None:
    pipe = streamvid.load(os.environ.get("STREAMVID_SOAK_MODEL", tiny_random_folder))
    resident = psutil.Process().memory_info
    seconds, held, rss = [], [], []
    with (
        VideoWriter(tmp_path / "soak.mp4", fps=pipe.config.fps) as writer,
        pipe.stream("a red ball", num_frames=FRAMES, height=32, width=32) as stream,
    ):
        chunks = stream.chunks()
        while True:
            begun = time.process_time()
            chunk = next(chunks, None)
            if chunk is None:
                break
            seconds.append(time.process_time() - begun)
            held.append(stream.nbytes())
            for frame in chunk.frames:
                writer.add(frame)
            if chunk.index % 50 == 0:
                gc.collect()
                rss.append(resident().rss)
    full = 12  # chunks after which the window is full
    tenth = (len(seconds) - full) // 10
    first, last = seconds[full : full + tenth], seconds[-tenth:]
    ratio = statistics.median(last) / statistics.median(first)
    print(
        f"\n{FRAMES} frames, {len(seconds)} chunks: bytes {held[full]} -> {held[-1]}, median chunk "
        f"{statistics.median(first):.4f} -> {statistics.median(last):.4f} s of CPU time ({ratio:.3f}), "
        f"resident {rss[1] / 2**20:.1f} -> {rss[-1] / 2**20:.1f} MiB"
    )
    assert held[full] == held[-1], "bytes grew"
    assert ratio <= 1.03, "chunks became slower"
    assert rss[-1] - rss[1] < 8 * 2**20
    with VideoReader(tmp_path / "soak.mp4") as reader:
        assert reader.num_frames == FRAMES
        assert sum(1 for _ in reader) == FRAMES
