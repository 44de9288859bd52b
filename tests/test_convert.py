"""``streamvid convert`` and ``streamvid info``: the same model out, nothing half-written, and one line on a mistake."""

import json

import pytest
import torch
from safetensors.torch import save_file
from test_checkpoints import HEADS, LAYOUT, original_state, same, write

from streamvid.checkpoints import load_components
from streamvid.cli import main
from streamvid.inspect_checkpoint import inspect_checkpoint


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_training_checkpoint_to_a_folder_that_diffusers_opens(tmp_path, capsys, tiny_random_folder):
    path = write(tmp_path / "in", {"generator": original_state(), "generator_ema": original_state()})
    target = tmp_path / "out" / "model"
    code, out, _ = run(
        capsys,
        "convert",
        path,
        target,
        "--vae",
        tiny_random_folder,
        "--text-encoder",
        tiny_random_folder,
        "--json",
    )
    assert code == 0
    assert set(json.loads(out)["written"]) >= {"transformer", "vae", "text_encoder", "tokenizer"}
    assert [p.name for p in target.parent.iterdir()] == ["model"]
    before, after = load_components(tiny_random_folder), load_components(target)
    assert same(before.transformer, after.transformer) and same(before.vae, after.vae)
    assert before.fingerprint == after.fingerprint and after.missing == {}
    rows = [parts.text.encode(["a red ball"])[:, :8] for parts in (before, after)]
    assert torch.equal(*rows)
    from diffusers import WanPipeline

    pipe = WanPipeline.from_pretrained(target)
    assert same(pipe.transformer, before.transformer)


def test_dtype_lora_and_a_tiny_autoencoder(tmp_path, capsys, tiny_random_model):
    from test_lora import adapter, check
    from test_vae import random_taehv

    path = write(tmp_path, {"generator": original_state()})
    save_file(adapter("flat", tiny_random_model), tmp_path / "lora.safetensors")
    save_file(random_taehv().state_dict(), tmp_path / "taew2_1.safetensors")
    code, _, err = run(
        capsys, "convert", path, tmp_path / "out", "--lora", tmp_path / "lora.safetensors",
        "--vae", tmp_path / "taew2_1.safetensors",
    )  # fmt: skip
    assert code == 0, err
    parts = load_components(tmp_path / "out")
    check(parts.transformer, tiny_random_model, 1.0)
    assert same(parts.vae, random_taehv()) and "text" in parts.missing
    code, _, err = run(capsys, "convert", tmp_path / "out", tmp_path / "half", "--dtype", "bf16")
    assert code == 0, err
    assert {p.dtype for p in load_components(tmp_path / "half").transformer.parameters()} == {torch.bfloat16}


def test_a_lone_autoencoder(tmp_path, capsys):
    code, _, err = run(capsys, "convert", LAYOUT.parent / "wan_vae" / "weights.safetensors", tmp_path / "out")
    assert code == 0, err
    from diffusers import AutoencoderKLWan

    assert AutoencoderKLWan.from_pretrained(tmp_path / "out" / "vae").config.base_dim == 6


def test_mistakes_leave_nothing(tmp_path, capsys, monkeypatch):
    path = write(tmp_path / "in", {"generator": original_state()})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    broken = tmp_path / "broken.pt"
    broken.write_bytes(path.read_bytes()[:1000])
    out = tmp_path / "out"
    for words, message in (
        ((path, tmp_path / "full"), "exists already"),
        ((broken, out), "damaged or truncated"),
        ((tmp_path / "absent", out), "no such file"),
        ((path, out, "--dtype", "float61"), "did you mean 'float16'"),
        ((path, out, "--which", "ema"), "no averaged (EMA) weights"),
        ((path, out, "--vae", path), "holds a Wan video transformer, but vae takes"),
    ):
        code, _, err = run(capsys, "convert", *words)
        assert code == 2 and message in err and err.count("\n") == 1, err

    def full_disk(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("diffusers.WanTransformer3DModel.save_pretrained", full_disk)
    code, _, err = run(capsys, "convert", path, out)
    assert code == 2 and "No space left" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken.pt", "full", "in"]
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["x"]


def test_info_of_a_folder(capsys, tiny_random_folder, tiny_random_model):
    code, out, err = run(capsys, "info", tiny_random_folder, "--json")
    assert code == 0, err
    found = json.loads(out)
    transformer, vae, text = found["parts"]
    assert transformer["parameters"] == sum(p.numel() for p in tiny_random_model.parameters())
    assert transformer["geometry"]["num_layers"] == 2 and transformer["dtypes"] == {
        "float32": transformer["parameters"]
    }
    assert vae["geometry"]["scale_factor_spatial"] == 8 and text["geometry"]["d_model"] == 16
    assert found["missing"] == {} and found["tokens_per_frame"] == 16
    # layers x (keys, values) x tokens x width x 2 bytes
    assert found["cache_bytes"]["3"] == 2 * 2 * (3 * 16) * 32 * 2
    code, out, _ = run(capsys, "info", tiny_random_folder)
    assert code == 0 and "12.00 KiB" in out


def test_info_of_lone_files(tmp_path, capsys, tiny_random_model):
    from test_lora import adapter

    path = write(tmp_path, {"generator": original_state(), "generator_ema": original_state()})
    found = inspect_checkpoint(path, "generator")
    assert found.parts[0].section == "generator" and found.parts[0].sections == ["generator", "generator_ema"]
    assert "--vae" in found.missing["vae"] and "--text-encoder" in found.missing["text_encoder"]
    save_file(adapter("flat", tiny_random_model), tmp_path / "lora.safetensors")
    lora = inspect_checkpoint(tmp_path / "lora.safetensors")
    assert lora.parts[0].kind == "lora" and lora.parts[0].geometry == {"ranks": [4]}
    taehv = inspect_checkpoint(LAYOUT.parent / "taehv" / "weights.safetensors")
    assert taehv.geometry("taehv")["scale_factor_temporal"] == 4
    code, out, _ = run(capsys, "info", path)
    assert code == 0 and "missing:" in out
    (tmp_path / "config.json").write_text(json.dumps(HEADS | {"num_layers": 9}))
    code, _, err = run(capsys, "info", path)
    assert code == 2 and "belongs to another model" in err


@pytest.mark.parametrize("words", [("info",), ("convert", "a")])
def test_arguments_are_required(capsys, words):
    assert run(capsys, *words)[0] == 2
