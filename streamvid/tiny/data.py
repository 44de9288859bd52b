"""The transformer's training data: a pool of encoded clips, and the batch of every step, both functions of
a seed."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan

from streamvid.tiny.captions import Attributes, caption, sample_attributes
from streamvid.tiny.codec import encode
from streamvid.tiny.dit import CHUNK
from streamvid.tiny.world import render, scene_of

CLIP_CHUNKS = 8
CLIP_FRAMES = 1 + 4 * (CHUNK * CLIP_CHUNKS - 1)
SHARD = 64  # clips; each shard also holds FIRSTS first chunks
FIRSTS = 320
ANYWHERE = 0.75  # part of the clips that begin at a random place of the path: later chunks of a long stream
MAX_GAP = 240  # latent frames between the sink and the rest
PULSING = 0.15  # part of the scenes made to pulse: what grows and shrinks is learned last
AT_CHANGE = 0.5  # part of the windows of a clip with a change of prompt that hold the change


def first_frame(chunk: int) -> int:
    """The first pixel frame of a chunk: the first latent is one frame, all others four."""
    return 0 if chunk == 0 else 1 + 4 * (CHUNK * chunk - 1)


@dataclass
class Pool:
    """Encoded clips [n, CLIP_CHUNKS, CHUNK, c, h, w] with an early and a late scene each, and first chunks
    alone."""

    clips: torch.Tensor
    before: list[Attributes]
    after: list[Attributes]
    switch: list[int]  # the chunk from which `after` holds; CLIP_CHUNKS if never
    firsts: torch.Tensor
    first_scenes: list[Attributes]

    def attributes(self, clip: int, chunk: int) -> Attributes:
        """What a chunk of a clip shows."""
        return self.after[clip] if chunk >= self.switch[clip] else self.before[clip]


def to_model(clips: np.ndarray) -> torch.Tensor:
    """uint8 [b, t, h, w, 3] to fp32 [b, 3, t, h, w] in -1..1."""
    return torch.from_numpy(clips).permute(0, 4, 1, 2, 3).float() / 127.5 - 1


@torch.no_grad()
def _attributes(rng: np.random.Generator) -> Attributes:
    """Attributes to train on: a uniform draw, with more that pulse."""
    drawn = sample_attributes(rng)
    return drawn.changed(motion="pulsing") if rng.random() < PULSING else drawn


def encode_shard(vae: AutoencoderKLWan, seed: int, shard: int) -> dict:
    """Clips and first chunks number `shard`, encoded: tensors in fp16 and plain lists."""
    rng = np.random.default_rng([seed, 7, shard])
    device = next(vae.parameters()).device
    latents, first_latents, before, after, switches, first_scenes = [], [], [], [], [], []
    for _ in range(SHARD):
        switch = int(rng.integers(1, CLIP_CHUNKS)) if rng.random() < 0.45 else CLIP_CHUNKS
        frames = (first_frame(switch),) if switch < CLIP_CHUNKS else ()
        anywhere = rng.random() < ANYWHERE
        scene = scene_of(_attributes(rng), rng, switch_frames=frames, anywhere=anywhere)
        before.append(scene.segments[0][1])
        after.append(scene.segments[-1][1])
        switches.append(switch)
        latents.append(encode(vae, to_model(render(scene, CLIP_FRAMES)[None]).to(device))[0].cpu())
    for _ in range(FIRSTS // 16):
        scenes = [scene_of(_attributes(rng), rng) for _ in range(16)]
        first_scenes += [scene.segments[0][1] for scene in scenes]
        video = to_model(np.stack([render(scene, first_frame(1)) for scene in scenes]))
        first_latents.append(encode(vae, video.to(device)).cpu())
    pack = lambda z: z.transpose(1, 2).unflatten(1, (-1, CHUNK)).half()  # [n, chunks, CHUNK, c, h, w]
    names = lambda scenes: [list(vars(a).values()) for a in scenes]
    return {
        "clips": pack(torch.stack(latents)),
        "firsts": pack(torch.cat(first_latents))[:, 0],
        "before": names(before),
        "after": names(after),
        "switch": switches,
        "first_scenes": names(first_scenes),
    }


def load_pool(folder: Path, vae: AutoencoderKLWan | None, seed: int, shards: int) -> Pool:
    """The first `shards` shards, encoding and saving those that are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for shard in range(shards):
        path = folder / f"shard_{shard:04d}.pt"
        if not path.exists():
            temporary = path.with_suffix(f".{os.getpid()}.tmp")
            torch.save(encode_shard(vae, seed, shard), temporary)
            os.replace(temporary, path)
        parts.append(torch.load(path, weights_only=True))
    lists = {k: [x for p in parts for x in p[k]] for k in ("before", "after", "switch", "first_scenes")}
    scenes = {k: [Attributes(*v) for v in lists[k]] for k in ("before", "after", "first_scenes")}
    return Pool(
        clips=torch.cat([p["clips"] for p in parts]),
        firsts=torch.cat([p["firsts"] for p in parts]),
        switch=lists["switch"],
        **scenes,
    )


@dataclass
class Batch:
    """One step: chunks in the order [alone | clean | noisy] of `dit.TeacherForcing`, noise not added yet.

    `base` is the first temporal position of every chunk, `captions[which[i]]` the caption of chunk i,
    `clean_sees` [w, clean, clean] and `noisy_sees` [w, noisy, clean] who sees whom, `weight` the loss
    weight of alone + noisy.
    """

    latents: torch.Tensor
    base: torch.Tensor
    captions: list[str]
    which: torch.Tensor
    alone: int
    windows: int
    clean: int
    noisy: int
    clean_sees: torch.Tensor
    noisy_sees: torch.Tensor
    weight: torch.Tensor


class _Captions:
    """Collects captions and gives their numbers; a caption is dropped (empty) with probability 0.1."""

    def __init__(self, rng: np.random.Generator):
        self.rng, self.texts = rng, [""]
        self.known: dict[Any, Any] = {}

    def number(self, attributes: Attributes, sample: int) -> int:
        """The caption number of some attributes within one sample, where the wording stays the same."""
        key = (sample, attributes)
        if key not in self.known:
            if self.known.setdefault(("drop", sample), bool(self.rng.random() < 0.1)):
                self.known[key] = 0
            else:
                self.known[key] = len(self.texts)
                self.texts.append(caption(attributes, self.rng))
        return self.known[key]


@dataclass
class _Window:
    """Which chunks of a clip a window shows clean and noisy, and where they stand."""

    clean: list[int]
    noisy: list[int]
    clean_base: list[int]
    noisy_base: list[int]
    hides_sink: bool


def _draw_window(rng: np.random.Generator, opening: bool, clean: int, switch: int) -> _Window:
    """The opening of a clip, or its first chunk (the sink) and then neighbours from a random place.

    In half of the clips whose prompt changes (at chunk `switch`) that place is one from which the window
    sees the change.

    A noisy chunk always follows the newest chunk it sees: after the sink and a gap the first neighbour is
    context only, since nothing tells how far its motion has come. The sink is hidden in 30 % of these
    windows, and lies right before its neighbours or far away in position: all that a cache may do.
    """
    if opening:
        places = [CHUNK * i for i in range(clean + 1)]
        chunks = list(range(clean + 1))
        return _Window(chunks[:-1], chunks[1:], places[:-1], places[1:], False)
    start = int(rng.integers(2, CLIP_CHUNKS - clean + 1))
    if 2 < switch < CLIP_CHUNKS and rng.random() < AT_CHANGE:
        start = int(np.clip(switch - rng.integers(1, clean), 2, CLIP_CHUNKS - clean))
    gap = CHUNK + (int(round(MAX_GAP ** rng.random())) if rng.random() < 0.5 else 0)
    chunks = list(range(start, start + clean))
    places = [gap + CHUNK * i for i in range(clean)]
    return _Window([0, *chunks[:-1]], chunks[1:], [0, *places[:-1]], places[1:], rng.random() < 0.3)


def make_batch(pool: Pool, seed: int, step: int, *, alone: int, budget: int) -> Batch:
    """The batch of a step: `alone` first chunks, and windows of one kind with about `budget` chunks.

    Every noisy chunk comes in two or three copies, with a noise of its own each: the context is paid for
    once.
    """
    rng = np.random.default_rng([seed, 11, step])
    opening = bool(rng.random() < 0.35)
    clean = int(rng.choice([1, 2, 3, 5] if opening else [2, 3, 4, 6], p=[0.25, 0.3, 0.2, 0.25]))
    noisy = clean if opening else clean - 1
    copies = 2 if noisy > 2 else 3
    windows = max(1, round(budget / (clean + noisy * copies)))
    texts = _Captions(rng)
    rows = rng.integers(len(pool.firsts), size=alone)
    which = [texts.number(pool.first_scenes[row], -1 - i) for i, row in enumerate(rows)]
    base, weight = [0] * alone, [1.0] * alone
    clean_parts, noisy_parts, clean_base, noisy_base, clean_which, noisy_which = [], [], [], [], [], []
    clean_sees = torch.ones(clean, clean).tril().bool().repeat(windows, 1, 1)
    noisy_sees = torch.ones(noisy, clean).tril(clean - noisy).bool().repeat(windows, copies, 1)
    for w in range(windows):
        clip = int(rng.integers(len(pool.clips)))
        window = _draw_window(rng, opening, clean, pool.switch[clip])
        if window.hides_sink:
            clean_sees[w, 1:, 0] = False
            noisy_sees[w, :, 0] = False
        seen = [pool.attributes(clip, c) for c in window.clean]
        shown = [pool.attributes(clip, c) for c in window.noisy]
        targets = [1.0] * noisy
        if (
            shown[-1] != seen[0] and rng.random() < 0.5
        ):  # a runtime that recomputes its cache for the new prompt
            seen = [shown[-1]] * clean
            targets = [float(a == shown[-1]) for a in shown]
        clean_parts.append(pool.clips[clip, window.clean])
        noisy_parts.append(pool.clips[clip, window.noisy].repeat(copies, 1, 1, 1, 1))
        clean_base += window.clean_base
        noisy_base += window.noisy_base * copies
        clean_which += [texts.number(a, w) for a in seen]
        noisy_which += [texts.number(a, w) for a in shown] * copies
        weight += targets * copies
    return Batch(
        latents=torch.cat([pool.firsts[rows], *clean_parts, *noisy_parts]).float(),
        base=torch.tensor(base + clean_base + noisy_base),
        captions=texts.texts,
        which=torch.tensor(which + clean_which + noisy_which),
        alone=alone,
        windows=windows,
        clean=clean,
        noisy=noisy * copies,
        clean_sees=clean_sees,
        noisy_sees=noisy_sees,
        weight=torch.tensor(weight),
    )
