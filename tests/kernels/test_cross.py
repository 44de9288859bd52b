"""Cross-attention to some prompt tokens, and padding rows read as one."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamvid.block import cross
from streamvid.kernels.cross import AnnCA, cross_attention
from streamvid.kernels.reference import reference
from streamvid.prompt import PromptState
from tests.tiny_random import random_transformer

sizes = st.integers(1, 9)


def tensors(seed: int, b: int, nq: int, n: int, h: int, d: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(b, rows, h, d, generator=generator) for rows in (nq, n, n)]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 99),
    st.integers(1, 2),
    sizes,
    sizes,
    st.integers(1, 3),
    st.floats(0.05, 1.0),
    st.booleans(),
)
def test_chosen_tokens_give_what_the_reference_gives_over_them(seed, b, nq, n, h, density, biased):
    q, k, v = tensors(seed, b, nq, n, h)
    bias = torch.linspace(0, 2, n) if biased else None
    rule = AnnCA(density=density)
    chosen = rule.choose(q, k)
    mask = torch.ones(b, h, 1, n, dtype=torch.bool)
    if chosen is not None:
        assert chosen.shape[-1] < n and (chosen.diff(dim=-1) > 0).all()
        mask = torch.zeros(b, h, n, dtype=torch.bool).scatter(2, chosen, True)[:, :, None]
    wanted, _ = reference(q, k, v, mask=mask, bias=bias)
    torch.testing.assert_close(cross_attention(q, k, v, bias, rule), wanted, rtol=1e-5, atol=1e-5)


def test_the_tokens_nearest_to_some_query_are_kept():
    q, k, v = tensors(3, 1, 6, 12, 2, d=32)
    k[:, 4], k[:, 9] = q[:, 1], q[:, 5]  # the same direction: the same hash
    k[:, 7] = -q.mean(1)
    for head in range(2):
        kept = AnnCA(density=2 / 12, bits=32).choose(q, k)[0, head].tolist()
        assert kept == [4, 9]
    same = cross_attention(q, k, v, rule=AnnCA(density=1.0))
    assert torch.equal(same, cross_attention(q, k, v))


@pytest.mark.parametrize("wrong", [{"density": 0.0}, {"density": 1.5}, {"bits": 0}, {"bits": 65}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        AnnCA(**wrong)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 99), sizes, st.integers(1, 12), st.integers(1, 12))
def test_equal_rows_read_as_one_are_the_same(seed, nq, words, padding):
    q, k, v = (x.double() for x in tensors(seed, 2, nq, words + padding, 2))
    k[:, words:], v[:, words:] = k[:, words : words + 1], v[:, words : words + 1]
    whole = PromptState((k,), (v,))
    packed = dataclasses.replace(whole, equal_rows=padding)
    assert packed.text(0)[0].shape[1] == words + 1
    torch.testing.assert_close(
        cross_attention(q, *packed.text(0)), cross_attention(q, *whole.text(0)), rtol=1e-6, atol=1e-6
    )


def test_a_prompt_with_padding_is_packed_and_one_without_is_not():
    from streamvid.transformer import CausalWan

    net = CausalWan(random_transformer())
    embeds = torch.randn(2, 10, net.geometry.text_dim)
    assert net.prepare_prompt(embeds).equal_rows == 1
    embeds[0, 4:], embeds[1, 7:] = 0, 0
    state = net.prepare_prompt(embeds)
    assert state.equal_rows == 3  # as many as all items of the batch have
    whole = dataclasses.replace(state, equal_rows=1)
    x = torch.randn(2, 6, net.geometry.dim)
    attn, heads = net.model.blocks[0].attn2, net.geometry.heads
    outs = [cross(attn, x, heads, prompt.text(0), None, None) for prompt in (state, whole)]
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-6)
    assert net.prepare_prompt(torch.zeros(1, 10, net.geometry.text_dim)).equal_rows == 10
