"""A renderer without a model: clips whose damage is a known function of the cell. Importable by worker processes."""

import os
import time
from pathlib import Path

import numpy as np

from streamvid.eval.render import Rendered

NOISE = {"none": 0.0, "int8": 1.0, "int4": 6.0, "int2": 25.0}


class FakeRenderer:
    """Codec adds noise, ``window:sink=0`` fades to grey; ``memory="broken"`` fails, ``"killed"`` dies.

    Every call appends a line to the file named by STREAMVID_TEST_CALLS.
    """

    def __call__(self, cell):
        variant = cell.variant
        calls = os.environ.get("STREAMVID_TEST_CALLS")
        if calls:
            with Path(calls).open("a") as file:
                file.write(f"{variant.memory}/{variant.codec}/{cell.prompt}/{cell.seed}\n")
        if variant.memory == "broken":
            raise RuntimeError("CUDA out of memory (not really)")
        if variant.memory == "killed":
            os._exit(9)
        if variant.memory == "slow":
            time.sleep(0.3)
        if variant.memory == "interrupt":
            raise KeyboardInterrupt
        rng = np.random.default_rng([cell.seed, len(cell.prompt)])
        side, n = cell.height or 48, cell.num_frames
        scene = rng.integers(40, 200, 3) + np.zeros((n, side, side, 3))
        for t in range(n):
            x = int(4 + (side - 24) * (0.5 + 0.5 * np.sin(t / 8)))
            scene[t, 10:26, x : x + 16] = (230, 60, 50)
        noise = np.random.default_rng(cell.seed).normal(0, NOISE.get(variant.codec, 0.0), scene.shape)
        if variant.memory == "window:sink=0":
            fade = np.linspace(0, 0.8, n)[:, None, None, None]
            scene = scene * (1 - fade) + 128 * fade
        frames = np.clip(scene + noise, 0, 255).astype(np.uint8)
        chunks = [0, *range(9, n, 12)]
        bits = {"none": 16, "int8": 8.5, "int4": 4.5, "int2": 2.5}.get(variant.codec, 16)
        return Rendered(
            frames=frames,
            fps=16.0,
            chunk_starts=chunks,
            costs={"kv_bytes": bits * 1e4, "kv_peak_bytes": bits * 1e4 + 2e4, "chunk_ms": 50.0 + bits},
            settings={"memory": {"name": variant.memory}, "codec": variant.codec},
            regions=[
                {"chunk": c, "sink": [0], "recent": list(range(max(1, c - 2), c + 1))}
                for c in range(len(chunks))
            ],
            attention_mass=[{"sink": 0.3, "recent": 0.5, "current": 0.2} for _ in chunks],
        )
