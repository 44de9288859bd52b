"""Every kernel through the cache: Triton equals SDPA, packed history is read as stored, sparse maps serve a chunk."""

import pytest
import torch
from kernel_cases import NO_KERNELS

from streamvid.kernels.selectors import TopK
from streamvid.memory.cache import KVCache
from streamvid.memory.geometry import KVGeometry
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
