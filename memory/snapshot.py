"""A cache as a flat dictionary of tensors, and back: bit-exact, slots included, ready for safetensors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from streamvid.memory.bank import Bank, Entry
from streamvid.memory.codecs import PackedKV
from streamvid.memory.codecs.base import Places
from streamvid.memory.codecs.none import NoCodec
from streamvid.memory.packing import recode
from streamvid.memory.spec import effective

if TYPE_CHECKING:
    from streamvid.memory.history import History


def _kind(cache: History) -> dict[str, Any]:
    """What must be equal for a snapshot to fit."""
    g = cache.geometry
    settings = {key: str(value) for key, value in effective(cache.policy).items()}
    codec = None
    if cache.codec is not None:
        codec = [type(cache.codec).__name__, {k: str(v) for k, v in effective(cache.codec).items()}]
    return {
        "geometry": [g.layers, g.heads, g.head_dim, list(g.grid), g.batch, str(g.dtype)],
        "policy": [type(cache.policy).__name__, settings],
        "codec": codec,
        "chunk_frames": cache.chunk_frames,
        "retain": cache.retain,
    }


def dump(cache: History) -> dict[str, Tensor]:
    """See `KVCache.state_dict`."""
    tensors: dict[str, Tensor] = {}
    if isinstance(cache.codec, Places):
        cache.codec.settle()
    banks = [_dump_bank(bank, tensors) for bank in cache.all_banks()]
    meta = {
        "kind": _kind(cache),
        "next_frame": cache.next_frame,
        "num_chunks": cache.num_chunks,
        "newest": cache.newest,
        "banks": banks,
    }
    tensors["meta"] = torch.frombuffer(bytearray(json.dumps(meta).encode()), dtype=torch.uint8)
    return tensors


def _name(bank: Bank) -> str:
    return f"layer{bank.layer}.group{bank.group}"


def _rows(bank: Bank, slots: list[int], x: Tensor) -> Tensor:
    """The slots of a storage tensor, ``[b, slots, tokens, heads, d]`` view."""
    g = bank.geometry
    return x.view(g.batch, bank.slots, bank.tokens_per_frame, bank.num_heads, g.head_dim)[:, slots]


def _dump_bank(bank: Bank, tensors: dict[str, Tensor]) -> dict[str, Any]:
    name = _name(bank)
    used = sorted(slot for entry in bank.entries for slot in entry.slots)
    if used:
        tensors[f"{name}.k"] = _rows(bank, used, bank.k).contiguous()
        tensors[f"{name}.v"] = _rows(bank, used, bank.v).contiguous()
    for key, value in bank.state.items():
        tensors[f"{name}.state.{key}"] = value.clone()
    entries = []
    for i, entry in enumerate(bank.entries):
        at = f"{name}.entry{i}"
        record = {
            "region": entry.region,
            "frames": entry.frames,
            "t": entry.t,
            "length": entry.length,
            "slots": entry.slots,
            "rope": entry.rope,
            "tags": entry.tags,
            "packed": None,
        }
        for key in ("positions", "count"):
            if getattr(entry, key) is not None:
                tensors[f"{at}.{key}"] = getattr(entry, key).clone()
        if entry.packed is not None:
            record["packed"] = entry.packed.meta()
            record["waiting"] = entry.codec is not bank.codec
            for key, value in entry.packed.tensors().items():
                tensors[f"{at}.packed.{key}"] = value.clone()
        entries.append(record)
    return {"entries": entries, "used": used, "slots": used[-1] + 1 if used else 0, "base": bank.base}


def restore(cache: History, state: dict[str, Tensor]) -> None:
    """See `KVCache.load_state_dict`."""
    if "meta" not in state:
        raise ValueError("not a cache snapshot: it holds no 'meta'")
    meta = json.loads(bytes(state["meta"].cpu().numpy()).decode())
    here = json.loads(json.dumps(_kind(cache)))
    different = [key for key in here if here[key] != meta["kind"].get(key)]
    if different:
        key = different[0]
        raise ValueError(
            f"the snapshot is of another cache: {key} is {meta['kind'].get(key)}, here it is {here[key]}"
        )
    cache.reset()
    for bank, record in zip(cache.all_banks(), meta["banks"], strict=True):
        _restore_bank(bank, record, state)
    cache.next_frame, cache.num_chunks, cache.newest = (
        meta[key] for key in ("next_frame", "num_chunks", "newest")
    )


def _restore_bank(bank: Bank, record: dict[str, Any], state: dict[str, Tensor]) -> None:
    name, device = _name(bank), bank.k.device
    if bank.slots < record["slots"]:
        bank.resize(record["slots"])
    used = record["used"]
    bank.free = [slot for slot in range(bank.slots) if slot not in set(used)]
    if used:
        _fill(bank, used, bank.k, state[f"{name}.k"])
        _fill(bank, used, bank.v, state[f"{name}.v"])
    bank.base = record["base"]
    prefix = f"{name}.state."
    bank.state = {k.removeprefix(prefix): v.to(device) for k, v in state.items() if k.startswith(prefix)}
    bank.entries = [_entry(bank, f"{name}.entry{i}", r, state) for i, r in enumerate(record["entries"])]
    if isinstance(bank.codec, Places):
        recode(bank)  # back to where each block lay


def _fill(bank: Bank, slots: list[int], x: Tensor, values: Tensor) -> None:
    _rows_view = x.view(x.shape[0], bank.slots, bank.tokens_per_frame, *x.shape[2:])
    _rows_view[:, slots] = values.to(x.device)


def _entry(bank: Bank, at: str, record: dict[str, Any], state: dict[str, Tensor]) -> Entry:
    entry = Entry(
        record["region"],
        tuple(record["frames"]),
        tuple(record["t"]),
        record["length"],
        slots=tuple(record["slots"]),
        rope=record["rope"],
        tags=record["tags"],
    )
    for key in ("positions", "count"):
        if f"{at}.{key}" in state:
            setattr(entry, key, state[f"{at}.{key}"].to(bank.k.device))
    if record["packed"] is not None:
        prefix = f"{at}.packed."
        parts = {
            k.removeprefix(prefix): v.to(bank.k.device) for k, v in state.items() if k.startswith(prefix)
        }
        entry.packed = PackedKV.restore(record["packed"], parts)
        entry.codec = NoCodec() if record["waiting"] else bank.codec
    return entry
