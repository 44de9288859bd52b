"""Calibration: the search, one run through the command, and what happens when a file does not fit."""

from __future__ import annotations

import itertools
import json
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import streamvid
from streamvid.calibrator import calibrate, fit_polynomial
from streamvid.cli import main
from streamvid.errors import ProfileError
from streamvid.stepcache import calibration
from streamvid.stepcache.mask import even_mask
from streamvid.stepcache.search import exhaustive, lexicographic_path, masks

FILE_CACHES = [
    "mask:full_steps=3,file={}",
    "magcache:threshold=100,file={}",
    "taocache:every=3,file={}",
    "teacache:threshold=100,file={}",
    "blocks:share=1,warmup=1,file={}",
]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), steps=st.integers(3, 7), data=st.data())
def test_the_path_is_the_best_of_all_paths(seed, steps, data):
    budget = data.draw(st.integers(2, steps))
    rng = np.random.default_rng(seed)
    weights = {(i, j): float(rng.integers(0, 5)) for i in range(steps) for j in range(i + 1, steps)}

    def key(skip):
        nodes = [s for s in range(steps) if s not in skip]
        return sorted((weights[e] for e in itertools.pairwise(nodes)), reverse=True)

    found = lexicographic_path(weights, steps, budget)
    every = [m for m in masks(steps, budget) if steps - 1 not in m]
    assert key(found) == min(key(m) for m in every)
    assert len(found) == steps - budget


def test_exhaustive_search_measures_every_mask():
    seen = []
    best = exhaustive(4, lambda skip: seen.append(skip) or sum(skip))
    assert len(seen) == 8 and best == {1: (1, 2, 3), 2: (1, 2), 3: (1,), 4: ()}


def test_even_masks_keep_the_ends():
    assert even_mask(4, 2) == (1, 2) and even_mask(5, 3) == (1, 3) and even_mask(4, 4) == ()
    assert even_mask(4, 1) == (1, 2, 3)


def test_a_polynomial_is_recovered():
    x = np.linspace(0.01, 0.08, 20)
    y = 3 * x**2 + 0.5 * x
    got = np.polyval(fit_polynomial([0, *x], [0, *y]), x)
    np.testing.assert_allclose(got, y, atol=1e-6)
    assert fit_polynomial([0, 1, 2], [0, 1, 2]) is None


@pytest.fixture(scope="module")
def many_step(tiny_random_folder):
    import dataclasses

    pipe = streamvid.load(str(tiny_random_folder))
    pipe.config = dataclasses.replace(pipe.config, num_inference_steps=9, guidance_scale=2.0)
    return pipe


@pytest.fixture(scope="module")
def many_step_file(many_step, tmp_path_factory):
    path = tmp_path_factory.mktemp("calibration") / "c.json"
    calibration.save(path, *calibrate(many_step, ["a red ball"], chunks=2))
    return path


def _run(pipe, spec, **options):
    with pipe.stream("a red ball", step_cache=spec, output_type="latent", **options) as stream:
        chunks = list(itertools.islice(stream.chunks(), 2))
        return torch.cat([torch.as_tensor(c.frames) for c in chunks]), stream.stats()["step_cache"]


def test_a_calibration_holds_every_value_once_a_step(many_step_file):
    key, values = calibration.read(many_step_file)
    assert set(values["gamma"]) == {"cond", "uncond"} and len(values["gamma"]["cond"]) == 9
    assert set(values["masks"]) == {str(n) for n in range(2, 10)} and values["masks"]["9"] == []
    assert len(values["block_importance"]) == 2 and len(values["tea_polynomial"]) == 5
    assert set(values["kappa_eps"]) == {str(s) for s in range(2, 9)}
    assert values["time_change"][0] == 0 and all(v > 0 for v in values["time_change"][1:])


@pytest.mark.parametrize("spec", FILE_CACHES)
def test_a_fitting_file_is_used(many_step, many_step_file, spec):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, report = _run(many_step, spec.format(many_step_file))
    assert report["compute_fraction"] < 1


@pytest.mark.parametrize("spec", FILE_CACHES)
def test_a_file_of_another_run_is_refused_with_one_warning_and_full_steps(many_step, many_step_file, spec):
    plain, _ = _run(many_step, "none", height=32)
    with pytest.warns(UserWarning, match="made for size") as caught:
        out, report = _run(many_step, spec.format(many_step_file), height=32)
    assert len([w for w in caught if "made for" in str(w.message)]) == 1
    assert torch.equal(out, plain) and report["compute_fraction"] == 1


def test_a_file_that_is_none_is_an_error(many_step, tmp_path):
    bad = tmp_path / "bad.json"
    for content in ("{", "[]", '{"format": 99}'):
        bad.write_text(content)
        with pytest.raises(ProfileError, match="bad.json"):
            _run(many_step, f"mask:full_steps=3,file={bad}")
    with pytest.raises(ProfileError, match="missing.json"):
        _run(many_step, f"mask:full_steps=3,file={tmp_path / 'missing.json'}")
    calibration.save(bad, {}, {"gamma": {}})
    with pytest.raises(ProfileError, match="holds no 'masks'"):
        _run(many_step, f"mask:full_steps=3,file={bad}")


def test_the_command_writes_a_file_that_works(tiny_random_folder, tmp_path, capsys):
    path, prompts = tmp_path / "few.json", tmp_path / "p.txt"
    prompts.write_text("a red ball\n\n")
    words = [
        "calibrate",
        str(tiny_random_folder),
        "-o",
        str(path),
        "--prompts",
        str(prompts),
        "--chunks",
        "2",
    ]
    assert main([*words, "--steps", "3", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert set(said["values"]["masks"]) == {"1", "2", "3"} and not list(tmp_path.glob("*.partial"))
    pipe = streamvid.load(str(tiny_random_folder))
    _, report = _run(pipe, f"mask:full_steps=2,file={path}", num_inference_steps=3)
    assert report["chunks"][1]["skipped"] == 1


def test_the_command_refuses_bad_input_in_one_line(tiny_random_folder, tmp_path, capsys):
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    folder = str(tiny_random_folder)
    for words, text in [
        (["-o", str(tmp_path / "no" / "x.json")], "cannot be written"),
        (["-o", str(tmp_path / "x.json"), "--prompts", str(empty)], "holds no prompt"),
    ]:
        assert main(["calibrate", folder, *words]) == 2
        assert text in capsys.readouterr().err
