"""The judge: right on rendered truth, and not fooled by drift, blur, freezing or another object."""

import cv2
import numpy as np
import pytest

from streamvid.tiny.captions import MOTIONS, SHAPES, Attributes, caption
from streamvid.tiny.judge import judge, largest_jump, observe
from streamvid.tiny.world import render, sample_scene, scene_of

MOVING = [m for m in MOTIONS if m != "still"]


def clip(attributes: Attributes, frames: int = 64) -> np.ndarray:
    return render(scene_of(attributes, np.random.default_rng(0)), frames)


def test_clean_renders_are_right():
    verdicts = []
    for index in range(40):
        scene = sample_scene(12345, index)
        verdict = judge(render(scene, 64), caption(scene.attributes_at(0), np.random.default_rng(index)))
        verdicts.append(verdict.right and verdict.size and verdict.identity)
    assert np.mean(verdicts) >= 0.99


def test_larger_frames_are_measured_in_the_same_units():
    scene = sample_scene(3, 4)
    verdict = judge(render(scene, 48, side=128), caption(scene.attributes_at(0)))
    assert verdict.right and verdict.size


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("seed", range(4))
def test_blur_is_seen_wherever_the_edges_lie(shape, seed):
    wanted = Attributes(shape, "red", "big", "still", "black")
    frames = render(scene_of(wanted, np.random.default_rng(seed)), 48)
    soft = np.stack([cv2.GaussianBlur(f, (0, 0), 3.0) for f in frames])
    assert judge(frames, wanted).shape and not judge(soft, wanted).shape


def test_colour_drift_is_seen_though_the_nearest_name_stays():
    wanted = Attributes("star", "red", "big", "sliding", "black")
    frames = clip(wanted, 96).astype(np.float32)
    drift = (frames + np.linspace(0, 60, 96)[:, None, None, None]).clip(0, 255).astype(np.uint8)
    verdict = judge(drift, wanted)
    assert not verdict.background and not verdict.identity


@pytest.mark.parametrize("motion", MOVING)
def test_a_frozen_clip_has_not_the_motion(motion):
    wanted = Attributes("star", "green", "big", motion, "grey")
    frames = clip(wanted, 72)
    frames[12:] = frames[12]
    assert judge(clip(wanted, 72), wanted).motion
    assert not judge(frames, wanted).motion


@pytest.mark.parametrize("change", [{"shape": "square"}, {"colour": "orange"}, {"background": "navy"}])
def test_another_object_in_the_last_half_is_seen(change):
    wanted = Attributes("star", "red", "big", "still", "black")
    frames = clip(wanted, 64)
    frames[30:] = clip(wanted.changed(**change), 64)[30:]
    verdict = judge(frames, wanted)
    assert not verdict.right and not verdict.identity


def test_nothing_there_is_nothing_right():
    verdict = judge(
        np.full((48, 64, 64, 3), 12, np.uint8), "a big red ball standing still on a black background"
    )
    assert verdict.background and not (verdict.colour or verdict.shape or verdict.identity)


def test_a_jump_is_measured():
    frames = clip(Attributes("ball", "white", "small", "still", "black"), 20)
    frames[10:] = np.roll(frames[10:], 7, axis=2)
    assert abs(largest_jump(observe(frames)) - 7) < 0.1
