"""The training code of the tiny model: its fast paths equal the library's, its stages learn, stop and go
on."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import streamvid
from streamvid.cli import main
from streamvid.tiny import rollout
from streamvid.tiny.captions import sample_attributes
from streamvid.tiny.codec import decode_raw, encode_parameters, make_vae
from streamvid.tiny.data import CLIP_CHUNKS, Pool, first_frame, make_batch
from streamvid.tiny.dit import (
    TeacherForcing,
    make_transformer,
    rotate,
    rotation,
    run,
    softmax_attention,
    text_keys,
)
from streamvid.tiny.optim import MuonAdam, orthogonalise
from streamvid.tiny.text import embed, make_text_encoder, make_tokenizer, train_text
from streamvid.tiny.train_dit import bias_of, train_dit
from streamvid.tiny.train_few import train_few


@pytest.fixture(scope="module")
def text():
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    return make_text_encoder(len(tokenizer)).eval().requires_grad_(False), tokenizer


@pytest.fixture(scope="module")
def pool():
    torch.manual_seed(0)
    scenes = [sample_attributes(np.random.default_rng(i)) for i in range(24)]
    return Pool(
        clips=torch.randn(24, CLIP_CHUNKS, 3, 48, 4, 4).half(),
        before=scenes,
        after=scenes[::-1],
        switch=[1 + i % CLIP_CHUNKS for i in range(24)],
        firsts=torch.randn(24, 3, 48, 4, 4).half(),
        first_scenes=scenes,
    )


def small_transformer():
    torch.manual_seed(1)
    model = make_transformer(heads=2, layers=2)
    torch.nn.init.normal_(model.proj_out.weight, std=0.05)
    return model


def test_vae_in_two_calls_equals_the_library():
    torch.manual_seed(0)
    vae = make_vae(base=8, decoder_base=8, z_dim=8).eval()
    video = torch.rand(1, 3, 13, 32, 32) * 2 - 1
    with torch.no_grad():
        parameters = encode_parameters(vae, video)
        assert torch.allclose(parameters, vae.encode(video).latent_dist.parameters, atol=1e-5)
        z = parameters[:, :8]
        assert torch.allclose(decode_raw(vae, z).clamp(-1, 1), vae.decode(z).sample, atol=1e-5)


@torch.no_grad()
def test_one_chunk_equals_the_library(text):
    model = small_transformer()
    latents, times = torch.randn(2, 3, 48, 4, 4), torch.tensor([500.0, 500.0])
    rows = embed(*text, ["a big red star", "a ring"])

    def attend(layer, q, k, v):
        factors = rotation(model, torch.zeros(2, dtype=torch.long), 4, 4)
        q, k = rotate(q, factors), rotate(k, factors)
        return softmax_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)

    flow = run(model, latents, times, text_keys(model, rows), torch.arange(2), attend)
    expected = model(latents.transpose(1, 2), times, rows).sample.transpose(1, 2)
    assert torch.allclose(flow, expected, atol=1e-5)


@torch.no_grad()
def test_teacher_forcing_equals_cached_sampling(text):
    model = small_transformer()
    keys = text_keys(model, embed(*text, ["a ring"]))
    chunks, which = torch.randn(4, 3, 48, 4, 4), torch.zeros(1, dtype=torch.long)
    cache, cached = rollout.Cache(), []
    for chunk in chunks.split(1):
        attend = rollout._Attend(model, cache, (4, 4), "cpu")
        cached.append(run(model, chunk * 0.5, torch.tensor([700.0]), keys, which, attend))
        attend = rollout._Attend(model, cache, (4, 4), "cpu")
        run(model, chunk, torch.tensor([0.0]), keys, which, attend)
        cache.push(attend.own)
    sees = torch.ones(3, 3).tril().bool()[None]
    factors = rotation(model, torch.tensor([0, 3, 6, 3, 6, 9]), 4, 4)
    forced = TeacherForcing(0, 1, 3, 3, factors, bias_of(sees, 48), bias_of(sees, 48))
    times = torch.tensor([0.0] * 3 + [700.0] * 3)
    flow = run(model, torch.cat([chunks[:3], chunks[1:] * 0.5]), times, keys, which.repeat(6), forced)
    assert torch.allclose(flow[3:], torch.cat(cached[1:]), atol=1e-5)


def test_a_batch_is_a_function_of_seed_and_step_and_switches_at_chunks(pool):
    one, two = (make_batch(pool, 3, 5, alone=2, budget=12) for _ in range(2))
    assert torch.equal(one.latents, two.latents) and one.captions == two.captions
    assert (
        len(one.latents)
        == len(one.base)
        == len(one.which)
        == one.alone + one.windows * (one.clean + one.noisy)
    )
    assert [first_frame(c) for c in range(3)] == [0, 9, 21]
    for step in range(30):
        batch = make_batch(pool, 0, step, alone=1, budget=12)
        assert batch.clean_sees.diagonal(dim1=1, dim2=2).all()
        assert batch.noisy_sees.any(-1).all()  # no continuation without a past
        assert batch.captions[0] == "" and int(batch.which.max()) < len(batch.captions)


def test_muon_orthogonalises_and_descends():
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(2, 16, 40), steps=5))
    assert values.min() > 0.5 and values.max() < 1.4
    weight, target = torch.nn.Parameter(torch.zeros(8, 8)), torch.randn(8, 8)
    optimizer = MuonAdam([weight], lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        loss = (weight - target).pow(2).mean()
        loss.backward()
        optimizer.step()
    assert loss < 0.1 * target.pow(2).mean()


def test_text_stage_learns_saves_and_goes_on(tmp_path):
    encoder, tokenizer = train_text(tmp_path / "text", 0.03)
    state = torch.load(tmp_path / "text" / "state.pt", weights_only=True)
    assert state["step"] > 0
    again, _ = train_text(tmp_path / "text", 0.03)  # the time is spent: nothing changes
    assert all(torch.equal(a, b) for a, b in zip(encoder.parameters(), again.parameters(), strict=True))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    prompt = "A big Red star, spinning!"
    assert loaded(prompt)["input_ids"] == tokenizer(prompt)["input_ids"]
    rows = embed(encoder, loaded, [prompt])
    assert rows[0, :6].abs().sum(1).min() > 0 and rows[0, 6:].abs().max() == 0


def test_transformer_stages_run_and_resume(tmp_path, text, pool):
    model = make_transformer(heads=2, layers=2)
    kwargs = {"plan": ((1.0, 2, 3),), "model": model}
    train_dit(tmp_path / "dit", 0.03, pool, *text, **kwargs)
    steps = torch.load(tmp_path / "dit" / "state.pt", weights_only=True)["step"]
    ema = train_dit(tmp_path / "dit", 0.06, pool, *text, **kwargs)
    assert torch.load(tmp_path / "dit" / "state.pt", weights_only=True)["step"] > steps > 0
    few = train_few(tmp_path / "few", 0.03, pool, *text, ema, alone=2, budget=4)
    latents = rollout.generate(few, embed(*text, ["a ring", "a star"]), 2)
    assert latents.shape == (2, 6, 48, 4, 4) and latents.isfinite().all()


def test_the_whole_recipe_from_nothing_ends_with_a_loadable_model(tmp_path, capsys):
    assert main(["train-tiny", "--minutes", "1", "-o", str(tmp_path / "run"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    for stage in ("vae", "dit"):
        early, late = report["losses"][stage]
        assert late < early, stage
    clip = streamvid.load(report["path"])("a big red ball on a navy background", num_frames=13)
    assert clip.frames.shape == (1, 13, 64, 64, 3)
    assert main(["train-tiny", "--minutes", "0.8", "-o", str(tmp_path / "run"), "--no-resume"]) == 2
