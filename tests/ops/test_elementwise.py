"""Operations on elements, and on pairs of them that are turned, against float64."""

from __future__ import annotations

import pytest
import torch
from layer_numbers import close, cuts, made
from torch import Tensor

from draftwing.ops.table import TorchOps

pytestmark = pytest.mark.usefixtures("poisoned")


def edges(x: Tensor) -> Tensor:
    """With large numbers and both zeros."""
    x[0, :4] = torch.tensor([-1e4, 1e3, 0.0, -0.0], dtype=x.dtype)
    return x


@pytest.mark.further(ops="triton", size=576)
@pytest.mark.parametrize(("size", "count"), [(100, 2), (576, 3), (4096, 4)])
def test_sum_parts(size: int, count: int, dtype: torch.dtype, ops: TorchOps) -> None:
    parts, bias = made(ops, dtype, count, 3, size), made(ops, dtype, size, seed=1)
    wide = made(ops, dtype, 3, 2 * size, seed=2)
    for added in ((None, None), (bias, None), (None, wide[:, size:]), (bias, wide[:, size:])):
        found, total = ops.sum_parts(parts, *added), parts[0].float()
        for other in (*parts[1:], *(one for one in added if one is not None)):
            total = total + other.float()
        if cuts(ops):
            close(found, total.double(), ops)
        else:
            assert torch.equal(found, total.to(dtype))  # in this order


@pytest.mark.parametrize("ffn", [100, 1536])
def test_gated_products(ffn: int, dtype: torch.dtype, ops: TorchOps) -> None:
    x = edges(made(ops, dtype, 5, 2 * ffn) * 4)
    gate, up = x.double().chunk(2, -1)
    found, gelu = ops.silu_mul(x), ops.gelu_mul(x)
    close(found, gate * gate.sigmoid() * up, ops, 2.1)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    if ops.name == "torch" and dtype == torch.float32:  # whose approximation cancels
        torch.testing.assert_close(gelu.double(), expected, rtol=1e-6, atol=3e-6)
    else:
        close(gelu, expected, ops, 2.1)
    assert torch.equal(ops.silu_mul(x[3:4]), found[3:4]) and torch.equal(ops.gelu_mul(x[3:4]), gelu[3:4])
    assert ops.silu_mul(x[:0]).shape == (0, ffn)
    if ops.name == "cpu" and dtype == torch.bfloat16:  # rounded where torch rounds
        rounded = (gate * gate.sigmoid()).to(dtype) * up.to(dtype)
        assert (found != rounded)[1:].float().mean() < 2e-3


@pytest.mark.parametrize("size", [31, 576])
def test_activations_without_a_gate(size: int, dtype: torch.dtype, ops: TorchOps) -> None:
    x = made(ops, dtype, 5, size) * 3
    rise, fall, beta, eps = 0.8, 1.3, 0.5, -1e-6
    wide = x.double()
    falling = fall * (torch.expm1(wide.clamp(max=eps)) - wide) + beta * wide
    how = torch.tensor([rise, fall, beta, eps], device=ops.device)
    for found, alone, expected in (
        (ops.relu_squared(x), ops.relu_squared(x[3:4]), wide.clamp(min=0).square()),
        (ops.xielu(x, how), ops.xielu(x[3:4], how), torch.where(wide > 0, rise * wide.square() + beta * wide, falling)),
    ):
        close(found, expected, ops, floor=0.1)
        assert torch.equal(found[3:4], alone) and found.dtype == dtype
    x[1, 5] = torch.nan
    for found in (ops.relu_squared(x), ops.xielu(x, how)):
        assert found.isnan().nonzero().tolist() == [[1, 5]]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("size", [31, 576])
def test_gelu_without_a_gate(size: int, exact: bool, dtype: torch.dtype, ops: TorchOps) -> None:
    x = edges(made(ops, dtype, 5, size) * 3)
    found = ops.gelu(x, exact)
    expected = torch.nn.functional.gelu(x.double(), approximate="none" if exact else "tanh")
    if dtype == torch.float32:  # far below zero, where 1 and what is nearly 1 cancel in torch
        torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=3e-6 if ops.name != "cpu" else 1e-9)
    else:
        close(found, expected, ops, floor=0.1)
    assert found.dtype == dtype and ops.gelu(x[:0], exact).shape == (0, size)
    if size % 32 == 0 or (ops.name == "cpu" and dtype != torch.float16):  # torch rounds ends of memory otherwise
        assert torch.equal(ops.gelu(x[3:4], exact), found[3:4])
    x[1, 5] = torch.nan
    assert ops.gelu(x, exact).isnan().nonzero().tolist() == [[1, 5]]


@pytest.mark.parametrize("size", [31, 576])
def test_soft_cap(size: int, dtype: torch.dtype, ops: TorchOps) -> None:
    x = edges(made(ops, dtype, 5, size) * 20)
    expected = 30 * torch.tanh(x.double() / 30)
    alone = ops.soft_cap(x[3:4].clone(), 30.0)
    found = ops.soft_cap(x.clone(), 30.0)
    assert found.dtype == dtype and torch.equal(alone, found[3:4])
    if dtype == torch.float32:  # near 0 the sum of 30 and what is nearly -30
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=8e-6)
    else:
        close(found, expected, ops)


def test_what_is_not_finite_stays_so(dtype: torch.dtype, ops: TorchOps) -> None:
    """By which damaged weights are noticed."""
    x = made(ops, dtype, 2, 31)
    x[1, 5] = x[1, 30] = torch.nan
    assert ops.soft_cap(x, 30.0).isnan().nonzero().tolist() == [[1, 5], [1, 30]]
    x = torch.ones(3, 32, dtype=dtype, device=ops.device)
    x[0, 3], x[1, 3] = torch.nan, torch.inf
    gated = ops.silu_mul(x)
    assert gated[0, 3].isnan() and gated[1, 3].isinf() and gated.isfinite().sum() == gated.numel() - 2


@pytest.mark.parametrize("size", [10, 64])
def test_gates_and_memories_of_heads(size: int, dtype: torch.dtype, ops: TorchOps) -> None:
    """Against the formulas in float64. (`tests/reference/block_heads.py` has torch's own recurrent unit.)"""
    read, kept, state = (made(ops, dtype, 5, n * size, seed=n + i) * 3 for i, n in enumerate((3, 3, 1)))
    read[0, :3], read[1, :2] = torch.tensor([90.0, -90.0, 300.0]), torch.tensor([-300.0, 0.0])

    def near(found: Tensor, expected: Tensor) -> None:
        """Torch rounds each of five operations, and what comes before a steep place, too."""
        close(found, expected, ops, 8, floor=1)

    (r, z, n), (hr, hz, hn) = read.double().chunk(3, 1), kept.double().chunk(3, 1)
    stay = (z + hz).sigmoid()
    near(ops.gru(read, kept, state), (1 - stay) * (n + (r + hr).sigmoid() * hn).tanh() + stay * state.double())
    keep, fresh, out = read.double().chunk(3, 1)
    said, after = ops.recur(read, state)
    near(said, out.tanh())
    near(after, keep.sigmoid() * state.double() + (1 - keep.sigmoid()) * fresh.tanh())
    x = read[:, size:]
    near(ops.gate(kept[:, size:], x), kept[:, size:].double().sigmoid() * x.double())
    near(ops.gate(x, x), torch.nn.functional.silu(x.double()))
    near(ops.gate(kept[:, 1:2], x), kept[:, 1:2].double().sigmoid() * x.double())
    softplus = torch.nn.functional.softplus(30 * kept.double())  # far from 0, too
    near(ops.gate(30 * kept[:, size:], x, True), softplus[:, size:] * x.double())
    near(ops.gate(30 * kept[:, 1:2], x, True), softplus[:, 1:2] * x.double())


@pytest.mark.parametrize(("size", "groups", "taps", "rows"), [(576, 36, 2, 5), (60, 5, 3, 2), (64, 2, 1, 4)])
@pytest.mark.covering("ops")
def test_block_conv(size: int, groups: int, taps: int, rows: int, dtype: torch.dtype, ops: TorchOps) -> None:
    """Blocks are apart: nothing of one is seen in the next."""
    blocks = 3
    x, residual = made(ops, dtype, blocks * rows, size), made(ops, dtype, blocks * rows, size, seed=1)
    factors, base = made(ops, dtype, blocks * rows, 2 * taps * groups, seed=2), made(ops, dtype, 2 * taps, size, seed=3)
    base = base.view(2, taps, size)
    for side, more in ((0, None), (1, residual)):
        expected = torch.zeros(blocks * rows, size, dtype=torch.float64) if more is None else more.cpu().double()
        for row in range(blocks * rows):
            for tap in range(min(taps, row % rows + 1)):
                own = factors[row].view(2, taps, groups)[side, tap].cpu().double().repeat_interleave(size // groups)
                expected[row] += (base[side, tap].cpu().double() + own) * x[row - tap].cpu().double()
        found = ops.block_conv(x, factors, base, side, rows, more)
        close(found.cpu(), expected, ops, 2, floor=1)
        part = slice(rows, 2 * rows)
        alone = ops.block_conv(x[part], factors[part], base, side, rows, None if more is None else more[part])
        assert torch.equal(alone, found[part])
    assert ops.block_conv(x[:0], factors[:0], base, 0, rows).shape == (0, size)
    x[rows] = torch.nan
    assert ops.block_conv(x, factors, base, 0, rows).isnan().any(1).nonzero().flatten().tolist() == list(
        range(rows, rows + min(taps, rows))
    )


@pytest.mark.parametrize(("size", "scale"), [(576, 1.0), (31, 0.0255), (31, None)])
def test_add_scaled(size: int, scale: float | None, dtype: torch.dtype, ops: TorchOps) -> None:
    """scale None: one that is a tensor."""
    x, y, factor = made(ops, dtype, 5, 2 * size)[:, :size], made(ops, dtype, 5, size, seed=1), scale or 1.3
    given = torch.tensor([factor], dtype=dtype, device=ops.device) if scale is None else factor
    factor = float(given)
    found = ops.add_scaled(x, y, given)
    close(found, (x.double() + y.double()).to(dtype).double() * factor, ops)
    close(ops.add_scaled(x, None, given), x.double() * factor, ops)
    assert torch.equal(ops.add_scaled(x[3:4], y[3:4], given), found[3:4])
    assert ops.add_scaled(x[:0], y[:0], given).shape == (0, size)


@pytest.mark.parametrize(("heads", "size"), [(1, 8), (3, 72)])
def test_turn_heads(heads: int, size: int, dtype: torch.dtype, ops: TorchOps) -> None:
    """Of rows that are apart."""
    qkv = made(ops, dtype, 5, 3 * heads * size + 8)[:, :-8]
    angle = made(ops, torch.float32, 5, size // 2, seed=1) * 3
    q, k, v = (x.double() for x in qkv.unflatten(1, (3, heads, size)).unbind(1))
    c, s = angle.cos(), angle.sin()

    def turned(x: Tensor) -> Tensor:
        (one, two), cos, sin = x.chunk(2, 2), c.double()[:, None], s.double()[:, None]
        return torch.cat((one * cos - two * sin, two * cos + one * sin), 2)

    for rows in (slice(5), slice(3, 4), slice(0)):
        found = ops.turn_heads(qkv[rows].clone(), heads, c[rows].contiguous(), s[rows].contiguous())
        for x, expected in zip(found, (turned(q), turned(k), v), strict=True):
            close(x, expected[rows], ops, 1, floor=1)


@pytest.mark.parametrize(("heads", "factor"), [(1, 1.0), (3, 1.87)])
def test_concat_rope(heads: int, factor: float, dtype: torch.dtype, ops: TorchOps) -> None:
    """Of rows and heads that are apart; 24 pairs of elements are turned."""
    wide = made(ops, dtype, 5, heads, 100 + 48 + 7)
    plain, turned = wide[..., :100], wide[..., 100:148]
    angle = made(ops, torch.float32, 5, 1, 24, seed=1) * 3
    cos = torch.cat((angle.cos(), angle.cos()), 2).to(dtype)
    sin = torch.cat((-angle.sin(), angle.sin()), 2).to(dtype)
    found = ops.concat_rope(plain, turned, cos, sin, factor)
    (one, two), c, s = turned.double().chunk(2, 2), cos.double()[..., :24], sin.double()[..., 24:]
    close(found, torch.cat((plain.double(), one * c - two * s, two * c + one * s), 2) * factor, ops, 4, floor=1)
    for rows in (slice(3, 4), slice(0)):
        assert torch.equal(ops.concat_rope(plain[rows], turned[rows], cos[rows], sin[rows], factor), found[rows])
