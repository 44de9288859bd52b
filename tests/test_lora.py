"""Adapters: every layout merges to the same weights, and one that does not fit changes nothing."""

import json

import pytest
import tiny_random
import torch
from safetensors.torch import save_file

from streamvid.checkpoint_keys import to_original
from streamvid.errors import CheckpointError
from streamvid.lora import LoraSpec, merge_lora

RANK = 4
TARGETS = (
    "blocks.0.attn1.to_q",
    "blocks.1.attn2.to_out.0",
    "blocks.1.ffn.net.2",
    "condition_embedder.time_proj",
)


def factors(model) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    out = {}
    for name in TARGETS:
        rows, columns = model.get_parameter(f"{name}.weight").shape
        out[name] = (
            torch.randn(RANK, columns, generator=generator),
            torch.randn(rows, RANK, generator=generator),
        )
    return out


def original(name: str) -> str:
    return to_original("transformer", f"{name}.weight").removesuffix(".weight")


LAYOUTS = {
    "peft": lambda n: (f"base_model.model.{n}.lora_A.weight", f"base_model.model.{n}.lora_B.weight"),
    "peft default": lambda n: (f"{n}.lora_A.default.weight", f"{n}.lora_B.default.weight"),
    "peft original": lambda n: (
        f"base_model.model.model.{original(n)}.lora_A.weight",
        f"base_model.model.model.{original(n)}.lora_B.weight",
    ),
    "fsdp original": lambda n: (
        f"base_model.model.model._fsdp_wrapped_module.{original(n)}.lora_A.weight",
        f"base_model.model.model._fsdp_wrapped_module.{original(n)}.lora_B.weight",
    ),
    "diffusers": lambda n: (f"transformer.{n}.lora_A.weight", f"transformer.{n}.lora_B.weight"),
    "diffusion_model": lambda n: (
        f"diffusion_model.{original(n)}.lora_down.weight",
        f"diffusion_model.{original(n)}.lora_up.weight",
    ),
    "flat": lambda n: (
        f"lora_unet_{original(n).replace('.', '_')}.lora_down.weight",
        f"lora_unet_{original(n).replace('.', '_')}.lora_up.weight",
    ),
}


def adapter(layout: str, model) -> dict[str, torch.Tensor]:
    out = {}
    for name, (down, up) in factors(model).items():
        for key, value in zip(LAYOUTS[layout](name), (down, up), strict=True):
            out[key] = value.clone()
    return out


def check(model, base, scale: float) -> None:
    deltas = {f"{name}.weight": up @ down for name, (down, up) in factors(base).items()}
    for name, value in model.state_dict().items():
        expected = base.get_parameter(name) + scale * deltas.get(name, torch.zeros(()))
        torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_merges(tmp_path, tiny_random_model, layout):
    save_file(adapter(layout, tiny_random_model), tmp_path / "a.safetensors")
    model = tiny_random.random_transformer()
    merge_lora(model, [tmp_path / "a.safetensors"])
    check(model, tiny_random_model, 1.0)


def test_generator_lora_section_of_a_training_checkpoint(tmp_path, tiny_random_model):
    torch.save(
        {"generator_lora": adapter("peft original", tiny_random_model), "step": 3}, tmp_path / "lora.pt"
    )
    model = tiny_random.random_transformer()
    merge_lora(model, [LoraSpec(tmp_path / "lora.pt", alpha=2.0)])
    check(model, tiny_random_model, 2.0 / RANK)


def test_scale_and_alpha(tmp_path, tiny_random_model):
    state = adapter("flat", tiny_random_model)
    names = {key.split(".")[0] for key in state}
    save_file(state | {f"{n}.alpha": torch.tensor(2.0) for n in names}, tmp_path / "a.safetensors")
    model = tiny_random.random_transformer()
    merge_lora(model, [f"{tmp_path / 'a.safetensors'}@0.5"])
    check(model, tiny_random_model, 0.5 * 2.0 / RANK)
    (tmp_path / "folder").mkdir()
    save_file(state, tmp_path / "folder" / "adapter_model.safetensors")
    (tmp_path / "folder" / "adapter_config.json").write_text(json.dumps({"lora_alpha": 8, "r": RANK}))
    other = tiny_random.random_transformer()
    merge_lora(other, [tmp_path / "folder"])
    check(other, tiny_random_model, 8.0 / RANK)


def test_whole_differences_and_order(tmp_path, tiny_random_model):
    bias = torch.ones(32)
    state = {
        "diffusion_model.blocks.0.self_attn.q.diff_b": bias,
        "diffusion_model.blocks.0.norm3.diff": torch.full((32,), 0.5),
        "diffusion_model.blocks.1.modulation.diff": torch.full((1, 6, 32), 0.25),
    }
    save_file(state, tmp_path / "d.safetensors")
    model = tiny_random.random_transformer()
    merge_lora(model, [tmp_path / "d.safetensors", f"{tmp_path / 'd.safetensors'}@-2"])
    for name, amount in (
        ("blocks.0.attn1.to_q.bias", 1.0),
        ("blocks.0.norm2.weight", 0.5),
        ("blocks.1.scale_shift_table", 0.25),
    ):
        change = model.get_parameter(name) - tiny_random_model.get_parameter(name)
        torch.testing.assert_close(change, torch.full_like(change, -amount))


def test_an_adapter_of_another_model_changes_nothing(tmp_path, tiny_random_model):
    good = adapter("diffusers", tiny_random_model)
    wrong_place = good | {
        "transformer.blocks.7.attn1.to_q.lora_A.weight": torch.zeros(RANK, 32),
        "transformer.blocks.7.attn1.to_q.lora_B.weight": torch.zeros(32, RANK),
    }
    wrong_shape = good | {"transformer.blocks.0.attn1.to_q.lora_B.weight": torch.zeros(16, RANK)}
    half = {key: value for key, value in good.items() if "ffn" not in key or "lora_A" in key}
    unknown = good | {"transformer.blocks.0.attn1.to_q.hada_w1": torch.zeros(2)}
    for state, message in (
        (wrong_place, "1 of 5 adapted layers have no place"),
        (wrong_shape, "1 of 4 adapted layers have no place"),
        (half, "only one of its two"),
        (unknown, "of no LoRA layout"),
    ):
        save_file(state, tmp_path / "x.safetensors")
        model = tiny_random.random_transformer()
        with pytest.raises(CheckpointError, match=message):
            merge_lora(model, [tmp_path / "x.safetensors"])
        assert all(
            torch.equal(value, tiny_random_model.get_parameter(n)) for n, value in model.state_dict().items()
        )
    with pytest.raises(CheckpointError, match="'much' is not a number"):
        merge_lora(tiny_random.random_transformer(), ["adapter.safetensors@much"])
