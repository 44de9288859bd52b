"""Checkpoint files and folders: every layout gives the same model, and a wrong one gives one line and nothing else."""

import contextlib
import json
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
import tiny_random
import torch
from safetensors.torch import load_file, save_file

from streamvid.checkpoint_formats import read_weights
from streamvid.checkpoint_keys import to_original
from streamvid.checkpoints import load_components, load_text_encoder, load_transformer, load_vae
from streamvid.errors import CheckpointError
from streamvid.fingerprint import fingerprint
from streamvid.locate import NAMED, resolve

LAYOUT = Path(__file__).parent / "golden" / "checkpoint_layout"
HEADS = {"num_heads": 2}


def original_state(model=None, prefix="model.") -> dict[str, torch.Tensor]:
    """The tiny model's weights under the original code's names."""
    model = model or tiny_random.random_transformer()
    return {prefix + to_original("transformer", k): v.clone() for k, v in model.state_dict().items()}


def write(folder: Path, content, name="model.pt", heads=True) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(content, folder / name)
    if heads:
        (folder / "config.json").write_text(json.dumps(HEADS))
    return folder / name


def same(a, b) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize(
    ("name", "which", "wanted"),
    [
        ("self_forcing_plain.pt", None, "ema"),
        ("self_forcing_plain.pt", "ema", "ema"),
        ("self_forcing_plain.pt", "generator", "generator"),
        ("self_forcing_fsdp_ema.pt", "ema", "ema"),
        ("self_forcing_fsdp_ema.pt", "generator", "generator"),
        ("generator_only.pt", None, "generator"),
        ("bare_state_dict.pt", None, "ema"),
        ("transformer_no_prefix.safetensors", None, "ema"),
    ],
)
def test_golden_layouts(name, which, wanted):
    expected = load_file(LAYOUT / f"expected_{wanted}.safetensors")
    config = json.loads((LAYOUT / "config.json").read_text())["model"]
    model = load_transformer(LAYOUT / name, which=which, config=config, dtype=torch.float32)
    state = model.state_dict()
    assert len(state) == len(expected)
    for key, value in state.items():
        assert torch.equal(value, expected[f"model.{to_original('transformer', key)}"]), key


def test_configuration_beside_the_file_may_nest_the_sizes():
    assert load_transformer(LAYOUT / "generator_only.pt").config.num_attention_heads == 2


@pytest.mark.parametrize("prefix", ["", "model.", "generator.", "module.", "generator.module.model."])
@pytest.mark.parametrize("infix", ["", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."])
def test_prefixes_and_infixes(tmp_path, tiny_random_model, prefix, infix):
    state = {
        prefix + k.replace("blocks.1.", f"blocks.1.{infix}"): v for k, v in original_state(prefix="").items()
    }
    assert same(load_transformer(write(tmp_path, state)), tiny_random_model)


@pytest.mark.parametrize("section", ["generator", "generator_ema", "model"])
def test_sections(tmp_path, tiny_random_model, section):
    content = {section: original_state(), "critic": {"model.x": torch.zeros(1)}, "step": 7}
    assert same(load_transformer(write(tmp_path, content)), tiny_random_model)


def test_asking_for_an_absent_part(tmp_path):
    path = write(tmp_path, {"generator": original_state()})
    with pytest.raises(CheckpointError, match=r"no averaged \(EMA\) weights; it holds 'generator'"):
        load_transformer(path, which="ema")
    with pytest.raises(CheckpointError, match="one flat set"):
        load_transformer(LAYOUT / "bare_state_dict.pt", which="ema")
    only_ema = write(tmp_path, {"generator_ema": original_state()}, "ema.pt")
    with pytest.raises(CheckpointError, match="no generator weights"):
        load_transformer(only_ema, which="generator")
    with pytest.raises(CheckpointError, match="'critic' is not a part"):
        load_transformer(path, which="critic")


def test_every_sort_of_misfit_is_listed_with_counts(tmp_path):
    state = original_state()
    renamed = [k for k in state if "self_attn" in k and k.endswith("bias")][:7]
    for key in renamed:
        state[key.replace("self_attn", "self_attm")] = state.pop(key)
    del state["model.blocks.1.norm3.weight"]
    state["model.extra"] = torch.zeros(1)
    state["model.blocks.0.ffn.2.weight"] = state["model.blocks.0.ffn.2.weight"].T.contiguous()
    with pytest.raises(CheckpointError) as caught:
        load_transformer(write(tmp_path, {"generator": state}))
    text = str(caught.value)
    assert "8 missing (" in text and "8 unexpected (" in text and "1 of wrong shape (" in text
    assert "model.blocks.0.ffn.2.weight [64, 32] instead of [32, 64]" in text
    assert text.count("self_attm") == 5 and "and 3 more" in text and "\n" not in text
    assert "nothing was loaded" in text


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_truncated_file(tmp_path, name, keep):
    path = write(tmp_path, original_state(), "whole.pt")
    if name.endswith("safetensors"):
        save_file(original_state(), tmp_path / name)
        path = tmp_path / name
    data = path.read_bytes()
    (tmp_path / name).write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(CheckpointError, match="damaged or truncated|no tensors") as caught:
        load_components(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_tensors_under_numbers_are_none_of_ours(tmp_path):
    """An optimiser's state, as training leaves it beside the weights."""
    torch.save({0: torch.zeros(2), "state": {1: torch.zeros(2)}}, tmp_path / "optimiser.pt")
    with pytest.raises(CheckpointError, match="holds no tensors with names"):
        read_weights(tmp_path / "optimiser.pt")


@pytest.mark.parametrize("kind", ["safetensors", "zip", "old"])
def test_a_file_cut_anywhere_is_an_error(kind, tmp_path, tiny_random_model):
    """Every length that a broken transfer can leave, and bytes that changed."""
    tensors = {name: value for name, value in tiny_random_model.state_dict().items() if value.numel() < 200}
    path = tmp_path / ("a.safetensors" if kind == "safetensors" else "a.pt")
    if kind == "safetensors":
        save_file({name: value.clone() for name, value in tensors.items()}, path)
    else:
        torch.save({"generator": tensors}, path, _use_new_zipfile_serialization=kind == "zip")
    whole = path.read_bytes()
    draw = random.Random(0)
    for length in [*range(20), *(draw.randrange(20, len(whole)) for _ in range(40))]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="damaged or truncated|refused") as error:
            read_weights(path)
        assert "\n" not in str(error.value) and "miniz" not in str(error.value)
    for _ in range(40):
        damaged = bytearray(whole)
        damaged[draw.randrange(min(len(whole), 4000))] = draw.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(CheckpointError):  # a byte of a tensor changes no shape
            read_weights(path)


def test_other_files_and_other_models(tmp_path):
    (tmp_path / "notes.md").write_text("hello, this is no checkpoint at all")
    save_file(
        {"down.0.weight": torch.zeros(2), "up.0.weight": torch.zeros(2)}, tmp_path / "other.safetensors"
    )
    save_file(tiny_random.random_vae().state_dict(), tmp_path / "vae.safetensors")
    (tmp_path / "empty").mkdir()
    for name, message in {
        "notes.md": "not a weight file",
        "other.safetensors": "not a model this program streams",
        "vae.safetensors": "no video transformer",
        "empty": "an empty folder",
        "absent.pt": "no such file, folder or model",
        "tiyn": "did you mean 'tiny'",
    }.items():
        with pytest.raises(CheckpointError, match=message) as caught:
            load_components(tmp_path / name if name != "tiyn" else name)
        assert "\n" not in str(caught.value)
    with pytest.raises(
        CheckpointError, match="holds a Wan VAE, but a model path takes a Wan video transformer"
    ):
        load_transformer(tmp_path / "vae.safetensors")


class Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("container", ["archive", "plain pickle"])
def test_no_code_from_weights(tmp_path, container):
    marker, path = tmp_path / "marker", tmp_path / "evil.pt"
    content = {"generator": original_state(), "note": Malicious(marker)}
    if container == "archive":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps({"note": Malicious(marker)}, protocol=2))
    with pytest.raises(CheckpointError, match="safetensors") as caught:
        load_components(path)
    assert "\n" not in str(caught.value)
    assert not marker.exists()


def test_head_count_must_be_known_and_fit(tmp_path):
    path = write(tmp_path, original_state(), heads=False)
    with pytest.raises(CheckpointError, match="config.json with num_heads"):
        load_transformer(path)
    (tmp_path / "config.json").write_text(json.dumps({"num_heads": 5}))
    with pytest.raises(CheckpointError, match="do not divide"):
        load_transformer(path)
    (tmp_path / "config.json").write_text(json.dumps(HEADS | {"num_layers": 7}))
    with pytest.raises(CheckpointError, match="belongs to another model"):
        load_transformer(path)


def test_complete_folder(tiny_random_folder, tiny_random_model, tiny_random_vae):
    parts = load_components(tiny_random_folder)
    assert same(parts.transformer, tiny_random_model) and same(parts.vae, tiny_random_vae)
    assert parts.text.encode(["a red ball"]).shape == (1, 8, 16)
    assert parts.config.chunk_latents == 3 and parts.config.vae_scale_spatial == 8
    assert parts.missing == {}
    noise, rows = torch.randn(1, 4, 3, 8, 8), torch.randn(1, 8, 16)
    ours = parts.transformer(noise, torch.tensor([500.0]), rows).sample
    assert torch.equal(ours, tiny_random_model(noise, torch.tensor([500.0]), rows).sample)


def test_folder_by_diffusers_own_loader(tiny_random_folder, tiny_random_model):
    from diffusers import WanTransformer3DModel

    assert same(WanTransformer3DModel.from_pretrained(tiny_random_folder / "transformer"), tiny_random_model)


def test_a_lone_file_says_what_it_lacks_and_takes_parts(tmp_path, tiny_random_folder):
    path = write(tmp_path, {"generator_ema": original_state()})
    bare = load_components(path)
    assert bare.vae is None and bare.text is None
    assert "--vae" in bare.missing["vae"] and "--text-encoder" in bare.missing["text"]
    save_file(tiny_random.random_vae().state_dict(), tmp_path / "vae.safetensors")
    full = load_components(path, vae=tiny_random_folder, text_encoder=tiny_random_folder)
    assert full.missing == {} and full.fingerprint == bare.fingerprint
    assert full.config.vae_scale_spatial == 8


def test_parts_of_another_model_are_refused(tmp_path, tiny_random_folder):
    shutil.copytree(tiny_random_folder, tmp_path / "wrong")
    shutil.rmtree(tmp_path / "wrong" / "vae")
    tiny_random.random_vae(z_dim=6, latents_mean=[0.0] * 6, latents_std=[1.0] * 6).save_pretrained(
        tmp_path / "wrong" / "vae"
    )
    with pytest.raises(CheckpointError, match="6 latent channels, but the transformer makes 4"):
        load_components(tmp_path / "wrong")
    tiny_random.random_transformer(text_dim=24).save_pretrained(tmp_path / "text" / "transformer")
    with pytest.raises(CheckpointError, match="width 16, but the transformer takes 24"):
        load_components(tmp_path / "text", text_encoder=tiny_random_folder)


def test_chunk_sizes_must_agree(tmp_path):
    state = original_state()
    save_file(state, tmp_path / "model.safetensors", metadata={"num_frame_per_block": "1"})
    (tmp_path / "config.json").write_text(json.dumps(HEADS))
    assert load_components(tmp_path / "model.safetensors").config.chunk_latents == 1
    (tmp_path / "streamvid.json").write_text(json.dumps({"chunk_latents": 3}))
    with pytest.raises(CheckpointError, match="chunk sizes disagree"):
        load_components(tmp_path / "model.safetensors")


def test_autoencoder_scale_must_agree_where_it_is_stated(tmp_path, tiny_random_folder):
    shutil.copytree(tiny_random_folder, tmp_path / "model")
    stated = json.loads((tmp_path / "model" / "streamvid.json").read_text())
    (tmp_path / "model" / "streamvid.json").write_text(json.dumps(stated | {"vae_scale_spatial": 16}))
    with pytest.raises(CheckpointError, match="spatial scale is 8, but streamvid.json says 16"):
        load_components(tmp_path / "model")


def test_tokenizer_with_its_own_code_is_refused(tmp_path, tiny_random_folder, capfd):
    shutil.copytree(tiny_random_folder, tmp_path / "model")
    folder = tmp_path / "model" / "tokenizer"
    marker = tmp_path / "marker"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own: pass\n")
    with pytest.raises(CheckpointError, match="not a tokenizer folder"):
        load_components(tmp_path / "model")
    assert not marker.exists()


def test_sharded_weights(tmp_path, tiny_random_model):
    tiny_random_model.save_pretrained(tmp_path / "transformer", max_shard_size="20KB")
    shards = sorted((tmp_path / "transformer").glob("*.safetensors"))
    assert len(shards) > 2
    assert same(load_transformer(tmp_path / "transformer"), tiny_random_model)
    shards[1].unlink()
    with pytest.raises(CheckpointError, match="1 of .* weight files are missing"):
        load_transformer(tmp_path / "transformer")


def test_original_wan_folder(tmp_path, tiny_random_model, tiny_random_folder):
    save_file(original_state(prefix=""), tmp_path / "diffusion_pytorch_model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(HEADS | {"dim": 32, "model_type": "t2v"}))
    state = tiny_random.random_umt5().state_dict()
    state.pop("encoder.embed_tokens.weight", None)
    torch.save({to_original("text_encoder", k): v for k, v in state.items()}, tmp_path / "models_t5_umt5.pth")
    shutil.copytree(tiny_random_folder / "tokenizer", tmp_path / "google" / "umt5-xxl")
    golden_vae = load_file(LAYOUT.parent / "wan_vae" / "weights.safetensors")
    torch.save(golden_vae, tmp_path / "Wan2.1_VAE.pth")
    assert same(load_transformer(tmp_path), tiny_random_model)
    text = load_text_encoder(tmp_path / "models_t5_umt5.pth", text_len=8)
    reference = load_text_encoder(tiny_random_folder, text_len=8)
    assert text.model.config.num_heads == 2
    torch.testing.assert_close(text.encode(["a red ball"]), reference.encode(["a red ball"]))
    assert load_vae(tmp_path / "Wan2.1_VAE.pth").config.z_dim == 16
    with pytest.raises(CheckpointError, match="16 latent channels, but the transformer makes 4"):
        load_components(tmp_path)


def test_dtype_and_fingerprint(tmp_path, tiny_random_folder, tiny_random_model):
    half = load_components(tiny_random_folder, dtype=torch.bfloat16)
    assert {p.dtype for p in half.transformer.parameters()} == {torch.bfloat16}
    assert (
        half.fingerprint == load_components(tiny_random_folder).fingerprint == fingerprint(tiny_random_model)
    )
    assert fingerprint(tiny_random.random_transformer(seed=1)) != half.fingerprint


def test_a_name_wins_over_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.setitem(NAMED, "tiny", ("streamvid", "commands"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert resolve("tiny").name == "commands"
    assert resolve("./tiny") == Path("tiny")
    monkeypatch.setitem(NAMED, "tiny", ("streamvid", "absent"))
    with pytest.raises(CheckpointError, match="not in this installation"):
        resolve("tiny")


def test_repository_without_network_is_one_line():
    for name in ("nobody/no-such-model", "nobody/no-such-model/folder/file.pt"):
        with pytest.raises(CheckpointError, match="no network, or offline mode") as caught:
            load_components(name)
        assert "\n" not in str(caught.value)
