"""Stage 3 of training: the causal transformer, by flow matching with teacher forcing over chunks."""

import copy
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel

from streamvid.tiny.data import Batch, Pool, make_batch
from streamvid.tiny.dit import TeacherForcing, adam_parameters, make_transformer, rotation, run, text_keys
from streamvid.tiny.optim import MuonAdam, rate
from streamvid.tiny.runs import Run, average_gradients, data_seed, mixed_precision
from streamvid.tiny.text import embed

log = logging.getLogger(__name__)
SHIFT = 4.0  # training noise leans to the high levels at which the few-step sampler works
CONTEXT_NOISE = 0.15  # largest sigma of the noise on clean context, in 60 % of the chunks
EMA = 0.997
# (until this part of the budget, first chunks alone, chunks in windows) of a step. First chunks teach how
# things look, with nothing to copy from, and come first; windows teach motion and memory.
PLAN = ((0.25, 24, 20), (1.0, 14, 34))


def bias_of(sees: torch.Tensor, tokens: int) -> torch.Tensor:
    """[w, queries, keys] of chunks, bool, to an additive bias over tokens [w, 1, q tokens, k tokens]."""
    bias = torch.zeros(sees.shape, device=sees.device).masked_fill_(~sees, float("-inf"))
    return bias.repeat_interleave(tokens, 1).repeat_interleave(tokens, 2)[:, None]


def draw_levels(count: int, generator: torch.Generator, grid: Sequence[float] | None = None) -> torch.Tensor:
    """Noise levels [count]: shifted uniform with a tenth at 1, or with a grid one of its levels half of
    the time."""
    u = torch.rand(count, generator=generator)
    sigma = SHIFT * u / (1 + (SHIFT - 1) * u)
    sigma[torch.rand(count, generator=generator) < 0.1] = 1.0
    if grid is not None:
        chosen = torch.tensor(grid)[torch.randint(len(grid), (count,), generator=generator)]
        sigma = torch.where(torch.rand(count, generator=generator) < 0.5, chosen, sigma)
    return sigma


def attention_of(model: WanTransformer3DModel, batch: Batch, device) -> TeacherForcing:
    """The attention of a batch."""
    size = batch.latents.shape[-2:]
    tokens = batch.latents.shape[1] * size[0] * size[1]
    return TeacherForcing(
        alone=batch.alone,
        windows=batch.windows,
        clean=batch.clean,
        noisy=batch.noisy,
        factors=rotation(model, batch.base.to(device), *size),
        clean_bias=bias_of(batch.clean_sees.to(device), tokens),
        noisy_bias=bias_of(batch.noisy_sees.to(device), tokens),
    )


def flow_loss(
    model: WanTransformer3DModel,
    batch: Batch,
    text: torch.Tensor,
    generator: torch.Generator,
    *,
    grid: Sequence[float] | None = None,
    context: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Flow-matching loss of a batch, with its parts: first chunks and continuations.

    `text` is [captions, text_len, text_dim]. `context` replaces the clean chunks by others, such as the
    model's own; then they get no noise. `grid` are the levels of the sampler the model is made for.
    """
    device = text.device
    count, contexts = len(batch.latents), batch.windows * batch.clean
    span = slice(batch.alone, batch.alone + contexts)
    sigma = draw_levels(count, generator, grid)
    noisy_context = torch.rand(contexts, generator=generator) < 0.6
    sigma[span] = torch.rand(contexts, generator=generator) * CONTEXT_NOISE * noisy_context
    noise = torch.randn(batch.latents.shape, generator=generator)
    level = sigma[:, None, None, None, None]
    x = (1 - level) * batch.latents + level * noise
    if context is not None:
        x[span] = context.to(x)
    timestep = 1000 * sigma
    timestep[span] = 0.0
    attend = attention_of(model, batch, device)
    which = batch.which.to(device)
    flow = run(model, x.to(device), timestep.to(device), text_keys(model, text), which, attend)
    error = (flow - (noise - batch.latents).to(device)).pow(2).flatten(1).mean(1)
    error = torch.cat([error[: span.start], error[span.stop :]])
    weight = batch.weight.to(device)
    first, later = error[: batch.alone].mean(), error[batch.alone :]
    later = (later * weight[batch.alone :]).sum() / weight[batch.alone :].sum().clamp(min=1)
    return {"loss": first + later, "first": first, "later": later}


@torch.no_grad()
def update_ema(ema: WanTransformer3DModel, model: WanTransformer3DModel, decay: float) -> None:
    """Moves the averaged weights towards the current ones."""
    torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - decay)


def train_dit(
    folder: Path,
    minutes: float,
    pool: Pool | Callable[[], Pool],
    encoder,
    tokenizer,
    *,
    seed: int = 0,
    device: str = "cpu",
    lr: float = 5e-3,
    plan: tuple[tuple[float, int, int], ...] = PLAN,
    model: WanTransformer3DModel | None = None,
) -> WanTransformer3DModel:
    """Trains (or goes on with) the transformer in `folder`; returns the averaged weights.

    `pool` may be a callable that is asked again at every save: a pool that another process is still filling.
    """
    run_ = Run(folder, minutes)
    torch.manual_seed(seed)
    model = (model or make_transformer()).float().to(device).train()
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = MuonAdam(model.parameters(), lr=lr, adam=adam_parameters(model), adam_ratio=0.4)
    state = run_.resume()
    if state:
        model.load_state_dict(state["model"])
        ema.load_state_dict(state["ema"])
        optimizer.load_state_dict(state["optimizer"])
    means: dict[str, torch.Tensor] = {}
    fill = pool if callable(pool) else (lambda: pool)
    data = fill()
    while run_.running():
        optimizer.set_lr(lr * rate(run_.progress, run_.step, warmup=50, hold=1.0))
        alone, budget = next((a, b) for end, a, b in plan if run_.progress <= end)
        batch = make_batch(data, data_seed(seed), run_.step, alone=alone, budget=budget)
        generator = torch.Generator().manual_seed((data_seed(seed) + 1) * 1_000_003 + run_.step)
        text = embed(encoder, tokenizer, batch.captions)
        with mixed_precision(device):
            parts = flow_loss(model, batch, text, generator)
        optimizer.zero_grad(set_to_none=True)
        parts["loss"].backward()
        average_gradients(model.parameters())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        update_ema(ema, model, min(EMA, (1 + run_.step) / (10 + run_.step)))
        run_.step += 1
        for name, value in (*parts.items(), ("norm", norm)):
            means[name] = means.get(name, value.detach()).lerp(value.detach(), 0.04)
        if run_.reports:
            run_.log(**means)
        if run_.due:
            run_.save(_state(model, ema, optimizer))
            data = fill()
    run_.save(_state(model, ema, optimizer))
    return ema.eval()


def _state(model, ema, optimizer) -> dict:
    return {"model": model.state_dict(), "ema": ema.state_dict(), "optimizer": optimizer.state_dict()}
