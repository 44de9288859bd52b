"""Plans against the reports of caches that really ran, and refusals with numbers."""

import dataclasses
import re

import pytest
import torch

from streamvid.memory.cache import KVCache
from streamvid.memory.codecs import make_codec
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.plan import BudgetError, format_bytes, plan
from streamvid.memory.policies import POLICIES

GEOMETRY = KVGeometry(layers=2, heads=2, head_dim=32, grid=(4, 4))
WINDOW = "window:size=9,sink=1"
CODECS = [None, "none", "int8", "int4", "kivi", "qvg:span_frames=4", "mixed:recent_frames=2,older=int8"]


def run(policy, codec, frames, chunk=3):
    """The report of a cache after ``frames`` latent frames of noise."""
    cache = KVCache(GEOMETRY, policy, codec and make_codec(codec), chunk_frames=chunk)
    generator = torch.Generator().manual_seed(0)
    shape = (1, chunk * GEOMETRY.tokens_per_frame, GEOMETRY.heads, GEOMETRY.head_dim)
    reports = []
    for _ in range(frames // chunk):
        x = torch.randn(shape, generator=generator)
        cache.begin_chunk(chunk)
        for layer in range(GEOMETRY.layers):
            cache.attend(layer, x, x, x)
        cache.begin_context()
        for layer in range(GEOMETRY.layers):
            cache.write(layer, x, x)
        cache.commit()
        reports.append(cache.report())
    return reports


@pytest.mark.parametrize("codec", CODECS)
def test_a_window_costs_what_was_planned(codec):
    planned = plan(GEOMETRY, None, WINDOW, codec)
    reports = run(WINDOW, codec, 60)
    assert not planned.grows
    assert planned.peak == reports[-1].peak
    assert planned.stored == max(report.stored for report in reports[-8:])
    assert planned.scratch == max(report.scratch for report in reports[-8:])


@pytest.mark.parametrize("codec", [None, "int8", "qvg:span_frames=4"])
def test_a_growing_history_costs_what_was_planned(codec):
    for frames in (12, 108):
        planned, last = plan(GEOMETRY, None, "full", codec, frames=frames), run("full", codec, frames)[-1]
        assert planned.grows and planned.held == last.frames == frames
        # Exact while it is simulated, a straight line beyond; slots are allocated some frames ahead.
        assert planned.peak == pytest.approx(last.peak, rel=0 if frames == 12 else 0.25)
        assert planned.regions["recent"] == pytest.approx(
            last.regions["recent"], rel=0 if frames == 12 else 0.02
        )


def test_over_budget_is_refused_with_what_would_fit():
    needed = plan(GEOMETRY, None, WINDOW).peak
    assert plan(GEOMETRY, needed, WINDOW).longest == 9
    with pytest.raises(BudgetError, match="needs .* at its peak .* but the budget is") as refused:
        plan(GEOMETRY, int(needed * 0.8), WINDOW)
    text = str(refused.value)
    assert format_bytes(needed) in text
    size = int(re.search(r"size=(\d+)", text).group(1))
    assert plan(GEOMETRY, int(needed * 0.8), f"window:size={size},sink=1").longest == size
    with pytest.raises(BudgetError):
        plan(GEOMETRY, int(needed * 0.8), f"window:size={size + 1},sink=1")


def test_no_window_is_small_enough():
    with pytest.raises(BudgetError, match="a larger budget only"):
        plan(GEOMETRY, 1000, WINDOW)


def test_a_smaller_codec_allows_a_longer_window():
    deep = dataclasses.replace(GEOMETRY, layers=12)  # so that one layer's scratch weighs little
    budget = plan(deep, None, WINDOW).peak
    plain, packed = (plan(deep, budget, WINDOW, codec).longest for codec in (None, "int8"))
    assert packed > 1.4 * plain


def test_a_history_without_end_needs_its_length():
    with pytest.raises(ValueError, match=r"frames=\.\.\."):
        plan(GEOMETRY, None, "full")
    assert plan(GEOMETRY, 10**6, "full", "int8", frames=6).longest > 6


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_can_be_planned(policy):
    """One that watches queries, too, whose last layer is given them without attention."""
    shape = dataclasses.replace(GEOMETRY, layers=3, heads=4)
    assert plan(shape, None, policy, frames=30).peak > 0


def test_rows_are_for_people():
    rows = dict(plan(GEOMETRY, 10**9, WINDOW, "int8").rows())
    assert rows["budget"] == "1.00 GB"
    assert rows["fits"].endswith("latent frames")
    assert {"region sink", "region recent", "stored", "layer scratch", "peak"} <= set(rows)
