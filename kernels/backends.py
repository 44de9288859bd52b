"""The table of attention backends: what each can do, whether it can run here, and why not.

A dense backend computes one rectangular group: all its heads read all the keys. Grouping, unpacking and merging are
the dispatcher's (`attention.py`).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .reference import reference
from .types import BlockMap, KVView

Dense = Callable[[Tensor, Tensor, Tensor, "Tensor | None", float, bool], "tuple[Tensor, Tensor | None]"]
"""``(q [b,nq,h,d], k [b,nk,h,d], v, bias, scale, want_lse) -> (out, lse [b,h,nq] or None)``; bias fp32
``[b or 1, h or 1, nk]`` or None."""

Family = Callable[[Tensor, Sequence[KVView], float], "tuple[Tensor, Tensor]"]
"""``(q, views, scale) -> (out, lse)``: reads views as they are, packed, ragged, block-sparse or un-rotated."""

Sparse = Callable[
    [Tensor, Tensor, Tensor, "Tensor | None", BlockMap, "tuple[int, ...]", float], "tuple[Tensor, Tensor]"
]
"""``(q, k, v, bias, blocks, places, scale) -> (out, lse)``, arguments as `blocks.attend_blocks`."""


@dataclass(frozen=True)
class Backend:
    """One way to compute attention."""

    name: str
    dense: Dense | None
    missing: Callable[[torch.device, torch.dtype], str]
    """Why it cannot run for this device and dtype; empty = it can."""
    lse: Callable[[torch.device], bool] = lambda device: True
    """Gives the log-sum-exp at no extra cost on this device."""
    family: Family | None = None
    """Set when the backend takes whole views; ``dense`` is then not used."""
    sparse: Sparse | None = None
    """Block-sparse attention of its own; None = the kept blocks are gathered (`blocks.attend_blocks`)."""


def _key_bias(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)[:, :, None]


def _cpu_flash() -> Callable | None:
    """PyTorch's CPU flash kernel, the one behind SDPA, which also returns the log-sum-exp."""
    return getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def _plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Any device, with log-sum-exp; queries in slices so that at most 16 M logits exist at a time."""
    b, nq, h, _ = q.shape
    step = max(1, (1 << 24) // max(1, b * h * k.shape[1]))
    parts = [reference(part, k, v, bias=bias, scale=scale) for part in q.split(step, dim=1)]
    return torch.cat([out for out, _ in parts], 1).to(q.dtype), torch.cat([lse for _, lse in parts], 2)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, want_lse: bool
) -> tuple[Tensor, Tensor | None]:
    mask = _key_bias(bias, q.dtype)
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    if not want_lse:
        if mask is not None:
            mask = mask.expand(-1, -1, q.shape[1], -1)
        out = F.scaled_dot_product_attention(qt, kt, vt, attn_mask=mask, scale=scale)
        return out.transpose(1, 2), None
    flash = _cpu_flash()
    if q.device.type != "cpu" or flash is None:
        return _plain(q, k, v, bias, scale)
    out, lse = flash(qt, kt, vt, attn_mask=mask, scale=scale)
    if bias is not None:  # the kernel answers 0 for a row without keys
        lse = lse.masked_fill(~(bias > -torch.inf).any(-1)[..., None], -torch.inf)
    return out.transpose(1, 2), lse


def _reference(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, want_lse: bool
) -> tuple[Tensor, Tensor | None]:
    out, lse = reference(q, k, v, bias=bias, scale=scale)
    return out.to(q.dtype), lse


def _shapes(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, want_lse: bool
) -> tuple[Tensor, Tensor | None]:
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32) if want_lse else None
    return torch.empty_like(q), lse


def _always(device: torch.device, dtype: torch.dtype) -> str:
    return ""


def has_module(name: str) -> bool:
    """Whether ``name`` can be imported, without importing it."""
    return importlib.util.find_spec(name) is not None


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def _interpreter_missing(dtype: torch.dtype) -> str:
    if dtype == torch.bfloat16:
        return "the interpreter computes bfloat16 wrongly; use float32"
    versions = {name: importlib.metadata.version(name) for name in ("triton", "numpy")}
    numbers = {name: tuple(map(int, text.split(".")[:2])) for name, text in versions.items()}
    if numbers["triton"] < (3, 9) and numbers["numpy"] >= (
        2,
        4,
    ):  # it takes int() of arrays, an error since numpy 2.4
        return f"the interpreter of Triton {versions['triton']} fails with numpy {versions['numpy']}; upgrade Triton"
    return ""


def _triton_missing(device: torch.device, dtype: torch.dtype) -> str:
    if not has_module("triton"):
        return "Triton is not installed (pip install triton)"
    if interpreting():
        return _interpreter_missing(dtype)
    if device.type != "cuda":
        return "it needs a CUDA device; on a CPU set TRITON_INTERPRET=1 to run the kernels (slowly) in the interpreter"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0 or newer"
    return ""


def _triton(q: Tensor, views: Sequence[KVView], scale: float) -> tuple[Tensor, Tensor]:
    from .triton_launch import attend_views

    return attend_views(q, views, scale)


def _flex_dense(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, want_lse: bool
) -> tuple[Tensor, Tensor | None]:
    from . import flex

    return flex.dense(q, k, v, bias, scale, want_lse)


def _flex_sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    blocks: BlockMap,
    places: tuple[int, ...],
    scale: float,
) -> tuple[Tensor, Tensor]:
    from . import flex

    return flex.sparse(q, k, v, bias, blocks, places, scale)


def _through_diffusers(name: str) -> Dense:
    """A kernel of another package, by the name diffusers' attention dispatch gives it."""

    def dense(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, want_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        if (
            bias is not None or want_lse
        ):  # these kernels take no bias, and the dispatch returns no log-sum-exp
            return _sdpa(q, k, v, bias, scale, want_lse)
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        return dispatch_attention_fn(q, k, v, scale=scale, backend=name), None

    return dense


def _package_missing(module: str, package: str) -> Callable[[torch.device, torch.dtype], str]:
    def missing(device: torch.device, dtype: torch.dtype) -> str:
        if not has_module(module):
            return f"{module} is not installed (pip install {package})"
        if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
            return "it needs a CUDA device and float16 or bfloat16"
        return ""

    return missing


def _never(device: torch.device) -> bool:
    return False


BACKENDS: dict[str, Backend] = {
    "sdpa": Backend(
        "sdpa", _sdpa, _always, lse=lambda device: device.type == "cpu" and _cpu_flash() is not None
    ),
    "reference": Backend("reference", _reference, _always),
    "triton": Backend("triton", None, _triton_missing, family=_triton),
    "flex": Backend("flex", _flex_dense, _always, sparse=_flex_sparse),
    "flash": Backend(
        "flash", _through_diffusers("flash"), _package_missing("flash_attn", "flash-attn"), lse=_never
    ),
    "sage": Backend(
        "sage", _through_diffusers("sage"), _package_missing("sageattention", "sageattention"), lse=_never
    ),
}
"""Name to backend. ``flash`` and ``sage`` answer calls with a bias or a log-sum-exp through ``sdpa``."""

SHAPES = Backend("shapes", _shapes, _always)
"""What every call on ``meta`` tensors goes to, in no table: right shapes, nothing computed. Memory plans run on it."""
