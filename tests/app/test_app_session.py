"""Sessions of the demo without a browser: the streams of a tab, their limits, and everything the page can do."""

from __future__ import annotations

import time

import numpy as np
import pytest
from app_driver import Page

import streamvid
from streamvid.app.hub import Hub
from streamvid.app.lane import write_mp4
from streamvid.app.protocol import handle, hello
from streamvid.app.session import Session
from streamvid.app.settings import TabSettings, choices, memory_cost
from streamvid.errors import StreamvidError


@pytest.fixture(scope="module")
def pipe(tiny_random_folder):
    return streamvid.load(tiny_random_folder, device="cpu", max_streams=6)


@pytest.fixture
def hub(pipe):
    hub = Hub("random", lambda name: pipe, max_streams=3)
    yield hub
    hub.close()
    assert len(pipe.sessions) == 0


def open_tab(hub, **options):
    page = Page(**options)
    page.session = Session(hub, page.emit)
    return page


def solo(pipe, prompt, count, **options):
    with pipe.stream(prompt, num_frames=count, **options) as stream:
        return np.stack(list(stream))


def test_two_tabs_equal_solo_runs_and_closing_one_frees_it(hub, pipe):
    first, second = open_tab(hub), open_tab(hub)
    first.session.start(TabSettings(prompt="red ball", seed=3))
    second.session.start(TabSettings(prompt="blue cube", seed=4))
    for page in (first, second):
        page.wait(lambda page=page: len(page.of_epoch()) >= 3)
        page.session.pause()
    assert np.array_equal(first.frames()[:21], solo(pipe, "red ball", 21, seed=3))
    assert np.array_equal(second.frames()[:21], solo(pipe, "blue cube", 21, seed=4))
    assert hub.num_streams() == len(pipe.sessions) == 2
    held = hub.nbytes()
    folder = first.session.folder
    first.session.close()
    assert hub.num_streams() == len(pipe.sessions) == 1
    assert 0 < hub.nbytes() < held
    assert not folder.exists()


def test_no_chunk_is_made_before_the_page_has_shown_the_last(hub):
    page = open_tab(hub, shows=False)
    page.session.start(TabSettings(prompt="red ball"))
    page.wait(lambda: len(page.of_epoch()) == 1)
    time.sleep(0.3)
    made = len(page.of_epoch())
    assert made <= 2
    page.session.acknowledge(page.session.epoch, 0, page.frames().shape[0])
    page.wait(lambda: len(page.of_epoch()) > made)


def test_pause_stops_and_step_makes_one_chunk(hub):
    page = open_tab(hub)
    page.session.start(TabSettings(prompt="red ball"))
    page.wait(lambda: len(page.of_epoch()) >= 1)
    page.session.pause()
    time.sleep(0.2)  # a chunk that was being made is finished
    made = len(page.of_epoch())
    time.sleep(0.3)
    assert len(page.of_epoch()) == made
    page.session.step()
    page.wait(lambda: len(page.of_epoch()) == made + 1)
    time.sleep(0.2)
    assert len(page.of_epoch()) == made + 1


def test_a_prompt_applies_at_the_chunk_of_its_receipt(hub, pipe):
    page = open_tab(hub, shows=False)
    page.session.start(TabSettings(prompt="red ball"))
    page.wait(lambda: len(page.of_epoch()) == 2)
    answer = handle(hub, page.session, {"type": "prompt", "prompt": "blue cube", "transition": "cut"})
    assert answer["receipt"]["chunk"] == 2
    page.session.step()
    page.wait(lambda: len(page.of_epoch()) == 3)
    header, _ = page.of_epoch()[2]
    assert header["prompt"] == "blue cube" and header["transition"] == "cut"
    assert header["receipts"][-1]["status"] == "applied"
    assert page.session.timeline()["prompts"] == [{"frame": 21, "prompt": "blue cube", "transition": "cut"}]


def test_a_timeline_runs_as_it_was_saved(hub):
    page = open_tab(hub)
    later = [{"frame": 9, "prompt": "blue cube", "transition": "recache"}]
    settings = TabSettings(prompt="red ball", seed=5)
    page.session.start(settings, prompts=later)
    page.wait(lambda: len(page.of_epoch()) >= 3)
    once, saved = page.frames()[:33], page.session.timeline()
    assert saved["prompts"] == later
    handle(hub, page.session, {"type": "start", **saved})
    page.wait(lambda: len(page.of_epoch()) >= 3)
    assert np.array_equal(page.frames()[:33], once)
    assert page.of_epoch()[1][0]["transition"] == "recache"


def test_compare_shows_two_settings_with_the_same_noise(hub, pipe):
    page = open_tab(hub)
    same = TabSettings(prompt="red ball", seed=6)
    page.session.start(same, compare=TabSettings(prompt="red ball", seed=6, memory="window:size=6,sink=3"))
    page.wait(lambda: len(page.of_epoch(1)) >= 4)
    left, right = page.frames(0)[:45], page.frames(1)[:45]
    assert np.array_equal(left[:9], right[:9])  # the window holds the first chunks
    assert not np.array_equal(left, right)
    assert hub.num_streams() == 2
    assert write_mp4(page.session.folder / "both.mp4", page.session.lanes, 8) == 8


def test_return_to_a_snapshot_is_bit_for_bit(hub):
    page = open_tab(hub, shows=False)
    page.session.start(TabSettings(prompt="red ball", seed=7))
    page.wait(lambda: len(page.of_epoch()) == 2)
    taken = page.session.snapshot()
    page.session.step()
    page.wait(lambda: len(page.of_epoch()) == 3)
    after = page.of_epoch()[2][1]
    page.session.restore(taken["id"])
    page.wait(lambda: len(page.of_epoch()) >= 1)
    header, frames = page.of_epoch()[0]
    assert header["start_frame"] == taken["frame"] == 21
    assert np.array_equal(frames, after)
    with pytest.raises(StreamvidError, match="snapshot is gone"):
        page.session.restore("none such")


def test_limits_refuse_and_what_ran_goes_on(hub, pipe):
    page = open_tab(hub)
    page.session.start(TabSettings(prompt="red ball"), compare=TabSettings(prompt="red ball", seed=1))
    other = open_tab(hub)
    other.session.start(TabSettings(prompt="blue cube"))
    with pytest.raises(StreamvidError, match="3 streams are open and 3 are allowed"):
        open_tab(hub).session.start(TabSettings(prompt="star"))
    page.session.start(TabSettings(prompt="red ball", seed=2))  # replaces its own two
    assert hub.num_streams() == 2
    with pytest.raises(ValueError, match="did you mean 'window'"):
        page.session.start(TabSettings(prompt="red ball", memory="windw"))
    assert len(page.session.lanes) == 1 and page.session.settings.seed == 2
    hub.max_bytes = 1000
    with pytest.raises(StreamvidError, match="are allowed; choose a shorter memory"):
        other.session.start(TabSettings(prompt="star"))


def test_an_idle_tab_is_freed_and_can_start_again(hub, pipe):
    page = Page(shows=False)
    page.session = Session(hub, page.emit, idle_after=0.3)
    page.session.start(TabSettings(prompt="red ball"))
    page.wait(lambda: any(m["type"] == "idle" for m in page.messages))
    assert hub.num_streams() == len(pipe.sessions) == 0
    page.session.heard()
    page.session.start(TabSettings(prompt="red ball"))
    page.wait(lambda: len(page.of_epoch()) >= 1)


def test_frames_kept_for_saving_are_bounded(pipe):
    hub = Hub("random", lambda name: pipe, keep_bytes=40 * 64 * 64 * 3)
    page = open_tab(hub)
    page.session.start(TabSettings(prompt="red ball"))
    page.wait(lambda: len(page.of_epoch()) >= 6)
    assert page.session.lanes[0].kept_frames <= 40
    hub.close()


def test_everything_offered_is_real(hub, pipe):
    page = open_tab(hub)
    said = hello(hub, page.session)
    assert said["choices"] == choices(pipe) and said["fps"] == 8.0
    assert {"cross", "recache", "blend"} <= set(said["choices"]["transitions"])
    plain, small = (memory_cost(pipe, "window:size=9", codec) for codec in ("none", "int4"))
    assert 0 < small["stored"] < plain["dense"] <= plain["stored"]
    answer = handle(hub, page.session, {"type": "cost", "memory": "window:size=x", "codec": ""})
    assert "whole number" in answer["problem"]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"type": "promt"}, "did you mean 'prompt'"),
        ({"type": "prompt", "prompt": "x" * 2001}, "may have 2000 characters"),
        ({"type": "prompt", "prompt": "star", "transition": "cros"}, "did you mean 'cross'"),
        ({"type": "prompt", "prompt": "star", "frame": 10**9}, "from 0 to 1000000"),
        ({"type": "start", "settings": {"prompt": "star", "sed": 1}}, "did you mean 'seed'"),
        ({"type": "start", "settings": {"prompt": "star"}, "begin": True}, "no picture or clip"),
        ({"type": "choose", "model": "other"}, "shows one model only"),
        ([], "an object with a type"),
    ],
)
def test_mistakes_are_told_in_one_sentence(hub, message, words):
    hub.choose_models = False
    page = open_tab(hub)
    page.session.start(TabSettings(prompt="red ball"))
    with pytest.raises(StreamvidError, match=words):
        handle(hub, page.session, message)
    assert len(page.session.lanes) == 1
