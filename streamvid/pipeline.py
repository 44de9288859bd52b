"""A model ready to stream: ``load`` it once, open as many streams as memory allows.

The pipeline holds weights and settings; everything that changes while a video is made is in the stream. Knows nothing
of checkpoint layouts (``checkpoints``), of the chunk loop (``stream``) or of files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch

from streamvid.checkpoints import Components, load_components
from streamvid.errors import StreamvidError
from streamvid.memory.spec import nearest
from streamvid.opening import open_stream
from streamvid.options import StreamKeywords, StreamOptions
from streamvid.output import StreamOutput, check_output_type, join
from streamvid.sessions import Sessions
from streamvid.stream import VideoStream
from streamvid.timeline import resolve_seed
from streamvid.transformer import CausalWan

if TYPE_CHECKING:
    from typing_extensions import Unpack

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PATHS = ("path_or_name", "vae", "text_encoder", "tokenizer")
ENDLESS_REFUSED = "num_frames must be given for a whole clip; for an endless one use pipe.stream(prompt)"


class LoadParts(TypedDict, total=False):
    """What ``load`` hands on to ``checkpoints.load_components``, for type checkers."""

    which: str | None
    lora: Any
    vae: str | Path | None
    text_encoder: str | Path | None
    tokenizer: str | Path | None
    model_config: Mapping[str, Any] | None


def load(
    path_or_name: str | os.PathLike[str] = "tiny",
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    attention: str = "auto",
    max_streams: int = 16,
    compile: bool = False,
    **parts: Unpack[LoadParts],
) -> StreamPipeline:
    """Load a model for streaming.

    Args:
        path_or_name: ``"tiny"`` (ships with the package), a weight file, a model folder in any layout that
            ``streamvid info`` knows, or a Hugging Face repository as ``owner/name``.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``; None takes a GPU when there is one.
        dtype: of all weights; None is float32 on a CPU and bfloat16 on a GPU.
        attention: attention backend, see ``streamvid doctor``.
        max_streams: how many streams may be open at once.
        compile: run the transformer's blocks through ``torch.compile``: the same numbers within rounding, faster from
            the second chunk on. The first chunk of a size takes up to a minute longer.
        which: of a training checkpoint with both, ``"ema"`` or ``"generator"``; None takes the averaged (EMA) weights
            when there are any.
        lora: one adapter or several, merged in order: a path, ``"PATH@SCALE"`` or a ``lora.LoraSpec``.
        vae: a Wan VAE or TAEHV file or folder, in place of the model's own.
        text_encoder: a UMT5 file or folder, in place of the model's own.
        tokenizer: its tokenizer's folder.
        model_config: the transformer's configuration, in place of the ``config.json`` beside its weights.

    Returns:
        A `StreamPipeline`. It holds weights only; open as many streams on it as memory allows.

    Raises:
        StreamvidError: one sentence on what does not exist, is damaged or does not fit. Nothing in a weight file is
            ever run: pickles are read with ``weights_only=True``.

    Example:
        >>> pipe = streamvid.load("tiny")
        >>> with pipe.stream("a big red ball bouncing on a navy background", num_frames=9, seed=7) as stream:
        ...     frames = list(stream)
        >>> len(frames), frames[0].shape, str(frames[0].dtype)
        (9, (64, 64, 3), 'uint8')
    """
    known = set(LoadParts.__annotations__)
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
    return StreamPipeline(components, attention=attention, max_streams=max_streams, compile=compile)


class StreamPipeline:
    """Weights and settings of one model.

    Args:
        components: the parts, all on one device.
        attention: attention backend.
        max_streams: how many streams may be open at once.
        compile: see ``load``.
    """

    def __init__(
        self,
        components: Components,
        *,
        attention: str = "auto",
        max_streams: int = 16,
        compile: bool = False,
    ) -> None:
        from streamvid.kernels.attention import find_backend

        self.components = components
        self.config = components.config
        self.attention = attention
        self.model = CausalWan(components.transformer, compile=compile)
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
        place: torch.device = next(self.transformer.parameters()).device
        return place

    @property
    def dtype(self) -> torch.dtype:
        kind: torch.dtype = next(self.transformer.parameters()).dtype
        return kind

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
        self.model = CausalWan(self.transformer, compile=self.model.compile)
        return self

    # ---- making video -----------------------------------------------------------------------------------------------

    def stream(self, prompt: str, **options: Unpack[StreamKeywords]) -> VideoStream:
        """Open a stream: an iterator over frames, endless unless ``num_frames`` is given.

        Nothing is made before the first frame is asked for. Use it as a context manager, or close it.

        Args:
            prompt: what to show; any text.
            num_frames: pixel frames, any number from 1; None streams without end. The last chunk is cut.
            seed: 0 to 2**64 - 1; -1 draws one, which ``stream.seed`` tells. Same seed, same frames.
            height: pixels, a multiple of the VAE's scale times the patch; None is the checkpoint's own.
            width: as ``height``.
            output_type: what a frame is: ``"uint8"`` numpy ``[H, W, 3]``, ``"np"`` numpy float32 ``[H, W, 3]`` in 0..1,
                ``"pt"`` torch float32 ``[3, H, W]`` in 0..1, ``"pil"``, or ``"latent"`` torch ``[c, h, w]``, one a
                latent frame.
            memory: KV memory policy, ``"full"``, ``"window:size=12,sink=3"`` (latent frames) or an object; None is the
                checkpoint's own, by default a window of the trained length with its first chunk as a sink.
            codec: KV codec, ``"none"``, ``"int4"`` ... or an object.
            step_cache: step cache in text form, or an object; ``"none"`` computes every step.
            sparse: block-sparse attention, ``"topk:density=0.25"`` ... or an object; None reads every key.
            cross: which prompt tokens cross-attention reads, ``"annca:density=0.25"`` or an object; None reads all.
            num_inference_steps: transformer passes a chunk, 1 to 1000; None is the checkpoint's own.
            guidance_scale: 0 to 100; 1 is off. None is the checkpoint's own.
            negative_prompt: read only with guidance.
            fuse_context: run the context pass of a chunk with the first step of the next one: same numbers, fewer
                passes.
            ahead: chunks (0 to 2) that a thread makes in advance; 0 makes each when its first frame is asked for.
            image: first frame, for checkpoints that start from one: path, PIL image, array or tensor of the size above.
            video: clip to go on from, path or frames; its own frames are not given out again.

        Raises:
            StreamvidError: an option that does not exist (naming the nearest) or cannot work, a part that the model
                lacks, memory that cannot fit, or ``max_streams`` open already. It is a ValueError.
        """
        return open_stream(self, StreamOptions.make(prompt, dict(options)))

    def restore(self, path: str | os.PathLike[str], *, ahead: int = 0) -> VideoStream:
        """Go on with a stream saved by ``stream.snapshot(path)``, bit for bit on the same device.

        Raises StreamvidError when the file is damaged, or was made with another model.
        """
        from streamvid.resume import restore_stream

        return restore_stream(self, path, ahead=ahead)

    @overload
    def __call__(
        self,
        prompt: str | Sequence[str],
        num_frames: int = ...,
        *,
        return_dict: Literal[True] = ...,
        **options: Any,
    ) -> StreamOutput: ...

    @overload
    def __call__(
        self,
        prompt: str | Sequence[str],
        num_frames: int = ...,
        *,
        return_dict: Literal[False],
        **options: Any,
    ) -> tuple[Any, ...]: ...

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
            generator: one ``torch.Generator`` for all clips, or one each. It is drawn from once a clip.
            output_type: what ``.frames`` is, for b clips of n frames: ``"np"`` float32 ``[b, n, H, W, 3]`` in 0..1,
                ``"pt"`` float32 ``[b, n, 3, H, W]`` in 0..1, ``"pil"`` b lists of n pictures, ``"uint8"`` numpy
                ``[b, n, H, W, 3]``, ``"latent"`` ``[b, latent frames, c, h, w]``.
            return_dict: False returns ``(frames,)``.
            callback_on_step_end: called as ``callback(pipe, step, timestep, {"latents": x0})`` after each denoising
                step, steps counted over the whole clip; it may look, or raise to stop, but not replace latents.
            callback_on_step_end_tensor_inputs: ``("latents",)`` is all there is.
            options: as for ``stream``.

        Returns:
            `StreamOutput` with ``frames`` and the ``seeds`` that made them.

        Raises:
            StreamvidError: as ``stream``; also for an endless clip, and for numbers of seeds or generators that do not
                match the prompts.
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
