"""A stream to a file and back: the whole state, unread frames and waiting prompt changes included.

Whatever the next chunk would have started with is in the file, so a resumed stream goes on bit for bit on the same
device and library versions. Knows nothing of the file's layout, which is in ``snapshot``.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import torch

from streamvid.errors import StreamvidError
from streamvid.opening import open_stream
from streamvid.options import StreamOptions
from streamvid.output import VideoChunk
from streamvid.prompts import Change, Receipt, Transition
from streamvid.snapshot import load_tree, save_tree
from streamvid.starts import Start
from streamvid.timeline import Place

if TYPE_CHECKING:
    from streamvid.pipeline import StreamPipeline
    from streamvid.stream import VideoStream

_NOT_KEPT = ("ahead", "image", "video")
"""Options of the process that opened the stream, and those of which the encoded start is kept."""


def save_stream(path: str | os.PathLike[str], stream: VideoStream) -> int:
    """Write a stream that is between two chunks. Returns the bytes of the file."""
    options = {
        field.name: _plain(field.name, getattr(stream.options, field.name))
        for field in dataclasses.fields(stream.options)
        if field.name not in _NOT_KEPT
    }
    with stream._engine.between_chunks(stream._state, keep_owed=stream._fuses):
        tree = {
            "fingerprint": stream._pipe.components.fingerprint,
            "options": options,
            "state": stream._state.state_dict(),
            "start": vars(stream._start) | {"place": vars(stream._start.place).copy()},
            "waiting": [vars(change.receipt).copy() for change in stream._queue.waiting()],
            "unread": [_pack_chunk(chunk) for chunk in stream._unread],
        }
        return save_tree(path, tree)


def restore_stream(pipe: StreamPipeline, path: str | os.PathLike[str], *, ahead: int) -> VideoStream:
    """A stream that goes on where ``save_stream`` left it."""
    tree = load_tree(path)
    if tree["fingerprint"] != pipe.components.fingerprint:
        raise StreamvidError(
            f"{path}: the snapshot was made with another model (fingerprint {tree['fingerprint'][:12]}, this one is "
            f"{pipe.components.fingerprint[:12]}); load the model it was made with"
        )
    begun = tree["start"]
    start = Start(
        [part.to(pipe.device) for part in begun["chunks"]],
        Place(**begun["place"]),
        None if begun["condition"] is None else begun["condition"].to(pipe.device),
    )
    options = dict(tree["options"])
    stream = open_stream(pipe, StreamOptions.make(options.pop("prompt"), options), start)
    with stream._lock, torch.no_grad():
        state = stream._state
        state.load_state_dict(tree["state"], pipe.device)
        for side in state.sides.values():
            stream._engine.set_embeds(side, side.embeds)
        stream._engine.abort(state)
        stream._queue.restart(state.at)
        stream._queue.restore([_change(values) for values in tree["waiting"]])
        stream._unread = [_unpack_chunk(values, stream.options.output_type) for values in tree["unread"]]
    stream.prefetch(ahead)
    return stream


def _plain(name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise StreamvidError(
        f"the stream was opened with a {name} object; give it in text form (name:key=value) to be able to save it"
    )


def _change(values: dict[str, Any]) -> Change:
    receipt = Receipt(**values)
    return Change(receipt, None if receipt.transition == "cut" else Transition.parse(receipt.transition))


def _pack_chunk(chunk: VideoChunk) -> dict[str, Any]:
    values = {field.name: getattr(chunk, field.name) for field in dataclasses.fields(chunk)}
    if isinstance(chunk.frames, list):
        from streamvid.video_io import to_uint8

        values["frames"] = torch.stack(
            [torch.from_numpy(to_uint8(picture).copy()) for picture in chunk.frames]
        )
    elif not torch.is_tensor(chunk.frames):
        values["frames"] = torch.from_numpy(chunk.frames)
    return values


def _unpack_chunk(values: dict[str, Any], output_type: str) -> VideoChunk:
    frames = values["frames"]
    if output_type == "pil":
        from PIL import Image

        frames = [Image.fromarray(picture) for picture in frames.numpy()]
    elif output_type in ("uint8", "np"):
        frames = frames.numpy()
    return VideoChunk(**(values | {"frames": frames}))
