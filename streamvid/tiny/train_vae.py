"""Stage 1 of training: the VAE, from nothing, on rendered clips."""

import logging
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan

from streamvid.tiny.codec import decode_raw, encode_parameters, make_vae
from streamvid.tiny.optim import MuonAdam, rate
from streamvid.tiny.runs import Run, sheet
from streamvid.tiny.world import render, sample_scene

log = logging.getLogger(__name__)
KL_WEIGHT = 3e-4
# (frames, clips a step, part of the steps) early and late: short clips teach pictures, long ones the causal memory.
EARLY = ((5, 12, 1.0),)
LATE = ((9, 8, 0.45), (17, 4, 0.35), (33, 2, 0.15), (65, 1, 0.05))


def clip_batch(seed: int, step: int, progress: float) -> torch.Tensor:
    """The clips of one step, [b, 3, t, 64, 64] in -1..1: a function of seed, step and phase of training."""
    rng = np.random.default_rng([seed, step])
    plan = EARLY if progress < 0.15 else LATE
    frames, count, _ = plan[int(rng.choice(len(plan), p=[p for *_, p in plan]))]
    clips = []
    for i in range(count):
        # One clip in eight holds a prompt change, so the memory of the decoder learns to let go.
        switch = (int(rng.integers(1, max(2, frames // 4))) * 4 + 1,) if i % 8 == 7 else ()
        clips.append(render(sample_scene(seed, step * 64 + i, switch_frames=switch), frames))
    return to_model(np.stack(clips))


def to_model(clips: np.ndarray) -> torch.Tensor:
    """uint8 [b, t, h, w, 3] to fp32 [b, 3, t, h, w] in -1..1."""
    return torch.from_numpy(clips).permute(0, 4, 1, 2, 3).float() / 127.5 - 1


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
) -> AutoencoderKLWan:
    """Trains (or goes on with) the VAE in `folder` and returns it with the latent statistics in its config."""
    run = Run(folder, minutes)
    torch.manual_seed(seed)
    vae = AutoencoderKLWan.from_pretrained(init) if init else make_vae()
    vae = vae.float().to(device).train()
    optimizer = MuonAdam(vae.parameters(), lr=lr)
    state = run.resume()
    if state:
        vae.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    mean_mse = None
    while run.progress < 1:
        optimizer.set_lr(lr * rate(run.progress, run.step))
        noise = torch.Generator().manual_seed(seed * 1_000_003 + run.step)
        parts = vae_loss(vae, clip_batch(seed, run.step, run.progress).to(device), noise)
        optimizer.zero_grad(set_to_none=True)
        parts["loss"].backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        run.step += 1
        mse = parts["mse"].detach()
        mean_mse = mse if mean_mse is None else mean_mse.lerp(mse, 0.05)
        if run.step % 20 == 0:
            psnr = -10 * torch.log10(mean_mse / 4)
            run.log(psnr=float(psnr), **{k: float(v.detach()) for k, v in parts.items()})
        if run.due():
            run.save({"model": vae.state_dict(), "optimizer": optimizer.state_dict()})
            _sheet(vae, folder / f"vae_{run.step:06d}.png", device)
    run.save({"model": vae.state_dict(), "optimizer": optimizer.state_dict()})
    return finish(vae, seed)


@torch.no_grad()
def finish(vae: AutoencoderKLWan, seed: int, clips: int = 48) -> AutoencoderKLWan:
    """Measures mean and spread of every latent channel and writes them into the config."""
    vae.eval()
    device = next(vae.parameters()).device
    latents = []
    for i in range(clips):
        video = to_model(render(sample_scene(seed + 17, i), 33, start=0)[None]).to(device)
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
