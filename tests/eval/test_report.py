"""The page: self-contained, safe, right in its figures, and alive in a browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from streamvid.errors import StreamvidError
from streamvid.eval.aggregate import curves, interval, pareto, table
from streamvid.eval.compare import run_study
from streamvid.eval.grid import parse_study
from streamvid.eval.importing import Source, import_folder, prompt_and_seed
from streamvid.eval.orderings import check_orderings, paired_interval
from streamvid.eval.report import build_report, write_report
from streamvid.eval.store import Store
from streamvid.eval.video import read_video, small_mp4, write_lossless

STUDY = {
    "title": "A <b>study</b> & more",
    "notes": "</script><script>document.title='hacked'</script>",
    "prompts": ["one </script><img src=x onerror=alert(1)>", "three"],
    "seeds": [0, 1],
    "num_frames": 33,
    "segment_frames": 12,
    "metrics": ["fidelity", "quality"],
    "orderings": ["bits", "sink"],
    "grid": {"codec": ["none", "int8", "int4", "int2"]},
    "variant": [{"memory": "broken", "codec": "none", "label": "a broken one"}],
    "reference": {"codec": "none", "memory": "default"},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    import sys

    sys.path.insert(0, str(Path(__file__).parent))
    folder = tmp_path_factory.mktemp("study")
    study = parse_study(STUDY)
    try:
        rows = run_study(study, folder, renderer="fake_renderer:FakeRenderer")
    finally:
        sys.path.remove(str(Path(__file__).parent))
    return study, rows, folder


@pytest.fixture(scope="module")
def page(made):
    study, rows, folder = made
    return build_report(study, rows, folder, clips=1)


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])


def test_the_page_needs_nothing_from_outside(page):
    without_data = page.replace(re.search(r'id="data">(.*?)</script>', page, re.S)[1], "")
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", without_data)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest", without_data)
    assert "@@" not in without_data


def test_text_from_outside_cannot_become_markup(page):
    assert "A &lt;b&gt;study&lt;/b&gt; &amp; more" in page
    assert page.count("</script>") == 2 and "<img src=x" not in page
    assert data_of(page)["notes"] == STUDY["notes"]


def test_the_page_says_what_failed_and_what_was_checked(page):
    data = data_of(page)
    assert len(data["failures"]) == 4 and "CUDA out of memory" in data["failures"][0]["error"]
    assert "4 failed" in [text for text, _ in data["chips"]]
    verdicts = {(o["ordering"], o["clause"]): o["verdict"] for o in data["orderings"]}
    assert verdicts == {
        ("bits", "psnr: int2 < int4"): "too few pairs",
        ("bits", "psnr: int4 < int8"): "too few pairs",
        ("sink", "judge_last: window:size=..sink=0 < window:size=..sink=[1-9]"): "not tested",
    }
    assert [v["label"] for v in data["variants"]] == ["none", "int8", "int4", "int2", "a broken one"]
    card = dict(data["card"])
    assert "codec = none" in card["Reference"] and "12 frames" in card["Segments"]


def test_clips_of_one_prompt_stand_together_and_play(page, tmp_path):
    import base64

    data = data_of(page)
    assert len(data["clips"]) == 1
    items = data["clips"][0]["items"]
    assert [data["variants"][item["variant"]]["label"] for item in items] == ["none", "int8", "int4", "int2"]
    path = tmp_path / "x.mp4"
    path.write_bytes(base64.b64decode(items[0]["mp4"]))
    frames, fps = read_video(path)
    assert len(frames) == 33 and fps == 16 and frames.shape[1:] == (240, 240, 3)


def test_a_report_of_nothing_is_refused(made, tmp_path):
    with pytest.raises(StreamvidError, match="no rows"):
        build_report(made[0], [], tmp_path)


def test_the_file_is_whole_or_not_there(made):
    study, rows, folder = made
    path = write_report(study, rows, folder, clips=0)
    assert path.name == "report.html" and data_of(path.read_text())["clips"] == []
    assert not list(folder.glob("*.tmp"))


# --- figures ---


def test_intervals_are_students():
    stat = interval([1.0, 2.0, 3.0])
    assert stat["mean"] == 2 and stat["hi"] - 2 == pytest.approx(4.3027 / np.sqrt(3), rel=1e-4)
    assert interval([5.0, 7.0]) == {"mean": 6.0, "lo": None, "hi": None, "n": 2}


def test_the_table_pairs_with_the_reference_and_counts_failures(made):
    entries = {entry["label"]: entry for entry in table(made[1])}
    assert entries["none"]["is_reference"] and entries["none"]["paired"] == {}
    assert entries["a broken one"]["failed"] == 4 and entries["a broken one"]["metrics"] == {}
    paired = entries["int2"]["paired"]["noise"]
    made_rows = [r for r in made[1] if r["status"] == "done"]
    by = {(r["prompt"], r["seed"], r["variant"]["codec"]): r["metrics"]["noise"] for r in made_rows}
    expected = [by[p, s, "int2"] - by[p, s, "none"] for p, s, c in by if c == "none"]
    assert paired["mean"] == pytest.approx(np.mean(expected)) and paired["n"] == 4


def test_curves_have_bands_over_clips(made):
    curve = curves(made[1])["psnr"][0]
    assert len(curve["x"]) == len(curve["mean"]) == len(curve["lo"]) == 3
    assert all(lo <= mean <= hi for lo, mean, hi in zip(curve["lo"], curve["mean"], curve["hi"], strict=True))


def test_pareto_front():
    points = [(1, 1), (2, 3), (3, 2), (4, 4), (4, 4)]
    assert pareto(points, ("lower", "higher")) == [0, 1, 3, 4]


def rows_of(values, metric="psnr"):
    return [
        {
            "status": "done",
            "variant": {"model": "m", "codec": codec},
            "prompt": "p",
            "seed": i,
            "metrics": {metric: v},
        }
        for codec, column in values.items()
        for i, v in enumerate(column)
    ]


@pytest.mark.parametrize(
    "low, high, verdict",
    [
        ([10, 11, 30] * 2, [12, 13, 33] * 2, "agrees"),
        ([12, 13, 33] * 2, [10, 11, 30] * 2, "contradicts"),
        ([10, 20, 30] * 2, [11, 19, 30] * 2, "not distinguishable"),
        ([10, 11, 30], [12, 13, 33], "too few pairs"),
        ([], [12], "not tested"),
    ],
)
def test_an_ordering_agrees_only_when_the_interval_excludes_zero(low, high, verdict):
    result = check_orderings(rows_of({"int2": low, "int4:group=32": high}), ["bits"])[0]
    assert result.verdict == verdict


def test_windows_are_compared_with_the_same_window():
    judge = {"size=12,sink=0": 0.5, "size=12,sink=3": 0.6, "size=18,sink=0": 0.8, "size=18,sink=3": 0.9}
    judge |= {"size=12,sink=3,positions=slot": 0.1}  # has no partner without a sink
    rows = [
        row | {"variant": {"model": "m", "memory": f"window:{size}"}}
        for size, value in judge.items()
        for row in rows_of({"none": [value] * 4}, "judge_last")
    ]
    result = check_orderings(rows, ["sink"])[0]
    assert result.pairs == 8 and result.verdict == "agrees" and result.difference == pytest.approx(0.1)


@pytest.mark.parametrize(
    "shift, verdict", [(0.01, "agrees"), (0.5, "contradicts"), (0.05, "not distinguishable")]
)
def test_equal_within_a_margin(shift, verdict):
    rng = np.random.default_rng(0)
    base = rng.uniform(0.5, 1, 20)
    noise = rng.normal(0, 0.02, 20)
    rows = rows_of({"int4": base + shift + noise}, "judge")
    for row, value in zip(rows_of({"none": base}, "judge"), base, strict=True):
        row["variant"]["memory"] = "soft_prune"
        row["metrics"] = {"judge": float(value)}
        rows.append(row)
    assert check_orderings(rows, ["soft_prune"])[1].verdict == verdict


def test_bootstrap_interval_covers_the_mean():
    low, high = paired_interval([1.0, 2.0, 3.0, 4.0])
    assert low < 2.5 < high and paired_interval([2.0]) == (2.0, 2.0)


# --- import ---


def clip(seed, n=17):
    return np.random.default_rng(seed).integers(0, 255, (n, 48, 48, 3), np.uint8)


def test_prompt_and_seed_are_read_from_side_cars_lists_and_names(tmp_path):
    long = "A corgi runs along the beach, " * 6
    (tmp_path / "a.json").write_text('{"prompt": "from json", "seed": 7}')
    (tmp_path / "b-3.txt").write_text("from text\n")
    read = lambda name, **more: prompt_and_seed(
        tmp_path / name, more.get("at", 0), [long.strip()], more.get("listed", [])
    )
    assert read("a.mp4") == ("from json", 7)
    assert read("b-3.mp4") == ("from text", 3)
    assert read("c_seed42.mp4", at=1, listed=["x", "y"]) == ("y", 42)
    assert read(f"{long[:100]}-0.mp4") == (long.strip(), 0)
    assert read("other clip.mp4") == ("other clip", 0)
    (tmp_path / "d.json").write_text("[]")
    with pytest.raises(StreamvidError, match="JSON object with a prompt"):
        read("d.mp4")


def test_imported_clips_are_measured_once_and_join_the_report(made, tmp_path):
    study, rows, _ = made
    videos = tmp_path / "theirs"
    videos.mkdir()
    for seed in (0, 1):
        (videos / f"three-{seed}.mp4").write_bytes(small_mp4(clip(seed), 8.0))
    store = Store(tmp_path / "r")
    found = import_folder(study, Source.parse(f"Theirs={videos}"), tmp_path / "r")
    assert [(r["prompt"], r["seed"], r["num_frames"]) for r in found] == [("three", 0, 17), ("three", 1, 17)]
    assert all("psnr" not in r["metrics"] and "sharpness" in r["metrics"] for r in found)
    before = store.path.read_text()
    assert import_folder(study, Source.parse(f"Theirs={videos}"), tmp_path / "r") == found
    assert store.path.read_text() == before
    data = data_of(build_report(study, rows + found, tmp_path / "r", clips=0))
    assert [v["label"] for v in data["variants"] if v["imported"]] == ["Theirs"]


@pytest.mark.parametrize("text", ["folder", "=x", "label="])
def test_an_import_must_name_label_and_folder(text):
    with pytest.raises(StreamvidError, match="LABEL=FOLDER"):
        Source.parse(text)


def test_a_folder_without_videos_is_named(tmp_path):
    with pytest.raises(StreamvidError, match="has no videos"):
        Source.parse(f"x={tmp_path}")


# --- the command ---


def test_the_command_runs_resumes_and_reports(tiny_random_folder, tmp_path, capsys):
    from streamvid.cli import main

    config = tmp_path / "study.toml"
    config.write_text(
        f'prompts = ["a red ball"]\nnum_frames = 9\nsegment_frames = 4\nmetrics = ["fidelity"]\n'
        f'[reference]\ncodec = "none"\n[grid]\nmodel = "{tiny_random_folder}"\ncodec = ["none", "int8"]\n'
    )
    videos = tmp_path / "theirs"
    videos.mkdir()
    write_lossless(videos / "a-red-ball-0.mkv", clip(0, 9), 8.0)
    words = ["compare", str(config), "-o", str(tmp_path / "out"), "--import", f"Theirs={videos}", "--json"]
    assert main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert [v["label"] for v in result["variants"]] == ["none", "int8", "Theirs"]
    assert Path(result["report"]).is_file()
    rows = (tmp_path / "out" / "rows.jsonl").read_text()
    assert main(words[:-1]) == 0 and (tmp_path / "out" / "rows.jsonl").read_text() == rows
    assert "report:" in capsys.readouterr().out
    page = tmp_path / "page.md"
    assert main([*words[:-1], "--prompts", "1", "--docs", str(page)]) == 0
    assert (tmp_path / "out" / "rows.jsonl").read_text() == rows
    assert (
        "streamvid compare study.toml --prompts 1 --import Theirs=FOLDER --docs page.md" in page.read_text()
    )
    assert (tmp_path / "images" / "study.png").is_file()
    capsys.readouterr()
    assert main([*words[:-1], "--docs", str(tmp_path / "no" / "page.md")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["compare"]) == 2 and "--preset" in capsys.readouterr().err
    config.write_text('promts = ["x"]')
    assert main(words) == 2 and "did you mean 'prompts'" in capsys.readouterr().err


# --- the browser ---


@pytest.mark.browser
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_the_page_is_alive_in_a_browser(made, tmp_path):
    study, rows, folder = made
    path = write_report(study, rows, folder, clips=1)
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-sync --no-first-run"
    )
    result = subprocess.run(
        [
            *("chromium", *flags.split(), "--disable-component-update", "--virtual-time-budget=4000"),
            *(f"--user-data-dir={tmp_path}", "--dump-dom", path.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    dom = result.stdout
    assert "hacked" not in re.search(r"<title>(.*?)</title>", dom)[1]
    body = dom[: dom.index('id="data"')]
    assert body.count("<tr") >= 6 and body.count("<video") == 4
    assert len(re.findall(r"<svg", body)) >= 3 + 4  # two trade-offs, a drift plot, memory of four variants
    assert 'aria-label="PSNR against stored KV"' in body
