"""A small causal denoiser that obeys the Denoiser and BlockHooks contracts, with a cache one can inspect."""

from __future__ import annotations

import torch
from torch import Tensor

MODULES = ("self_attn", "cross_attn", "ffn")


class MockDenoiser:
    """Blocks of (attention over stored and current tokens, cross attention, feed-forward), both branches.

    ``keys[branch][layer]`` is what the chunk in progress last wrote; ``log`` lists every forward.
    """

    def __init__(self, layers=4, dim=16, channels=4, patch=(2, 2), seed=0, gain=0.6, context_seed=1):
        g = torch.Generator().manual_seed(seed)
        self.layers, self.patch, self.channels = layers, patch, channels
        width = channels * patch[0] * patch[1]

        def w(rows, cols):
            return torch.randn(rows, cols, generator=g) / rows**0.5

        self.embed, self.head = w(width, dim), w(dim, width)
        self.weights = [{n: w(dim, dim) for n in ("q", "k", "v", "cross", "ffn")} for _ in range(layers)]
        self.gain = gain
        self.text = {"cond": w(1, dim)[0], "uncond": torch.zeros(dim)}
        self.context = torch.randn(6, dim, generator=torch.Generator().manual_seed(context_seed))
        self.keys: dict[str, dict[int, Tensor]] = {"cond": {}, "uncond": {}}
        self.log: list[tuple[float, str, int]] = []

    def tokens_of(self, x: Tensor) -> Tensor:
        b, f, c, h, w = x.shape
        ph, pw = self.patch
        return (
            x.reshape(b, f, c, h // ph, ph, w // pw, pw)
            .permute(0, 1, 3, 5, 2, 4, 6)
            .reshape(b, f * (h // ph) * (w // pw), c * ph * pw)
        )

    def latents_of(self, tokens: Tensor, shape) -> Tensor:
        b, f, c, h, w = shape
        ph, pw = self.patch
        return (
            tokens.reshape(b, f, h // ph, w // pw, c, ph, pw)
            .permute(0, 1, 4, 2, 5, 3, 6)
            .reshape(b, f, c, h, w)
        )

    def __call__(self, x_t, timestep, *, branch="cond", hooks=None, tokens=None):
        full = self.tokens_of(x_t) @ self.embed + torch.sin(torch.tensor(timestep / 300.0))
        h = full if tokens is None else full[:, tokens]
        self.log.append((timestep, branch, h.shape[1]))
        for layer in range(self.layers):
            out = hooks.before_block(layer, h) if hooks is not None else None
            if out is None:
                out = self._block(layer, h, branch, hooks, tokens, full.shape[1])
                changed = hooks.after_block(layer, h, out) if hooks is not None else None
                out = out if changed is None else changed
            h = out
        y = h @ self.head
        if tokens is not None:
            y = torch.zeros(full.shape[0], full.shape[1], y.shape[-1]).index_copy(1, tokens, y)
        return self.latents_of(y, x_t.shape)

    def _block(self, layer, h, branch, hooks, tokens, n):
        weights = self.weights[layer]

        def attention():
            k = h @ weights["k"]
            if tokens is not None:
                kept = self.keys[branch].get(layer, torch.zeros(h.shape[0], n, h.shape[2]))
                k = kept.index_copy(1, tokens, k)
            self.keys[branch][layer] = k
            every = torch.cat([self.context.expand(h.shape[0], -1, -1), k], 1)
            return torch.softmax(h @ weights["q"] @ every.transpose(1, 2) / 4, -1) @ every @ weights["v"]

        parts = {
            "self_attn": attention,
            "cross_attn": lambda: (h + self.text[branch]) @ weights["cross"],
            "ffn": lambda: torch.tanh(h @ weights["ffn"]),
        }
        for name in MODULES:
            out = hooks.before_module(layer, name) if hooks is not None else None
            if out is None:
                out = parts[name]()
                changed = hooks.after_module(layer, name, out) if hooks is not None else None
                out = out if changed is None else changed
            h = h + self.gain * out / self.layers
        return h


class ConstantX0:
    """The analytic model whose answer is always ``x0``: its flow is ``(x_t - x0) / sigma``."""

    def __init__(self, x0: Tensor, sigma_of):
        self.x0, self.sigma_of = x0, sigma_of

    def __call__(self, x_t, timestep, *, branch="cond", hooks=None, tokens=None):
        return ((x_t.double() - self.x0.double()) / self.sigma_of(timestep)).to(x_t.dtype)
