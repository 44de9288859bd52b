"""The flow-matching noise schedule of Self-Forcing class models: tables, warping, and the two conversions.

``x_t = (1 - sigma) x0 + sigma noise`` and ``flow = noise - x0``. Knows nothing of models, steps or streams.
The numbers follow the public Self-Forcing code: fp32 tables, nearest look-up, ``x0`` in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from streamvid.errors import StreamvidError

Times = float | Sequence[float] | Tensor
"""A timestep on the 0..1000 scale: one number, or one a latent frame as ``[f]`` or ``[b, f]``."""


class FlowSchedule:
    """Tables of one shift. Holds only small CPU tensors; look-ups of plain numbers never touch a device.

    Args:
        shift: ``s`` in ``s * sigma / (1 + (s - 1) * sigma)``; 1 leaves the table linear.
        num_train_timesteps: rows of the table.
    """

    def __init__(self, shift: float = 5.0, num_train_timesteps: int = 1000):
        if shift <= 0:
            raise StreamvidError(f"timestep_shift must be positive, got {shift}")
        if num_train_timesteps < 1:
            raise StreamvidError(f"num_train_timesteps must be at least 1, got {num_train_timesteps}")
        self.shift = float(shift)
        self.num_train_timesteps = num_train_timesteps
        sigmas = torch.linspace(1.0, 0.0, num_train_timesteps + 1)[:-1]
        self.sigmas: Tensor = shift * sigmas / (1 + (shift - 1) * sigmas)
        self.timesteps: Tensor = self.sigmas * num_train_timesteps
        self._index: dict[float, int] = {}

    def warp(self, steps: Sequence[int]) -> Tensor:
        """Nominal steps (1000, 750, ...) as indices into the shifted table: ``[len(steps)]`` fp32; 0 stays
        0."""
        table = torch.cat([self.timesteps, torch.zeros(1)])
        return table[self.num_train_timesteps - torch.as_tensor(list(steps), dtype=torch.long)]

    def index(self, timestep: float) -> int:
        """Row of the timestep nearest to ``timestep`` (the first of two equally near)."""
        key = float(timestep)
        if key not in self._index:
            if len(self._index) > 4096:
                self._index.clear()
            self._index[key] = int((self.timesteps - key).abs().argmin())
        return self._index[key]

    def sigma(self, timestep: float) -> float:
        """Sigma of the nearest row. Timestep 0 gives the last one (0.00498 for shift 5), not 0, as
        upstream."""
        return float(self.sigmas[self.index(timestep)])

    def sigma_of(self, timestep: Times, device: torch.device | str = "cpu") -> Tensor:
        """Sigmas of ``timestep``, fp32, shaped ``[..., 1, 1, 1]`` to multiply ``[b, f, c, h, w]`` latents."""
        if isinstance(timestep, Tensor):
            near = (self.timesteps.to(timestep.device) - timestep.float().unsqueeze(-1)).abs().argmin(-1)
            values = self.sigmas.to(timestep.device)[near].to(device)
        elif isinstance(timestep, (int, float)):
            values = torch.tensor(self.sigma(timestep), device=device)
        else:
            values = torch.tensor([self.sigma(t) for t in timestep], device=device)
        return values[..., None, None, None]

    def add_noise(self, x0: Tensor, noise: Tensor, timestep: Times) -> Tensor:
        """``(1 - sigma) x0 + sigma noise``, evaluated in fp32, returned in ``noise``'s dtype."""
        sigma = self.sigma_of(timestep, x0.device)
        return ((1 - sigma) * x0.float() + sigma * noise.float()).to(noise.dtype)

    def flow_to_x0(self, flow: Tensor, x_t: Tensor, timestep: Times) -> Tensor:
        """``x_t - sigma flow``, evaluated in float64, returned in ``flow``'s dtype."""
        sigma = self.sigma_of(timestep, flow.device).double()
        return (x_t.double() - sigma * flow.double()).to(flow.dtype)

    def x0_to_flow(self, x0: Tensor, x_t: Tensor, timestep: Times) -> Tensor:
        """``(x_t - x0) / sigma``, evaluated in float64, returned in ``x0``'s dtype."""
        sigma = self.sigma_of(timestep, x0.device).double()
        return ((x_t.double() - x0.double()) / sigma).to(x0.dtype)

    def step(self, flow: Tensor, x_t: Tensor, timestep: Times) -> Tensor:
        """One Euler step to the next row of the full table, in the inputs' dtype.

        As upstream, if any of the timesteps is at the last row, all of them step to sigma 0.
        """
        times = timestep.float().cpu() if isinstance(timestep, Tensor) else torch.as_tensor(timestep)
        near = (self.timesteps - times.unsqueeze(-1)).abs().argmin(-1)
        table = torch.cat([self.sigmas, torch.zeros(1)])
        target = torch.zeros_like(table[near]) if (near + 1 == len(self.sigmas)).any() else table[near + 1]
        return x_t + flow * (target - table[near])[..., None, None, None].to(flow.device)
