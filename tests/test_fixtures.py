"""The shared fixtures keep their promise: outputs depend on the prompt, pictures are not flat."""

import json

import torch


def test_model_answers_to_the_prompt(tiny_random_model, tiny_random_text):
    noise = torch.randn(1, 4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    flows = [
        tiny_random_model(noise, torch.tensor([500.0]), tiny_random_text.encode([prompt])).sample
        for prompt in ("a red ball", "a blue star")
    ]
    assert flows[0].shape == (1, 4, 3, 8, 8)
    assert flows[0].std() > 0.05
    assert (flows[0] - flows[1]).abs().max() > 1e-3


def test_vae_has_the_promised_scales(tiny_random_vae):
    latents = torch.randn(1, 4, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    frames = tiny_random_vae.decode(latents).sample
    assert frames.shape == (1, 3, 5, 64, 64)
    assert frames.std() > 0.02
    assert tiny_random_vae.encode(frames).latent_dist.mean.shape == latents.shape


def test_folder_has_every_part(tiny_random_folder):
    index = json.loads((tiny_random_folder / "model_index.json").read_text())
    for part in ("transformer", "vae", "text_encoder", "tokenizer"):
        assert part in index
        assert (tiny_random_folder / part).is_dir()
