"""The kernels of a chain's own rows against a softmax over all that a row sees, in float64, by autograd."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.slow

kernels = pytest.importorskip("draftwing.train.kernels.chain_attention")

# Triton's interpreter cuts bfloat16 off instead of rounding it.
CUTS = os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6 if CUTS else 2**-7}


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
