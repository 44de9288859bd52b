"""What a checkpoint says about how it is to be streamed: the contents of ``streamvid.json`` beside its weights.

Knows no tensors. Every default of a stream is visible here.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamvid.errors import StreamvidError
from streamvid.memory.spec import nearest

CONFIG_NAME = "streamvid.json"


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """Stream defaults of one checkpoint. All are overridable per stream."""

    denoising_steps: tuple[int, ...] = (1000, 750, 500, 250)
    """Nominal timesteps on the 0..1000 scale, as indices into the shifted table when ``warp_steps`` is true."""
    warp_steps: bool = True
    timestep_shift: float = 5.0
    num_train_timesteps: int = 1000
    chunk_latents: int = 3
    """Latent frames a chunk."""
    independent_first_frame: bool = False
    """The first chunk has one latent frame (Self-Forcing image-start checkpoints)."""
    context_noise: float = 0.0
    """Timestep of the context pass."""
    memory: str = "auto"
    """Default memory policy, in the text form of ``memory.spec``."""
    codec: str = "none"
    height: int = 480
    """Native pixel height."""
    width: int = 832
    fps: float = 16.0
    text_len: int = 512
    """Rows of the text embedding; rows after the prompt are zero and are attended to, as in the Wan reference."""
    guidance_scale: float = 1.0
    """Classifier-free guidance; 1.0 is off (distilled few-step models)."""
    negative_prompt: str = ""
    num_inference_steps: int | None = None
    """Steps of the many-step sampler; None selects the few-step re-noising sampler."""
    trained_latents: int = 21
    """Latent frames the model was trained on: the range of temporal positions it has seen."""
    vae_scale_temporal: int = 4
    vae_scale_spatial: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "denoising_steps", tuple(self.denoising_steps))
        if not self.denoising_steps or any(not 0 < t <= 1000 for t in self.denoising_steps):
            raise StreamvidError(
                f"denoising_steps must be timesteps in 1..1000, got {list(self.denoising_steps)}"
            )
        if list(self.denoising_steps) != sorted(set(self.denoising_steps), reverse=True):
            raise StreamvidError(f"denoising_steps must fall strictly, got {list(self.denoising_steps)}")
        if self.chunk_latents < 1:
            raise StreamvidError(f"chunk_latents must be at least 1, got {self.chunk_latents}")

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = CONFIG_NAME) -> StreamConfig:
        """Raises StreamvidError on an unknown key, naming the nearest one."""
        allowed = {f.name for f in dataclasses.fields(cls)}
        for key in values:
            if key not in allowed:
                raise StreamvidError(f"{where}: unknown key {key!r}{nearest(key, allowed)}")
        return cls(**values)

    @classmethod
    def from_file(cls, path: Path) -> StreamConfig:
        """Read ``streamvid.json``. Raises StreamvidError when it is not valid."""
        try:
            values = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise StreamvidError(f"{path}: cannot be read as JSON ({error})") from None
        return cls.from_dict(values, str(path))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"denoising_steps": list(self.denoising_steps)}
