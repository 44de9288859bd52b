"""What a tab may ask of a stream: the settings of its form, what can be chosen, and what a choice costs.

Knows nothing of the browser or of threads.
"""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamvid.errors import StreamvidError
from streamvid.memory.spec import nearest

if TYPE_CHECKING:
    from streamvid.pipeline import StreamPipeline

MAX_PROMPT = 2000
"""Characters of one prompt."""
PLANNED = 10
"""Times the trained length for which a memory that grows is planned."""
MAX_SPEC = 300
"""Characters of a plug-in's text form."""


@dataclass(frozen=True, kw_only=True)
class TabSettings:
    """The settings of one stream as the page sends them. Plug-ins are in their text form; empty is the default."""

    prompt: str
    seed: int = 0
    memory: str = ""
    codec: str = ""
    step_cache: str = "none"
    attention: str = "auto"
    """Attention backend."""
    steps: int | None = None
    """Transformer passes a chunk; None is the model's own."""

    def __post_init__(self) -> None:
        check_prompt(self.prompt)
        for name in ("memory", "codec", "step_cache", "attention"):
            value = getattr(self, name)
            if not isinstance(value, str) or len(value) > MAX_SPEC:
                raise StreamvidError(f"{name} must be a text of at most {MAX_SPEC} characters")

    @classmethod
    def from_dict(cls, values: Any) -> TabSettings:
        """Raises StreamvidError on an unknown key, naming the nearest, and on what a field refuses."""
        known = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(values, dict):
            raise StreamvidError("settings must be an object of names and values")
        for name in values:
            if name not in known:
                raise StreamvidError(f"unknown setting {name!r}{nearest(str(name), known)}")
        if "prompt" not in values:
            raise StreamvidError("settings need a prompt")
        return cls(**values)

    def options(self) -> dict[str, Any]:
        """Keyword arguments of ``pipe.stream`` beside the prompt."""
        found: dict[str, Any] = {"seed": self.seed, "step_cache": self.step_cache or "none"}
        if self.memory:
            found["memory"] = self.memory
        if self.codec:
            found["codec"] = self.codec
        if self.steps is not None:
            found["num_inference_steps"] = self.steps
        return found

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def check_prompt(text: Any) -> str:
    """A prompt that is a text of allowed length, or StreamvidError."""
    if not isinstance(text, str) or not text.strip():
        raise StreamvidError("a prompt must be a text that is not empty")
    if len(text) > MAX_PROMPT:
        raise StreamvidError(
            f"a prompt may have {MAX_PROMPT} characters, this one has {len(text)}; shorten it"
        )
    return text


def choices(pipe: StreamPipeline) -> dict[str, Any]:
    """Everything the settings panels offer for a model: names, one line on each, and their fields."""
    from streamvid.kernels.attention import choose_backend
    from streamvid.kernels.backends import BACKENDS
    from streamvid.memory.codecs import CODECS
    from streamvid.memory.policies import POLICIES
    from streamvid.opening import default_memory
    from streamvid.prompts import TRANSITIONS
    from streamvid.sampler import make_sampler
    from streamvid.stepcache import STEP_CACHES

    noise = make_sampler(pipe.config).noise_kind
    usable = {name: backend.missing(pipe.device, pipe.dtype) for name, backend in BACKENDS.items()}
    chosen, reason = choose_backend(pipe.device, pipe.dtype, head_dim=pipe.model.geometry.head_dim)
    return {
        "memory": {name: _plugin(cls) for name, cls in POLICIES.items()},
        "codec": {name: _plugin(cls) for name, cls in CODECS.items()},
        "step_cache": {
            name: _plugin(cls) | {"unfit": "" if noise in cls.kinds else cls.why_not}
            for name, cls in STEP_CACHES.items()
        },
        "attention": {
            "auto": f"takes {chosen} here ({reason})",
            **{name: "usable here" for name, why in usable.items() if not why},
        },
        "transitions": dict(TRANSITIONS),
        "default_memory": default_memory(pipe.config),
        "default_codec": pipe.config.codec,
        "default_steps": pipe.config.num_inference_steps or len(pipe.config.denoising_steps),
    }


def _plugin(cls: type) -> dict[str, Any]:
    """A plug-in's first line of documentation and its fields with their defaults, as texts."""
    text = (inspect.getdoc(cls) or "").strip().split("\n\n")[0]
    fields = []
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        if field.default is not dataclasses.MISSING:
            default = _text(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            default = _text(field.default_factory())
        else:
            default = ""  # must be given
        fields.append({"name": field.name, "default": default})
    return {"about": " ".join(text.replace("``", "").split()), "fields": fields}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return "+".join(map(_text, value))
    return "none" if value is None else str(value)


def memory_cost(pipe: StreamPipeline, memory: str, codec: str) -> dict[str, Any]:
    """What a memory policy and a codec will hold for one stream at the model's native size, before it is opened.

    Raises ValueError (of the plug-in) on a text that names nothing.
    """
    from streamvid.memory.plan import format_bytes, plan
    from streamvid.opening import default_memory

    config = pipe.config
    scale = config.vae_scale_spatial
    grid = (config.height // scale, config.width // scale)
    found = plan(
        pipe.model.geometry.kv(1, *grid, dtype=pipe.dtype, device="meta"),
        policy=memory or default_memory(config),
        codec=codec or config.codec,
        chunk_frames=config.chunk_latents,
        frames=PLANNED * config.trained_latents,
    )
    return {
        "rows": found.rows(),
        "peak": found.peak,
        "stored": found.stored,
        "dense": found.dense,
        "held": found.held,
        "grows": found.grows,
        "text": f"{format_bytes(found.stored)} for {found.held} latent frames"
        + (f" after {found.frames} and growing" if found.grows else "")
        + f"; peak {format_bytes(found.peak)}",
    }
