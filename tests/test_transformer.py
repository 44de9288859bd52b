"""The causal driver: one block-causal pass, image models, per-frame timesteps, fused passes, subsets, hooks."""

from __future__ import annotations

import pytest
import tiny_random
import torch
import torch.nn.functional as F
from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.kernels.rope import rope_table, rotate
from streamvid.memory.cache import KVCache
from streamvid.modulation import TimeTables, sinusoid
from streamvid.transformer import CausalWan

NAN = float("nan")
SIZE = (8, 8)


class BlockCausal:
    """Stands in for a cache: one pass over all chunks, each attending to itself and the ones before."""

    def __init__(self, frames: int, chunk: int, grid: tuple[int, int], head_dim: int) -> None:
        t, y, x = torch.meshgrid(*(torch.arange(n) for n in (frames, *grid)), indexing="ij")
        at = torch.stack([t, y, x], -1).reshape(-1, 3)
        self.table = rope_table(at, head_dim, torch.complex128)[:, None]
        block = at[:, 0] // chunk
        self.mask = block[:, None] >= block[None, :]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = rotate(q, self.table), rotate(k, self.table)
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=self.mask)
        return out.transpose(1, 2)


@pytest.fixture(scope="module")
def net(tiny_random_model):
    return CausalWan(tiny_random_model)


def latents(net: CausalWan, frames: int, seed: int = 0, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, frames, net.geometry.out_channels, *SIZE, generator=generator)


def text(net: CausalWan, seed: int = 9, batch: int = 1) -> Tensor:
    return torch.randn(batch, 8, net.geometry.text_dim, generator=torch.Generator().manual_seed(seed))


def run_context(net: CausalWan, cache: KVCache, prompt, x0: Tensor) -> None:
    cache.begin_chunk(x0.shape[1])
    net.context_pass(x0, 0.0, prompt, cache)
    cache.commit()


@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize("extra", [{}, {"shadow": True}])
def test_chunk_by_chunk_equals_one_block_causal_pass(net, chunk, extra):
    x, prompt = latents(net, 6, batch=2), net.prepare_prompt(text(net))
    whole = net(x, 0.0, prompt, BlockCausal(6, chunk, net.geometry.grid(*SIZE), net.geometry.head_dim))
    cache = KVCache(net.geometry.kv(2, *SIZE), "full", chunk_frames=chunk, fill=NAN, **extra)
    parts = []
    for part in x.split(chunk, dim=1):
        cache.begin_chunk(chunk)
        parts.append(net(part, 0.0, prompt, cache))
        net.context_pass(part, 0.0, prompt, cache)
        cache.commit()
    deviation = (torch.cat(parts, 1) - whole).norm() / whole.norm()
    assert deviation < 1e-5


@pytest.mark.parametrize("policy", ["full", "window:size=7,sink=1", "window:size=6,positions=slot"])
@pytest.mark.parametrize("extra", [{}, {"shadow": True}, {"retain": True}])
def test_a_fused_pass_equals_the_passes_one_by_one(net, policy, extra):
    prompt = net.prepare_prompt(text(net))
    caches = [KVCache(net.geometry.kv(1, *SIZE), policy, fill=NAN, **extra) for _ in range(2)]
    clean, noisy = latents(net, 15, 1).split(3, dim=1), latents(net, 15, 2).split(3, dim=1)
    flows = []
    for cache, fuse in zip(caches, (False, True), strict=True):
        cache.begin_chunk(3)
        net(noisy[0], 900.0, prompt, cache)
        got = []
        for i in range(4):
            if fuse:
                got.append(net.fused_pass(clean[i], 0.0, noisy[i + 1], 900.0, prompt, cache))
            else:
                net.context_pass(clean[i], 0.0, prompt, cache)
                cache.commit()
                cache.begin_chunk(3)
                got.append(net(noisy[i + 1], 900.0, prompt, cache))
            got.append(net(noisy[i + 1], 500.0, prompt, cache))
        cache.abort()
        flows.append(torch.cat(got))
    assert (flows[0] - flows[1]).abs().max() < 1e-5 * flows[0].abs().max()
    plain, fused = (cache.state_dict() for cache in caches)
    assert plain.keys() == fused.keys()
    assert all(torch.allclose(plain[key].float(), fused[key].float(), atol=1e-5) for key in plain)


def test_a_fused_pass_that_fails_leaves_the_history(net, monkeypatch):
    prompt = net.prepare_prompt(text(net))
    cache = KVCache(net.geometry.kv(1, *SIZE), "window:size=6", fill=NAN)
    for part in latents(net, 9).split(3, dim=1):
        run_context(net, cache, prompt, part)
    before = cache.state_dict()
    cache.begin_chunk(3)
    monkeypatch.setattr(net, "_after_attention", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        net.fused_pass(latents(net, 3), 0.0, latents(net, 3, 5), 900.0, prompt, cache)
    cache.abort()
    after = cache.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_per_frame_timesteps_are_those_of_each_frame(net):
    prompt = net.prepare_prompt(text(net))
    x = latents(net, 3, batch=2)
    cache = KVCache(net.geometry.kv(2, *SIZE), "full", fill=NAN)
    cache.begin_chunk(3)
    one = net(x, 700.0, prompt, cache)
    for same in (torch.tensor(700.0), torch.full((3,), 700.0), torch.full((2, 3), 700.0), [700.0] * 3):
        assert torch.allclose(net(x, same, prompt, cache), one, atol=1e-6)
    mixed = net(x, torch.tensor([[700.0, 300.0, 0.0], [700.0, 700.0, 700.0]]), prompt, cache)
    assert torch.allclose(mixed[1], one[1], atol=1e-6)
    assert (mixed[0] - one[0]).abs().max() > 1e-3
    with pytest.raises(StreamvidError, match=r"timestep has shape \(2,\)"):
        net(x, torch.tensor([1.0, 2.0]), prompt, cache)


def test_modulation_is_computed_once_a_value(net, monkeypatch):
    tables = TimeTables(net.model, keep=2)
    calls = []
    compute = TimeTables._compute
    monkeypatch.setattr(TimeTables, "_compute", lambda self, *a: calls.append(1) or compute(self, *a))
    for t in (1000.0, 500.0, 1000.0, [1000.0, 1000.0, 1000.0], torch.full((1, 3), 500.0)):
        tables(t, 1, 3, torch.float32, torch.device("cpu"))
    assert len(calls) == 2
    table = tables([1.0, 2.0, 3.0], 1, 3, torch.float32, torch.device("cpu"))
    assert table.blocks[0][0].shape == (1, 3, 1, net.geometry.dim)
    expected = torch.cat(
        [torch.cos(torch.tensor([833.3333129882812])), torch.sin(torch.tensor([833.3333129882812]))]
    )
    assert torch.allclose(sinusoid(torch.tensor(833.3333129882812), 32)[[0, 16]].float(), expected, atol=1e-4)


def test_image_to_video_models_take_their_condition_and_image():
    model = tiny_random.random_transformer(in_channels=9, out_channels=4, image_dim=12, added_kv_proj_dim=32)
    net = CausalWan(model)
    prompt = net.prepare_prompt(text(net), torch.randn(1, 5, 12, generator=torch.Generator().manual_seed(1)))
    x, condition = latents(net, 3), torch.randn(1, 3, 5, *SIZE, generator=torch.Generator().manual_seed(2))
    cache = KVCache(net.geometry.kv(1, *SIZE), "full", fill=NAN)
    cache.begin_chunk(3)
    ours = net(x, 500.0, prompt, cache, condition=condition)
    # diffusers' own forward takes exactly 512 text rows here; our text is repeated zeros beyond its 8 rows.
    full = torch.zeros(1, 512, net.geometry.text_dim)
    full[:, :8] = text(net)
    prompt = net.prepare_prompt(full, torch.randn(1, 5, 12, generator=torch.Generator().manual_seed(1)))
    ours = net(x, 500.0, prompt, cache, condition=condition)
    theirs = model(
        torch.cat([x, condition], 2).transpose(1, 2),
        torch.tensor([500.0]),
        full,
        torch.randn(1, 5, 12, generator=torch.Generator().manual_seed(1)),
    ).sample.transpose(1, 2)
    assert (ours - theirs).abs().max() < 2e-4  # the model's own sinusoid is float32
    with pytest.raises(StreamvidError, match="condition of 5"):
        net(x, 500.0, prompt, cache)
    with pytest.raises(StreamvidError, match="needs image embeddings"):
        net.prepare_prompt(full)


def test_wrong_inputs_are_named(net, tiny_random_model):
    with pytest.raises(StreamvidError, match="takes no image"):
        net.prepare_prompt(text(net), torch.zeros(1, 5, 12))
    with pytest.raises(StreamvidError, match="text embeddings must be"):
        net.prepare_prompt(torch.zeros(1, 8, 3))
    with pytest.raises(StreamvidError, match="latent height 7 is not a multiple.*use 6 or 8"):
        net.geometry.grid(7, 8)


def test_token_subsets(net):
    prompt = net.prepare_prompt(text(net))
    cache = KVCache(net.geometry.kv(1, *SIZE), "window:size=6", fill=NAN)
    run_context(net, cache, prompt, latents(net, 3, 1))
    cache.begin_chunk(3)
    x = latents(net, 3, 2)
    times = torch.tensor([500.0, 400.0, 300.0])
    full = net(x, times, prompt, cache)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(net(x, times, prompt, cache, tokens=order), full, atol=1e-5)
    some = net(x, times, prompt, cache, tokens=torch.tensor([0, 20, 47]))
    chosen = torch.zeros(1, 3, 1, *SIZE, dtype=torch.bool)
    chosen[0, 0, 0, :2, :2] = chosen[0, 1, 0, 2:4, :2] = chosen[0, 2, 0, 6:, 6:] = True  # tokens 0, 20 and 47
    chosen = chosen.expand_as(full)
    assert torch.allclose(some[chosen], full[chosen], atol=1e-5)
    assert (some[~chosen] == 0).all()


class Replay:
    """A step cache that records module outputs once and then returns them."""

    def __init__(self, blocks: bool) -> None:
        self.blocks, self.kept, self.skipped = blocks, {}, 0

    def before_block(self, layer, h):
        self.skipped += self.blocks and layer in self.kept
        return self.kept.get(layer) if self.blocks else None

    def after_block(self, layer, h_in, h_out):
        if self.blocks:
            self.kept[layer] = h_out
        return

    def before_module(self, layer, name):
        self.skipped += not self.blocks and (layer, name) in self.kept
        return None if self.blocks else self.kept.get((layer, name))

    def after_module(self, layer, name, out):
        if not self.blocks:
            self.kept[layer, name] = out
        return


@pytest.mark.parametrize("blocks", [True, False])
def test_hooks_replace_blocks_and_modules(net, blocks):
    prompt = net.prepare_prompt(text(net))
    cache = KVCache(net.geometry.kv(1, *SIZE), "full", fill=NAN)
    cache.begin_chunk(3)
    x, hooks = latents(net, 3), Replay(blocks)
    plain = net(x, 500.0, prompt, cache)
    assert torch.equal(net(x, 500.0, prompt, cache, hooks=hooks), plain)
    assert torch.equal(net(x, 500.0, prompt, cache, hooks=hooks), plain)
    assert hooks.skipped == (2 if blocks else 6)


def test_the_context_pass_writes_what_a_full_pass_would(net):
    prompt = net.prepare_prompt(text(net))
    states = []
    for skip in (True, False):
        cache = KVCache(net.geometry.kv(1, *SIZE), "full", fill=NAN)
        cache.begin_chunk(3)
        if skip:
            net.context_pass(latents(net, 3), 0.0, prompt, cache)
        else:
            cache.begin_context()
            net(latents(net, 3), 0.0, prompt, cache)
        cache.commit()
        states.append(cache.state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_fused_projections_give_the_same(net):
    model = tiny_random.random_transformer()
    for block in model.blocks:
        block.attn1.fuse_projections()
        block.attn2.fuse_projections()
    other = CausalWan(model)
    outs = []
    for runner in (net, other):
        prompt = runner.prepare_prompt(text(net))
        cache = KVCache(net.geometry.kv(1, *SIZE), "full", fill=NAN)
        cache.begin_chunk(3)
        outs.append(runner(latents(net, 3), 500.0, prompt, cache))
    assert torch.allclose(*outs, atol=1e-5)


def test_changed_weights_are_seen_when_told():
    net = CausalWan(tiny_random.random_transformer())
    prompt = net.prepare_prompt(text(net))
    cache = KVCache(net.geometry.kv(1, *SIZE), "full", fill=NAN)
    cache.begin_chunk(3)
    before = net(latents(net, 3), 500.0, prompt, cache)
    net.model.condition_embedder.time_embedder.linear_2.weight.mul_(0.5)
    net.weights_changed()
    assert (net(latents(net, 3), 500.0, prompt, cache) - before).abs().max() > 1e-3
