"""A state tree as one safetensors file with a checksum, and back, bit for bit.

A tree is nested dicts and lists of tensors, numbers, strings, booleans and None. Tensors become safetensors entries;
the rest, with the shape of the tree, is JSON in the file's metadata. Knows nothing of what the tree means.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from streamvid.errors import StreamvidError

FORMAT = "streamvid-snapshot-1"
_TENSOR = "__tensor__"
_TUPLE = "__tuple__"
_ITEMS = "__items__"


def save_tree(path: str | os.PathLike[str], tree: Any) -> int:
    """Write ``tree`` to ``path`` whole or not at all. Returns the bytes of the file."""
    from safetensors.torch import save

    path = Path(path)
    tensors: dict[str, torch.Tensor] = {}
    skeleton = json.dumps(_flatten(tree, "", tensors), separators=(",", ":"))
    metadata = {"format": FORMAT, "tree": skeleton, "sha256": _digest(skeleton, tensors)}
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(save(tensors, metadata))
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # where the folder itself is at fault, so is the clean-up
            part.unlink(missing_ok=True)
        raise StreamvidError(
            f"{path}: the snapshot cannot be written ({error.strerror}); nothing was left"
        ) from None
    return path.stat().st_size


def load_tree(path: str | os.PathLike[str]) -> Any:
    """Read what ``save_tree`` wrote. Raises StreamvidError on anything else, and when the checksum differs."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise StreamvidError(f"{path}: no such snapshot")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    except (SafetensorError, OSError) as error:
        raise StreamvidError(f"{path}: damaged, or not a snapshot ({error})") from None
    if metadata.get("format") != FORMAT:
        raise StreamvidError(f"{path}: is a safetensors file, but not a snapshot of a stream")
    if metadata.get("sha256") != _digest(metadata["tree"], tensors):
        raise StreamvidError(f"{path}: the checksum does not fit, the snapshot is damaged; take a new one")
    return _unflatten(json.loads(metadata["tree"]), tensors)


def _flatten(node: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(node, torch.Tensor):
        key = name or "value"
        # A copy: safetensors refuses tensors that share storage.
        tensors[key] = node.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {_TENSOR: key}
    if isinstance(node, dict):
        items = [[_key(key, name), _flatten(value, f"{name}/{key}", tensors)] for key, value in node.items()]
        return {_ITEMS: items}
    if isinstance(node, list | tuple):
        values = [_flatten(value, f"{name}/{index}", tensors) for index, value in enumerate(node)]
        return {_TUPLE: values} if isinstance(node, tuple) else values
    if node is None or isinstance(node, bool | int | float | str):
        return node
    raise TypeError(f"a snapshot cannot hold {type(node).__name__} at {name or 'its root'}")


def _key(key: Any, name: str) -> Any:
    if not isinstance(key, str | int):
        raise TypeError(f"a snapshot cannot hold the key {key!r} at {name}")
    return key


def _unflatten(node: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(node, list):
        return [_unflatten(value, tensors) for value in node]
    if isinstance(node, dict):
        if _TENSOR in node:
            return tensors[node[_TENSOR]]
        if _TUPLE in node:
            return tuple(_unflatten(value, tensors) for value in node[_TUPLE])
        return {key: _unflatten(value, tensors) for key, value in node[_ITEMS]}
    return node


def _digest(skeleton: str, tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(skeleton.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()
