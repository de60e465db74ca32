"""Norms, and what a draft head's first GEMM reads, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from layer_numbers import SIZES, close, cuts, made, norm64

from draftwing.ops.table import TorchOps

pytestmark = pytest.mark.usefixtures("poisoned")


def norm_roundings(ops: TorchOps) -> float:
    """Kernels of the CPU and torch there round norms twice."""
    return 1.05 if ops.name == "triton" else 2.1


@pytest.mark.further(ops="triton", size=576)
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(size: int, dtype: torch.dtype, ops: TorchOps) -> None:
    x, weight = made(ops, dtype, 7, size), made(ops, dtype, size, seed=1)
    x[1] *= 1e-3
    x[2] *= 100
    found = ops.rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype and ops.rms_norm(x[:0], weight, 1e-5).shape == (0, size)
    close(found, norm64(x, weight, 1e-5), ops, norm_roundings(ops))
    for rows in (1, 3):
        assert torch.equal(ops.rms_norm(x[2 : 2 + rows], weight, 1e-5), found[2 : 2 + rows])


def test_rms_norm_of_heads_within_wider_rows(dtype: torch.dtype, ops: TorchOps) -> None:
    qkv, weight = made(ops, dtype, 5, 7, 64), made(ops, dtype, 64, seed=1)
    for part in (qkv[:, :4], qkv[:, 4:6]):
        found = ops.rms_norm(part, weight, 1e-6)
        close(found, norm64(part, weight, 1e-6), ops, norm_roundings(ops))
        assert torch.equal(found[2:3, 1:2], ops.rms_norm(part[2:3, 1:2], weight, 1e-6))


def test_rms_norm_of_squares_beyond_the_range_of_float16(ops: TorchOps) -> None:
    x = torch.full((1, 100), 1000.0, dtype=torch.float16, device=ops.device)
    assert torch.equal(ops.rms_norm(x, torch.ones_like(x[0]), 1e-6), torch.ones_like(x))


def test_rms_norm_rounds_as_its_device_does(ops: TorchOps) -> None:
    """On a CPU before the weight and after it, in C as in torch."""
    if ops.name != "cpu":
        pytest.skip("others round once, or are what is compared with")
    x, weight = made(ops, torch.bfloat16, 300, 576) * 3, made(ops, torch.bfloat16, 576, seed=1)
    unit = norm64(x, torch.ones_like(weight), 1e-2).bfloat16()
    # The same but where float32 and float64 fall to two sides of a tie.
    assert (ops.rms_norm(x, weight, 1e-2) != unit * weight).float().mean() < 1e-3


@pytest.mark.further(ops="triton", size=576)
@pytest.mark.parametrize("size", SIZES)
def test_layer_norm(size: int, dtype: torch.dtype, ops: TorchOps) -> None:
    x, weight = made(ops, dtype, 7, size) + 2, made(ops, dtype, size, seed=1)
    x[2] *= 100
    assert ops.layer_norm(x[:0], weight, 1e-5).shape == (0, size)
    wide = weight.float()  # beside bfloat16
    close(ops.layer_norm(x, wide, 1e-5, wide), F.layer_norm(x.double(), (size,), wide.double(), wide.double(), 1e-5),
          ops, floor=1.0)  # fmt: skip
    for bias in (None, made(ops, dtype, size, seed=2)):
        found, exact = ops.layer_norm(x, weight, 1e-5, bias), None if bias is None else bias.double()
        assert found.dtype == dtype
        close(found, F.layer_norm(x.double(), (size,), weight.double(), exact, 1e-5), ops, floor=1.0)
        for rows in (1, 3):
            assert torch.equal(ops.layer_norm(x[2 : 2 + rows], weight, 1e-5, bias), found[2 : 2 + rows])


@pytest.mark.further(ops="triton", size=576)
@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm(size: int, dtype: torch.dtype, ops: TorchOps) -> None:
    wide = made(ops, dtype, 5, 2 * size)
    x, delta, weight = wide[:, :size], made(ops, dtype, 5, size, seed=1), made(ops, dtype, size, seed=2)
    before = wide.clone()
    total, found = ops.add_rms_norm(x, delta, weight, 1e-5)
    if cuts(ops):
        close(total, x.double() + delta.double(), ops)
    else:
        assert torch.equal(total, x + delta)
    close(found, norm64(total, weight, 1e-5), ops, norm_roundings(ops))
    assert torch.equal(wide, before) and ops.add_rms_norm(x[:0], x[:0], weight, 1e-5)[1].shape == (0, size)
    for row in range(2, 4):
        alone = ops.add_rms_norm(x[row : row + 1], delta[row : row + 1], weight, 1e-5)
        assert torch.equal(alone[0][0], total[row]) and torch.equal(alone[1][0], found[row])
    if cuts(ops):
        return
    for scale in (0.22, 0.21875):  # the second is a bfloat16
        scaled = ops.add_scaled(delta, None, scale)
        for one, other in zip(
            ops.add_rms_norm(x, delta, weight, 1e-5, scale), ops.add_rms_norm(x, scaled, weight, 1e-5), strict=True
        ):
            assert torch.equal(one, other)


@pytest.mark.parametrize("size", [104, 576])
def test_norms_with_weights_in_float32(size: int, dtype: torch.dtype, ops: TorchOps) -> None:
    """Rounded once, at the end."""
    x, weight = made(ops, dtype, 5, size), made(ops, torch.float32, size, seed=1) + 1
    found = ops.rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    close(found, norm64(x, weight, 1e-5), ops, 1.1)
    assert torch.equal(ops.rms_norm(x[3:4], weight, 1e-5), found[3:4])
    total, normed = ops.add_rms_norm(x, x, weight, 1e-5)
    assert torch.equal(normed, ops.rms_norm(total, weight, 1e-5))


def test_what_is_not_finite_stays_so(dtype: torch.dtype, ops: TorchOps) -> None:
    """A broken model must show as such."""
    x = torch.zeros(3, 32, dtype=dtype, device=ops.device)
    x[0, 3], x[1, 3] = torch.nan, torch.inf
    norm = ops.rms_norm(x, torch.ones_like(x[0]), 1e-5)
    assert norm[0].isnan().all() and norm[1, 3].isnan() and norm[2].eq(0).all()


@pytest.mark.parametrize("size", [33, 104, 576])  # of the last two rows begin at multiples of 16 bytes
@pytest.mark.covering("ops")
def test_fuse_inputs(size: int, dtype: torch.dtype, ops: TorchOps) -> None:
    """With norms and without; the feature first, and no token at position 0; of rows that were looked up."""
    table, wide = made(ops, dtype, 11, size), made(ops, dtype, 6, 3 * size, seed=1)
    feature, norms = wide[:, size : 2 * size], (made(ops, dtype, size, seed=2), made(ops, dtype, size, seed=3))
    ids, positions = torch.tensor([[3, 0, 10, 3, 7, 1], [5, 0, 1, 0, 2, 9]], device=ops.device)
    assert torch.equal(ops.fuse_inputs(ids, table, feature), torch.cat((table[ids], feature), -1))
    found = ops.fuse_inputs(ids, table, feature, norms, 1e-5)
    token, other = norm64(table[ids], norms[0], 1e-5), norm64(feature, norms[1], 1e-5)
    close(found, torch.cat((token, other), -1), ops, norm_roundings(ops))
    # As the separate norms give it, bit for bit; so training and serving differ by the norm's own rounding only. On a
    # GPU rows that begin at no multiples of 16 bytes may be summed in another order.
    if ops.device.type == "cpu" or size % 8 == 0:
        assert torch.equal(found[:, :size], ops.rms_norm(table[ids], norms[0], 1e-5))
        assert torch.equal(found[:, size:], ops.rms_norm(feature, norms[1], 1e-5))
    assert torch.equal(ops.fuse_inputs(ids[2:3], table, feature[2:3], norms, 1e-5), found[2:3])
    token[positions == 0] = 0
    turned = ops.fuse_inputs(ids, table, feature, norms, 1e-5, positions, feature_first=True)
    close(turned, torch.cat((other, token), -1), ops, norm_roundings(ops))
    for rows in (0, 1, 4, 6):
        here, positioned = ids[:rows], positions[:rows]
        for more in ((), (norms, 1e-5), (norms, 1e-5, positioned, True)):
            expected = ops.fuse_inputs(here, table, feature[:rows], *more)
            assert torch.equal(ops.fuse_inputs(None, table[here], feature[:rows], *more), expected)
            assert expected.shape == (rows, 2 * size)
