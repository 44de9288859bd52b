"""Sizes of a model from the shapes of its tensors, as arguments of its class.

What shapes cannot tell (how a width divides into heads) comes from a configuration beside the weights, or from the
published models: heads of 128.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from streamvid.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]

DEFAULT_HEAD_DIM = 128
_ORIGINAL_SIZES = ("dim", "ffn_dim", "num_layers", "freq_dim", "text_dim")


def transformer_config(shapes: Shapes, given: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    """Arguments of `WanTransformer3DModel`.

    Args:
        shapes: library names to shapes.
        given: a ``config.json`` beside the weights, in diffusers' or the original spelling, or None.
        where: the file, for messages.

    Raises:
        CheckpointError: a tensor that decides a size is missing, the head count is unknown, or ``given`` contradicts
            the tensors.
    """
    given = _flatten(given or {})
    try:
        patch = shapes["patch_embedding.weight"]
        dim, heads = patch[0], _heads(patch[0], given, where)
        config: dict[str, Any] = {
            "patch_size": tuple(patch[2:]),
            "num_attention_heads": heads,
            "attention_head_dim": dim // heads,
            "in_channels": patch[1],
            "out_channels": shapes["proj_out.weight"][0] // math.prod(patch[2:]),
            "text_dim": shapes["condition_embedder.text_embedder.linear_1.weight"][1],
            "freq_dim": shapes["condition_embedder.time_embedder.linear_1.weight"][1],
            "ffn_dim": shapes["blocks.0.ffn.net.0.proj.weight"][0],
            "num_layers": count_layers(shapes, r"blocks\.(\d+)\."),
            "cross_attn_norm": "blocks.0.norm2.weight" in shapes,
            "qk_norm": "rms_norm_across_heads" if "blocks.0.attn1.norm_q.weight" in shapes else None,
            "eps": float(given.get("eps", 1e-6)),
        }
    except KeyError as missing:
        raise CheckpointError(
            f"{where}: tensor {missing} is missing, so the model's size cannot be told"
        ) from None
    image = shapes.get("condition_embedder.image_embedder.norm1.weight")
    if image is not None:
        config |= {"image_dim": image[0], "added_kv_proj_dim": dim}
        position = shapes.get("condition_embedder.image_embedder.pos_embed")
        config["pos_embed_seq_len"] = position[1] if position is not None else None
    if "rope_max_seq_len" in given:
        config["rope_max_seq_len"] = int(given["rope_max_seq_len"])
    _agree(config | {"dim": dim}, given, where)
    return config


def _flatten(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """A configuration may keep the model's sizes one level down, under ``model`` or ``config``."""
    for key in ("model", "config"):
        if isinstance(given.get(key), Mapping):
            return given[key]
    return given


def _heads(dim: int, given: Mapping[str, Any], where: str) -> int:
    heads = given.get("num_attention_heads", given.get("num_heads"))
    if heads is None and "attention_head_dim" in given:
        heads = dim // int(given["attention_head_dim"])
    if heads is None and dim % DEFAULT_HEAD_DIM == 0:
        heads = dim // DEFAULT_HEAD_DIM
    if heads is None:
        raise CheckpointError(
            f"{where}: width {dim} is no multiple of {DEFAULT_HEAD_DIM}, so the number of heads cannot be told; put "
            "a config.json with num_heads beside the file"
        )
    if dim % int(heads):
        raise CheckpointError(
            f"{where}: its config.json says {heads} heads, which do not divide the width {dim}"
        )
    return int(heads)


def _agree(config: Mapping[str, Any], given: Mapping[str, Any], where: str) -> None:
    names = {name: name for name in _ORIGINAL_SIZES} | {"in_channels": "in_channels", "in_dim": "in_channels"}
    for said, name in names.items():
        if said in given and int(given[said]) != config[name]:
            raise CheckpointError(
                f"{where}: its config.json says {said}={given[said]}, but its tensors are of {config[name]}; "
                "the configuration belongs to another model"
            )


def count_layers(shapes: Shapes, pattern: str) -> int:
    """One more than the largest number that ``pattern``'s group takes among the names; 0 when there is none."""
    numbers = [int(match[1]) for name in shapes if (match := re.match(pattern, name))]
    return max(numbers, default=-1) + 1


def vae_config(shapes: Shapes, given: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    """Arguments of `AutoencoderKLWan`; latent statistics from ``given``, else the class's own for 16 channels.

    Raises:
        CheckpointError: not the layers of a Wan autoencoder, or statistics that nothing tells.
    """
    given = given or {}
    given = given.get("diffusers_config", given)
    try:
        base, colours = shapes["encoder.conv_in.weight"][:2]
        z_dim = shapes["post_quant_conv.weight"][0]
        decoder_width = shapes["decoder.conv_in.weight"][0]
        out_colours = shapes["decoder.conv_out.weight"][0]
    except KeyError as missing:
        raise CheckpointError(
            f"{where}: tensor {missing} is missing, so the autoencoder's size cannot be told"
        ) from None
    residual = any(".resnets." in name and name.startswith("encoder.down_blocks.") for name in shapes)
    mult, units, temporal = _residual_stages(shapes, base) if residual else _flat_stages(shapes, base)
    patch = math.isqrt(colours // 3)
    config: dict[str, Any] = {
        "base_dim": base,
        "decoder_base_dim": decoder_width // mult[-1],
        "z_dim": z_dim,
        "dim_mult": mult,
        "num_res_blocks": units,
        "attn_scales": [],
        "temperal_downsample": temporal,
        "is_residual": residual,
        "in_channels": colours,
        "out_channels": out_colours,
        "patch_size": patch if patch > 1 else None,
        "scale_factor_temporal": 2 ** sum(temporal),
        "scale_factor_spatial": 2 ** len(temporal) * patch,
    }
    for name in ("latents_mean", "latents_std"):
        if name in given:
            config[name] = list(given[name])
        elif z_dim != 16:
            raise CheckpointError(
                f"{where}: nothing tells {name} of its {z_dim} latent channels; put a config.json beside it"
            )
    return config


def _flat_stages(shapes: Shapes, base: int) -> tuple[list[int], int, list[bool]]:
    widths: list[int] = []
    counts: list[int] = [0]
    temporal: list[bool] = []
    for number in range(count_layers(shapes, r"encoder\.down_blocks\.(\d+)\.")):
        unit = f"encoder.down_blocks.{number}"
        if f"{unit}.resample.1.weight" in shapes:
            temporal.append(f"{unit}.time_conv.weight" in shapes)
            counts.append(0)
        elif f"{unit}.conv1.weight" in shapes:
            del widths[len(counts) - 1 :]
            widths.append(shapes[f"{unit}.conv1.weight"][0])
            counts[-1] += 1
    return [width // base for width in widths], counts[0], temporal


def _residual_stages(shapes: Shapes, base: int) -> tuple[list[int], int, list[bool]]:
    stages = count_layers(shapes, r"encoder\.down_blocks\.(\d+)\.")
    widths = [shapes[f"encoder.down_blocks.{stage}.resnets.0.conv1.weight"][0] for stage in range(stages)]
    temporal = [
        f"encoder.down_blocks.{stage}.downsampler.time_conv.weight" in shapes for stage in range(stages - 1)
    ]
    units = count_layers(shapes, r"encoder\.down_blocks\.0\.resnets\.(\d+)\.")
    return [width // base for width in widths], units, temporal


def umt5_config(shapes: Shapes, where: str) -> dict[str, Any]:
    """Arguments of `UMT5Config` for an encoder with gated GELU layers. Raises CheckpointError as above."""
    try:
        vocab, width = shapes["shared.weight"]
        layer = "encoder.block.0.layer"
        buckets, heads = shapes[f"{layer}.0.SelfAttention.relative_attention_bias.weight"]
        return {
            "vocab_size": vocab,
            "d_model": width,
            "d_kv": shapes[f"{layer}.0.SelfAttention.q.weight"][0] // heads,
            "d_ff": shapes[f"{layer}.1.DenseReluDense.wi_0.weight"][0],
            "num_layers": count_layers(shapes, r"encoder\.block\.(\d+)\."),
            "num_heads": heads,
            "relative_attention_num_buckets": buckets,
            "feed_forward_proj": "gated-gelu",
            "dropout_rate": 0.0,
        }
    except KeyError as missing:
        raise CheckpointError(
            f"{where}: tensor {missing} is missing, so the text encoder's size cannot be told"
        ) from None
