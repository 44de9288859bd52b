"""The driver and the cache on a random tiny model: chunks run, memory stays within the window, nothing is NaN."""

from __future__ import annotations

import torch

from streamvid.memory.cache import KVCache
from streamvid.transformer import CausalWan


def test_ten_chunks_of_a_window_stay_finite_and_bounded(tiny_random_model):
    net = CausalWan(tiny_random_model)
    prompt = net.prepare_prompt(torch.randn(1, 8, net.geometry.text_dim))
    cache = KVCache(net.geometry.kv(1, 8, 8), "window:size=7,sink=1", chunk_frames=3, fill=float("nan"))
    totals = []
    for chunk in range(10):
        cache.begin_chunk(3)
        x = torch.randn(1, 3, net.geometry.out_channels, 8, 8)
        for t in (1000.0, 500.0):
            x = net(x, t, prompt, cache)
            assert torch.isfinite(x).all()
        net.context_pass(x, 0.0, prompt, cache)
        cache.commit()
        totals.append(cache.report().total)
        held = [frame for entry in cache.banks[0][0].entries for frame in entry.frames]
        assert held == [0, *range(max(1, 3 * chunk), 3 * chunk + 3)]
    assert len(set(totals[5:])) == 1
