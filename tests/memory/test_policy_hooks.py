"""The hooks carry what the literature needs: head groups, token selection, merging with counts, side tokens, biases."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from oracle import Oracle, attention, positions, random_qkv, run_chunk, windowed

from streamvid.kernels.rope import rope_table, rotate
from streamvid.memory.cache import KVCache
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.policies import POLICIES
from streamvid.memory.policy import MemoryPolicy, Plan
from streamvid.memory.rope import absolute

NAN = float("nan")
G = KVGeometry(layers=2, heads=4, head_dim=12, grid=(2, 3), batch=2)


@dataclass(kw_only=True)
class TwoGroups(MemoryPolicy):
    """Heads 0 and 2 see 4 frames, the others 8: real memory of each group, different lengths."""

    def groups(self, geometry):
        return [[[0, 2], [3, 1]]] * geometry.layers

    def capacity(self, geometry, layer, group, chunk_frames):
        return (4, 8)[group]

    def plan(self, bank, chunk):
        visible = bank.newest((4, 8)[bank.group] - chunk.count)
        return Plan(visible, *absolute(visible, chunk))

    def commit(self, bank, chunk):
        bank.keep(bank.newest((4, 8)[bank.group] - chunk.next_count))


@pytest.mark.parametrize("extra", [{}, {"shadow": True}, {"retain": True}])
def test_head_groups_of_different_lengths(extra):
    cache = KVCache(G, TwoGroups(), fill=NAN, **extra)
    oracles = [Oracle(G, windowed(4, 0)), Oracle(G, windowed(8, 0))]
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        first = cache.begin_chunk(3).start
        cache.begin_context()
        for layer in range(G.layers):
            q, k, v = random_qkv(G, 3, generator)
            out = cache.attend(layer, q, k, v)
            short, long = (oracle.attend(layer, first, q, k, v) for oracle in oracles)
            expected = torch.stack([(short, long)[head in (1, 3)][:, :, head] for head in range(4)], dim=2)
            assert (out - expected).abs().max() < 5e-6
            for oracle in oracles:
                oracle.commit(layer, first, k, v)
        cache.commit()
    if not extra:
        assert cache.report().stored == G.layers * (G.frame_bytes(2) * 4 + G.frame_bytes(2) * 8)


@dataclass(kw_only=True)
class LoudTokens(MemoryPolicy):
    """Keep, per batch item, the half of all past tokens with the largest values; decided in the first noisy pass."""

    by_head: bool = False

    def refine(self, bank, plan, seen):
        if not plan.visible:
            return None
        v = torch.cat([bank.read(entry)[1] for entry in plan.visible], dim=1)
        score = v.norm(dim=-1) if self.by_head else v.flatten(2).norm(dim=-1)
        count = v.shape[1] // 2
        index = score.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values
        return Plan(plan.visible, plan.t, plan.query_t, select=index)


@pytest.mark.parametrize("by_head", [False, True])
def test_token_selection_differs_by_item_and_head(by_head):
    cache = KVCache(G, LoudTokens(by_head=by_head), fill=NAN)
    generator = torch.Generator().manual_seed(1)
    history = []
    for chunk in range(4):
        cache.begin_chunk(3)
        q, k, v = random_qkv(G, 3, generator)
        for _ in range(2):
            out = cache.attend(0, q, k, v)
        table = rope_table(positions([3.0 * chunk + i for i in range(3)], G.grid), 12, torch.complex128)[
            :, None
        ]
        now = rotate(k.double(), table)
        if history:
            old_k, old_v = (torch.cat(x, dim=1) for x in zip(*history, strict=True))
            for b in range(G.batch):
                for h in range(G.heads):
                    loud = old_v[b, :, h].norm(dim=-1) if by_head else old_v[b].flatten(1).norm(dim=-1)
                    keep = loud.sort(descending=True, stable=True).indices[: len(loud) // 2]
                    expected = attention(
                        rotate(q.double(), table)[b : b + 1, :, h : h + 1],
                        torch.cat([old_k[b, keep, h], now[b, :, h]])[None, :, None],
                        torch.cat([old_v[b, keep, h].double(), v[b, :, h].double()])[None, :, None],
                    )
                    assert (out[b : b + 1, :, h : h + 1] - expected).abs().max() < 5e-6
        cache.begin_context()
        cache.attend(0, q, k, v)
        cache.write(1, k, v)
        cache.commit()
        history.append((now, v))


@dataclass(kw_only=True)
class Summaries(MemoryPolicy):
    """After two chunks: the two oldest frames merged pairwise with counts, and one token without RoPE."""

    def commit(self, bank, chunk):
        if chunk.index != 1:
            return
        a, b = bank.entries[0], bank.entries[1]
        (ka, va), (kb, vb) = bank.read(a), bank.read(b)
        at = positions([0.5], bank.geometry.grid)[None, :, None].float()
        count = torch.full((1, a.length, 1), 2.0)
        k, v = (ka + kb) / 2, (va + vb) / 2
        bank.drop([a, b])
        bank.add(k, v, region="memory", t=(0.0,), frames=(0, 1), positions=at, count=count, at=0)
        bank.add(k[:, :1].clone(), v[:, :1].clone(), region="side", t=(), rope=False)


def test_merged_counts_fractional_positions_and_unrotated_tokens():
    cache = KVCache(G, Summaries(), fill=NAN)
    generator = torch.Generator().manual_seed(2)
    chunks = []
    for _ in range(2):
        state = generator.get_state()
        run_chunk(cache, 3, generator)
        generator.set_state(state)
        drawn = [random_qkv(G, 3, generator) for _ in range(4)]
        chunks.append(drawn[2])  # layer 0 of the context pass
    cache.begin_chunk(3)
    q, k, v = random_qkv(G, 3, generator)
    out = cache.attend(0, q, k, v)
    size = G.tokens_per_frame
    old_k, old_v = torch.cat([c[1] for c in chunks], 1), torch.cat([c[2] for c in chunks], 1)
    merged_k, merged_v = ((x[:, :size] + x[:, size : 2 * size]) / 2 for x in (old_k, old_v))
    turn = lambda x, times: rotate(
        x.double(), rope_table(positions(times, G.grid), 12, torch.complex128)[:, None]
    )
    keys = torch.cat(
        [
            turn(merged_k, [0.5]),
            turn(old_k[:, 2 * size :], [2.0, 3, 4, 5]),
            merged_k[:, :1].double(),
            turn(k, [6.0, 7, 8]),
        ],
        dim=1,
    )
    values = torch.cat([merged_v, old_v[:, 2 * size :], merged_v[:, :1], v], dim=1)
    bias = torch.zeros(keys.shape[1], dtype=torch.float64)
    bias[:size] = torch.tensor(2.0, dtype=torch.float64).log()
    assert (out - attention(turn(q, [6.0, 7, 8]), keys, values, bias)).abs().max() < 5e-6
    state = cache
    state.abort()
    again = KVCache(G, Summaries(), fill=NAN)
    again.load_state_dict(cache.state_dict())
    again.begin_chunk(3)
    assert torch.equal(again.attend(0, q, k, v), out)


@dataclass(kw_only=True)
class Quiet(MemoryPolicy):
    """Past keys weigh half (a constant logit bias)."""

    def plan(self, bank, chunk):
        plan = super().plan(bank, chunk)
        plan.bias = [float(torch.tensor(0.5).log())] * len(plan.visible)
        return plan


def test_a_bias_on_past_keys_and_observed_queries():
    seen_passes = []

    class Watching(Quiet):
        def observe(self, bank, seen):
            seen_passes.append((bank.layer, seen.stage, seen.passes))
            keys, _ = seen.view()
            bank.notes["logit"] = (seen.rotate_q().mean(1, keepdim=True) * keys.mean(1, keepdim=True)).sum()

        def commit(self, bank, chunk):
            bank.state["logit"] = bank.notes["logit"]

    cache = KVCache(G, Watching(), fill=NAN)
    oracle = Oracle(G, windowed(10**6, 0))
    generator = torch.Generator().manual_seed(3)
    cache_plain = KVCache(G, "full", fill=NAN)
    for _ in range(2):
        state = generator.get_state()
        run_chunk(cache, 3, generator)
        generator.set_state(state)
        run_chunk(cache_plain, 3, generator, oracle)
    assert seen_passes[:4] == [(0, "noisy", 0), (1, "noisy", 0), (0, "context", 1), (1, "context", 1)]
    assert cache.report().state > 0
    cache.begin_chunk(3)
    q, k, v = random_qkv(G, 3, generator)
    out = cache.attend(0, q, k, v)
    past = torch.cat([oracle.frames[0, f][0] for f in range(6)], 1)
    values = torch.cat([*(oracle.frames[0, f][1] for f in range(6)), v], 1)
    turn = lambda x, times: rotate(
        x.double(), rope_table(positions(times, G.grid), 12, torch.complex128)[:, None]
    )
    keys = torch.cat([turn(past, [float(f) for f in range(6)]), turn(k, [6.0, 7, 8])], 1)
    bias = torch.zeros(keys.shape[1], dtype=torch.float64)
    bias[: past.shape[1]] = torch.tensor(0.5, dtype=torch.float64).log()
    assert (out - attention(turn(q, [6.0, 7, 8]), keys, values, bias)).abs().max() < 5e-6


def test_the_table_lists_dataclasses_that_are_policies():
    assert all(issubclass(cls, MemoryPolicy) for cls in POLICIES.values())
