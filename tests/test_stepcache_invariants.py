"""The invariants that every registered step cache must keep, as one suite. A new method enters by being
registered."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from mock_denoiser import ConstantX0, MockDenoiser
from safetensors.torch import load, save
from stepcache_harness import CHANGE_BEFORE, KINDS, LAYERS, SHAPE, NoSync, Stream, cases, record, sampler_of

from streamvid.errors import StreamvidError
from streamvid.noise import CounterNoise
from streamvid.stepcache import STEP_CACHES, build_step_cache
from streamvid.stepcache.base import FEW_STEP_CACHES, StepCache
from streamvid.stepcache.driver import run_step
from streamvid.stepcache.types import ChunkInfo, Decision

NEUTRAL, LIVELY = list(cases("neutral")), list(cases("lively"))
KNOBS = [(n, k, c.knob) for n, c in STEP_CACHES.items() for k in sorted(c.kinds) if c.knob]
NORMAL = ChunkInfo(index=1, start_latent=3, num_latents=3)


def plain(kind: str) -> torch.Tensor:
    """The first three chunks without a cache."""
    return torch.stack(record("none", kind).outs[:3])


def everything(attribute):
    return pytest.mark.parametrize(
        ("name", "kind", "text"), attribute, ids=[f"{n}-{k}" for n, k, _ in attribute]
    )


@everything(NEUTRAL)
def test_i1_a_neutral_setting_is_bit_equal(name, kind, text):
    assert torch.equal(torch.stack(record(text, kind).outs[:3]), plain(kind))


@everything(LIVELY)
def test_i1_a_lively_setting_changes_something_but_not_the_first_chunk(name, kind, text):
    out = torch.stack(record(text, kind).outs[:3])
    assert torch.equal(out[0], plain(kind)[0])
    assert not torch.equal(out[1:], plain(kind)[1:]) and out.isfinite().all()


@everything(LIVELY)
def test_i2_first_steps_first_chunks_and_changed_contexts_are_full(name, kind, text):
    seen = record(text, kind).modes
    full_chunks = (0, CHANGE_BEFORE)
    assert all(mode == "full" for chunk, step, mode in seen if step == 0 or chunk in full_chunks)
    assert any(mode != "full" for chunk, _, mode in seen if chunk in (1, 2))
    assert any(mode != "full" for chunk, _, mode in seen if chunk == 4)


@everything(LIVELY)
def test_i3_interleaved_streams_equal_sequential_ones(name, kind, text):
    pair = [Stream(text, kind, seed=s) for s in (5, 50)]
    mixed = [torch.stack([a, b]) for a, b in [(pair[0].run(1), pair[1].run(1)) for _ in range(2)]]
    first, second = torch.cat(mixed, 1)
    assert torch.equal(first, torch.stack(record(text, kind).outs[:2]))
    assert torch.equal(second, Stream(text, kind, seed=50).run(2))


@everything(LIVELY)
def test_i4_reuse_writes_no_keys_and_the_context_pass_is_that_of_a_full_run(name, kind, text):
    seen = record(text, kind)
    assert not seen.reuse_wrote_keys
    fresh = MockDenoiser(layers=LAYERS)
    fresh.context, x0, keys = seen.context_keys
    fresh(x0, 0.0)
    for layer in range(LAYERS):
        assert torch.equal(keys[layer], fresh.keys["cond"][layer])


@everything(LIVELY)
def test_i5_accounting_equals_the_work_done(name, kind, text):
    seen = record(text, kind)
    report, plan = seen.report, seen.stream.plan
    per_chunk = len(plan.timesteps) * len(plan.branches)
    assert all(c["run"] + c["skipped"] == per_chunk for c in report["chunks"])
    assert report["forwards_run"] + report["forwards_skipped"] == 5 * per_chunk
    assert report["compute_fraction"] == pytest.approx(seen.work / (5 * per_chunk), abs=1e-6)
    assert report["compute_fraction"] < 1 and report["chunks"][0]["compute_fraction"] == 1
    assert sum(report["reasons"].values()) == 5 * per_chunk
    assert sum(s["run"] + s["skipped"] for s in report["steps"].values()) == 5 * per_chunk


def _ready(text, kind):
    """A session inside chunk 1 after a full first step, and the pieces to go on."""
    stream = Stream(text, kind)
    stream.run(2)
    stream.session.on_chunk_start(dataclasses.replace(NORMAL, index=2))
    sampler = stream.sampler

    def info(step, branch="cond"):
        return sampler._info(dataclasses.replace(NORMAL, index=2), step, branch, (2, 2))

    run_step(stream.model, info(0), torch.randn(SHAPE), stream.session)
    return stream, info


@everything(LIVELY)
def test_i6_a_gap_between_steps_or_another_shape_is_full_with_one_warning(name, kind, text):
    stream, info = _ready(text, kind)
    with pytest.warns(UserWarning) as caught:
        gap = stream.session.before_step(info(3), torch.randn(SHAPE))
        other = stream.session.before_step(info(1), torch.randn(1, 2, 4, 4, 4))
        stream.session.before_step(info(2), torch.randn(1, 2, 4, 4, 2))
    assert gap.mode == "full" and other.mode == "full"
    assert len(caught) == 1


@everything([c for c in LIVELY if STEP_CACHES[c[0]].knob and not STEP_CACHES[c[0]].session_type.static])
def test_i6_a_distance_that_is_not_finite_is_full(name, kind, text):
    stream, info = _ready(text, kind)
    bad = torch.full(SHAPE, float("nan"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1, 4):
            out, decision = run_step(stream.model, info(step), bad, stream.session)
            assert decision.mode == "full"


def test_i7_a_subset_of_all_tokens_equals_full_in_any_order():
    class All(type(build_step_cache("tokens").open(sampler_of("fresh").plan()))):
        order: torch.Tensor

        def decide(self, info, x_t):
            return Decision(mode="subset", reason="test", tokens=self.order)

    want = plain("fresh")
    for order in (torch.arange(12), torch.randperm(12, generator=torch.Generator().manual_seed(0))):
        stream = Stream("tokens", "fresh")
        stream.session.__class__, stream.session.order = All, order
        torch.testing.assert_close(stream.run(3), want, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("name", "kind", "knob"), KNOBS, ids=[f"{n}-{k}" for n, k, _ in KNOBS])
def test_i8_a_bolder_setting_never_computes_more(name, kind, knob):
    fractions = []
    for text in knob:
        stream = Stream(text, kind)
        stream.run(2)
        fractions.append(stream.session.report()["compute_fraction"])
    assert fractions == sorted(fractions, reverse=True) and fractions[0] > fractions[-1]


@everything(NEUTRAL + LIVELY)
def test_i9_memory_stays_within_the_declared_bound(name, kind, text):
    seen = record(text, kind)
    latent, hidden = torch.empty(SHAPE).numel() * 4, 12 * 16 * 4
    bound, branches = seen.stream.session.footprint(), len(seen.stream.plan.branches)
    scalars = 128
    assert seen.peak_bytes <= (bound.latents * latent + bound.hiddens * hidden) * branches + scalars
    # Between chunks only what the next chunk may use is left: at most one latent and scalars.
    assert seen.rest_bytes <= latent + scalars


@everything(LIVELY)
def test_i11_a_stored_session_goes_on_bit_for_bit(name, kind, text):
    stream = Stream(text, kind)
    stream.run(2)
    blob = save(stream.session.state_dict())
    stream.session = build_step_cache(text).open(stream.plan)
    stream.session.load_state_dict(load(blob))
    assert torch.equal(stream.run(1)[0], record(text, kind).outs[2])
    chunks = record(text, kind).report["chunks"][:3]
    assert stream.session.report()["chunks"] == chunks


STATIC = [c for c in NEUTRAL + LIVELY if build_step_cache(c[2]).open(sampler_of(c[1]).plan()).static]


@everything(STATIC)
def test_i12_static_sessions_decide_without_a_sync(name, kind, text):
    assert record(text, kind).outs  # the recorder makes their decisions under NoSync


def test_i12_the_probe_itself_sees_a_sync():
    with pytest.raises(AssertionError, match="waits"), NoSync():
        float(torch.ones(1).sum())


@everything(LIVELY)
def test_a_clip_of_a_batch_equals_its_solo_run_or_the_batch_is_run_in_full(name, kind, text):
    batch = Stream(text, kind, shape=(2, *SHAPE[1:]))
    first = batch.run(2)[:, :1]
    tied = batch.session.report()["reasons"].get("batch")
    want = plain(kind) if tied else torch.stack(record(text, kind).outs)
    torch.testing.assert_close(first, want[:2], atol=1e-5, rtol=0)


def test_a_cache_that_would_tie_clips_warns_and_runs_in_full():
    stream = Stream("exit:threshold=100", "fresh", shape=(2, *SHAPE[1:]))
    stream.session.on_chunk_start(NORMAL)
    with pytest.warns(UserWarning, match="batch"):
        for index in range(2):
            stream.index = index
            stream.chunk()
    assert stream.session.report()["compute_fraction"] == 1


@everything(LIVELY)
def test_a_cancelled_chunk_leaves_no_trace(name, kind, text):
    class Stop(Exception):
        pass

    def stop(step):
        if step["info"].step == 2:
            raise Stop

    stream = Stream(text, kind)
    stream.run(1)
    context = stream.model.context
    with pytest.raises(Stop), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stream.chunk(stop)
    stream.model.context = context
    assert torch.equal(stream.run(1)[0], record(text, kind).outs[1])


# I10: analytic models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "mask:skip=1+2+3",
        "taocache:skip=2",
        "adams:skip=2+3,order=2",
        "tokens:ratio=0.25",
        "carry:threshold=1000",
    ],
)
def test_i10_x0_reuse_is_exact_for_a_constant_answer(text):
    sampler = sampler_of("fresh")
    x0 = torch.randn(SHAPE)
    session = build_step_cache(text).open(sampler.plan())
    model = ConstantX0(x0, dict(zip(sampler.timesteps, sampler.sigmas, strict=True)).__getitem__)
    for index in range(2):
        chunk = dataclasses.replace(NORMAL, index=index)
        out = sampler.sample_chunk(model, chunk, CounterNoise([3]), SHAPE, step_cache=session)
        torch.testing.assert_close(out, x0, atol=1e-5, rtol=0)
    assert session.report()["compute_fraction"] < 1


def test_i10_velocity_reuse_with_fresh_noise_would_be_wrong_and_is_refused():
    sampler = sampler_of("fresh")
    sigma = sampler.sigmas[2]
    x0, e, fresh = torch.randn(3, 200_000).unbind(0)
    wrong = (1 - sigma) * x0 + sigma * fresh - sigma * (e - x0)
    assert (wrong - x0).std() == pytest.approx(sigma * 2**0.5, rel=0.01)
    for space in ("velocity", "residual"):
        session = build_step_cache(f"mask:skip=2,space={space}").open(sampler.plan(num_layers=LAYERS))
        stream = Stream("none", "fresh")
        stream.session = session
        with pytest.raises(StreamvidError, match="fresh noise"):
            stream.run(2)


@pytest.mark.parametrize("name", sorted(n for n, c in STEP_CACHES.items() if "fresh" not in c.kinds))
def test_many_step_caches_are_refused_on_few_step_sampling_with_a_reason(name):
    with pytest.raises(StreamvidError, match=f"{name}.*fresh noise: .*use one of mask"):
        build_step_cache(name).open(sampler_of("fresh").plan())


@pytest.mark.parametrize("name", sorted(n for n, c in STEP_CACHES.items() if "same" not in c.kinds))
def test_few_step_caches_are_refused_on_many_step_sampling(name):
    with pytest.raises(StreamvidError, match="many-step"):
        build_step_cache(name).open(sampler_of("same").plan())


def test_every_method_documents_itself_and_its_settings():
    for name, method in STEP_CACHES.items():
        assert issubclass(method, StepCache) and method.name == name and method.__doc__
        assert method.neutral and set(method.kinds) <= set(KINDS)
    few = {name for name, method in STEP_CACHES.items() if "fresh" in method.kinds} - {"none"}
    assert set(FEW_STEP_CACHES.split(", ")) == few
