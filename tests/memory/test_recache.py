"""Encoding the past again: what each mode replaces, what it keeps, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch

from streamvid.errors import StreamvidError
from streamvid.memory.cache import KVCache
from streamvid.recache import recache, recache_frames
from streamvid.transformer import CausalWan

NAN = float("nan")
SIZE = (4, 6)


@pytest.fixture(scope="module")
def net(tiny_random_model):
    return CausalWan(tiny_random_model)


def prompt_of(net, seed):
    return net.prepare_prompt(
        torch.randn(1, 8, net.geometry.text_dim, generator=torch.Generator().manual_seed(seed))
    )


def history(net, policy, chunks, prompt, codec=None, **extra):
    cache = KVCache(net.geometry.kv(1, *SIZE), policy, codec, fill=NAN, **extra)
    shape = (1, 3 * chunks, net.geometry.out_channels, *SIZE)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    for part in latents.split(3, dim=1):
        cache.begin_chunk(3)
        net.context_pass(part, 0.0, prompt, cache)
        cache.commit()
    return cache, latents


def again(net, cache, prompt, latents, **how):
    """Encode under ``prompt``."""

    def encode(part, skip):
        cache.begin_chunk(part.shape[1], skip=skip)
        net.context_pass(part, 0.0, prompt, cache)
        cache.commit()

    recache(cache, latents, encode, **how)


def contents(cache, layer=1):
    bank = cache.banks[layer][0]
    return [(e.frames, e.region, *(x.clone() for x in bank.read(e))) for e in bank.entries]


def same(a, b, atol=2e-6):
    return [x[:2] for x in a] == [x[:2] for x in b] and all(
        torch.allclose(x[i], y[i], atol=atol) for x, y in zip(a, b, strict=True) for i in (2, 3)
    )


@pytest.mark.parametrize("policy", ["full", "window:size=9,sink=3"])
def test_causal_recache_with_the_same_prompt_changes_nothing_while_all_is_seen(net, policy):
    prompt = prompt_of(net, 1)
    cache, latents = history(net, policy, 2, prompt)
    before = contents(cache)
    assert recache_frames(cache) == 6
    again(net, cache, prompt, latents, mode="causal")
    assert same(before, contents(cache))
    assert cache.next_frame == 6 and cache.num_chunks == 2
    again(net, cache, prompt_of(net, 2), latents, mode="causal")
    assert not same(before, contents(cache), atol=1e-3)


def test_window_recache_sees_both_ways_and_moves_the_sink(net):
    prompt, other = prompt_of(net, 1), prompt_of(net, 2)
    cache, latents = history(net, "window:size=9,sink=3", 5, prompt, retain=True)
    assert recache_frames(cache) == 9
    again(net, cache, other, latents[:, -9:])
    held = contents(cache)
    assert [f for frames, *_ in held for f in frames] == list(range(6, 15))
    assert [region for _, region, *_ in held] == ["sink"] * 3 + ["recent"] * 6
    # One forward over nine frames as the only chunk there is, at their own positions.
    alone = KVCache(net.geometry.kv(1, *SIZE), "full", chunk_frames=9, fill=NAN)
    alone.next_frame = 6
    alone.begin_chunk(9)
    net.context_pass(latents[:, -9:], 0.0, other, alone)
    alone.commit()
    assert all(torch.allclose(a[2], b[2], atol=2e-6) for a, b in zip(held, contents(alone), strict=True))


@pytest.mark.parametrize("mode", ["window", "causal"])
def test_a_kept_sink_is_left_as_it_was(net, mode):
    prompt, other = prompt_of(net, 1), prompt_of(net, 2)
    cache, latents = history(net, "window:size=9,sink=3", 5, prompt, retain=True)
    before = contents(cache)
    again(net, cache, other, latents[:, -9:], mode=mode, keep_sink=True)
    after = contents(cache)
    assert [f for frames, *_ in after for f in frames] == [0, 1, 2, *range(9, 15)]
    assert same(before[:3], after[:3], atol=0)
    assert all((a[2] - b[2]).abs().max() > 1e-3 for a, b in zip(before[3:], after[3:], strict=True))


def test_micro_recache_touches_the_last_chunk_only(net):
    prompt, other = prompt_of(net, 1), prompt_of(net, 2)
    cache, latents = history(net, "window:size=9,sink=3", 4, prompt)
    before = contents(cache)
    again(net, cache, other, latents[:, -3:], mode="micro")
    after = contents(cache)
    assert same(before[:3], after[:3], atol=0) and len(after) == 6
    assert all((a[2] - b[2]).abs().max() > 1e-3 for a, b in zip(before[3:], after[3:], strict=True))
    with pytest.raises(StreamvidError, match="re-cache of 13 latent frames, but there are only 12"):
        again(net, cache, other, torch.cat([latents, latents[:, :1]], 1))


def test_flush_rewind_and_rebuild_keep_what_they_say(net):
    cache, _ = history(net, "window:size=12,sink=3", 5, prompt_of(net, 1))
    frames = lambda: [f for entry in cache.banks[0][0].entries for f in entry.frames]
    assert frames() == [0, 1, 2, *range(9, 15)]
    cache.flush(2)
    assert frames() == [0, 1, 2, 13, 14]
    cache.rewind(1)
    assert frames() == [0, 1, 2, 13] and cache.next_frame == 14
    cache.flush(0, sink=False)
    assert frames() == []
    with pytest.raises(ValueError, match="rewind needs 1 to 14"):
        cache.rewind(15)
    with pytest.raises(ValueError, match="0 or more"):
        cache.flush(-1)
    cache.begin_chunk(3)
    with pytest.raises(ValueError, match="commit or abort first"):
        cache.rebuild(0)


def test_a_stream_goes_on_after_each_mode(net):
    """The next chunk after a re-cache with an unchanged prompt equals the one without it, where that is exact."""
    prompt = prompt_of(net, 1)
    x = torch.randn(1, 3, net.geometry.out_channels, *SIZE, generator=torch.Generator().manual_seed(8))
    flows = []
    for mode in (None, "causal", "micro"):
        cache, latents = history(net, "window:size=9,sink=3", 2, prompt)
        if mode:
            again(
                net,
                cache,
                prompt,
                latents[:, -(3 if mode == "micro" else recache_frames(cache)) :],
                mode=mode,
            )
        assert cache.begin_chunk(3).index == 2
        flows.append(net(x, 700.0, prompt, cache))
    assert all(torch.allclose(flow, flows[0], atol=5e-6) for flow in flows)
