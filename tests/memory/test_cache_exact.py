"""The cache answers as its definition says: windows, position functions, storage modes, chunk sizes, batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Oracle, random_qkv, run_chunk, windowed

from streamvid.memory.cache import KVCache
from streamvid.memory.geometry import KVGeometry

NAN = float("nan")


def geometry(**changes) -> KVGeometry:
    return KVGeometry(**({"layers": 2, "heads": 2, "head_dim": 12, "grid": (2, 3), "batch": 1} | changes))


@st.composite
def windows(draw):
    chunk = draw(st.integers(1, 3))
    sink = draw(st.integers(0, 3))
    size = sink + chunk + draw(st.integers(0, 7))
    return size, sink, chunk


@settings(max_examples=25, deadline=None)
@given(
    window=windows(),
    place=st.sampled_from(["abs", "slot", "sink_shift", "unified"]),
    mode=st.sampled_from(["plain", "shadow", "retain", "parity"]),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([4, 6, 12, 20]),
    grid=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    batch=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_windows_equal_their_definition(window, place, mode, heads, head_dim, grid, batch, seed):
    size, sink, chunk = window
    g = geometry(heads=heads, head_dim=head_dim, grid=grid, batch=batch)
    policy = f"window:size={size},sink={sink},positions={place}"
    modes = {} if mode == "plain" else {mode: True}
    cache = KVCache(g, policy, chunk_frames=chunk, fill=NAN, **modes)
    oracle = Oracle(g, windowed(size, sink, place))
    generator = torch.Generator().manual_seed(seed)
    worst = max(run_chunk(cache, chunk, generator, oracle) for _ in range(8))
    assert worst < 5e-6


@pytest.mark.parametrize("sizes", [[1, 3, 3, 3, 3], [3, 1, 2, 3, 1, 3], [2, 3, 3, 1]])
@pytest.mark.parametrize("retain", [False, True])
def test_uneven_chunks_equal_the_definition(sizes, retain):
    """Without ``retain`` a chunk shorter than usual sees what the usual one would: the newest size - chunk_frames."""
    g, usual = geometry(), 3
    cache = KVCache(g, "window:size=7,sink=1", chunk_frames=usual, fill=NAN, retain=retain)
    exact = windowed(7, 1)

    def eager(committed, first, count):
        return exact(committed, first, usual)[0], list(range(first, first + count))

    oracle = Oracle(g, exact if retain else eager)
    generator = torch.Generator().manual_seed(0)
    assert max(run_chunk(cache, n, generator, oracle) for n in sizes) < 5e-6


def test_full_history_grows_and_refuses_beyond_its_limit():
    g = geometry()
    cache = KVCache(g, "full:limit=7", fill=NAN)
    oracle = Oracle(g, windowed(10**6, 0))
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        assert run_chunk(cache, 3, generator, oracle) < 5e-6
    with pytest.raises(ValueError, match="9 latent frames exceed limit=7"):
        cache.begin_chunk(3)
    assert run_chunk(cache, 1, generator, oracle) < 5e-6
    endless = KVCache(g, "full", fill=NAN)
    oracle = Oracle(g, windowed(10**6, 0))
    assert max(run_chunk(endless, 3, generator, oracle) for _ in range(9)) < 5e-6
    assert endless.banks[0][0].num_frames == 27


def test_positions_never_run_out():
    """Past the trained table: rotations stay below it by a common shift, and the answers stay right."""
    g = geometry()
    for start in (1000, 10_000_000):
        cache = KVCache(g, "window:size=6", chunk_frames=3, fill=NAN, position_limit=64)
        cache.next_frame = start
        oracle = Oracle(g, windowed(6, 0))
        generator = torch.Generator().manual_seed(2)
        for _ in range(30):
            assert run_chunk(cache, 3, generator, oracle) < 5e-6
            cache.begin_chunk(3)
            view = cache.views[0, 0]
            assert all(0 <= t - view.base < 64 for piece in view.pieces for t in piece.times)
            cache.abort()


def test_a_view_wider_than_the_table_is_still_exact():
    g = geometry()
    cache = KVCache(g, "window:size=6,sink=1", chunk_frames=3, fill=NAN, position_limit=64)
    oracle = Oracle(g, windowed(6, 1))
    generator = torch.Generator().manual_seed(3)
    assert max(run_chunk(cache, 3, generator, oracle) for _ in range(40)) < 5e-6


def test_batch_items_are_independent():
    g = geometry(batch=3)
    single = geometry(batch=1)
    together = KVCache(g, "window:size=6,sink=1", fill=NAN)
    alone = [KVCache(single, "window:size=6,sink=1", fill=NAN) for _ in range(3)]
    generator = torch.Generator().manual_seed(4)
    for _ in range(4):
        for cache in [together, *alone]:
            cache.begin_chunk(3)
            cache.begin_context()
        for layer in range(g.layers):
            q, k, v = random_qkv(g, 3, generator)
            out = together.attend(layer, q, k, v)
            for i, cache in enumerate(alone):
                one = cache.attend(layer, q[i : i + 1], k[i : i + 1], v[i : i + 1])
                assert torch.allclose(one, out[i : i + 1], atol=1e-6)
        for cache in [together, *alone]:
            cache.commit()


def test_token_subsets_equal_a_pass_with_the_same_keys():
    g = geometry()
    for extra in ({}, {"shadow": True}):
        cache = KVCache(g, "window:size=6,sink=1", fill=NAN, **extra)
        reference = KVCache(g, "window:size=6,sink=1", fill=NAN)
        generator = torch.Generator().manual_seed(5)
        for _ in range(3):
            state = generator.get_state()
            run_chunk(cache, 3, generator)
            generator.set_state(state)
            run_chunk(reference, 3, generator)
        cache.begin_chunk(3)
        reference.begin_chunk(3)
        q, k, v = random_qkv(g, 3, generator)
        cache.attend(0, q, k, v)
        tokens = torch.tensor([17, 0, 4, 9])
        q2, k2, v2 = random_qkv(g, 3, generator)
        mixed_k, mixed_v = k.clone(), v.clone()
        mixed_k[:, tokens], mixed_v[:, tokens] = k2[:, tokens], v2[:, tokens]
        out = cache.attend(0, q2[:, tokens], k2[:, tokens], v2[:, tokens], tokens=tokens)
        expected = reference.attend(0, q2, mixed_k, mixed_v)[:, tokens]
        assert torch.allclose(out, expected, atol=1e-6)
        with pytest.raises(ValueError, match="full noisy pass"):
            cache.attend(1, q2[:, tokens], k2[:, tokens], v2[:, tokens], tokens=tokens)
