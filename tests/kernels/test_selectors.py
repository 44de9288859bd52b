"""Selection rules: what each must keep, that full maps are exact, and that blocks cover every token once."""

import pytest
import torch

from streamvid.kernels.attention import attend
from streamvid.kernels.blocks import dense_mask
from streamvid.kernels.layout import Layout, Run, auto_cube, blocking
from streamvid.kernels.reference import reference
from streamvid.kernels.selectors import SELECTORS, Mass, Sparge, TopK, forced
from streamvid.kernels.types import KVView
from streamvid.memory.spec import build

GRID = (6, 7)
RUNS = (Run("sink", 0.0), *(Run("recent", float(t)) for t in range(4, 10)), Run("memory", tokens=19, frames=0),
        *(Run("current", float(t)) for t in (10, 11)))  # fmt: skip
LAYOUT = Layout(GRID, (10.0, 11.0), RUNS)


def tensors(seed=0, b=2, h=3, d=16):
    torch.manual_seed(seed)
    q = torch.randn(b, 2 * 42, h, d)
    k = torch.randn(b, LAYOUT.num_keys, h, d)
    return q, k, torch.randn_like(k)


@pytest.mark.parametrize("cube", [(1, 6, 7), (2, 3, 4), (3, 2, 2), (1, 1, 7)])
def test_blocks_cover_every_token_once(cube):
    blocks = blocking(LAYOUT, cube, 8, torch.device("cpu"))
    for part in (blocks.queries, blocks.keys):
        tokens = part.tokens(torch.device("cpu")).flatten()
        assert sorted(tokens[tokens >= 0].tolist()) == list(range(part.num_tokens))
    table = blocks.keys.tokens(torch.device("cpu"))
    sink_tokens = {
        t
        for row, region in zip(table.tolist(), blocks.regions, strict=True)
        if region == "sink"
        for t in row
        if t >= 0
    }
    assert sink_tokens == set(range(42))


def test_frames_in_ring_order_make_the_same_cubes():
    """A ring buffer holds frames out of order; a block must still hold neighbours in time."""
    ring = Layout(GRID, (8.0,), tuple(Run("recent", float(t)) for t in (6, 7, 4, 5)))
    blocks = blocking(ring, (2, 6, 7), 64, torch.device("cpu"))
    assert sorted(blocks.times) == [4.5, 6.5]


@pytest.mark.parametrize("spec", [
    "topk:density=1", "mass:mass=1", "vsa:sparsity=0", "sparge:mass=1", "sta:window=99+99+99",
    "local:density=1,reach=99", "annsa:density=1,radius=16",
])  # fmt: skip
@pytest.mark.parametrize("cube", ["1+6+7", "2+3+4"])
def test_a_full_map_is_exact(spec, cube):
    q, k, v = tensors()
    layout = LAYOUT
    if spec.startswith(("sta", "local")):  # rules by place cannot see loose tokens, which have none
        layout = Layout(GRID, (10.0, 11.0), tuple(run for run in RUNS if run.frames))
        k, v = k[:, : layout.num_keys], v[:, : layout.num_keys]
    selector = build(f"{spec},cube={cube}", SELECTORS, "block selector")
    blocks = selector.select(q, k, layout)
    if spec.startswith("mass"):
        assert blocks.density() > 0.9  # the last block may add nothing in fp32
    else:
        assert blocks.density() == 1
        out = attend(q, [KVView(k, v, blocks=blocks)])
        torch.testing.assert_close(out, reference(q, k, v)[0], atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(SELECTORS))
def test_a_partial_map_keeps_what_is_forced_and_attends_to_it_exactly(name):
    q, k, v = tensors(1)
    selector = SELECTORS[name](cube=(1, 3, 4), sink=True, current=True, last=2)
    blocks = selector.select(q, k, LAYOUT)
    assert 0 < blocks.density() <= 1
    mask = dense_mask(blocks)
    frames = mask[..., : 7 * 42].unflatten(-1, (7, 42))
    assert frames[..., 0, :].all() and frames[..., 5:, :].all() and mask[..., -84:].all()
    right, right_lse = reference(q, k, v, mask=mask)
    out, lse = attend(q, [KVView(k, v, blocks=blocks)], return_lse=True)
    torch.testing.assert_close(out, right, atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(lse, right_lse, atol=3e-6, rtol=1e-5)
    again = SELECTORS[name](cube=(1, 3, 4), sink=True, current=True, last=2).select(q, k, LAYOUT)
    assert torch.equal(again.counts, blocks.counts) and torch.equal(again.indices, blocks.indices)


def test_topk_finds_the_block_that_matters_and_keeps_its_budget():
    q, k, v = tensors(2)
    k = k * 0.1
    k[:, 3 * 42 : 4 * 42] += q.mean(1, keepdim=True) * 20
    blocks = TopK(cube=(1, 6, 7), density=0.5, last=0).select(q, k, LAYOUT)
    assert dense_mask(blocks)[..., 3 * 42 : 4 * 42].all()
    assert blocks.counts.unique().tolist() == [5]  # half of 6 recent, 1 sink, 1 loose and 2 current blocks


def test_mass_keeps_more_where_attention_is_flat():
    q, k, _ = tensors(3)
    settings = {"cube": (1, 3, 4), "sink": False, "current": False, "last": 0, "mass": 0.6}
    flat = Mass(**settings).select(q * 0.01, k, LAYOUT).counts.float().mean()
    sharp = Mass(**settings).select(q * 30, k, LAYOUT).counts.float().mean()
    assert sharp < flat


def test_sparge_never_skips_a_block_of_unlike_tokens():
    q, k, _ = tensors(4)
    k[:, 42:84] = k[:, 42:43]  # one uniform frame; the others are noise and so never skipped
    q[:] = -k[:, 42:43] * 3
    blocks = Sparge(cube=(1, 6, 7), mass=0.5, last=0, sink=False, current=False).select(q, k, LAYOUT)
    assert dense_mask(blocks)[..., :42].all() and dense_mask(blocks)[..., 84:].all()


def test_forced_blocks_of_deep_cubes_hold_the_last_frame():
    blocks = blocking(LAYOUT, (3, 6, 7), 64, torch.device("cpu"))
    kept, count = forced(blocks, False, False, 1)
    assert count == 1 and blocks.times[kept.nonzero().item()] == 8.0


def test_cubes_fit_the_published_grid():
    assert auto_cube((8, 8), 3) == (1, 8, 8)
    depth, rows, columns = auto_cube((30, 52), 3)
    assert depth == 3 and 30 % rows == 0 and 52 % columns == 0 and 48 <= depth * rows * columns <= 64


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="did you mean 'density'"):
        build("topk:densty=0.5", SELECTORS, "block selector")
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        build("topk:density=0", SELECTORS, "block selector")
    q, k, _ = tensors()
    with pytest.raises(ValueError, match="does not fit"):
        TopK().select(q, k[:, :-1], LAYOUT)
