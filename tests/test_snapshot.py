"""A stream saved and resumed goes on bit for bit; a damaged file is refused."""

from __future__ import annotations

import dataclasses
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import tiny_random
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import streamvid
from streamvid.errors import StreamvidError
from streamvid.snapshot import load_tree, save_tree

A, B = "a red ball", "a blue star"


@pytest.fixture(scope="module")
def pipe(tiny_random_folder):
    pipe = streamvid.load(tiny_random_folder)
    pipe.config = dataclasses.replace(pipe.config, height=32, width=32)
    return pipe


def frames_of(stream, count: int) -> list[np.ndarray]:
    return list(islice(stream, count))


SETTINGS = {
    "frames": {},
    "pil": {"output_type": "pil"},
    "window": {"memory": "window:size=7,sink=1,positions=slot", "output_type": "latent"},
    "full": {"memory": "full", "output_type": "latent"},
    "codec": {"memory": "window:size=9,sink=3", "codec": "int8", "output_type": "latent"},
    "guided": {"guidance_scale": 3.0, "negative_prompt": "green", "output_type": "latent"},
    "steps": {"num_inference_steps": 4, "output_type": "latent"},
}


@pytest.mark.parametrize("name", list(SETTINGS))
@pytest.mark.parametrize("read", [0, 13])
def test_resumed_equals_uninterrupted(pipe, name: str, read: int, tmp_path: Path) -> None:
    """``read`` frames are taken before the snapshot: none, or 13, which ends in the middle of a chunk."""
    with pipe.stream(A, seed=3, **SETTINGS[name]) as stream:
        frames_of(stream, read)
        whole = frames_of(stream, 10)
    with pipe.stream(A, seed=3, **SETTINGS[name]) as stream:
        frames_of(stream, read)
        stream.snapshot(tmp_path / "a.safetensors")
        going_on = frames_of(stream, 10)
    with pipe.restore(tmp_path / "a.safetensors") as stream:
        assert stream.seed == 3 and stream.prompt == A
        resumed = frames_of(stream, 10)
    assert all(np.array_equal(a, b) for a, b in zip(whole, going_on, strict=True)), (
        "saving disturbed the stream"
    )
    assert all(np.array_equal(a, b) for a, b in zip(whole, resumed, strict=True))


@pytest.mark.parametrize("how", ["blend:3", "recache"])
def test_prompt_changes_and_waiting_ones_are_kept(pipe, how: str, tmp_path: Path) -> None:
    def begin():
        stream = pipe.stream(A, output_type="latent", num_frames=60)
        frames_of(stream, 3)
        stream.set_prompt(B, how)
        stream.set_prompt("a green ring", at_chunk=4)
        frames_of(stream, 4)  # one frame into the chunk after the change
        return stream

    whole = list(begin())
    begin().snapshot(tmp_path / "a")
    stream = pipe.restore(tmp_path / "a", ahead=1)
    assert [item["chunk"] for item in stream.stats()["waiting"]] == [4]
    resumed = list(stream)
    assert len(whole) == len(resumed) == 9
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_a_snapshot_of_another_model_or_a_damaged_one_is_refused(pipe, tmp_path: Path) -> None:
    path = tmp_path / "a"
    with pipe.stream(A, output_type="latent") as stream:
        next(stream)
        size = stream.snapshot(path)
    assert path.stat().st_size == size and [found.name for found in tmp_path.iterdir()] == ["a"]
    good = path.read_bytes()

    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(StreamvidError, match="damaged"):
        pipe.restore(path)
    broken = bytearray(good)
    broken[-5] ^= 1
    path.write_bytes(bytes(broken))
    with pytest.raises(StreamvidError, match="checksum"):
        pipe.restore(path)
    path.write_bytes(b"hello")
    with pytest.raises(StreamvidError, match="damaged, or not a snapshot"):
        pipe.restore(path)
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(StreamvidError, match="not a snapshot"):
        pipe.restore(path)
    with pytest.raises(StreamvidError, match="no such"):
        pipe.restore(tmp_path / "missing")

    path.write_bytes(good)
    other = tiny_random.save_folder(tmp_path / "other", seed=1)
    with pytest.raises(StreamvidError, match="another model"):
        streamvid.load(other).restore(path)
    assert len(pipe.sessions) == 0


def test_a_snapshot_that_cannot_be_written_leaves_nothing(pipe, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pipe.stream(A, output_type="latent") as stream:
        next(stream)
        with pytest.raises(StreamvidError, match="cannot be written"):
            stream.snapshot(tmp_path / "file" / "a")
        next(stream)
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_an_object_for_an_option_is_told_to_be_given_as_text(pipe, tmp_path: Path) -> None:
    from streamvid.memory.policies import POLICIES

    stream = pipe.stream(A, output_type="latent", memory=POLICIES["window"](size=9))
    with pytest.raises(StreamvidError, match="memory object; give it in text form"):
        stream.snapshot(tmp_path / "a")


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
)
TENSORS = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]).map(
    lambda dtype: torch.arange(6).reshape(2, 3).to(dtype)
)
TREES = st.recursive(
    LEAVES | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@settings(max_examples=25, deadline=None)
@given(tree=TREES)
def test_any_tree_comes_back_as_it_was(tree, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("tree") / "a"
    save_tree(path, tree)
    assert same(load_tree(path), tree)


def test_two_views_of_one_storage_and_empty_tensors_can_be_saved(tmp_path: Path) -> None:
    base = torch.arange(8.0)
    tree = {
        "a": base[:4],
        "b": base[2:6],
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.0),
        "t": base.view(2, 4).T,
    }
    save_tree(tmp_path / "a", tree)
    assert same(load_tree(tmp_path / "a"), tree)
    with pytest.raises(TypeError, match="cannot hold"):
        save_tree(tmp_path / "b", {"x": object()})
