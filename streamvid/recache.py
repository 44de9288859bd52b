"""Encoding again what a stream still sees, after a new prompt: which frames, in which passes, and what the sink does.

Works on the cache alone; the caller runs the passes, over clean latents that the stream kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.memory.cache import KVCache

RecacheMode = Literal["window", "causal", "micro"]
Encode = Callable[[Tensor, int], None]
"""``encode(latents, skip)``: begin a chunk of these frames with this ``skip``, run the context pass, commit."""


def recache_frames(cache: KVCache) -> int:
    """Newest clean latent frames that fill everything the policy shows."""
    reach = cache.policy.reach()
    return cache.next_frame if reach is None else min(reach, cache.next_frame)


def recache(
    cache: KVCache, latents: Tensor, encode: Encode, *, mode: RecacheMode = "window", keep_sink: bool = False
) -> None:
    """Replace the newest frames of a history by new encodings of them, between chunks.

    Args:
        cache: idle.
        latents: the newest clean latents ``[b, n, c, h, w]``, usually ``recache_frames(cache)`` of them.
        encode: runs one pass, under the new prompt.
        mode: ``window``: all frames in one pass, in which they see each other in both directions (LongLive 1.x);
            ``causal``: chunk by chunk, as they were made; ``micro``: these frames in one pass that sees the older ones,
            which stay as they are.
        keep_sink: keep the sink's old keys and values where the frames do not reach back to the stream's first one
            (LongLive's ``global_sink``); otherwise the oldest encoded frames become the sink.

    Raises:
        StreamvidError: more latents than frames so far. If a pass fails, the history is incomplete: repeat or reset.
    """
    frames = latents.shape[1]
    if frames > cache.next_frame:
        raise StreamvidError(
            f"re-cache of {frames} latent frames, but there are only {cache.next_frame} so far"
        )
    if frames == 0:
        return
    first = cache.next_frame - frames
    if mode == "micro":
        cache.rewind(frames)
        encode(latents, 0)
        return
    # The sink's places are taken by as many of the oldest frames; one frame at least is encoded.
    sink = min(cache.num_sink_frames(), frames - 1) if keep_sink and first > 0 else 0
    if mode == "window":
        cache.rebuild(first, keep_sink=sink > 0)
        encode(latents, sink)  # those oldest frames run as queries only
        return
    cache.rebuild(first + sink, keep_sink=sink > 0)  # a causal pass does not look ahead, so they need not run
    latents = latents[:, sink:]
    rest = latents.shape[1] % cache.chunk_frames or cache.chunk_frames  # borders as the chunks were made
    for part in (latents[:, :rest], *latents[:, rest:].split(cache.chunk_frames, dim=1)):
        if part.shape[1]:
            encode(part, 0)
