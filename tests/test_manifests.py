"""The published models' tensor names and shapes fit the classes completely, on the meta device."""

import json
from pathlib import Path

import pytest
import torch

from streamvid.checkpoint_formats import WeightFile
from streamvid.checkpoint_keys import to_original
from streamvid.checkpoint_models import build_empty, identify, load_model, mismatch

MANIFESTS = Path(__file__).parent / "golden" / "manifests"
EXPECTED = {
    "wan2.1-t2v-1.3b.transformer": (
        "transformer",
        {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960},
    ),
    "wan2.1-t2v-14b.transformer": (
        "transformer",
        {"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824},
    ),
    "wan2.1-i2v-14b.transformer": ("transformer", {"in_channels": 36, "out_channels": 16, "image_dim": 1280}),
    "wan2.1.vae": ("vae", {"base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2}),
    "umt5-xxl-enc": ("text_encoder", {"d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64}),
}


def manifest(name: str) -> tuple[dict, WeightFile]:
    content = json.loads((MANIFESTS / f"{name}.json").read_text())
    tensors = {key: torch.empty(shape, device="meta") for key, shape in content["keys"].items()}
    return content, WeightFile(Path(f"{name}.safetensors"), tensors)


@pytest.mark.parametrize("name", EXPECTED)
def test_loads_with_nothing_missing_and_nothing_left(name):
    kind, sizes = EXPECTED[name]
    content, weights = manifest(name)
    model = load_model(weights, (kind,), "test", device="meta", dtype=None)
    assert sum(p.numel() for p in model.parameters()) == content["num_parameters"]
    for key, value in sizes.items():
        assert getattr(model.config, key) == value
    assert not weights.tensors


@pytest.mark.parametrize("name", [n for n in EXPECTED if "transformer" in n] + ["wan2.1.vae"])
def test_names_are_those_of_diffusers_converter(name):
    from diffusers.loaders import single_file_utils as converters

    content, weights = manifest(name)
    _, names = identify(weights)
    kind = EXPECTED[name][0]
    convert = (
        converters.convert_wan_transformer_to_diffusers
        if kind == "transformer"
        else converters.convert_wan_vae_to_diffusers
    )
    assert convert({key: key for key in content["keys"]}) == names
    if kind == "transformer":
        assert {to_original("transformer", new): new for new in names} == {
            old: new for new, old in names.items()
        }


def test_every_layer_of_umt5_has_its_own_relative_bias():
    _, weights = manifest("umt5-xxl-enc")
    _, names = identify(weights)
    bias = [new for new, old in names.items() if "pos_embedding" in old]
    assert len(bias) == 24 and all("relative_attention_bias" in name for name in bias)


def test_a_renamed_tensor_is_named_in_the_files_own_spelling():
    content, weights = manifest("wan2.1-t2v-1.3b.transformer")
    weights.tensors["blocks.3.ffn.9.weight"] = weights.tensors.pop("blocks.3.ffn.0.weight")
    contents, names = identify(weights)
    shapes = {new: tuple(weights.tensors[old].shape) for new, old in names.items()}
    model = build_empty(contents, shapes, None, "x")
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    text = mismatch(expected, shapes, contents, names)
    assert text == "1 missing (blocks.3.ffn.0.weight), 1 unexpected (blocks.3.ffn.9.weight)"
