"""The Triton kernel in Triton's interpreter against the reference, and the invariances that hold by construction."""

import pytest
import torch
from hypothesis import given, settings
from kernel_cases import NO_KERNELS, cases, expected, plain

pytest.importorskip("triton")

from streamvid.kernels.attention import attend, merge
from streamvid.kernels.configs import Config
from streamvid.kernels.quantise import quantise
from streamvid.kernels.types import BlockMap, Blocks, KVView

pytestmark = pytest.mark.skipif(bool(NO_KERNELS), reason=NO_KERNELS)


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


def test_what_must_not_matter_does_not():
    """Order of a block list, physical place of a block, heads renumbered, a region cut in two."""
    torch.manual_seed(3)
    n, size, heads = 48, 16, 2
    q, k, v = torch.randn(1, 16, heads, 8), torch.randn(1, n, heads, 8), torch.randn(1, n, heads, 8)
    indices = torch.tensor([0, 2], dtype=torch.int32).expand(1, heads, 1, 2).contiguous()
    counts = torch.tensor([2, 1], dtype=torch.int32).view(1, heads, 1)

    def run(k, v, indices, counts, keys):
        blocks = BlockMap(indices, counts, Blocks(16, 16), keys)
        return attend(q, [KVView(k, v, blocks=blocks)], backend="triton")

    plain = run(k, v, indices, counts, Blocks(n, size))
    full = torch.full_like(counts, 2)
    both = run(k, v, indices, full, Blocks(n, size))
    close = {"atol": 2e-6, "rtol": 1e-5}
    torch.testing.assert_close(run(k, v, indices.flip(-1).contiguous(), full, Blocks(n, size)), both, **close)
    pages = torch.tensor([2, 0, 1])  # logical block i lies at physical block pages[i]
    moved_k, moved_v = (x.unflatten(1, (3, size))[:, pages.argsort()].flatten(1, 2) for x in (k, v))
    table = (pages[:, None] * size + torch.arange(size)).to(torch.int32)
    torch.testing.assert_close(run(moved_k, moved_v, indices, counts, Blocks(n, size, table)), plain, **close)
    swapped = attend(q.flip(2), [KVView(k.flip(2), v.flip(2))], backend="triton").flip(2)
    whole, lse = attend(q, [KVView(k, v)], backend="triton", return_lse=True)
    torch.testing.assert_close(swapped, whole, **close)
    parts = [
        attend(q, [KVView(k[:, a:b], v[:, a:b])], backend="triton", return_lse=True)
        for a, b in ((0, 20), (20, n))
    ]
    out, total = merge([out for out, _ in parts], [lse for _, lse in parts])
    torch.testing.assert_close(out, whole, **close)
    torch.testing.assert_close(total, lse, **close)


def test_four_bits_equal_dense_on_what_they_stand_for_and_tiles_do_not_matter():
    torch.manual_seed(4)
    q, k, v = torch.randn(1, 20, 2, 16), torch.randn(1, 40, 2, 16), torch.randn(1, 40, 2, 16)
    packed = [quantise(x, 4, group_size=8) for x in (k, v)]
    dense = attend(q, [KVView(*map(plain, packed))], backend="reference")
    from streamvid.kernels.triton_launch import attend_views

    for config in (Config(16, 16, 4, 1), Config(32, 64, 4, 1)):
        out, _ = attend_views(q, [KVView(*packed)], 0.25, config)
        torch.testing.assert_close(out, dense, atol=3e-6, rtol=1e-5)
