"""The measure of the embedded model, and its ceilings: clean renders and the VAE alone."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import AutoencoderKLWan

from streamvid.tiny.codec import decode, encode
from streamvid.tiny.data import to_model
from streamvid.tiny.judge import Verdict, judge, observe
from streamvid.tiny.world import render, sample_scene

HELD_OUT = 20_000_003  # seed of prompts and clips that training never sees
KEYS = ("right", "colour", "background", "shape", "motion", "size", "identity")


@dataclass(frozen=True)
class Gate:
    """Truth through the VAE: PSNR over the whole clip, and in equal parts of it (is it flat?), and the
    judge's view."""

    psnr: float
    psnr_parts: tuple[float, ...]
    shape_frames: float
    colour_frames: float
    background_frames: float
    background_error: float


def rates(verdicts: list[Verdict]) -> dict[str, float]:
    """The part of clips in which each property holds; `accuracy` is that of all four together."""
    table = {key: float(np.mean([getattr(v, key) for v in verdicts])) for key in KEYS}
    return {"accuracy": table.pop("right"), **table}


def to_frames(video: torch.Tensor) -> np.ndarray:
    """[b, 3, t, h, w] in -1..1 to uint8 [b, t, h, w, 3]."""
    return ((video.clamp(-1, 1) + 1) * 127.5 + 0.5).permute(0, 2, 3, 4, 1).to(torch.uint8).cpu().numpy()


@torch.no_grad()
def vae_gate(vae: AutoencoderKLWan, *, clips: int = 20, frames: int = 241, parts: int = 4) -> Gate:
    """Sends rendered held-out clips through the VAE and measures what comes back."""
    device = next(vae.parameters()).device
    squares, verdicts = [], []
    for index in range(clips):
        scene = sample_scene(HELD_OUT, index)
        truth = render(scene, frames)
        back = to_frames(decode(vae, encode(vae, to_model(truth[None]).to(device))))[0]
        squares.append(((back.astype(np.float32) - truth) ** 2).mean((1, 2, 3)))
        verdicts.append(judge(back, scene.attributes_at(0)))
    psnr = lambda square: float(10 * np.log10(255**2 / np.mean(square)))
    squares = np.stack(squares)
    mean = lambda name: float(np.mean([getattr(v, name) for v in verdicts]))
    return Gate(
        psnr=psnr(squares),
        psnr_parts=tuple(psnr(part) for part in np.array_split(squares, parts, axis=1)),
        shape_frames=mean("shape_frames"),
        colour_frames=mean("colour_frames"),
        background_frames=mean("background_frames"),
        background_error=mean("background_error"),
    )


def score(
    make: Callable[[list[str], int], np.ndarray], prompts: list[str], seeds: int, batch: int = 20
) -> tuple[dict[str, float], list[Verdict]]:
    """Rates over prompts and seeds of clips that `make(prompts, seed)` gives as uint8 [b, t, h, w, 3]."""
    verdicts = []
    for seed in range(seeds):
        for start in range(0, len(prompts), batch):
            part = prompts[start : start + batch]
            for prompt, clip in zip(part, make(part, seed), strict=True):
                verdicts.append(judge(clip, prompt, seen=observe(clip)))
    return rates(verdicts), verdicts
