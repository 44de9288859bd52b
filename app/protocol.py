"""The words between page and server: each JSON message from the page is one call on its session.

Knows nothing of sockets; a mistake raises StreamvidError or ValueError with one sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamvid.app.hub import Hub
from streamvid.app.session import Session
from streamvid.app.settings import MAX_SPEC, TabSettings, choices, memory_cost
from streamvid.errors import StreamvidError
from streamvid.memory.spec import nearest

Answer = dict[str, Any] | None


def hello(hub: Hub, session: Session) -> dict[str, Any]:
    """The first message of a tab, and the one after another model was chosen: what the model is and takes."""
    pipe = hub.pipe(session.model)
    config, kinds = pipe.config, pipe.model.geometry
    return {
        "type": "hello",
        "token": session.token,
        "model": session.model,
        "device": str(pipe.device),
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "height": config.height,
        "width": config.width,
        "fps": config.fps,
        "chunk_latents": config.chunk_latents,
        "layers": kinds.layers,
        "heads": kinds.heads,
        "image": bool(config.independent_first_frame),
        "choose_models": hub.choose_models,
        "max_streams": hub.max_streams,
        "choices": choices(pipe),
    }


def handle(hub: Hub, session: Session, message: Any) -> Answer:
    """Do what a message asks. Returns the answer to send, if there is one."""
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise StreamvidError("a message must be an object with a type")
    kind = message["type"]
    if kind not in _HANDLERS:
        raise StreamvidError(f"unknown message {kind!r}{nearest(kind, _HANDLERS)}")
    return _HANDLERS[kind](hub, session, message)


def _start(hub: Hub, session: Session, message: dict[str, Any]) -> Answer:
    compare = message.get("compare")
    begin = {}
    if message.get("begin"):
        found = sorted(session.folder.glob("start.*"))
        if not found:
            raise StreamvidError("no picture or clip was uploaded to start from")
        begin["video" if found[0].suffix == ".mp4" else "image"] = str(found[0])
    session.start(
        TabSettings.from_dict(message.get("settings")),
        compare=None if compare is None else TabSettings.from_dict(compare),
        prompts=message.get("prompts") or (),
        **begin,
    )
    return None


def _prompt(hub: Hub, session: Session, message: dict[str, Any]) -> Answer:
    receipt = session.prompt(message.get("prompt"), message.get("transition", "cross"), message.get("frame"))
    return {"type": "receipt", "receipt": receipt}


def _snapshot(hub: Hub, session: Session, message: dict[str, Any]) -> Answer:
    return {"type": "snapshot", **session.snapshot()}


def _cost(hub: Hub, session: Session, message: dict[str, Any]) -> Answer:
    memory, codec = (_spec(message, name) for name in ("memory", "codec"))
    try:
        cost = memory_cost(hub.pipe(session.model), memory, codec)
    except ValueError as error:
        return {"type": "cost", "problem": str(error)}
    return {"type": "cost", **cost}


def _info(hub: Hub, session: Session, message: dict[str, Any]) -> Answer:
    from streamvid.inspect_checkpoint import inspect_checkpoint

    if not hub.choose_models:
        raise StreamvidError("this server shows one model only")
    return {
        "type": "info",
        "model": message["model"],
        "info": inspect_checkpoint(_spec(message, "model")).to_dict(),
    }


def _choose(hub: Hub, session: Session, message: dict[str, Any]) -> Answer:
    session.choose(_spec(message, "model"))
    return hello(hub, session)


def _spec(message: dict[str, Any], name: str) -> str:
    value = message.get(name, "")
    if not isinstance(value, str) or len(value) > MAX_SPEC:
        raise StreamvidError(f"{name} must be a text of at most {MAX_SPEC} characters")
    return value


def _plain(method: Callable[[Session], None]) -> Callable[[Hub, Session, dict[str, Any]], Answer]:
    def call(hub: Hub, session: Session, message: dict[str, Any]) -> Answer:
        method(session)
        return None

    return call


_HANDLERS: dict[str, Callable[[Hub, Session, dict[str, Any]], Answer]] = {
    "start": _start,
    "prompt": _prompt,
    "play": _plain(Session.play),
    "pause": _plain(Session.pause),
    "step": _plain(Session.step),
    "reset": _plain(Session.reset),
    "snapshot": _snapshot,
    "restore": lambda hub, session, message: session.restore(_spec(message, "id")),
    "timeline": lambda hub, session, message: {"type": "timeline", **session.timeline()},
    "cost": _cost,
    "info": _info,
    "choose": _choose,
}
