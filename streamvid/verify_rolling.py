"""Replay a recorded Rolling Forcing rollout: a joint window of chunks, each at its own step."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from streamvid.checkpoint_formats import read_weights
from streamvid.checkpoints import load_transformer
from streamvid.errors import CheckpointError
from streamvid.kernels.rope import GridRope, rotate
from streamvid.memory.cache import KVCache
from streamvid.memory.policies.rolling_forcing import RollingForcing
from streamvid.noise import RecordedNoise
from streamvid.rolling import RollingSampler, RollingState, joint_denoiser
from streamvid.schedule import FlowSchedule
from streamvid.stepcache.types import ChunkInfo
from streamvid.transformer import CausalWan
from streamvid.verify_rollout import HALF_LIMIT, find_weights
from streamvid.verify_units import max_abs
from streamvid.verify_vae import ABSOLUTE_LIMIT, Deviation

INPUTS = ("noise", "prompt_embeds", "denoising_steps")


def verify_rolling(folder: Path) -> list[Deviation]:
    """Largest deviation of every recorded tensor of a case whose windows hold several chunks.

    Raises:
        CheckpointError: a file is missing, or a recorded tensor has no counterpart.
    """
    config = json.loads((folder / "config.json").read_text())
    case = read_weights(folder / "case.safetensors").tensors
    dtype = getattr(torch, config["compute_dtype"])
    net = CausalWan(load_transformer(find_weights(folder), dtype=dtype, config=config["model"]))
    return _Windows(config, case, net, dtype).run()


class _Windows:
    """One rollout."""

    def __init__(
        self, config: dict[str, Any], case: dict[str, Tensor], net: CausalWan, dtype: torch.dtype
    ) -> None:
        self.config, self.case, self.net, self.dtype = config, case, net, dtype
        self.frames = config["num_frame_per_block"]
        self.blocks = config["num_noise_frames"] // self.frames
        geometry = net.geometry.kv(config["batch"], config["latent_h"], config["latent_w"], dtype=dtype)
        policy = RollingForcing(size=config["max_attention_frames"], anchor=self.frames)
        self.cache = KVCache(geometry, policy, chunk_frames=self.frames, parity=True)
        self.rope = GridRope(geometry.head_dim, geometry.grid, dtype=torch.complex128)
        self.prompt = net.prepare_prompt(case["prompt_embeds"].to(dtype))
        self.deviations: list[Deviation] = []
        self.seen = 0

    def run(self) -> list[Deviation]:
        schedule = FlowSchedule(self.config["timestep_shift"])
        steps = schedule.warp(self.config["denoising_step_list"])
        self._compare("denoising_steps", steps)
        sampler = RollingSampler(steps.tolist(), schedule, last_chunk=self.blocks - 1)
        state, noise, latents = RollingState(), self._noise(), []
        shape = (self.config["batch"], self.frames, *self.case["noise"].shape[2:])
        for index in range(self.blocks):
            info = ChunkInfo(
                index=index,
                start_latent=index * self.frames,
                num_latents=self.frames,
                kind="normal" if index else "first",
            )
            denoise = joint_denoiser(self.net, self.prompt, self.cache)
            x0 = sampler.sample_chunk(
                denoise, info, noise, shape, state=state, dtype=self.dtype, callback=self._window
            )
            self._context(x0)
            self._written(index, f"window{self.seen - 1:02d}")
            self.cache.commit()
            latents.append(x0)
        self._compare("latents", torch.cat(latents, dim=1))
        replayed = {deviation.name for deviation in self.deviations}
        left = [k for k in self.case if k not in replayed and k not in INPUTS and not k.endswith("/renoise")]
        if left:
            raise CheckpointError(f"{len(left)} recorded tensors were not replayed, for example {left[0]}")
        return self.deviations

    def _noise(self) -> RecordedNoise:
        """Recorded draws by (chunk, step): window w re-noises block b, which is then at step w - b + 1."""
        renoise = {}
        for name, value in self.case.items():
            found = re.fullmatch(r"window(\d+)/block(\d+)/renoise", name)
            if found:
                window, block = int(found[1]), int(found[2])
                renoise[block, window - block + 1] = value
        return RecordedNoise(self.case["noise"], renoise, range(0, self.blocks * self.frames, self.frames))

    def _window(self, seen: dict[str, Any]) -> None:
        name = f"window{self.seen:02d}"
        self.seen += 1
        if len(seen["window"]) < len(self.config["denoising_step_list"]) and seen["window"][0] == 0:
            # While the window fills, the reference encodes its first block after every pass; only the last one stays.
            self._context(seen["x0"][:, : self.frames])
            self._written(0, name)
            self.cache.abort()
        for ours, recorded in (("flow", "flow"), ("x0", "x0"), ("x_t", "noisy_input")):
            self._compare(f"{name}/{recorded}", seen[ours])

    def _context(self, x0: Tensor) -> None:
        """Begin a chunk and run its context pass; the caller commits or aborts it."""
        self.cache.begin_chunk(self.frames)
        self.net.context_pass(x0, float(self.config.get("context_noise", 0)), self.prompt, self.cache)

    def _written(self, index: int, name: str) -> None:
        """The keys and values just written; the anchor is recorded unrotated, the others at their positions."""
        for layer in range(self.net.geometry.layers):
            bank = self.cache.banks[layer][0]
            pairs = [(entry, *bank.read(entry)) for entry in bank.current]
            keys = [k if index == 0 else rotate(k, self.rope.table(entry.t)) for entry, k, _ in pairs]
            self._compare(f"{name}/layer{layer}/k", torch.cat(keys, dim=1))
            self._compare(f"{name}/layer{layer}/v", torch.cat([v for *_, v in pairs], dim=1))

    def _compare(self, name: str, ours: Tensor) -> None:
        if name in self.case:
            limit = ABSOLUTE_LIMIT if self.dtype == torch.float32 else HALF_LIMIT
            self.deviations.append(max_abs(name, ours, self.case[name], limit))
