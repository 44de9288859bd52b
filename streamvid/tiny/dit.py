"""The embedded causal transformer in training: diffusers' Wan blocks run over chunks, attention answered
from outside.

All per-token work treats tokens as [chunks, tokens of a chunk, dim], whatever sequence a chunk belongs to.
Who sees whom is decided by a callable `attend(layer, q, k, v)`, so teacher forcing (here) and cached
sampling (`rollout`) share one body. Conventions are Self-Forcing's: flow = noise - x0, timestep = 1000 *
sigma, sinusoids in float64, one time per latent frame (here per chunk), rotary pairs adjacent, empty text
rows attended to, no causality inside a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel

from streamvid.tiny.text import TEXT_DIM

CHUNK = 3  # latent frames
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def make_transformer(
    *, heads: int = 6, layers: int = 6, channels: int = 48, ffn_ratio: int = 4
) -> WanTransformer3DModel:
    """The transformer of the embedded model; width is 32 a head. Initialised as a plain pre-norm
    transformer."""
    dim = heads * 32
    model = WanTransformer3DModel(
        patch_size=(1, 1, 1),
        num_attention_heads=heads,
        attention_head_dim=32,
        in_channels=channels,
        out_channels=channels,
        text_dim=TEXT_DIM,
        freq_dim=256,
        ffn_dim=dim * ffn_ratio,
        num_layers=layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=1024,
    )
    for block in model.blocks:
        with torch.no_grad():
            block.scale_shift_table.zero_()
            block.scale_shift_table[:, (2, 5)] = 1.0  # gates open: Muon needs no slow start
            for out in (block.attn1.to_out[0], block.attn2.to_out[0], block.ffn.net[2]):
                out.weight.mul_((2 * layers) ** -0.5)
    with torch.no_grad():
        model.scale_shift_table.zero_()
        model.condition_embedder.time_proj.weight.mul_(0.3)
        model.condition_embedder.time_proj.bias.zero_()
        model.proj_out.weight.zero_()
        model.proj_out.bias.zero_()
    return model


def adam_parameters(model: WanTransformer3DModel) -> list[torch.nn.Parameter]:
    """Parameters that Muon should leave to Adam: modulation tables and the last layer."""
    return [model.scale_shift_table, model.proj_out.weight, *(b.scale_shift_table for b in model.blocks)]


def time_vectors(model: WanTransformer3DModel, timestep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For timesteps [n]: the time vector [n, dim] and its projection [n, 6, dim]."""
    half = model.config.freq_dim // 2
    steps = torch.arange(half, dtype=torch.float64, device=timestep.device)
    angle = timestep.double()[:, None] * torch.pow(10000.0, -steps / half)
    embedder = model.condition_embedder
    wave = torch.cat([angle.cos(), angle.sin()], 1).to(embedder.time_proj.weight.dtype)
    time = embedder.time_embedder(wave)
    return time, embedder.time_proj(F.silu(time)).unflatten(1, (6, -1))


def rotation(model: WanTransformer3DModel, base: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Rotary factors, complex64 [n, CHUNK * height * width, 1, head_dim / 2], of chunks that begin at
    `base` [n]."""
    pairs = model.config.attention_head_dim // 2
    side = pairs // 3
    counts = (pairs - 2 * side, side, side)
    frame = torch.arange(CHUNK, device=base.device).repeat_interleave(height * width)
    row = torch.arange(height, device=base.device).repeat_interleave(width).repeat(CHUNK)
    column = torch.arange(width, device=base.device).repeat(CHUNK * height)
    times = base[:, None] + frame
    positions = (times, row.expand_as(times), column.expand_as(times))
    parts = []
    for count, place in zip(counts, positions, strict=True):
        frequency = 10000.0 ** (-torch.arange(count, dtype=torch.float64, device=base.device) / count)
        parts.append(place.double()[..., None] * frequency)
    angle = torch.cat(parts, -1)
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)[:, :, None]


def rotate(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Rotary embedding on x [n, tokens, heads, head_dim] with adjacent pairs."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * factors).flatten(-2)


def rms(x: torch.Tensor, norm: Any) -> torch.Tensor:
    """RMS norm over the whole width, as the module holds it."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight


def text_keys(model: WanTransformer3DModel, text: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cross-attention keys and values of every layer, each [captions, heads, text_len, head_dim]."""
    hidden = model.condition_embedder.text_embedder(text)
    heads = model.config.num_attention_heads
    out = []
    for block in model.blocks:
        key = rms(block.attn2.to_k(hidden), block.attn2.norm_k)
        value = block.attn2.to_v(hidden)
        out.append(tuple(t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (key, value)))
    return out


def run(
    model: WanTransformer3DModel,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    text: list[tuple[torch.Tensor, torch.Tensor]],
    which: torch.Tensor,
    attend: Attend,
) -> torch.Tensor:
    """Flow [n, CHUNK, c, h, w] of n chunks of latents of that shape at timesteps [n].

    `text` comes from `text_keys`; chunk i reads caption `which[i]`. `attend(layer, q, k, v)` gets and returns
    [n, tokens, heads, head_dim]; q and k are not rotated yet.
    """
    n, _, channels, height, width = latents.shape
    heads = model.config.num_attention_heads
    tokens = latents.permute(0, 1, 3, 4, 2).reshape(n, CHUNK * height * width, channels)
    weight = model.patch_embedding.weight
    x = F.linear(tokens, weight.flatten(1), model.patch_embedding.bias)
    dim = x.shape[-1]
    time, modulation = time_vectors(model, timestep)
    for layer, block in enumerate(model.blocks):
        parts = (block.scale_shift_table + modulation)[:, :, None].unbind(1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        a = torch.addcmul(shift1, F.layer_norm(x, (dim,), eps=1e-6), 1 + scale1)
        attn = block.attn1
        q, k = rms(attn.to_q(a), attn.norm_q), rms(attn.to_k(a), attn.norm_k)
        q, k, v = (t.unflatten(-1, (heads, -1)) for t in (q, k, attn.to_v(a)))
        x = torch.addcmul(x, gate1, attn.to_out[0](attend(layer, q, k, v).flatten(2)))
        attn = block.attn2
        q = rms(attn.to_q(F.layer_norm(x, (dim,), block.norm2.weight, block.norm2.bias, 1e-6)), attn.norm_q)
        key, value = text[layer]
        q = q.unflatten(-1, (heads, -1)).transpose(1, 2)
        read = softmax_attention(q, key[which], value[which])
        x = x + attn.to_out[0](read.transpose(1, 2).flatten(2))
        a = torch.addcmul(shift2, F.layer_norm(x, (dim,), eps=1e-6), 1 + scale2)
        x = torch.addcmul(x, gate2, block.ffn(a))
    shift, scale = (model.scale_shift_table + time[:, None])[:, :, None].unbind(1)
    y = model.proj_out(torch.addcmul(shift, F.layer_norm(x, (dim,), eps=1e-6), 1 + scale))
    return y.view(n, CHUNK, height, width, channels).permute(0, 1, 4, 2, 3)


def softmax_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Plain attention on [..., tokens, head_dim]; on CPU its backward is faster than the fused one at
    these sizes."""
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    return (scores if bias is None else scores + bias).softmax(-1) @ v


@dataclass
class TeacherForcing:
    """The attention of one training step over chunks in the order [alone | clean | noisy].

    `alone` first chunks see themselves. Each of `windows` windows has `clean` chunks, which see each other
    as `clean_bias` says, and `noisy` chunks, which see the clean ones as `noisy_bias` says, and
    themselves. Biases are 0 or -inf: [windows, 1, clean tokens, clean tokens] and [windows, 1, noisy
    tokens, clean tokens].
    """

    alone: int
    windows: int
    clean: int
    noisy: int
    factors: torch.Tensor
    clean_bias: torch.Tensor
    noisy_bias: torch.Tensor

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention for all chunks, [n, tokens, heads, head_dim] in and out."""
        tokens, heads = q.shape[1:3]
        q, k = rotate(q, self.factors), rotate(k, self.factors)
        sizes = (self.alone, self.windows * self.clean, self.windows * self.noisy)
        (qa, qc, qn), (ka, kc, kn), (va, vc, vn) = (t.split(sizes) for t in (q, k, v))
        out = []
        if self.alone:
            flipped = (t.transpose(1, 2) for t in (qa, ka, va))
            out.append(softmax_attention(*flipped).transpose(1, 2))
        if self.windows:
            long = lambda t, count: t.reshape(self.windows, count * tokens, heads, -1).transpose(1, 2)
            qc, kc, vc = (long(t, self.clean) for t in (qc, kc, vc))
            read = softmax_attention(qc, kc, vc, self.clean_bias).transpose(1, 2)
            out.append(read.reshape(self.windows * self.clean, tokens, heads, -1))
            out.append(self._noisy(qn, kn, vn, kc, vc))
        return torch.cat(out)

    def _noisy(self, q, k, v, context_k, context_v) -> torch.Tensor:
        w, n, tokens, heads = self.windows, self.noisy, q.shape[1], q.shape[2]
        q = q * q.shape[-1] ** -0.5
        past = q.reshape(w, n * tokens, heads, -1).transpose(1, 2) @ context_k.mT + self.noisy_bias
        own = q.transpose(1, 2) @ k.transpose(1, 2).mT  # [w n, heads, tokens, tokens]
        own = own.view(w, n, heads, tokens, tokens).transpose(1, 2).reshape(w, heads, n * tokens, tokens)
        weights = torch.cat([past, own], -1).softmax(-1)
        past, own = weights.split((past.shape[-1], tokens), -1)
        own = own.view(w, heads, n, tokens, tokens).transpose(1, 2).reshape(w * n, heads, tokens, tokens)
        read = (past @ context_v).transpose(1, 2).reshape(w * n, tokens, heads, -1)
        return read + (own @ v.transpose(1, 2)).transpose(1, 2)
