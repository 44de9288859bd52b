"""Names of tensors: what a checkpoint holds, and its names in the classes of diffusers and transformers.

Three families have two spellings each: the one of the original code ("original") and the one of the library class
("library"). The maps are between names only; shapes and values are untouched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from streamvid.errors import CheckpointError

Kind = Literal["transformer", "vae", "text_encoder", "taehv", "lora"]
Layout = Literal["original", "library"]

INFIXES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
PREFIXES = ("generator.", "module.", "model.diffusion_model.", "diffusion_model.", "model.")

_ATTENTION = {
    "q": "to_q",
    "k": "to_k",
    "v": "to_v",
    "o": "to_out.0",
    "norm_q": "norm_q",
    "norm_k": "norm_k",
    "k_img": "add_k_proj",
    "v_img": "add_v_proj",
    "norm_k_img": "norm_added_k",
}
_BLOCK = {
    "modulation": "scale_shift_table",
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    **{f"self_attn.{old}": f"attn1.{new}" for old, new in _ATTENTION.items()},
    **{f"cross_attn.{old}": f"attn2.{new}" for old, new in _ATTENTION.items()},
}
_TOP = {
    "patch_embedding": "patch_embedding",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
    "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
    "head.modulation": "scale_shift_table",
    "head.head": "proj_out",
}
_T5_BLOCK = {
    "norm1": "layer.0.layer_norm",
    "attn.q": "layer.0.SelfAttention.q",
    "attn.k": "layer.0.SelfAttention.k",
    "attn.v": "layer.0.SelfAttention.v",
    "attn.o": "layer.0.SelfAttention.o",
    "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
    "norm2": "layer.1.layer_norm",
    "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
    "ffn.fc1": "layer.1.DenseReluDense.wi_1",
    "ffn.fc2": "layer.1.DenseReluDense.wo",
}
_T5_TOP = {"token_embedding": "shared", "norm": "encoder.final_layer_norm"}


@dataclass(frozen=True)
class Contents:
    """What a set of tensor names is."""

    kind: Kind
    layout: Layout


def clean_name(name: str) -> str:
    """The name without wrappers' infixes (anywhere) and prefixes (at the start, repeatedly)."""
    for infix in INFIXES:
        name = name.replace(infix, "")
    stripped = True
    while stripped:
        stripped = False
        for prefix in PREFIXES:
            if name.startswith(prefix):
                name, stripped = name[len(prefix) :], True
    return name


def clean_names(names: Iterable[str], where: str) -> dict[str, str]:
    """Cleaned name to the name in the file. Raises CheckpointError when two names become one."""
    out: dict[str, str] = {}
    for name in names:
        cleaned = clean_name(name)
        if cleaned in out:
            raise CheckpointError(f"{where}: {out[cleaned]!r} and {name!r} are the same tensor {cleaned!r}")
        out[cleaned] = name
    return out


def classify(names: Iterable[str]) -> Contents | None:
    """What the cleaned ``names`` are; None when they are of no model that can be streamed."""
    known = set(names)
    if any(".lora_" in n or n.startswith("lora_") for n in known):
        return Contents("lora", "original")
    signs: tuple[tuple[str, Kind, Layout], ...] = (
        ("shared.weight", "text_encoder", "library"),
        ("encoder.embed_tokens.weight", "text_encoder", "library"),
        ("token_embedding.weight", "text_encoder", "original"),
        ("encoder.conv_in.weight", "vae", "library"),
        ("decoder.conv_in.weight", "vae", "library"),
        ("encoder.conv1.weight", "vae", "original"),
        ("decoder.conv1.weight", "vae", "original"),
        ("decoder.1.weight", "taehv", "original"),
        ("encoder.0.weight", "taehv", "original"),
    )
    for sign, kind, layout in signs:
        if sign in known:
            return Contents(kind, layout)
    if any(n.startswith("condition_embedder.") or ".attn1." in n for n in known):
        return Contents("transformer", "library")
    if any(n.startswith("text_embedding.") or ".self_attn." in n for n in known):
        return Contents("transformer", "original")
    return None


def to_library(contents: Contents, names: Iterable[str]) -> dict[str, str]:
    """File name (cleaned) to library name; a name without a counterpart is kept, so that it shows as unexpected."""
    names = list(names)
    if contents.layout == "library" or contents.kind in ("taehv", "lora"):
        return {name: name for name in names}
    if contents.kind == "vae":
        return _vae_names(names)
    return {name: _rename(name, contents.kind, inverse=False) for name in names}


def to_original(kind: Kind, name: str) -> str:
    """The original spelling of a library name of a transformer or text encoder; others are returned as they are."""
    return _rename(name, kind, inverse=True) if kind in ("transformer", "text_encoder") else name


def _rename(name: str, kind: Kind, inverse: bool) -> str:
    top, block = (_TOP, _BLOCK) if kind == "transformer" else (_T5_TOP, _T5_BLOCK)
    if inverse:
        top, block = ({new: old for old, new in table.items()} for table in (top, block))
    there, here = ("encoder.block", "blocks") if kind == "text_encoder" else ("blocks", "blocks")
    source, target = (there, here) if inverse else (here, there)
    match = re.fullmatch(rf"{re.escape(source)}\.(\d+)\.(.+)", name)
    table, tail = (block, match[2]) if match else (top, name)
    start = f"{target}.{match[1]}." if match else ""
    module, dot, leaf = tail.rpartition(".")
    if tail in table:
        return start + table[tail]
    if dot and module in table:
        return f"{start}{table[module]}.{leaf}"
    return name


_VAE_UNIT = (
    (re.compile(r"^residual\.0\."), "norm1."),
    (re.compile(r"^residual\.2\."), "conv1."),
    (re.compile(r"^residual\.3\."), "norm2."),
    (re.compile(r"^residual\.6\."), "conv2."),
    (re.compile(r"^shortcut\."), "conv_shortcut."),
)
_VAE_FIXED = {
    "conv1": "quant_conv",
    "conv2": "post_quant_conv",
    **{f"{half}.conv1": f"{half}.conv_in" for half in ("encoder", "decoder")},
    **{f"{half}.head.0": f"{half}.norm_out" for half in ("encoder", "decoder")},
    **{f"{half}.head.2": f"{half}.conv_out" for half in ("encoder", "decoder")},
}


def _vae_unit(tail: str) -> str:
    for pattern, new in _VAE_UNIT:
        tail = pattern.sub(new, tail)
    return tail


def _vae_names(names: list[str]) -> dict[str, str]:
    """Wan VAE: the decoder's flat list of units becomes blocks that end with an upsampling unit."""
    places = _decoder_places(names)
    out = {}
    for name in names:
        module, _, leaf = name.rpartition(".")
        middle = re.fullmatch(r"(encoder|decoder)\.middle\.([012])\.(.+)", name)
        nested = re.fullmatch(
            r"(encoder|decoder)\.(down|up)samples\.(\d+)\.(?:down|up)samples\.(\d+)\.(.+)", name
        )
        flat = re.fullmatch(r"(encoder|decoder)\.(down|up)samples\.(\d+)\.(.+)", name)
        if module in _VAE_FIXED:
            out[name] = f"{_VAE_FIXED[module]}.{leaf}"
        elif middle:
            unit = "attentions.0" if middle[2] == "1" else f"resnets.{int(middle[2]) // 2}"
            out[name] = f"{middle[1]}.mid_block.{unit}.{_vae_unit(middle[3])}"
        elif nested:
            is_unit = nested[5].startswith(("residual.", "shortcut."))
            unit = f"resnets.{nested[4]}" if is_unit else f"{nested[2]}sampler"
            out[name] = f"{nested[1]}.{nested[2]}_blocks.{nested[3]}.{unit}.{_vae_unit(nested[5])}"
        elif flat and flat[1] == "encoder":
            out[name] = f"encoder.down_blocks.{flat[3]}.{_vae_unit(flat[4])}"
        elif flat:
            out[name] = f"decoder.{places[int(flat[3])]}.{_vae_unit(flat[4])}"
        else:
            out[name] = name
    return out


def _decoder_places(names: Iterable[str]) -> Mapping[int, str]:
    """Number in the flat list of decoder units to the place among blocks."""
    upsampling: dict[int, bool] = {}
    for name in names:
        match = re.match(r"decoder\.upsamples\.(\d+)\.(residual|shortcut|resample|time_conv)\.", name)
        if match:
            upsampling[int(match[1])] = match[2] in ("resample", "time_conv")
    places, block, unit = {}, 0, 0
    for number in sorted(upsampling):
        if upsampling[number]:
            places[number] = f"up_blocks.{block}.upsamplers.0"
            block, unit = block + 1, 0
        else:
            places[number] = f"up_blocks.{block}.resnets.{unit}"
            unit += 1
    return places
