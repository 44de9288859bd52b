"""The policy printed in CONTRIBUTING.md is one: it passes the suite that every registered policy passes."""

from __future__ import annotations

import inspect
import sys
import types
from pathlib import Path

import pytest
import test_policies
from policy_runs import cache_of, run

from streamvid.memory.policies import POLICIES

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
CHECKS = [
    function
    for name, function in inspect.getmembers(test_policies, inspect.isfunction)
    if name.startswith("test_") and list(inspect.signature(function).parameters) == ["name"]
]


@pytest.fixture
def dilated(monkeypatch):
    source = PAGE.read_text().split("<!-- example:policy -->\n```python\n")[1].split("\n```")[0]
    assert source.count("\n") < 60
    module = types.ModuleType("dilated")
    monkeypatch.setitem(sys.modules, "dilated", module)
    exec(compile(source, str(PAGE), "exec"), module.__dict__)
    monkeypatch.setitem(POLICIES, "dilated", module.Dilated)


@pytest.mark.parametrize("check", CHECKS, ids=lambda function: function.__name__)
def test_the_example_passes_the_suite(dilated, check):
    check("dilated")


def test_the_example_does_what_it_says(dilated):
    cache = cache_of("dilated")
    run(cache, range(12))
    frames = [entry.frames[0] for entry in cache.banks[0][0].entries]
    assert frames == [12, 15, 18, 21, 24, 27, 30, 31, 32, 33, 34, 35]


def test_there_are_checks_to_run():
    assert len(CHECKS) >= 8
