"""The words that samplers and step caches share: chunk, step, decision, plan. Knows no method and no
model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

Branch = Literal["cond", "uncond"]
Mode = Literal["full", "reuse", "subset", "blocks", "merge_clean"]
Space = Literal["x0", "eps", "velocity", "residual"]
NoiseKind = Literal["fresh", "same"]


@dataclass(frozen=True, kw_only=True)
class ChunkInfo:
    """One chunk of a stream."""

    index: int
    """Place in the stream, from 0; the key of its noise."""
    start_latent: int
    """Absolute index of its first latent frame."""
    num_latents: int
    kind: Literal["first", "normal"] = "normal"
    """``first``: nothing to build on (start of a stream, or after a cut)."""


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """One denoising forward of one branch, before it is run. Plain host numbers, so reading it never
    syncs."""

    chunk: ChunkInfo
    step: int
    num_steps: int
    timestep: float
    sigma: float
    sigma_next: float
    """Sigma of the next step's input; 0 after the last step."""
    branch: Branch
    noise_kind: NoiseKind
    """``fresh``: new noise is mixed in after each step; ``same``: one deterministic trajectory a chunk."""
    patch: tuple[int, int]
    """Latent rows and columns a token covers."""

    @property
    def is_last(self) -> bool:
        return self.step == self.num_steps - 1


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do in a step; made on the host, never changed.

    ``full`` runs the model. ``reuse`` runs nothing (``space`` x0, eps, velocity) or only embedding and head
    (``residual``) and takes the session's prediction instead. ``subset`` runs the listed tokens; the others
    keep the prediction. ``blocks`` runs the model with the session's hooks replacing some of its parts.
    ``merge_clean`` is ``full`` fused with the previous chunk's context pass (exact).
    """

    mode: Mode
    reason: str
    """One word for logs: warmup, tail, first, threshold, cap, mask, guard, disabled, shape, ..."""
    space: Space | None = None
    coefficients: tuple[float, ...] = (1.0,)
    """Weights of the newest, second newest, ... full step in the prediction."""
    tokens: Tensor | None = field(default=None, compare=False)
    """Raster indices ``[n]`` int64 of a ``subset`` step."""

    def __post_init__(self) -> None:
        if self.mode == "reuse" and self.space is None:
            raise ValueError("a reuse decision needs a space")
        if (self.mode == "subset") != (self.tokens is not None):
            raise ValueError("tokens belong to subset decisions and only to them")


@dataclass(kw_only=True)
class StepOutput:
    """What a step of one branch gave. Both fields agree: ``x0 = x_t - sigma flow``."""

    flow: Tensor
    x0: Tensor
    residual: Tensor | None = None
    """Output of the last block minus input of the first ``[b, n, dim]``, where it was asked for."""


class BlockHooks(Protocol):
    """What a step cache may do inside a forward. Every method may return None: go on as usual."""

    def before_block(self, layer: int, h: Tensor) -> Tensor | None:
        """A replacement for the block's output, ``h`` ``[b, n, dim]`` being its input: the block is
        skipped."""
        ...

    def after_block(self, layer: int, h_in: Tensor, h_out: Tensor) -> Tensor | None:
        """A replacement for what the block computed."""
        ...

    def before_module(self, layer: int, name: str) -> Tensor | None:
        """A replacement for the output of ``self_attn``, ``cross_attn`` or ``ffn``: the module is skipped."""
        ...

    def after_module(self, layer: int, name: str, out: Tensor) -> Tensor | None:
        """A replacement for what the module computed."""
        ...


class Denoiser(Protocol):
    """The model of one stream at one chunk: prompt, memory and conditions are already bound."""

    def __call__(
        self,
        x_t: Tensor,
        timestep: float,
        *,
        branch: Branch = "cond",
        hooks: BlockHooks | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Flow ``[b, f, c, h, w]`` of ``x_t``. With ``tokens``, only their places of it are meaningful."""
        ...


@dataclass(frozen=True, kw_only=True)
class ModuleShares:
    """Parts of a block's arithmetic, summing to 1; used to account for skipped modules."""

    self_attn: float = 0.4
    cross_attn: float = 0.15
    ffn: float = 0.45

    @classmethod
    def of(cls, *, dim: int, ffn_dim: int, tokens: int, keys: int, text_len: int) -> ModuleShares:
        """Multiply-adds of a Wan block for ``tokens`` queries, ``keys`` visible keys, cached text keys."""
        self_attn = 4 * tokens * dim * dim + 2 * tokens * keys * dim
        cross = 2 * tokens * dim * dim + 2 * tokens * text_len * dim
        ffn = 2 * tokens * dim * ffn_dim
        total = self_attn + cross + ffn
        return cls(self_attn=self_attn / total, cross_attn=cross / total, ffn=ffn / total)


@dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """What a stream is going to do, as far as a step cache must know; given once when a session is opened."""

    timesteps: tuple[float, ...]
    sigmas: tuple[float, ...]
    noise_kind: NoiseKind
    branches: tuple[Branch, ...] = ("cond",)
    num_layers: int = 1
    patch: tuple[int, int] = (2, 2)
    shares: ModuleShares = ModuleShares()
    time_change: tuple[float, ...] | None = None
    """Relative L1 change of the model's projected time embedding from the last step (0 for the first)."""
    key: dict[str, object] | None = field(default=None, hash=False)
    """Identity of the run (see ``calibration.make_key``); None when it is not known."""

    @property
    def num_steps(self) -> int:
        return len(self.timesteps)

    def replace(self, **changes: object) -> SamplingPlan:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]
