"""From statistics of heads to the labels and tables that policies read. One rule a function, its source beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamvid.memory.head_stats import LayerStats


def last_mass(stats: LayerStats) -> Tensor:
    """``[heads, L]``: attention of the newest chunk to every frame."""
    rows = stats.mass.sum(dim=(0, 2)).nonzero().flatten()
    return stats.mass[:, rows[-1]]


def forcing_kv(layers: list[LayerStats], *, skip: int = 1, threshold: float = 0.8) -> list[list[str]]:
    """Static heads: at least ``threshold`` of their attention, ``skip`` leading frames apart, is on the last 4 frames.

    Forcing-KV's offline profile (its script skips 1 frame; the file it ships skipped 3).
    """
    out = []
    for stats in layers:
        mass = last_mass(stats)
        share = mass[:, -4:].sum(1) / mass[:, skip:].sum(1).clamp_min(1e-12)
        out.append(["static" if value >= threshold else "dynamic" for value in share.tolist()])
    return out


def dummy_forcing(layers: list[LayerStats], *, share: float = 0.5, chunk: int = 3) -> list[list[str]]:
    """Dummy heads: the ``share`` of all heads that look least at anything but the current chunk.

    Dummy Forcing classifies online, from one early chunk; here from the newest chunk of the profile. The cost of taking
    a head's history away is the larger of its attention to the first and to the middle frames, relative to the
    largest of any head; the others are of the kind of which they have more.
    """
    masses = torch.stack([last_mass(stats) for stats in layers])
    first, middle = masses[..., :chunk].sum(-1), masses[..., chunk:-chunk].sum(-1)
    cost = torch.maximum(first / first.max().clamp_min(1e-12), middle / middle.max().clamp_min(1e-12))
    order = cost.flatten().argsort(stable=True)
    dummy = set(order[: round(share * cost.numel())].tolist())
    heads = cost.shape[1]
    return [
        [
            "dummy"
            if layer * heads + head in dummy
            else "sink"
            if first[layer, head] >= middle[layer, head]
            else "middle"
            for head in range(heads)
        ]
        for layer in range(len(layers))
    ]


def by_age(stats: LayerStats) -> Tensor:
    """``[heads, L]``: mean logit by distance in frames from the first frame of the querying chunk."""
    n = stats.logits.shape[1]
    rows = stats.logits.abs().sum(dim=(0, 2)).nonzero().flatten().tolist()
    sums, counts = (
        torch.zeros(stats.logits.shape[0], n, dtype=torch.float64),
        torch.zeros(n, dtype=torch.float64),
    )
    for row in rows:
        for key in range(row + 1):
            sums[:, row - key] += stats.logits[:, row, key]
            counts[row - key] += 1
    return sums / counts.clamp_min(1)


def pyramid(layers: list[LayerStats], *, period: float = 0.35, steady: float = 0.9) -> list[list[str]]:
    """Wave, veil and anchor heads, by the curve of their mean logit against the age of the key.

    Pyramid Forcing's thresholds are not published; ours: ``wave`` when the part of the curve's variation at periods of
    5 to 7 frames is at least ``period``; ``veil`` when at least ``steady`` of the curve has one sign and it varies less
    than its mean is large; else ``anchor``.
    """
    out = []
    for stats in layers:
        curve = by_age(stats)
        centred = curve - curve.mean(dim=1, keepdim=True)
        power = torch.fft.rfft(centred, dim=1).abs().square()
        length = curve.shape[1]
        periods = torch.tensor([length / max(i, 0.5) for i in range(power.shape[1])])
        wave = power[:, (periods >= 5) & (periods <= 7)].sum(1) / power[:, 1:].sum(1).clamp_min(1e-12)
        positive = (curve > 0).double().mean(1)
        one_sign = torch.maximum(positive, 1 - positive)
        flat = centred.std(dim=1) < curve.mean(dim=1).abs()
        out.append(
            [
                "wave" if w >= period else "veil" if s >= steady and f else "anchor"
                for w, s, f in zip(wave.tolist(), one_sign.tolist(), flat.tolist(), strict=True)
            ]
        )
    return out


def tempcache(layers: list[LayerStats], *, distance: int = 3) -> dict[str, float]:
    """A merging threshold: the median over heads of the likeness of keys ``distance`` frames apart."""
    likeness = torch.stack(
        [stats.likeness[:, min(distance, stats.likeness.shape[1] - 1)] for stats in layers]
    )
    return {"similarity": round(likeness.median().item(), 4)}


def tri_attention(layers: list[LayerStats]) -> dict[str, Any]:
    """Mean query of every head, by rotary pair (real, imaginary, mean modulus): TriAttention's calibration."""
    return {
        name: [[[round(x, 6) for x in row] for row in part(stats).tolist()] for stats in layers]
        for name, part in (
            ("real", lambda s: s.query_mean.real),
            ("imag", lambda s: s.query_mean.imag),
            ("modulus", lambda s: s.query_abs),
        )
    }


def rotatekv(layers: list[LayerStats]) -> list[list[int]]:
    """Channels of each layer's keys by falling magnitude: the order RotateKV deals them out in."""
    return [stats.channels.mean(0).argsort(descending=True, stable=True).tolist() for stats in layers]
