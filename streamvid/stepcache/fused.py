"""Fused context pass: a chunk's context pass runs in one forward with the next chunk's first step (exact).

The keys and values of a chunk do not depend on the chunk after it, so a forward over both with a
block-causal mask gives what two forwards give. It saves no arithmetic; it takes the context pass out of a
chunk's latency and launches half as many kernels for it. The stream does the work; this session only asks
for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from streamvid.stepcache.base import Session, StepCache


class _Session(Session):
    static = True
    fuses_context = True


@dataclass(kw_only=True)
class FusedContext(StepCache):
    """Ask the stream to fuse each context pass with the next chunk's first step."""

    name: ClassVar[str] = "fused"
    neutral: ClassVar[str] = "fused"
    session_type = _Session
