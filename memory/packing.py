"""Packed entries of a bank after a commit: tiers that follow age, and codecs that pack several frames as one block."""

from __future__ import annotations

import torch

from streamvid.memory.bank import Bank, Entry
from streamvid.memory.codecs import recode as recode_block
from streamvid.memory.codecs.none import NoCodec


def recode(bank: Bank) -> None:
    """Give every packed entry the form its codec wants at its present region and age; join whole spans."""
    if bank.codec.span_frames > 1:
        _join_spans(bank)
    for entry in bank.entries:
        if entry.packed is not None and entry.codec is bank.codec:
            entry.packed = recode_block(bank.codec, entry.packed, region=entry.region, age=bank.age(entry))


def _join_spans(bank: Bank) -> None:
    """Encode runs of as many neighbouring frames as the codec wants, of one region, as one entry."""
    waiting: list[Entry] = []
    for entry in list(bank.entries):
        plain = entry.positions is None and entry.rope and entry.count is None
        fits = plain and entry.codec is not bank.codec
        if not fits or (waiting and entry.region != waiting[0].region):
            waiting = []
        if not fits:
            continue
        waiting.append(entry)
        if len(waiting) == bank.codec.span_frames:
            _join(bank, waiting)
            waiting = []


def _join(bank: Bank, entries: list[Entry]) -> None:
    pairs = [bank.read(entry) for entry in entries]
    first = entries[0]
    joined = Entry(
        first.region,
        tuple(frame for entry in entries for frame in entry.frames),
        tuple(t for entry in entries for t in entry.t),
        sum(entry.length for entry in entries),
        codec=bank.codec,
    )
    k, v = (torch.cat(parts, dim=1) for parts in zip(*pairs, strict=True))
    joined.packed = bank.codec.encode(k, v, region=first.region, age=bank.age(entries[-1]))
    at = bank.entries.index(first)
    bank.drop(entries)
    bank.entries.insert(at, joined)


def split_spans(bank: Bank, frame: int) -> None:
    """Undo entries of several frames that begin before ``frame`` and end at it or later: one entry a frame."""
    size = bank.tokens_per_frame
    for entry in list(bank.entries):
        whole = entry.positions is None and entry.length == len(entry.frames) * size
        if not whole or len(entry.frames) < 2 or not entry.frames[0] < frame <= entry.frames[-1]:
            continue
        k, v = bank.read(entry)
        at = bank.entries.index(entry)
        parts = []
        for i, (source, t) in enumerate(zip(entry.frames, entry.t, strict=True)):
            rows = slice(i * size, (i + 1) * size)
            parts.append(Entry(entry.region, (source,), (t,), size, codec=NoCodec()))
            parts[-1].packed = NoCodec().encode(k[:, rows], v[:, rows])
        bank.drop([entry])
        bank.entries[at:at] = parts
