"""A study read, run, interrupted, resumed: every cell once, no failure fatal."""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from streamvid.errors import StreamvidError
from streamvid.eval.compare import run_study, summary
from streamvid.eval.grid import PRESETS, Variant, load_study, parse_study, preset, quick
from streamvid.eval.store import Store
from streamvid.eval.video import read_video

RENDERER = "fake_renderer:FakeRenderer"
BASE = {
    "prompts": ["one", "three"],
    "seeds": [0, 1],
    "num_frames": 9,
    "segment_frames": 4,
    "metrics": ["fidelity"],
}
CODECS = BASE | {"grid": {"codec": ["none", "int8", "int2"]}, "reference": {"codec": "none"}}


@pytest.fixture
def calls(monkeypatch, tmp_path):
    path = tmp_path / "calls.txt"
    path.touch()
    monkeypatch.setenv("STREAMVID_TEST_CALLS", str(path))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return lambda: path.read_text().splitlines()


def run(values, folder, **options):
    return run_study(parse_study(values), folder, renderer=RENDERER, **options)


# --- reading ---


@pytest.mark.parametrize(
    "change, message",
    [
        ({"sedes": [1]}, "unknown key 'sedes'; did you mean 'seeds'"),
        ({"grid": {"codecs": ["none"]}}, r"\[grid\]: unknown key 'codecs'; did you mean 'codec'"),
        ({"variant": [{"lable": "x"}]}, r"\[\[variant\]\]: unknown key 'lable'; did you mean 'label'"),
        ({"reference": {"memroy": "full"}}, "did you mean 'memory'"),
        ({"metrics": ["fidelty"]}, "did you mean 'fidelity'"),
        ({"orderings": ["bit"]}, "did you mean 'bits'"),
        ({"seeds": ["0"]}, "seeds must be int"),
        ({"num_frames": True}, "num_frames must be int"),
        ({"num_frames": 0}, "at least 1"),
        ({"seeds": []}, "no seeds"),
        ({"prompts": []}, "no prompts"),
        ({"grid": {"codec": []}}, "no variants"),
        ({"grid": {"steps": "many"}}, "steps must be"),
        ({"prompts_file": "nowhere.txt"}, "does not exist"),
    ],
)
def test_mistakes_in_a_study_are_named(change, message):
    with pytest.raises(StreamvidError, match=message):
        parse_study(BASE | change)


def test_a_file_that_is_not_toml_or_not_there_is_named(tmp_path):
    path = tmp_path / "x.toml"
    with pytest.raises(StreamvidError, match="cannot be read"):
        load_study(path)
    path.write_text("a = [")
    with pytest.raises(StreamvidError, match="is not TOML"):
        load_study(path)


def test_the_grid_is_a_product_and_variants_come_on_top(tmp_path):
    (tmp_path / "p.txt").write_text("first\n\nsecond\n")
    study = parse_study(
        {
            "prompts_file": "p.txt",
            "grid": {"model": "m", "memory": ["a", "b"], "codec": ["none", "int4"], "steps": 2},
            "variant": [{"memory": "c"}, {"memory": "a", "codec": "int4", "label": "mine"}],
        },
        folder=tmp_path,
    )
    assert study.prompts == ("first", "second")
    assert [(v.memory, v.codec) for v in study.variants] == [
        ("a", "none"),
        ("a", "int4"),
        ("b", "none"),
        ("b", "int4"),
        ("c", "default"),
    ]
    assert {v.steps for v in study.variants} == {"2"} and study.variants[1].label == "mine"


def test_cells_share_prompt_and_seed_and_begin_with_their_reference():
    cells = parse_study(BASE | {"grid": {"codec": ["int4", "int8"]}, "reference": {"codec": "none"}}).cells()
    assert len(cells) == 2 * 2 * 3
    assert [c.variant.codec for c in cells[:3]] == ["none", "int4", "int8"]
    assert {(c.prompt, c.seed) for c in cells[:3]} == {("one", 0)}


def test_a_key_names_every_setting_and_nothing_else():
    study = parse_study(CODECS)
    cell = study.cells()[0]
    variant = dataclasses.replace(cell.variant, label="another name")
    assert study.key(dataclasses.replace(cell, variant=variant)) == study.key(cell)
    others = [
        dataclasses.replace(cell, **change) for change in ({"seed": 9}, {"prompt": "x"}, {"height": 64})
    ]
    others += [
        dataclasses.replace(cell, variant=dataclasses.replace(cell.variant, **{axis: "7"}))
        for axis in cell.variant.settings()
    ]
    studies = [
        dataclasses.replace(study, **c) for c in ({"segment_frames": 9}, {"reference": {"codec": "y"}})
    ]
    keys = [study.key(cell), *map(study.key, others), *(s.key(cell) for s in studies)]
    assert len(set(keys)) == len(keys)


def test_presets_load_and_a_wrong_name_is_named():
    names = [path.stem for path in PRESETS.glob("*.toml")]
    assert set(names) >= {"policies", "codecs", "stepcaches", "paper-kv-study", "paper-forcingkv"}
    for name in names:
        study = load_study(preset(name))
        assert study.variants and len(study.prompts) >= 2 and study.title
        small = quick(study)
        assert len(small.cells()) <= 16 and small.num_frames <= 33
    with pytest.raises(StreamvidError, match="did you mean 'codecs'"):
        preset("codec")


def test_presets_name_every_method_there_is():
    from streamvid.memory.codecs import CODECS
    from streamvid.memory.policies import POLICIES
    from streamvid.stepcache import STEP_CACHES
    from streamvid.tiny.captions import parse

    def named(preset_name, axis):
        study = load_study(preset(preset_name))
        assert len(study.prompts) == len({parse(prompt) for prompt in study.prompts})
        texts = [part for v in study.variants for part in getattr(v, axis).split(" + ")]
        return {text.partition(":")[0] for text in texts}

    assert named("policies", "memory") == set(POLICIES)
    assert named("codecs", "codec") == set(CODECS) - {
        "offload"
    }  # no codec of its own: it moves another's frames
    caches = named("stepcaches", "step_cache") | named("stepcaches-many", "step_cache")
    assert caches == set(STEP_CACHES)


# --- running ---


def test_rows_hold_everything_and_codecs_order_by_bits(tmp_path, calls):
    rows = run(CODECS, tmp_path / "r")
    assert len(rows) == 12 and summary(rows) == {"rows": 12, "done": 12, "failed": 0}
    row = rows[1]
    assert set(row["versions"]) >= {"python", "torch", "numpy"} and row["machine"]["cpus"] >= 1
    assert row["variant"]["codec"] == "int8" and row["settings"]["memory"] == {"name": "default"}
    assert len(row["curves"]["psnr"]) == len(row["curve_seconds"]) == 2
    by_codec = {
        codec: np.mean([r["metrics"]["psnr"] for r in rows if r["variant"]["codec"] == codec])
        for codec in ("int8", "int2")
    }
    assert by_codec["int8"] > by_codec["int2"] + 15
    references = [r for r in rows if r["is_reference"]]
    assert len(references) == 4 and all("psnr" not in r["metrics"] for r in references)
    assert [r["label"] for r in rows[:3]] == ["none", "int8", "int2"]


def test_the_kept_clip_is_lossless(tmp_path, calls):
    from fake_renderer import FakeRenderer

    study = parse_study(CODECS)
    rows = run_study(study, tmp_path / "r", renderer=RENDERER)
    cell = study.cells()[2]
    frames, fps = read_video(Store(tmp_path / "r").clip_path(rows[2]["key"]))
    assert fps == 16 and np.array_equal(frames, FakeRenderer()(cell).frames)


def test_a_second_run_makes_nothing_and_a_larger_study_only_what_is_new(tmp_path, calls):
    first = run(CODECS, tmp_path / "r")
    assert len(calls()) == 12
    again = run(CODECS, tmp_path / "r")
    assert again == first and len(calls()) == 12
    run(CODECS | {"seeds": [0, 1, 2]}, tmp_path / "r")
    assert len(calls()) == 18 and len(set(calls())) == 18


@pytest.mark.parametrize("memory", ["broken"])
def test_a_failing_cell_is_a_row_and_not_the_end(tmp_path, calls, memory):
    values = BASE | {"grid": {"memory": ["full", memory, "slow"]}, "reference": {"memory": "full"}}
    seen = []
    rows = run(values, tmp_path / "r", watch=seen.append)
    assert summary(rows) == {"rows": 12, "done": 8, "failed": 4}
    failed = next(r for r in rows if r["status"] == "failed")
    assert failed["error"] == "RuntimeError: CUDA out of memory (not really)"
    assert "fake_renderer.py" in failed["traceback"] and failed["variant"]["memory"] == memory
    assert (seen[0].total, seen[0].done, seen[-1].done, seen[-1].failed) == (12, 0, 12, 4)
    assert len(run(values, tmp_path / "r")) == 12 and len(calls()) == 12
    run(values, tmp_path / "r", retry_failed=True)
    assert len(calls()) == 16


def test_a_failed_reference_leaves_a_warning_and_no_fidelity(tmp_path, calls):
    rows = run(BASE | {"grid": {"memory": ["full"]}, "reference": {"memory": "broken"}}, tmp_path / "r")
    made = [r for r in rows if r["status"] == "done"]
    assert len(made) == 4 and all("reference failed" in r["warning"] for r in made)
    assert all("psnr" not in r["metrics"] and "chunk_ms" in r["metrics"] for r in made)


def test_an_interrupt_loses_nothing_and_repeats_nothing(tmp_path, calls):
    values = BASE | {"grid": {"memory": ["full", "interrupt"]}}
    with pytest.raises(KeyboardInterrupt):
        run(values, tmp_path / "r")
    assert len(Store(tmp_path / "r").rows()) == 1
    store = Store(tmp_path / "r")
    with store.path.open("ab") as file:
        file.write(b'{"key": "half a li')  # and the machine went down in the middle of a write
    rows = run(BASE | {"grid": {"memory": ["full"]}}, tmp_path / "r")
    assert len(rows) == 4 and len(calls()) == 5
    assert sorted(calls()).count("full/default/one/0") == 1


KILLED = """
import sys, json
from pathlib import Path
from streamvid.eval.compare import run_study
from streamvid.eval.grid import parse_study

if __name__ == "__main__":  # processes of the pool import this file again
    values = json.loads(sys.argv[1])
    run_study(parse_study(values), Path(sys.argv[2]), workers=int(sys.argv[3]), renderer="fake_renderer:FakeRenderer")
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_kill_loses_nothing_and_repeats_nothing_that_was_done(tmp_path, calls, workers):
    values = BASE | {
        "prompts": ["one", "three", "fifth"],
        "grid": {"memory": ["slow"], "codec": ["none", "int8"]},
    }
    script, folder = tmp_path / "killed.py", tmp_path / "r"
    script.write_text(KILLED)
    words = [sys.executable, str(script), json.dumps(values), str(folder), str(workers)]
    process = subprocess.Popen(words)
    rows_file = folder / "rows.jsonl"
    until = time.monotonic() + 120
    while not rows_file.exists() or rows_file.read_bytes().count(b"\n") < 3:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    process.kill()
    process.wait()
    before = Store(folder).rows()
    assert 3 <= len(before) < 12
    (folder / "clips" / "0123456789abcdef.999999999.part").write_bytes(b"half a clip")
    rows = run(values, folder)
    assert summary(rows) == {"rows": 12, "done": 12, "failed": 0}
    assert Store(folder).rows()[: len(before)] == before
    assert (
        12 <= len(calls()) <= 12 + workers
    )  # what was under way when the kill came is made again, nothing else
    assert not (folder / "clips" / "0123456789abcdef.999999999.part").exists()
    made = {row["key"] for row in before}
    assert {row["when"] for row in rows if row["key"] in made} == {row["when"] for row in before}


def test_a_lost_clip_is_made_again(tmp_path, calls):
    rows = run(CODECS, tmp_path / "r")
    Store(tmp_path / "r").clip_path(rows[0]["key"]).unlink()
    assert run(CODECS, tmp_path / "r")[0]["status"] == "done"
    assert len(calls()) == 13


def test_processes_give_the_rows_of_one_process_and_survive_a_kill(tmp_path, calls):
    small = CODECS | {"prompts": ["one"], "seeds": [0]}
    values = small | {"variant": [{"memory": "killed"}], "reference": {"codec": "none", "memory": "default"}}
    rows = run(values, tmp_path / "two", workers=2)
    alone = run(small | {"reference": {"codec": "none", "memory": "default"}}, tmp_path / "one")
    made = {r["key"]: r["metrics"] for r in rows if r["status"] == "done"}
    assert {r["key"]: r["metrics"] for r in alone}.items() <= made.items()
    dead = [r for r in rows if r["status"] == "failed"]
    assert len(dead) == 1 and all("died (exit code 9)" in r["error"] for r in dead)
    assert all(r["workers"] == 2 for r in rows if r["status"] == "done")


def test_workers_must_be_there(tmp_path):
    with pytest.raises(StreamvidError, match="at least 1"):
        run(CODECS, tmp_path, workers=0)


def test_rows_are_plain_json(tmp_path, calls):
    run(CODECS | {"seeds": [0], "prompts": ["one"]}, tmp_path / "r")
    for line in (tmp_path / "r" / "rows.jsonl").read_text().splitlines():
        assert json.loads(line)["key"]


def test_a_variant_describes_itself_without_what_all_share():
    variant = Variant(memory="window:sink=1", codec="int4")
    assert variant.describe(hide=("model",)) == "window:sink=1 · int4"
    assert Variant().describe(hide=("model",)) == "default"
    assert dataclasses.replace(variant, label="mine").describe() == "mine"
