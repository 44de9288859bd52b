"""Every policy with every codec: it runs and frees bytes, or is refused with its reason before it allocates."""

import pytest
import torch

from streamvid.memory.cache import KVCache
from streamvid.memory.codecs import CODECS, make_codec
from streamvid.memory.compat import RULES, refusal, table
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.plan import plan
from streamvid.memory.policies import POLICIES
from streamvid.memory.policies.window import Window

SMALL = KVGeometry(layers=2, heads=4, head_dim=32, grid=(2, 4))
SPECS = {
    "mixed": "mixed:recent_frames=1",
    "offload": "offload:keep_frames=1,codec=int4",
    "qvg": "qvg:span_frames=6",
}
"""Settings that leave something to do in a short run."""
ONCE = {"int8", "mixed", "offload", "qvg"}
"""Codecs that differ in how the cache handles them; the others differ inside only."""


def draw(seed):
    q, k = torch.randn(2, 1, 24, 4, 32, generator=torch.Generator().manual_seed(seed))
    return q, k, 2 * k + 1


def run(policy, codec, chunks):
    cache = KVCache(SMALL, policy, codec, fill=float("nan"))
    outputs = []
    for chunk in range(chunks):
        cache.begin_chunk(3)
        for layer in range(2):
            cache.attend(layer, *draw(20 * chunk + layer))
        cache.begin_context()
        outputs = [cache.attend(layer, *draw(20 * chunk + layer + 10)) for layer in range(2)]
        cache.commit()
    return cache, outputs


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_with_every_kind_of_codec(name):
    _, plain = run(name, None, 10)
    for codec in sorted(ONCE):
        spec = SPECS.get(codec, codec)
        if refusal(POLICIES[name](), make_codec(spec)):
            with pytest.raises(ValueError, match="do not go together"):
                KVCache(SMALL, name, spec)
            continue
        cache, outputs = run(name, spec, 10)
        for got, wanted in zip(outputs, plain, strict=True):
            assert (got - wanted).norm() < 0.4 * wanted.norm(), (name, spec)
        report = cache.report()
        if name != "infinity_rope" or codec == "int8":  # three frames, all of them the sink or the newest
            assert report.stored + report.host < 0.95 * report.dense, (name, spec)


def test_the_table_is_complete_and_its_reasons_are_sentences():
    found = table()
    assert set(found) == set(POLICIES) and all(set(row) == set(CODECS) for row in found.values())
    for policy in POLICIES:
        assert found[policy]["none"] is found[policy]["int8"] is found[policy]["int4"] is None
    assert "single frames or tokens" in found["tether"]["qvg"]
    assert "never holds more than 18" in found["window"]["qvg"]
    assert found["full"]["qvg"] is None


@pytest.mark.parametrize(
    "policy, codec, words",
    [
        ("tempcache", "qvg", "single frames or tokens"),
        ("window:size=21", "qvg", "never holds more than 18 frames"),
        ("window:size=9,sink=3", "mixed:recent_frames=3", "would do nothing"),
        ("window:size=9,sink=3", "offload:keep_frames=6", "keep_frames"),
    ],
)
def test_refused_by_cache_and_plan_alike(policy, codec, words):
    for ask in (lambda: KVCache(SMALL, policy, codec), lambda: plan(SMALL, None, policy, codec)):
        with pytest.raises(ValueError, match=words):
            ask()


def test_every_rule_can_be_escaped_as_its_reason_says():
    assert refusal(Window(size=27), make_codec("qvg")) is None
    assert refusal(Window(size=9, sink=3), make_codec("mixed:recent_frames=2")) is None
    assert refusal(Window(size=10, sink=3), make_codec("offload:keep_frames=3")) is None
    assert len(RULES) == 3
