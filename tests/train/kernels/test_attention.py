"""The kernels of a chain's own rows, and of texts and blocks, against a softmax over all that a row sees in float64,
gradients by autograd."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from draftwing.train.blocks import ToTextAndBlocks

pytestmark = pytest.mark.slow

kernels = pytest.importorskip("draftwing.train.kernels.attention")

# Triton's interpreter cuts bfloat16 off instead of rounding it.
CUTS = os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6 if CUTS else 2**-7}

# Of blocks.
HEADS, KV_HEADS, DIM, ROWS = 4, 2, 16, 3
# The first sees nothing; two are on both sides of a tile's border, and so is the block of the queries 63 to 65.
ANCHORS = [[0, 0, 5, 64, *range(66, 71), *[70] * 13], [1, *range(50, 70), 70]]
LENGTH = 71


def heads_of(q: Tensor, k: Tensor) -> Tensor:
    """k [..., kv_heads, T, head_dim] -> one for each head of q"""
    return k.repeat_interleave(q.shape[1] // k.shape[-3], -3)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("heads", "kv_heads", "length", "dim", "steps"), [(6, 2, 37, 64, 3), (2, 2, 5, 24, 1)])
def test_joint_attention_and_gradients(
    heads: int, kv_heads: int, length: int, dim: int, steps: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(heads)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    # as training has them: [B, T, heads, head_dim] seen as [B, heads, T, head_dim], within wider rows
    q = made(2, length, heads + 1, dim)[:, :, :heads].transpose(1, 2)
    k0, v0 = made(2, kv_heads, length, dim), made(2, kv_heads, length, dim)
    keys, values = made(steps, 2, kv_heads, length, dim), made(steps, 2, kv_heads, length, dim)
    grad = made(2, length, heads, dim).transpose(1, 2)

    exact = [x.double().requires_grad_() for x in (q, keys, values)]
    q64, k64, v64 = exact
    future = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
    causal = (q64 @ heads_of(q, k0.double()).transpose(-1, -2) * dim**-0.5).masked_fill(future, float("-inf"))
    own = (q64 * heads_of(q, k64)).sum(-1) * dim**-0.5  # [steps, B, heads, T]
    joint = torch.cat((causal, own.movedim(0, -1)), -1).logsumexp(-1)
    shares = (own - joint).exp()
    through = (causal - joint.unsqueeze(-1)).exp() @ heads_of(q, v0.double())
    expected = through + (shares.unsqueeze(-1) * heads_of(q, v64)).sum(0)
    to_q, to_keys, to_values = torch.autograd.grad((expected * grad.double()).sum(), exact, retain_graph=True)

    part = (causal.softmax(-1) @ heads_of(q, v0.double())).detach().to(dtype)
    part = part.transpose(1, 2).contiguous().transpose(1, 2)
    tolerance = TOLERANCE[dtype]
    close = dict(rtol=tolerance, atol=tolerance)
    out, lse = kernels.join_own(part, causal.logsumexp(-1).detach().float(), q, keys, values)
    assert out.dtype == dtype and out.stride() == part.stride()
    torch.testing.assert_close(out.double(), expected.detach(), **close)
    torch.testing.assert_close(lse.double(), joint.detach(), rtol=1e-5, atol=1e-5)

    # What the causal part gives of q's gradient: the rest is the own rows'.
    slopes = shares * ((grad.double() * heads_of(q, v64)).sum(-1) - (grad.double() * expected).sum(-1)) * dim**-0.5
    rest = (slopes.unsqueeze(-1) * heads_of(q, k64)).sum(0)
    found_q = (to_q - rest).detach().to(dtype)
    found = kernels.own_gradients(found_q, grad, out, lse, q, keys, values)
    close = dict(rtol=tolerance, atol=4 * tolerance)  # out was rounded
    for mine, want in zip((found_q, *found), (to_q, to_keys, to_values), strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), want, **close)


def test_no_number_of_sequences_is_too_large_for_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of many short texts: CUDA takes 65,535 blocks along the second and the third axis."""
    grids = {}
    for name in ("_join_kernel", "_slope_kernel", "_own_kernel"):

        class Kernel:
            def __getitem__(self, grid: tuple[int, ...], name: str = name) -> object:
                grids[name] = grid
                return lambda *args, **options: None

        monkeypatch.setattr(kernels, name, Kernel())
    q, lse = torch.zeros(20_000, 4, 3, 8), torch.zeros(20_000, 4, 3)
    own = torch.zeros(1, 20_000, 4, 3, 8)
    kernels.join_own(q, lse, q, own, own)
    kernels.own_gradients(q, q, q, lse, q, own, own)
    assert len(grids) == 3
    for name, (_, *others) in grids.items():
        assert max(others) <= 65_535, f"{name}: {grids[name]}"


def of_blocks(dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """q, k and v of the blocks next to each other, and keys and values of the text, as the layers give them."""
    generator = torch.Generator().manual_seed(0)
    shapes = (len(ANCHORS[0]) * ROWS, HEADS + 2 * KV_HEADS), (LENGTH, 2 * KV_HEADS)
    return [torch.randn(len(ANCHORS), *shape, DIM, generator=generator).to(device, dtype).requires_grad_()
            for shape in shapes]  # fmt: skip


def block_reference(qkv: Tensor, text: Tensor, limits: Tensor) -> Tensor:
    q, k, v = qkv.transpose(1, 2).split([HEADS, KV_HEADS, KV_HEADS], 1)
    pairs = zip(text.transpose(1, 2).chunk(2, 1), (k, v), strict=True)
    keys, values = (torch.cat(pair, 2).repeat_interleave(HEADS // KV_HEADS, 1) for pair in pairs)
    block = torch.arange(q.shape[2]) // ROWS
    own = (block[:, None] == block[None, :]).expand(len(q), -1, -1)
    seen = torch.cat((torch.arange(LENGTH) < limits.cpu()[:, :, None], own), 2).unsqueeze(1).to(q.device)
    scores = (q @ keys.transpose(-1, -2) * DIM**-0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_of_blocks(dtype: torch.dtype, device: torch.device) -> None:
    if dtype == torch.float32 and device.type == "cuda":
        pytest.skip("they are given half types alone (`takes_blocks`): there products in float32 are TF32")
    given = of_blocks(dtype, device)
    limits = torch.tensor(ANCHORS, dtype=torch.int32, device=device).repeat_interleave(ROWS, 1)
    exact = [x.detach().double().requires_grad_() for x in given]
    expected = block_reference(*exact, limits)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    expected.backward(grad.double())
    found = ToTextAndBlocks.apply(*given, kernels.reach(limits, LENGTH, ROWS))
    found.backward(grad)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(found.double(), expected, **close)
    for one, right in zip(given, exact, strict=True):
        assert one.grad is not None and right.grad is not None
        torch.testing.assert_close(one.grad.double(), right.grad, **close)
