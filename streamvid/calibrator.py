"""One run of a model, measured: what step caches need to know of its steps.

Everything is taken through the public stream: a recording step cache watches full runs, and static masks are tried by
running them. Knows no file format; :mod:`streamvid.stepcache.calibration` writes the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.stepcache.base import Session, StepCache, full
from streamvid.stepcache.block_cache import ProfileHooks
from streamvid.stepcache.extrapolate import fitted_factor
from streamvid.stepcache.hooks import relative_change
from streamvid.stepcache.magcache import magnitude_ratio
from streamvid.stepcache.mask import StaticMask
from streamvid.stepcache.search import Edge, exhaustive, lexicographic_path
from streamvid.stepcache.types import BlockHooks, ChunkInfo, Decision, SamplingPlan, StepInfo, StepOutput

EXHAUSTIVE_UP_TO = 6
"""Steps up to which every mask is run; above, the edges of the search are estimated from one run."""


class _RecorderSession(Session):
    """Runs everything in full and records, from the second chunk on (the first has no past to attend to)."""

    static = True
    needs_block_hooks = True
    keeps = ("x0", "eps", "velocity", "residual")
    depth = 2

    def start(self) -> None:
        self.samples: dict[str, dict[str, list[Tensor]]] = {}
        self.edges: dict[str, list[Tensor]] = {}
        self.flows: list[Tensor] = []

    def reset(self) -> None:
        self.deltas: dict[str, dict[int, Tensor]] = {}
        self.importance: dict[int, Tensor] = {}
        self.flows = []

    def decide(self, info: StepInfo, x_t: Tensor) -> Decision:
        return full("calibration")

    def block_hooks(self, info: StepInfo, decision: Decision) -> BlockHooks:
        return ProfileHooks(self.deltas.setdefault(info.branch, {}), self.importance, self.plan.num_layers)

    def observe(self, info: StepInfo, x_t: Tensor, out: StepOutput, decision: Decision) -> Tensor | None:
        if self.chunks_done == 0:
            return None
        entries = self.history(info.branch)
        if entries and out.residual is not None:
            last = entries[0].values
            self._add(f"gamma.{info.branch}", info.step, magnitude_ratio(out.residual, last["residual"]))
            if info.branch == "cond":
                self._add("output_change", info.step, relative_change(out.flow, last["velocity"]))
        if info.branch == "cond":
            self.flows.append(out.flow)
            if len(entries) == 2:
                for space, new in (("x0", out.x0), ("eps", out.x0 + out.flow)):
                    factor = fitted_factor(new, entries[0].values[space], entries[1].values[space])
                    self._add(f"kappa_{space}", info.step, factor)
        return None

    def finish(self, chunk: ChunkInfo, x0: Tensor) -> None:
        for layer, value in self.importance.items():
            if self.chunks_done:
                self._add("importance", layer, value)
        if self.flows:
            self._edges(x0)

    def _edges(self, x0: Tensor) -> None:
        """First-order error at the output of holding step i's velocity until j, relative to the output."""
        steps = [*self.plan.sigmas, 0.0]
        scale = x0.float().abs().mean().clamp_min(1e-12)
        for i, flow in enumerate(self.flows):
            error = torch.zeros_like(flow, dtype=torch.float32)
            for j in range(i + 1, len(self.flows)):
                if j > i + 1:
                    change = self.flows[j - 1].float() - flow.float()
                    error = error + (steps[j] - steps[j - 1]) * change
                self.edges.setdefault(f"{i}.{j}", []).append(error.abs().mean() / scale)

    def _add(self, name: str, index: int, value: Tensor) -> None:
        self.samples.setdefault(name, {}).setdefault(str(index), []).append(value)

    def mean(self, name: str) -> dict[int, float]:
        """Means of a quantity by step or layer."""
        rows = self.samples.get(name, {})
        return {
            int(k): float(torch.stack(v).mean()) for k, v in sorted(rows.items(), key=lambda r: int(r[0]))
        }


@dataclass(kw_only=True)
class Recorder(StepCache):
    """Full steps that are watched. Keeps the sessions it opened."""

    name: ClassVar[str] = "recorder"

    def __post_init__(self) -> None:
        self.session: _RecorderSession | None = None

    def open(self, plan: SamplingPlan) -> Session:
        self.session = _RecorderSession(self, plan)
        return self.session


def calibrate(
    pipe: Any,
    prompts: Sequence[str],
    *,
    chunks: int = 3,
    seed: int = 0,
    masks: bool = True,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure a model.

    Args:
        pipe: a ``StreamPipeline``.
        prompts: run one after the other, ``chunks`` chunks each; the first chunk of each is not measured.
        chunks: at least 2.
        seed: of the noise of every prompt.
        masks: also search static masks.
        progress: told what is being run.
        options: of ``pipe.stream``: size, memory, codec, steps.

    Returns:
        ``(key, values)`` for :func:`streamvid.stepcache.calibration.save`.
    """
    if chunks < 2:
        raise StreamvidError(f"calibration needs at least 2 chunks a prompt, got {chunks}")
    if not prompts:
        raise StreamvidError("calibration needs at least one prompt")
    tell = progress or (lambda text: None)
    recorders, clips = [], []
    for number, prompt in enumerate(prompts, start=1):
        tell(f"full run of prompt {number} of {len(prompts)}")
        recorder = Recorder()
        clips.append(_latents(pipe, prompt, chunks, seed, recorder, options))
        recorders.append(recorder.session)
    plan = recorders[0].plan
    values = _values(recorders, plan)
    if masks:
        values["masks"] = _search(pipe, prompts, clips, chunks, seed, plan, recorders, tell, options)
    return dict(plan.key or {}), values


def _latents(pipe: Any, prompt: str, chunks: int, seed: int, cache: Any, options: dict[str, Any]) -> Tensor:
    """Clean latents ``[F, c, h, w]`` of the first chunks of a stream."""
    options = {**options, "seed": seed, "step_cache": cache, "output_type": "latent"}
    with pipe.stream(prompt, **options) as stream:
        made = [torch.as_tensor(chunk.frames).cpu() for chunk in itertools.islice(stream.chunks(), chunks)]
    return torch.cat(made)


def _mean_of(recorders: Sequence[_RecorderSession], name: str) -> dict[int, float]:
    tables = [recorder.mean(name) for recorder in recorders]
    return {key: float(np.mean([table[key] for table in tables])) for key in tables[0]}


def _values(recorders: Sequence[_RecorderSession], plan: SamplingPlan) -> dict[str, Any]:
    gamma = {}
    for branch in plan.branches:
        table = _mean_of(recorders, f"gamma.{branch}")
        gamma[branch] = [1.0, *(table[step] for step in range(1, plan.num_steps))]
    change = _mean_of(recorders, "output_change")
    values: dict[str, Any] = {
        "prompts": len(recorders),
        "gamma": gamma,
        "output_change": [0.0, *(change[step] for step in range(1, plan.num_steps))],
        "time_change": list(plan.time_change or ()),
        "block_importance": list(_mean_of(recorders, "importance").values()),
    }
    for space in ("x0", "eps"):
        table = _mean_of(recorders, f"kappa_{space}")
        values[f"kappa_{space}"] = {str(step): value for step, value in table.items()}
    polynomial = fit_polynomial(values["time_change"], values["output_change"])
    if polynomial is not None:
        values["tea_polynomial"] = polynomial
    return values


def fit_polynomial(change: Sequence[float], output: Sequence[float], degree: int = 4) -> list[float] | None:
    """Least squares map from embedding change to output change, highest degree first; None for too few steps."""
    if len(change) < 2 * degree:
        return None
    return [float(c) for c in np.polyfit(change[1:], output[1:], degree)]


def _search(
    pipe: Any,
    prompts: Sequence[str],
    clips: Sequence[Tensor],
    chunks: int,
    seed: int,
    plan: SamplingPlan,
    recorders: Sequence[_RecorderSession],
    tell: Callable[[str], None],
    options: dict[str, Any],
) -> dict[str, list[int]]:
    """The best mask for every number of full steps."""
    if plan.num_steps > EXHAUSTIVE_UP_TO:
        edges = _edge_weights(recorders)
        found = {n: lexicographic_path(edges, plan.num_steps, n) for n in range(2, plan.num_steps + 1)}
        return {str(n): list(mask) for n, mask in found.items()}

    def error(skip: tuple[int, ...]) -> float:
        if not skip:
            return 0.0
        tell(f"mask that skips {', '.join(map(str, skip))}")
        errors = []
        for prompt, clip in zip(prompts, clips, strict=True):
            got = _latents(pipe, prompt, chunks, seed, StaticMask(skip=skip), options)
            errors.append(float((got - clip).abs().mean() / clip.abs().mean()))
        return float(np.mean(errors))

    return {str(n): list(mask) for n, mask in exhaustive(plan.num_steps, error).items()}


def _edge_weights(recorders: Sequence[_RecorderSession]) -> dict[Edge, float]:
    names = recorders[0].edges
    weights = {}
    for name in names:
        i, j = map(int, name.split("."))
        samples = [float(value) for recorder in recorders for value in recorder.edges[name]]
        weights[i, j] = float(np.mean(samples))
    return weights
