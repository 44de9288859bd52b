"""The Python surface in clumsy hands: a mistake is one sentence, and the stream goes on as if it had not been made."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

import streamvid
from streamvid.errors import StreamvidError
from streamvid.prompts import PromptQueue, Transition
from streamvid.timeline import ChunkRule, Place

SIZE = {"height": 32, "width": 32}


@pytest.fixture(scope="module")
def pipe(tiny_random_folder):
    return streamvid.load(tiny_random_folder)


OPTIONS: list[tuple[str, Any]] = [
    ("num_frames", 0),
    ("num_frames", -1),
    ("num_frames", 2.5),
    ("num_frames", True),
    ("num_frames", "3"),
    ("seed", None),
    ("seed", 1.0),
    ("seed", 2**64),
    ("height", 33),
    ("height", "32"),
    ("height", 32.0),
    ("memory", 3),
    ("memory", dict),
    ("codec", object()),
    ("sparse", ["topk"]),
    ("cross", ["annca"]),
    ("cross", "annca:density=2"),
    ("step_cache", None),
    ("guidance_scale", float("nan")),
    ("guidance_scale", "2"),
    ("num_inference_steps", 2.0),
    ("ahead", 1.0),
    ("ahead", True),
    ("output_type", None),
    ("output_type", ["np"]),
    ("fuse_context", 1),
    ("negative_prompt", 3),
    ("image", object()),
    ("video", 3),
    ("video", []),
    ("heigth", 32),
]


@pytest.mark.parametrize(("name", "value"), OPTIONS)
def test_an_option_that_is_none_is_one_sentence_that_names_it(pipe, name: str, value: Any) -> None:
    with pytest.raises(ValueError) as error:
        pipe.stream("a", **(SIZE | {name: value}))
    words = {"memory": "memory policy", "step_cache": "step cache", "sparse": "selection rule"}
    words["cross"] = "density" if "density" in str(value) else "prompt token rule"
    assert words.get(name, name) in str(error.value) and "\n" not in str(error.value)
    assert len(pipe.sessions) == 0


def test_numbers_of_numpy_and_torch_are_numbers(pipe) -> None:
    options = {"height": np.int64(32), "width": torch.tensor(32), "guidance_scale": np.float32(1)}
    with pipe.stream("a", num_frames=np.int32(5), seed=np.uint64(2**63), **options) as stream:
        assert (stream.seed, stream.settings["height"], type(stream.seed)) == (2**63, 32, int)
        assert len(list(stream)) == 5


LOADING: list[tuple[dict[str, Any], str]] = [
    ({"path_or_name": 3}, "path_or_name must be a path"),
    ({"path_or_name": ""}, "name is empty"),
    ({"vae": 3}, "vae must be a path"),
    ({"device": 3.5}, "unknown device"),
    ({"device": "meta"}, "not supported"),
    ({"dtype": torch.int8}, "not supported"),
    ({"attention": None}, "unknown attention backend"),
    ({"max_streams": "x"}, "max_streams must be"),
    ({"max_streams": 0}, "max_streams must be"),
]


@pytest.mark.parametrize(("options", "said"), LOADING)
def test_loading_with_what_is_none(tiny_random_folder, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        streamvid.load(**({"path_or_name": tiny_random_folder} | options))


CLIPS: list[tuple[Any, dict[str, Any], str]] = [
    (None, {}, "prompt must be a text"),
    ([], {}, "no prompt"),
    (["a", 3], {}, "prompt must be a text"),
    ("a", {"num_frames": None}, "whole clip"),
    ("a", {"seed": None}, "seed must be"),
    ("a", {"seed": [1, 2]}, "one seed"),
    ("a", {"generator": 3}, "torch.Generator"),
    ("a", {"generator": []}, "one generator"),
    ("a", {"callback_on_step_end": 3}, "must be a function"),
    ("a", {"num_videos_per_prompt": 2}, "unknown stream option"),
]


@pytest.mark.parametrize(("prompt", "options", "said"), CLIPS)
def test_a_clip_that_cannot_be_made(pipe, prompt: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(StreamvidError, match=said):
        pipe(prompt, **({"num_frames": 5} | SIZE | options))
    assert len(pipe.sessions) == 0


@pytest.mark.parametrize("text", ["", " ", "x" * 100_000, "\x00\x07\x1b[31m", "\N{BALLOON}" * 2000, "\ud800"])
def test_any_text_is_a_prompt(pipe, text: str) -> None:
    with pipe.stream(text, num_frames=2, **SIZE) as stream:
        assert len(list(stream)) == 2


@pytest.mark.parametrize(
    "place",
    [
        {"at_frame": -1},
        {"at_frame": 1.5},
        {"at_chunk": True},
        {"at_chunk": "3"},
        {"at_frame": 3, "at_chunk": 1},
    ],
)
def test_a_place_that_is_none(pipe, place: dict[str, Any]) -> None:
    with pipe.stream("a", **SIZE) as stream:
        with pytest.raises(StreamvidError, match="at_frame|at_chunk"):
            stream.set_prompt("b", **place)
        assert stream.stats()["waiting"] == []


def test_far_places_cost_nothing_and_are_exact() -> None:
    """The place of a change far away is computed, not counted to; compared with counting."""
    for trial in range(300):
        draw = random.Random(trial)
        rule = ChunkRule(draw.choice([1, 2, 3]), draw.choice([1, 3]), draw.choice([1, 4]))
        queue = PromptQueue(rule, Place(), cut_restarts=draw.random() < 0.7)
        cuts = {draw.randrange(12) for _ in range(draw.randrange(4))}
        for chunk in cuts:
            queue.put("cut", None, at_chunk=chunk)
        place, places = Place(), []
        while place.frame < 200:
            places.append(place)
            if place.chunk in cuts and queue._cut_restarts:
                place = Place(place.chunk, place.latent, place.frame, restart=True)
            place = rule.after(rule.plan(place))
        frame = draw.randrange(150)
        receipt = queue.put("x", Transition("cross"), at_frame=frame)
        wanted = next(place for place in places if place.frame >= frame)
        assert (receipt.chunk, receipt.frame) == (wanted.chunk, wanted.frame)
    assert queue.put("x", None, at_frame=10**15).frame >= 10**15


def test_a_change_that_never_came_says_so(pipe) -> None:
    with pipe.stream("a", num_frames=5, **SIZE) as stream:
        receipt = stream.set_prompt("b", at_frame=500)
        assert receipt.status == "waiting"
        list(stream)
    assert receipt.status == "dropped"


def test_a_closed_stream_does_nothing_but_say_so(pipe, tmp_path) -> None:
    stream = pipe.stream("a", num_frames=5, **SIZE)
    next(stream)
    stream.close()
    for call in (
        lambda: stream.cut("b"),
        lambda: stream.prefetch(1),
        lambda: stream.__enter__(),
        lambda: stream.snapshot(tmp_path / "x"),
        lambda: stream.prompt,
    ):
        with pytest.raises(StreamvidError, match="the stream is closed; open another"):
            call()
    assert next(stream, None) is None and list(stream.chunks()) == []
    assert not list(tmp_path.iterdir())


def test_reading_twice_goes_on_where_the_first_stopped(pipe) -> None:
    with pipe.stream("a", num_frames=7, **SIZE) as stream:
        first = [frame for frame, _ in zip(stream, range(3), strict=False)]
        assert len(first) + len(list(stream)) in (6, 7)  # zip takes one frame that it does not give
        assert list(stream) == []


@pytest.mark.parametrize("name", ["close", "reset", "snapshot", "read on"])
def test_a_step_callback_cannot_change_the_chunk_under_it(pipe, name: str, tmp_path) -> None:
    whole = list(pipe.stream("a", num_frames=20, **SIZE))
    with pipe.stream("a", num_frames=20, **SIZE) as stream:
        calls = {
            "close": stream.close,
            "reset": stream.reset,
            "snapshot": lambda: stream.snapshot(tmp_path / "x"),
            "read on": lambda: next(stream),
        }
        stream.on_step = lambda event: calls[name]()
        with pytest.raises(StreamvidError, match=f"a step callback cannot {name}"):
            next(stream)
        stream.on_step = None
        assert all(map(np.array_equal, whole, list(stream))), (
            "the chunk was made again as if nothing had been"
        )
    assert not list(tmp_path.iterdir())


def test_an_error_in_a_callback_reaches_the_reader_and_costs_one_chunk(pipe) -> None:
    whole = list(pipe.stream("a", num_frames=30, **SIZE))
    for ahead in (0, 1):
        frames: list[Any] = []
        with pipe.stream("a", num_frames=30, ahead=ahead, **SIZE) as stream:
            count = 0

            def third(event: dict[str, Any]) -> None:
                nonlocal count
                count += 1
                if count == 3:
                    raise KeyError("mine")

            stream.on_step = third
            with pytest.raises(KeyError, match="mine"):
                frames.extend(stream)  # what was read before the error is kept by the list
            frames.extend(stream)
        assert len(frames) == 30 and all(map(np.array_equal, frames, whole))


def test_a_frame_goes_to_one_of_many_readers(pipe) -> None:
    got: list[bytes] = []

    def read() -> None:
        got.extend(frame.tobytes() for frame in stream)

    with pipe.stream("a", num_frames=150, **SIZE) as stream:
        readers = [threading.Thread(target=read) for _ in range(4)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(120)
    assert sorted(got) == sorted(frame.tobytes() for frame in pipe.stream("a", num_frames=150, **SIZE))


def test_controls_from_another_thread_while_frames_are_read(pipe, tmp_path) -> None:
    errors: list[BaseException] = []
    stream = pipe.stream("a", ahead=2, **SIZE)

    def read() -> None:
        try:
            for _ in stream:
                pass
        except BaseException as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    draw = random.Random(0)
    for _ in range(60):
        draw.choice(
            [
                lambda: stream.set_prompt("b", transition="recache"),
                lambda: stream.cut("c"),
                stream.reset,
                stream.stats,
                lambda: (stream.pause(), stream.resume()),
                lambda: stream.snapshot(tmp_path / "s"),
                lambda: stream.prefetch(draw.randrange(3)),
            ]
        )()
    stream.close()
    reader.join(60)
    assert not reader.is_alive() and not errors
