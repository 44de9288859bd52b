"""Muon for matrices and convolutions, Adam for the rest, in one optimizer; and the learning-rate shape of
a timed run.

Muon (Jordan et al. 2024): the momentum of a matrix is replaced by its nearest orthogonal matrix, found by
a few Newton-Schulz iterations, in bf16 where the hardware has it, else in fp32; with the update scaled to an
RMS of 0.2 (Moonlight, 2025) so that one learning rate serves all shapes. Convolutions are taken as [out,
in * taps].
"""

from collections import defaultdict
from collections.abc import Iterable

import torch


def fast_bf16(device: torch.device | str) -> bool:
    """Whether bf16 products are made in hardware: CUDA, CPUs with AMX. Other CPUs emulate them, far slower
    than fp32."""
    kind = torch.device(device).type
    return kind == "cuda" or (kind == "cpu" and torch.cpu._is_amx_tile_supported())


def orthogonalise(matrices: torch.Tensor, steps: int = 4) -> torch.Tensor:
    """The nearest semi-orthogonal matrices of a batch [n, rows, columns], approximately (Newton-Schulz,
    quintic)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    flip = x.shape[1] > x.shape[2]
    x = x.mT if flip else x
    x = x.bfloat16() if fast_bf16(x.device) else x
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if flip else x).to(matrices.dtype)


class MuonAdam(torch.optim.Optimizer):
    """Muon on parameters of two or more dimensions (except those named in `adam`), Adam on all others.

    `lr` is Muon's; Adam's is `lr * adam_ratio`.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        *,
        lr: float,
        adam: Iterable[torch.nn.Parameter] = (),
        adam_ratio: float = 0.5,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ):
        by_adam = {id(p) for p in adam}
        muon_group: list[torch.nn.Parameter] = []
        adam_group: list[torch.nn.Parameter] = []
        for p in params:
            (adam_group if p.ndim < 2 or id(p) in by_adam else muon_group).append(p)
        super().__init__(
            [{"params": muon_group, "muon": True}, {"params": adam_group, "muon": False}],
            {
                "lr": lr,
                "adam_ratio": adam_ratio,
                "momentum": momentum,
                "betas": betas,
                "weight_decay": weight_decay,
            },
        )

    def set_lr(self, lr: float) -> None:
        """Sets Muon's rate (and so Adam's, by the ratio) for the next step."""
        for group in self.param_groups:
            group["lr"] = lr

    @torch.no_grad()
    def step(self, closure=None) -> None:  # type: ignore[override]  # noqa: ARG002 (the signature of torch.optim)
        """One update; parameters without a gradient stay as they are."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            (self._muon if group["muon"] else self._adam)(params, group)

    def _muon(self, params: list[torch.nn.Parameter], group: dict) -> None:
        same_shape = defaultdict(list)
        for p in params:
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros_like(p)
            state["momentum"].lerp_(p.grad, 1 - group["momentum"])
            assert p.grad is not None
            look_ahead = p.grad.lerp(state["momentum"], group["momentum"])
            same_shape[(p.shape[0], p.numel() // p.shape[0])].append((p, look_ahead))
        for (rows, columns), items in same_shape.items():
            stacked = torch.stack([g.reshape(rows, columns) for _, g in items])
            updates = orthogonalise(stacked) * (0.2 * max(rows, columns) ** 0.5)
            for (p, _), update in zip(items, updates, strict=True):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update.reshape(p.shape), alpha=-group["lr"])

    def _adam(self, params: list[torch.nn.Parameter], group: dict) -> None:
        beta1, beta2 = group["betas"]
        for p in params:
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros(())
                state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
            state["step"] += 1
            state["mean"].lerp_(p.grad, 1 - beta1)
            state["square"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
            mean = state["mean"] / (1 - beta1 ** state["step"])
            scale = (state["square"] / (1 - beta2 ** state["step"])).sqrt_().add_(1e-8)
            p.addcdiv_(mean, scale, value=-group["lr"] * group["adam_ratio"])


def rate(progress: float, step: int, *, warmup: int = 30, hold: float = 0.5) -> float:
    """Factor of the learning rate at `progress` (0..1 of the time budget): linear warm-up, constant,
    linear to 0.02."""
    decay = 1.0 if progress < hold else max(0.02, 1 - (progress - hold) / (1 - hold) * 0.98)
    return decay * min(1.0, (step + 1) / warmup)
