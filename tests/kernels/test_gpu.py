"""The kernel on a real GPU in bf16, compiled: the same answers as the reference, within what bf16 can hold."""

import pytest
import torch
from kernel_cases import expected

from streamvid.kernels.attention import attend
from streamvid.kernels.quantise import quantise
from streamvid.kernels.rope import rope_table
from streamvid.kernels.types import BlockMap, Blocks, KVView

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def views(kind, n=200, heads=2, d=128):
    k, v = (torch.randn(1, n, heads, d).bfloat16() for _ in range(2))
    if kind == "int4":
        k, v = (quantise(x, 4, group_size=64) for x in (k, v))
    rope = rope_table(torch.randint(0, 20, (n, 3)), d) if kind == "rope" else None
    bias = torch.randn(n) if kind == "bias" else None
    blocks = None
    if kind == "blocks":
        indices = torch.tensor([0, 2, 3], dtype=torch.int32).expand(1, heads, 3, 3).contiguous()
        counts = torch.tensor([3, 1, 0], dtype=torch.int32).expand(1, heads, 3).contiguous()
        blocks = BlockMap(indices, counts, Blocks(150, 64), Blocks(n, 64))
    return KVView(k, v, bias=bias, rope=rope, blocks=blocks)


def on_gpu(view):
    def move(x):
        if x is None or isinstance(x, (int, tuple, torch.dtype)):
            return x
        if isinstance(x, torch.Tensor):
            return x.cuda()
        fields = {name: move(getattr(x, name)) for name in x.__dataclass_fields__ if name != "plans"}
        return type(x)(**fields)

    return KVView(
        *map(move, (view.k, view.v)), bias=move(view.bias), rope=move(view.rope), blocks=move(view.blocks)
    )


@pytest.mark.parametrize("kind", ["plain", "int4", "rope", "bias", "blocks"])
def test_bf16_equals_the_reference(kind):
    torch.manual_seed(0)
    q = torch.randn(1, 150, 2, 128).bfloat16()
    view = views(kind)
    right, right_lse = expected(q.float(), [view])
    out, lse = attend(q.cuda(), [on_gpu(view)], backend="triton", return_lse=True)
    torch.testing.assert_close(out.float().cpu(), right, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.cpu(), right_lse, atol=2e-2, rtol=1e-2)
