"""The whole recipe of the embedded model, from nothing to a checkpoint: VAE, text, transformer, few steps.

Every stage has a share of the time, a folder with its state, and goes on where it was after a kill.
Started by `torchrun`, the stages train data-parallel (gloo on CPU, nccl on CUDA). On CPU use one thread a
process: two threads on two cores are slower than two processes.
"""

import csv
import logging
import os
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan

from streamvid.errors import StreamvidError
from streamvid.tiny.data import load_pool
from streamvid.tiny.export import export
from streamvid.tiny.runs import rank
from streamvid.tiny.text import train_text
from streamvid.tiny.train_dit import train_dit
from streamvid.tiny.train_few import train_few
from streamvid.tiny.train_vae import train_vae

log = logging.getLogger(__name__)
SHARES = {"vae": 0.27, "text": 0.015, "pool": 0.055, "dit": 0.5, "few": 0.16}
SHARD_MINUTES = 0.25  # to encode one shard of the pool on one slow core


def main(
    minutes: float,
    out: Path,
    *,
    device: str = "cpu",
    seed: int = 0,
    init_vae: Path | None = None,
    resume: bool = True,
) -> Path:
    """Trains everything within about `minutes` and writes the checkpoint to `out / "model"`; returns that
    folder.

    A run that was killed goes on where it was if it is started again with the same `out`; `resume=False`
    starts anew and needs an empty folder. `init_vae` is a VAE folder to start from. Raises StreamvidError
    in the second case if the folder holds a run.
    """
    out = Path(out)
    if not resume and (out / "vae").exists():
        raise StreamvidError(f"{out} holds a run already; continue it (--resume) or name another folder")
    if device == "cpu":
        torch.set_num_threads(1)
    started = _join_group(device)
    share = {name: minutes * part for name, part in SHARES.items()}
    vae = _stage_vae(out / "vae", share["vae"], seed, device, init_vae)
    encoder, tokenizer = train_text(out / "text", share["text"], seed=seed, device=device)
    log.info("encoding the pool of clips")
    pool = load_pool(out / "pool", vae, seed, max(1, min(24, round(share["pool"] / SHARD_MINUTES))))
    model = train_dit(out / "dit", share["dit"], pool, encoder, tokenizer, seed=seed, device=device)
    model = train_few(out / "few", share["few"], pool, encoder, tokenizer, model, seed=seed, device=device)
    if rank() == 0:
        export(out / "model", vae, encoder, tokenizer, model)
    if started:
        dist.destroy_process_group()
    return out / "model"


def last_losses(out: Path) -> dict[str, tuple[float, float]]:
    """For every stage that has a log, its loss at the start and at the end: means of up to three lines of the log."""
    found = {}
    for stage in ("vae", "dit", "few"):
        path = Path(out) / stage / "log.csv"
        if path.exists():
            with path.open(newline="") as file:
                losses = [float(row["loss"]) for row in csv.DictReader(file)]
            n = max(1, min(3, len(losses) // 2))
            found[stage] = (sum(losses[:n]) / n, sum(losses[-n:]) / n)
    return found


def _join_group(device: str) -> bool:
    """Joins the processes that torchrun started, if it did; whether a group was made here."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or dist.is_initialized():
        return False
    if device.startswith("cuda"):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return True


def _stage_vae(folder: Path, minutes: float, seed: int, device: str, init: Path | None) -> AutoencoderKLWan:
    log.info("training the VAE for %.1f minutes", minutes)
    vae = train_vae(folder, minutes, seed=seed, device=device, init=init)
    return vae.requires_grad_(False)
