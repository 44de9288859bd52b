"""From a model and a wish to a stream: every setting is checked before anything is allocated.

Knows nothing of the chunk loop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from streamvid.config import StreamConfig
from streamvid.engine import Engine
from streamvid.errors import MemoryBudgetError, StreamvidError
from streamvid.kernels.cross import CROSS_SELECTORS
from streamvid.kernels.selectors import SELECTORS
from streamvid.memory.cache import KVCache
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.policies import POLICIES
from streamvid.memory.policies.rolling_forcing import RollingForcing
from streamvid.memory.policy import MemoryPolicy
from streamvid.memory.spec import build, effective
from streamvid.options import StreamOptions
from streamvid.rolling import RollingState
from streamvid.sampler import make_sampler
from streamvid.starts import Start, prepare_start
from streamvid.state import Side, StreamState
from streamvid.stepcache import build_step_cache
from streamvid.stepcache.base import NoCache
from streamvid.stepcache.planning import plan_for
from streamvid.timeline import ChunkRule, check_pixels

if TYPE_CHECKING:
    from streamvid.pipeline import StreamPipeline
    from streamvid.stream import VideoStream


@dataclass(frozen=True)
class StreamPlan:
    """Everything about a stream that can be said before anything is allocated."""

    config: StreamConfig
    size: tuple[int, int]
    """Height and width in pixels."""
    grid: tuple[int, int]
    """Rows and columns of a latent frame."""
    rule: ChunkRule
    sampler: Any
    policy: MemoryPolicy
    codec: Any
    selector: Any
    cross: Any
    step_cache: Any
    session: Any
    geometry: KVGeometry


def plan_stream(pipe: StreamPipeline, options: StreamOptions) -> StreamPlan:
    """Check every setting against the model. Opening a stream can then only fail on its text, picture or clip.

    Raises StreamvidError (or ValueError of a plug-in) on a setting that cannot work.
    """
    config = options.configure(pipe.config)
    if options.output_type != "latent" and pipe.vae is None:
        raise StreamvidError(f"{pipe.components.missing['vae']}, or ask for output_type='latent'")
    height, width, grid = _sizes(pipe, options, config)
    rule = ChunkRule(
        config.chunk_latents,
        1 if config.independent_first_frame else config.chunk_latents,
        config.vae_scale_temporal,
    )
    sampler = make_sampler(config)
    policy = build(
        default_memory(config) if options.memory is None else options.memory, POLICIES, "memory policy"
    )
    codec = _codec(config.codec if options.codec is None else options.codec)
    selector = None if options.sparse is None else build(options.sparse, SELECTORS, "block selection rule")
    cross = None if options.cross is None else build(options.cross, CROSS_SELECTORS, "prompt token rule")
    step_cache = build_step_cache(options.step_cache)
    session = step_cache.open(
        plan_for(
            sampler,
            pipe.model,
            config,
            grid=grid,
            fingerprint=pipe.components.fingerprint,
            memory=str(describe(policy)),
            codec="none" if codec is None else str(describe(codec)),
        )
    )
    _check_together(options, config, policy, step_cache, session)
    geometry = replace(
        pipe.model.geometry.kv(1, *grid, dtype=pipe.dtype, device=pipe.device),
        fingerprint=pipe.components.fingerprint,
    )
    if codec is None:
        check_room(geometry, policy, config, len(sampler.branches))
    return StreamPlan(
        config,
        (height, width),
        grid,
        rule,
        sampler,
        policy,
        codec,
        selector,
        cross,
        step_cache,
        session,
        geometry,
    )


@torch.no_grad()
def open_stream(pipe: StreamPipeline, options: StreamOptions, start: Start | None = None) -> VideoStream:
    """A stream at frame 0; ``start``: one that has been prepared before.

    Raises StreamvidError (or ValueError of a plug-in) on a setting that cannot work.
    """
    from streamvid.stream import VideoStream

    plan = plan_stream(pipe, options)
    pipe.sessions.check()
    if start is None:
        start = prepare_start(pipe, options, plan.rule, plan.size)
    engine = Engine(pipe.model, pipe.text_encoder, plan.config, start.condition, plan.cross)
    sides: dict[str, Side] = {}
    for branch in plan.sampler.branches:
        text = options.prompt if branch == "cond" else plan.config.negative_prompt
        cache = KVCache(
            plan.geometry,
            plan.policy,
            plan.codec,
            chunk_frames=plan.config.chunk_latents,
            backend=pipe.attention,
            sparse=plan.selector,
            subsets=plan.session.selects_tokens,
        )
        embeds = engine.encode(text)
        sides[branch] = Side(cache, embeds, engine.read(embeds))
    decoder = None
    if options.output_type != "latent":
        from streamvid.vae import make_decoder

        decoder = make_decoder(pipe.vae)
    state = StreamState(
        sides=sides,
        decoder=decoder,
        step_cache=plan.session,
        text=options.prompt,
        at=start.place,
        rolling=RollingState() if plan.config.joint_window else None,
    )
    return VideoStream(
        pipe,
        options,
        engine=engine,
        sampler=plan.sampler,
        state=state,
        rule=plan.rule,
        grid=plan.grid,
        start=start,
        settings=_settings(pipe, options, plan),
    )


def _check_together(
    options: StreamOptions, config: StreamConfig, policy: MemoryPolicy, step_cache: Any, session: Any
) -> None:
    """Settings that are right each by itself and cannot work together."""
    if session.watches_blocks and (options.fuse_context or session.fuses_context):
        raise StreamvidError(
            f"step cache {options.step_cache!r} watches the blocks of every step, which a fused context pass does "
            "not show; leave out fuse_context (or 'fused')"
        )
    if config.joint_window:
        if not isinstance(policy, RollingForcing):
            raise StreamvidError(
                "this checkpoint denoises a joint window, which needs memory 'rolling_forcing' "
                f"(or none given), not {type(policy).__name__}"
            )
        if not isinstance(step_cache, NoCache):
            raise StreamvidError(
                f"step cache {options.step_cache!r} does not fit a joint window, where each forward serves several "
                "steps at once; leave it out"
            )


def check_room(geometry: KVGeometry, policy: MemoryPolicy, config: StreamConfig, branches: int) -> None:
    """Raises MemoryBudgetError when plain keys and values of a full window cannot fit on the device.

    Policies that grow are taken at the trained length, as how long they will run is not known. The exact plan of any
    policy and codec is ``streamvid info --memory``.
    """
    frames = 0
    for layer in range(geometry.layers):
        held = policy.capacity(geometry, layer, 0, config.chunk_latents)
        frames += config.trained_latents if held is None else held
    need, free = frames * geometry.frame_bytes() * branches, _free_bytes(torch.device(geometry.device))
    if free is not None and need > free:
        raise MemoryBudgetError(
            f"the memory of this stream needs {need / 1e9:.2f} GB and {free / 1e9:.2f} GB are free on "
            f"{geometry.device}; choose a smaller size, a shorter window (memory='window:size=...') or a codec"
        )


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu":
        import psutil

        return psutil.virtual_memory().available
    return None


def default_memory(config: StreamConfig) -> str:
    """The checkpoint's policy. ``auto`` is a window of the trained length whose first chunk stays as a sink.

    Until the window is full it equals the full history; after that bytes and time stay flat.
    """
    if config.memory != "auto":
        return config.memory
    if config.joint_window:
        return f"rolling_forcing:size={config.trained_latents},anchor={config.chunk_latents}"
    size = max(config.trained_latents, 2 * config.chunk_latents)
    return f"window:size={size},sink={config.chunk_latents}"


def _sizes(
    pipe: StreamPipeline, options: StreamOptions, config: StreamConfig
) -> tuple[int, int, tuple[int, int]]:
    """Height and width in pixels, and the latent's rows and columns."""
    scale, patch = config.vae_scale_spatial, pipe.model.geometry.patch
    height = config.height if options.height is None else options.height
    width = config.width if options.width is None else options.width
    check_pixels("height", height, scale * patch[0])
    check_pixels("width", width, scale * patch[1])
    return height, width, (height // scale, width // scale)


def _codec(spec: Any) -> Any:
    """``none`` keeps plain tensors, which skips the codec's work altogether."""
    if spec == "none":
        return None
    from streamvid.memory.codecs import CODECS

    return build(spec, CODECS, "codec")


def _settings(pipe: StreamPipeline, options: StreamOptions, plan: StreamPlan) -> dict[str, Any]:
    """What the stream really runs with, JSON-ready."""
    config = plan.config
    return {
        "model": pipe.components.path,
        "fingerprint": pipe.components.fingerprint,
        "device": str(pipe.device),
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "attention": pipe.attention,
        "compile": pipe.model.compile,
        "height": plan.size[0],
        "width": plan.size[1],
        "fps": config.fps,
        "seed": options.seed,
        "num_frames": options.num_frames,
        "chunk_latents": config.chunk_latents,
        "timesteps": list(plan.sampler.timesteps),
        "guidance_scale": config.guidance_scale,
        "negative_prompt": config.negative_prompt,
        "memory": describe(plan.policy),
        "codec": "none" if plan.codec is None else describe(plan.codec),
        "sparse": "none" if plan.selector is None else describe(plan.selector),
        "cross": "none" if plan.cross is None else describe(plan.cross),
        "step_cache": describe(plan.step_cache),
        "fuse_context": options.fuse_context,
        "output_type": options.output_type,
    }


def describe(plugin: Any) -> dict[str, Any]:
    """A plug-in by its class and the settings it really runs with."""
    return {"name": type(plugin).__name__, **effective(plugin)}
