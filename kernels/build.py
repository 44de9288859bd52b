"""Ahead-of-time compilation of the Triton kernels for GPUs that are not there, and what the binaries use.

Triton compiles for a target without the device and bundles the assembler and the object dump. A variant fails when it
needs more shared memory than the capability has, spills more than `SPILL_LIMIT` bytes a thread, or contains no matrix
instruction. Says nothing about speed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .configs import SPILL_LIMIT, Config, default_config, shared_limit

CAPABILITIES = (80, 86, 89, 90, 100, 120)
MATRIX_INSTRUCTION = {
    80: "mma.sync",
    86: "mma.sync",
    89: "mma.sync",
    90: "wgmma",
    100: "tcgen05.mma",
    120: "mma.sync",
}
_POINTERS = {"k_scale": "*fp16", "k_zero": "*fp16", "v_scale": "*fp16", "v_zero": "*fp16", "cos": "*fp32",
             "sin": "*fp32", "bias": "*fp32", "block_bias": "*fp32", "heads": "*i32", "indices": "*i32",
             "counts": "*i32", "q_table": "*i32", "k_table": "*i32", "lse": "*fp32"}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One compilation of the attention kernel."""

    capability: int
    dtype: str
    """``bf16``, ``fp16`` or ``fp32``."""
    bits: int = 0
    """0 = plain keys and values, else 8 or 4."""
    head_dim: int = 128
    group: int = 64
    symmetric: bool = False
    rope: bool = False
    blocks: bool = True
    """Block lists and tables; they bring head tables and a key bias along, the most registers a call can need."""
    carry: bool = False
    config: Config | None = None

    @property
    def tiles(self) -> Config:
        if self.config is not None:
            return self.config
        return default_config(self.capability, self.head_dim, self.bits, self.bits, self.rope)

    @property
    def name(self) -> str:
        t = self.tiles
        parts = [
            f"sm_{self.capability}",
            self.dtype,
            f"int{self.bits}" if self.bits else "plain",
            f"d{self.head_dim}",
        ]
        parts += [
            word for word, on in (("rope", self.rope), ("blocks", self.blocks), ("carry", self.carry)) if on
        ]
        return " ".join([*parts, f"{t.block_m}x{t.block_n}", f"{t.num_warps}w", f"{t.num_stages}s"])


@dataclass(frozen=True)
class Built:
    """What a compiled variant uses."""

    variant: Variant
    shared: int
    """Bytes of shared memory a block."""
    registers: int
    """A thread."""
    spill: int
    """Bytes of local memory a thread (stack and spills together)."""
    seconds: float
    problems: tuple[str, ...]
    """Limits that are broken; empty = usable."""

    def row(self) -> dict[str, Any]:
        """Flat, for JSON and tables."""
        v, t = self.variant, self.variant.tiles
        return {
            "capability": v.capability, "dtype": v.dtype, "bits": v.bits, "head_dim": v.head_dim, "rope": v.rope,
            "blocks": v.blocks, "carry": v.carry, "tiles": f"{t.block_m}x{t.block_n}", "warps": t.num_warps,
            "stages": t.num_stages, "shared": self.shared, "registers": self.registers, "spill": self.spill,
            "problems": list(self.problems),
        }  # fmt: skip


def representative() -> Iterator[Variant]:
    """The subset for every change: what most calls on most GPUs compile to. About half a minute."""
    for capability in (80, 89, 90):
        for dtype in ("bf16", "fp16"):
            for bits in (0, 4):
                yield Variant(capability, dtype, bits)


def everything() -> Iterator[Variant]:
    """All capabilities, dtypes, packings, head sizes and features with their default tiles."""
    for capability in CAPABILITIES:
        for dtype in ("bf16", "fp16"):
            for bits in (0, 8, 4):
                for rope in (False, True):
                    yield Variant(capability, dtype, bits, rope=rope)
                yield Variant(capability, dtype, bits, head_dim=64)
            yield Variant(capability, dtype, 0, blocks=False)
            yield Variant(capability, dtype, 4, group=32)
            yield Variant(capability, dtype, 4, symmetric=True, carry=True)
            yield Variant(capability, dtype, 0, carry=True)


def require_compiler() -> None:
    """Raise ValueError where nothing can be compiled."""
    from .backends import has_module

    if not has_module("triton"):
        raise ValueError("kernels cannot be compiled: Triton is not installed; run pip install triton")
    from .triton_launch import INTERPRETED

    if INTERPRETED:
        raise ValueError("kernels cannot be compiled while TRITON_INTERPRET is set; unset it and run again")


def _source(variant: Variant) -> Any:
    from triton.compiler import ASTSource

    from .triton_attention import attention_kernel

    constants = {
        "D": variant.head_dim, "BM": variant.tiles.block_m, "BN": variant.tiles.block_n,
        "K_BITS": variant.bits, "K_GROUP": variant.group, "K_SYMMETRIC": variant.symmetric,
        "V_BITS": variant.bits, "V_GROUP": variant.group, "V_SYMMETRIC": variant.symmetric,
        "ROPE": variant.rope, "BIAS": variant.blocks, "BLOCK_BIAS": False, "HEADS": variant.blocks,
        "BLOCKS": variant.blocks, "Q_TABLE": variant.blocks, "K_TABLE": variant.blocks, "CARRY": variant.carry,
        "WIDE": False, "PRECISION": "ieee" if variant.dtype == "fp32" else "tf32",
    }  # fmt: skip
    plain = f"*{variant.dtype}"
    stored = "*u8" if variant.bits else plain
    pointers = _POINTERS | {"q": plain, "k": stored, "v": stored, "out": "*fp32" if variant.carry else plain}
    signature, values, attributes = {}, {}, {}
    aligned = [["tt.divisibility", 16]]
    for i, name in enumerate(attention_kernel.arg_names):
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
        elif name in pointers:
            signature[name], attributes[(i,)] = pointers[name], aligned
        elif name == "scale_log2":
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if name[:2] in ("q_", "k_", "v_", "o_") and name[2:] in ("sb", "sn", "sh"):
                attributes[(i,)] = aligned
    return ASTSource(fn=attention_kernel, signature=signature, constexprs=values, attrs=attributes)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of local memory, of the one kernel in a binary."""
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        dump = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", dump.stdout + dump.stderr)
    if found is None:
        raise RuntimeError(f"cuobjdump gave no resource usage: {dump.stdout[:200]}{dump.stderr[:200]}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def build(variant: Variant) -> Built:
    """Compile one variant and read what it uses from the binary.

    Raises:
        ValueError: Triton is missing or interpreting.
        Exception: whatever the compiler raises; a kernel that does not compile is our mistake.
    """
    require_compiler()
    import triton
    from triton.backends.compiler import GPUTarget

    tiles = variant.tiles
    started = time.perf_counter()
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(
        _source(variant), target=GPUTarget("cuda", variant.capability, 32), options=options
    )
    registers, spill = _usage(compiled.asm["cubin"])
    shared = compiled.metadata.shared
    problems = []
    if shared > shared_limit(variant.capability):
        problems.append(f"{shared} bytes of shared memory, {shared_limit(variant.capability)} allowed")
    if spill > SPILL_LIMIT:
        problems.append(f"{spill} bytes spilled a thread, {SPILL_LIMIT} allowed")
    instruction = MATRIX_INSTRUCTION[variant.capability]
    if variant.dtype != "fp32" and instruction not in compiled.asm["ptx"]:
        problems.append(f"no {instruction} in the binary")
    return Built(variant, shared, registers, spill, time.perf_counter() - started, tuple(problems))


def candidates(capability: int, head_dim: int) -> Iterator[Config]:
    """Tile sizes worth measuring on a GPU of this capability; `build` says which of them fit."""
    for block_m, block_n in ((128, 64), (64, 64), (128, 128), (128, 32), (64, 32)):
        for warps in (4, 8):
            for stages in (2, 3):
                if head_dim <= 128 or block_m * block_n <= 64 * 32:
                    yield Config(block_m, block_n, warps, stages)


def markdown(built: list[Built]) -> str:
    """The table of docs/kernels.md."""
    lines = [
        "| sm | dtype | keys | head_dim | features | tiles | warps | stages | shared KiB (limit) "
        "| registers | spill B |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for item in built:
        v, t = item.variant, item.variant.tiles
        features = ", ".join(
            word for word, on in (("blocks", v.blocks), ("rope", v.rope), ("carry", v.carry),
                                  ("symmetric", v.symmetric), (f"group {v.group}", bool(v.bits) and v.group != 64))
            if on
        )  # fmt: skip
        lines.append(
            f"| {v.capability} | {v.dtype} | {f'int{v.bits}' if v.bits else 'plain'} | {v.head_dim} | {features} | "
            f"{t.block_m}x{t.block_n} | {t.num_warps} | {t.num_stages} | {item.shared / 1024:.0f} "
            f"({shared_limit(v.capability) // 1024}) | {item.registers} | {item.spill} |"
        )
    return "\n".join(lines) + "\n"


def as_json(built: list[Built]) -> list[dict[str, Any]]:
    """Rows for a file."""
    return [item.row() for item in built]
