"""Recorded rollouts of Deep Forcing and Forcing-KV: the policy a case asks for, and what its cache must hold.

Everything here turns the contents of a cache into the names and layouts of the recorded tensors; the comparison is
``verify_rollout``'s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamvid.kernels.rope import GridRope, rope_table, rotate
from streamvid.memory.bank import Bank, Entry
from streamvid.memory.cache import KVCache
from streamvid.memory.heads import HeadProfile
from streamvid.memory.policies.deep_forcing import BASE, DeepForcing
from streamvid.memory.policies.forcing_kv import DYNAMIC, STATIC, ForcingKV
from streamvid.memory.tokens import raster


def deep_forcing_of(config: dict[str, Any]) -> DeepForcing:
    """The policy of a ``deepforcing`` case."""
    given = config["deepforcing"]
    return DeepForcing(
        size=config["model"]["local_attn_size"],
        sink=config["model"]["sink_size"],
        budget=given["budget_frames"],
        recent=given["recent_frames"],
        reuse=given["topc_max_reuse"],
        compress=given["participative_compression"],
    )


def deep_forcing_choice(cache: KVCache, name: str) -> dict[str, Tensor]:
    """Scores and selected tokens of a chunk that compresses; call it before the context pass."""
    out: dict[str, Tensor] = {}
    for row in cache.banks:
        bank = row[0]
        if "chosen" not in bank.notes:
            continue
        first = sum(entry.length for entry in bank.entries if entry.region == "sink")
        total = sum(entry.length for entry in bank.entries) + bank.tokens_per_frame * len(bank.current)
        scores = bank.notes["scores"]
        wide = torch.full((scores.shape[0], total), -torch.inf)
        wide[:, first : first + scores.shape[1]] = scores
        chosen = bank.notes["chosen"][0] + first
        kept = torch.cat([torch.arange(first), chosen, torch.arange(first + scores.shape[1], total)])
        at = f"{name}/layer{bank.layer}"
        out |= {f"{at}/pc_scores": wide, f"{at}/pc_selected": chosen.int(), f"{at}/pc_keep": kept.int()}
    return out


def deep_forcing_contents(cache: KVCache, rope: GridRope, name: str, frames: int) -> dict[str, Tensor]:
    """The chunk's own keys and values, the whole window, and the frame each of its tokens came from."""
    out = {}
    for row in cache.banks:
        bank = row[0]
        at = f"{name}/layer{bank.layer}"
        new = bank.entries[-frames:]
        out[f"{at}/k_new"] = torch.cat([_turned(bank, e, rope) for e in new], dim=1)
        out[f"{at}/v_new"] = torch.cat([bank.read(e)[1] for e in new], dim=1)
        out[f"{at}/k_cache"] = torch.cat([_turned(bank, e, rope) for e in bank.entries], dim=1)
        out[f"{at}/v_cache"] = torch.cat([bank.read(e)[1] for e in bank.entries], dim=1)
        times = [_times(bank, e) for e in bank.entries]
        out[f"{at}/abs_frame_idx"] = torch.cat(times, dim=1)
    return out


def _times(bank: Bank, entry: Entry) -> Tensor:
    if entry.positions is not None:
        return (entry.positions[:, :, 0, 0] + entry.t[0]).round().int()
    moved = tuple(t + entry.tags.get(BASE, 0) for t in entry.t)
    return raster(moved, bank.geometry.grid, bank.k.device)[None, :, 0].int()


def _turned(bank: Bank, entry: Entry, rope: GridRope) -> Tensor:
    """Keys as the reference stores them: turned to their absolute positions, a moved sink to where it stands now."""
    k = bank.read(entry)[0]
    if entry.positions is not None:
        placed = entry.positions.double() + torch.tensor([entry.t[0], 0.0, 0.0], dtype=torch.float64)
        return rotate(k, rope_table(placed, k.shape[-1], torch.complex128))
    return rotate(k, rope.table(tuple(t + entry.tags.get(BASE, 0) for t in entry.t)))


def forcing_kv_of(config: dict[str, Any]) -> ForcingKV:
    """The policy of a ``forcingkv`` case."""
    given, model = config["forcingkv"], config["model"]
    labels = [
        [STATIC if head in groups[0] else DYNAMIC for head in range(model["num_heads"])]
        for groups in config["head_groups"]
    ]
    profile = HeadProfile(
        fingerprint=None,
        layers=model["num_layers"],
        heads=model["num_heads"],
        labels={"forcing_kv": labels},
    )
    return ForcingKV.of(
        profile,
        sink=model["sink_size"],
        spatial=given["spatial_context_length"],
        temporal=given["temporal_context_length"],
        patches=given["num_frame_patch"] if given["dynamic_temporal_enabled"] else 0,
        keep=given["sim_retention_ratio"],
        start=given["ar_start"],
    )


def forcing_kv_contents(
    cache: KVCache, rope: GridRope, name: str, chunk: dict[str, Any], case: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Sink, newest and dynamic parts of every layer, as named in the recording.

    The recording is of raw buffers: rings are put into the order of their write pointer, and buffers that the
    reference no longer reads after the groups have parted are returned as they are.
    """
    out: dict[str, Tensor] = {}
    for layer, row in enumerate(cache.banks):
        at = f"{name}/layer{layer}/cache"
        notes = chunk["cache"].get(f"layer{layer}", {})
        parted = bool(notes.get("headgroup_last") or notes.get("headgroup_mid"))
        for part in "kv":
            if parted:
                for bank in row:
                    out |= _group_parts(bank, rope, at, part, notes)
                for stale in (f"{at}/sink_{part}", f"{at}/local_{part}"):
                    if stale in case:
                        out[stale] = case[stale]
            else:
                out[f"{at}/sink_{part}"] = _whole(row, rope, "sink", part, cache)
                out[f"{at}/local_{part}"] = _whole(row, rope, "recent", part, cache)
            for key in [k for k in case if k.startswith(at) and k.endswith(f"_{part}") and k not in out]:
                if not case[key].any():  # allocated and never written
                    out[key] = case[key]
    scores = cache_scores(cache)
    if scores is not None:
        out[f"{name}/dynamic_patch_scores"] = scores
    return out


def cache_scores(cache: KVCache) -> Tensor | None:
    """Mean similarity of each run of the last update, ``[frames, runs]``, of the first item."""
    scores = getattr(cache.policy, "last_scores", None)
    return None if scores is None else scores[0]


def _group_parts(bank: Bank, rope: GridRope, at: str, part: str, notes: dict[str, Any]) -> dict[str, Tensor]:
    static = bank.heads is not None and list(bank.heads) == notes.get("headgroup_last")
    kind = "spatial" if static else "temporal"
    out = {f"{at}/group_sink_{kind}_{part}": _region(bank, rope, "sink", part)}
    ring = _region(bank, rope, "recent", part)
    turn = notes.get(f"group_{kind}_write_ptr", 0)
    out[f"{at}/group_{kind}_{part}"] = torch.roll(ring, turn, dims=1)
    if not static and any(entry.region == "memory" for entry in bank.entries):
        out[f"{at}/group_dynamic_temporal_{part}"] = _region(bank, rope, "memory", part)
    return out


def _region(bank: Bank, rope: GridRope, region: str, part: str) -> Tensor:
    parts = [
        _turned(bank, entry, rope) if part == "k" else bank.read(entry)[1]
        for entry in bank.entries
        if entry.region == region
    ]
    if not parts:
        return bank.k[:, :0]
    return torch.cat(parts, dim=1)


def _whole(row: list[Bank], rope: GridRope, region: str, part: str, cache: KVCache) -> Tensor:
    """A region of all heads, put together from the groups."""
    pieces = [_region(bank, rope, region, part) for bank in row]
    whole = torch.empty(
        *pieces[0].shape[:2], cache.geometry.heads, cache.geometry.head_dim, dtype=pieces[0].dtype
    )
    for bank, piece in zip(row, pieces, strict=True):
        index = list(bank.heads) if bank.heads is not None else list(range(cache.geometry.heads))
        whole[:, :, index] = piece
    return whole
