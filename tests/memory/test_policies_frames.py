"""What is each frame-granular policy's own."""

from __future__ import annotations

import math

import pytest
import torch
from policy_runs import cache_of, draw, geometry, noisy, run

from streamvid.memory.policies.memrope import MemRope
from streamvid.memory.policies.rolling_sink import ping_pong
from streamvid.memory.policies.tether import scores, tame


def test_infinity_rope_is_a_window_at_slot_positions():
    ours, window = cache_of("infinity_rope"), cache_of("window:size=6,sink=1,positions=slot")
    for a, b in zip(run(ours, range(9)), run(window, range(9)), strict=True):
        assert torch.equal(a, b)


def test_a_cut_moves_one_chunk_away_and_keeps_its_history():
    cache = cache_of("infinity_rope:cut_at=45")
    run(cache, range(5))
    assert cache.scene_cut()
    held = [entry.frames for entry in cache.banks[0][0].entries]
    assert cache.begin_chunk(3)
    assert cache.views[0, 0].plan.query_t == (45, 46, 47)
    cache.abort()
    assert held == [entry.frames for entry in cache.banks[0][0].entries]
    run(cache, range(5, 6))
    cache.begin_chunk(3)
    assert cache.views[0, 0].plan.query_t == (3, 4, 5)


def test_other_policies_forget_at_a_cut():
    cache = cache_of("window:size=6,sink=1")
    run(cache, range(3))
    assert not cache.scene_cut()
    assert not cache.banks[0][0].entries and cache.next_frame == 0


def published_rolling_sink(frame: int, period: int = 18) -> int:
    """The block rule as published: slices of three, reversed in every second half period."""
    block = frame // 3 * 3
    if block // period % 2 == 0:
        return block % period + frame % 3
    right = period - block % period
    return right - 1 - frame % 3


def test_ping_pong_is_the_published_block_rule():
    assert [ping_pong(f, 18) for f in range(200)] == [published_rolling_sink(f) for f in range(200)]


def test_rolling_sink_shows_originals_at_moved_positions():
    cache = cache_of("rolling_sink")
    run(cache, range(8))
    chunk = cache.begin_chunk(3)
    assert chunk.start == 24
    plan = cache.views[0, 0].plan
    shown = {t: entry.frames[0] for entry, (t,) in zip(plan.visible, plan.t, strict=True)}
    assert sorted(shown) == list(range(6, 24))
    assert [shown[t] for t in (18, 19, 20)] == [17, 16, 15]
    assert [shown[t] for t in (21, 22, 23)] == [21, 22, 23]


def test_kv_bias_of_one_is_the_window_and_small_weights_forget():
    window = run(cache_of("window:size=21,sink=3"), range(9))
    assert all(map(torch.equal, run(cache_of("kv_bias:weight=1"), range(9)), window))
    alone = cache_of("kv_bias:weight=1e-30")
    run(alone, range(8))
    alone.begin_chunk(3)
    fresh = cache_of("full")
    fresh.begin_chunk(3)
    assert torch.allclose(noisy(alone, 77)[0], noisy(fresh, 77)[0], atol=1e-5)


def test_kv_bias_is_a_factor_on_attention_weights():
    """Weight 1/2 on every past key, each held twice, is the plain cache: exp(log 1/2) * 2 = 1."""
    cache = cache_of("kv_bias:weight=0.5,size=6,sink=0")
    run(cache, range(1))
    cache.begin_chunk(3)
    q, k, v = draw(geometry(), 5)
    out = cache.attend(0, q, k, v)
    view = cache.views[0, 0]
    assert view.bias is not None
    assert view.bias[..., : 3 * 6].unique().tolist() == pytest.approx([math.log(0.5)])
    assert torch.isfinite(out).all()


def test_memrope_means_follow_their_rates():
    cache = cache_of("memrope:long=1,short=0")
    run(cache, range(4))
    first = {key: value.clone() for key, value in cache.banks[0][0].state.items()}
    assert torch.equal(first["long_k"], first["short_k"])
    evicted = [e for e in cache.banks[0][0].entries if e.region == "recent"][:3]
    mean = torch.cat([cache.banks[0][0].read(e)[0] for e in evicted], dim=1).mean(dim=1, keepdim=True)
    run(cache, range(4, 5))
    state = cache.banks[0][0].state
    assert torch.equal(state["short_k"], first["short_k"])
    assert torch.allclose(state["long_k"], mean, atol=1e-6)


def test_memrope_masters_keep_what_bf16_would_lose():
    policy = MemRope()
    bank = cache_of("memrope").banks[0][0]
    for start, blends in ((1.0, 1), (1.2, 400)):
        for _ in range(blends):
            mean = torch.full((1, 1, 4, 12), start)
            policy._blend(bank, [mean, mean], fresh=start == 1.0)
    assert bank.state["long_k"].mean().item() == pytest.approx(1.2 - 0.2 * 0.99**400, abs=1e-4)
    lost = torch.tensor(1.0, dtype=torch.bfloat16)
    for _ in range(400):
        lost = lost + 0.01 * (torch.tensor(1.2, dtype=torch.bfloat16) - lost)
    assert lost.item() == 1.0


def test_memrope_layout():
    cache = cache_of("memrope:per_position=true,adaptive=true")
    run(cache, range(9))
    regions = [entry.region for entry in cache.banks[0][0].entries]
    assert regions == ["sink"] * 3 + ["side"] * 2 + ["recent"] * 4
    cache.begin_chunk(3)
    plan = cache.views[0, 0].plan
    assert [t for times in plan.t for t in times] == list(range(9)) and plan.query_t == (9, 10, 11)


def test_tether_without_diversity_keeps_the_highest_attention():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    t = torch.arange(4.0)[None]
    assert scores(logits, t, 0.0).argsort(descending=True).tolist() == [[1, 3, 2, 0]]


def test_tether_scores_follow_the_definition():
    logits, t = torch.randn(2, 6), torch.tensor([[3.0, 4, 9, 20, 21, 22]] * 2)
    a = logits.softmax(-1)
    sigma = max(1.0, 0.5 * 20)
    for b in range(2):
        for i in range(6):
            near = max(
                math.exp(-abs(t[b, i] - t[b, j]).item() / sigma) * a[b, j].item() for j in range(6) if j != i
            )
            expected = a[b, i].item() + 0.35 * max(0.0, 1 - near)
            assert scores(logits, t, 0.35)[b, i].item() == pytest.approx(expected, abs=1e-5)


def test_tame_takes_over_the_trusted_statistics():
    x, trusted = torch.randn(1, 8, 2, 3) * 3 + 5, torch.randn(1, 40, 2, 3)
    assert torch.equal(tame(x, trusted, 0.0), x)
    moved = tame(x, trusted, 1.0)
    assert torch.allclose(moved.mean(1), trusted.mean(1), atol=1e-5)
    assert torch.allclose(moved.std(1, correction=0), trusted.std(1, correction=0), atol=1e-5)


def test_tether_memory_is_sorted_constant_and_drawn_from_what_left():
    cache = cache_of("tether")
    run(cache, range(7))
    seen = []
    for chunk in range(7, 20):
        run(cache, range(chunk, chunk + 1))
        frames = cache.banks[0][0].state["frames"][0]
        assert len(frames) == 14 and torch.equal(frames, frames.sort().values)
        assert len(set(frames.tolist())) == 14
        seen.append(frames.max().item())
    assert seen[-1] > seen[0]
    regions = [entry.region for entry in cache.banks[1][0].entries]
    assert regions == ["sink"] * 3 + ["memory"] * 14 + ["recent"] * 4


def test_tether_edit_of_zero_stores_frames_as_they_were():
    cache = cache_of("tether:edit=0")
    originals = {}
    for chunk in range(12):
        run(cache, range(chunk, chunk + 1))
        for entry in cache.banks[0][0].entries:
            if entry.region == "recent":
                originals[entry.frames[0]] = cache.banks[0][0].read(entry)[0].clone()
    bank = cache.banks[0][0]
    frames = [int(f) for f in bank.state["frames"][0].tolist()]
    memory = [entry for entry in bank.entries if entry.region == "memory"]
    for frame, entry in zip(frames, memory, strict=True):
        if frame in originals:
            assert torch.equal(bank.read(entry)[0], originals[frame])
