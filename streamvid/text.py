"""Prompts to embeddings: UMT5 with the Wan reference's cleaning, and a cache of recent prompts.

Every prompt is encoded alone and at its own length: its rows do not depend on the other prompts of a batch, and no
time is spent on padding (masked in the reference, so the rows are the same up to rounding). Rows after the prompt are
zero; the model attends to them, as in the reference.
"""

from __future__ import annotations

import html
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from streamvid.errors import StreamvidError

CACHED_PROMPTS = 64


class TextEncoder(Protocol):
    """Anything that turns prompts into rows of the transformer's text width."""

    text_len: int
    text_dim: int

    def encode(self, prompts: list[str]) -> Tensor:
        """``[len(prompts), text_len, text_dim]``, zero rows after each prompt."""
        ...


def clean_prompt(text: str) -> str:
    """Repair mis-decoded characters, unescape HTML twice, and make every run of white space one space."""
    import ftfy

    text = ftfy.fix_text(text)
    text = html.unescape(html.unescape(text)).strip()
    return re.sub(r"\s+", " ", text).strip()


class UMT5TextEncoder:
    """UMT5 with its tokenizer; see `TextEncoder`.

    Args:
        model: a transformers `UMT5EncoderModel`.
        tokenizer: its tokenizer (any transformers tokenizer whose ids the model knows).
        text_len: rows of an embedding; longer prompts are cut off.
        cached: how many prompts' rows are kept.
    """

    def __init__(self, model: Any, tokenizer: Any, text_len: int = 512, cached: int = CACHED_PROMPTS) -> None:
        if text_len < 1:
            raise StreamvidError(f"text_len must be at least 1, got {text_len}")
        if len(tokenizer) > model.config.vocab_size:
            raise StreamvidError(
                f"the tokenizer has {len(tokenizer)} entries, the text encoder only {model.config.vocab_size}; "
                "give the tokenizer that belongs to it"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.text_len = text_len
        self.text_dim: int = model.config.d_model
        self._cached = cached
        self._rows: OrderedDict[str, Tensor] = OrderedDict()

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def to(self, device: torch.device | str) -> UMT5TextEncoder:
        """Move the model and the cached rows; returns itself."""
        self.model.to(device)
        self._rows = OrderedDict((text, rows.to(device)) for text, rows in self._rows.items())
        return self

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Embeddings ``[b, text_len, text_dim]`` in the model's dtype and on its device.

        Raises:
            StreamvidError: no prompt, or one that is not text.
        """
        if isinstance(prompts, str) or not prompts or not all(isinstance(p, str) for p in prompts):
            raise StreamvidError(f"prompts must be a non-empty list of texts, got {prompts!r:.80}")
        out = torch.zeros(len(prompts), self.text_len, self.text_dim, device=self.device, dtype=self.dtype)
        for row, prompt in enumerate(prompts):
            rows = self._encode_one(clean_prompt(prompt))
            out[row, : rows.shape[0]] = rows
        return out

    def clear(self) -> None:
        """Forget the cached prompts."""
        self._rows.clear()

    @torch.no_grad()
    def _encode_one(self, text: str) -> Tensor:
        """Rows ``[n, text_dim]`` of one cleaned prompt."""
        if text in self._rows:
            self._rows.move_to_end(text)
            return self._rows[text]
        ids = self.tokenizer(
            text, truncation=True, max_length=self.text_len, add_special_tokens=True, return_tensors="pt"
        ).input_ids.to(self.device)
        if ids.shape[1] == 0:
            rows = torch.zeros(0, self.text_dim, device=self.device, dtype=self.dtype)
        else:
            rows = self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
        self._rows[text] = rows
        while len(self._rows) > self._cached:
            self._rows.popitem(last=False)
        return rows
