"""The Triton kernel in Triton's interpreter against the reference, and the invariances that hold by construction."""

import pytest
import torch
from hypothesis import given, settings
from kernel_cases import cases, expected

pytest.importorskip("triton")

from streamvid.kernels.attention import attend
from streamvid.kernels.backends import interpreting
from streamvid.kernels.types import KVView

pytestmark = pytest.mark.skipif(
    not interpreting(), reason="needs TRITON_INTERPRET=1 (set when there is no GPU)"
)


@settings(max_examples=12, deadline=None)
@given(cases())
def test_kernel_equals_the_reference(case):
    q, views = case
    out, lse = attend(q, views, backend="triton", return_lse=True)
    right, right_lse = expected(q, views)
    torch.testing.assert_close(out, right, atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(lse, right_lse, atol=1e-5, rtol=1e-5)


@settings(max_examples=5, deadline=None)
@given(cases(max_views=2))
def test_kernel_in_half_precision(case):
    q, views = case
    halves = [
        KVView(*(x.half() if isinstance(x, torch.Tensor) else x for x in (view.k, view.v)),
               heads=view.heads, bias=view.bias, rope=view.rope, blocks=view.blocks)
        for view in views
    ]  # fmt: skip
    out, lse = attend(q.half(), halves, backend="triton", return_lse=True)
    right, right_lse = expected(q.half().float(), halves)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.float(), right, atol=4e-3, rtol=4e-3)
    torch.testing.assert_close(lse, right_lse, atol=2e-2, rtol=4e-3)
