"""The dispatcher: every head attends to the union of the views that serve it, exactly.

Knows tensors only: which frames a view holds, and why, is the cache's business. Never waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, overload

import torch
from torch import Tensor

from .backends import BACKENDS, SHAPES, Backend
from .blocks import attend_blocks
from .quantise import dequantise
from .rope import rotate
from .types import KVView, PackedTensor

Group = tuple[tuple[int, ...], tuple[tuple[int, tuple[int, ...]], ...]]
"""Heads that read the same views, and for each such view its number and the heads' places in it."""


def choose_backend(
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    head_dim: int = 128,
    packed: bool = False,
    ragged: bool = False,
    blocks: bool = False,
) -> tuple[str, str]:
    """The backend ``auto`` takes, and one sentence why.

    Args:
        device: where the tensors are.
        dtype: of the queries.
        head_dim: channels of a head.
        packed: some view is quantised.
        ragged: some view serves some heads only.
        blocks: some view carries a block map.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return "sdpa", "CPU: PyTorch's flash kernel, groups of heads merged by log-sum-exp"
    needs = [
        word for word, wanted in (("packed", packed), ("ragged", ragged), ("block-sparse", blocks)) if wanted
    ]
    if not needs:
        return "sdpa", f"{device.type}: dense keys, PyTorch's scaled_dot_product_attention"
    missing = BACKENDS["triton"].missing(device, dtype)
    if not missing and head_dim not in (32, 64, 128, 256):
        missing = f"the kernel has no head_dim {head_dim}"
    if missing:
        return "sdpa", f"{device.type}: {' and '.join(needs)} keys by unpacking and gathering, as {missing}"
    return "triton", f"{device.type}: reads {' and '.join(needs)} keys as they are stored"


def find_backend(name: str, device: torch.device | str, dtype: torch.dtype) -> Backend:
    """The backend called ``name``, when it can run on this device; ``"auto"`` as for plain dense keys.

    Raises:
        ValueError: unknown name, or a backend that cannot run here (the message says why).
    """
    device = torch.device(device)
    if name == "auto":
        name, _ = choose_backend(device, dtype)
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r} (allowed: auto, {', '.join(sorted(BACKENDS))})")
    if device.type == "meta":
        return SHAPES
    backend = BACKENDS[name]
    reason = backend.missing(device, dtype)
    if reason:
        raise ValueError(f"attention backend {name!r} cannot run on {device} with {dtype}: {reason}")
    return backend


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over a union of disjoint key sets from the attention over each.

    Args:
        outs: each ``[b, nq, h, d]``.
        lses: each ``[b, h, nq]``, natural log; ``(0, -inf)`` is the identity.

    Returns:
        The merged output, in the dtype of the first, and log-sum-exp (fp32).
    """
    if len(outs) == 1:
        return outs[0], lses[0]
    total = torch.logsumexp(torch.stack(list(lses)), dim=0)
    safe = total.masked_fill(total == -torch.inf, 0.0)
    merged: Tensor | None = None
    for out, lse in zip(outs, lses, strict=True):
        weight = torch.exp(lse - safe).transpose(1, 2)[..., None]
        merged = out * weight if merged is None else torch.addcmul(merged, out, weight)
    assert merged is not None
    return merged.to(outs[0].dtype), total


@lru_cache(maxsize=256)
def _group(served: tuple[tuple[int, ...] | None, ...], num_heads: int) -> tuple[Group, ...]:
    """Heads that read the same set of views, from the heads each view serves."""
    places = [None if heads is None else {head: i for i, head in enumerate(heads)} for heads in served]
    groups: dict[tuple[int, ...], list[int]] = {}
    for head in range(num_heads):
        key = tuple(i for i, place in enumerate(places) if place is None or head in place)
        groups.setdefault(key, []).append(head)
    plan = []
    for key, heads in groups.items():
        parts = tuple((i, tuple(h if places[i] is None else places[i][h] for h in heads)) for i in key)
        plan.append((tuple(heads), parts))
    return tuple(plan)


@lru_cache(maxsize=256)
def _index(heads: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(heads, dtype=torch.long, device=device)


def _take(x: Tensor, heads: tuple[int, ...], dim: int) -> Tensor:
    """``x`` at ``heads`` along ``dim``; without a copy when the heads are evenly spaced."""
    if len(heads) == x.shape[dim]:
        return x
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    if heads == tuple(range(heads[0], heads[-1] + 1, step)):
        return x[(slice(None),) * dim + (slice(heads[0], heads[-1] + 1, step),)]
    return x.index_select(dim, _index(heads, x.device))


def _put(out: Tensor, heads: tuple[int, ...], dim: int, part: Tensor) -> None:
    if heads == tuple(range(heads[0], heads[-1] + 1)):
        out.narrow(dim, heads[0], len(heads)).copy_(part)
    else:
        out.index_copy_(dim, _index(heads, out.device), part.to(out.dtype))


def _tensors(view: KVView, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Plain rotated keys, and values, of a view."""
    k, v = (dequantise(x) if isinstance(x, PackedTensor) else x for x in (view.k, view.v))
    if view.rope is not None:
        k = rotate(k, view.rope[:, None])
    return k.to(dtype), v.to(dtype)


@dataclass
class _Part:
    """What one view means to one group of heads."""

    k: Tensor
    v: Tensor
    bias: Tensor | None
    view: KVView
    places: tuple[int, ...]


def _bias_rows(part: _Part) -> Tensor | None:
    """The bias of a view for the heads of a group: ``[1 or heads, n]``."""
    if part.bias is None or part.bias.shape[1] == 1:
        return part.bias
    return _take(part.bias, part.places, 1)


def _join_bias(rows: Sequence[Tensor | None], lengths: list[int], like: Tensor) -> Tensor | None:
    present = [row for row in rows if row is not None]
    if not present:
        return None
    size = max(row.shape[0] for row in present), max(row.shape[1] for row in present)
    full = [
        torch.zeros(*size, n, dtype=torch.float32, device=like.device)
        if row is None
        else row.expand(*size, n)
        for row, n in zip(rows, lengths, strict=True)
    ]
    return torch.cat(full, dim=2)


def _attend_group(
    backend: Backend, q: Tensor, parts: list[_Part], scale: float, want_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """One group of heads over its views, by concatenation or by merging, whichever moves fewer bytes."""
    assert backend.dense is not None
    results = []
    dense = [part for part in parts if part.view.blocks is None]
    for part in parts:
        if part.view.blocks is None:
            continue
        call = (q, part.k, part.v, part.bias, part.view.blocks, part.places, scale)
        results.append(
            attend_blocks(*call, backend.dense) if backend.sparse is None else backend.sparse(*call)
        )
    if dense:
        # Joining reads and writes every key and value once; merging reads and writes every output about twice.
        total = sum(part.view.num_tokens for part in dense)
        merging = backend.lse(q.device) and total > 2 * len(dense) * q.shape[1]
        narrow = [
            (_take(part.k, part.places, 2), _take(part.v, part.places, 2), _bias_rows(part)) for part in dense
        ]
        if not merging and len(narrow) > 1:
            ks, vs, rows = zip(*narrow, strict=True)
            narrow = [(torch.cat(ks, 1), torch.cat(vs, 1), _join_bias(rows, [k.shape[1] for k in ks], q))]
        want_lse = want_lse or len(results) + len(narrow) > 1
        results += [backend.dense(q, k, v, bias, scale, want_lse) for k, v, bias in narrow]
    if len(results) == 1:
        return results[0]
    return merge([out for out, _ in results], [lse for _, lse in results])  # type: ignore[misc]


@overload
def attend(q: Tensor, views: Sequence[KVView], *, return_lse: Literal[True]) -> tuple[Tensor, Tensor]: ...
@overload
def attend(
    q: Tensor, views: Sequence[KVView], *, scale: float | None = ..., backend: str = ...
) -> Tensor: ...


def attend(
    q: Tensor,
    views: Sequence[KVView],
    *,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of every head over the union of the views that serve it.

    Args:
        q: ``[b, nq, h, d]``, rotated.
        views: disjoint sets of keys; a view may serve some heads only.
        scale: multiplies ``q . k``; default ``d ** -0.5``.
        backend: a name of `BACKENDS`, or ``"auto"`` (see `choose_backend`).
        return_lse: also return the natural log-sum-exp ``[b, h, nq]`` in fp32.

    Returns:
        ``[b, nq, h, d]`` in the dtype of ``q``. A head that no view serves gives 0 (log-sum-exp ``-inf``).

    Raises:
        ValueError: shapes that do not fit, or a backend that is unknown or cannot run here.
    """
    b, nq, h, d = q.shape
    for view in views:
        kb, _, hg, kd = view.k.shape
        if (kb, kd) != (b, d) or (view.heads is None and hg != h) or (view.heads and view.heads[-1] >= h):
            raise ValueError(
                f"view {tuple(view.k.shape)} for heads {view.heads} does not fit q {tuple(q.shape)}"
            )
    views = [view for view in views if view.num_tokens]
    scale = d**-0.5 if scale is None else scale
    if backend == "auto":
        backend, _ = choose_backend(
            q.device,
            q.dtype,
            head_dim=d,
            packed=any(isinstance(view.k, PackedTensor) for view in views),
            ragged=any(view.heads is not None for view in views),
            blocks=any(view.blocks is not None for view in views),
        )
    chosen = find_backend(backend, q.device, q.dtype)
    if chosen.family is not None:
        out, lse = chosen.family(q, views, scale)
        return (out, lse) if return_lse else out
    tensors = [_tensors(view, q.dtype) for view in views]
    groups = _group(tuple(view.heads for view in views), h)
    results = []
    for heads, members in groups:
        if not members:
            empty = q.new_full((b, len(heads), nq), -torch.inf, dtype=torch.float32)
            results.append((q.new_zeros(b, nq, len(heads), d), empty))
            continue
        parts = []
        for i, at in members:
            bias = views[i].bias
            if bias is not None:
                bias = bias.reshape((1,) * (3 - bias.dim()) + bias.shape)
            parts.append(_Part(*tensors[i], bias, views[i], at))
        results.append(_attend_group(chosen, _take(q, heads, 2), parts, scale, return_lse))
    return _collect(q, groups, results, return_lse)


def _collect(
    q: Tensor,
    groups: tuple[Group, ...],
    results: list[tuple[Tensor, Tensor | None]],
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Put the groups' outputs back at their heads."""
    if len(groups) == 1:
        out, lse = results[0]
    else:
        out, lse = torch.empty_like(q), None
        if return_lse:
            lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        for (heads, _), (part, part_lse) in zip(groups, results, strict=True):
            _put(out, heads, 2, part)
            if lse is not None:
                assert part_lse is not None
                _put(lse, heads, 1, part_lse)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse
