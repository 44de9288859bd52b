"""`attend` on the CPU against the reference: views, ragged heads, bias, packed keys, empty rows, merging."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import cases
from kernel_cases import expected as expected_attention

from streamvid.kernels.attention import attend, choose_backend, find_backend, merge
from streamvid.kernels.types import KVView


@settings(max_examples=20, deadline=None)
@given(cases(), st.sampled_from(["sdpa", "reference"]))
def test_attend_equals_dense_attention_with_a_mask(case, backend):
    q, views = case
    expected, expected_lse = expected_attention(q, views)
    out, lse = attend(q, views, backend=backend, return_lse=True)
    torch.testing.assert_close(out, expected, atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(attend(q, views, backend=backend), expected, atol=3e-6, rtol=1e-5)


def test_long_history_takes_the_merging_path_and_is_exact():
    torch.manual_seed(0)
    q = torch.randn(1, 12, 3, 16)
    views = [KVView(torch.randn(1, n, 3, 16), torch.randn(1, n, 3, 16)) for n in (200, 50, 12)]
    expected, _ = expected_attention(q, views)
    torch.testing.assert_close(attend(q, views), expected, atol=3e-6, rtol=1e-5)


def test_a_key_counted_n_times_equals_n_copies():
    torch.manual_seed(1)
    q, k, v = torch.randn(1, 9, 2, 8), torch.randn(1, 20, 2, 8), torch.randn(1, 20, 2, 8)
    counts = torch.randint(1, 5, (20,))
    copies = KVView(k.repeat_interleave(counts, 1), v.repeat_interleave(counts, 1))
    weighted = KVView(k, v, bias=counts.float().log())
    torch.testing.assert_close(attend(q, [weighted]), attend(q, [copies]), atol=3e-6, rtol=1e-5)


def test_merge_has_an_identity_and_survives_two_empty_parts():
    out, lse = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 4)
    empty, nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    merged, total = merge([out, empty], [lse, nothing])
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(total, lse)
    merged, total = merge([empty, empty], [nothing, nothing])
    assert merged.eq(0).all() and total.eq(-torch.inf).all()


def test_keys_all_dropped_by_bias_are_an_empty_row():
    q, k = torch.randn(1, 5, 2, 8), torch.randn(1, 7, 2, 8)
    gone = KVView(k, k, bias=torch.full((7,), -torch.inf))
    kept = KVView(k * 2, k * 3)
    out, lse = attend(q, [gone], return_lse=True)
    assert out.eq(0).all() and lse.eq(-torch.inf).all()
    torch.testing.assert_close(attend(q, [gone, kept]), attend(q, [kept]), atol=3e-6, rtol=1e-5)


def test_wrong_calls_say_what_is_allowed():
    q, k = torch.randn(1, 5, 2, 8), torch.randn(1, 7, 2, 8)
    with pytest.raises(ValueError, match="allowed: auto, .*reference"):
        attend(q, [KVView(k, k)], backend="sdap")
    with pytest.raises(ValueError, match="does not fit q"):
        attend(q, [KVView(k, k, heads=(1, 2))])
    with pytest.raises(ValueError, match="ascending"):
        KVView(k, k, heads=(1, 0))
    name, reason = choose_backend("cpu", torch.float32)
    assert find_backend("auto", "cpu", torch.float32).name == name and "CPU" in reason
