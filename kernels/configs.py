"""Tile sizes of the attention kernel by compute capability, and what each GPU can hold.

No measurement happens inside a stream: these defaults were chosen by compiling ahead of time (see docs/kernels.md);
`streamvid kernels tune` measures candidates on the GPU at hand and keeps the best in the user's cache folder.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

SHARED_LIMIT = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""KiB of shared memory a block may use, by compute capability (10 * major + minor)."""

REGISTERS_LIMIT = 255
SPILL_LIMIT = 64
"""Bytes of registers that one thread may spill to local memory."""


@dataclass(frozen=True)
class Config:
    """How one launch is tiled."""

    block_m: int
    """Queries a program owns."""
    block_n: int
    """Keys a step reads."""
    num_warps: int
    num_stages: int


def shared_limit(capability: int) -> int:
    """Bytes of shared memory per block.

    Raises:
        ValueError: a capability that is not in the table.
    """
    if capability not in SHARED_LIMIT:
        raise ValueError(
            f"no limits known for compute capability {capability} (known: {sorted(SHARED_LIMIT)})"
        )
    return SHARED_LIMIT[capability] * 1024


def key(capability: int, head_dim: int, k_bits: int, v_bits: int, rope: bool) -> str:
    """The name of a configuration on disk: everything that changes what the kernel keeps in registers."""
    return f"cc{capability}-d{head_dim}-k{k_bits}-v{v_bits}{'-rope' if rope else ''}"


def default_config(
    capability: int, head_dim: int, k_bits: int = 0, v_bits: int = 0, rope: bool = False
) -> Config:
    """The configuration chosen by compiling; unknown newer capabilities take the smallest one."""
    packed = bool(k_bits or v_bits or rope)
    if head_dim > 128:
        return Config(64, 32, 8, 2)
    if capability in (90, 100, 103):
        return Config(128, 64, 8, 2 if packed else 3)
    # Unpacking keeps scales and codes in registers beside the accumulators: smaller tiles where that would spill.
    if (rope and (k_bits or v_bits)) or (capability > 80 and 4 in (k_bits, v_bits)):
        return Config(64, 32, 8, 2)
    if packed:
        return Config(64, 64, 8, 2)
    return Config(128, 64, 8, 2)


def cache_path() -> Path:
    """Where `streamvid kernels tune` keeps its result: ``$STREAMVID_CACHE`` or the user's cache folder."""
    root = os.environ.get("STREAMVID_CACHE")
    base = (
        Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "streamvid"
    )
    return base / "kernels.json"


@lru_cache(maxsize=1)
def tuned() -> dict[str, Config]:
    """The tuned configurations of this machine; a damaged or foreign file counts as none."""
    try:
        stored = json.loads(cache_path().read_text())
        return {name: Config(**config) for name, config in stored["configs"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def save_tuned(configs: dict[str, Config], device_name: str) -> Path:
    """Add configurations to the file on disk; replaced as a whole, so that a reader never sees half of it."""
    path = cache_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    merged = {**tuned(), **configs}
    text = json.dumps(
        {"device": device_name, "configs": {name: asdict(c) for name, c in merged.items()}}, indent=1
    )
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text)
    temporary.replace(path)
    tuned.cache_clear()
    return path


def config_for(
    capability: int, head_dim: int, k_bits: int = 0, v_bits: int = 0, rope: bool = False
) -> Config:
    """The tuned configuration if there is one, else the default."""
    found = tuned().get(key(capability, head_dim, k_bits, v_bits, rope))
    return found or default_config(capability, head_dim, k_bits, v_bits, rope)
