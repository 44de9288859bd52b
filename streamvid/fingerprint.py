"""A short name for a set of weights, so that profiles and calibrations are used only with the model they are of."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

SAMPLED_TENSORS = 24
SAMPLED_VALUES = 64


def fingerprint(model: Any) -> str:
    """16 hexadecimal digits from the layout and a sample of the weights.

    The sample is rounded to bfloat16 before hashing, so the same float32, bfloat16 or float16 file gives the same
    name whether it is loaded in float32 or in bfloat16. Independent of the device; merged adapters change it.

    Args:
        model: a `WanTransformer3DModel` (its head count and named parameters are read).
    """
    named = sorted(model.named_parameters())
    layout = [model.config.num_attention_heads, [[name, list(p.shape)] for name, p in named]]
    digest = hashlib.sha256(json.dumps(layout).encode())
    stride = max(1, len(named) // SAMPLED_TENSORS)
    for _, parameter in named[::stride]:
        flat = parameter.detach().reshape(-1)
        values = flat[:: max(1, flat.numel() // SAMPLED_VALUES)][:SAMPLED_VALUES].cpu().to(torch.bfloat16)
        digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
