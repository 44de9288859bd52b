"""Rotary tables and rotation: round trips, invariance to a common shift, split of the pairs, precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamvid.kernels.rope import GridRope, axis_pairs, rope_table, rotate


@st.composite
def tokens(draw):
    head_dim = draw(st.sampled_from([2, 4, 6, 12, 16, 20, 128]))
    n, seed = draw(st.integers(1, 7)), draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, n, 3, head_dim, generator=generator, dtype=torch.float64)
    at = torch.randint(0, 50, (n, 3), generator=generator).double()
    return x, at


@settings(max_examples=25, deadline=None)
@given(tokens(), st.floats(-30, 30))
def test_turning_is_invertible_and_additive(case, shift):
    x, at = case
    table = rope_table(at, x.shape[-1], torch.complex128)[:, None]
    turned = rotate(x, table)
    assert torch.allclose(rotate(turned, table, inverse=True), x, atol=1e-12)
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1))
    moved = at + torch.tensor([shift, 0, 0], dtype=torch.float64)
    delta = rope_table(torch.tensor([[shift, 0.0, 0.0]]), x.shape[-1], torch.complex128)[:, None]
    direct = rotate(x, rope_table(moved, x.shape[-1], torch.complex128)[:, None])
    assert torch.allclose(rotate(turned, delta), direct, atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(tokens(), st.sampled_from([1, 7, 1000, 10_000_000]))
def test_logits_do_not_depend_on_a_common_shift(case, shift):
    x, at = case
    logits = []
    for move in (0, shift):
        table = rope_table(at + torch.tensor([float(move), 0, 0]).double(), x.shape[-1], torch.complex128)[
            :, None
        ]
        turned = rotate(x, table)
        logits.append(torch.einsum("bnhd,bmhd->bhnm", turned, turned))
    assert torch.allclose(*logits, atol=1e-6)


def test_axes_turn_their_own_pairs_and_adjacent_elements():
    assert axis_pairs(128) == (22, 21, 21) and axis_pairs(12) == (2, 2, 2) and axis_pairs(20) == (4, 3, 3)
    for axis, pairs in enumerate(((0, 1, 2, 3), (4, 5, 6), (7, 8, 9))):
        at = torch.zeros(1, 3)
        at[0, axis] = 2.0
        x = torch.zeros(1, 1, 1, 20)
        x[..., 0::2] = 1.0
        turned = rotate(x, rope_table(at, 20)[:, None]).view(10, 2)
        angle = torch.atan2(turned[:, 1], turned[:, 0])
        for pair in range(10):
            expected = 2.0 * 10000 ** (-pairs.index(pair) / len(pairs)) if pair in pairs else 0.0
            assert angle[pair] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writing_into_a_buffer_or_in_place_is_the_same(dtype):
    x = torch.randn(2, 9, 3, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    table = GridRope(12, (1, 3)).table((5, 6, 7))
    expected = rotate(x, table)
    assert expected.dtype == dtype
    assert torch.equal(rotate(x, table, out=torch.empty_like(x)), expected)
    assert torch.equal(rotate(x.clone(), table, out=(y := x.clone())), expected) and torch.equal(y, expected)
    z = x.clone()
    assert rotate(z, table, out=z) is z and torch.equal(z, expected)
    fine = rotate(x.double(), GridRope(12, (1, 3), dtype=torch.complex128).table((5, 6, 7)))
    assert (expected.double() - fine).abs().max() < (1e-6 if dtype == torch.float32 else 2e-2)


def test_a_grid_keeps_few_tables_and_equals_single_positions():
    rope = GridRope(16, (2, 3), dtype=torch.complex128)
    table = rope.table((4.5, 1))
    at = torch.tensor([[t, y, x] for t in (4.5, 1) for y in range(2) for x in range(3)], dtype=torch.float64)
    assert torch.equal(table[:, 0], rope_table(at, 16, torch.complex128))
    assert rope.table((4.5, 1)) is table
    for t in range(20):
        rope.table((t,))
    assert len(rope.tensors()) == 1 + GridRope.KEEP


def test_an_odd_head_is_refused():
    with pytest.raises(ValueError, match="positive even number"):
        axis_pairs(7)
