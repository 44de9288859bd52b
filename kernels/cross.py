"""Cross-attention to some of a prompt's tokens: AnnCA. One small dataclass a rule, all in `CROSS_SELECTORS`.

Keys of a prompt never change while it is in force, so a rule is asked anew in every call and holds no state.
Never waits for the device: how many tokens are kept is fixed by the prompt's length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .selectors import projections


@dataclass(frozen=True, kw_only=True)
class AnnCA:
    """Approximate-nearest-neighbour cross-attention (TempCache's authors): prompt tokens near no query are dropped.

    Queries and prompt keys are hashed by the signs of random projections (LSH); of every head, the prompt tokens whose
    hash comes nearest to that of some query are kept. Deviations: the published hash width and threshold are not
    known, so a budget replaces the threshold and the defaults are ours; tokens are chosen a chunk and head rather than
    a frame, as the frames of a chunk are denoised together.
    """

    density: float = 0.25
    """Share of the prompt's tokens that are read, rounded up; 1 reads all, bit for bit as without a rule."""
    bits: int = 16
    """Projections of the hash."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, got {self.density}")
        if not 1 <= self.bits <= 64:
            raise ValueError(f"bits must be 1 to 64, got {self.bits}")

    def choose(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Which prompt tokens each head reads.

        Args:
            q: queries ``[b, nq, h, d]``.
            k: keys of the prompt ``[b, n, h, d]``.

        Returns:
            int64 ``[b, h, ceil(density * n)]``, ascending; ties go to the lower index. None = all.
        """
        number = math.ceil(self.density * k.shape[1])
        if number == k.shape[1]:
            return None
        planes = projections(q.shape[-1], self.bits, self.seed, q.device)
        signs = [torch.where(x.float() @ planes >= 0, 1.0, -1.0).transpose(1, 2) for x in (q, k)]
        nearness = (signs[0] @ signs[1].transpose(-1, -2)).amax(2)
        order = torch.sort(nearness, dim=-1, descending=True, stable=True).indices
        return order[..., :number].sort(-1).values


def cross_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, rule: AnnCA | None = None
) -> Tensor:
    """Attention of latent queries to a prompt.

    Args:
        q: ``[b, nq, h, d]``.
        k: ``[b or 1, n, h, d]``; one item serves all.
        v: as ``k``.
        bias: ``[n]``, added to every logit of a token.
        rule: chooses the tokens that are read; None reads all.

    Returns:
        ``[b, nq, h, d]``.
    """
    k, v = (x.expand(q.shape[0], -1, -1, -1) for x in (k, v))
    mask = None if bias is None else bias.to(q.dtype)[None, None, None]
    chosen = None if rule is None else rule.choose(q, k)
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    if chosen is not None:
        rows = chosen[..., None].expand(-1, -1, -1, q.shape[-1])
        kt, vt = kt.gather(2, rows), vt.gather(2, rows)
        if mask is not None:
            mask = mask.expand(*chosen.shape[:2], 1, -1).gather(3, chosen[:, :, None])
    if mask is not None:
        mask = mask.expand(-1, -1, q.shape[1], -1)
    return F.scaled_dot_product_attention(qt, kt, vt, attn_mask=mask).transpose(1, 2)


CROSS_SELECTORS: dict[str, type[AnnCA]] = {"annca": AnnCA}
