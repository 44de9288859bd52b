"""What every registered memory policy and codec must keep, beyond test_policies.py and test_codecs.py. A new plug-in
enters by being in its table. Which invariant is shown where: README.md in this folder."""

from __future__ import annotations

import copy

import pytest
import torch
from allocations import held_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_runs import NAN, draw, geometry, noisy, run, same_state
from torch import Tensor

from streamvid.kernels.reference import reference
from streamvid.memory.cache import KVCache
from streamvid.memory.codecs import CODECS, make_codec
from streamvid.memory.compat import refusal
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.plan import plan
from streamvid.memory.policies import POLICIES
from streamvid.recache import recache
from streamvid.transformer import CausalWan

every_policy = pytest.mark.parametrize("name", sorted(POLICIES))
every_codec = pytest.mark.parametrize("codec", sorted(CODECS))
SMALL = KVGeometry(layers=2, heads=2, head_dim=32, grid=(2, 4))
SEEN = {
    "mixed": "mixed:recent_frames=2,older=int4",
    "qvg": "qvg:span_frames=4",
    "offload": "offload:keep_frames=2",
}
"""Settings with which a short run sees the codec at work."""


def cache_of(name: str, batch: int = 1, **extra) -> KVCache:
    return KVCache(geometry(batch), name, fill=NAN, **extra)


def packed(codec: str, policy: str = "window:size=12,sink=1", **extra) -> KVCache:
    return KVCache(SMALL, policy, make_codec(SEEN.get(codec, codec)), **extra)


def turns(cache: KVCache, chunks: range) -> list[Tensor]:
    return [out for chunk in chunks for out in run(cache, range(chunk, chunk + 1))]


# ---- I1, I14: bytes ----------------------------------------------------------------------------------------------


@every_policy
def test_bytes_are_those_of_the_tensors_and_within_the_plan(name):
    cache = cache_of(name)
    frames = 0
    for chunks in (range(2), range(2, 9), range(9, 24)):
        run(cache, chunks)
        frames = 3 * chunks.stop
        assert cache.report().total == pytest.approx(held_bytes(cache), rel=0.02)
        planned = plan(geometry(), None, name, frames=frames)
        assert cache.report().peak <= 1.02 * planned.peak


@pytest.mark.slow
@every_policy
def test_five_hundred_chunks(name):
    cache = KVCache(KVGeometry(layers=1, heads=4, head_dim=12, grid=(2, 3)), name)
    if cache.policy.capacity(cache.geometry, 0, 0, 3) is None:
        pytest.skip("keeps everything")
    totals = set()
    for chunk in range(500):
        run(cache, range(chunk, chunk + 1))
        if chunk >= 40:
            totals.add(cache.report().total)
    assert len(totals) == 1


@every_codec
def test_packed_bytes_stay_flat_and_within_the_plan(codec):
    cache = packed(codec)
    totals = []
    for chunk in range(38):
        run(cache, range(chunk, chunk + 1))
        totals.append(cache.report().total)
    # Frames that wait for their span come and go in rounds of at most twelve chunks.
    assert max(totals[26:]) == max(totals[14:26])
    planned = plan(SMALL, None, "window:size=12,sink=1", SEEN.get(codec, codec))
    assert cache.report().peak <= 1.02 * planned.peak


# ---- I2, I3: nothing left out is the full cache ------------------------------------------------------------------


def test_the_codec_none_is_bit_for_bit_no_codec():
    for policy in ("full", "window:size=9,sink=1"):
        caches = KVCache(SMALL, policy), KVCache(SMALL, policy, make_codec("none"))
        assert all(map(torch.equal, *(turns(cache, range(6)) for cache in caches)))


@every_policy
def test_bfloat16_equals_float32_within_its_rounding(name):
    """The selection may differ where two scores are equal in bfloat16; before anything is left out nothing can."""
    g = KVGeometry(layers=2, heads=4, head_dim=12, grid=(2, 3), dtype=torch.bfloat16)
    narrow, wide = KVCache(g, name, fill=NAN), cache_of(name)
    for chunk in range(2):
        for cache in (narrow, wide):
            cache.begin_chunk(3)
            cache.begin_context()
        for layer in range(2):
            qkv = draw(geometry(), 10 * chunk + layer)
            out = narrow.attend(layer, *(x.bfloat16() for x in qkv))
            wanted = wide.attend(layer, *(x.bfloat16().float() for x in qkv))
            assert (out.float() - wanted).abs().max() < 2e-2 * wanted.abs().max()
        for cache in (narrow, wide):
            cache.commit()


# ---- I4: the chunk and the sink ----------------------------------------------------------------------------------


@every_policy
@settings(max_examples=6, deadline=None)
@given(chunks=st.sampled_from([1, 3, 9]), token=st.integers(0, 17), seed=st.integers(0, 99))
def test_every_query_sees_every_token_of_its_own_chunk(name, chunks, token, seed):
    cache = cache_of(name)
    run(cache, range(chunks))
    cache.begin_chunk(3)
    q, k, v = draw(geometry(), seed + 5000)
    plain = cache.attend(0, q, k, v)
    changed = v.clone()
    changed[:, token] += 1e6  # even a key of little weight shows
    assert ((cache.attend(0, q, k, changed) - plain).abs().amax(-1) > 0).all()


@every_policy
def test_a_sink_stays_the_same_frames_and_numbers(name):
    cache = cache_of(name)
    run(cache, range(5))
    sinks = [
        [(e.frames, *(x.clone() for x in bank.read(e))) for e in bank.entries if e.region == "sink"]
        for bank in cache.all_banks()
    ]
    run(cache, range(5, 20))
    for bank, before in zip(cache.all_banks(), sinks, strict=True):
        after = [(e.frames, *bank.read(e)) for e in bank.entries if e.region == "sink"]
        assert before or not after
        assert [a[0] for a in after[: len(before)]] == [
            b[0] for b in before
        ]  # a sink may still be filling up
        assert all(torch.equal(a[i], b[i]) for a, b in zip(after, before, strict=False) for i in (1, 2))


# ---- I5: one list of indices -------------------------------------------------------------------------------------


@every_policy
def test_positions_and_counts_move_with_their_tokens(name):
    """Values carry the place of their token: wherever a policy puts it, place and value still agree."""
    cache, g = cache_of(name), geometry()
    for chunk in range(16):
        start = cache.begin_chunk(3).start
        noisy(cache, chunk)
        cache.begin_context()
        for layer in range(g.layers):
            q, k, v = draw(g, 31 * chunk + layer)
            place = torch.cartesian_prod(
                torch.arange(start, start + 3.0),
                torch.arange(float(g.grid[0])),
                torch.arange(float(g.grid[1])),
            )
            v[..., :3] = place[None, :, None]
            cache.attend(layer, q, k, v)
        cache.commit()
    seen = 0
    for bank in cache.all_banks():
        for entry in bank.entries:
            v = bank.read(entry)[1]
            if entry.positions is None:
                if entry.frames and entry.region in ("sink", "recent") and entry.rope:
                    times = torch.tensor(entry.frames).repeat_interleave(g.tokens_per_frame)
                    assert torch.equal(v[0, :, 0, 0], times.float())
                    seen += 1
                continue
            positions = entry.positions.expand(*v.shape[:3], 3)
            single = torch.ones(v.shape[:3], dtype=torch.bool)
            if entry.count is not None:
                single = (entry.count == 1).expand(v.shape[:3])
            away = v[..., :3][single] - positions[single].float()
            # Times are kept relative to one frame of the entry; which one does not matter here.
            assert not single.any() or (away[:, 0] - away[0, 0]).abs().max() < 1e-4
            assert not single.any() or away[:, 1:].abs().max() < 1e-4
            seen += int(single.any())
    assert seen


# ---- I7, I26: positions ------------------------------------------------------------------------------------------


@every_policy
@pytest.mark.parametrize("start", [1030, 5_000_000])
def test_a_stream_far_from_its_beginning_still_works(name, start):
    """Rotations stay in the table (1024 rows) however far the stream is, and answers are those of a young stream
    where positions are relative."""
    cache = cache_of(name)
    cache.next_frame = start
    outputs = run(cache, range(12))
    assert all(torch.isfinite(out).all() for out in outputs)
    cache.begin_chunk(3)
    for view in cache.views.values():
        times = [t - view.base for piece in view.pieces for t in piece.times]
        assert all(0 <= t < 1024 for t in times), (min(times), max(times))


BEYOND = {
    **dict.fromkeys(("full", "kv_bias", "forcing_kv", "swift"), "the past, or the sink, at its own time"),
    **dict.fromkeys(
        ("tempcache", "tar_van", "tri_attention", "soft_prune"), "tokens keep the time they came from"
    ),
    "deep_forcing": "selected tokens keep their time while the sink moves along, as published",
    "pyramid": "periodic heads read at published multiples of the period",
}
"""Policies that show keys further away than the 20 latent frames Self-Forcing models were trained on, and why."""


@every_policy
def test_keys_are_no_further_away_than_trained_unless_listed(name):
    cache, most = cache_of(name), 0.0
    for chunk in range(30):
        run(cache, range(chunk, chunk + 1))
        cache.begin_chunk(3)
        for view in cache.views.values():
            times = []
            for entry, t in zip(view.plan.visible, view.plan.t, strict=True):
                if entry.rope and entry.positions is not None:
                    times += (t[0] + entry.positions[..., 0]).flatten().tolist()
                elif entry.rope:
                    times += t
            assert max(times) <= max(view.plan.query_t), "no key is ahead of the queries"
            most = max(most, max(view.plan.query_t) - min(times))
        cache.abort()
    assert (most > 20) == (name in BEYOND), most


def test_the_sink_of_deep_forcing_moves_by_one_turn_from_where_it_was_stored():
    """Two shifts are their sum because none is ever applied to stored keys: only the planned times change."""
    cache = cache_of("deep_forcing")
    bases = []
    for chunk in range(20):
        run(cache, range(chunk, chunk + 1))
        cache.begin_chunk(3)
        plan_ = cache.views[0, 0].plan
        sink = [t[0] for e, t in zip(plan_.visible, plan_.t, strict=True) if e.region == "sink"]
        assert sink == [sink[0] + i for i in range(len(sink))]
        bases.append(sink[0])
        cache.abort()
    assert bases[0] == 0 and bases == sorted(bases) and bases[-1] > 20


# ---- I8, I9, I10: determinism and the order of things ------------------------------------------------------------


@every_policy
def test_the_same_stream_twice_is_the_same_bits(name):
    caches = [cache_of(name), cache_of(name)]
    torch.manual_seed(1)
    first = turns(caches[0], range(14))
    torch.manual_seed(2)
    assert all(map(torch.equal, first, turns(caches[1], range(14))))
    assert same_state(*(cache.state_dict() for cache in caches))


@every_codec
def test_packed_state_does_not_depend_on_the_number_of_noisy_passes_or_on_an_abandoned_chunk(codec):
    caches = [packed(codec), packed(codec)]
    for cache, passes in zip(caches, (1, 3), strict=True):
        run(cache, range(6))
        before = cache.state_dict()
        cache.begin_chunk(3)
        noisy(cache, 900)
        cache.begin_context()
        noisy(cache, 901)
        cache.abort()
        assert same_state(before, cache.state_dict())
        run(cache, range(6, 7), passes=passes)
    assert same_state(*(cache.state_dict() for cache in caches))


@every_policy
def test_commit_is_called_once_a_bank_in_the_order_of_layers(name):
    cache, calls = cache_of(name), []
    inner = cache.policy.commit

    def commit(bank, chunk):
        calls.append((chunk.index, bank.layer, bank.group))
        inner(bank, chunk)

    object.__setattr__(cache.policy, "commit", commit)
    run(cache, range(8), passes=2)
    banks = [(bank.layer, bank.group) for bank in cache.all_banks()]
    assert calls == [(chunk, *bank) for chunk in range(8) for bank in banks]


# ---- I11: encoding the past again --------------------------------------------------------------------------------

SHORT = {
    "forcing_kv": "has left frames out after two chunks",
}


@every_policy
def test_encoding_the_same_past_under_the_same_prompt_changes_nothing(tiny_random_model, name):
    if name in SHORT:
        pytest.skip(SHORT[name])
    net = CausalWan(tiny_random_model)
    embeds = torch.randn(1, 8, net.geometry.text_dim, generator=torch.Generator().manual_seed(1))
    prompt = net.prepare_prompt(embeds)
    cache = KVCache(net.geometry.kv(1, 4, 6), name, fill=NAN)
    shape = (1, 6, net.geometry.out_channels, 4, 6)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(3))

    def encode(part, skip=0):
        cache.begin_chunk(part.shape[1], skip=skip)
        net.context_pass(part, 0.0, prompt, cache)
        cache.commit()

    def contents():
        banks = list(cache.all_banks())
        return [
            (e.frames, e.region, *(x.clone() for x in bank.read(e))) for bank in banks for e in bank.entries
        ]

    for part in latents.split(3, dim=1):
        encode(part)
    before = contents()
    recache(cache, latents, encode, mode="causal")
    for a, b in zip(before, contents(), strict=True):
        assert a[:2] == b[:2]
        assert all(torch.allclose(x, y, atol=2e-6) for x, y in zip(a[2:], b[2:], strict=True))


# ---- I13: the host never waits -----------------------------------------------------------------------------------


@every_policy
def test_nothing_is_read_back_from_the_device(tiny_random_model, name):
    """On tensors without data any read-back raises."""
    net = CausalWan(copy.deepcopy(tiny_random_model).to("meta"))
    prompt = net.prepare_prompt(torch.empty(1, 8, net.geometry.text_dim, device="meta"))
    cache = KVCache(net.geometry.kv(1, 8, 8, device="meta"), name)
    x = torch.empty(1, 3, net.geometry.out_channels, 8, 8, device="meta")
    for _ in range(10):
        cache.begin_chunk(3)
        for timestep in (900.0, 500.0):
            assert net(x, timestep, prompt, cache).shape == x.shape
        net.context_pass(x, 0.0, prompt, cache)
        cache.commit()
    assert cache.next_frame == 30


# ---- I16: smoothing ----------------------------------------------------------------------------------------------


def test_a_mean_over_tokens_taken_from_rotated_keys_leaves_attention_unchanged():
    q, k, v = (torch.randn(1, n, 2, 16, dtype=torch.float64) for n in (5, 40, 40))
    k = k + 7 * torch.randn(1, 1, 2, 16, dtype=torch.float64)
    for a, b in zip(reference(q, k, v)[:1], reference(q, k - k.mean(1, keepdim=True), v)[:1], strict=True):
        assert torch.allclose(a, b, atol=1e-10)
    # A mean over channels differs from token to token and cannot be dropped: a codec has to put it back.
    dropped = reference(q, k - k.mean(-1, keepdim=True), v)[0]
    assert not torch.allclose(dropped, reference(q, k, v)[0], atol=1e-2)


# ---- combinations ------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(sorted(POLICIES)),
    codec=st.sampled_from(sorted(CODECS)),
    chunks=st.lists(st.integers(1, 3), min_size=4, max_size=9),
    batch=st.integers(1, 2),
    seed=st.integers(0, 999),
)
def test_any_pair_with_chunks_of_any_size_is_finite_and_snapshots(name, codec, chunks, batch, seed):
    g = KVGeometry(layers=1, heads=4, head_dim=32, grid=(2, 2), batch=batch)
    spec = SEEN.get(codec, codec)
    if refusal(POLICIES[name](), make_codec(spec)):
        return
    cache, other = (KVCache(g, name, make_codec(spec), fill=NAN) for _ in range(2))
    for number, frames in enumerate(chunks):
        if number == len(chunks) - 1:
            other.load_state_dict(cache.state_dict())
        outs = []
        for target in (cache, other) if number == len(chunks) - 1 else (cache,):
            target.begin_chunk(frames)
            target.attend(0, *draw(g, seed + number, frames))
            target.begin_context()
            outs.append(target.attend(0, *draw(g, seed + number + 50, frames)))
            target.commit()
        assert all(torch.isfinite(out).all() for out in outs)
    assert torch.equal(*outs)
