"""Random tiny models of the real classes, built in code, for tests.

Geometry: 2 blocks, 2 heads of 16, width 32, patch 1x2x2, latents of 4 channels (8x8 at 64x64 pixels,
16 tokens a frame), text of 8 rows; a VAE of 8x space and 4x time. Weights depend only on ``seed``.
"""

from __future__ import annotations

import hashlib
import json
import string
from pathlib import Path
from typing import Any

import torch

TEXT_LEN = 8
TEXT_DIM = 16
LATENT_CHANNELS = 4
WORDS = """
a an the red blue green yellow white black orange purple ball square triangle star ring cube cat dog sea
on in of and moving left right up down still bouncing orbiting sliding spinning background prompt first second
""".split()  # noqa: SIM905

STREAM_CONFIG: dict[str, Any] = {
    "denoising_steps": [1000, 500],
    "chunk_latents": 3,
    "height": 64,
    "width": 64,
    "fps": 8.0,
    "text_len": TEXT_LEN,
    "trained_latents": 21,
}


def random_transformer(seed: int = 0, **changes: Any) -> Any:
    """A `WanTransformer3DModel` with random weights; ``changes`` override its config."""
    from diffusers import WanTransformer3DModel

    config: dict[str, Any] = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "text_dim": TEXT_DIM,
        "freq_dim": 32,
        "ffn_dim": 64,
        "num_layers": 2,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return WanTransformer3DModel(**(config | changes)).eval().requires_grad_(False)


def random_vae(seed: int = 0, **changes: Any) -> Any:
    """An `AutoencoderKLWan` with random weights; patches of 2, two halvings in space and time."""
    from diffusers import AutoencoderKLWan

    config: dict[str, Any] = {
        "base_dim": 4,
        "z_dim": LATENT_CHANNELS,
        "dim_mult": [1, 2, 2],
        "num_res_blocks": 1,
        "temperal_downsample": [True, True],
        "latents_mean": [0.1, -0.2, 0.0, 0.3],
        "latents_std": [1.0, 1.5, 0.8, 1.2],
        "patch_size": 2,
        "in_channels": 12,
        "out_channels": 12,
        "scale_factor_spatial": 8,
        "scale_factor_temporal": 4,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoencoderKLWan(**(config | changes)).eval().requires_grad_(False)


class HashTextEncoder:
    """Test double of a text encoder: one row a word, a pure function of the word, then zero rows."""

    def __init__(self, text_len: int = TEXT_LEN, text_dim: int = TEXT_DIM) -> None:
        self.text_len = text_len
        self.text_dim = text_dim
        self.device = torch.device("cpu")
        self.dtype = torch.float32

    def encode(self, prompts: list[str]) -> torch.Tensor:
        """``[b, text_len, text_dim]``; words beyond ``text_len`` are cut off."""
        out = torch.zeros(len(prompts), self.text_len, self.text_dim)
        for row, prompt in enumerate(prompts):
            for column, word in enumerate(prompt.split()[: self.text_len]):
                seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:7], "little")
                out[row, column] = torch.randn(self.text_dim, generator=torch.Generator().manual_seed(seed))
        return out


def word_tokenizer() -> Any:
    """A fast tokenizer: whole words of `WORDS`, any other word spelled in characters, ``</s>`` at the end."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = string.ascii_lowercase + string.digits
    names = ["<pad>", "</s>", "<unk>", *WORDS, *letters, *(f"##{letter}" for letter in letters)]
    vocab = {name: number for number, name in enumerate(dict.fromkeys(names))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", vocab["</s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="right",
        model_max_length=TEXT_LEN,
    )


def random_umt5(seed: int = 0, vocab_size: int = 160) -> Any:
    """A two-layer `UMT5EncoderModel` of width `TEXT_DIM` with random weights."""
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        vocab_size=vocab_size, d_model=TEXT_DIM, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return UMT5EncoderModel(config).eval().requires_grad_(False)


def save_folder(
    folder: Path, *, seed: int = 0, transformer: Any = None, config: dict[str, Any] | None = None
) -> Path:
    """Write a complete model folder (diffusers layout and ``streamvid.json``) and return it."""
    (transformer if transformer is not None else random_transformer(seed)).save_pretrained(
        folder / "transformer"
    )
    random_vae(seed).save_pretrained(folder / "vae")
    random_umt5(seed).save_pretrained(folder / "text_encoder")
    word_tokenizer().save_pretrained(folder / "tokenizer")
    index = {
        "_class_name": "WanPipeline",
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))
    (folder / "streamvid.json").write_text(json.dumps(STREAM_CONFIG | (config or {}), indent=2))
    return folder
