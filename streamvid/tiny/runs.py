"""What every training stage needs: a clock that survives kill -9, checkpoints, a CSV log, pictures,
data-parallelism."""

import csv
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import torch.distributed as dist

from streamvid.tiny.optim import fast_bf16


def rank() -> int:
    """This process's number among the data-parallel ones; 0 if there is only one."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of data-parallel processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def data_seed(seed: int) -> int:
    """A seed for this process's share of the data."""
    return seed + 7_919 * rank()


def mixed_precision(device: str) -> torch.autocast:
    """bf16 autocast where the device multiplies bf16 in hardware, elsewhere an autocast that does nothing."""
    return torch.autocast(device.split(":")[0], torch.bfloat16, enabled=fast_bf16(device))


def average_gradients(params: Iterable[torch.nn.Parameter]) -> None:
    """Replaces every gradient by its mean over all processes: one all-reduce of one flat tensor."""
    if not dist.is_initialized():
        return
    grads = [p.grad for p in params if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(part.view_as(grad))


class Run:
    """One stage of training in a folder: `state.pt` (all that is needed to go on), `log.csv`, sheets.

    `spent` is the training time in seconds, of earlier processes too, so a budget means the same after a
    restart. With several processes the clock is that of rank 0, and only rank 0 writes.
    """

    def __init__(self, folder: Path, minutes: float, *, save_every: float = 120.0):
        self.folder, self.budget, self.save_every = folder, minutes * 60, save_every
        folder.mkdir(parents=True, exist_ok=True)
        self.step, self._before, self.progress = 0, 0.0, 0.0
        self._began = self._saved = time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds of training so far."""
        return self._before + time.monotonic() - self._began

    @property
    def reports(self) -> bool:
        """Whether this step is one of those that are logged: often at first, then every twentieth."""
        return self.step % 20 == 0 or (self.step <= 40 and self.step % 4 == 0)

    def running(self) -> bool:
        """Whether there is time for another step; sets `progress`, the used part of the budget (0 to 1)."""
        clock = torch.tensor([self.spent, float(time.monotonic() - self._saved >= self.save_every)])
        if dist.is_initialized():
            if dist.get_backend() == "nccl":
                clock = clock.cuda()
            dist.broadcast(clock, 0)
        spent, due = clock.tolist()
        self.due = bool(due)
        self.progress = min(1.0, spent / max(self.budget, 1e-9))
        return self.progress < 1

    def resume(self) -> dict[str, Any] | None:
        """The saved state of an earlier process, or None; sets step and clock."""
        path = self.folder / "state.pt"
        if not path.exists():
            return None
        state = torch.load(path, weights_only=True, map_location="cpu")
        self.step, self._before = state["step"], state["spent"]
        self._began = self._saved = time.monotonic()
        return state

    def save(self, state: dict[str, Any]) -> None:
        """Writes the state; a kill at any moment leaves either the old file or the new one."""
        self._saved = time.monotonic()
        if rank():
            return
        temporary = self.folder / "state.pt.tmp"
        torch.save({**state, "step": self.step, "spent": self.spent}, temporary)
        os.replace(temporary, self.folder / "state.pt")

    def log(self, **values: Any) -> None:
        """One line of the CSV; the columns are those of the first call."""
        if rank():
            return
        path = self.folder / "log.csv"
        row = {"step": self.step, "seconds": round(self.spent, 1)}
        row.update({k: round(float(v), 5) for k, v in values.items()})
        new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            if new:
                writer.writeheader()
            writer.writerow(row)


def sheet(path: Path, rows: list[np.ndarray], *, every: int = 4, scale: float = 1.0) -> None:
    """Saves a picture: one row of frames for each uint8 clip [t, h, w, 3], every `every`-th frame."""
    picture = np.concatenate([np.concatenate(list(clip[::every]), 1) for clip in rows], 0)
    if scale != 1.0:
        picture = cv2.resize(picture, None, fx=scale, fy=scale, interpolation=cv2.INTER_NEAREST)
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), picture[..., ::-1])
