"""Stage 2 of training: the text encoder, taught to say in every output token what the whole caption means.

Every token must give all attributes to a linear probe, over all paraphrases. So the transformer's
cross-attention finds the meaning wherever it looks and has no parsing to learn. The probe is thrown away;
the encoder is then frozen.
"""

import logging
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from streamvid.tiny.captions import TABLES, all_words, caption, sample_attributes
from streamvid.tiny.optim import MuonAdam, rate
from streamvid.tiny.runs import Run, average_gradients, data_seed

log = logging.getLogger(__name__)
TEXT_LEN = 16
TEXT_DIM = 128


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer: lower case, punctuation dropped, `</s>` at the end, as T5 has it."""
    words = ["<pad>", "</s>", "<unk>", *all_words()]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace(Regex(r"[^a-z0-9 ]"), " ")]
    )
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=TEXT_LEN,
        padding_side="right",
    )


def make_text_encoder(vocabulary: int) -> UMT5EncoderModel:
    """The smallest UMT5 that parses the captions: two layers of width 128."""
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=vocabulary,
            d_model=TEXT_DIM,
            d_kv=32,
            d_ff=256,
            num_layers=2,
            num_heads=4,
            relative_attention_num_buckets=16,
            relative_attention_max_distance=32,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
            tie_word_embeddings=False,
        )
    )


def tokenize(tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, each [n, TEXT_LEN]."""
    batch = tokenizer(
        prompts, padding="max_length", truncation=True, max_length=TEXT_LEN, return_tensors="pt"
    )
    return batch["input_ids"], batch["attention_mask"]


@torch.no_grad()
def embed(encoder: UMT5EncoderModel, tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> torch.Tensor:
    """Embeddings [n, TEXT_LEN, TEXT_DIM]; rows after a prompt are zero, as Wan has it. "" is the empty
    prompt."""
    device = next(encoder.parameters()).device
    ids, mask = (t.to(device) for t in tokenize(tokenizer, prompts))
    return encoder(ids, attention_mask=mask).last_hidden_state * mask[..., None]


def train_text(
    folder: Path, minutes: float, *, seed: int = 0, device: str = "cpu", lr: float = 3e-3
) -> tuple[UMT5EncoderModel, PreTrainedTokenizerFast]:
    """Trains (or goes on with) the text encoder in `folder`."""
    run = Run(folder, minutes, save_every=30.0)
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    encoder = make_text_encoder(len(tokenizer)).to(device).train()
    probe = torch.nn.Linear(TEXT_DIM, sum(len(t) for t in TABLES.values())).to(device)
    params = [*encoder.parameters(), *probe.parameters()]
    optimizer = MuonAdam(params, lr=lr, adam=[encoder.shared.weight])
    state = run.resume()
    if state:
        encoder.load_state_dict(state["model"])
        probe.load_state_dict(state["probe"])
        optimizer.load_state_dict(state["optimizer"])
    while run.running():
        optimizer.set_lr(lr * rate(run.progress, run.step))
        loss, right = _probe_loss(
            encoder, probe, tokenizer, np.random.default_rng([data_seed(seed), run.step]), device
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        average_gradients(params)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        run.step += 1
        if run.step % 20 == 0:
            run.log(loss=loss.detach(), right=right)
        if run.due:
            run.save(_state(encoder, probe, optimizer))
    run.save(_state(encoder, probe, optimizer))
    return encoder.eval().requires_grad_(False), tokenizer


def _state(encoder, probe, optimizer) -> dict:
    return {
        "model": encoder.state_dict(),
        "probe": probe.state_dict(),
        "optimizer": optimizer.state_dict(),
    }


def _probe_loss(encoder, probe, tokenizer, rng, device, count: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of all attributes at every token, and the part of tokens that have all of them right."""
    wanted = [sample_attributes(rng) for _ in range(count)]
    ids, mask = (t.to(device) for t in tokenize(tokenizer, [caption(a, rng) for a in wanted]))
    logits = probe(encoder(ids, attention_mask=mask).last_hidden_state)
    labels = torch.tensor([a.indices() for a in wanted], device=device)
    weight = mask.float() / mask.sum()
    loss, right, start = logits.new_zeros(()), torch.ones_like(mask, dtype=torch.bool), 0
    for column, table in enumerate(TABLES.values()):
        part = logits[..., start : start + len(table)]
        label = labels[:, column, None].expand(mask.shape)
        loss = loss + (torch.nn.functional.cross_entropy(part.mT, label, reduction="none") * weight).sum()
        right &= part.argmax(-1) == label
        start += len(table)
    return loss, (right * weight).sum()
