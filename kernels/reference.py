"""Plain attention in fp32: the definition of right for every other path. Slow and simple on purpose."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention with every logit in memory.

    Args:
        q: ``[b, nq, h, d]``.
        k: ``[b, nk, h, d]``.
        v: ``[b, nk, h, d]``.
        mask: bool, broadcastable to ``[b, h, nq, nk]``; True = the query may read the key.
        bias: logits added to each key, ``[nk]``, ``[h, nk]`` or ``[b, h, nk]``.
        scale: multiplies ``q . k``; default ``d ** -0.5``.

    Returns:
        The output ``[b, nq, h, d]`` and the natural log-sum-exp ``[b, h, nq]``, both fp32 (fp64
        for fp64 inputs). A query that may read nothing gives ``0`` and ``-inf``, the identity of `merge`.
    """
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = torch.einsum("bqhd,bkhd->bhqk", q.to(work), k.to(work)) * scale
    if bias is not None:
        logits = logits + bias.reshape((1,) * (3 - bias.dim()) + bias.shape)[:, :, None].to(work)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    if logits.shape[-1] == 0:
        return torch.zeros_like(q, dtype=work), logits.new_full(logits.shape[:-1], -torch.inf)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return torch.einsum("bhqk,bkhd->bqhd", weights, v.to(work)), lse
