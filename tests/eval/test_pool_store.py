"""Processes that die, tasks that wait, rows that survive a kill."""

import json
import os

import numpy as np
import pytest

from streamvid.errors import StreamvidError
from streamvid.eval.pool import run_tasks
from streamvid.eval.store import Store, plain


def make_worker(offset):
    def work(x):
        if x == "die":
            os._exit(9)
        if x == "fail":
            raise ValueError("no such\nthing")
        return x + offset

    return work


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failing_task_is_reported_and_the_rest_go_on(workers):
    tasks = [("a", (1,)), ("b", ("fail",)), ("c", (3,)), ("d", (4,))]
    outcome = {
        name: (ok, result) for name, ok, result in run_tasks(tasks, make_worker, (10,), workers=workers)
    }
    assert {n: r for n, (ok, r) in outcome.items() if ok} == {"a": 11, "c": 13, "d": 14}
    assert outcome["b"][1].startswith("ValueError: no such thing\n")


def test_a_killed_process_fails_its_task_only():
    tasks = [("a", ("die",)), ("b", (1,)), ("c", ("die",)), ("d", (2,))]
    outcome = {name: (ok, result) for name, ok, result in run_tasks(tasks, make_worker, (0,), workers=2)}
    assert outcome["b"] == (True, 1) and outcome["d"] == (True, 2)
    assert outcome["a"] == (False, "the worker process died (exit code 9)")
    assert not outcome["c"][0]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_task_starts_after_the_one_it_waits_for(workers):
    tasks = [("late", (1,)), ("first", ("fail",)), ("other", (2,))]
    order = [n for n, *_ in run_tasks(tasks, make_worker, (0,), workers=workers, after={"late": "first"})]
    assert sorted(order) == ["first", "late", "other"]
    assert order.index("first") < order.index("late")
    alone = list(run_tasks(tasks[:1], make_worker, (0,), workers=workers, after={"late": "first"}))
    assert alone == [("late", True, 1)]


def test_rows_come_back_and_the_last_of_a_key_counts(tmp_path):
    store = Store(tmp_path / "r")
    assert store.rows() == []
    store.append({"key": "a", "n": np.float32(1.5), "bad": float("nan")})
    store.append({"key": "b"})
    store.append({"key": "a", "n": 2})
    assert store.rows() == [{"key": "b"}, {"key": "a", "n": 2}]


def test_a_line_cut_by_a_kill_is_dropped_and_the_next_row_is_whole(tmp_path):
    store = Store(tmp_path)
    store.append({"key": "a"})
    with store.path.open("ab") as file:
        file.write(b'{"key": "b", "val')
    assert store.rows() == [{"key": "a"}]
    store.append({"key": "c"})
    assert [json.loads(line)["key"] for line in store.path.read_text().splitlines()] == ["a", "c"]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    store = Store(tmp_path)
    store.append({"key": "a"})
    with store.path.open("ab") as file:
        file.write(b"{oops\n")
    store.append({"key": "c"})
    with pytest.raises(StreamvidError, match="line 2 is damaged"):
        store.rows()


def test_results_need_a_folder(tmp_path):
    (tmp_path / "x").touch()
    with pytest.raises(StreamvidError, match="is a file"):
        Store(tmp_path / "x")


def test_plain_makes_json_of_anything():
    value = {"a": np.arange(2), "b": (np.float64("inf"), np.int64(3)), 1: {"path": object}}
    assert plain(value) == {"a": [0, 1], "b": [None, 3], "1": {"path": str(object)}}
