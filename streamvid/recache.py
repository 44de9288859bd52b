"""What a new prompt does to the memory: the ways of re-encoding what a stream still sees.

``cross`` needs nothing here (the next pass simply uses the new `PromptState`), ``flush`` is `KVCache.flush`. The others
run context passes over clean latents that the stream kept: at least ``policy.reach()`` of the newest frames.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.memory.cache import KVCache
from streamvid.prompt import PromptState
from streamvid.transformer import CausalWan

RecacheMode = Literal["window", "causal", "micro"]


def recache_frames(cache: KVCache, mode: RecacheMode) -> int:
    """Newest clean latent frames that `recache` needs now."""
    if mode == "micro":
        return min(cache.chunk_frames, cache.next_frame)
    reach = cache.policy.reach()
    return cache.next_frame if reach is None else min(reach, cache.next_frame)


def recache(
    net: CausalWan,
    cache: KVCache,
    prompt: PromptState,
    latents: Tensor,
    *,
    mode: RecacheMode = "window",
    keep_sink: bool = False,
    timestep: float = 0.0,
    condition: Tensor | None = None,
) -> None:
    """Encode the newest frames again under a new prompt, between chunks.

    Args:
        net: the model.
        cache: idle; what it held is replaced.
        prompt: the new prompt.
        latents: the newest clean latents ``[b, n, c, h, w]``, n = ``recache_frames(cache, mode)``.
        mode: ``window``: all frames in one pass in which they see each other in both directions (LongLive 1.x);
            ``causal``: chunk by chunk, as they were made; ``micro``: the last chunk only, the rest stays.
        keep_sink: keep the sink's old keys and values where the frames do not reach back to it (LongLive's
            ``global_sink``); otherwise the oldest encoded frames become the sink.
        timestep: of the context pass.
        condition: of image-to-video models, for the same frames as ``latents``.

    Raises:
        StreamvidError: the wrong number of latents. If a pass fails, the history is incomplete: repeat or reset.
    """
    needed = recache_frames(cache, mode)
    if latents.shape[1] != needed:
        raise StreamvidError(
            f"{mode} re-cache needs the newest {needed} latent frames, got {latents.shape[1]}"
        )
    if needed == 0:
        return
    first = cache.next_frame - needed
    sink = cache.num_sink_frames() if keep_sink and first > 0 else 0
    if mode == "micro":
        cache.rewind(needed)
        sizes, skip = [needed], 0
    elif mode == "window":
        cache.rebuild(first, keep_sink=sink > 0)
        sizes, skip = [needed], sink
    else:
        # Frames that a kept sink leaves no room for need not run: causal passes do not look ahead.
        first, latents = first + sink, latents[:, sink:]
        condition = None if condition is None else condition[:, sink:]
        cache.rebuild(first, keep_sink=sink > 0)
        sizes, skip = _chunks(latents.shape[1], cache.chunk_frames), 0
    at = 0
    for size in sizes:
        part = None if condition is None else condition[:, at : at + size]
        cache.begin_chunk(size, skip=skip)
        net.context_pass(latents[:, at : at + size], timestep, prompt, cache, condition=part)
        cache.commit()
        at += size


def _chunks(frames: int, size: int) -> list[int]:
    """Whole chunks, the rest first, so that they end where chunks of the stream end."""
    rest = frames % size
    return ([rest] if rest else []) + [size] * (frames // size)
