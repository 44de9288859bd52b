"""Pyramid Forcing against a plain computation, head by head and frame by frame, from the published rules."""

from __future__ import annotations

import pytest
import torch
from policy_runs import draw, geometry, noisy, run, same_state

from streamvid.kernels.rope import rope_table, rotate
from streamvid.memory.cache import KVCache
from streamvid.memory.heads import HeadProfile
from streamvid.memory.policies.pyramid import Pyramid
from streamvid.memory.tokens import raster

KINDS = [["wave", "anchor", "veil", "wave"], ["veil", "anchor", "anchor", "wave"]]
PROFILE = HeadProfile(fingerprint=None, layers=2, heads=4, labels={"pyramid": KINDS})


def cache_with(batch: int = 1, **settings) -> KVCache:
    extra = {key: settings.pop(key) for key in ("codec", "sparse", "backend") if key in settings}
    return KVCache(geometry(batch), Pyramid.of(PROFILE, **settings), fill=float("nan"), **extra)


def expected(past: list, q, k, v, start: int, kind: str, grid) -> torch.Tensor:
    """One head's attention for a chunk of 3 frames at ``start``; ``past``: (k, v) of every earlier frame."""
    size = grid[0] * grid[1]
    far = max(0, start - min(max(start, 18), 21))
    sink = 1 if kind == "wave" else 3
    recent = [start - 1]
    seen = []
    for frame in range(start, start + 3):
        keys = [(past[t], raster((float(far),), grid, "cpu")) for t in range(sink)]
        if kind == "wave":
            cycle = [t for t in range(max(sink, start - 24), start - 1) if t % 6 == frame % 6]
            keys += [(past[t], raster((float(far),), grid, "cpu")) for t in cycle]
        if kind == "anchor":
            stride = [t for t in range(sink, start) if t % 6 == 0][-4:]
            keys += [(past[t], raster((float(far),), grid, "cpu")) for t in stride if t < start - 1]
        if kind == "veil":
            blocks = range(start // 4)[-4:]
            for b in blocks:
                if not sink <= 4 * b + 1 < start - 1:
                    continue
                parts = []
                for i in (0, 1):
                    x = torch.stack([past[t][i] for t in range(4 * b, 4 * b + 4)]).view(4, *grid, -1)
                    x = x[:, :, : grid[1] // 2 * 2] if grid[1] % 2 == 0 else x
                    dx = 2 if grid[1] % 2 == 0 else 1
                    x = x.view(4, grid[0] // 2, 2, grid[1] // dx, dx, x.shape[-1])
                    parts.append(x.mean(dim=(0, 2, 4)).flatten(0, 1))
                places = raster((4.0 * b + 1,), grid, "cpu").view(*grid, 3)[::2, ::dx].reshape(-1, 3)
                keys.append((tuple(parts), places))
        keys += [(past[t], raster((float(t),), grid, "cpu")) for t in recent]
        keys += [
            (
                (k[i * size : (i + 1) * size], v[i * size : (i + 1) * size]),
                raster((float(start + i),), grid, "cpu"),
            )
            for i in range(3)
        ]
        turn = lambda x, at: rotate(
            x.double()[None, :, None], rope_table(at.double(), x.shape[-1], torch.complex128)[:, None]
        )[0, :, 0]
        rows = q[(frame - start) * size : (frame - start + 1) * size]
        query = turn(rows, raster((float(frame),), grid, "cpu"))
        all_k = torch.cat([turn(kv[0], at) for kv, at in keys])
        all_v = torch.cat([kv[1] for kv, _ in keys]).double()
        weights = (query @ all_k.mT * q.shape[-1] ** -0.5).softmax(-1)
        seen.append(weights @ all_v)
    return torch.cat(seen).float()


def test_every_kind_of_head_equals_the_published_rules():
    cache = cache_with()
    g = cache.geometry
    past: list[list[list]] = [[[] for _ in range(g.heads)] for _ in range(g.layers)]
    for chunk in range(16):
        cache.begin_chunk(3)
        drawn = [draw(g, 50 * chunk + layer) for layer in range(g.layers)]
        outs = [cache.attend(layer, *drawn[layer]) for layer in range(g.layers)]
        if chunk >= 4:  # before, everything is shown
            for layer in range(g.layers):
                for head, kind in enumerate(KINDS[layer]):
                    q, k, v = (x[0, :, head] for x in drawn[layer])
                    want = expected(past[layer][head], q, k, v, 3 * chunk, kind, g.grid)
                    assert torch.allclose(outs[layer][0, :, head], want, atol=2e-5), (chunk, layer, kind)
        cache.begin_context()
        for layer in range(g.layers):
            cache.attend(layer, *drawn[layer])
            for head in range(g.heads):
                _, k, v = (x[0, :, head].split(g.tokens_per_frame) for x in drawn[layer])
                past[layer][head] += list(zip(k, v, strict=True))
        cache.commit()


def _held(cache: KVCache) -> int:
    return sum(cache.report().regions.values())


def test_bytes_stay_flat_and_an_abandoned_chunk_leaves_no_trace():
    cache = cache_with()
    run(cache, range(14))
    held = _held(cache)
    run(cache, range(14, 22))
    after = _held(cache)
    assert abs(after - held) <= 0.05 * held  # the running sums of a block come and go
    before = {key: value.clone() for key, value in cache.state_dict().items()}
    cache.begin_chunk(3)
    noisy(cache, 999)
    cache.abort()
    assert same_state(before, cache.state_dict())


def test_a_restored_cache_goes_on_bit_for_bit():
    first, second = cache_with(), cache_with()
    run(first, range(11))
    second.load_state_dict(first.state_dict())
    for a, b in zip(run(first, range(11, 16)), run(second, range(11, 16)), strict=True):
        assert torch.equal(a, b)


def test_clips_of_a_batch_equal_their_solo_runs():
    both, solo = run(cache_with(batch=2), range(13)), run(cache_with(), range(13))
    for a, b in zip(both, solo, strict=True):
        assert torch.allclose(a[:1], b, atol=1e-6)


def test_published_positions_from_the_first_chunk_on():
    ours, full = cache_with(bypass=False), KVCache(geometry(), "full", fill=float("nan"))
    a, b = run(ours, range(2)), run(full, range(2))
    assert not torch.allclose(a[0], b[0], atol=1e-3)


def test_it_works_with_a_codec():
    run(cache_with(codec="int8"), range(12))


@pytest.mark.parametrize("settings", [{"recent": 2}, {"near": 30}, {"bucket": 0}, {"period": 0}])
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ValueError, match="pyramid"):
        cache_with(**settings)


def test_what_reads_frame_by_frame_takes_no_sparse_rule_and_no_subset():
    with pytest.raises(ValueError, match="sparse"):
        cache_with(sparse="topk:density=0.5")
    cache = cache_with()
    cache.begin_chunk(3)
    noisy(cache, 1)
    with pytest.raises(ValueError, match="frame"):
        cache.attend(0, *draw(cache.geometry, 2), tokens=torch.arange(18))
