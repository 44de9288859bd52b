"""Every figure on a synthetic clip whose answer is known."""

import sys
import types

import cv2
import numpy as np
import pytest
from skimage.metrics import structural_similarity

from streamvid.errors import StreamvidError
from streamvid.eval import fidelity, motion, quality
from streamvid.eval.drift import by_segment, colour_drift, drift, middles, segments
from streamvid.eval.metrics import METRICS, measure
from streamvid.eval.video import as_frames, luma


def texture(height=96, width=128, seed=0):
    rng = np.random.default_rng(seed)
    image = cv2.GaussianBlur(rng.uniform(0, 255, (height, width, 3)).astype(np.float32), (0, 0), 3)
    image = (image - image.min()) / (image.max() - image.min()) * 200 + 25
    return image.astype(np.uint8)


def panning(n, dx, dy=0.0, side=96):
    """A texture that moves by (dx, dy) pixels a frame, cut from a large one with sub-pixel shifts."""
    big = texture(side * 3, side * 3).astype(np.float32)
    frames = []
    for t in range(n):
        matrix = np.array([[1, 0, dx * t - side], [0, 1, dy * t - side]], np.float32)
        frames.append(cv2.warpAffine(big, matrix, (side, side), flags=cv2.INTER_LINEAR))
    return np.stack(frames).round().astype(np.uint8)


def still(n=24, **shape):
    return np.repeat(texture(**shape)[None], n, 0)


# --- fidelity ---


def test_psnr_of_a_known_error_and_the_cap():
    a = np.full((3, 16, 16, 3), 100, np.uint8)
    b = a.copy()
    b[1] += 10
    assert fidelity.psnr(a, b) == pytest.approx([100.0, 20 * np.log10(255 / 10), 100.0])


def test_ssim_is_that_of_scikit_image():
    rng = np.random.default_rng(1)
    a = still(2)
    b = np.clip(a + rng.normal(0, 25, a.shape), 0, 255).astype(np.uint8)
    expected = [
        structural_similarity(
            x, y, data_range=255, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
        )
        for x, y in zip(luma(a).astype(np.float64), luma(b).astype(np.float64), strict=True)
    ]
    assert fidelity.ssim(a, b) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("metric", [fidelity.ssim, fidelity.ms_ssim, fidelity.gradient_similarity])
def test_similarity_is_one_for_equal_frames_and_falls_with_noise(metric):
    rng = np.random.default_rng(2)
    a = still(1, height=200, width=200)
    scores = [
        metric(a, np.clip(a + rng.normal(0, s, a.shape), 0, 255).astype(np.uint8))[0] for s in (0, 10, 40)
    ]
    assert scores[0] == pytest.approx(1.0, abs=1e-6)
    assert scores[0] > scores[1] + 0.005 > scores[2] + 0.01


def test_ms_ssim_forgives_fine_noise_that_ssim_does_not():
    rng = np.random.default_rng(3)
    a = still(1, height=200, width=200)
    b = np.clip(a + rng.normal(0, 20, a.shape), 0, 255).astype(np.uint8)
    assert fidelity.ms_ssim(a, b)[0] > fidelity.ssim(a, b)[0] + 0.05


def test_fidelity_refuses_other_sizes_and_tiny_frames():
    with pytest.raises(StreamvidError, match="differ in size"):
        fidelity.psnr(still(2), still(2, height=64))
    with pytest.raises(StreamvidError, match="at least 11"):
        fidelity.ssim(still(2, height=8), still(2, height=8))


def test_lpips_is_used_only_when_its_weights_are_there(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "lpips", None)
    assert fidelity.lpips_available() == (False, "the package lpips is not installed")
    with pytest.raises(StreamvidError, match="not installed"):
        fidelity.lpips_distance(still(1), still(1))

    import torch

    class Fake(torch.nn.Module):
        def __init__(self, net, verbose):
            super().__init__()

        def forward(self, a, b):
            return (a - b).abs().mean((1, 2, 3), keepdim=True)

    monkeypatch.setitem(sys.modules, "lpips", types.SimpleNamespace(LPIPS=Fake))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    assert "weights" in fidelity.lpips_available()[1]
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "alexnet-owt.pth").touch()
    fidelity._lpips_model.cache_clear()
    a = np.full((20, 16, 16, 3), 0, np.uint8)
    assert fidelity.lpips_distance(a, a + 51) == pytest.approx(np.full(20, 0.4), abs=1e-5)
    fidelity._lpips_model.cache_clear()


# --- quality of one frame ---


def test_sharpness_falls_with_blur_and_is_zero_for_a_flat_frame():
    sharp = luma(still(1))
    blurred = np.stack([cv2.GaussianBlur(sharp[0], (0, 0), 3)])
    assert quality.sharpness(sharp)[0] > quality.sharpness(blurred)[0] + 0.3
    assert quality.sharpness(np.full((1, 32, 32), 80.0, np.float32))[0] == 0


@pytest.mark.parametrize("sigma", [2.0, 8.0])
def test_noise_is_the_injected_sigma(sigma):
    rng = np.random.default_rng(4)
    gray = (128 + rng.normal(0, sigma, (1, 200, 200))).astype(np.float32)
    assert quality.noise(gray)[0] == pytest.approx(sigma, rel=0.05)


def test_exposure_contrast_and_clipping_of_half_black_half_white():
    frame = np.zeros((1, 10, 10, 3), np.uint8)
    frame[:, :5] = 255
    gray = luma(frame)
    assert quality.exposure(gray)[0] == pytest.approx(127.5)
    assert quality.contrast(gray)[0] == pytest.approx(127.5)
    assert quality.clipping(frame)[0] == 1.0


def test_colourfulness_of_grey_is_zero_and_of_pure_red_is_known():
    grey = np.full((1, 8, 8, 3), 90, np.uint8)
    red = grey * 0
    red[..., 0] = 200
    assert quality.colourfulness(grey)[0] == 0
    assert quality.colourfulness(red)[0] == pytest.approx(0.3 * np.hypot(200, 100), rel=1e-5)


def test_blockiness_is_one_for_blocks_and_near_zero_for_noise():
    rng = np.random.default_rng(5)
    blocks = np.kron(rng.uniform(0, 255, (1, 8, 8)), np.ones((1, 8, 8))).astype(np.float32)
    noise = rng.uniform(0, 255, (1, 64, 64)).astype(np.float32)
    assert quality.blockiness(blocks)[0] == pytest.approx(1.0)
    assert abs(quality.blockiness(noise)[0]) < 0.1


# --- motion ---


@pytest.mark.parametrize("dx", [1.0, 2.5])
def test_flow_is_the_injected_translation(dx):
    flow = motion.measure_motion(panning(8, dx), fps=8)
    expected = dx * 256 / 96
    assert np.median(flow.mean) == pytest.approx(expected, rel=0.05)
    assert np.median(flow.camera) == pytest.approx(expected, rel=0.05)
    assert flow.objects.mean() < 0.3 * expected


def test_flow_pairs_are_eighths_of_a_second():
    clip = panning(17, 0.5)
    slow, quick = motion.measure_motion(clip, fps=8), motion.measure_motion(clip, fps=16)
    assert len(slow.starts) == 16 and len(quick.starts) == 8 and quick.seconds == pytest.approx(1 / 8)
    assert np.median(quick.mean) == pytest.approx(2 * np.median(slow.mean), rel=0.1)


def test_object_motion_is_told_from_camera_motion():
    background, patch = texture(), texture(seed=9)[:24, :24]
    frames = still(6)
    for t in range(6):
        frames[t] = background
        frames[t, 30:54, 20 + 4 * t : 44 + 4 * t] = patch
    flow = motion.measure_motion(frames, fps=8)
    assert flow.objects.mean() > 5 * max(flow.camera.mean(), 0.3)


def test_a_pan_is_smooth_without_jerk_and_a_shaking_one_is_neither():
    pan = panning(17, 1.5)
    shaking = pan[[0, 4, 1, 5, 2, 6, 3, 7, 4, 8, 5, 9, 6, 10, 7, 11, 8]]
    assert motion.smoothness(pan) > 0.985 > motion.smoothness(shaking)
    jerks = [motion.measure_motion(clip, fps=8).jerk.mean() for clip in (pan, shaking)]
    assert jerks[1] > 10 * jerks[0]


def test_warp_error_sees_flicker_through_motion():
    pan = panning(9, 1.5)
    lit = pan.astype(np.int16)
    lit[1::2] += 12
    plain, flickering = (
        motion.measure_motion(clip, fps=8).warp_error.mean() for clip in (pan, lit.clip(0, 255).astype("u1"))
    )
    assert plain < 2.5
    assert flickering > plain + 6


def test_static_flicker_is_the_injected_level():
    frames = still(9)
    frames[1::2] += 6
    assert motion.measure_motion(frames, fps=8).static_flicker.mean() == pytest.approx(6, rel=0.1)
    assert motion.measure_motion(still(9), fps=8).static_flicker.mean() == 0


def test_freeze_counts_repeated_frames():
    frames = panning(9, 2)
    frames[4:7] = frames[4]
    assert motion.freeze(frames) == pytest.approx(2 / 8)
    assert motion.freeze(frames[:1]) == 0


def test_repetition_finds_the_period_and_is_low_without_one():
    rng = np.random.default_rng(6)
    loop = [texture(seed=int(s)) for s in rng.integers(0, 1000, 20)]
    score, lag = motion.repetition(np.stack(loop * 4), fps=8)
    assert lag == pytest.approx(20 / 8) and score > 0.5
    fresh = np.stack([texture(seed=s) for s in range(80)])
    assert motion.repetition(fresh, fps=8)[0] < 0.1
    assert motion.repetition(fresh[:5], fps=8) == (0.0, 0.0)


def test_seam_ratio_is_the_injected_one():
    steps = np.ones(23)
    steps[[11]] = 4.0
    assert motion.seam_ratio(steps, [0, 12, 24], 0.0) == pytest.approx(4.0)
    assert motion.seam_ratio(np.zeros(23), [0, 12], 0.1) == 1.0
    assert motion.seam_ratio(steps, [0], 0.1) == 1.0


# --- drift ---


def test_segments_cover_the_clip_and_join_a_short_rest():
    assert [(s.start, s.stop) for s in segments(100, 48)] == [(0, 48), (48, 100)]
    assert [(s.start, s.stop) for s in segments(130, 48)] == [(0, 48), (48, 96), (96, 130)]
    assert segments(5, 48) == [slice(0, 5)]
    with pytest.raises(StreamvidError, match="at least 1"):
        segments(10, 0)


def test_drift_of_a_ramp_and_of_a_bump():
    assert drift([1.0, 2.0, 3.0], [0.0, 2.0, 4.0]).slope == pytest.approx(0.5)
    bump = drift([1.0, 5.0, None, 2.0], [0.0, 1.0, 2.0, 3.0])
    assert (bump.absolute, bump.maximum) == (1.0, 4.0)
    assert bump.last == pytest.approx(8 / 3)


def test_by_segment_uses_positions_and_says_none_where_there_is_nothing():
    values = by_segment(np.array([1.0, 3.0]), segments(30, 10), np.array([0, 5]))
    assert values == [2.0, None, None]


@pytest.mark.parametrize("levels", [10, 20, 40])
def test_exposure_drift_is_linear_in_the_injected_ramp(levels):
    ramp = np.linspace(0, levels, 96).round().astype(np.uint8)
    frames = (np.full((96, 16, 16, 3), 80, np.uint8) + ramp[:, None, None, None]).astype(np.uint8)
    parts = segments(96, 24)
    figures, curves, _ = colour_drift(frames, luma(frames), parts, fps=16)
    between = (parts[-1].start - parts[0].start) / 95 * levels
    assert figures["exposure_slope"] == pytest.approx(levels / 95 * 16, rel=0.03)
    assert figures["histogram_drift"] == pytest.approx(between, rel=0.05)
    assert figures["white_balance_drift"] == pytest.approx(0, abs=1e-6)
    assert curves["colour_distance"][0] == 0
    assert curves["colour_distance"] == sorted(curves["colour_distance"])


def test_white_balance_drift_of_a_red_cast_and_max_of_a_cast_that_comes_and_goes():
    frames = np.full((72, 16, 16, 3), 100, np.uint8)
    frames[48:, ..., 0] = 119
    figures, _, _ = colour_drift(frames, luma(frames), segments(72, 24), fps=16)
    assert figures["white_balance_drift"] == pytest.approx(np.log(120 / 101), rel=1e-3)
    frames[48:] = 100
    frames[24:48, ..., 2] = 140
    figures, _, _ = colour_drift(frames, luma(frames), segments(72, 24), fps=16)
    assert figures["colour_drift"] == pytest.approx(0, abs=1e-3) and figures["colour_drift_max"] > 10


# --- all together ---


def test_measure_names_only_what_the_table_describes_and_orders_the_damage():
    clip = panning(48, 1.0, side=64)
    rng = np.random.default_rng(7)
    slight, heavy = (np.clip(clip + rng.normal(0, s, clip.shape), 0, 255).astype(np.uint8) for s in (3, 20))
    results = [
        measure(c, fps=16, reference=clip, chunk_starts=[0, 9, 21, 33, 45], segment_frames=16)
        for c in (clip, slight, heavy)
    ]
    for result in results:
        assert set(result.values) <= set(METRICS)
        assert len(result.seconds) == 3 and all(len(curve) == 3 for curve in result.curves.values())
        assert all(np.isfinite(v) for v in result.values.values())
    psnr = [r.values["psnr"] for r in results]
    assert psnr[0] == 100 and psnr[1] > psnr[2] + 10
    assert results[0].values["seam_change"] == pytest.approx(1, abs=0.3)
    measured = {name for name, metric in METRICS.items() if metric.group not in ("judge", "cost")}
    assert measured - set(results[0].values) == {"lpips"}


def test_measure_without_reference_or_chunks_leaves_those_figures_out():
    result = measure(panning(4, 1.0), fps=16, groups=("quality", "time"))
    assert "psnr" not in result.values and "seam_change" not in result.values
    assert "dynamic_degree" not in result.values


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: measure(still(2), fps=0), "above 0"),
        (lambda: measure(still(2), fps=8, groups=("beauty",)), "unknown group"),
        (lambda: as_frames([]), "no frames"),
        (lambda: as_frames(still(2).astype(np.float32)), "uint8"),
        (lambda: as_frames([still(1)[0], still(1, height=64)[0]]), "one size"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(StreamvidError, match=message):
        call()


def test_nothing_is_called_a_vbench_score():
    assert not any("vbench" in (name + metric.text).lower() for name, metric in METRICS.items())


def test_middles_are_seconds():
    assert middles(segments(96, 48), 16) == [1.5, 4.5]
