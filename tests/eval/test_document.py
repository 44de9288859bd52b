"""Sections of Markdown pages, pictures, and the longer second run."""

import dataclasses

import numpy as np
import pytest
from PIL import Image

from streamvid.errors import StreamvidError
from streamvid.eval.document import figure, ordered, size_text, write_document, write_section
from streamvid.eval.finals import final_study, ranked
from streamvid.eval.grid import Cell, Variant, parse_study
from streamvid.eval.models import files_mark, load_pipe, parse_model
from streamvid.eval.picture import Panel, Point, draw, ticks

STUDY = parse_study(
    {
        "title": "Policies",
        "prompts": ["a", "b", "c"],
        "num_frames": 96,
        "segment_frames": 48,
        "orderings": ["sink"],
        "ranked": True,
        "reference": {"memory": "default"},
        "final": {"best": 2, "num_frames": 200, "prompts": 2},
        "grid": {
            "memory": ["default", "window:size=6,sink=0", "window:size=6,sink=3", "full"],
            "codec": "none",
        },
    }
)
JUDGE = {"default": 0.7, "window:size=6,sink=0": 0.5, "window:size=6,sink=3": 0.9, "full": 0.9}
BYTES = {"default": 4e6, "window:size=6,sink=0": 2e6, "window:size=6,sink=3": 2.5e6, "full": 4e7}


def rows_of(study, failing=()):
    rows = []
    for number, prompt in enumerate(study.prompts):
        for variant in study.variants:
            judge = JUDGE[variant.memory] + 0.01 * number
            row = {
                "key": f"{variant.memory}/{prompt}",
                "status": "failed" if variant.memory in failing else "done",
                "variant": variant.settings(),
                "label": variant.memory,
                "listed": True,
                "prompt": prompt,
                "seed": 0,
                "num_frames": study.num_frames,
                "when": "2026-01-02T03:04:05Z",
                "machine": {"cpu": "a CPU", "cpus": 2, "threads": 1},
                "settings": {"fingerprint": "abcd"},
                "workers": 2,
                "metrics": {
                    "judge": judge,
                    "judge_last": judge,
                    "judge_right": 0.0,
                    "psnr": 100 * judge,
                    "kv_bytes": BYTES[variant.memory],
                    "kv_peak_bytes": 1.2 * BYTES[variant.memory],
                    "nominal_over_peak": 1 / 1.2,
                    "chunk_ms": 50.0,
                },
                "curves": {"judge": [judge, judge]},
                "curve_seconds": [1.5, 4.5],
            }
            rows.append(row)
    return rows


# --- the final ---


def test_equal_scores_are_ranked_by_bytes_and_failed_variants_left_out():
    names = [settings["memory"] for settings in ranked(rows_of(STUDY))]
    assert names == ["window:size=6,sink=3", "full", "default", "window:size=6,sink=0"]
    names = [settings["memory"] for settings in ranked(rows_of(STUDY, failing=("full",)))]
    assert names == ["window:size=6,sink=3", "default", "window:size=6,sink=0"]


def test_the_final_takes_the_best_and_the_reference_and_its_cells_are_others():
    final = final_study(STUDY, rows_of(STUDY))
    assert [v.memory for v in final.variants] == ["window:size=6,sink=3", "full", "default"]
    assert (final.num_frames, final.prompts, final.final) == (200, ("a", "b"), None)
    first, second = ({s.key(c) for c in s.cells()} for s in (STUDY, final))
    assert not first & second
    assert final_study(dataclasses.replace(STUDY, final=None), rows_of(STUDY)) is None
    assert final_study(STUDY, rows_of(STUDY, failing=tuple(JUDGE))) is None


@pytest.mark.parametrize(
    "values, message", [({"bst": 3}, "did you mean 'best'"), ({"best": 0}, "best must be at least 1")]
)
def test_mistakes_in_a_final_are_named(values, message):
    with pytest.raises(StreamvidError, match=message):
        parse_study({"prompts": ["a"], "grid": {"codec": "none"}, "final": values})


# --- the page ---


def test_a_section_is_replaced_and_the_rest_of_the_page_stays(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Mine\n\nbefore\n\n<!-- compare:x -->\nold\n<!-- /compare:x -->\n\nafter\n")
    write_section(page, "x", "new")
    write_section(page, "y", "other")
    write_section(page, "x", "newer")
    assert page.read_text() == (
        "# Mine\n\nbefore\n\n<!-- compare:x -->\nnewer\n<!-- /compare:x -->\n\nafter\n\n"
        "<!-- compare:y -->\nother\n<!-- /compare:y -->\n"
    )
    assert not list(tmp_path.glob("*.tmp"))


def test_half_a_section_and_a_missing_folder_are_named(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- compare:x -->\nno end\n")
    with pytest.raises(StreamvidError, match="but not the other"):
        write_section(page, "x", "new")
    with pytest.raises(StreamvidError, match="does not exist"):
        write_section(tmp_path / "no" / "page.md", "x", "new")


def test_the_page_has_the_command_the_tables_the_picture_and_the_verdicts(tmp_path):
    final = final_study(STUDY, rows_of(STUDY))
    parts = [(STUDY, rows_of(STUDY)), (final, rows_of(final))]
    picture = write_document(tmp_path / "p.md", "policies", "streamvid compare --preset policies", parts)
    text = (tmp_path / "p.md").read_text()
    assert "```bash\nstreamvid compare --preset policies\n```" in text and "weights abcd; a CPU" in text
    assert "| 1 | window:size=6,sink=3 | 0.910 ±0.02 | .91 .91 | 0.00 | 91.0 | 2.5 MB | 3 MB | 50 |" in text
    assert "Policies: the best 2 on 200 frames" in text and text.count("| # | Variant |") == 2
    assert "(images/policies.png)" in text and "too few pairs |" in text
    assert "cheapest of them by peak of keys and values: window:size=6,sink=3, 3 MB." in text
    assert Image.open(picture).size[0] == 2160 and picture.stat().st_size < 200_000


def test_a_cache_that_fewer_steps_beat_is_marked(tmp_path):
    study = parse_study(
        {
            "prompts": ["a"],
            "reference": {"step_cache": "none", "steps": "default"},
            "variant": [
                {"step_cache": "none"},
                {"step_cache": "none", "steps": 2},
                {"step_cache": "mask"},
                {"step_cache": "exit"},
            ],
        }
    )
    figures = [(1.0, None), (0.5, 30.0), (0.51, 29.0), (0.49, 40.0)]
    rows = [
        rows_of(STUDY)[0]
        | {"variant": v.settings(), "label": v.describe(hide=("model",)), "key": str(i)}
        | {"metrics": {"compute_fraction": work} | ({} if psnr is None else {"psnr": psnr})}
        for i, (v, (work, psnr)) in enumerate(zip(study.variants, figures, strict=True))
    ]
    write_document(tmp_path / "p.md", "s", "x", [(study, rows)])
    marked = [line for line in (tmp_path / "p.md").read_text().splitlines() if "loses" in line]
    assert len(marked) == 1 and "| mask |" in marked[0]


def test_a_cache_is_compared_in_pairs_with_full_steps(tmp_path):
    study = parse_study(
        {
            "prompts": ["a", "b", "c"],
            "reference": {"step_cache": "none"},
            "variant": [{"step_cache": "none"}, {"step_cache": "mask"}],
        }
    )
    rows = []
    for number, (prompt, judge, loss) in enumerate(
        zip("abc", (0.9, 0.5, 1.0), (0.02, 0.01, 0.03), strict=True)
    ):
        for variant in study.variants:
            cached = variant.step_cache == "mask"
            row = rows_of(STUDY)[0] | {"variant": variant.settings(), "label": variant.step_cache}
            row |= {"prompt": prompt, "key": f"{number}{cached}", "reference": f"{number}False"}
            rows.append(row | {"metrics": {"judge": judge - loss * cached}, "curves": {}})
    write_document(tmp_path / "p.md", "s", "x", [(study, rows)])
    text = (tmp_path / "p.md").read_text()
    assert "| # | Variant | Judge | To full steps |" in text and "*to full steps* its difference" in text
    # The spread of the three prompts is 25 times that of the pairs.
    assert "| 1 | none | 0.800 ±0.66 | – |" in text and "| 2 | mask | 0.780 ±0.63 | -0.020 ±0.025 |" in text


def test_tables_keep_the_order_of_a_study_that_is_not_ranked():
    plain = dataclasses.replace(STUDY, ranked=False)
    assert [e["label"] for e in ordered(plain, rows_of(plain))] == list(JUDGE)
    assert [e["segments"] for e in ordered(plain, rows_of(plain))][1] == pytest.approx([0.51, 0.51])


def test_figures_as_text():
    assert [size_text(x) for x in (12, 1234, 2.5e6, 3e9)] == ["12 B", "1.23 kB", "2.5 MB", "3 GB"]
    assert (
        figure(None, "psnr") == "–" and figure(31.26, "psnr") == "31.3" and figure(12.7, "chunk_ms") == "13"
    )


# --- the picture ---


def test_ticks_are_round_and_inside():
    assert ticks(0.51, 0.98) == [0.6, 0.7, 0.8, 0.9]
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(5, 5)


def test_marks_at_one_place_are_moved_apart(tmp_path):
    points = [Point(str(i), 1.0, 1.0, 0.9, 1.1) for i in range(4)] + [None, Point("far", 50.0, 2.0)]
    path = tmp_path / "x" / "p.png"
    draw([Panel(points, "x", "y", str, (0, 5))] * 2, [str(i) for i in range(6)], "Title", path)
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    from streamvid.eval.picture import PALETTE

    for number in (0, 1, 2, 3, 5):
        colour = [int(PALETTE[number][i : i + 2], 16) for i in (1, 3, 5)]
        assert (np.abs(pixels.astype(int) - colour).max(1) < 12).sum() > 800  # a whole disc in either panel


# --- models ---


def test_a_model_may_carry_settings():
    assert parse_model("tiny") == ("tiny", {})
    assert parse_model("owner/name") == ("owner/name", {})
    assert parse_model("tiny:num_inference_steps=8,solver=euler,guidance_scale=2.0") == (
        "tiny",
        {"num_inference_steps": 8, "solver": "euler", "guidance_scale": 2.0},
    )
    with pytest.raises(StreamvidError, match="not key=value"):
        parse_model("tiny:solver=euler,8")


def test_settings_of_a_model_reach_its_streams(tiny_random_folder):
    pipe = load_pipe(f"{tiny_random_folder}:num_inference_steps=3,solver=euler")
    assert pipe.config.num_inference_steps == 3 and pipe.config.solver == "euler"
    with pytest.raises(StreamvidError, match="did you mean 'solver'"):
        load_pipe(f"{tiny_random_folder}:solvr=euler")


def test_other_weights_under_the_same_name_are_other_clips(tmp_path):
    weights = tmp_path / "m" / "w.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"a" * 3_000_000)
    cell = Cell(variant=Variant(model=str(tmp_path / "m")), prompt="a", seed=0, num_frames=9)
    before = STUDY.key(cell)
    assert STUDY.key(cell) == before
    weights.write_bytes(b"b" * 3_000_000)
    files_mark.cache_clear()
    assert STUDY.key(cell) != before
    assert files_mark("no/such-model") == ""


def test_a_models_card_and_logs_are_not_the_model(tmp_path):
    (tmp_path / "w.safetensors").write_bytes(b"1234")
    marks = []
    for name in (None, "README.md", "log.csv", "config.json"):
        if name:
            (tmp_path / name).write_text("x")
        files_mark.cache_clear()
        marks.append(files_mark(str(tmp_path)))
    assert marks[0] == marks[1] == marks[2] != marks[3]


def test_a_policy_that_needs_a_head_profile_gets_one_of_the_model(tiny_random_folder):
    from streamvid.eval.render import StreamRenderer

    cell = Cell(
        variant=Variant(model=str(tiny_random_folder), memory="dummy_forcing:profile={heads},size=6"),
        prompt="a red ball",
        seed=0,
        num_frames=33,
    )
    renderer = StreamRenderer()
    rendered = renderer(cell)
    assert rendered.settings["memory"]["profile"] == "{heads}" and len(rendered.frames) == 33
    assert np.array_equal(StreamRenderer()(cell).frames, rendered.frames)
