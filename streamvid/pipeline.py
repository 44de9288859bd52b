"""A model ready to stream: ``load`` it once, open as many streams as memory allows.

The pipeline holds weights and settings; everything that changes while a video is made is in the stream. Knows nothing
of checkpoint layouts (``checkpoints``), of the chunk loop (``stream``) or of files.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from streamvid.checkpoints import Components, load_components
from streamvid.errors import StreamvidError
from streamvid.memory.spec import nearest
from streamvid.opening import open_stream
from streamvid.options import StreamOptions
from streamvid.output import StreamOutput, check_output_type, join
from streamvid.sessions import Sessions
from streamvid.stream import VideoStream
from streamvid.timeline import resolve_seed
from streamvid.transformer import CausalWan

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PATHS = ("path_or_name", "vae", "text_encoder", "tokenizer")
ENDLESS_REFUSED = "num_frames must be given for a whole clip; for an endless one use pipe.stream(prompt)"


def load(
    path_or_name: str | os.PathLike[str] = "tiny",
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    attention: str = "auto",
    max_streams: int = 16,
    **parts: Any,
) -> StreamPipeline:
    """Load a model for streaming.

    Args:
        path_or_name: ``"tiny"`` (ships with the package), a weight file, a model folder in any layout that
            ``streamvid info`` knows, or a Hugging Face repository as ``owner/name``.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``; None takes a GPU when there is one.
        dtype: of all weights; None is float32 on a CPU and bfloat16 on a GPU.
        attention: attention backend, see ``streamvid doctor``.
        max_streams: how many streams may be open at once.
        parts: ``which``, ``lora``, ``vae``, ``text_encoder``, ``tokenizer``, ``model_config``, see
            ``checkpoints.load_components``.

    Raises:
        StreamvidError: one sentence on what does not exist, is damaged or does not fit.
    """
    known = set(inspect.signature(load_components).parameters) - {"path_or_name"}
    for name in parts:
        if name not in known:
            raise StreamvidError(
                f"load has no setting {name!r}{nearest(name, known)} (allowed: {', '.join(sorted(known))})"
            )
    for name, value in (("path_or_name", path_or_name), *parts.items()):
        if name in PATHS and value is not None and not isinstance(value, str | os.PathLike):
            raise StreamvidError(f"{name} must be a path or a name, got {value!r}")
    place = resolve_device(device)
    kind = resolve_dtype(dtype, place)
    components = load_components(os.fspath(path_or_name), device=place, dtype=kind, **parts)
    return StreamPipeline(components, attention=attention, max_streams=max_streams)


class StreamPipeline:
    """Weights and settings of one model.

    Args:
        components: the parts, all on one device.
        attention: attention backend.
        max_streams: how many streams may be open at once.
    """

    def __init__(self, components: Components, *, attention: str = "auto", max_streams: int = 16) -> None:
        from streamvid.kernels.attention import find_backend

        self.components = components
        self.config = components.config
        self.attention = attention
        self.model = CausalWan(components.transformer)
        self.sessions = Sessions(max_streams)
        find_backend(attention, self.device, self.dtype)  # refuses one that is unknown or cannot run here

    @classmethod
    def from_pretrained(cls, path_or_name: str | os.PathLike[str] = "tiny", **options: Any) -> StreamPipeline:
        """As ``load``; diffusers' ``torch_dtype`` is accepted for ``dtype``."""
        if "torch_dtype" in options:
            options["dtype"] = options.pop("torch_dtype")
        return load(path_or_name, **options)

    # ---- the parts, under the names that diffusers users know -----------------------------------------------------

    @property
    def transformer(self) -> Any:
        return self.components.transformer

    @property
    def vae(self) -> Any:
        return self.components.vae

    @property
    def text_encoder(self) -> Any:
        return self.components.text

    @property
    def device(self) -> torch.device:
        return next(self.transformer.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.transformer.parameters()).dtype

    def to(self, device: str | torch.device) -> StreamPipeline:
        """Move all parts. Streams must be closed first; returns itself."""
        if len(self.sessions):
            raise StreamvidError(
                f"{len(self.sessions)} streams are open on {self.device}; close them before moving"
            )
        place = resolve_device(device)
        for part in (self.transformer, self.vae, self.text_encoder):
            if part is not None:
                part.to(place)
        self.model = CausalWan(self.transformer)
        return self

    # ---- making video -----------------------------------------------------------------------------------------------

    def stream(self, prompt: str, **options: Any) -> VideoStream:
        """Open a stream: an iterator over frames, endless unless ``num_frames`` is given.

        Args:
            prompt: what to show.
            options: the fields of ``options.StreamOptions``; an unknown name is an error.
        """
        return open_stream(self, StreamOptions.make(prompt, options))

    def restore(self, path: str | os.PathLike[str], *, ahead: int = 0) -> VideoStream:
        """Go on with a stream saved by ``stream.snapshot(path)``, bit for bit on the same device.

        Raises StreamvidError when the file is damaged, or was made with another model.
        """
        from streamvid.resume import restore_stream

        return restore_stream(self, path, ahead=ahead)

    def __call__(
        self,
        prompt: str | Sequence[str],
        num_frames: int = 81,
        *,
        seed: int | Sequence[int] = 0,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        output_type: str = "np",
        return_dict: bool = True,
        callback_on_step_end: Callable[..., dict[str, Any] | None] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
        **options: Any,
    ) -> StreamOutput | tuple[Any, ...]:
        """Make whole clips, with the arguments that diffusers pipelines take.

        Several prompts are made one after the other, so a clip is the same, bit for bit, alone or in any company.

        Args:
            prompt: one text, or several.
            num_frames: pixel frames of each clip, any number from 1.
            seed: one for all clips, or one each; ``generator`` draws them instead.
            output_type: ``np``, ``pt``, ``pil``, ``uint8`` or ``latent``.
            callback_on_step_end: called as ``callback(pipe, step, timestep, {"latents": x0})`` after each denoising
                step, steps counted over the whole clip; it may look, or raise to stop, but not replace latents.
            options: as for ``stream``.
        """
        prompts: list[Any] = list(prompt) if isinstance(prompt, list | tuple) else [prompt]
        if not prompts:
            raise StreamvidError("no prompt was given; pass a text or a list of texts")
        if num_frames is None:
            raise StreamvidError(ENDLESS_REFUSED)
        unknown = set(callback_on_step_end_tensor_inputs) - {"latents"}
        if unknown:
            raise StreamvidError(
                f"callback_on_step_end_tensor_inputs can only name 'latents', got {sorted(unknown)}"
            )
        if callback_on_step_end is not None and not callable(callback_on_step_end):
            raise StreamvidError(f"callback_on_step_end must be a function, got {callback_on_step_end!r}")
        check_output_type(output_type)
        seeds = _seeds(seed, generator, len(prompts))
        clips = []
        for text, number in zip(prompts, seeds, strict=True):
            options |= {"num_frames": num_frames, "seed": number, "output_type": output_type}
            with self.stream(text, **options) as stream:
                if callback_on_step_end is not None:
                    stream.on_step = _step_callback(self, callback_on_step_end)
                clips.append(join([chunk.frames for chunk in stream.chunks()], output_type))
        frames = clips if output_type == "pil" else _stack(clips)
        return StreamOutput(frames, seeds) if return_dict else (frames,)


def resolve_device(device: str | torch.device | None) -> torch.device:
    """None takes CUDA when there is one, else the CPU. Raises StreamvidError on a device that is not usable."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise StreamvidError(f"unknown device {device!r} (allowed: cpu, cuda, cuda:N)") from None
    if place.type == "mps":
        raise StreamvidError("device 'mps' has no float64, which the sampler computes in; use cpu")
    if place.type not in ("cpu", "cuda") or place.type == "cpu" and place.index:
        raise StreamvidError(f"device {str(device)!r} is not supported (allowed: cpu, cuda, cuda:N)")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise StreamvidError(
            f"device {str(device)!r} is not usable here; `streamvid doctor` says why, cpu always works"
        )
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise StreamvidError(
            f"device {str(device)!r}: there are only {torch.cuda.device_count()} CUDA devices"
        )
    return place


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """None is float32 on a CPU (bfloat16 is emulated on many) and bfloat16 on a GPU."""
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if isinstance(dtype, str):
        name = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(dtype, dtype)
        if name not in DTYPES:
            raise StreamvidError(f"unknown dtype {dtype!r} (allowed: {', '.join(DTYPES)})")
        return DTYPES[name]
    if dtype not in DTYPES.values():
        raise StreamvidError(f"dtype {dtype} is not supported (allowed: {', '.join(DTYPES)})")
    return dtype


def _seeds(
    seed: int | Sequence[int], generator: torch.Generator | Sequence[torch.Generator] | None, count: int
) -> list[int]:
    """One seed a clip."""
    if generator is not None:
        single = isinstance(generator, torch.Generator)
        sources: list[Any] = list(generator) if isinstance(generator, list | tuple) else [generator] * count
        if not all(isinstance(source, torch.Generator) for source in sources):
            raise StreamvidError("generator must be a torch.Generator, or a list with one for each prompt")
        if len(sources) != count:
            raise StreamvidError(f"{count} prompts need one generator or {count}, got {len(sources)}")
        drawn = [
            int(torch.randint(2**62, (1,), generator=g, device=g.device))
            for g in sources[: 1 if single else count]
        ]
        return drawn * count if single else drawn
    if not isinstance(seed, list | tuple):
        return [resolve_seed(seed)] * count if seed != -1 else [resolve_seed(-1) for _ in range(count)]
    if len(seed) != count:
        raise StreamvidError(f"{count} prompts need one seed or {count}, got {len(seed)}")
    return [resolve_seed(number) for number in seed]


def _step_callback(
    pipe: StreamPipeline, callback: Callable[..., dict[str, Any] | None]
) -> Callable[..., None]:
    count = 0

    def on_step(event: dict[str, Any]) -> None:
        nonlocal count
        given = {"latents": event["x0"]}
        back = callback(pipe, count, event["info"].timestep, given)
        count += 1
        if isinstance(back, dict) and back.get("latents", event["x0"]) is not event["x0"]:
            raise StreamvidError("callback_on_step_end may look at the latents but not replace them")

    return on_step


def _stack(clips: list[Any]) -> Any:
    if torch.is_tensor(clips[0]):
        return torch.stack(clips)
    import numpy as np

    return np.stack(clips)
