"""The life of a cache with a codec: abort, repeated passes, token subsets. What packing costs: test_codec_cache."""

from __future__ import annotations

import pytest
import torch
from oracle import random_qkv, run_chunk

from streamvid.memory.cache import KVCache
from streamvid.memory.geometry import KVGeometry

NAN = float("nan")
G = KVGeometry(layers=3, heads=2, head_dim=32, grid=(4, 4))
CODECS = ["int8", "int4", "mixed:recent_frames=3,older=int8", "qvg:span_frames=4"]


def warm(codec, chunks=4, policy="window:size=9,sink=1", **extra):
    cache, generator = KVCache(G, policy, codec, fill=NAN, **extra), torch.Generator().manual_seed(0)
    for _ in range(chunks):
        run_chunk(cache, 3, generator)
    return cache, generator


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("codec", CODECS)
def test_abort_and_snapshot_with_packed_entries(codec):
    cache, generator = warm(codec)
    before = cache.state_dict()
    cache.begin_chunk(3)
    for context in (False, True):
        if context:
            cache.begin_context()
        cache.attend(0, *random_qkv(G, 3, generator))
    cache.abort()
    assert same(before, cache.state_dict())
    dice, outs = generator.get_state(), []
    for target in (cache, KVCache(G, "window:size=9,sink=1", codec, fill=NAN)):
        target.load_state_dict(before)
        generator.set_state(dice)
        for _ in range(2):
            run_chunk(target, 3, generator)
        outs.append(target.state_dict())
    assert same(*outs)


@pytest.mark.parametrize("codec", CODECS)
def test_noisy_passes_are_idempotent(codec):
    states = []
    for passes in (1, 3):
        cache, _ = warm(codec)
        cache.begin_chunk(3)
        for i in range(passes):
            generator = torch.Generator().manual_seed(i)
            for layer in range(G.layers):
                cache.attend(layer, *random_qkv(G, 3, generator))
        cache.begin_context()
        generator = torch.Generator().manual_seed(9)
        for layer in range(G.layers):
            cache.write(layer, *random_qkv(G, 3, generator)[1:])
        cache.commit()
        states.append(cache.state_dict())
    assert same(*states)


def test_token_subsets_need_the_current_chunk_to_be_kept():
    for subsets in (False, True):
        cache, generator = warm("int8", subsets=subsets)
        cache.begin_chunk(3)
        q, k, v = random_qkv(G, 3, generator)
        full = cache.attend(0, q, k, v)
        tokens = torch.tensor([3, 47, 20])
        part = (x[:, tokens] for x in (q, k, v))
        if subsets:
            assert torch.allclose(cache.attend(0, *part, tokens=tokens), full[:, tokens], atol=1e-6)
        else:
            with pytest.raises(ValueError, match="subsets=True"):
                cache.attend(0, *part, tokens=tokens)


def test_shadow_and_codec_exclude_each_other():
    with pytest.raises(ValueError, match="cannot be combined with a codec"):
        KVCache(G, "window:size=9", "int8", shadow=True)


def test_spans_are_divided_where_a_rewind_or_flush_cuts_them():
    frames = lambda cache: [f for entry in cache.banks[0][0].entries for f in entry.frames]
    cache, generator = warm("qvg:span_frames=4", chunks=4, policy="full")
    assert [len(e.frames) for e in cache.banks[0][0].entries] == [4, 4, 4]
    k = [cache.banks[1][0].read(entry)[0].clone() for entry in cache.banks[1][0].entries]
    cache.rewind(3)
    assert frames(cache) == list(range(9)) and cache.next_frame == 9
    again = torch.cat([cache.banks[1][0].read(entry)[0] for entry in cache.banks[1][0].entries], 1)
    assert torch.equal(again, torch.cat(k, 1)[:, : 9 * G.tokens_per_frame])
    run_chunk(cache, 3, generator)
    assert frames(cache) == list(range(12)) and [len(e.frames) for e in cache.banks[0][0].entries] == [
        4,
        4,
        4,
    ]
    cache.flush(2)
    assert frames(cache) == [10, 11]
