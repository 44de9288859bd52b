"""Text files that are whole or not there. Knows nothing of what is written."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: str | Path, text: str) -> None:
    """Write a file under a temporary name beside it and rename it; an error (a full disk) leaves nothing.

    Raises OSError.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
