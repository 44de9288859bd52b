"""Routers: plug-ins that look at a drafted chunk's pictures and say whether it may stand.

Knows pictures and prompts only. ``score`` returns one number, higher is better; a draft is accepted above
the router's ``threshold``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from streamvid.errors import StreamvidError


class Router(Protocol):
    """A judge of drafts. One object serves one stream."""

    threshold: float

    def score(self, frames: Tensor, prompt: str) -> float:
        """How good a drafted chunk is: ``frames`` ``[n, 3, H, W]`` in 0..1."""
        ...

    def accepted(self, frames: Tensor) -> None:
        """The pictures that the stream really shows, drafted or not: the reference for what follows."""
        ...


def features(frames: Tensor) -> Tensor:
    """Per picture ``[n, 4]``: log sharpness, brightness, colourfulness, share of clipped values.

    Sharpness is the variance of the Laplacian; colourfulness is Hasler and Suesstrunk's.
    """
    luma = (frames * frames.new_tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1, keepdim=True)
    kernel = frames.new_tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]]).view(1, 1, 3, 3)
    sharp = (torch.nn.functional.conv2d(luma, kernel).var((1, 2, 3)) + 1e-8).log()
    rg, yb = frames[:, 0] - frames[:, 1], 0.5 * (frames[:, 0] + frames[:, 1]) - frames[:, 2]
    spread = (rg.var((1, 2)) + yb.var((1, 2))).sqrt()
    colour = spread + 0.3 * (rg.mean((1, 2)).square() + yb.mean((1, 2)).square()).sqrt()
    clipped = ((frames <= 0.004) | (frames >= 0.996)).float().mean((1, 2, 3))
    return torch.stack([sharp, luma.mean((1, 2, 3)), colour, clipped], 1)


@dataclass(kw_only=True)
class QualityGate:
    """No judge, no weights: a draft must look like the chunk before it, and join it without a jump.

    The score is 1 minus the largest deviation over pictures and features, each in units of its tolerance, so a
    threshold of 0 accepts what stays within all tolerances.
    """

    threshold: float = 0.0
    sharpness: float = 1.0
    """Tolerated change of log sharpness: a factor of e in the variance of the Laplacian."""
    brightness: float = 0.08
    """Tolerated change of mean brightness, 0..1."""
    colour: float = 0.08
    """Tolerated change of colourfulness."""
    clipping: float = 0.1
    """Tolerated change of the share of clipped values."""
    jump: float = 3.0
    """Tolerated step from the last picture, in units of the last chunk's own largest step."""
    _reference: Tensor | None = field(default=None, init=False, repr=False)
    _last: Tensor | None = field(default=None, init=False, repr=False)
    _step: float = field(default=0.0, init=False, repr=False)

    def score(self, frames: Tensor, prompt: str) -> float:
        if self._reference is None or self._last is None:
            return float("-inf")
        tolerance = frames.new_tensor([self.sharpness, self.brightness, self.colour, self.clipping])
        strays = ((features(frames) - self._reference).abs() / tolerance).max()
        jump = (frames[0] - self._last).abs().mean() / (self.jump * max(self._step, 1 / 255))
        return float(1 - torch.maximum(strays, jump))

    def accepted(self, frames: Tensor) -> None:
        self._reference, self._last = features(frames).mean(0), frames[-1].clone()
        if len(frames) > 1:
            self._step = float((frames[1:] - frames[:-1]).abs().mean((1, 2, 3)).max())


@dataclass(kw_only=True)
class ImageReward:
    """The published router: the worst picture's ImageReward. Needs the package ``image-reward`` and its weights."""

    threshold: float = -0.7
    _model: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            import ImageReward as package
        except ImportError:
            raise StreamvidError(
                "router 'imagereward' needs its package: pip install image-reward, or use router 'quality'"
            ) from None
        self._model = package.load("ImageReward-v1.0")

    def score(self, frames: Tensor, prompt: str) -> float:
        from PIL import Image

        pictures = (frames.permute(0, 2, 3, 1) * 255).round().byte().cpu().numpy()
        return min(float(self._model.score(prompt, Image.fromarray(picture))) for picture in pictures)

    def accepted(self, frames: Tensor) -> None:
        return None


@dataclass(kw_only=True)
class Always:
    """Accept every draft (the drafter alone, after the first chunk)."""

    threshold: float = 0.0

    def score(self, frames: Tensor, prompt: str) -> float:
        return float("inf")

    def accepted(self, frames: Tensor) -> None:
        return None


@dataclass(kw_only=True)
class Never:
    """Reject every draft: the target's own video, and the full cost of drafting."""

    threshold: float = 0.0

    def score(self, frames: Tensor, prompt: str) -> float:
        return float("-inf")

    def accepted(self, frames: Tensor) -> None:
        return None


ROUTERS: dict[str, type[Any]] = {
    "quality": QualityGate,
    "imagereward": ImageReward,
    "always": Always,
    "never": Never,
}
