"""Rows on disk: one JSON object a line, appended and flushed one by one, so that an interrupt loses nothing."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from streamvid.errors import StreamvidError


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: numpy and tensors to numbers, NaN and infinity to None, the rest to text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)


class Store:
    """A folder with `rows.jsonl` and `clips/`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clips = folder / "clips"
        self.path = folder / "rows.jsonl"
        if folder.exists() and not folder.is_dir():
            raise StreamvidError(f"{folder} is a file; give a folder for the results")
        self.clips.mkdir(parents=True, exist_ok=True)

    def rows(self) -> list[dict[str, Any]]:
        """All rows; of several with one key the last. A last line that was cut off by a kill is removed."""
        if not self.path.exists():
            return []
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with self.path.open("r+b") as file:
                file.truncate(whole)
        found: dict[str, dict[str, Any]] = {}
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                row = json.loads(line)
                found.pop(row["key"], None)
                found[row["key"]] = row
            except (ValueError, KeyError, TypeError):
                raise StreamvidError(
                    f"{self.path}: line {number} is damaged; remove that line, its clip will be made again"
                ) from None
        return list(found.values())

    def append(self, row: dict[str, Any]) -> None:
        """Add a row and wait until it is on the disk."""
        line = json.dumps(plain(row), ensure_ascii=False, allow_nan=False)
        with self.path.open("ab") as file:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def tidy(self) -> None:
        """Remove half-written clips of processes that are no more."""
        from psutil import pid_exists

        for part in self.clips.glob("*.part"):
            pid = part.stem.rpartition(".")[2]
            if not (pid.isdecimal() and pid_exists(int(pid))):
                part.unlink(missing_ok=True)

    def clip_path(self, key: str) -> Path:
        """Where the lossless clip of a key is kept."""
        return self.clips / f"{key}.mkv"
