"""What is each token-granular policy's own."""

from __future__ import annotations

import pytest
import torch
from policy_runs import cache_of, geometry, noisy, run

from streamvid.kernels.reference import reference
from streamvid.kernels.rope import rope_table, rotate
from streamvid.memory.policies.soft_prune import frame_mean
from streamvid.memory.policies.tar_van import redundancy, smooth_norm
from streamvid.memory.policies.tempcache import merge_into
from streamvid.memory.tokens import Tokens, empty, raster, tokens_of, top

GRID = (2, 3)


def tokens(n_frames: int, seed: int = 0, heads: int = 2) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    n = n_frames * 6
    k, v = torch.randn(2, 1, n, heads, 12, generator=generator)
    positions = raster([float(i) for i in range(n_frames)], GRID, "cpu")[None, :, None].expand(1, n, heads, 3)
    return Tokens(k, v, positions, torch.ones(1, n, heads))


def test_top_breaks_ties_by_the_lower_index_and_sorts():
    assert top(torch.tensor([[1.0, 3, 3, 0, 3]]), 2).tolist() == [[1, 2]]


def test_identical_keys_merge_into_one_that_counts_for_all():
    """The merge identity: m equal keys are one key with log m on its logit, and the mean of their values."""
    new = tokens(1)
    twice = Tokens(new.k, new.v + 2, new.positions + torch.tensor([1.0, 0, 0]), new.count)
    bank = cache_of("tempcache").banks[0][0]
    held = empty(bank, 12)
    held = Tokens(*(x[:, :, :2] for x in (held.k, held.v, held.positions, held.count)))
    for part in (new, twice):
        held = merge_into(held, part, similarity=0.999, same_place=True)
    assert held.count.sum().item() == 24 and (held.count[..., 0] == 2).sum().item() == 6
    q = torch.randn(1, 4, 2, 12)
    everything = reference(q, torch.cat([new.k, twice.k], 1), torch.cat([new.v, twice.v], 1))
    merged = reference(q, held.k, held.v, bias=held.count.log().transpose(1, 2)[0])
    assert torch.allclose(everything[0], merged[0], atol=1e-5)


def test_unlike_keys_take_empty_places_and_then_the_oldest():
    bank = cache_of("tempcache").banks[0][0]
    held = empty(bank, 12)
    held = Tokens(*(x[:, :, :2] for x in (held.k, held.v, held.positions, held.count)))
    frames = [
        Tokens(t.k, t.v, t.positions + torch.tensor([float(i), 0, 0]), t.count)
        for i, t in enumerate(tokens(1, seed=s) for s in range(4))
    ]
    for frame in frames:
        held = merge_into(held, frame, similarity=2.0, same_place=False)
    assert sorted(held.positions[0, :, 0, 0].unique().tolist()) == [2.0, 3.0]
    assert (held.count == 1).all()


def test_a_still_scene_stays_in_memory_where_a_queue_forgets():
    """Equal frames for ever: merged, their counts grow; unmerged, each keeps a place."""
    new = tokens(1)
    bank = cache_of("tempcache").banks[0][0]
    held = empty(bank, 6)
    held = Tokens(*(x[:, :, :2] for x in (held.k, held.v, held.positions, held.count)))
    for _ in range(9):
        held = merge_into(held, new, similarity=0.9, same_place=True)
    assert (held.count == 9).all()
    assert torch.allclose(held.k.sort(1).values, new.k.sort(1).values, atol=1e-5)


def test_redundancy_is_the_mean_cosine_with_recent_keys_at_the_same_place():
    old = tokens(2, seed=3)
    recent = torch.randn(1, 3, 6, 2, 12)
    expected = (
        torch.stack(
            [
                torch.cosine_similarity(old.k[:, i], recent[:, r, i % 6], dim=-1)
                for i in range(12)
                for r in range(3)
            ]
        )
        .view(12, 3, 1, 2)
        .mean(1)
        .transpose(0, 1)
    )
    assert torch.allclose(redundancy(old, recent, columns=3), expected, atol=1e-5)


def test_value_norms_are_smoothed_less_with_depth():
    v = torch.randn(1, 4 * 6, 2, 12)
    spread = [smooth_norm(v, GRID, depth).std().item() for depth in (0.0, 0.3, 0.6, 1.0)]
    assert spread == sorted(spread) and torch.allclose(smooth_norm(v, GRID, 1.0), v.norm(dim=-1))


def test_tar_van_memory_holds_the_forced_share():
    cache = cache_of("tar_van:tar=1")
    run(cache, range(20))
    memory = [e for e in cache.banks[0][0].entries if e.region == "memory"]
    assert len(memory) == 1 and memory[0].length == 6 * 6
    held = tokens_of(cache.banks[0][0], memory)
    assert held.positions[..., 0].max() < 60 and held.positions[..., 0].min() >= 3


def test_a_frame_mean_is_the_turned_mean_repeated():
    t = tokens(2, seed=5)
    mean = frame_mean(t, 6, GRID)
    assert mean.count.tolist() == [[[6.0, 6.0], [6.0, 6.0]]]
    q = torch.randn(1, 5, 2, 12)
    full_table = rope_table(t.positions[0, :, 0].double(), 12, torch.complex64)[:, None]
    turned = rotate(t.k, full_table).unflatten(1, (2, 6)).mean(2).repeat_interleave(6, dim=1)
    values = t.v.unflatten(1, (2, 6)).mean(2).repeat_interleave(6, dim=1)
    table = rope_table(mean.positions[0, :, 0].double(), 12, torch.complex64)[:, None]
    ours = reference(q, rotate(mean.k, table), mean.v, bias=mean.count.log().transpose(1, 2)[0])
    theirs = reference(q, turned, values)
    assert torch.allclose(ours[0], theirs[0], atol=1e-5)


@pytest.mark.parametrize("hard", [False, True])
def test_soft_prune_keeps_its_shares(hard):
    cache = cache_of(f"soft_prune:hard={hard},pruned=10")
    run(cache, range(20))
    bank = cache.banks[0][0]
    lengths = {
        region: sum(e.length for e in bank.entries if e.region == region)
        for region in ("memory", "recent", "pruned")
    }
    assert lengths["memory"] == 6 * round(21 * 0.4 * 0.75) and lengths["recent"] == 6 * round(
        21 * 0.25 * 0.75
    )
    assert lengths["pruned"] == (0 if hard else 10)
    if not hard:
        counts = next(e.count for e in bank.entries if e.region == "pruned")
        assert counts[:, -1].unique().tolist() == [6.0]


def test_empty_places_have_no_weight():
    cache, fresh = cache_of("tempcache:memory=40,recent=3,sink=0,similarity=2"), cache_of("full")
    for chunk in range(3):
        a, b = run(cache, range(chunk, chunk + 1)), run(fresh, range(chunk, chunk + 1))
        assert all(torch.allclose(x, y, atol=2e-5) for x, y in zip(a, b, strict=True))
    cache.begin_chunk(3)
    assert all(torch.isfinite(out).all() for out in noisy(cache, 3))
    assert geometry().tokens_per_frame == 6
