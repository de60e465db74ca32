"""Attention of blocks by kernels against a softmax under a mask in float64, gradients by autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftwing.train.block_attention import ToTextAndBlocks

pytestmark = pytest.mark.slow

kernels = pytest.importorskip("draftwing.train.kernels.block_attention")
HEADS, KV_HEADS, DIM, ROWS = 4, 2, 16, 3
# The first sees nothing; two are on both sides of a tile's border, and so is the block of the queries 63 to 65.
ANCHORS = [[0, 0, 5, 64, *range(66, 71), *[70] * 13], [1, *range(50, 70), 70]]
LENGTH = 71


def tensors(dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """q, k and v of the blocks next to each other, and keys and values of the text, as the layers give them."""
    generator = torch.Generator().manual_seed(0)
    shapes = (len(ANCHORS[0]) * ROWS, HEADS + 2 * KV_HEADS), (LENGTH, 2 * KV_HEADS)
    return [torch.randn(len(ANCHORS), *shape, DIM, generator=generator).to(device, dtype).requires_grad_()
            for shape in shapes]  # fmt: skip


def reference(qkv: Tensor, text: Tensor, limits: Tensor) -> Tensor:
    q, k, v = qkv.transpose(1, 2).split([HEADS, KV_HEADS, KV_HEADS], 1)
    pairs = zip(text.transpose(1, 2).chunk(2, 1), (k, v), strict=True)
    keys, values = (torch.cat(pair, 2).repeat_interleave(HEADS // KV_HEADS, 1) for pair in pairs)
    block = torch.arange(q.shape[2]) // ROWS
    own = (block[:, None] == block[None, :]).expand(len(q), -1, -1)
    seen = torch.cat((torch.arange(LENGTH) < limits.cpu()[:, :, None], own), 2).unsqueeze(1).to(q.device)
    scores = (q @ keys.transpose(-1, -2) * DIM**-0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients(dtype: torch.dtype, device: torch.device) -> None:
    if dtype == torch.float32 and device.type == "cuda":
        pytest.skip("they are given half types alone (`takes_blocks`): there products in float32 are TF32")
    given = tensors(dtype, device)
    limits = torch.tensor(ANCHORS, dtype=torch.int32, device=device).repeat_interleave(ROWS, 1)
    exact = [x.detach().double().requires_grad_() for x in given]
    expected = reference(*exact, limits)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    expected.backward(grad.double())
    found = ToTextAndBlocks.apply(*given, kernels.reach(limits, LENGTH, ROWS))
    found.backward(grad)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(found.double(), expected, **close)
    for one, right in zip(given, exact, strict=True):
        assert one.grad is not None and right.grad is not None
        torch.testing.assert_close(one.grad.double(), right.grad, **close)
