"""A causal rollout of the Wan transformer in plain float64, recorded in the format of the golden cases.

Written from the description in ``golden/README.md`` alone: no cache class, no policy, no scheduler class, nothing of
this package and nothing of diffusers. The past is a dictionary from a frame to its rotated keys and its values. Slow
and obvious, so that ``streamvid verify`` can be held to cases of any size that nobody has seen before.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

TEXT_DIM, FREQ_DIM = 24, 32
Past = dict[int, tuple[Tensor, Tensor]]
"""Frame to its rotated keys and its values ``[b, tokens, heads, head_dim]``."""


@dataclass(frozen=True)
class Setup:
    """What a case is about."""

    seed: int
    batch: int
    rows: int
    columns: int
    chunk: int
    first_alone: bool
    given: int
    generated: int
    window: int
    sink: int
    heads: int
    head_dim: int
    layers: int
    channels: int
    text_len: int
    steps: tuple[int, ...]
    shift: float
    context_noise: int

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim


def random_setup(seed: int) -> Setup:
    """Small sizes, all drawn; every second case has a window."""
    draw = random.Random(seed)
    chunk = draw.randint(1, 4)
    first_alone = draw.random() < 0.3
    sink = draw.choice([0, 1, chunk])
    count = draw.randint(1, 3)
    return Setup(
        seed=seed,
        batch=draw.choice([1, 1, 2]),
        rows=2 * draw.randint(1, 4),
        columns=2 * draw.randint(1, 4),
        chunk=chunk,
        first_alone=first_alone,
        given=draw.choice([0, 0, 1]) * (int(first_alone) + chunk),
        generated=chunk * (count + 3),
        window=-1 if seed % 2 else sink + draw.randint(chunk, 2 * chunk + 1),
        sink=sink,
        heads=draw.choice([1, 2, 3, 5]),
        head_dim=draw.choice([8, 16, 20, 32]),
        layers=draw.randint(1, 4),
        channels=draw.choice([4, 16]),
        text_len=draw.randint(3, 11),
        steps=draw.choice([(1000,), (1000, 500), (1000, 640, 130), (1000, 750, 500, 250)]),
        shift=draw.choice([1.0, 3.0, 5.0, 8.0]),
        context_noise=draw.choice([0, 0, 50]),
    )


def random_weights(setup: Setup, draw: torch.Generator) -> dict[str, Tensor]:
    """Float32 weights under the published names, scaled so that what comes out is about as large as what goes in."""
    dim, text_dim, freq_dim, ffn = setup.dim, TEXT_DIM, FREQ_DIM, 2 * setup.dim
    out: dict[str, Tensor] = {}

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(shape, generator=draw) * scale

    def linear(name: str, inputs: int, outputs: int) -> None:
        out[f"{name}.weight"] = normal(outputs, inputs, scale=inputs**-0.5)
        out[f"{name}.bias"] = normal(outputs, scale=0.1)

    out["patch_embedding.weight"] = normal(dim, setup.channels, 1, 2, 2, scale=(4 * setup.channels) ** -0.5)
    out["patch_embedding.bias"] = normal(dim, scale=0.1)
    linear("text_embedding.0", text_dim, dim)
    linear("text_embedding.2", dim, dim)
    linear("time_embedding.0", freq_dim, dim)
    linear("time_embedding.2", dim, dim)
    linear("time_projection.1", dim, 6 * dim)
    for index in range(setup.layers):
        block = f"blocks.{index}"
        out[f"{block}.modulation"] = normal(1, 6, dim, scale=0.3)
        for part in ("self_attn", "cross_attn"):
            for name in "qkvo":
                linear(f"{block}.{part}.{name}", dim, dim)
            for name in ("norm_q", "norm_k"):
                out[f"{block}.{part}.{name}.weight"] = 1 + normal(dim, scale=0.2)
        out[f"{block}.norm3.weight"] = 1 + normal(dim, scale=0.2)
        out[f"{block}.norm3.bias"] = normal(dim, scale=0.1)
        linear(f"{block}.ffn.0", dim, ffn)
        linear(f"{block}.ffn.2", ffn, dim)
    out["head.modulation"] = normal(1, 2, dim, scale=0.3)
    linear("head.head", dim, 4 * setup.channels)
    return {f"model.{name}": tensor for name, tensor in out.items()}


class PlainWan:
    """The network, one function after the other as described; everything in float64."""

    def __init__(self, setup: Setup, weights: dict[str, Tensor]) -> None:
        self.setup = setup
        self.w = {name.removeprefix("model."): tensor.double() for name, tensor in weights.items()}

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]

    def rms(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.w[f"{name}.weight"]

    def plain_norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=1e-6)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.setup.heads, self.setup.head_dim))

    @staticmethod
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
        return torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v).flatten(2)

    def rotate(self, x: Tensor, start: int) -> Tensor:
        """Pairs of neighbours, turned by the position along time, rows and columns."""
        rows, columns = self.setup.rows // 2, self.setup.columns // 2
        pairs = self.setup.head_dim // 2
        parts = (pairs - 2 * (pairs // 3), pairs // 3, pairs // 3)
        angles = []
        for token in range(x.shape[1]):
            place = (start + token // (rows * columns), token // columns % rows, token % columns)
            angles.append(
                [at * 10000 ** (-j / n) for at, n in zip(place, parts, strict=True) for j in range(n)]
            )
        turn = torch.tensor(angles, dtype=torch.float64)[None, :, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = (even * turn.cos() - odd * turn.sin(), even * turn.sin() + odd * turn.cos())
        return torch.stack(turned, -1).flatten(-2)

    def text(self, embeds: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cross-attention keys and values of every layer."""
        words = F.gelu(self.linear("text_embedding.0", embeds), approximate="tanh")
        words = self.linear("text_embedding.2", words)
        pairs = []
        for index in range(self.setup.layers):
            name = f"blocks.{index}.cross_attn"
            k = self.split(self.rms(f"{name}.norm_k", self.linear(f"{name}.k", words)))
            pairs.append((k, self.split(self.linear(f"{name}.v", words))))
        return pairs

    def forward(
        self, x: Tensor, t: float, text: list[tuple[Tensor, Tensor]], start: int, past: list[Past]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Flow ``[b, f, c, h, w]`` of a chunk that begins at frame ``start``, and its keys and values by layer."""
        batch, frames, channels, height, width = x.shape
        # [b, f, h/2, w/2, c, 2, 2]: a token is a patch, and its weights are those of the strided convolution.
        patches = x.unflatten(4, (-1, 2)).unflatten(3, (-1, 2)).permute(0, 1, 3, 5, 2, 4, 6)
        weight = self.w["patch_embedding.weight"].flatten(1)
        h = patches.flatten(4).flatten(1, 3) @ weight.T + self.w["patch_embedding.bias"]
        half = self.w["time_embedding.0.weight"].shape[1] // 2
        angle = torch.tensor([t * 10000 ** (-j / half) for j in range(half)], dtype=torch.float64)
        wave = torch.cat([angle.cos(), angle.sin()])
        e = self.linear("time_embedding.2", F.silu(self.linear("time_embedding.0", wave)))
        e0 = self.linear("time_projection.1", F.silu(e)).unflatten(0, (6, -1))
        kept = []
        for index in range(self.setup.layers):
            name = f"blocks.{index}"
            shift1, scale1, gate1, shift2, scale2, gate2 = self.w[f"{name}.modulation"][0] + e0
            a = self.plain_norm(h) * (1 + scale1) + shift1
            attn = f"{name}.self_attn"
            q = self.rotate(self.split(self.rms(f"{attn}.norm_q", self.linear(f"{attn}.q", a))), start)
            k = self.rotate(self.split(self.rms(f"{attn}.norm_k", self.linear(f"{attn}.k", a))), start)
            v = self.split(self.linear(f"{attn}.v", a))
            kept.append((k, v))
            seen = [past[index][frame] for frame in self.visible(start, frames)]
            keys = torch.cat([*(pair[0] for pair in seen), k], 1)
            values = torch.cat([*(pair[1] for pair in seen), v], 1)
            h = h + gate1 * self.linear(f"{attn}.o", self.attention(q, keys, values))
            c = F.layer_norm(
                h, h.shape[-1:], self.w[f"{name}.norm3.weight"], self.w[f"{name}.norm3.bias"], 1e-6
            )
            q = self.split(self.rms(f"{name}.cross_attn.norm_q", self.linear(f"{name}.cross_attn.q", c)))
            h = h + self.linear(f"{name}.cross_attn.o", self.attention(q, *text[index]))
            f = self.plain_norm(h) * (1 + scale2) + shift2
            f = self.linear(f"{name}.ffn.2", F.gelu(self.linear(f"{name}.ffn.0", f), approximate="tanh"))
            h = h + gate2 * f
        shift, scale = self.w["head.modulation"][0] + e
        y = self.linear("head.head", self.plain_norm(h) * (1 + scale) + shift)
        y = y.reshape(batch, frames, height // 2, width // 2, 2, 2, channels)
        return y.permute(0, 1, 6, 2, 4, 3, 5).reshape(x.shape), kept

    def visible(self, start: int, frames: int) -> list[int]:
        """Frames of the past that a chunk sees: all, or the sink and the newest that fit beside the chunk."""
        if self.setup.window < 0:
            return list(range(start))
        sink = list(range(min(self.setup.sink, start)))
        room = self.setup.window - self.setup.sink - frames
        rest = range(len(sink), start)
        return sink + list(rest)[max(0, len(rest) - room) :]


Noise = Callable[[int, int, int], Tensor]
"""(chunk, denoising step, frames) -> standard normal ``[b, f, c, h, w]``: step 0 is the start, later ones re-noise."""
Note = Callable[[str, Tensor], None]
"""Told every tensor by the name it has in a case."""


def schedule(shift: float, steps: Sequence[int]) -> tuple[list[float], Callable[[float], float]]:
    """The timesteps of a list of steps, and the sigma that belongs to a timestep (that of the nearest one)."""
    plain = torch.linspace(1, 0, 1001, dtype=torch.float64)[:1000].float()
    sigmas = shift * plain / (1 + (shift - 1) * plain)
    table = torch.cat([1000 * sigmas, torch.zeros(1)])
    times = [table[1000 - step].item() for step in steps]
    return times, lambda t: sigmas[(1000 * sigmas - t).abs().argmin()].item()


def rollout(
    net: PlainWan, embeds: Tensor, noise: Noise, note: Note, given: Tensor | None = None
) -> tuple[Tensor, list[dict[str, Any]]]:
    """Clean latents ``[b, f, c, h, w]`` of a whole clip, the given ones first, and what each chunk was."""
    setup = net.setup
    steps, sigma = schedule(setup.shift, setup.steps)
    text = net.text(embeds.double())
    note("crossattn/layer0/k", text[0][0])
    note("crossattn/layer0/v", text[0][1])
    past: list[Past] = [{} for _ in range(setup.layers)]
    latents: list[Tensor] = []
    chunks: list[dict[str, Any]] = []
    tokens = setup.rows * setup.columns // 4
    start = 0
    while start < setup.given + setup.generated:
        frames = 1 if setup.first_alone and start == 0 else setup.chunk
        frames = min(frames, setup.given + setup.generated - start)
        index, kind = len(chunks), "given" if start < setup.given else "generated"
        name = f"chunk{index:02d}"
        if given is not None and kind == "given":
            x0 = given[:, start : start + frames].double()
        else:
            x = noise(index, 0, frames).double()
            for step, t in enumerate(steps):
                note(f"{name}/step{step}/noisy_input", x)
                flow, _ = net.forward(x, t, text, start, past)
                x0 = x - sigma(t) * flow
                note(f"{name}/step{step}/flow", flow)
                note(f"{name}/step{step}/x0", x0)
                if step + 1 < len(steps):
                    level = sigma(steps[step + 1])
                    x = (1 - level) * x0 + level * noise(index, step + 1, frames).double()
        clean = 0.0 if kind == "given" else float(setup.context_noise)
        flow, kept = net.forward(x0, clean, text, start, past)
        if index == 0:
            note(f"{name}/clean/flow", flow)
        for layer, (k, v) in enumerate(kept):
            note(f"{name}/layer{layer}/k", k)
            note(f"{name}/layer{layer}/v", v)
            for frame in range(frames):
                rows = slice(frame * tokens, (frame + 1) * tokens)
                past[layer][start + frame] = (k[:, rows], v[:, rows])
        latents.append(x0)
        chunks.append(
            {
                "index": index,
                "kind": kind,
                "start_frame": start,
                "num_frames": frames,
                "clean_timestep": clean,
            }
        )
        start += frames
    return torch.cat(latents, 1), chunks


def record(folder: Path, setup: Setup, *, pickled: bool = False) -> Path:
    """Roll out and write ``config.json``, ``case.safetensors`` and the weights. Returns the folder."""
    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(setup.seed)
    weights = random_weights(setup, draw)
    size = (setup.channels, setup.rows, setup.columns)
    case: dict[str, Tensor] = {}
    begun: list[Tensor] = []

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    def noise(chunk: int, step: int, frames: int) -> Tensor:
        fresh = normal(setup.batch, frames, *size)
        if step == 0:
            begun.append(fresh)
        else:
            case[f"chunk{chunk:02d}/step{step - 1}/renoise"] = fresh
        return fresh

    case["denoising_steps"] = torch.tensor(schedule(setup.shift, setup.steps)[0])
    case["prompt_embeds"] = normal(setup.batch, setup.text_len, TEXT_DIM)
    case["prompt_embeds"][:, setup.text_len - 1 :] = 0
    if setup.given:
        case["initial_latent"] = normal(setup.batch, setup.given, *size)
    net = PlainWan(setup, weights)
    case["latents"], chunks = rollout(
        net, case["prompt_embeds"], noise, case.__setitem__, case.get("initial_latent")
    )
    case["noise"] = torch.cat(begun, 1)
    config = {
        "case": folder.name,
        "batch": setup.batch,
        "latent_h": setup.rows,
        "latent_w": setup.columns,
        "num_frame_per_block": setup.chunk,
        "independent_first_frame": setup.first_alone,
        "context_noise": setup.context_noise,
        "timestep_shift": setup.shift,
        "compute_dtype": "float32",
        "model": {
            "text_len": setup.text_len,
            "in_dim": setup.channels,
            "out_dim": setup.channels,
            "dim": setup.dim,
            "ffn_dim": 2 * setup.dim,
            "freq_dim": FREQ_DIM,
            "text_dim": TEXT_DIM,
            "num_heads": setup.heads,
            "num_layers": setup.layers,
            "local_attn_size": setup.window,
            "sink_size": setup.sink,
            "eps": 1e-6,
        },
        "chunks": chunks,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.float().contiguous() for name, tensor in case.items()}, folder / "case.safetensors"
    )
    if pickled:
        torch.save({"generator": weights}, folder / "weights.pt")
    else:
        save_file(weights, folder / "weights.safetensors")
    return folder
