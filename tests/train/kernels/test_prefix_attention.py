"""Attention of blocks by kernels against a softmax under a mask in float64, gradients by autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftwing.train.block_attention import Joined

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("mended_interpreter")]

pytest.importorskip("draftwing.train.kernels.prefix_attention")
HEADS, KV_HEADS, DIM, ROWS = 4, 2, 16, 3
ANCHORS = [[0, 0, 5, 64, 69], [1, 63, 64, 65, 70]]  # the first sees nothing; two are on both sides of a tile's border
LENGTH = 71


def tensors(dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    batch, queries = len(ANCHORS), len(ANCHORS[0]) * ROWS
    shapes = [(HEADS, queries), (KV_HEADS, LENGTH), (KV_HEADS, LENGTH), (KV_HEADS, queries), (KV_HEADS, queries)]
    # They lie as the layers give them: [B, T, heads, head_dim], seen from the side.
    return [torch.randn(batch, n, heads, DIM, generator=generator).to(device, dtype).transpose(1, 2).requires_grad_()
            for heads, n in shapes]  # fmt: skip


def reference(q: Tensor, text_k: Tensor, text_v: Tensor, k: Tensor, v: Tensor, limits: Tensor) -> Tensor:
    keys, values = (torch.cat(pair, 2).repeat_interleave(HEADS // KV_HEADS, 1)
                    for pair in ((text_k, k), (text_v, v)))  # fmt: skip
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
    grad = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    expected = reference(*exact, limits)
    expected.backward(grad.double())
    found = Joined.apply(*given, limits, ROWS)
    found.backward(grad)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(found.double(), expected, **close)
    for one, right in zip(given, exact, strict=True):
        assert one.grad is not None and right.grad is not None
        torch.testing.assert_close(one.grad.double(), right.grad, **close)
