"""Archived frames: the same bits as kept ones, moved once, brought back in two batches at most."""

import pytest
import torch

from streamvid.memory.cache import KVCache
from streamvid.memory.codecs import PackedKV, make_codec, recode
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.offload import HOST, Offload, Staging
from streamvid.memory.plan import plan

SMALL = KVGeometry(layers=3, heads=2, head_dim=32, grid=(2, 4))
CPU = torch.device("cpu")


def tensors(seed, frames=3, geometry=SMALL, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    shape = (1, frames * geometry.tokens_per_frame, geometry.heads, geometry.head_dim)
    return [torch.randn(shape, generator=generator).to(device) for _ in range(3)]


def run(cache, chunks):
    outputs = []
    for chunk in chunks:
        cache.begin_chunk(3)
        for stage in ("noisy", "context"):
            if stage == "context":
                cache.begin_context()
            for layer in range(SMALL.layers):
                q, k, v = tensors(10 * chunk + layer, device=cache.geometry.device)
                outputs.append(cache.attend(layer, q, k, v))
        cache.commit()
    return outputs


@pytest.mark.parametrize(
    "codec", ["none", "int8", "kivi", "mixed:recent_frames=2;older=int4", "qvg:span_frames=4"]
)
@pytest.mark.parametrize("keep", [0, 4])
def test_an_archive_changes_no_bit(codec, keep):
    plain = KVCache(SMALL, "window:size=12,sink=1", codec.replace(";", ","))
    archived = KVCache(SMALL, "window:size=12,sink=1", f"offload:codec={codec},keep_frames={keep}")
    for wanted, got in zip(run(plain, range(7)), run(archived, range(7)), strict=True):
        # Without any codec the cache reads in place, in another order of summation.
        assert torch.equal(wanted, got) if codec != "none" else torch.allclose(wanted, got, atol=1e-6)
    a, b = plain.report(), archived.report()
    assert b.host > 0 == a.host
    assert b.stored + b.host == pytest.approx(a.stored, abs=SMALL.layers * a.free + 4096 * (codec == "none"))
    assert b.regions["sink"] == a.regions["sink"]


def test_only_the_place_changes_with_age():
    codec = Offload(codec="int8", keep_frames=3)
    packed = codec.encode(*tensors(0)[:2], age=0)
    codes = packed.parts["k.codes"]
    assert not packed.tier.endswith(HOST) and codec.host_nbytes(packed) == 0
    assert recode(codec, packed, region="recent", age=2) is packed
    away = recode(codec, packed, region="recent", age=3)
    assert away.tier.endswith(HOST) and codec.host_nbytes(away) == away.nbytes
    assert away.parts["k.codes"] is codes  # the host is the device here
    assert recode(codec, away, region="recent", age=9) is away
    assert not recode(codec, away, region="sink", age=9).tier.endswith(HOST)


def block(value):
    return PackedKV({"k.x": torch.full((4,), float(value))}, (1, 1, 1, 4), torch.float32)


def test_staging_holds_two_batches_and_gives_each_copy_once():
    staging, blocks = Staging(CPU), [block(i) for i in range(6)]
    staging.start(blocks[:2])
    staging.start(blocks[2:4])
    assert staging.nbytes == 4 * blocks[0].nbytes
    first = staging.take(blocks[0])
    assert torch.equal(first.parts["k.x"], blocks[0].parts["k.x"]) and first is not blocks[0]
    assert staging.nbytes == 3 * blocks[0].nbytes
    staging.start(blocks[4:])  # drops what is left of the first batch
    assert staging.nbytes == 4 * blocks[0].nbytes
    assert torch.equal(staging.take(blocks[1]).parts["k.x"], blocks[1].parts["k.x"])  # copied anew
    assert staging.nbytes == 4 * blocks[0].nbytes


def test_staging_never_mistakes_one_block_for_another():
    staging, gone, other = Staging(CPU), block(1), block(2)
    staging.start([gone])
    staging._batches[0][id(other)] = staging._batches[0].pop(id(gone))  # as when an object number is reused
    assert torch.equal(staging.take(other).parts["k.x"], other.parts["k.x"])


def test_a_snapshot_goes_on_from_the_archive():
    spec = "offload:codec=int8,keep_frames=2"
    cache, other = (KVCache(SMALL, "window:size=9,sink=1", spec) for _ in range(2))
    run(cache, range(5))
    other.load_state_dict(cache.state_dict())
    assert other.report().host == cache.report().host > 0
    for wanted, got in zip(run(cache, range(5, 7)), run(other, range(5, 7)), strict=True):
        assert torch.equal(wanted, got)


def test_a_plan_tells_host_from_device():
    archived = plan(SMALL, None, "window:size=12,sink=1", "offload:codec=int8,keep_frames=4")
    plain = plan(SMALL, None, "window:size=12,sink=1", "int8")
    assert archived.host + archived.stored == plain.stored
    assert dict(archived.rows())["on the host"]
    cache = KVCache(SMALL, "window:size=12,sink=1", "offload:codec=int8,keep_frames=4")
    run(cache, range(8))
    assert cache.report().host == archived.host


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_blocks_go_to_pinned_memory_and_come_back():
    device = torch.device("cuda")
    geometry = KVGeometry(layers=3, heads=2, head_dim=32, grid=(2, 4), device=device)
    plain, archived = (
        KVCache(geometry, "window:size=12", codec) for codec in ("int8", "offload:codec=int8,keep_frames=2")
    )
    for wanted, got in zip(run(plain, range(6)), run(archived, range(6)), strict=True):
        assert torch.equal(wanted, got)
    packed = next(e.packed for e in archived.banks[0][0].entries if e.packed.tier.endswith(HOST))
    assert all(part.is_pinned() for part in packed.parts.values())
    assert archived.report().host > 0
    assert make_codec("int8").decode(packed)[0].device.type == "cpu"
