"""Codecs inside the cache: exactness, bytes that are reported, and bytes that are really used at the peak."""

import pytest
import torch
from allocations import Allocations, held_bytes, reachable

from streamvid.memory import cache as cache_module
from streamvid.memory.cache import KVCache
from streamvid.memory.codecs import CODECS, make_codec
from streamvid.memory.geometry import KVGeometry

SMALL = KVGeometry(layers=2, heads=2, head_dim=32, grid=(2, 4))
OUTSIDE = {
    "mixed": "mixed:recent_frames=2,older=int4",
    "qvg": "qvg:span_frames=4",
    "offload": "offload:keep_frames=2",
}
"""Settings that make a small test see the codec at work."""


def tensors(geometry, seed, frames=3):
    generator = torch.Generator().manual_seed(seed)
    shape = (geometry.batch, frames * geometry.tokens_per_frame, geometry.heads, geometry.head_dim)
    return [torch.randn(shape, generator=generator).to(geometry.dtype) for _ in range(3)]


def run(cache, chunks):
    for chunk in chunks:
        cache.begin_chunk(3)
        cache.begin_context()
        out = [cache.attend(layer, *tensors(cache.geometry, 10 * chunk + layer)) for layer in range(2)]
        cache.commit()
    return out


def test_codec_none_changes_nothing():
    plain, through = (KVCache(SMALL, "window:size=9,sink=1", codec) for codec in (None, make_codec("none")))
    for wanted, got in zip(run(plain, range(6)), run(through, range(6)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", sorted(CODECS))
def test_reported_bytes_are_those_of_the_tensors(name):
    cache = KVCache(SMALL, "window:size=15,sink=1", make_codec(OUTSIDE.get(name, name)))
    run(cache, range(8))
    report = cache.report()
    assert report.total + report.host == pytest.approx(held_bytes(cache), rel=0.02)
    assert (report.host > 0) == (name == "offload")
    assert (report.stored < 0.75 * report.dense) == (name != "none")


@pytest.mark.parametrize("name", sorted(CODECS))
def test_a_snapshot_of_packed_frames_goes_on_bit_for_bit(name):
    spec = OUTSIDE.get(name, name)
    cache, other = (KVCache(SMALL, "window:size=9,sink=1", make_codec(spec)) for _ in range(2))
    run(cache, range(5))
    other.load_state_dict(cache.state_dict())
    for wanted, got in zip(run(cache, range(5, 8)), run(other, range(5, 8)), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", sorted(CODECS))
def test_attention_over_a_packed_history_is_near_the_plain_one(name):
    codecs = (None, make_codec(OUTSIDE.get(name, name)))
    plain, packed = (run(KVCache(SMALL, "full", codec), range(4)) for codec in codecs)
    for wanted, got in zip(plain, packed, strict=True):
        assert (got - wanted).norm() < 0.7 * wanted.norm()


def peak_of_a_chunk(spec, frames, monkeypatch):
    """Largest bytes of keys, values and scratch while one chunk runs over a full window, in 30 layers."""
    # The queries' own work would count as well and costs most of the time.
    monkeypatch.setattr(cache_module, "attend", lambda q, views, **kwargs: q)
    geometry = KVGeometry(layers=30, heads=12, head_dim=128, grid=(4, 6), dtype=torch.bfloat16)
    cache = KVCache(geometry, f"window:size={frames}", spec and make_codec(spec))
    _, k, v = tensors(geometry, 0)

    def context(attended):
        cache.begin_context()
        for layer in range(geometry.layers):
            cache.attend(layer, k, k, v) if layer < attended else cache.write(layer, k, v)
        cache.commit()

    for _ in range(frames // 3):
        cache.begin_chunk(3)
        context(attended=0)
    with Allocations(reachable(cache)) as used:
        cache.begin_chunk(3)
        for layer in range(2):
            cache.attend(layer, k, k, v)
        context(attended=2)
    assert cache.report().peak <= used.peak
    return used.peak


@pytest.mark.parametrize("frames", [21, pytest.param(120, marks=pytest.mark.slow)])
def test_peak_bytes_of_integer_codecs(frames, monkeypatch):
    plain = peak_of_a_chunk(None, frames, monkeypatch)
    assert peak_of_a_chunk("int8", frames, monkeypatch) <= 0.58 * plain
    assert peak_of_a_chunk("int4", frames, monkeypatch) <= 0.32 * plain
