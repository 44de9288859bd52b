"""Stage 1 of training: the VAE, from nothing, on rendered clips."""

import logging
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan

from streamvid.tiny.codec import decode_raw, encode_parameters, make_vae
from streamvid.tiny.data import to_model
from streamvid.tiny.optim import MuonAdam, rate
from streamvid.tiny.runs import Run, average_gradients, data_seed, mixed_precision, rank, sheet
from streamvid.tiny.world import render, sample_scene

log = logging.getLogger(__name__)
KL_WEIGHT = 3e-4
# (frames, clips a step, part of the steps) early and late: short clips teach pictures, long ones the
# causal memory.
EARLY = ((5, 12, 1.0),)
LATE = ((5, 12, 0.35), (9, 7, 0.35), (17, 4, 0.2), (33, 2, 0.07), (65, 1, 0.03))


def clip_batch(seed: int, step: int, progress: float) -> torch.Tensor:
    """The clips of one step, [b, 3, t, 64, 64] in -1..1: a function of seed, step and phase of training."""
    rng = np.random.default_rng([seed, step])
    plan = EARLY if progress < 0.2 else LATE
    frames, count, _ = plan[int(rng.choice(len(plan), p=[p for *_, p in plan]))]
    clips = []
    for i in range(count):
        # One clip in eight holds a prompt change, so the memory of the decoder learns to let go.
        switch = (int(rng.integers(1, max(2, frames // 4))) * 4 + 1,) if i % 8 == 7 else ()
        clips.append(render(sample_scene(seed, step * 64 + i, switch_frames=switch, anywhere=True), frames))
    return to_model(np.stack(clips))


def to_frames(video: torch.Tensor) -> np.ndarray:
    """[b, 3, t, h, w] in -1..1 to uint8 [b, t, h, w, 3]."""
    return ((video.clamp(-1, 1) + 1) * 127.5 + 0.5).permute(0, 2, 3, 4, 1).to(torch.uint8).cpu().numpy()


def vae_loss(vae: AutoencoderKLWan, video: torch.Tensor, noise: torch.Generator) -> dict[str, torch.Tensor]:
    """The loss and its parts for clips [b, 3, t, h, w]: pixels, edges in space, weak KL."""
    mean, logvar = encode_parameters(vae, video).chunk(2, 1)
    logvar = logvar.clamp(-20, 10)
    z = mean + (0.5 * logvar).exp() * torch.randn(mean.shape, generator=noise).to(mean)
    error = decode_raw(vae, z) - video
    square = error.pow(2).mean()
    edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
    kl = 0.5 * (mean.pow(2) + logvar.exp() - 1 - logvar).mean()
    loss = error.abs().mean() + 4 * square + 0.25 * edges + KL_WEIGHT * kl
    return {"loss": loss, "mse": square, "edges": edges, "kl": kl}


def train_vae(
    folder: Path,
    minutes: float,
    *,
    seed: int = 0,
    device: str = "cpu",
    init: Path | None = None,
    lr: float = 4e-3,
    decoder_only: bool = False,
) -> AutoencoderKLWan:
    """Trains (or goes on with) the VAE in `folder` and returns it with the latent statistics in its config.

    `init` is a folder to start from. With `decoder_only` the encoder stays, and with it the latents and their
    statistics: a decoder can go on improving while a transformer learns those latents.
    """
    run = Run(folder, minutes)
    torch.manual_seed(seed)
    vae = AutoencoderKLWan.from_pretrained(init) if init else make_vae()
    vae = vae.float().to(device).train()
    if decoder_only:
        vae.encoder.requires_grad_(False)
        vae.quant_conv.requires_grad_(False)
    optimizer = MuonAdam([p for p in vae.parameters() if p.requires_grad], lr=lr)
    state = run.resume()
    if state:
        vae.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    mean_mse = None
    while run.running():
        optimizer.set_lr(lr * rate(run.progress, run.step))
        share = data_seed(seed)
        noise = torch.Generator().manual_seed(share * 1_000_003 + run.step)
        progress = 1.0 if init else run.progress
        with mixed_precision(device):
            parts = vae_loss(vae, clip_batch(share, run.step, progress).to(device), noise)
        optimizer.zero_grad(set_to_none=True)
        parts["loss"].backward()
        average_gradients(vae.parameters())
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        run.step += 1
        mse = parts["mse"].detach()
        mean_mse = mse if mean_mse is None else mean_mse.lerp(mse, 0.05)
        if run.reports:
            psnr = -10 * torch.log10(mean_mse / 4)
            run.log(psnr=psnr, **{k: v.detach() for k, v in parts.items()})
        if run.due:
            run.save({"model": vae.state_dict(), "optimizer": optimizer.state_dict()})
            if not rank():
                _sheet(vae, folder / f"vae_{run.step:06d}.png", device)
    run.save({"model": vae.state_dict(), "optimizer": optimizer.state_dict()})
    return vae.eval() if decoder_only else finish(vae, seed)


@torch.no_grad()
def finish(vae: AutoencoderKLWan, seed: int, clips: int = 48) -> AutoencoderKLWan:
    """Measures mean and spread of every latent channel and writes them into the config."""
    vae.eval()
    device = next(vae.parameters()).device
    latents = []
    for i in range(clips):
        video = to_model(render(sample_scene(seed + 17, i, anywhere=True), 33, start=0)[None]).to(device)
        latents.append(encode_parameters(vae, video)[:, : vae.config.z_dim])
    z = torch.cat(latents).transpose(0, 1).flatten(1)
    vae.register_to_config(latents_mean=z.mean(1).tolist(), latents_std=z.std(1).tolist())
    return vae


@torch.no_grad()
def _sheet(vae: AutoencoderKLWan, path: Path, device: str) -> None:
    vae.eval()
    rows = []
    for i in range(6):
        clip = render(sample_scene(99, i), 33)
        mean, _ = encode_parameters(vae, to_model(clip[None]).to(device)).chunk(2, 1)
        rows += [clip, to_frames(decode_raw(vae, mean))[0]]
    sheet(path, rows)
    vae.train()
