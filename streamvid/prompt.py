"""What a prompt costs once: the text MLP and the cross-attention keys and values of every layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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

    @property
    def batch(self) -> int:
        return self.k[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        images = (self.image_k or ()) + (self.image_v or ())
        return sum(x.nbytes for x in self.k + self.v + images)
