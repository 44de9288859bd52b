"""Runs a stream of chunks over the mock model with a step cache, context passes included."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, field

import torch
from mock_denoiser import MockDenoiser
from torch.utils._python_dispatch import TorchDispatchMode

from streamvid.config import StreamConfig
from streamvid.noise import CounterNoise
from streamvid.sampler import FewStepSampler, ManyStepSampler
from streamvid.stepcache import STEP_CACHES, build_step_cache
from streamvid.stepcache.types import ChunkInfo

SHAPE = (1, 3, 4, 4, 4)
LAYERS = 3
KINDS = ("fresh", "same")


def sampler_of(kind: str):
    if kind == "fresh":
        return FewStepSampler.from_config(StreamConfig())
    return ManyStepSampler(8, shift=3.0, guidance_scale=3.0, solver="euler")


def cases(attribute: str):
    """(name, kind, text) for every registered method, valid kind and text of an attribute."""
    for name, method in STEP_CACHES.items():
        texts = getattr(method, attribute)
        for text in (texts,) if isinstance(texts, str) else (texts,) if texts else ():
            if text:
                for kind in sorted(method.kinds):
                    yield name, kind, text


class CountingMock(MockDenoiser):
    """Counts the trunk arithmetic really done, in full forwards by the plan's module shares."""

    def __init__(self, shares=None, **kwargs):
        super().__init__(layers=LAYERS, **kwargs)
        self.shares, self.work, self.counting = shares, 0.0, True

    def _block(self, layer, h, branch, hooks, tokens, n):
        outer = self

        class Spy:
            def before_module(self, at, name):
                out = hooks.before_module(at, name) if hooks is not None else None
                if out is None and outer.counting and outer.shares is not None:
                    share = getattr(outer.shares, name) / outer.layers
                    outer.work += share * (1.0 if tokens is None else len(tokens) / n)
                return out

            def after_module(self, at, name, out):
                return hooks.after_module(at, name, out) if hooks is not None else None

        return super()._block(layer, h, branch, Spy(), tokens, n)


class Stream:
    """One stream: model, session and position."""

    def __init__(self, text: str, kind: str, *, seed=5, shape=SHAPE, layers=LAYERS):
        self.sampler, self.shape = sampler_of(kind), shape
        self.plan = self.sampler.plan(num_layers=layers)
        self.session = build_step_cache(text).open(self.plan)
        self.model = CountingMock(self.plan.shares)
        self.noise = CounterNoise([seed + i for i in range(shape[0])])
        self.index = 0

    def chunk(self, on_step=None) -> torch.Tensor:
        info = ChunkInfo(
            index=self.index,
            start_latent=3 * self.index,
            num_latents=3,
            kind="first" if self.index == 0 else "normal",
        )
        x0 = self.sampler.sample_chunk(
            self.model, info, self.noise, self.shape, step_cache=self.session, callback=on_step
        )
        self.context_pass(x0)
        self.index += 1
        return x0

    def context_pass(self, x0) -> None:
        self.model.counting = False
        for branch in self.sampler.branches:
            self.model(x0, 0.0, branch=branch)
        self.model.counting = True
        self.model.context = self.model.keys["cond"][LAYERS - 1][:, -6:].clone()

    def run(self, chunks: int) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.stack([self.chunk() for _ in range(chunks)])


class NoSync(TorchDispatchMode):
    """Refuses everything that would make the host wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero"):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


CHANGE_BEFORE = 3
"""Chunk of a recorded run before which the prompt changes."""


@dataclass
class Record:
    """One run of five chunks, and what was seen on the way."""

    outs: list = field(default_factory=list)
    modes: list = field(default_factory=list)
    """(chunk, step, mode) of the last branch of each step."""
    peak_bytes: int = 0
    rest_bytes: int = 0
    reuse_wrote_keys: bool = False
    context_keys: list = field(default_factory=list)
    """(context before the chunk, x0, keys after its context pass) of chunk 1."""
    report: dict = field(default_factory=dict)
    work: float = 0.0
    stream: Stream | None = None


@functools.cache
def record(text: str, kind: str) -> Record:
    """A recorded run; the decisions of static sessions are made under :class:`NoSync`."""
    stream, seen, before = Stream(text, kind), Record(), {}
    if stream.session.static:
        decide = stream.session.before_step

        def guarded(info, x_t):
            with NoSync():
                return decide(info, x_t)

        stream.session.before_step = guarded

    def note(step):
        info, mode = step["info"], step["decision"].mode
        seen.modes.append((info.chunk.index, info.step, mode))
        now = stream.model.keys[info.branch]
        if mode == "reuse":
            seen.reuse_wrote_keys |= any(now[i] is not before[info.branch][i] for i in range(LAYERS))
        before[info.branch] = dict(now)
        seen.peak_bytes = max(seen.peak_bytes, stream.session.nbytes())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index in range(5):
            if index == CHANGE_BEFORE:
                stream.session.on_context_change("prompt")
            context = stream.model.context
            seen.outs.append(stream.chunk(note))
            if index == 1:
                seen.context_keys = [context, seen.outs[-1], dict(stream.model.keys["cond"])]
    stream.session.__dict__.pop("before_step", None)
    seen.rest_bytes, seen.report = stream.session.nbytes(), stream.session.report()
    seen.work, seen.stream = stream.model.work, stream
    return seen
