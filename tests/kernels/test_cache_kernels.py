"""Every kernel through the cache: Triton equals SDPA, packed history is read as stored, sparse maps serve a chunk."""

import pytest
import torch
from kernel_cases import NO_KERNELS

from streamvid.kernels.selectors import TopK
from streamvid.memory.cache import KVCache
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.sparse import CARRIED, by_age, kept_blocks
from streamvid.memory.view import View
from streamvid.transformer import CausalWan

triton_only = pytest.mark.skipif(bool(NO_KERNELS), reason=NO_KERNELS)
GEOMETRY = KVGeometry(layers=1, heads=2, head_dim=8, grid=(2, 4))
SIZE = 8  # tokens a frame


def run(chunks=3, frames=2, passes=2, seed=0, codec=None, **settings):
    """Attention outputs of a stream of random queries, keys and values."""
    generator = torch.Generator().manual_seed(seed)
    cache = KVCache(
        GEOMETRY, settings.pop("policy", "window:size=6,sink=1"), codec, chunk_frames=frames, **settings
    )
    outs = []
    for _ in range(chunks):
        cache.begin_chunk(frames)
        for step in range(passes + 1):
            if step == passes:
                cache.begin_context()
            for layer in range(GEOMETRY.layers):
                q, k, v = torch.randn(3, 1, frames * SIZE, 2, 8, generator=generator)
                outs.append(cache.attend(layer, q, k, v))
        cache.commit()
    return torch.stack(outs), cache


@triton_only
@pytest.mark.parametrize("settings", [{}, {"codec": "int4"}, {"codec": "int8:asym=true,group=8"}])
def test_triton_equals_sdpa_with_and_without_a_codec(settings):
    plain, _ = run(passes=1, **settings)
    kernel, _ = run(passes=1, backend="triton", **settings)
    torch.testing.assert_close(kernel, plain, atol=5e-6, rtol=1e-5)


@triton_only
def test_triton_does_not_unpack_the_history(monkeypatch):
    filled = []
    fill = View.fill
    monkeypatch.setattr(View, "fill", lambda *a: filled.append(a[0].committed) or fill(*a))
    run(passes=1, codec="int4", backend="triton")
    assert set(filled) == {0}  # only the first chunk, which has no history


@pytest.mark.parametrize("backend", ["sdpa", pytest.param("triton", marks=triton_only)])
def test_a_full_map_changes_nothing(backend):
    plain, _ = run(passes=1)
    mapped, _ = run(passes=1, sparse="topk:density=1,cube=1+2+4", backend=backend)
    torch.testing.assert_close(mapped, plain, atol=5e-6, rtol=1e-5)


@triton_only
def test_triton_and_gathering_agree_on_a_sparse_map():
    spec = "topk:density=0.4,cube=1+2+2"
    gathered, _ = run(passes=1, sparse=spec)
    kernel, _ = run(passes=1, sparse=spec, backend="triton")
    torch.testing.assert_close(kernel, gathered, atol=5e-6, rtol=1e-5)


def test_a_map_is_chosen_once_a_chunk_and_layer_and_counted(monkeypatch):
    calls = []
    choose = TopK.choose
    monkeypatch.setattr(TopK, "choose", lambda *a: calls.append(1) or choose(*a))
    out, cache = run(chunks=4, passes=3, sparse="topk:density=0.3,cube=1+2+4")
    assert len(calls) == 3 * GEOMETRY.layers  # the first chunk has no history
    plain, dense = run(chunks=4, passes=3)
    assert torch.equal(out[:4], plain[:4]) and not torch.allclose(out, plain, atol=1e-3)
    assert cache.report().total == dense.report().total and cache.report().peak > dense.report().peak


@pytest.mark.parametrize("policy", ["memrope", "tempcache"])
def test_sparse_works_with_head_groups_and_chosen_and_merged_tokens(policy):
    out, _ = run(policy=policy, chunks=5, passes=1, sparse="mass:mass=0.9,loose=8")
    assert torch.isfinite(out).all()


def test_an_aborted_chunk_leaves_no_map():
    _, cache = run(chunks=2, passes=1, sparse="topk")
    cache.begin_chunk(2)
    q = torch.randn(1, 2 * SIZE, 2, 8)
    cache.attend(0, q, q, q)
    assert list(cache.sparse.tensors())
    cache.abort()
    assert not list(cache.sparse.tensors())


@triton_only
def test_the_small_model_gives_the_same_flow_with_triton(tiny_random_model):
    net = CausalWan(tiny_random_model)
    torch.manual_seed(0)
    prompt = net.prepare_prompt(torch.randn(1, 8, net.geometry.text_dim))
    latents = torch.randn(2, 1, 3, net.geometry.out_channels, 8, 8)
    flows = []
    for backend in ("sdpa", "triton"):
        cache = KVCache(net.geometry.kv(1, 8, 8), "window:size=9,sink=3", chunk_frames=3, backend=backend)
        cache.begin_chunk(3)
        net.context_pass(latents[0], 0.0, prompt, cache)
        cache.commit()
        cache.begin_chunk(3)
        flows.append(net(latents[1], 750.0, prompt, cache))
    torch.testing.assert_close(flows[1], flows[0], atol=1e-5, rtol=1e-5)


def test_a_carried_map_is_the_one_chosen_before_by_age(monkeypatch):
    """Once the window is full: chosen every third chunk, and in between the same blocks by region and age."""
    chosen = []
    choose = TopK.choose
    monkeypatch.setattr(TopK, "choose", lambda *a: chosen.append(1) or choose(*a))
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(GEOMETRY, "window:size=8,sink=2", sparse="topk:density=0.8,cube=1+2+2,refresh=3")
    masks = []
    for chunk in range(12):
        cache.begin_chunk(2)
        for stage in ("noisy", "context"):
            if stage == "context":
                cache.begin_context()
            for layer in range(GEOMETRY.layers):
                cache.attend(layer, *torch.randn(3, 1, 2 * SIZE, 2, 8, generator=generator))
        map_ = cache.sparse._maps.get((0, 0))
        if chunk >= 3:
            blocks = cache.sparse._blockings[0, 0]
            masks.append(kept_blocks(map_)[..., by_age(blocks)[0]])
            assert torch.equal(map_.counts, torch.full_like(map_.counts, map_.counts[0, 0, 0].item()))
        cache.commit()
    same = [torch.equal(a, b) for a, b in zip(masks, masks[1:], strict=False)]
    # Chunks 3 to 11; those that 3 divides choose anew, the first pair of them while the window is still filling.
    assert same == [True, True, False, True, True, False, True, True]
    assert len(chosen) == GEOMETRY.layers * 5  # chunks 1 and 2, whose windows still grow, and 3, 6, 9


def test_carried_maps_survive_a_snapshot_and_not_a_change_of_the_past():
    def go(cache, chunks):
        outs = []
        for chunk in chunks:
            generator = torch.Generator().manual_seed(chunk)
            cache.begin_chunk(2)
            for context in (False, True):
                if context:
                    cache.begin_context()
                for layer in range(GEOMETRY.layers):
                    outs.append(cache.attend(layer, *torch.randn(3, 1, 2 * SIZE, 2, 8, generator=generator)))
            cache.commit()
        return outs

    settings = {"sparse": "topk:density=0.3,cube=1+2+2,refresh=5"}
    cache, other = (KVCache(GEOMETRY, "window:size=8,sink=2", **settings) for _ in range(2))
    go(cache, range(6))
    assert CARRIED in cache.banks[0][0].state
    other.load_state_dict(cache.state_dict())
    assert all(map(torch.equal, go(cache, range(6, 9)), go(other, range(6, 9))))
    cache.begin_chunk(2)
    cache.abort()
    assert CARRIED in cache.banks[0][0].state
    cache.prompt_changed({"old": None, "new": None, "rho": 0.0})
    assert CARRIED not in cache.banks[0][0].state
    full = [
        KVCache(GEOMETRY, "window:size=8,sink=2", **extra)
        for extra in ({"sparse": "topk:density=1,refresh=4"}, {})
    ]
    for a, b in zip(*(go(cache, range(9)) for cache in full), strict=True):
        torch.testing.assert_close(a, b, atol=5e-6, rtol=1e-5)
