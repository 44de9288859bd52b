"""The transaction rule, snapshots, accounting and misuse of the cache."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import random_qkv, run_chunk
from torch import Tensor

from streamvid.memory.cache import KVCache
from streamvid.memory.geometry import KVGeometry

NAN = float("nan")
G = KVGeometry(layers=2, heads=2, head_dim=8, grid=(2, 2))
POLICIES = ["full", "window:size=6", "window:size=7,sink=2", "window:size=7,sink=1,positions=slot"]


def noisy_pass(cache: KVCache, generator: torch.Generator, layers: int | None = None) -> None:
    assert cache.chunk is not None
    for layer in range(cache.geometry.layers if layers is None else layers):
        cache.attend(layer, *random_qkv(cache.geometry, cache.chunk.count, generator))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def warm(policy: str, chunks: int = 3, **extra) -> tuple[KVCache, torch.Generator]:
    cache, generator = KVCache(G, policy, fill=NAN, **extra), torch.Generator().manual_seed(0)
    for _ in range(chunks):
        run_chunk(cache, 3, generator)
    return cache, generator


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("extra", [{}, {"shadow": True}, {"retain": True}])
def test_abort_at_any_point_leaves_the_committed_state(policy, extra):
    cache, generator = warm(policy, **extra)
    before = cache.state_dict()
    for passes, context in ((0, None), (1, None), (3, None), (2, 0), (2, 1), (2, 2)):
        cache.begin_chunk(3)
        for _ in range(passes):
            noisy_pass(cache, generator)
        if context is not None:
            cache.begin_context()
            noisy_pass(cache, generator, layers=context)
        cache.abort()
        assert same(before, cache.state_dict())
    after = []
    for _ in range(2):  # what follows an abort is what would have followed without it
        cache.load_state_dict(before)
        run_chunk(cache, 3, torch.Generator().manual_seed(7))
        after.append(cache.state_dict())
    assert same(*after)


@settings(max_examples=15, deadline=None)
@given(policy=st.sampled_from(POLICIES), passes=st.integers(0, 4), shadow=st.booleans())
def test_noisy_passes_are_idempotent(policy, passes, shadow):
    results = []
    for count in (passes, passes + 1):
        cache, _ = warm(policy, shadow=shadow)
        cache.begin_chunk(3)
        for i in range(count):
            noisy_pass(cache, torch.Generator().manual_seed(i))
        cache.begin_context()
        noisy_pass(cache, torch.Generator().manual_seed(99))
        cache.commit()
        results.append(cache.state_dict())
    assert same(*results)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("extra", [{}, {"shadow": True}, {"retain": True}])
def test_a_snapshot_continues_bit_for_bit(policy, extra):
    cache, generator = warm(policy, chunks=4, **extra)
    state, dice = {k: v.clone() for k, v in cache.state_dict().items()}, generator.get_state()
    outputs = []
    for target in (cache, KVCache(G, policy, fill=NAN, **extra)):
        generator.set_state(dice)
        target.load_state_dict(state)
        for _ in range(3):
            run_chunk(target, 3, generator)
        target.begin_chunk(3)
        outputs.append(target.attend(1, *random_qkv(G, 3, generator)))
    assert torch.equal(*outputs)


def test_a_snapshot_of_another_cache_is_refused():
    cache, _ = warm("window:size=6")
    with pytest.raises(ValueError, match="policy is"):
        KVCache(G, "window:size=7").load_state_dict(cache.state_dict())
    with pytest.raises(ValueError, match="no 'meta'"):
        cache.load_state_dict({})


def reachable_bytes(root: object) -> int:
    """Bytes of the distinct storages reachable from an object."""
    seen, storages, todo = set(), {}, [root]
    while todo:
        item = todo.pop()
        if (
            id(item) in seen
            or isinstance(item, (type, str, bytes))
            or type(item).__module__ == "builtins_module"
        ):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, (dict, list, tuple, set)) or type(item).__module__.startswith("streamvid"):
            todo += gc.get_referents(item)
    return sum(storages.values())


@pytest.mark.parametrize("policy", POLICIES[1:])
@pytest.mark.parametrize("extra", [{}, {"shadow": True}, {"retain": True}])
def test_bytes_are_reported_and_bounded(policy, extra):
    g = KVGeometry(layers=3, heads=2, head_dim=32, grid=(8, 8))
    cache, generator = KVCache(g, policy, fill=NAN, **extra), torch.Generator().manual_seed(0)
    totals = []
    for chunk in range(60):
        run_chunk(cache, 3, generator)
        totals.append(cache.report().total)
        if chunk in (0, 3, 59):
            cache.begin_chunk(3)
            noisy_pass(cache, generator)
            assert cache.report().total == pytest.approx(reachable_bytes(cache), rel=0.02)
            cache.abort()
    assert len(set(totals[20:])) == 1
    report = cache.report()
    assert report.peak >= report.total and report.peak == pytest.approx(report.total, rel=0.25)
    frames = int(policy.split("size=")[1].split(",")[0])
    spare = 3 if "retain" in extra else 0
    slots = g.layers * g.frame_bytes() * (frames + spare)
    assert report.stored - report.rotated == slots


def test_reset_starts_again_in_the_same_storage():
    cache, _ = warm("window:size=6,sink=1", chunks=5)
    first, _ = warm("window:size=6,sink=1", chunks=2)
    storage = cache.banks[0][0].k.data_ptr()
    cache.reset()
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        run_chunk(cache, 3, generator)
    assert cache.banks[0][0].k.data_ptr() == storage
    assert same(first.state_dict(), cache.state_dict())


def test_misuse_is_refused_in_one_sentence():
    cache = KVCache(G, "window:size=6")
    qkv = random_qkv(G, 3, torch.Generator())
    with pytest.raises(ValueError, match="call begin_chunk first"):
        cache.attend(0, *qkv)
    cache.begin_chunk(3)
    with pytest.raises(ValueError, match="complete context pass"):
        cache.commit()
    with pytest.raises(ValueError, match="call begin_context first"):
        cache.write(0, *qkv[1:])
    with pytest.raises(ValueError, match="commit or abort first"):
        cache.begin_chunk(3)
    cache.begin_context()
    cache.attend(0, *qkv)
    with pytest.raises(ValueError, match=r"layers \[1\] were not written"):
        cache.commit()
    with pytest.raises(ValueError, match="at least sink"):
        KVCache(G, "window:size=4,sink=2")
    with pytest.raises(ValueError, match="did you mean 'sink'"):
        KVCache(G, "window:sinks=2")
    with pytest.raises(ValueError, match="only used with positions=unified"):
        KVCache(G, "window:newest=12")
    with pytest.raises(ValueError, match="newest"):
        KVCache(G, "window:size=22,positions=unified")
