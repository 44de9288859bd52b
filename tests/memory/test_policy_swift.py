"""SWIFT: what a prompt change does to the memory."""

from __future__ import annotations

import pytest
import torch
from policy_runs import cache_of, noisy, run

from streamvid.memory.policies.swift import bridge_token, without


def event(rho: float = 0.5, seed: int = 0) -> dict:
    old, new = torch.randn(2, 1, 4, 12, generator=torch.Generator().manual_seed(seed))
    return {"old": old, "new": new, "rho": rho}


def regions(cache) -> list[str]:
    return [entry.region for entry in cache.banks[0][0].entries]


def test_a_change_adds_tokens_and_touches_nothing_else():
    cache = cache_of("swift")
    run(cache, range(6))
    before = [(e.frames, cache.banks[0][0].read(e)[0].clone()) for e in cache.banks[0][0].entries]
    cache.prompt_changed(event())
    assert regions(cache) == ["sink"] * 3 + ["anchors", "bridge"] + ["recent"] * 6
    after = [(e.frames, cache.banks[0][0].read(e)[0]) for e in cache.banks[0][0].entries if e.frames]
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in zip(before, after, strict=True))


def test_equal_prompts_inject_nothing():
    summary = torch.randn(1, 4, 12)
    assert torch.equal(bridge_token(summary, torch.randn(1, 4, 12), 0.0), summary)


def test_the_bridge_points_towards_the_change_only_where_it_already_does():
    change = torch.randn(1, 4, 12)
    assert torch.allclose(bridge_token(2 * change, change, 1.0), change, atol=1e-6)
    assert torch.equal(bridge_token(-change, change, 1.0), -change)


def test_motion_is_taken_out_of_the_change():
    change, motion = torch.randn(2, 1, 4, 12)
    assert (without(change, motion) * motion).sum(-1).abs().max() < 1e-5


def test_bridges_fade_and_go_and_anchors_stay_in_number():
    cache = cache_of("swift:anchors=2")
    run(cache, range(4))
    cache.prompt_changed(event())
    first = (
        cache.banks[0][0].read(next(e for e in cache.banks[0][0].entries if e.region == "bridge"))[0].clone()
    )
    run(cache, range(4, 5))
    second = cache.banks[0][0].read(next(e for e in cache.banks[0][0].entries if e.region == "bridge"))[0]
    assert torch.allclose(second, 0.85 * first)
    for number in range(3):
        cache.prompt_changed(event(seed=number))
    anchors = [e for e in cache.banks[0][0].entries if e.region == "anchors"]
    assert len(anchors) == 1 and anchors[0].length == 2
    run(cache, range(5, 50))
    assert "bridge" not in regions(cache) and "anchors" in regions(cache)


def test_the_window_is_wide_after_a_change_and_narrow_later():
    cache = cache_of("swift")
    run(cache, range(40))

    def seen() -> int:
        cache.begin_chunk(3)
        plan = cache.views[0, 0].plan
        cache.abort()
        return 3 + sum(entry.num_frames for entry in plan.visible)

    assert seen() == 7
    cache.prompt_changed(event())
    assert seen() == 12


@pytest.mark.parametrize("rho", [0.0, 0.4, 1.0])
def test_the_stream_goes_on_and_its_snapshot_too(rho):
    cache = cache_of("swift")
    run(cache, range(7))
    cache.prompt_changed(event(rho))
    other = cache_of("swift")
    other.load_state_dict({key: value.clone() for key, value in cache.state_dict().items()})
    for a, b in zip(run(cache, range(7, 10)), run(other, range(7, 10)), strict=True):
        assert torch.equal(a, b)
    slots = cache.banks[0][0].slots
    for number in range(5):
        cache.prompt_changed(event(rho, seed=number))
        run(cache, range(10 + number, 11 + number))
    assert cache.banks[0][0].slots == slots
    cache.begin_chunk(3)
    assert all(torch.isfinite(out).all() for out in noisy(cache, 1))


def test_a_signature_is_of_each_prompt_alone(tiny_random_model):
    from streamvid.config import StreamConfig
    from streamvid.engine import Engine
    from streamvid.transformer import CausalWan

    engine = Engine(CausalWan(tiny_random_model), None, StreamConfig())
    embeds = torch.randn(3, 8, engine.model.geometry.text_dim)
    embeds[0, 5:], embeds[1, 2:], embeds[2] = 0, 0, 0
    together = engine.signature(embeds)
    assert together.shape == (3, engine.model.geometry.heads, engine.model.geometry.head_dim)
    for item in range(3):
        assert torch.allclose(together[item], engine.signature(embeds[item : item + 1])[0], atol=1e-6)
    words = engine.model.model.condition_embedder.text_embedder(embeds[1, :2])
    assert torch.allclose(together[1].flatten(), words.mean(0), atol=1e-6)
