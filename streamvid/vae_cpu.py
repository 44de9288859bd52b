"""Three-dimensional convolutions of an autoencoder through oneDNN on a CPU.

PyTorch sends a small batch on one thread to its plain im2col kernel, which took 1.3 times as long as oneDNN's for the
decoder of the embedded model. The numbers are those of that kernel within rounding.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def _forward(conv: nn.Conv3d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    trained = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    named = isinstance(conv.padding, str)  # "same" and "valid"
    if x.device.type != "cpu" or x.dtype != torch.float32 or trained or named:
        return nn.Conv3d._conv_forward(conv, x, weight, bias)
    padding: Any = conv.padding
    return torch.mkldnn_convolution(x, weight, bias, padding, conv.stride, conv.dilation, conv.groups)


def use_onednn(vae: Any) -> Any:
    """Make the 3-D convolutions of ``vae`` use oneDNN where that is possible (CPU, float32, inference). Returns it."""
    if torch.backends.mkldnn.is_available():
        for module in vae.modules():
            if isinstance(module, nn.Conv3d) and module.padding_mode == "zeros":
                module._conv_forward = partial(_forward, module)  # type: ignore[method-assign,assignment]
    return vae
