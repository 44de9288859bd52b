"""Sessions as flat tensors, so that a stream with a step cache can be snapshot with safetensors.

A session's attributes may hold numbers, text, None, lists, tuples, dicts, tensors and the state dataclasses
named with :func:`state_type`. Nothing is pickled.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_TYPES: dict[str, type] = {}


def state_type(cls: type[T]) -> type[T]:
    """Class decorator: a dataclass that may be part of a session's state."""
    _TYPES[cls.__name__] = cls
    return cls


def pack(state: Any) -> dict[str, Tensor]:
    """Tensors by number, and the structure as UTF-8 JSON in ``structure`` (uint8)."""
    tensors: dict[str, Tensor] = {}

    def encode(value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return {"f": value.hex()}
        if isinstance(value, Tensor):
            name = str(len(tensors))
            tensors[name] = value.detach().clone().contiguous()
            return {"t": name}
        if isinstance(value, (list, tuple)):
            return {"l" if isinstance(value, list) else "u": [encode(v) for v in value]}
        if isinstance(value, dict):
            return {"d": [[encode(k), encode(v)] for k, v in value.items()]}
        if type(value).__name__ in _TYPES:
            fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return {"c": type(value).__name__, "v": fields}
        raise TypeError(f"{type(value).__name__} cannot be part of a step cache's state")

    text = json.dumps(encode(state)).encode()
    return {**tensors, "structure": torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def unpack(packed: dict[str, Tensor]) -> Any:
    """The inverse of :func:`pack`."""

    def decode(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "f" in value:
            return float.fromhex(value["f"])
        if "t" in value:
            return packed[value["t"]].clone()
        if "l" in value:
            return [decode(v) for v in value["l"]]
        if "u" in value:
            return tuple(decode(v) for v in value["u"])
        if "d" in value:
            return {decode(k): decode(v) for k, v in value["d"]}
        return _TYPES[value["c"]](**{k: decode(v) for k, v in value["v"].items()})

    return decode(json.loads(bytes(packed["structure"].cpu().numpy().tobytes()).decode()))


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors inside a state."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(tensor_bytes(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return sum(tensor_bytes(v) for v in value)
    if dataclasses.is_dataclass(value) and type(value).__name__ in _TYPES:
        return sum(tensor_bytes(getattr(value, f.name)) for f in dataclasses.fields(value))
    return 0
