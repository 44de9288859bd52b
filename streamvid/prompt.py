"""What a prompt costs once: the text MLP and the cross-attention keys and values of every layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from streamvid.kernels.cross import AnnCA


@dataclass(frozen=True)
class PromptState:
    """One prompt (or a batch of them) made ready for a model. Immutable; streams may share it."""

    k: tuple[Tensor, ...]
    """Per layer ``[b, text_len, heads, head_dim]``, normalised."""
    v: tuple[Tensor, ...]
    """Per layer, same shape."""
    image_k: tuple[Tensor, ...] | None = None
    """Per layer ``[b, image_len, heads, head_dim]`` of models that cross-attend to an image embedding."""
    image_v: tuple[Tensor, ...] | None = None
    equal_rows: int = 1
    """How many rows at the end are equal: the padding after a prompt, which the models attend to as well. They are
    read as one row whose logit is raised by the log of their number, which is the same (TempCache's merge identity)."""
    rule: AnnCA | None = None
    """Chooses the text tokens that are read (see `streamvid.kernels.cross`); None reads all."""

    def text(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and bias (``[n]`` or None) of the text as a layer reads them."""
        k, v = self.k[layer], self.v[layer]
        if self.equal_rows == 1:
            return k, v, None
        rows = k.shape[1] - self.equal_rows + 1
        bias = torch.zeros(rows, device=k.device)
        bias[-1] = math.log(self.equal_rows)
        return k[:, :rows], v[:, :rows], bias

    def image(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Keys and values of the image as a layer reads them, None for models without."""
        if self.image_k is None or self.image_v is None:
            return None
        return self.image_k[layer], self.image_v[layer]

    @property
    def batch(self) -> int:
        return self.k[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        images = (self.image_k or ()) + (self.image_v or ())
        return sum(x.nbytes for x in self.k + self.v + images)
