"""Stage 4 of training: the levels and the context that the few-step sampler really meets.

The world has little left to chance once caption and context are given, so the mean that flow matching
learns at the sampler's last level is already a sharp picture and no teacher is needed. What differs
between training and sampling is the context: here it is the model's own estimate of the past, made from
noise, not the truth (self-rollout of one step, after Self-Forcing's argument). Levels are the sampler's
own half of the time.
"""

import copy
import logging
from dataclasses import replace
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel

from streamvid.tiny.data import Batch, Pool, make_batch
from streamvid.tiny.dit import adam_parameters, run, text_keys
from streamvid.tiny.optim import MuonAdam, rate
from streamvid.tiny.rollout import sigmas_for
from streamvid.tiny.runs import Run, average_gradients, data_seed, mixed_precision
from streamvid.tiny.text import embed
from streamvid.tiny.train_dit import attention_of, flow_loss, update_ema

log = logging.getLogger(__name__)
STEPS, SHIFT = (1000, 750, 500, 250), 5.0
OWN = 0.75  # part of the context chunks that are the model's own, in every second step


@torch.no_grad()
def own_context(
    model: WanTransformer3DModel, batch: Batch, text: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """The model's estimates of the clean chunks, from noise at the last two levels of the sampler and true
    pasts.

    Returns [windows * clean, CHUNK, c, h, w]; a quarter of the chunks stays true.
    """
    span = slice(batch.alone, batch.alone + batch.windows * batch.clean)
    truth = batch.latents[span]
    levels = torch.tensor(sigmas_for(STEPS, SHIFT)[-2:])
    sigma = levels[torch.randint(2, (len(truth),), generator=generator)]
    level = sigma[:, None, None, None, None]
    noisy = (1 - level) * truth + level * torch.randn(truth.shape, generator=generator)
    before = torch.ones(batch.clean, batch.clean).tril(-1).bool()
    again = replace(
        batch,
        latents=torch.cat([truth, noisy]),
        base=batch.base[span].repeat(2),
        alone=0,
        noisy=batch.clean,
        noisy_sees=batch.clean_sees & before,
    )
    times = torch.cat([torch.zeros(len(truth)), 1000 * sigma]).to(text.device)
    which = batch.which[span].repeat(2).to(text.device)
    attend = attention_of(model, again, text.device)
    flow = run(model, again.latents.to(text.device), times, text_keys(model, text), which, attend)
    estimate = noisy - level * flow[len(truth) :].cpu()
    keep = (torch.rand(len(truth), generator=generator) >= OWN)[:, None, None, None, None]
    return torch.where(keep, truth, estimate)


def train_few(
    folder: Path,
    minutes: float,
    pool: Pool,
    encoder,
    tokenizer,
    model: WanTransformer3DModel,
    *,
    seed: int = 0,
    device: str = "cpu",
    lr: float = 5e-3,
    alone: int = 14,
    budget: int = 34,
) -> WanTransformer3DModel:
    """Goes on from `model` (or from the state in `folder`) while the rate falls to nothing; returns the
    averaged weights."""
    run_ = Run(folder, minutes)
    torch.manual_seed(seed)
    model = copy.deepcopy(model).float().to(device).train().requires_grad_(True)
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = MuonAdam(model.parameters(), lr=lr, adam=adam_parameters(model), adam_ratio=0.4)
    state = run_.resume()
    if state:
        model.load_state_dict(state["model"])
        ema.load_state_dict(state["ema"])
        optimizer.load_state_dict(state["optimizer"])
    grid = sigmas_for(STEPS, SHIFT)
    while run_.running():
        optimizer.set_lr(lr * rate(run_.progress, run_.step, warmup=20, hold=0.1))
        share = data_seed(seed) + 101
        batch = make_batch(pool, share, run_.step, alone=alone, budget=budget)
        text = embed(encoder, tokenizer, batch.captions)
        generator = torch.Generator().manual_seed(share * 1_000_003 + run_.step)
        with mixed_precision(device):
            context = own_context(ema, batch, text, generator) if run_.step % 2 else None
            parts = flow_loss(model, batch, text, generator, grid=grid, context=context)
        optimizer.zero_grad(set_to_none=True)
        parts["loss"].backward()
        average_gradients(model.parameters())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        update_ema(ema, model, 0.995)
        run_.step += 1
        if run_.reports:
            run_.log(**{k: v.detach() for k, v in parts.items()})
        if run_.due:
            run_.save(_state(model, ema, optimizer))
    run_.save(_state(model, ema, optimizer))
    return ema.eval()


def _state(model, ema, optimizer) -> dict:
    return {"model": model.state_dict(), "ema": ema.state_dict(), "optimizer": optimizer.state_dict()}
