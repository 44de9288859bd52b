"""The transformer's training data: a pool of encoded clips, and the batch of every step, both functions of
a seed."""

import os
from dataclasses import dataclass
from pathlib import Path

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
MAX_GAP = 240  # latent frames between the sink and the rest


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
def encode_shard(vae: AutoencoderKLWan, seed: int, shard: int) -> dict:
    """Clips and first chunks number `shard`, encoded: tensors in fp16 and plain lists."""
    rng = np.random.default_rng([seed, 7, shard])
    device = next(vae.parameters()).device
    latents, first_latents, before, after, switches, first_scenes = [], [], [], [], [], []
    for _ in range(SHARD):
        switch = int(rng.integers(1, CLIP_CHUNKS)) if rng.random() < 0.45 else CLIP_CHUNKS
        frames = (first_frame(switch),) if switch < CLIP_CHUNKS else ()
        scene = scene_of(sample_attributes(rng), rng, switch_frames=frames)
        before.append(scene.segments[0][1])
        after.append(scene.segments[-1][1])
        switches.append(switch)
        latents.append(encode(vae, to_model(render(scene, CLIP_FRAMES)[None]).to(device))[0].cpu())
    for _ in range(FIRSTS // 16):
        scenes = [scene_of(sample_attributes(rng), rng) for _ in range(16)]
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
        self.rng, self.texts, self.known = rng, [""], {}

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


def make_batch(pool: Pool, seed: int, step: int, *, alone: int, budget: int, copies: int = 2) -> Batch:
    """The batch of a step: `alone` first chunks and windows of about `budget` chunks, `copies` noises for
    each.

    A window is the clip's first chunk and then neighbouring chunks from a random place. The first chunk
    (the sink) is hidden in 30 % of the windows, and lies right before the others or far away in position:
    what a cache may do.
    """
    rng = np.random.default_rng([seed, 11, step])
    chunks = int(rng.choice([3, 4, 6], p=[0.4, 0.25, 0.35]))
    clean, noisy = chunks - 1, (chunks - 1) * copies
    windows = max(1, round(budget / (clean + noisy)))
    texts = _Captions(rng)
    rows = rng.integers(len(pool.firsts), size=alone)
    which = [texts.number(pool.first_scenes[row], -1 - i) for i, row in enumerate(rows)]
    base, weight = [0] * alone, [1.0] * alone
    clean_parts, noisy_parts, clean_base, noisy_base, clean_which, noisy_which = [], [], [], [], [], []
    clean_sees = torch.ones(clean, clean).tril().bool().repeat(windows, 1, 1)
    noisy_sees = torch.ones(clean, clean).tril().bool().repeat(windows, copies, 1)
    for w in range(windows):
        clip = int(rng.integers(len(pool.clips)))
        start = int(rng.integers(1, CLIP_CHUNKS - clean + 1))
        ids = [0, *range(start, start + clean)]
        gap = CHUNK
        if start > 1 and rng.random() < 0.5:
            gap = CHUNK + int(round(MAX_GAP ** rng.random()))
        places = [0, *(gap + CHUNK * i for i in range(clean))]
        if chunks > 2 and rng.random() < 0.3:
            clean_sees[w, 1:, 0] = False
            noisy_sees[w, :, 0] &= torch.arange(clean).repeat(copies) == 0
        shown = [pool.attributes(clip, c) for c in ids]
        targets = [1.0] * clean
        seen = shown[:-1]
        if (
            shown[-1] != shown[0] and rng.random() < 0.5
        ):  # a runtime that recomputes its cache for the new prompt
            seen = [shown[-1]] * clean
            targets = [float(a == shown[-1]) for a in shown[1:]]
        clean_parts.append(pool.clips[clip, ids[:-1]])
        noisy_parts.append(pool.clips[clip, ids[1:]].repeat(copies, 1, 1, 1, 1))
        clean_base += places[:-1]
        noisy_base += places[1:] * copies
        clean_which += [texts.number(a, w) for a in seen]
        noisy_which += [texts.number(a, w) for a in shown[1:]] * copies
        weight += targets * copies
    return Batch(
        latents=torch.cat([pool.firsts[rows], *clean_parts, *noisy_parts]).float(),
        base=torch.tensor(base + clean_base + noisy_base),
        captions=texts.texts,
        which=torch.tensor(which + clean_which + noisy_which),
        alone=alone,
        windows=windows,
        clean=clean,
        noisy=noisy,
        clean_sees=clean_sees,
        noisy_sees=noisy_sees,
        weight=torch.tensor(weight),
    )
