"""Check folders of recorded cases against this installation, through the public loading path.

A case is a folder with ``config.json`` and ``case.safetensors`` (inputs and recorded tensors), and the weights it was
recorded with as ``weights.safetensors`` or ``weights.pt``. What kind of case it is follows from what it holds, never
from its name. Nothing depends on sizes, seeds or schedules of a given case.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamvid.checkpoint_formats import read_weights
from streamvid.errors import CheckpointError, StreamvidError
from streamvid.verify_vae import VERIFIERS, Deviation


@dataclass
class CaseResult:
    """The outcome of one case."""

    folder: Path
    kind: str
    deviations: list[Deviation] = field(default_factory=list)
    problem: str | None = None
    """Why the case could not be checked, or None."""

    @property
    def ok(self) -> bool:
        """All recorded tensors were reproduced, and there was at least one."""
        return self.problem is None and bool(self.deviations) and all(d.ok for d in self.deviations)


def find_cases(path: Path) -> list[Path]:
    """The case folders at ``path``: itself, or its sub-folders in order of their names.

    Raises:
        StreamvidError: there are none.
    """
    if (path / "case.safetensors").is_file():
        return [path]
    found = sorted(p.parent for p in path.glob("*/case.safetensors")) if path.is_dir() else []
    if not found:
        raise StreamvidError(
            f"{path}: no case here; expected case.safetensors and config.json in it or in its sub-folders"
        )
    return found


def verify(path: Path) -> Iterator[CaseResult]:
    """Check every case under ``path``, one at a time. Raises StreamvidError when there is none."""
    for folder in find_cases(path):
        yield verify_case(folder)


def verify_case(folder: Path) -> CaseResult:
    """Check one case; a case that cannot be run is a result with a problem, not an exception."""
    kind = "unreadable"
    try:
        config = json.loads((folder / "config.json").read_text())
        names = read_weights(folder / "case.safetensors").tensors.keys()
        kind, check = _kind(config, set(names))
        return CaseResult(folder, kind, check(folder))
    except OSError as error:
        problem = f"{folder}: config.json cannot be read ({error.strerror})"
    except (StreamvidError, ValueError) as error:
        problem = str(error)
    except KeyError as error:
        problem = f"{folder}: {error} is missing from config.json or case.safetensors"
    return CaseResult(folder, kind, problem=problem)


def _kind(config: dict[str, Any], names: set[str]) -> tuple[str, Callable[[Path], list[Deviation]]]:
    from streamvid.verify_rollout import verify_rollout
    from streamvid.verify_units import verify_schedule, verify_units

    if "decoded" in names:
        return "wan_vae", VERIFIERS["wan_vae"]
    if "decoded_raw" in names:
        return "taehv", VERIFIERS["taehv"]
    if "chunks" in config and "noise" in names:
        return "rollout", verify_rollout
    if any(name.endswith("/sigmas") for name in names):
        return "scheduler", verify_schedule
    if any(name.startswith(("rope", "rms/", "sinusoid")) for name in names):
        return "units", verify_units
    raise CheckpointError("not a kind of case that is known: a rollout, scheduler, units, wan_vae or taehv")
