"""One text form for every plug-in: ``name`` or ``name:key=value,key=value``.

Policies, codecs and step caches are keyword-only dataclasses; their fields are their settings. A name or a key
that does not exist is an error that names the nearest one; a setting is never ignored. Knows nothing of what the
plug-ins do.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def nearest(word: str, allowed: typing.Iterable[str]) -> str:
    """The closest allowed word as ``; did you mean 'x'?``, or an empty string when none is close."""
    match = difflib.get_close_matches(word, list(allowed), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def _convert(kind: str, name: str, key: str, text: str, annotation: Any) -> Any:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(annotation)
        if text.lower() == "none" and type(None) in options:
            return None
        annotation = next(option for option in options if option is not type(None))
        origin = typing.get_origin(annotation)
    try:
        if origin is typing.Literal:
            allowed = typing.get_args(annotation)
            for value in allowed:
                if str(value) == text:
                    return value
            raise ValueError(f"one of {', '.join(map(str, allowed))}{nearest(text, map(str, allowed))}")
        if annotation is bool:
            if text.lower() in ("1", "true", "yes", "on"):
                return True
            if text.lower() in ("0", "false", "no", "off"):
                return False
            raise ValueError("true or false")
        if origin is tuple:
            inner = typing.get_args(annotation)[0]
            return tuple(_convert(kind, name, key, part, inner) for part in text.split("+") if part)
        if annotation in (int, float):
            try:
                return annotation(text)
            except ValueError:
                raise ValueError("a whole number" if annotation is int else "a number") from None
    except ValueError as error:
        raise ValueError(f"{kind} {name!r}: setting {key}={text!r} is not {error}") from None
    return text


def build(spec: str | T, table: Mapping[str, type[T]], kind: str) -> T:
    """Make the plug-in that ``spec`` names.

    Args:
        spec: ``"name"``, ``"name:key=value,key=value"`` (tuples as ``a+b+c``), or a ready object, returned as it is.
        table: name to dataclass.
        kind: the word for messages, for example ``"memory policy"``.

    Raises:
        ValueError: unknown name, unknown key, a value of the wrong type, or one that the dataclass refuses.
    """
    if not isinstance(spec, str):
        if isinstance(spec, type) or not dataclasses.is_dataclass(spec):
            raise ValueError(
                f"{kind} must be a text (name or name:key=value) or an object of one, got {spec!r}"
            )
        return spec
    name, _, rest = spec.partition(":")
    if name not in table:
        raise ValueError(
            f"unknown {kind} {name!r}{nearest(name, table)} (allowed: {', '.join(sorted(table))})"
        )
    cls = table[name]
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    settings: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in rest.split(","))):
        key, equals, text = part.partition("=")
        if not equals:
            raise ValueError(f"{kind} {name!r}: {part!r} is not key=value")
        if key not in fields:
            raise ValueError(
                f"{kind} {name!r} has no setting {key!r}{nearest(key, fields)} "
                f"(allowed: {', '.join(sorted(fields)) or 'none'})"
            )
        if key in settings:
            raise ValueError(f"{kind} {name!r}: setting {key!r} is given twice")
        settings[key] = _convert(kind, name, key, text, hints[key])
    return cls(**settings)


def effective(plugin: Any) -> dict[str, Any]:
    """The settings a plug-in really runs with, for printing at start and for keeping with results."""
    return {f.name: getattr(plugin, f.name) for f in dataclasses.fields(plugin) if f.init}
