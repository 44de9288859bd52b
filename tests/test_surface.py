"""The public surface as a user meets it: types that a checker sees, help that says what there is, examples that run."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import streamvid
from streamvid import pipeline
from streamvid.checkpoints import load_components
from streamvid.options import StreamKeywords, StreamOptions

USER = """
import streamvid

pipe = streamvid.load("tiny", dtype="float32", vae="x")
clip = pipe("a", num_frames=3)
reveal_type(pipe)
reveal_type(clip)
reveal_type(pipe("a", return_dict=False))
with pipe.stream("a", num_frames=5, seed=1) as stream:
    reveal_type(stream.set_prompt("b"))
    for chunk in stream.chunks():
        reveal_type(chunk.index)
pipe.stream("a", num_frame=5)
pipe.stream("a", seed="x")
streamvid.load("tiny", dvice="cpu")
"""


def test_keywords_for_type_checkers_are_the_options_there_are() -> None:
    fields = {field.name for field in dataclasses.fields(StreamOptions)} - {"prompt"}
    hints, options = get_type_hints(StreamKeywords), get_type_hints(StreamOptions)
    assert set(hints) == fields and all(hints[name] == options[name] for name in fields)
    parts = set(inspect.signature(load_components).parameters) - {"path_or_name", "device", "dtype"}
    assert set(pipeline.LoadParts.__annotations__) == parts


def test_help_names_every_option_and_setting() -> None:
    text = inspect.getdoc(streamvid.StreamPipeline.stream)
    assert all(f"    {field.name}: " in text for field in dataclasses.fields(StreamOptions))
    text = inspect.getdoc(streamvid.load)
    names = [*inspect.signature(streamvid.load).parameters, *pipeline.LoadParts.__annotations__]
    assert all(f"    {name}: " in text for name in names if name != "parts")
    for thing in (streamvid.load, streamvid.StreamPipeline, streamvid.VideoStream):
        members = [thing, *(m for name, m in vars(thing).items() if inspect.isfunction(m) and name[0] != "_")]
        assert all(inspect.getdoc(member) for member in members), thing


def test_the_example_of_load_runs() -> None:
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    for case in finder.find(streamvid.load, "load", globs={"streamvid": streamvid}):
        assert runner.run(case) == (0, 3)


def test_a_users_types_are_checked(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    words = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--follow-imports=silent", "user.py"]
    # An editable install is found by an import hook, which no type checker runs; an installed copy needs no path.
    place = os.environ | {"MYPYPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(words, cwd=tmp_path, env=place, capture_output=True, text=True, timeout=280)
    said = done.stdout
    for kind in ("StreamPipeline", "StreamOutput", "tuple[Any, ...]", "Receipt", "int"):
        assert f'{kind}"' in said, said
    assert 'Unexpected keyword argument "num_frame"' in said and 'Unexpected keyword argument "dvice"' in said
    assert 'incompatible type "str"' in said, said


def test_the_table_of_promises_names_tests_that_exist() -> None:
    tests = Path(__file__).parent
    tables = [(tests / page).read_text() for page in ("README.md", "memory/README.md")]
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", "".join(tables))
    assert len(named) > 150
    lost = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (tests / file).read_text()]
    assert not lost
