"""Prompts to rows: cleaning, zero rows, independence of the batch, the cache."""

import pytest
import tiny_random
import torch

from streamvid.errors import StreamvidError
from streamvid.text import UMT5TextEncoder, clean_prompt


@pytest.fixture
def encoder():
    return UMT5TextEncoder(tiny_random.random_umt5(), tiny_random.word_tokenizer(), tiny_random.TEXT_LEN)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("  a  red\n\tball ", "a red ball"),
        ("tom &amp;amp; jerry", "tom & jerry"),
        ("schÃ¶n", "schön"),
        ("&lt;b&gt; \u00a0 x", "<b> x"),
        ("", ""),
    ],
)
def test_cleaning(given, wanted):
    assert clean_prompt(given) == wanted


def test_rows_after_the_prompt_are_zero(encoder):
    rows = encoder.encode(["a red ball", ""])
    assert rows.shape == (2, tiny_random.TEXT_LEN, tiny_random.TEXT_DIM)
    used = rows.abs().sum(-1) > 0
    assert used.tolist() == [[True] * 4 + [False] * 4, [True] + [False] * 7]


def test_equals_the_padded_and_masked_reference(encoder):
    prompts = ["a red ball", "the blue star orbiting in the sea and more and more"]
    batch = tiny_random.word_tokenizer()(
        prompts, padding="max_length", truncation=True, max_length=tiny_random.TEXT_LEN, return_tensors="pt"
    )
    reference = encoder.model(batch.input_ids, batch.attention_mask).last_hidden_state
    reference = reference * batch.attention_mask[..., None]
    torch.testing.assert_close(encoder.encode(prompts), reference, atol=1e-5, rtol=0)


def test_a_prompt_is_independent_of_its_batch(encoder):
    fresh = UMT5TextEncoder(tiny_random.random_umt5(), tiny_random.word_tokenizer(), tiny_random.TEXT_LEN)
    together = encoder.encode(["a red ball", "zebra", "the sea"])
    assert torch.equal(together[1:2], fresh.encode(["zebra"]))


def test_cache_keeps_the_most_recent_and_hands_out_copies(encoder):
    small = UMT5TextEncoder(encoder.model, encoder.tokenizer, tiny_random.TEXT_LEN, cached=2)
    calls = []
    handle = small.model.register_forward_hook(lambda *_: calls.append(1))
    first = small.encode(["red"])
    first.zero_()
    small.encode(["blue", " red  "])
    assert len(calls) == 2
    small.encode(["green"])
    small.encode(["red"])
    assert len(calls) == 3
    assert small.encode(["blue"]).abs().sum() > 0
    assert len(calls) == 4
    small.clear()
    assert small.encode(["blue"]).abs().sum() > 0
    assert len(calls) == 5
    handle.remove()


@pytest.mark.parametrize("wrong", [[], "a red ball", [None], [3]])
def test_prompts_must_be_texts(encoder, wrong):
    with pytest.raises(StreamvidError, match="list of texts"):
        encoder.encode(wrong)


def test_tokenizer_of_another_model_is_refused():
    with pytest.raises(StreamvidError, match="belongs to it"):
        UMT5TextEncoder(tiny_random.random_umt5(vocab_size=20), tiny_random.word_tokenizer())
