"""Long runs and devices: nothing grows, nothing is read back from the device."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from statistics import median

import pytest
import torch
from oracle import random_qkv, run_chunk
from torch import Tensor

from streamvid.memory.cache import KVCache
from streamvid.memory.geometry import KVGeometry
from streamvid.transformer import CausalWan


def live_tensors() -> int:
    gc.collect()
    return sum(isinstance(item, Tensor) for item in gc.get_objects())


@pytest.mark.parametrize("policy", ["window:size=7,sink=1", "window:size=7,sink=1,positions=slot"])
def test_three_hundred_chunks_leave_nothing_behind(policy):
    g = KVGeometry(layers=2, heads=2, head_dim=8, grid=(2, 2))
    cache, generator = KVCache(g, policy), torch.Generator().manual_seed(0)
    tensors, totals, times = {}, [], []
    for chunk in range(300):
        start = time.process_time()
        run_chunk(cache, 3, generator)
        times.append(time.process_time() - start)
        totals.append(cache.report().total)
        if chunk in (50, 299):
            tensors[chunk] = live_tensors()
    assert tensors[50] == tensors[299]
    assert len(set(totals[20:])) == 1
    assert median(times[-50:]) <= 1.5 * median(times[20:70])  # generous: the machine may be busy


def test_storage_is_never_moved_or_copied():
    """A newcomer is written where an evicted frame was: the buffers stay, and so do the frames that stay."""
    g = KVGeometry(layers=1, heads=2, head_dim=8, grid=(2, 2))
    cache, generator = KVCache(g, "window:size=9,sink=3"), torch.Generator().manual_seed(0)
    for _ in range(4):
        run_chunk(cache, 3, generator)
    bank = cache.banks[0][0]
    addresses = bank.k.data_ptr(), bank.v.data_ptr()
    for _ in range(6):
        before = {entry.frames: entry.slots for entry in bank.entries}
        run_chunk(cache, 3, generator)
        assert (bank.k.data_ptr(), bank.v.data_ptr()) == addresses and bank.slots == 9
        assert all(before[e.frames] == e.slots for e in bank.entries if e.frames in before)
        cache.begin_chunk(3)
        assert cache.views[0, 0].rows is not None  # attention reads values in place
        cache.abort()


@pytest.mark.parametrize("policy", ["full", "window:size=6,sink=1", "window:size=6,sink=1,positions=slot"])
def test_nothing_is_read_back_from_the_device(tiny_random_model, policy):
    """On tensors without data any read-back raises: a whole chunk, fused pass and token subset run without one."""
    import copy

    net = CausalWan(copy.deepcopy(tiny_random_model).to("meta"))
    prompt = net.prepare_prompt(torch.empty(1, 8, net.geometry.text_dim, device="meta"))
    cache = KVCache(net.geometry.kv(1, 8, 8, device="meta"), policy)
    x = torch.empty(1, 3, net.geometry.out_channels, 8, 8, device="meta")
    cache.begin_chunk(3)
    for _ in range(3):
        assert net(x, 500.0, prompt, cache).shape == x.shape
        net(x, torch.empty(1, 3, device="meta"), prompt, cache)
        net(x, 400.0, prompt, cache, tokens=torch.empty(7, dtype=torch.long, device="meta"))
        assert net.fused_pass(x, 0.0, x, 900.0, prompt, cache).shape == x.shape
    net.context_pass(x, 0.0, prompt, cache)
    cache.commit()
    assert cache.num_chunks == 4


def test_a_watching_policy_is_not_shown_token_subsets():
    from streamvid.memory.policy import MemoryPolicy

    g, seen = KVGeometry(layers=1, heads=2, head_dim=8, grid=(2, 2)), []

    @dataclass(kw_only=True)
    class Watching(MemoryPolicy):
        def observe(self, bank, look):
            seen.append(look.rotate_q().shape[1])

    cache, generator = KVCache(g, Watching()), torch.Generator().manual_seed(0)
    cache.begin_chunk(3)
    q, k, v = random_qkv(g, 3, generator)
    cache.attend(0, q, k, v)
    cache.attend(0, q[:, :2], k[:, :2], v[:, :2], tokens=torch.tensor([0, 1]))
    assert seen == [12]
