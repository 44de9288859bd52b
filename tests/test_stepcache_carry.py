"""What one chunk tells the next: which places and blocks a carried map skips, when it is measured anew."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from stepcache_harness import Stream, sampler_of

from streamvid.errors import StreamvidError
from streamvid.noise import CounterNoise
from streamvid.stepcache import build_step_cache
from streamvid.stepcache.block_map import cheapest
from streamvid.stepcache.carry import carried_plan
from streamvid.stepcache.motion import spread
from streamvid.stepcache.types import ChunkInfo

SHAPE = (1, 3, 4, 4, 12)
"""Two rows and six columns of places."""


class Scripted:
    """A model whose x0 is ``answer(chunk, step)`` ``[1, 3, 4, 4, 12]``; logs (chunk, step, tokens or None)."""

    def __init__(self, answer):
        self.answer, self.sampler, self.log, self.chunk = answer, sampler_of("fresh"), [], 0

    def __call__(self, x_t, timestep, *, branch="cond", hooks=None, tokens=None):
        step = self.sampler.timesteps.index(timestep)
        self.log.append((self.chunk, step, None if tokens is None else tokens.tolist()))
        x0 = self.answer(self.chunk, step).double()
        return ((x_t.double() - x0) / self.sampler.sigmas[step]).to(x_t.dtype)

    def run(self, session, chunks):
        """Chunks go on where an earlier run ended."""
        outs = []
        for _ in range(chunks):
            info = ChunkInfo(index=self.chunk, start_latent=3 * self.chunk, num_latents=3)
            outs.append(self.sampler.sample_chunk(self, info, CounterNoise([3]), SHAPE, step_cache=session))
            self.chunk += 1
        return outs

    def ran(self, chunk):
        """By step that was run: None for all tokens, or columns of the places of frame 0, row 0."""
        return {
            s: None if tokens is None else [t for t in tokens if t < 6]
            for c, s, tokens in self.log
            if c == chunk
        }


def opened(text):
    return build_step_cache(text).open(sampler_of("fresh").plan())


def still(column=None):
    """Grey of one level; from step 1 on, the latents of one column of places get another value at every step."""

    def answer(chunk, step):
        x0 = torch.ones(SHAPE)
        if column is not None:
            x0[..., 2 * column : 2 * column + 2] += 0.5 * step
        return x0

    return answer


def test_only_places_that_changed_in_the_measured_chunk_are_run():
    model = Scripted(still(column=2))
    outs = model.run(opened("carry:threshold=0.1,dilate=0"), 3)
    assert model.ran(0) == {0: None, 1: None, 2: None, 3: None}
    for chunk in (1, 2):
        assert model.ran(chunk) == {0: None, 1: [2], 2: [2], 3: None}
    assert torch.allclose(outs[2], model.answer(2, 3), atol=1e-6)
    wide = Scripted(still(column=2))
    wide.run(opened("carry:threshold=0.1,dilate=1"), 2)
    assert wide.ran(1) == {0: None, 1: [1, 2, 3], 2: [1, 2, 3], 3: None}


def test_a_chunk_without_change_skips_all_that_may_be_skipped():
    model = Scripted(still())
    model.run(opened("carry:threshold=0.1"), 2)
    assert model.ran(1) == {0: None, 3: None}
    model = Scripted(still())
    model.run(opened("carry:threshold=0.1,tail=0,warmup=2"), 2)
    assert model.ran(1) == {0: None, 1: None}


def test_by_chunk_the_mean_decides():
    model = Scripted(still(column=2))  # one of six columns changes by 0.5 a step: the mean is about 0.08
    model.run(opened("carry:threshold=0.12,scope=chunk"), 2)
    assert model.ran(1) == {0: None, 1: None, 2: None, 3: None}  # dilated: three of six columns
    model = Scripted(still(column=2))
    model.run(opened("carry:threshold=0.12,scope=chunk,dilate=0"), 2)
    assert model.ran(1) == {0: None, 2: None, 3: None}  # summed over two steps it is above


def test_every_so_many_chunks_and_after_a_changed_context_a_chunk_is_measured():
    session, model = opened("carry:threshold=0.1,refresh=3"), Scripted(still())
    model.run(session, 7)
    assert [len(model.ran(chunk)) for chunk in range(7)] == [4, 2, 2, 4, 2, 2, 4]
    for kind in ("prompt", "cut", "reset"):
        session.on_context_change(kind)
        at = model.chunk
        model.run(session, 2)
        assert [len(model.ran(chunk)) for chunk in (at, at + 1)] == [4, 2]


def moving(chunk, step):
    """A bright column that stands at column 1 in chunk 0, in which it changes with each step, and moves from 4 to 5
    in chunk 1; what moves is no longer what was measured as changing."""
    x0 = torch.ones(SHAPE)
    columns = (1, 0, 1) if chunk == 0 else (4, 5, 4)
    for frame, column in enumerate(columns):
        x0[:, frame, ..., 2 * column : 2 * column + 2] += 1 + step
    return x0


def test_places_that_move_now_are_run_though_they_were_still_when_measured():
    model = Scripted(moving)
    model.run(opened("carry:threshold=0.2,dilate=0"), 3)
    assert model.ran(1) == {0: None, 1: [0, 1], 2: [0, 1], 3: None}
    # The map of chunk 0 holds; chunk 1 adds where it moved (and where it came from, by the last frame before).
    assert model.ran(2) == {0: None, 1: [0, 1, 4, 5], 2: [0, 1, 4, 5], 3: None}


def test_it_works_beside_another_cache_that_skips_what_it_would_measure():
    model = Scripted(still())
    model.run(opened("mask:skip=1 + carry:threshold=0.1"), 3)
    assert model.ran(0) == {0: None, 1: None, 2: None, 3: None}
    assert model.ran(1) == model.ran(2) == {0: None, 3: None}
    late = Scripted(still())
    session = opened("mask:skip=1 + carry:threshold=0.1,refresh=2")
    late.run(session, 4)
    assert [len(late.ran(chunk)) for chunk in range(4)] == [4, 2, 3, 2]  # chunk 2 is measured without step 1


def test_other_grids_fall_back_to_full():
    session, model = opened("carry:threshold=0.1"), Scripted(still())
    model.run(session, 1)
    info = ChunkInfo(index=1, start_latent=3, num_latents=3)
    session.on_chunk_start(info)
    step = model.sampler._info(info, 0, "cond", (2, 2))
    other = torch.ones(1, 3, 4, 4, 4)
    session.before_step(step, other)
    session._last_step["cond"] = 0
    session._history["cond"] = [None]
    decision = session.before_step(dataclasses.replace(step, step=1), other)
    assert (decision.mode, decision.reason) == ("full", "shape")


def test_a_distance_that_is_no_number_is_run_and_nothing_is_skipped_at_zero():
    distance = torch.tensor([0.0, float("nan"), 0.0, 0.3])[:, None, None].expand(4, 1, 2)
    assert carried_plan(distance, 0.1, range(1, 4))[:, 0, 0].tolist() == [True, True, False, True]
    assert carried_plan(torch.zeros(4, 1, 1), 0.0, range(1, 4)).all()


def test_spread_is_the_highest_value_near():
    score = torch.zeros(3, 4)
    score[0, 0] = 1.0
    assert spread(score, 0) is score
    assert spread(score, 1).tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert torch.equal(spread(score.expand(2, 3, 4), 1)[1], spread(score, 1))


# --- blocks ---


def test_blocks_that_turn_least_are_left_out_while_their_sum_stays_below():
    turn = {0: 0.5, 1: 0.04, 2: 0.2, 3: 0.05}
    assert cheapest(turn, 0.0) == [] and cheapest(dict.fromkeys(turn, 0.0), 0.0) == []
    assert cheapest(turn, 0.04) == [] and cheapest(turn, 0.05) == [1]
    assert cheapest(turn, 0.1) == [1, 3] and cheapest(turn, 10) == [0, 1, 2, 3]
    assert cheapest({0: float("nan"), 1: 0.01, 2: -0.001}, 1.0) == [1, 2]


def test_a_block_map_is_measured_carried_and_measured_anew():
    stream = Stream("blockmap:threshold=0.5,steps=1,refresh=3", "fresh")
    modes = []

    def note(step):
        modes.append(step["decision"].mode)

    for _ in range(5):
        stream.chunk(note)
    assert [modes[i : i + 4] for i in range(0, 20, 4)] == [
        ["full"] * 4,
        ["full", "blocks", "full", "full"],
        ["full", "blocks", "full", "full"],
        ["full"] * 4,
        ["full", "blocks", "full", "full"],
    ]
    assert set(stream.session.skip) == {1}


def test_a_passed_block_adds_nothing_and_the_input_is_this_steps_own():
    """With all blocks passed by, a step is embedding and head on its own x_t: no earlier noise is in it."""
    stream = Stream("blockmap:threshold=1000,steps=2", "fresh")
    seen = {}

    def note(step):
        if step["info"].step == 2:
            seen.update(step)

    stream.chunk()
    stream.chunk(note)
    assert seen["decision"].mode == "blocks"
    model, x_t, t = stream.model, seen["x_t"], seen["info"].timestep
    h = model.tokens_of(x_t) @ model.embed + torch.sin(torch.tensor(t / 300.0))
    assert torch.allclose(seen["flow"], model.latents_of(h @ model.head, x_t.shape), atol=1e-6)


@pytest.mark.parametrize(
    "text, message",
    [
        ("carry:threshold=-1", "threshold, tail and dilate must be at least 0"),
        ("carry:refresh=0", "refresh and warmup at least 1"),
        ("carry:scope=token", "places"),
        ("blockmap:refresh=0", "refresh at least 1"),
        ("blockmap:threshold=-0.1", "threshold must be at least 0"),
    ],
)
def test_settings_that_are_none_are_named(text, message):
    with pytest.raises(StreamvidError, match=message):
        build_step_cache(text)


def test_steps_of_a_block_map_must_exist():
    with pytest.raises(StreamvidError, match=r"must lie in 1\.\.3"):
        opened("blockmap:steps=4")
