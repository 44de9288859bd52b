"""What every registered memory policy must do. A new policy enters by being in the table; it needs no test of its own
here, only for what is its own."""

from __future__ import annotations

import pytest
import torch
from policy_runs import cache_of, draw, geometry, noisy, run, same_state

from streamvid.memory.policies import POLICIES

NEVER_FULL = {"kv_bias": "lowers the past from the first chunk on"}
"""Policies whose output differs from the full cache although nothing is left out, and why."""
GROWS = {"full"}
SUMMARIES = {"pruned"}
"""Regions whose keys are not means of un-rotated keys."""


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_equals_the_full_cache_while_nothing_is_left_out(name):
    if name in NEVER_FULL:
        pytest.skip(NEVER_FULL[name])
    ours, full = cache_of(name), cache_of("full")
    for chunk in range(2):
        for a, b in zip(run(ours, range(chunk, chunk + 1)), run(full, range(chunk, chunk + 1)), strict=True):
            assert torch.allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_an_abandoned_chunk_leaves_no_trace(name):
    cache = cache_of(name)
    run(cache, range(12))
    before = {key: value.clone() for key, value in cache.state_dict().items()}
    cache.begin_chunk(3)
    noisy(cache, 999)
    cache.begin_context()
    noisy(cache, 998)
    cache.abort()
    assert same_state(before, cache.state_dict())


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_committed_state_does_not_depend_on_the_number_of_noisy_passes(name):
    caches = [cache_of(name), cache_of(name)]
    run(caches[0], range(10))
    run(caches[1], range(10))
    for cache, passes in zip(caches, (1, 3), strict=True):
        cache.begin_chunk(3)
        for _ in range(passes):
            noisy(cache, 500)
        cache.begin_context()
        noisy(cache, 600)
        cache.commit()
    assert same_state(*(cache.state_dict() for cache in caches))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_snapshot_goes_on_bit_for_bit(name):
    cache = cache_of(name)
    run(cache, range(11))
    other = cache_of(name)
    other.load_state_dict({key: value.clone() for key, value in cache.state_dict().items()})
    for a, b in zip(run(cache, range(11, 14)), run(other, range(11, 14)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", sorted(set(POLICIES) - GROWS))
def test_bytes_stay_flat(name):
    cache = cache_of(name)
    run(cache, range(14))
    slots = [bank.slots for bank in cache.all_banks()]
    total = cache.report().total
    run(cache, range(14, 40))
    assert slots == [bank.slots for bank in cache.all_banks()]
    assert cache.report().total <= total


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_batch_items_do_not_touch_each_other(name):
    def only(i: int):
        return [x[i : i + 1] for x in draw(geometry(2), seed)]

    together, alone = cache_of(name, batch=2), cache_of(name)
    for chunk in range(12):
        for cache in (together, alone):
            cache.begin_chunk(3)
        for stage in ("noisy", "context"):
            if stage == "context":
                together.begin_context()
                alone.begin_context()
            for layer in range(2):
                seed = 100 * chunk + 10 * layer + (stage == "context")
                out = together.attend(layer, *draw(geometry(2), seed))
                one = alone.attend(layer, *only(1))
                assert torch.allclose(out[1:], one, atol=2e-5)
        together.commit()
        alone.commit()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_keys_and_values_of_a_token_move_together(name):
    cache = cache_of(name)
    run(cache, range(16))
    for bank in cache.all_banks():
        assert bank.entries
        for entry in bank.entries:
            if entry.region in SUMMARIES:
                continue
            k, v = bank.read(entry)
            assert torch.allclose(v, 2 * k + 1, atol=1e-4)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_reset_cache_is_a_new_one(name):
    cache = cache_of(name)
    run(cache, range(12))
    cache.reset()
    for a, b in zip(run(cache, range(3)), run(cache_of(name), range(3)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_prompt_change_leaves_a_working_cache(name):
    cache = cache_of(name)
    run(cache, range(12))
    cache.flush(2)
    run(cache, range(12, 15))
    cache.rewind(3)
    run(cache, range(15, 16))
    cache.rebuild(cache.next_frame - 6)
    run(cache, range(16, 18))
    cache.scene_cut()
    outputs = run(cache, range(18, 27))
    assert all(torch.isfinite(out).all() for out in outputs)
