"""Packing: error bounds, groups far from zero, and the Triton kernels against the plain version."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import NO_KERNELS

from streamvid.kernels.quantise import dequantise, quantise
from streamvid.kernels.types import PackedTensor

triton_only = pytest.mark.skipif(bool(NO_KERNELS), reason=NO_KERNELS)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 1000), st.sampled_from([4, 8]), st.sampled_from([1, 3]), st.booleans(), st.integers(1, 21)
)
def test_round_trip_stays_within_half_a_step(seed, bits, axis, symmetric, n):
    torch.manual_seed(seed)
    x = torch.randn(2, n, 3, 16) * 3
    packed = quantise(x, bits, group_size=8, axis=axis, symmetric=symmetric, scale_dtype=torch.float32)
    scale = packed.scale
    scale = scale.repeat_interleave(8, 3) if axis == 3 else scale.repeat_interleave(8, 1)[:, :n]
    assert ((dequantise(packed) - x).abs() <= scale * 0.5001 + 1e-6).all()


def test_a_group_far_from_zero_keeps_its_resolution():
    torch.manual_seed(0)
    x = torch.rand(1, 8, 2, 16)
    near = (dequantise(quantise(x, 4, group_size=16, scale_dtype=torch.float32)) - x).abs().max()
    far = (dequantise(quantise(x + 10, 4, group_size=16, scale_dtype=torch.float32)) - x - 10).abs().max()
    assert far < near * 1.01


def test_scratch_is_written_and_bytes_are_counted():
    x = torch.randn(1, 10, 2, 32)
    packed = quantise(x, 4, group_size=32)
    scratch = torch.full_like(x, torch.nan)
    assert dequantise(packed, scratch) is scratch
    assert torch.equal(scratch, dequantise(packed))
    assert packed.nbytes == 10 * 2 * (16 + 2 + 2)


def test_wrong_layouts_are_refused():
    with pytest.raises(ValueError, match="does not divide"):
        quantise(torch.randn(1, 4, 1, 10), 4, group_size=4)
    with pytest.raises(ValueError, match=r"allowed: 4, 8"):
        PackedTensor(torch.zeros(1), torch.zeros(1), None, 2, 4, 3, (1, 1, 1, 4), torch.float32)


@triton_only
@settings(max_examples=6, deadline=None)
@given(
    st.integers(0, 1000), st.sampled_from([4, 8]), st.booleans(), st.sampled_from([8, 16]), st.integers(1, 9)
)
def test_kernels_equal_the_plain_version(seed, bits, symmetric, group, n):
    from streamvid.kernels.triton_pack import pack, unpack

    torch.manual_seed(seed)
    x = torch.randn(2, n, 3, 16).transpose(1, 2).contiguous().transpose(1, 2)
    plain = quantise(x, bits, group_size=group, symmetric=symmetric)
    fused = pack(x, bits, group, symmetric, torch.float16)
    assert torch.equal(fused.scale, plain.scale)
    values = dequantise(plain)
    torch.testing.assert_close(unpack(plain, torch.empty_like(values)), values)
    step = plain.scale.float().repeat_interleave(group, 3)
    assert ((unpack(fused, torch.empty_like(values)) - values).abs() <= step * 1.001).all()
