"""Drafting: who makes a chunk, what both models remember, and what a router sees."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import tiny_random
import torch

import streamvid
from streamvid.cli import main
from streamvid.drafting import DraftedPipeline
from streamvid.errors import StreamvidError
from streamvid.routers import QualityGate, features

OPTIONS = {"height": 32, "width": 32, "output_type": "pt"}


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory):
    """Another transformer with the same latent space."""
    folder = tmp_path_factory.mktemp("models") / "other"
    tiny_random.save_folder(folder, transformer=tiny_random.random_transformer(7))
    return folder


@pytest.fixture(scope="module")
def pipes(tiny_random_folder, other_folder):
    return streamvid.load(str(tiny_random_folder)), streamvid.load(str(other_folder))


def frames_of(stream, chunks=4):
    return torch.cat([torch.as_tensor(c.frames) for c in itertools.islice(stream.chunks(), chunks)])


def plain(pipe, **changes):
    with pipe.stream("a red ball", **OPTIONS) as stream:
        if changes:
            stream.set_prompt("a blue star", **changes)
        return frames_of(stream)


@pytest.mark.parametrize("router", ["never", "quality:threshold=100"])
def test_rejecting_every_draft_gives_the_targets_own_video(pipes, router):
    with DraftedPipeline(*pipes, router).stream("a red ball", **OPTIONS) as stream:
        assert torch.equal(frames_of(stream), plain(pipes[0]))
        assert stream.stats()["drafting"]["rejected"] == 3 and stream.stats()["drafting"]["first"] == 1


def test_a_drafter_that_is_the_target_gives_its_video_whoever_is_asked(pipes):
    target = pipes[0]
    with DraftedPipeline(target, target, "always").stream("a red ball", **OPTIONS) as stream:
        stream.set_prompt("a blue star", at_chunk=2)
        assert torch.equal(frames_of(stream), plain(target, at_chunk=2))
        assert stream.stats()["drafting"]["acceptance"] == 1.0
    assert len(target.sessions) == 0


def test_both_models_commit_the_chunk_that_is_shown(pipes):
    with DraftedPipeline(*pipes, "always").stream("a red ball", **OPTIONS) as stream:
        frames_of(stream, 3)
        for part in (stream._target, stream._drafter):
            engine, state = part._engine, part._state
            engine.finish(state)
            side = state.sides["cond"]

            def kept(cache=side.cache):
                return [t[:, :36].clone() for bank in cache.all_banks() for t in (bank.k, bank.v)]

            held, latents = kept(), torch.cat(state.recent, 1)
            side.cache.reset()
            for start in (0, 3, 6):
                engine.encode_past(side, latents[:, start : start + 3])
            assert all(torch.equal(a, b) for a, b in zip(held, kept(), strict=True))
        target, drafter = (torch.cat(p._state.recent, 1) for p in (stream._target, stream._drafter))
        assert torch.equal(target, drafter)


def test_drafts_are_the_drafters_and_the_first_chunk_is_the_targets(pipes):
    with DraftedPipeline(*pipes, "always").stream("a red ball", **OPTIONS) as stream:
        out = frames_of(stream)
    mine = plain(pipes[0])
    assert torch.equal(out[:9], mine[:9]) and not torch.equal(out[9:], mine[9:])


def test_reset_and_cut_reach_both(pipes):
    with DraftedPipeline(*pipes, "always").stream("a red ball", **OPTIONS) as stream:
        first = frames_of(stream, 2)
        stream.reset()
        assert torch.equal(frames_of(stream, 2), first)
        stream.cut("a blue star")
        frames_of(stream, 1)
        assert stream.stats()["drafting"]["first"] == 3


def test_the_quality_gate_accepts_more_of_the_same_and_rejects_a_change():
    gate, noise = QualityGate(), torch.Generator().manual_seed(0)
    chunk = (
        torch.rand(4, 3, 16, 16, generator=noise) * 0.02 + torch.rand(3, 16, 16, generator=noise) * 0.6 + 0.2
    )
    assert gate.score(chunk, "") == float("-inf")
    gate.accepted(chunk)
    assert gate.score(chunk.flip(0), "") > gate.threshold
    for changed in (chunk + 0.2, chunk.mean((2, 3), keepdim=True).expand_as(chunk), chunk.flip(3)):
        assert gate.score(changed.clamp(0, 1), "") < gate.threshold


def test_features_are_what_they_say():
    flat = torch.full((1, 3, 8, 8), 0.5)
    edges = flat.clone()
    edges[..., ::2] = 1.0
    assert features(edges)[0, 0] > features(flat)[0, 0] and features(edges)[0, 3] == 0.5
    assert features(flat)[0, 1] == pytest.approx(0.5) and features(flat)[0, 2] == pytest.approx(0, abs=1e-6)


def test_what_cannot_be_drafted_is_refused(pipes):
    target, drafter = pipes
    drafted = DraftedPipeline(target, drafter)
    for options in ({"output_type": "latent"}, {"ahead": 1}, {"fuse_context": True}):
        with pytest.raises(StreamvidError, match="drafted stream"):
            drafted.stream("a red ball", **options)
    with drafted.stream("a red ball", **OPTIONS) as stream, pytest.raises(StreamvidError, match="saved"):
        stream.snapshot("x")
    with pytest.raises(StreamvidError, match="did you mean 'quality'"):
        DraftedPipeline(target, drafter, "qualty")
    other = streamvid.StreamPipeline(target.components)
    other.config = dataclasses.replace(target.config, chunk_latents=2)
    with pytest.raises(StreamvidError, match="latent frames a chunk: 2 and 3"):
        DraftedPipeline(target, other)


def test_imagereward_without_its_package_says_how_to_get_it(pipes, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ImageReward", None)
    with pytest.raises(StreamvidError, match="pip install image-reward"):
        DraftedPipeline(*pipes, "imagereward")


def test_the_command_writes_a_file(tiny_random_folder, other_folder, tmp_path, capsys):
    path = tmp_path / "a.mp4"
    words = [
        "draft",
        "a red ball",
        "--drafter",
        str(other_folder),
        "-m",
        str(tiny_random_folder),
        "-o",
        str(path),
    ]
    assert main([*words, "-n", "21", "--router", "always", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["frames"] == 21 and said["stats"]["drafting"]["accepted"] == 1 and path.stat().st_size > 0
