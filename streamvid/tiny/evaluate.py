"""The measure of the embedded model through the public API, and its ceilings: clean renders and the VAE
alone.

Prompts, seeds and scenes are held out and fixed, so two runs on one machine give the same numbers (speed
excepted).
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from diffusers import AutoencoderKLWan

from streamvid.tiny.captions import Attributes, caption, sample_attributes
from streamvid.tiny.codec import decode, encode
from streamvid.tiny.data import to_model
from streamvid.tiny.judge import Verdict, judge, largest_jump, observe
from streamvid.tiny.world import change, render, scene_of

HELD_OUT = 20_000_003  # seed of prompts and scenes that training never sees
CLIP_FRAMES, LONG_FRAMES, VERY_LONG_FRAMES = 81, 240, 1000
SWITCH_FRAME, SWITCH_WITHIN, SWITCH_SHOWN = 60, 24, 64
JUMP = 4.0  # pixels between two frames from which a change of colour alone counts as a jump
NO_SINK = "window:size=18,sink=0,positions=slot"  # the shipped window without its sink
ONE_CHUNK = {  # one chunk of recent frames, with a sink of another and without
    "with": "window:size=6,sink=3,positions=slot",
    "without": "window:size=3,sink=0,positions=slot",
}
LATE_FRAMES = 240  # the end of a very long clip, in which what was lost shows
BEST_FOR_LONG = "window:size=18,sink=3,positions=slot"  # of docs/policies.md, at 1,000 frames
Item = TypeVar("Item")
Progress = Callable[[str, int, int], None]
KEYS = ("right", "colour", "background", "shape", "motion", "size", "identity")


def held_out_prompts(count: int) -> list[Attributes]:
    """The first `count` prompts of the held-out list."""
    rng = np.random.default_rng(HELD_OUT)
    return [sample_attributes(rng) for _ in range(count)]


def rates(verdicts: list[Verdict]) -> dict[str, float]:
    """The part of clips in which each property holds; `accuracy` is that of the first four together."""
    table = {key: float(np.mean([getattr(v, key) for v in verdicts])) for key in KEYS}
    return {"accuracy": table.pop("right"), **table}


def to_frames(video: torch.Tensor) -> np.ndarray:
    """[b, 3, t, h, w] in -1..1 to uint8 [b, t, h, w, 3]."""
    return ((video.clamp(-1, 1) + 1) * 127.5 + 0.5).permute(0, 2, 3, 4, 1).to(torch.uint8).cpu().numpy()


@torch.no_grad()
def through_vae(vae: AutoencoderKLWan, frames: np.ndarray) -> np.ndarray:
    """A clip, encoded and decoded: uint8 [t, h, w, 3] in and out; t - 1 must be a multiple of four."""
    device = next(vae.parameters()).device
    dtype = next(vae.parameters()).dtype
    return to_frames(decode(vae, encode(vae, to_model(frames[None]).to(device, dtype))).float())[0]


@dataclass(frozen=True)
class Gate:
    """Truth through the VAE: PSNR of the whole clip and of equal parts of it (is it flat?), and the
    judge's view."""

    psnr: float
    psnr_parts: tuple[float, ...]
    shape_frames: float
    colour_frames: float
    background_frames: float
    background_error: float


def vae_gate(vae: AutoencoderKLWan, *, clips: int = 20, frames: int = 241, parts: int = 4) -> Gate:
    """Sends rendered held-out clips through the VAE and measures what comes back."""
    squares, verdicts = [], []
    for index, attributes in enumerate(held_out_prompts(clips)):
        truth = render(scene_of(attributes, np.random.default_rng([HELD_OUT, index])), frames)
        back = through_vae(vae, truth)
        squares.append(((back.astype(np.float32) - truth) ** 2).mean((1, 2, 3)))
        verdicts.append(judge(back, attributes))
    psnr = lambda square: float(10 * np.log10(255**2 / np.mean(square)))
    stacked = np.stack(squares)
    mean = lambda name: float(np.mean([getattr(v, name) for v in verdicts]))
    return Gate(
        psnr=psnr(stacked),
        psnr_parts=tuple(psnr(part) for part in np.array_split(stacked, parts, axis=1)),
        shape_frames=mean("shape_frames"),
        colour_frames=mean("colour_frames"),
        background_frames=mean("background_frames"),
        background_error=mean("background_error"),
    )


def ceilings(vae: AutoencoderKLWan, prompts: int = 100) -> dict[str, dict[str, float]]:
    """Rates of clean renders (what the judge can give at most) and of renders sent through the VAE."""
    clean, coded = [], []
    for index, attributes in enumerate(held_out_prompts(prompts)):
        truth = render(scene_of(attributes, np.random.default_rng([HELD_OUT, index])), CLIP_FRAMES)
        clean.append(judge(truth, attributes))
        coded.append(judge(through_vae(vae, truth), attributes))
    return {"render": rates(clean), "vae": rates(coded)}


def stream_clip(pipe: Any, attributes: Attributes, num_frames: int, seed: int, **options: Any) -> np.ndarray:
    """Frames uint8 [num_frames, h, w, 3] of one stream; `options` go to `pipe.stream`."""
    with pipe.stream(caption(attributes), num_frames=num_frames, seed=seed, **options) as stream:
        return np.stack(list(stream))


def switch_clip(
    pipe: Any, before: Attributes, after: Attributes, seed: int, **options: Any
) -> tuple[bool, float]:
    """Whether the new prompt holds from 24 frames after a change at frame 60 on, and the largest jump at
    the change.

    The change takes place at the first chunk that begins at frame 60 or later; the 24 frames are counted
    from frame 60.
    """
    total = SWITCH_FRAME + SWITCH_WITHIN + SWITCH_SHOWN
    with pipe.stream(caption(before), num_frames=total, seed=seed, **options) as stream:
        stream.set_prompt(caption(after), at_frame=SWITCH_FRAME)
        frames = np.stack(list(stream))
    seen = observe(frames)
    around = seen.part(slice(SWITCH_FRAME - 2, SWITCH_FRAME + SWITCH_WITHIN))
    tail = slice(SWITCH_FRAME + SWITCH_WITHIN, None)
    return judge(frames[tail], after, seen=seen.part(tail)).right, largest_jump(around)


def _told(items: Iterable[Item], name: str, progress: Progress | None) -> Iterator[Item]:
    """The items, telling `progress` after each: (name of the part, done, of how many)."""
    items = list(items)
    for done, item in enumerate(items, 1):
        yield item
        if progress:
            progress(name, done, len(items))


def first_frame_seconds(pipe: Any) -> float:
    """Seconds from asking a loaded pipeline for a stream to its first frame."""
    began = time.perf_counter()
    with pipe.stream(caption(held_out_prompts(1)[0]), num_frames=1, seed=9) as stream:
        next(iter(stream))
    return time.perf_counter() - began


def evaluate(
    pipe: Any,
    *,
    prompts: int = 100,
    seeds: int = 3,
    long_clips: int = 40,
    very_long_clips: int = 20,
    switches: int = 100,
    with_ceilings: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> dict[str, Any]:
    """All the numbers of the embedded model, measured on `pipe` (from `streamvid.load`).

    Keys: `accuracy colour background shape motion size` over `prompts * seeds` clips of 81 frames and
    `fps` (generation alone, text to uint8) of those; `identity_240 accuracy_240` over `long_clips` of 240
    frames with the stream's own memory, `identity_240_no_sink accuracy_240_no_sink` over the same with a
    window without a sink; `identity_1000` over `very_long_clips`; `switch` over `switches` random
    changes, `colour_switch_jumps` (part of changes of the colour alone in which the object jumps); `sink`
    is `sink_effect` over `very_long_clips`;
    `first_frame_seconds` of a loaded model; `gate` and `ceilings` of the VAE and of clean renders.
    `options` are stream options, such as `memory` or `codec`; `progress(part, done, total)` is called after
    each clip.
    """
    wanted = held_out_prompts(max(prompts, long_clips, very_long_clips, switches))
    first = first_frame_seconds(pipe)
    verdicts, seconds = [], 0.0
    pairs = [(seed, attributes) for seed in range(seeds) for attributes in wanted[:prompts]]
    for seed, attributes in _told(pairs, f"{CLIP_FRAMES} frames", progress):
        began = time.perf_counter()
        frames = stream_clip(pipe, attributes, CLIP_FRAMES, seed, **options)
        seconds += time.perf_counter() - began
        verdicts.append(judge(frames, attributes))
    result: dict[str, Any] = rates(verdicts)
    result.pop("identity")
    result["fps"] = len(verdicts) * CLIP_FRAMES / seconds
    result["first_frame_seconds"] = first
    long = {
        "240": (LONG_FRAMES, long_clips, {}),
        "240_no_sink": (LONG_FRAMES, long_clips, {"memory": NO_SINK}),
        "1000": (VERY_LONG_FRAMES, very_long_clips, {"memory": BEST_FOR_LONG}),
    }
    for name, (num_frames, clips, memory) in long.items():
        seen = [
            judge(stream_clip(pipe, attributes, num_frames, 100 + index, **{**memory, **options}), attributes)
            for index, attributes in _told(enumerate(wanted[:clips]), f"{num_frames} frames", progress)
        ]
        if seen:
            result[f"identity_{name}"] = float(np.mean([v.identity for v in seen]))
            result[f"accuracy_{name}"] = float(np.mean([v.right for v in seen]))
    if very_long_clips > 1:
        result["sink"] = sink_effect(pipe, wanted[:very_long_clips], progress, **options)
    if switches:
        result.update(_switches(pipe, wanted[:switches], progress, **options))
    if with_ceilings:
        result["gate"] = asdict(vae_gate(pipe.vae))
        result["ceilings"] = ceilings(pipe.vae, prompts)
    result["counts"] = {
        "prompts": prompts,
        "seeds": seeds,
        "long_clips": long_clips,
        "very_long_clips": very_long_clips,
        "switches": switches,
    }
    return result


def sink_effect(
    pipe: Any, wanted: list[Attributes], progress: Progress | None = None, **options: Any
) -> dict[str, Any]:
    """What a sink holds when the recent frames alone do not: 1,000 frames with one chunk of them, with and
    without a sink.

    The clips are pairs of one prompt and seed; all but `identity` is judged over the last 240 frames.
    Returns means `with` and `without`, and `difference` (without minus with): mean and half-width of its
    95 % interval over pairs. `memory` in `options` is left out, as the two windows are the question.
    """
    options = {key: value for key, value in options.items() if key != "memory"}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in ONE_CHUNK}
    for index, attributes in _told(enumerate(wanted), "with and without a sink", progress):
        for name, memory in ONE_CHUNK.items():
            frames = stream_clip(pipe, attributes, VERY_LONG_FRAMES, 100 + index, memory=memory, **options)
            seen = observe(frames)
            late = judge(frames[-LATE_FRAMES:], attributes, seen=seen.part(slice(-LATE_FRAMES, None)))
            rows[name].append(
                {
                    "identity": float(judge(frames, attributes, seen=seen).identity),
                    "colour_frames": late.colour_frames,
                    "background_frames": late.background_frames,
                    "background_error": late.background_error,
                    "shape_frames": late.shape_frames,
                    "motion": float(late.motion),
                }
            )
    result: dict[str, Any] = {"memory": ONE_CHUNK, "clips": len(wanted), "difference": {}}
    for name, values in rows.items():
        result[name] = {key: float(np.mean([row[key] for row in values])) for key in values[0]}
    for key in rows["with"][0]:
        gaps = np.array([b[key] - a[key] for a, b in zip(rows["with"], rows["without"], strict=True)])
        half = 1.96 * gaps.std(ddof=1) / np.sqrt(len(gaps))
        result["difference"][key] = [float(gaps.mean()), float(half)]
    return result


def _switches(
    pipe: Any, wanted: list[Attributes], progress: Progress | None, **options: Any
) -> dict[str, float]:
    holds, jumps = [], []
    for index, before in _told(enumerate(wanted), "prompt changes", progress):
        rng = np.random.default_rng([HELD_OUT, 3, index])
        after = change(before, rng)
        held, _ = switch_clip(pipe, before, after, 200 + index, **options)
        holds.append(held)
        if index % 2 == 0:
            others = [a for a in (change(before, rng) for _ in range(200)) if a.colour != before.colour]
            _, jump = switch_clip(
                pipe, before, before.changed(colour=others[0].colour), 300 + index, **options
            )
            jumps.append(jump > JUMP)
    return {"switch": float(np.mean(holds)), "colour_switch_jumps": float(np.mean(jumps))}
