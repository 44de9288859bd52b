"""Compiled blocks: the same stream within rounding, compiled once for all layers; refused where it cannot work."""

import shutil
from itertools import islice

import pytest
import torch

import streamvid
from streamvid.errors import StreamvidError


def latents(pipe, chunks: int, **options) -> torch.Tensor:
    with pipe.stream("red bird", output_type="latent", height=32, width=32, seed=3, **options) as stream:
        return torch.cat([chunk.frames for chunk in islice(stream.chunks(), chunks)])


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_compiled_stream_is_the_eager_one_and_layers_share_the_code(tiny_random_folder) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    eager, fast = (streamvid.load(tiny_random_folder, compile=compile) for compile in (False, True))
    torch.testing.assert_close(latents(fast, 3), latents(eager, 3), rtol=1e-4, atol=1e-4)
    graphs = counters["stats"]["unique_graphs"]
    assert 2 <= graphs <= 4, "one graph before attention and one after it, not one a layer"
    # Another prompt, subsets of tokens and a step cache that looks into blocks compile nothing more.
    with fast.stream("a very green ball that jumps", output_type="latent", height=32, width=32) as stream:
        next(stream.chunks())
        assert stream.settings["compile"] is True
    options = {"step_cache": "tokens:ratio=0.5", "num_inference_steps": 4}
    torch.testing.assert_close(
        latents(fast, 2, **options), latents(eager, 2, **options), rtol=1e-4, atol=1e-4
    )
    assert counters["stats"]["unique_graphs"] == graphs


def test_without_a_compiler_it_is_one_sentence(monkeypatch, tiny_random_folder) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(StreamvidError, match=r"C\+\+ compiler"):
        streamvid.load(tiny_random_folder, compile=True)
