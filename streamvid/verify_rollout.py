"""Replay a recorded rollout: same weights, noise and text, every recorded tensor compared.

Runs the parts a stream is made of (checkpoint loading, `CausalWan`, `KVCache`, `FlowSchedule`) on recorded noise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from streamvid.checkpoint_formats import read_weights
from streamvid.checkpoints import load_transformer
from streamvid.errors import CheckpointError
from streamvid.kernels.rope import GridRope, rotate
from streamvid.memory.cache import KVCache
from streamvid.memory.policy import MemoryPolicy
from streamvid.recache import recache, recache_frames
from streamvid.schedule import FlowSchedule
from streamvid.transformer import CausalWan
from streamvid.verify_policies import (
    deep_forcing_choice,
    deep_forcing_contents,
    deep_forcing_of,
    forcing_kv_contents,
    forcing_kv_of,
)
from streamvid.verify_units import max_abs
from streamvid.verify_vae import ABSOLUTE_LIMIT, Deviation

HALF_LIMIT = 0.12
"""Largest absolute deviation in bfloat16, about twice what another attention kernel makes."""
HALF_RELATIVE_LIMIT = 0.013
"""Root-mean-square deviation of bfloat16 latents, relative to their own size."""
INPUTS = ("noise", "prompt_embeds", "initial_latent", "denoising_steps", "renoise")


def verify_rollout(folder: Path) -> list[Deviation]:
    """Largest deviation of every recorded tensor of a rollout case.

    Raises:
        CheckpointError: a file is missing, or the case needs a policy that is not known.
    """
    return _Replay(folder).run()


def policy_of(config: dict[str, Any]) -> str | MemoryPolicy:
    """The memory policy a recorded configuration asks for."""
    model = config["model"]
    if "deepforcing" in config:
        return deep_forcing_of(config)
    if "forcingkv" in config:
        return forcing_kv_of(config)
    window, sink = model.get("local_attn_size", -1), model.get("sink_size", 0)
    return "full" if window < 0 else f"window:size={window},sink={sink}"


class _Replay:
    """One rollout."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.case = read_weights(folder / "case.safetensors").tensors
        self.dtype = getattr(torch, self.config["compute_dtype"])
        self.net = CausalWan(
            load_transformer(find_weights(folder), dtype=self.dtype, config=self.config["model"])
        )
        self.half = self.dtype != torch.float32
        geometry = self.net.geometry.kv(
            self.config["batch"], self.config["latent_h"], self.config["latent_w"], dtype=self.dtype
        )
        usual = self.config["num_frame_per_block"]
        self.cache = KVCache(geometry, policy_of(self.config), chunk_frames=usual, retain=True, parity=True)
        self.schedule = FlowSchedule(self.config.get("timestep_shift", 8.0))
        self.rope = GridRope(geometry.head_dim, geometry.grid, dtype=torch.complex128)
        self.deviations: list[Deviation] = []
        self.checked: set[str] = set()
        self.latents: list[Tensor] = []
        self.prompt_index = 0

    def run(self) -> list[Deviation]:
        prompts = self._prompts()
        self._cross_attention(prompts[0])
        given = generated = 0
        for chunk in self.config["chunks"]:
            frames, start = chunk["num_frames"], chunk["start_frame"]
            wanted = self._prompt_at(start)
            if wanted != self.prompt_index:
                self.prompt_index = wanted
                self._recache(prompts[wanted])
            prompt = prompts[wanted]
            self.cache.begin_chunk(frames)
            if chunk.get("kind", "generated") == "generated":
                x0 = self._denoise(
                    chunk["index"], self.case["noise"][:, generated : generated + frames], prompt
                )
                generated += frames
            else:
                x0 = self.case["initial_latent"][:, given : given + frames].to(self.dtype)
                given += frames
            if "deepforcing" in self.config:
                self._compare_all(deep_forcing_choice(self.cache, f"chunk{chunk['index']:02d}"))
            self._context(chunk, x0, prompt)
            self.latents.append(x0)
        self._compare("latents", torch.cat(self.latents, dim=1))
        self._windows("final")
        left = [k for k in self.case if k not in self.checked and not k.split("/")[-1].startswith(INPUTS)]
        left = [k for k in left if not k.startswith(INPUTS)]
        if left:
            raise CheckpointError(f"{len(left)} recorded tensors were not replayed, for example {left[0]}")
        return self.deviations

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _prompts(self) -> list[Any]:
        names = sorted((k for k in self.case if k.startswith("prompt_embeds")), key=lambda k: (len(k), k))
        return [self.net.prepare_prompt(self.case[name].to(self.dtype)) for name in names]

    def _prompt_at(self, start: int) -> int:
        """A switch asked at a frame is honoured at the first chunk that starts there or later."""
        return sum(start >= frame for frame in self.config.get("switch_frame_indices", []))

    def _cross_attention(self, prompt: Any) -> None:
        for layer in range(self.net.geometry.layers):
            self._compare(f"crossattn/layer{layer}/k", prompt.k[layer])
            self._compare(f"crossattn/layer{layer}/v", prompt.v[layer])

    def _recache(self, prompt: Any) -> None:
        def encode(latents: Tensor, skip: int) -> None:
            self.cache.begin_chunk(latents.shape[1], skip=skip)
            self.net.context_pass(latents, 0.0, prompt, self.cache)
            self.cache.commit()

        newest = torch.cat(self.latents, dim=1)[:, -recache_frames(self.cache) :]
        recache(self.cache, newest, encode, keep_sink=bool(self.config.get("global_sink")))
        self._windows(f"recache{self.prompt_index}")

    def _denoise(self, index: int, noise: Tensor, prompt: Any) -> Tensor:
        steps = self.case["denoising_steps"].tolist()
        x = noise.to(self.dtype)
        for step, t in enumerate(steps):
            name = f"chunk{index:02d}/step{step}"
            self._compare(f"{name}/noisy_input", x)
            flow = self.net(x, t, prompt, self.cache)
            x0 = self.schedule.flow_to_x0(flow, x, t)
            self._compare(f"{name}/flow", flow)
            self._compare(f"{name}/x0", x0)
            if step + 1 < len(steps):
                x = self.schedule.add_noise(x0, self.case[f"{name}/renoise"].to(self.dtype), steps[step + 1])
        return x0

    def _context(self, chunk: dict[str, Any], x0: Tensor, prompt: Any) -> None:
        timestep = float(chunk.get("clean_timestep", self.config.get("context_noise", 0)))
        name = f"chunk{chunk['index']:02d}"
        if f"{name}/clean/flow" in self.case:
            self.cache.begin_context()
            self._compare(f"{name}/clean/flow", self.net(x0, timestep, prompt, self.cache))
        else:
            self.net.context_pass(x0, timestep, prompt, self.cache)
        self.cache.commit()
        if "deepforcing" in self.config:
            self._compare_all(deep_forcing_contents(self.cache, self.rope, name, chunk["num_frames"]))
        elif "forcingkv" in self.config:
            self._compare_all(forcing_kv_contents(self.cache, self.rope, name, chunk, self.case))
        else:
            frames = range(chunk["start_frame"], chunk["start_frame"] + chunk["num_frames"])
            self._windows(name, frames)

    def _windows(self, name: str, frames: range | None = None) -> None:
        """Compare what the cache holds (of these frames), keys rotated to their absolute positions."""
        for layer in range(self.net.geometry.layers):
            if f"{name}/layer{layer}/k" not in self.case:
                continue
            bank = self.cache.banks[layer][0]
            held = [e for e in bank.entries if frames is None or e.frames[0] in frames]
            pairs = [bank.read(entry) for entry in held]
            keys = [rotate(k, self.rope.table(e.t)) for e, (k, _) in zip(held, pairs, strict=True)]
            self._compare(f"{name}/layer{layer}/k", torch.cat(keys, dim=1))
            self._compare(f"{name}/layer{layer}/v", torch.cat([v for _, v in pairs], dim=1))

    def _compare_all(self, ours: dict[str, Tensor]) -> None:
        for name, tensor in ours.items():
            self._compare(name, tensor)

    def _compare(self, name: str, ours: Tensor) -> None:
        if name not in self.case:
            return
        self.checked.add(name)
        reference = self.case[name]
        limit = HALF_LIMIT if self.half else ABSOLUTE_LIMIT
        if name.endswith("scores"):  # sums over many queries; what they select must be equal
            limit *= max(1.0, reference[reference.isfinite()].abs().max().item())
        self.deviations.append(max_abs(name, ours, reference, limit))
        if self.half and name == "latents":
            error = (ours.double() - reference.double()).square().mean() / reference.double().square().mean()
            self.deviations.append(Deviation(name, error.sqrt().item(), HALF_RELATIVE_LIMIT, "rms relative"))


def find_weights(folder: Path) -> Path:
    """The weight file of a case. Raises CheckpointError when there is none."""
    for name in ("weights.safetensors", "weights.pt", "weights.pth"):
        if (folder / name).is_file():
            return folder / name
    others = sorted(folder.glob("*.pt"))
    if len(others) == 1:
        return others[0]
    raise CheckpointError(f"{folder}: no weights; expected weights.safetensors or weights.pt")
