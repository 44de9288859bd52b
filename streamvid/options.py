"""What a stream can be asked for, with every default in one place; None means the checkpoint's own default.

Knows no model: sizes and seeds are checked here, plug-in names when the plug-ins are made.
"""

from __future__ import annotations

import dataclasses
import numbers
from dataclasses import dataclass
from typing import Any, TypedDict

from streamvid.config import StreamConfig
from streamvid.errors import StreamvidError
from streamvid.memory.spec import nearest
from streamvid.output import check_output_type
from streamvid.timeline import check_num_frames, check_pixels, resolve_seed, whole


class StreamKeywords(TypedDict, total=False):
    """What ``pipe.stream`` takes beside the prompt, for type checkers: the fields of `StreamOptions`."""

    negative_prompt: str | None
    num_frames: int | None
    seed: int
    height: int | None
    width: int | None
    memory: Any
    codec: Any
    sparse: Any
    cross: Any
    step_cache: Any
    guidance_scale: float | None
    num_inference_steps: int | None
    fuse_context: bool
    output_type: str
    ahead: int
    image: Any
    video: Any


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """Settings of one stream. They do not change while it runs; prompts do."""

    prompt: str
    negative_prompt: str | None = None
    """Read only with guidance."""
    num_frames: int | None = None
    """Pixel frames, any number from 1; None streams without end."""
    seed: int = 0
    """0 to 2**64 - 1; -1 draws one, which ``stream.seed`` tells."""
    height: int | None = None
    """Pixels, a multiple of the VAE's scale times the patch; an error names the nearest sizes."""
    width: int | None = None
    memory: Any = None
    """Memory policy: ``"full"``, ``"window:sink=3,frames=9"``, ... or a policy object."""
    codec: Any = None
    """KV codec: ``"none"``, ... or a codec object."""
    sparse: Any = None
    """Block-sparse attention: a selection rule (``"topk:density=0.25"``, ...) or an object; None reads every key."""
    cross: Any = None
    """Cross-attention: which prompt tokens are read (``"annca:density=0.25"``) or an object; None reads all."""
    step_cache: Any = "none"
    """Step cache in text form, or an object."""
    guidance_scale: float | None = None
    """1 is off."""
    num_inference_steps: int | None = None
    """Transformer passes a chunk. A few-step model takes evenly spaced steps of its own range."""
    fuse_context: bool = False
    """Run the context pass of a chunk together with the first step of the next one: same numbers, fewer passes."""
    output_type: str = "uint8"
    """See ``output.OUTPUT_TYPES``."""
    ahead: int = 0
    """Chunks made in advance by a thread, 0 to 2. 0: each chunk is made when its first frame is asked for."""
    image: Any = None
    """First frame: path, PIL image, array or tensor; for checkpoints that start from an image."""
    video: Any = None
    """Clip to go on from: path, or frames; its own frames are not given out again."""

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str):
            raise StreamvidError(f"prompt must be a text, got {type(self.prompt).__name__}")
        if self.negative_prompt is not None and not isinstance(self.negative_prompt, str):
            raise StreamvidError(f"negative_prompt must be a text, got {self.negative_prompt!r}")
        check_output_type(self.output_type)
        self._set("num_frames", check_num_frames(self.num_frames))
        self._set("seed", resolve_seed(self.seed))
        for name in ("height", "width"):
            if getattr(self, name) is not None:
                self._set(name, check_pixels(name, getattr(self, name)))
        if self.guidance_scale is not None:
            self._set("guidance_scale", check_guidance(self.guidance_scale))
        if self.num_inference_steps is not None:
            self._set("num_inference_steps", check_steps(self.num_inference_steps))
        if not isinstance(self.fuse_context, bool):
            raise StreamvidError(f"fuse_context must be true or false, got {self.fuse_context!r}")
        if whole(self.ahead) is None or self.ahead not in (0, 1, 2):
            raise StreamvidError(f"ahead must be 0, 1 or 2 chunks, got {self.ahead!r}")
        if self.image is not None and self.video is not None:
            raise StreamvidError("give image= or video=, not both")

    def _set(self, name: str, value: Any) -> None:
        """A number of NumPy's is kept as Python's; else nothing changes after this."""
        object.__setattr__(self, name, value)

    @classmethod
    def make(cls, prompt: str, options: dict[str, Any]) -> StreamOptions:
        """From keyword arguments. An unknown one is an error that names the nearest."""
        known = {field.name for field in dataclasses.fields(cls)} - {"prompt"}
        for name in options:
            if name not in known:
                raise StreamvidError(
                    f"unknown stream option {name!r}{nearest(name, known)} (allowed: {', '.join(sorted(known))})"
                )
        return cls(prompt=prompt, **options)

    def configure(self, config: StreamConfig) -> StreamConfig:
        """The checkpoint's configuration with this stream's sampling settings."""
        changes: dict[str, Any] = {}
        if self.guidance_scale is not None:
            changes["guidance_scale"] = self.guidance_scale
        if self.num_inference_steps is not None:
            changes |= _steps(self.num_inference_steps, config)
        if self.negative_prompt is not None:
            changes["negative_prompt"] = self.negative_prompt
        result = dataclasses.replace(config, **changes)
        if self.negative_prompt is not None and result.guidance_scale == 1.0:
            raise StreamvidError(
                "negative_prompt has no effect without guidance; set guidance_scale above 1 too"
            )
        return result


def check_guidance(scale: Any) -> float:
    number = float(scale) if isinstance(scale, numbers.Real) and not isinstance(scale, bool) else -1.0
    if not 0 <= number <= 100:
        raise StreamvidError(f"guidance_scale must be a number in 0..100, got {scale!r}")
    return number


def check_steps(count: Any) -> int:
    steps = whole(count)
    if steps is None or not 1 <= steps <= 1000:
        raise StreamvidError(f"num_inference_steps must be a whole number in 1..1000, got {count!r}")
    return steps


def _steps(count: int, config: StreamConfig) -> dict[str, Any]:
    if config.num_inference_steps is not None:
        return {"num_inference_steps": count}
    if count == len(config.denoising_steps):
        return {}
    top = config.denoising_steps[0]
    return {"denoising_steps": tuple(round(top * (1 - index / count)) for index in range(count))}
