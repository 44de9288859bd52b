"""Starting from an image, and going on from a clip."""

from __future__ import annotations

import dataclasses
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import tiny_random
import torch

import streamvid
from streamvid.errors import StreamvidError
from streamvid.vae import make_decoder, make_encoder
from streamvid.video_io import VideoWriter, to_uint8

A = "a red ball"


def pictures(count: int, seed: int = 0) -> list[np.ndarray]:
    """Smooth random pictures of 32x32 that move."""
    rng = np.random.default_rng(seed)
    base = np.kron(rng.integers(0, 255, (4, 4, 3)), np.ones((8, 8, 1))).astype(np.uint8)
    return [np.roll(base, shift, axis=1) for shift in range(count)]


def small(pipe):
    pipe.config = dataclasses.replace(pipe.config, height=32, width=32)
    return pipe


@pytest.fixture(scope="module")
def image_pipe(tmp_path_factory):
    """A model whose first chunk is one frame: image-to-video of the Self-Forcing kind, chunks of 3."""
    folder = tmp_path_factory.mktemp("models") / "i2v"
    return small(streamvid.load(tiny_random.save_folder(folder, config={"independent_first_frame": True})))


@pytest.fixture(scope="module")
def text_pipe(tiny_random_folder):
    return small(streamvid.load(tiny_random_folder))


def round_trip(pipe, picture: np.ndarray) -> np.ndarray:
    """The picture as the autoencoder gives it back."""
    video = torch.from_numpy(picture).permute(2, 0, 1)[None, None].float() / 255
    return to_uint8(make_decoder(pipe.vae).decode_chunk(make_encoder(pipe.vae).encode(video))[0, 0])


@pytest.mark.parametrize("count", [1, 7, 14])
def test_the_image_is_the_first_frame_and_is_used(image_pipe, count: int) -> None:
    x, y = pictures(1)[0], pictures(1, seed=1)[0]
    clips = [list(image_pipe.stream(A, num_frames=count, image=picture)) for picture in (x, y)]
    assert [len(clip) for clip in clips] == [count, count]
    for clip, picture in zip(clips, (x, y), strict=True):
        assert np.array_equal(clip[0], round_trip(image_pipe, picture))
    assert all(not np.array_equal(a, b) for a, b in zip(*clips, strict=True))


def test_chunks_of_one_frame_start_from_an_image_too(tmp_path: Path) -> None:
    config = {"independent_first_frame": True, "chunk_latents": 1}
    pipe = small(streamvid.load(tiny_random.save_folder(tmp_path / "m", config=config)))
    frames = list(pipe.stream(A, num_frames=6, image=pictures(1)[0]))
    assert len(frames) == 6 and np.array_equal(frames[0], round_trip(pipe, pictures(1)[0]))


def test_a_path_a_picture_and_an_array_are_one_image(image_pipe, tmp_path: Path) -> None:
    from PIL import Image

    array = pictures(1)[0]
    picture = Image.fromarray(array)
    picture.save(tmp_path / "x.png")
    firsts = [
        list(image_pipe.stream(A, num_frames=3, image=image))
        for image in (
            array,
            picture,
            tmp_path / "x.png",
            str(tmp_path / "x.png"),
            torch.from_numpy(array).permute(2, 0, 1),
        )
    ]
    assert all(np.array_equal(first[2], firsts[0][2]) for first in firsts[1:])


def test_an_image_that_is_not_taken_or_not_readable_is_an_error(
    text_pipe, image_pipe, tmp_path: Path
) -> None:
    with pytest.raises(StreamvidError, match="this model takes no image"):
        text_pipe.stream(A, image=pictures(1)[0])
    with pytest.raises(StreamvidError, match="40x32 pixels .* stream 32x32; resize or crop it first"):
        image_pipe.stream(A, image=np.zeros((40, 32, 3), np.uint8))
    with pytest.raises(StreamvidError, match="no such picture"):
        image_pipe.stream(A, image=tmp_path / "none.png")
    with pytest.raises(StreamvidError, match="is a folder"):
        image_pipe.stream(A, image=tmp_path)
    with pytest.raises(StreamvidError, match="not both"):
        image_pipe.stream(A, image="a", video="b")
    assert len(text_pipe.sessions) == len(image_pipe.sessions) == 0


def test_going_on_from_latents_of_a_stream_equals_the_stream(text_pipe) -> None:
    """The clean hand-over: had the clip's latents been those of a stream, the next chunk would be its next chunk."""
    plain = text_pipe.stream(A, output_type="latent")
    whole = [chunk.frames.clone() for chunk in islice(plain.chunks(), 4)]
    stream = text_pipe.stream(A, output_type="latent", video=pictures(21))
    stream._start.chunks = [part[None] for part in whole[:2]]
    later = list(islice(stream.chunks(), 2))
    assert [chunk.start_frame for chunk in later] == [0, 3]
    assert all(torch.equal(a.frames, b) for a, b in zip(later, whole[2:], strict=True))


def test_a_clip_is_gone_on_from_and_not_given_out_again(text_pipe, tmp_path: Path) -> None:
    with VideoWriter(tmp_path / "clip.mp4") as writer:
        for picture in pictures(23):
            writer.add(picture)
    for video in (tmp_path / "clip.mp4", pictures(23)):
        with text_pipe.stream(A, num_frames=5, video=video) as stream:
            blocks = list(stream.chunks())
            assert [(block.index, block.start_frame, len(block)) for block in blocks] == [(2, 0, 5)]
    other = list(text_pipe.stream(A, num_frames=5, video=pictures(23, seed=1)))
    assert not np.array_equal(other[0], blocks[0].frames[0]), "the clip is used"
    with pytest.raises(StreamvidError, match="has 8 frames and at least 9 are needed"):
        text_pipe.stream(A, video=pictures(8))


def test_reset_and_snapshot_keep_the_start(text_pipe, tmp_path: Path) -> None:
    def begin():
        return text_pipe.stream(A, output_type="latent", video=pictures(21))

    whole = list(islice(begin(), 6))
    stream = begin()
    stream.snapshot(tmp_path / "at_start")
    list(islice(stream, 4))
    stream.reset()
    assert all(torch.equal(a, b) for a, b in zip(whole, islice(stream, 6), strict=True))
    restored = list(islice(text_pipe.restore(tmp_path / "at_start"), 6))
    assert all(torch.equal(a, b) for a, b in zip(whole, restored, strict=True))


@pytest.fixture(scope="module")
def condition_pipe(tmp_path_factory):
    """Wan's image-to-video kind: mask and picture latents as further input channels, chunks of 3."""
    folder = tmp_path_factory.mktemp("models") / "wan_i2v"
    transformer = tiny_random.random_transformer(in_channels=4 + 4 + 4, out_channels=4)
    return small(streamvid.load(tiny_random.save_folder(folder, transformer=transformer)))


def test_an_image_condition_is_read_by_every_chunk(condition_pipe) -> None:
    def run(seed: int, **options):
        stream = condition_pipe.stream(A, output_type="latent", image=pictures(1, seed)[0], **options)
        return stream, [chunk.frames.clone() for chunk in islice(stream.chunks(), 4)]

    (stream, plain), (_, other), (_, fused) = run(0), run(1), run(0, fuse_context=True)
    assert all(not torch.equal(a, b) for a, b in zip(plain, other, strict=True))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(plain, fused, strict=True))
    table = stream._start.condition
    assert table[:, 0, :4].eq(1).all() and table[:, 1:, :4].eq(0).all()
    assert torch.equal(table[:, -1], table[:, -2]), "grey has settled"
    encoder = make_encoder(condition_pipe.vae)
    picture = torch.from_numpy(pictures(1)[0]).permute(2, 0, 1)[None, None].float() / 255
    video = torch.cat([picture, torch.full((1, 16, 3, 32, 32), 0.5)], dim=1)
    assert torch.equal(table[:, :5, 4:], encoder.encode(video)[:, :5]), "picture, then grey"
    with pytest.raises(StreamvidError, match="needs a picture; pass image="):
        condition_pipe.stream(A)


def test_an_image_condition_survives_recache_and_snapshot(condition_pipe, tmp_path: Path) -> None:
    stream = condition_pipe.stream(A, output_type="latent", image=pictures(1)[0])
    next(stream)
    stream.set_prompt("a blue star", "recache")
    list(islice(stream, 4))
    stream.snapshot(tmp_path / "a")
    rest = list(islice(stream, 6))
    again = list(islice(condition_pipe.restore(tmp_path / "a"), 6))
    assert all(torch.equal(a, b) for a, b in zip(rest, again, strict=True))
