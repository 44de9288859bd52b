"""The tiny world: captions and their parser agree, the renderer is deterministic, nothing leaves or jumps."""

import numpy as np
import pytest

from streamvid.errors import StreamvidError
from streamvid.tiny.captions import (
    MOTIONS,
    ROUND,
    SHAPES,
    Attributes,
    all_words,
    caption,
    parse,
    sample_attributes,
)
from streamvid.tiny.world import BACKGROUND_RGB, RGB, Scene, coverage, path, poses, render, sample_scene


def test_every_paraphrase_is_parsed_back():
    rng = np.random.default_rng(0)
    words = set(all_words())
    for _ in range(400):
        attributes = sample_attributes(rng)
        text = caption(attributes, rng)
        assert parse(text) == attributes
        assert set(text.replace(",", "").split()) <= words


def test_parser_is_tolerant_and_names_what_is_missing():
    wanted = Attributes("box", "blue", "big", "still", "navy").changed(shape="square")
    assert parse("THE large Blue BOX!! not moving; dark blue background.") == wanted
    assert parse("blue square, navy background") == wanted
    with pytest.raises(StreamvidError, match="names no shape"):
        parse("a red thing on a black background")


def test_frames_are_a_function_of_seed_and_index():
    first = render(sample_scene(1, 2, switch_frames=(9,)), 21)
    assert np.array_equal(first, render(sample_scene(1, 2, switch_frames=(9,)), 21))
    assert not np.array_equal(first, render(sample_scene(1, 3, switch_frames=(9,)), 21))
    assert np.array_equal(first[12:], render(sample_scene(1, 2, switch_frames=(9,)), 9, start=12))


@pytest.mark.parametrize("motion", MOTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_object_never_touches_the_border(shape, motion):
    if motion == "spinning" and shape in ROUND:
        pytest.skip("not a scene of this world")
    pose = path(motion, "big", np.arange(0, 80, 2)) + [1.06, -1.06, 0, 0]
    cover = coverage(shape, pose)
    rim = np.concatenate([cover[:, 0], cover[:, -1], cover[:, :, 0], cover[:, :, -1]])
    assert rim.max() < 0.05
    assert 0.03 < cover.mean() < 0.35


def test_colours_are_far_apart():
    for table, gap in ((RGB, 60), (BACKGROUND_RGB, 40)):
        values = np.array(list(table.values()))
        distance = np.abs(values[:, None] - values[None]).max(2) + 1000 * np.eye(len(values))
        assert distance.min() > gap


def test_a_change_of_colour_moves_nothing_and_a_change_of_motion_does_not_jump():
    old = Attributes("star", "red", "big", "orbiting", "black")
    same_path = Scene(((0, old), (33, old.changed(colour="blue"))), 5.0, (1.0, 0.0))
    plain = Scene(((0, old),), 5.0, (1.0, 0.0))
    assert np.array_equal(poses(same_path, 80), poses(plain, 80))
    for motion in MOTIONS:
        moved = poses(Scene(((0, old), (33, old.changed(motion=motion))), 5.0, (1.0, 0.0)), 120)
        assert np.linalg.norm(np.diff(moved[:, :2], axis=0), axis=1).max() < 2.6
    settled = poses(Scene(((0, old), (33, old.changed(motion="still"))), 5.0, (1.0, 0.0)), 120)[60:]
    assert np.ptp(settled[:, :2], axis=0).max() == 0
