"""Random views for the kernel tests, and the one answer that counts: dense attention with a mask, in fp32."""

import torch
from hypothesis import strategies as st

from streamvid.kernels.backends import BACKENDS, interpreting
from streamvid.kernels.blocks import dense_mask
from streamvid.kernels.quantise import dequantise, quantise
from streamvid.kernels.reference import reference
from streamvid.kernels.rope import rope_table, rotate
from streamvid.kernels.types import BlockMap, Blocks, KVView

NO_KERNELS = BACKENDS["triton"].missing(torch.device("cpu"), torch.float32)
if not interpreting():
    NO_KERNELS = NO_KERNELS or "these tests run the kernels in the interpreter"
"""Why Triton kernels cannot run on the CPU here; empty = they can."""


def plain(x):
    return x if isinstance(x, torch.Tensor) else dequantise(x)


def expected(q, views):
    """Every view laid side by side; masks and biases say which head and query may read which key."""
    b, nq, h, d = q.shape
    ks, vs, biases, masks = [], [], [], []
    for view in views:
        n = view.num_tokens
        heads = list(range(h)) if view.heads is None else list(view.heads)
        k, v = torch.zeros(b, n, h, d), torch.zeros(b, n, h, d)
        keys = plain(view.k).float()
        k[:, :, heads] = keys if view.rope is None else rotate(keys, view.rope[:, None])
        v[:, :, heads] = plain(view.v).float()
        bias, mask = torch.zeros(b, h, n), torch.zeros(b, h, nq, n, dtype=torch.bool)
        mask[:, heads] = True if view.blocks is None else dense_mask(view.blocks)
        if view.bias is not None:
            bias[:, heads] = view.bias.expand(b, len(heads), n)
        if view.blocks is not None and view.blocks.bias is not None:
            for block, tokens in enumerate(view.blocks.keys.tokens(q.device).tolist()):
                for token in tokens:
                    if token >= 0:
                        bias[:, heads, token] += view.blocks.bias[:, block]
        ks.append(k), vs.append(v), biases.append(bias), masks.append(mask)
    return reference(
        q, torch.cat(ks, 1), torch.cat(vs, 1), mask=torch.cat(masks, 3), bias=torch.cat(biases, 2)
    )


def random_blocks(draw, tokens):
    """Runs of tokens, or a shuffled table with holes."""
    size = draw(st.sampled_from([8, 16, 20, 32]))
    if draw(st.booleans()):
        return Blocks(tokens, size)
    count = -(-tokens // size) + draw(st.integers(0, 1))
    table = torch.full((count * size,), -1, dtype=torch.int32)
    table[torch.randperm(count * size)[:tokens]] = torch.randperm(tokens, dtype=torch.int32)
    return Blocks(tokens, size, table.view(count, size))


def random_map(draw, b, heads, nq, n):
    queries, keys = random_blocks(draw, nq), random_blocks(draw, n)
    density = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    chosen = torch.rand(draw(st.sampled_from([1, b])), heads, queries.count, keys.count) < density
    counts = chosen.sum(-1, dtype=torch.int32)
    indices = torch.argsort(~chosen, dim=-1, stable=True).to(torch.int32)
    bias = torch.randn(heads, keys.count) if draw(st.booleans()) else None
    return BlockMap(indices, counts, queries, keys, bias)


@st.composite
def cases(draw, max_views=3, max_tokens=70):
    torch.manual_seed(draw(st.integers(0, 10_000)))
    b, h, d = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([8, 16]))
    nq = draw(st.integers(1, 40))
    q = torch.randn(b, nq, h, d)
    views = []
    for _ in range(draw(st.integers(1, max_views))):
        heads = draw(st.one_of(st.none(), st.sets(st.integers(0, h - 1), min_size=1).map(sorted)))
        hg, n = h if heads is None else len(heads), draw(st.integers(0, max_tokens))
        k, v = torch.randn(b, n, hg, d), torch.randn(b, n, hg, d)
        if n and draw(st.booleans()):
            axis, symmetric = draw(st.sampled_from([1, 3, 3])), draw(st.booleans())
            k = quantise(k, draw(st.sampled_from([4, 8])), group_size=8, axis=axis, symmetric=symmetric)
            v = quantise(v, draw(st.sampled_from([4, 8])), group_size=8, axis=axis, symmetric=symmetric)
        shape = draw(st.sampled_from([None, (n,), (hg, n), (b, hg, n)]))
        bias = None if shape is None else torch.randn(shape) * 4
        if bias is not None and n and draw(st.booleans()):
            bias[..., 0] = -torch.inf
        rope = rope_table(torch.randint(0, 40, (n, 3)), d) if draw(st.booleans()) else None
        blocks = random_map(draw, b, hg, nq, n) if n and draw(st.booleans()) else None
        views.append(KVView(k, v, heads=heads, bias=bias, rope=rope, blocks=blocks))
    return q, views
