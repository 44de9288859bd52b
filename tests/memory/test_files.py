"""A text file is whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamvid.memory.files import write_whole


def test_an_error_leaves_what_was_there(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.json"
    write_whole(path, "old")

    def full(self: Path, *args: object, **options: object) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    write_whole(path, "new")
    assert path.read_text() == "new"
