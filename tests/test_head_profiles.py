"""Head profiles: what is measured, how it is labelled, and what policies do with it."""

from __future__ import annotations

import json

import pytest
import torch
from policy_runs import cache_of, draw, geometry, run

import streamvid
from streamvid import cli
from streamvid.memory import head_labels
from streamvid.memory.cache import KVCache
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.head_stats import LayerStats, Profiler
from streamvid.memory.heads import HeadProfile
from streamvid.memory.policies.dummy_forcing import DummyForcing
from streamvid.memory.policies.forcing_kv import ForcingKV
from streamvid.memory.policies.tri_attention import expectation
from streamvid.memory.tokens import Tokens


def profile(**changes) -> HeadProfile:
    labels = {
        "forcing_kv": [["static", "dynamic", "dynamic", "static"]] * 2,
        "dummy_forcing": [["dummy", "sink", "middle", "dummy"]] * 2,
    }
    return HeadProfile(**({"fingerprint": "abc", "layers": 2, "heads": 4, "labels": labels} | changes))


def stats(mass: torch.Tensor, logits: torch.Tensor | None = None) -> LayerStats:
    """Heads with the given attention of the newest chunk, ``[heads, L]``."""
    h, n = mass.shape
    square = torch.zeros(h, n, n, dtype=torch.float64)
    square[:, n - 3] = mass
    curves = torch.zeros(h, n, n, dtype=torch.float64) if logits is None else logits
    return LayerStats(
        square, curves, torch.ones(h, n), torch.ones(h, 12), torch.zeros(h, 6), torch.ones(h, 6)
    )


def test_a_profile_survives_its_file_and_is_refused_elsewhere(tmp_path):
    profile().save(tmp_path / "p.json")
    again = HeadProfile.load(tmp_path / "p.json")
    assert again == profile()
    with pytest.raises(ValueError, match="other weights"):
        again.check(KVGeometry(layers=2, heads=4, head_dim=12, grid=(2, 3), fingerprint="xyz"))
    with pytest.raises(ValueError, match="2 layers of 4 heads"):
        again.check(KVGeometry(layers=3, heads=4, head_dim=12, grid=(2, 3)))
    with pytest.raises(ValueError, match="no labels of 'forcingkv'; did you mean 'forcing_kv'"):
        again.of("forcingkv")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1, "layers": 1}', '{"format": 9}'])
def test_other_files_are_refused_in_one_sentence(tmp_path, content):
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="not a head profile"):
        ForcingKV(profile=str(path))


def test_static_heads_look_at_the_last_four_frames():
    mass = torch.zeros(3, 9, dtype=torch.float64)
    mass[0, -4:] = 0.25  # near
    mass[1, 1:] = 0.125  # everywhere
    mass[2, 0], mass[2, -1] = 0.9, 0.1  # the sink, which is left out, and near
    assert head_labels.forcing_kv([stats(mass)]) == [["static", "dynamic", "static"]]
    assert head_labels.forcing_kv([stats(mass)], skip=0) == [["static", "dynamic", "dynamic"]]


def test_dummy_heads_are_those_that_lose_least():
    mass = torch.zeros(4, 9, dtype=torch.float64)
    mass[0, -3:], mass[1, -3:] = 1 / 3, 0.33
    mass[2, 0], mass[3, 4] = 1.0, 1.0
    assert head_labels.dummy_forcing([stats(mass)]) == [["dummy", "dummy", "sink", "middle"]]


def test_wave_heads_have_a_period_of_six():
    n = 36
    age = torch.arange(n, dtype=torch.float64)
    curves = torch.stack(
        [
            torch.cos(2 * torch.pi * age / 6),
            torch.full((n,), -3.0, dtype=torch.float64) + 0.1 * age / n,
            (-age).exp() - 0.2,
        ]
    )
    logits = torch.zeros(3, n, n, dtype=torch.float64)
    for key in range(n):
        logits[:, n - 1, n - 1 - key] = curves[:, key]
    assert head_labels.pyramid([stats(torch.ones(3, n), logits)]) == [["wave", "veil", "anchor"]]


def test_the_profiler_measures_attention_as_it_is():
    profiler = Profiler(6)
    cache = KVCache(geometry(), profiler)
    run(cache, range(2))
    layers = profiler.finish()
    assert len(layers) == 2
    assert torch.allclose(layers[0].mass[:, 0].sum(1), torch.ones(4).double(), atol=1e-5)
    assert (layers[0].mass[:, 0, 3:] == 0).all() and (layers[0].mass[:, 3] > 0).all()
    assert torch.allclose(layers[1].likeness[:, 0], torch.ones(4).double(), atol=1e-5)
    keys = torch.cat([draw(geometry(), (50 * c + 49) * 7)[1] for c in range(2)], dim=1)
    assert torch.allclose(layers[0].channels, keys.abs().mean(dim=(0, 1)).double(), atol=1e-5)


def test_dummy_forcing_frees_the_memory_of_dummy_heads():
    cache = KVCache(geometry(), DummyForcing.of(profile(), sink=3, size=12), fill=float("nan"))
    run(cache, range(8))
    frames = {bank.heads: bank.num_frames for bank in cache.banks[0]}
    assert frames == {(0, 3): 1, (1,): 4, (2,): 9}
    window = cache_of("window:size=12")
    run(window, range(8))
    assert cache.report().stored < 0.75 * window.report().stored


def test_dummy_forcing_gives_each_group_what_it_promises():
    """A middle head equals a window, a dummy head a window of one frame of history."""
    labelled = profile(labels={"dummy_forcing": [["dummy", "dummy", "middle", "middle"]] * 2})
    cache = KVCache(geometry(), DummyForcing.of(labelled, size=6))
    window, short = cache_of("window:size=6"), cache_of("window:size=4")
    for chunk in range(5):
        ours, long, near = (run(c, range(chunk, chunk + 1)) for c in (cache, window, short))
        assert torch.allclose(ours[0][:, :, 2:], long[0][:, :, 2:], atol=1e-5)
        assert torch.allclose(ours[0][:, :, :2], near[0][:, :, :2], atol=1e-5)


def test_the_expectation_is_the_mean_over_future_queries():
    torch.manual_seed(0)
    k, q = torch.randn(1, 5, 2, 12), torch.randn(1, 1, 2, 12)
    positions = torch.zeros(1, 5, 2, 3)
    positions[..., 0] = torch.arange(5.0)[None, :, None]
    tokens = Tokens(k, k, positions, torch.ones(1, 5, 2))
    pairs = torch.view_as_complex(q[0, 0].unflatten(-1, (-1, 2)).contiguous())
    ours = expectation(tokens, 9.0, pairs, pairs.abs(), temporal=2)
    from streamvid.kernels.rope import rope_table, rotate

    total = torch.zeros(1, 5, 2)
    for distance in (0, 1, 2, 4, 8, 16, 32, 64, 128):
        at_q = torch.tensor([[9.0 + distance, 0, 0]], dtype=torch.float64)
        turned_q = rotate(q, rope_table(at_q, 12, torch.complex128)[:, None])
        turned_k = rotate(k, rope_table(positions.double(), 12, torch.complex128))
        total += (turned_q * turned_k).sum(-1) / 9
    assert torch.allclose(ours, total, atol=1e-4)


def test_a_model_is_profiled_and_policies_use_it(tiny_random_folder, tmp_path, capsys):
    path = tmp_path / "heads.json"
    arguments = ["profile-heads", str(tiny_random_folder), "-o", str(path), "--latents", "9", "--json"]
    assert cli.main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert sum(told["labels"]["forcing_kv"].values()) == 4
    pipe = streamvid.load(str(tiny_random_folder))
    for policy in ("forcing_kv", "dummy_forcing", "tri_attention"):
        with pipe.stream("a", num_frames=30, memory=f"{policy}:profile={path}", output_type="latent") as s:
            assert all(torch.isfinite(latent).all() for latent in s)
    other = json.loads(path.read_text()) | {"fingerprint": "0" * 16}
    path.write_text(json.dumps(other))
    with pytest.raises(ValueError, match="other weights"):
        pipe.stream("a", memory=f"forcing_kv:profile={path}")
