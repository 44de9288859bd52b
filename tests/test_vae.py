"""Streaming autoencoders: any split of a video is the same video, streams are independent, golden cases."""

import copy
from pathlib import Path

import pytest
import tiny_random
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamvid.errors import StreamvidError
from streamvid.taehv import TAEHV, TAEHVConfig, infer_config, trim_grows
from streamvid.vae import VaeGeometry, make_decoder, make_encoder, vae_geometry
from streamvid.vae_cpu import use_onednn
from streamvid.vae_taehv import TAEHVEncoder
from streamvid.verify_vae import VERIFIERS

GOLDEN = Path(__file__).parent / "golden"
WAN_VARIANTS = {
    "patched": {},
    "plain": {"patch_size": None, "in_channels": 3, "out_channels": 3, "scale_factor_spatial": 4},
    "time 2x": {"temperal_downsample": [False, True], "scale_factor_temporal": 2},
    "time 8x": {
        "dim_mult": [1, 1, 1, 1],
        "temperal_downsample": [True, True, True],
        "patch_size": None,
        "in_channels": 3,
        "out_channels": 3,
        "scale_factor_temporal": 8,
    },
    "residual": {"is_residual": True},
}


def random_taehv(seed: int = 0) -> TAEHV:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = TAEHVConfig(latent_channels=4, encoder_width=8, decoder_widths=(12, 8, 8, 6))
        return TAEHV(config).eval().requires_grad_(False)


def build(name: str):
    return random_taehv() if name == "taehv" else tiny_random.random_vae(**WAN_VARIANTS[name])


ALL = ["taehv", *WAN_VARIANTS]


def latents(count: int, seed: int = 0, side: int = 2, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, count, 4, side, side, generator=torch.Generator().manual_seed(seed))


def decode(vae, parts) -> torch.Tensor:
    decoder = make_decoder(vae)
    return torch.cat([decoder.decode_chunk(part) for part in parts], dim=1)


@pytest.mark.parametrize("case", ["wan_vae", "taehv"])
def test_golden_case(case):
    for deviation in VERIFIERS[case](GOLDEN / case):
        assert deviation.ok, deviation


@pytest.mark.parametrize("name", ALL)
def test_any_split_is_the_same_video(name):
    vae = build(name)
    z = latents(9)
    whole = decode(vae, [z])
    assert whole.shape[1] == vae_geometry(vae).num_frames(9)
    for split in ([3, 3, 3], [1] * 9, [1, 4, 4], [9, 0]):
        assert torch.equal(decode(vae, z.split(split, dim=1)), whole), split


@pytest.mark.parametrize("name", [name for name in WAN_VARIANTS if name != "time 8x"])
def test_equals_diffusers_whole_clip(name):
    vae = build(name)
    z = latents(5)
    mean, std = (torch.tensor(v)[:, None, None] for v in (vae.config.latents_mean, vae.config.latents_std))
    reference = vae.decode((z * std + mean).transpose(1, 2)).sample.transpose(1, 2)
    torch.testing.assert_close(decode(vae, [z]), reference * 0.5 + 0.5, atol=5e-6, rtol=0)
    video = torch.rand(1, 13, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    expected = vae.encode((video * 2 - 1).transpose(1, 2)).latent_dist.mode().transpose(1, 2)
    torch.testing.assert_close(make_encoder(vae).encode(video), (expected - mean) / std, atol=2e-6, rtol=0)


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(["taehv", "patched"]),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    seed=st.integers(0, 9),
)
def test_splits_of_any_length(name, cuts, seed):
    vae = build(name)
    z = latents(sum(cuts), seed)
    assert torch.equal(decode(vae, z.split(cuts, dim=1)), decode(vae, z.split(1, dim=1)))


@pytest.mark.parametrize("name", ["taehv", "patched", "residual"])
def test_interleaved_streams_and_interrupting_diffusers(name):
    vae = build(name)
    a, b = latents(6, 1), latents(6, 2)
    first, second = make_decoder(vae), make_decoder(vae)
    out_a, out_b = [], []
    for part_a, part_b in zip(a.split(2, dim=1), b.split(2, dim=1), strict=True):
        out_a.append(first.decode_chunk(part_a))
        if name != "taehv":
            vae.decode(part_b.transpose(1, 2))
        out_b.append(second.decode_chunk(part_b))
    assert torch.equal(torch.cat(out_a, dim=1), decode(vae, [a]))
    assert torch.equal(torch.cat(out_b, dim=1), decode(vae, [b]))


@pytest.mark.parametrize("name", ["taehv", "patched", "residual"])
def test_reset_and_saved_state(name):
    vae = build(name)
    z = latents(6)
    decoder = make_decoder(vae)
    head = decoder.decode_chunk(z[:, :2])
    state = {key: value.clone() for key, value in decoder.state_dict().items()}
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    tail = decoder.decode_chunk(z[:, 2:])
    other = make_decoder(vae)
    other.load_state_dict(state)
    assert torch.equal(other.decode_chunk(z[:, 2:]), tail)
    other.reset()
    assert torch.equal(other.decode_chunk(z[:, :2]), head)
    after_one = make_decoder(vae)
    after_one.decode_chunk(z[:, :1])
    resumed = make_decoder(vae)
    resumed.load_state_dict(after_one.state_dict())
    assert torch.equal(resumed.decode_chunk(z[:, 1:2]), after_one.decode_chunk(z[:, 1:2]))


def test_state_of_another_autoencoder_is_refused():
    state = make_decoder(build("patched")).state_dict()
    with pytest.raises(StreamvidError, match="layers"):
        make_decoder(build("time 8x")).load_state_dict(state)
    small = make_decoder(random_taehv())
    small.decode_chunk(latents(1))
    with pytest.raises(StreamvidError, match="another autoencoder"):
        make_encoder(random_taehv()).load_state_dict(small.state_dict() | {"started": torch.tensor(1)})


@pytest.mark.parametrize("name", ALL)
def test_encoding_any_split_keeps_the_rest(name):
    vae = build(name)
    geometry = vae_geometry(vae)
    video = torch.rand(
        1, 1 + 2 * geometry.temporal + 1, 3, 32, 32, generator=torch.Generator().manual_seed(0)
    )
    whole = make_encoder(vae).encode(video)
    assert whole.shape[:3] == (1, 3, 4)
    encoder = make_encoder(vae)
    parts = [encoder.encode(picture) for picture in video.split(1, dim=1)]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert encoder.pending == 1 % geometry.temporal
    half = make_encoder(vae)
    start = half.encode(video[:, :3])
    resumed = make_encoder(vae)
    resumed.load_state_dict(half.state_dict())
    assert torch.equal(torch.cat([start, resumed.encode(video[:, 3:])], dim=1), whole)


def test_batch_of_clips_close_to_solo():
    vae = build("patched")
    both = latents(3, batch=2)
    together = decode(vae, [both])
    torch.testing.assert_close(together[:1], decode(vae, [both[:1]]), atol=1e-5, rtol=0)


def test_taehv_sizes_come_from_shapes_and_last_rows_are_used():
    model = random_taehv()
    state = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert infer_config(shapes) == model.config
    larger = dict(state)
    extra = torch.full((12, 12, 1, 1), 9.0)
    larger["decoder.7.conv.weight"] = torch.cat([extra, state["decoder.7.conv.weight"]])
    config = infer_config({name: tuple(tensor.shape) for name, tensor in larger.items()})
    assert config == model.config
    trimmed = trim_grows(larger, config)
    assert all(torch.equal(trimmed[name], state[name]) for name in state)


def test_taehv_encoder_alignments():
    model = random_taehv()
    video = torch.rand(1, 9, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    lead = torch.cat([video[:, :1].expand(-1, 3, -1, -1, -1), video], dim=1)
    encoder = TAEHVEncoder(model)
    torch.testing.assert_close(encoder.encode(video), encoder.encode_reference(lead), atol=5e-6, rtol=0)
    assert encoder.encode_reference(video).shape[1] == 3


def test_frame_counts():
    geometry = VaeGeometry(16, 4, 8)
    assert [geometry.num_frames(n) for n in (0, 1, 2, 3)] == [0, 1, 5, 9]
    assert [geometry.num_latents(n) for n in (0, 1, 2, 5, 6, 81)] == [0, 1, 2, 2, 3, 21]


def test_wrong_input_is_one_sentence():
    vae = build("patched")
    with pytest.raises(StreamvidError, match="4 channels"):
        make_decoder(vae).decode_chunk(torch.zeros(1, 2, 5, 2, 2))
    with pytest.raises(StreamvidError, match="divisible by 8"):
        make_encoder(vae).encode(torch.zeros(1, 1, 3, 20, 32))
    with pytest.raises(StreamvidError, match="AutoencoderKLWan"):
        make_decoder(torch.nn.Identity())
    with pytest.raises(StreamvidError, match="latents_mean has 16"):
        make_decoder(tiny_random.random_vae(latents_mean=[0.0] * 16))


@pytest.mark.parametrize("name", list(WAN_VARIANTS))
def test_convolutions_through_onednn_are_the_same_and_training_is_left_alone(name, monkeypatch):
    plain, fast = build(name), use_onednn(build(name))
    z = latents(5)
    torch.testing.assert_close(decode(fast, [z]), decode(plain, [z]), atol=5e-6, rtol=0)
    video = torch.rand(1, 9, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    if name != "time 8x":
        codes = [make_encoder(vae).encode(video) for vae in (plain, fast)]
        torch.testing.assert_close(*codes, atol=5e-6, rtol=1e-5)
    assert all(torch.equal(decode(fast, z.split(n, dim=1)), decode(fast, [z])) for n in (1, 2))
    calls = []
    inner = torch.mkldnn_convolution
    monkeypatch.setattr(torch, "mkldnn_convolution", lambda *a: calls.append(1) or inner(*a))
    decode(copy.deepcopy(fast), [z[:, :1]])
    assert calls
    calls.clear()
    fast.requires_grad_(True)
    conv = next(m for m in fast.decoder.modules() if isinstance(m, torch.nn.Conv3d))
    shape = (1, conv.in_channels, 3, 8, 8)
    conv(torch.randn(shape)).sum().backward()
    assert conv.weight.grad is not None and not calls
