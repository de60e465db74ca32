"""The operations of layers, each implementation of this machine against float64."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from draftwing.ops import have_triton
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.cpu.ops import CpuOps
from draftwing.ops.torch.ops import TorchOps

SIZES = [100, 128, 576, 4096]
# Units of one rounding of the result. Triton's interpreter cuts bfloat16 off instead of rounding it.
UNIT = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
CUTS = os.environ.get("TRITON_INTERPRET") == "1"


def triton_ops(device: torch.device) -> TorchOps:
    if not have_triton():
        pytest.skip("there is no Triton")
    from draftwing.ops.triton.ops import TritonOps

    return TritonOps(device)


def cpu_ops(device: torch.device) -> TorchOps:
    if load_extension() is None or device.type != "cpu":
        pytest.skip("the C extension was not built, or this is a GPU")
    return CpuOps(device)


@pytest.fixture(params=[TorchOps, cpu_ops, triton_ops], ids=["torch", "cpu", "triton"])
def ops(request: pytest.FixtureRequest, device: torch.device) -> TorchOps:
    make: Callable[[torch.device], TorchOps] = request.param
    return make(device)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch, ops: TorchOps) -> Iterator[None]:
    """Outputs of kernels start as NaN, so that an element left unwritten shows."""
    empty, empty_like = torch.empty, torch.empty_like
    with monkeypatch.context() as patch:
        if ops.name != "torch":
            patch.setattr(torch, "empty", lambda *args, **kw: empty(*args, **kw).fill_(float("nan")))
            patch.setattr(torch, "empty_like", lambda x: empty_like(x).fill_(float("nan")))
        yield


def norm64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def close(found: Tensor, expected: Tensor, ops: TorchOps, roundings: float = 1.05) -> None:
    """roundings: units that the result may be off by; kernels of the CPU and torch there round norms twice."""
    unit = UNIT[found.dtype] * (2 if CUTS and ops.name == "triton" and found.dtype == torch.bfloat16 else 1)
    torch.testing.assert_close(found.double(), expected, rtol=roundings * unit, atol=roundings * unit * 1e-2)


def norm_roundings(ops: TorchOps) -> float:
    return 1.05 if ops.name == "triton" else 2.1


def made(ops: TorchOps, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(ops.device, dtype)


@pytest.mark.further(ops=triton_ops, size=[128, 576])
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(size: int, dtype: torch.dtype, ops: TorchOps) -> None:
    x, weight = made(ops, dtype, 7, size), made(ops, dtype, size, seed=1)
    x[1] *= 1e-3
    x[2] *= 100
    found = ops.rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
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


@pytest.mark.further(ops=triton_ops, size=[128, 576])
@pytest.mark.further(ops=triton_ops, count=2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [2, 4])
def test_sum_parts(size: int, count: int, dtype: torch.dtype, ops: TorchOps) -> None:
    generator = torch.Generator().manual_seed(size)
    parts = torch.randn(count, 3, size, generator=generator).to(ops.device, dtype)
    bias, wide = (torch.randn(*shape, generator=generator).to(ops.device, dtype) for shape in ((size,), (3, 2 * size)))
    for added in ((None, None), (bias, None), (None, wide[:, size:]), (bias, wide[:, size:])):
        found, total = ops.sum_parts(parts, *added), parts[0].float()
        for other in (*parts[1:], *(one for one in added if one is not None)):
            total = total + other.float()
        if CUTS and ops.name == "triton":
            close(found, total.double(), ops)
        else:
            assert torch.equal(found, total.to(dtype))  # in this order


@pytest.mark.further(ops=triton_ops, size=[128, 576])
@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm(size: int, dtype: torch.dtype, ops: TorchOps) -> None:
    wide = made(ops, dtype, 5, 2 * size)
    x, delta, weight = wide[:, :size], made(ops, dtype, 5, size, seed=1), made(ops, dtype, size, seed=2)
    before = wide.clone()
    total, found = ops.add_rms_norm(x, delta, weight, 1e-5)
    if CUTS and ops.name == "triton":
        close(total, x.double() + delta.double(), ops)
    else:
        assert torch.equal(total, x + delta)
    close(found, norm64(total, weight, 1e-5), ops, norm_roundings(ops))
    assert torch.equal(wide, before)
    for row in range(2, 4):
        alone = ops.add_rms_norm(x[row : row + 1], delta[row : row + 1], weight, 1e-5)
        assert torch.equal(alone[0][0], total[row]) and torch.equal(alone[1][0], found[row])


@pytest.mark.parametrize("ffn", [16, 100, 1536, 2048])
def test_silu_mul(ffn: int, dtype: torch.dtype, ops: TorchOps) -> None:
    x = made(ops, dtype, 5, 2 * ffn) * 4
    x[0, :4] = torch.tensor([-1e4, 1e3, 0.0, -0.0], dtype=dtype)
    found = ops.silu_mul(x)
    gate, up = x.double().chunk(2, -1)
    close(found, gate * gate.sigmoid() * up, ops, 2.1)
    assert torch.equal(ops.silu_mul(x[3:4]), found[3:4])
    if ops.name == "cpu" and dtype == torch.bfloat16:  # rounded where torch rounds
        rounded = (gate * gate.sigmoid()).to(dtype) * up.to(dtype)
        assert (found != rounded)[1:].float().mean() < 2e-3


@pytest.mark.parametrize("ffn", [16, 100, 1536])
def test_gelu_mul(ffn: int, dtype: torch.dtype, ops: TorchOps) -> None:
    x = made(ops, dtype, 5, 2 * ffn) * 4
    x[0, :4] = torch.tensor([-1e4, 1e3, 0.0, -0.0], dtype=dtype)
    found = ops.gelu_mul(x)
    gate, up = x.double().chunk(2, -1)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    if ops.name == "torch" and dtype == torch.float32:  # whose approximation cancels
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=3e-6)
    else:
        close(found, expected, ops, 2.1)
    assert torch.equal(ops.gelu_mul(x[3:4]), found[3:4])


@pytest.mark.parametrize("size", [31, 576])
def test_soft_cap(size: int, dtype: torch.dtype, ops: TorchOps) -> None:
    x = made(ops, dtype, 5, size) * 20
    x[0, :4] = torch.tensor([-1e4, 1e3, 0.0, -0.0], dtype=dtype)
    expected = 30 * torch.tanh(x.double() / 30)
    alone = ops.soft_cap(x[3:4].clone(), 30.0)
    found = ops.soft_cap(x.clone(), 30.0)
    assert found.dtype == dtype and torch.equal(alone, found[3:4])
    if dtype == torch.float32:  # near 0 the sum of 30 and what is nearly -30
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=8e-6)
    else:
        close(found, expected, ops)


def test_a_soft_cap_hides_no_nan(dtype: torch.dtype, ops: TorchOps) -> None:
    """By which damaged weights are noticed."""
    x = made(ops, dtype, 2, 31)
    x[1, 5] = x[1, 30] = torch.nan
    assert ops.soft_cap(x, 30.0).isnan().nonzero().tolist() == [[1, 5], [1, 30]]


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
    x[:, 16:] = 1.0
    gated = ops.silu_mul(x)
    assert gated[0, 3].isnan() and gated[1, 3].isinf() and gated.isfinite().sum() == gated.numel() - 2


@pytest.mark.parametrize("size", [104, 576])  # rows begin at multiples of 16 bytes
def test_fuse_inputs_with_norms(size: int, dtype: torch.dtype, ops: TorchOps) -> None:
    table, wide = made(ops, dtype, 11, size), made(ops, dtype, 6, 3 * size, seed=1)
    feature = wide[:, size : 2 * size]
    norms = made(ops, dtype, size, seed=2), made(ops, dtype, size, seed=3)
    ids = torch.tensor([3, 0, 10, 3, 7, 1], device=ops.device)
    found = ops.fuse_inputs(ids, table, feature, norms, 1e-5)
    expected = torch.cat((norm64(table[ids], norms[0], 1e-5), norm64(feature, norms[1], 1e-5)), -1)
    close(found, expected, ops, norm_roundings(ops))
    # As the separate norms give it, bit for bit; so training and serving differ by the norm's own rounding only.
    assert torch.equal(found[:, :size], ops.rms_norm(table[ids], norms[0], 1e-5))
    assert torch.equal(found[:, size:], ops.rms_norm(feature, norms[1], 1e-5))
    assert torch.equal(ops.fuse_inputs(ids[2:3], table, feature[2:3], norms, 1e-5), found[2:3])


def test_fuse_inputs_with_the_feature_first_and_no_token_at_position_0(dtype: torch.dtype, ops: TorchOps) -> None:
    table, feature = made(ops, dtype, 11, 100), made(ops, dtype, 4, 100, seed=1)
    norms = made(ops, dtype, 100, seed=2), made(ops, dtype, 100, seed=3)
    ids, positions = torch.tensor([3, 0, 10, 3], device=ops.device), torch.tensor([5, 0, 1, 0], device=ops.device)
    found = ops.fuse_inputs(ids, table, feature, norms, 1e-5, positions, feature_first=True)
    token = norm64(table[ids], norms[0], 1e-5)
    token[positions == 0] = 0
    close(found, torch.cat((norm64(feature, norms[1], 1e-5), token), -1), ops, norm_roundings(ops))


@pytest.mark.parametrize("size", [33, 100, 576])
def test_fuse_inputs_without_norms(size: int, dtype: torch.dtype, ops: TorchOps) -> None:
    table, wide = made(ops, dtype, 11, size), made(ops, dtype, 4, 2 * size, seed=1)
    ids, feature = torch.tensor([3, 0, 10, 3], device=ops.device), wide[:, size:]
    assert torch.equal(ops.fuse_inputs(ids, table, feature), torch.cat((table[ids], feature), -1))


def test_fuse_inputs_of_rows_that_were_looked_up(dtype: torch.dtype, ops: TorchOps) -> None:
    table, feature = made(ops, dtype, 11, 100), made(ops, dtype, 5, 100, seed=1)
    norms = made(ops, dtype, 100, seed=2), made(ops, dtype, 100, seed=3)
    ids, positions = torch.tensor([3, 0, 10, 3, 7], device=ops.device), torch.tensor([5, 0, 1, 0, 2], device=ops.device)
    for rows in (1, 4, 5):
        here, positioned = ids[:rows], positions[:rows]
        for more in ((), (norms, 1e-5), (norms, 1e-5, positioned, True)):
            expected = ops.fuse_inputs(here, table, feature[:rows], *more)
            assert torch.equal(ops.fuse_inputs(None, table[here], feature[:rows], *more), expected)


@pytest.mark.parametrize("size", [10, 64, 100])
def test_gates_and_memories_of_heads(size: int, dtype: torch.dtype, ops: TorchOps) -> None:
    """Against the formulas in float64. (`tests/reference/block_heads.py` has torch's own recurrent unit.)"""
    g = torch.Generator().manual_seed(size)
    read, kept, state = (torch.randn(5, n * size, generator=g).mul(3).to(ops.device, dtype) for n in (3, 3, 1))
    read[0, :3], read[1, :2] = torch.tensor([90.0, -90.0, 300.0]), torch.tensor([-300.0, 0.0])

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


def near(found: Tensor, expected: Tensor) -> None:
    """Torch rounds each of five operations, and what comes before a steep place, too."""
    unit = 8 * UNIT[found.dtype]
    torch.testing.assert_close(found.double().cpu(), expected.cpu(), rtol=unit, atol=unit)


def test_beside(dtype: torch.dtype, ops: TorchOps) -> None:
    g = torch.Generator().manual_seed(0)
    whole = torch.randn(4, 90, generator=g).to(ops.device, dtype)
    parts = whole[:, 5:38], whole[:, 40:41], whole[::1, 60:].contiguous()
    for some in (parts, parts[:2], parts[:1]):
        assert torch.equal(ops.concat_columns(*some), torch.cat(some, 1))


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_put_rows(rows: int, dtype: torch.dtype, ops: TorchOps) -> None:
    index = torch.randperm(50, generator=torch.Generator().manual_seed(rows))[:rows].to(ops.device)
    source, before = made(ops, dtype, rows, 2 * 6, seed=1)[:, :6], made(ops, dtype, 50, 6, seed=2)
    target = before.clone()
    ops.put_rows(target, index, source)
    at = {int(one): i for i, one in enumerate(index)}
    assert all(torch.equal(target[i], source[at[i]] if i in at else before[i]) for i in range(50))


@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 4)])
def test_take_rows(shape: tuple[int, ...], dtype: torch.dtype, ops: TorchOps) -> None:
    index = torch.tensor([6, 0, 0, 3], device=ops.device)
    for source in (made(ops, dtype, 7, *shape), made(ops, dtype, 14, *shape)[::2]):
        assert torch.equal(ops.take_rows(source, index), torch.stack([source[i] for i in (6, 0, 0, 3)]))
        assert torch.equal(ops.take_rows(source, index[::2]), torch.stack([source[i] for i in (6, 0)]))
    alone = made(ops, dtype, 1, 5, 4)[:, 2]  # contiguous, whatever its stride
    assert alone.is_contiguous() and alone.stride(0) == 20
    assert torch.equal(ops.take_rows(alone, torch.zeros_like(index)), alone.expand(4, 4))
    if ops.name == "cpu":
        for wrong in (-1, 7):
            with pytest.raises(IndexError, match=f"expected rows below 7, found {wrong}"):
                ops.take_rows(made(ops, dtype, 7, *shape), torch.tensor([2, wrong]))


@pytest.mark.parametrize("scale", [1.0, 0.0255, None])
@pytest.mark.parametrize("size", [31, 576])
def test_add_scaled(size: int, scale: float | None, dtype: torch.dtype, ops: TorchOps) -> None:
    """scale None: one that is a tensor."""
    x, y, factor = made(ops, dtype, 5, 2 * size)[:, :size], made(ops, dtype, 5, size, seed=1), scale or 1.3
    given = torch.tensor([factor], dtype=dtype, device=ops.device) if scale is None else factor
    factor = float(given)
    found = ops.add_scaled(x, y, given)
    close(found, (x.double() + y.double()).to(dtype).double() * factor, ops)
    close(ops.add_scaled(x, None, given), x.double() * factor, ops)
    assert torch.equal(ops.add_scaled(x[3:4], y[3:4], given), found[3:4])


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
    expected = torch.cat((plain.double(), one * c - two * s, two * c + one * s), 2) * factor
    unit = 4 * UNIT[dtype] * (2 if CUTS and ops.name == "triton" else 1)
    torch.testing.assert_close(found.double(), expected, rtol=unit, atol=unit)
    assert torch.equal(ops.concat_rope(plain[3:4], turned[3:4], cos[3:4], sin[3:4], factor), found[3:4])


@pytest.mark.parametrize("size", [40, 100, 2048])
def test_share_rows(size: int, dtype: torch.dtype, ops: TorchOps) -> None:
    whole = made(ops, dtype, 10, size)
    index = torch.tensor([0, 9, 4, 3, 7, 6, 4], device=ops.device)
    for begin, end in ((0, 4), (4, 7), (7, 10), (0, 10)):
        found = ops.share_rows(whole[begin:end], index, begin)
        there = ((index >= begin) & (index < end)).unsqueeze(1)
        assert torch.equal(found, torch.where(there, whole[index], torch.zeros_like(whole[index])))


@pytest.mark.further(ops=triton_ops, dtype=[torch.float16, torch.float32])
@pytest.mark.further(ops=triton_ops, size=40)
@pytest.mark.parametrize("size", [40, 1030])
def test_exact_logits(size: int, dtype: torch.dtype, ops: TorchOps) -> None:
    weight = made(ops, dtype, 90, size)
    generator = torch.Generator().manual_seed(2)
    for shape in ((3,), (2, 2)):
        hidden = made(ops, dtype, *shape, 2 * size, seed=1)[..., :size]
        ids = torch.randint(0, 90, (*shape, 8), generator=generator).to(ops.device)
        found = ops.exact_logits(hidden, weight, ids)
        assert found.dtype == torch.float32
        expected = (weight.double()[ids] * hidden.double().unsqueeze(-2)).sum(-1)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
        parts = [ops.share_logits(hidden, weight[begin : begin + 45].clone(), ids, begin) for begin in (0, 45)]
        assert torch.equal(parts[0] + parts[1], found)  # each is 0 but in one of them
        if len(shape) == 1:
            torch.testing.assert_close(ops.every_logit(hidden, weight).gather(1, ids), found, rtol=1e-5, atol=1e-4)
        if ops.name != "torch":  # a logit has the same bits among others
            alone = ops.exact_logits(hidden[-1:, ...].clone(), weight, ids[-1:, ..., 3:4].clone())
            assert torch.equal(alone, found[-1:, ..., 3:4])
            strided = hidden.transpose(0, -2).contiguous().transpose(0, -2)
            assert torch.equal(ops.exact_logits(strided, weight, ids), found)


def test_logits_of_a_few_clusters(dtype: torch.dtype, ops: TorchOps) -> None:
    generator = torch.Generator().manual_seed(4)
    scores = torch.stack([torch.randperm(37, generator=generator) for _ in range(3)])
    ordering = torch.randperm(37 * 5, generator=generator)
    ids = ops.cluster_tokens((scores / 8).to(ops.device, dtype), 4, ordering.to(ops.device)).cpu()
    best = np.argsort(-scores.numpy())[:, :4]
    expected = ordering.numpy().reshape(37, 5)[best].reshape(3, 20)
    assert np.array_equal(np.sort(ids.numpy()), np.sort(expected))
    if isinstance(ops, CpuOps) and dtype != torch.float16:  # of equals the lower one comes first; torch has no order
        tied = ops.cluster_tokens((scores // 4).to(dtype), 20, ordering)
        best = np.argsort(-(scores // 4).numpy(), kind="stable")[:, :20]
        assert np.array_equal(tied.numpy(), ordering.numpy().reshape(37, 5)[best].reshape(3, 100))
    found = torch.randn(3, 20, generator=generator).to(ops.device)
    logits = ops.spread_logits(found, ids.to(ops.device), 37 * 5, dtype).cpu()
    assert logits.dtype == dtype
    for row, some, values in zip(logits, ids.tolist(), found.cpu().to(dtype), strict=True):
        wanted = (values.min() - 1).repeat(37 * 5)
        wanted[some] = values
        assert torch.equal(row, wanted)


def test_no_rows(dtype: torch.dtype, ops: TorchOps) -> None:
    x, ids = made(ops, dtype, 0, 64), torch.zeros(0, dtype=torch.int64, device=ops.device)
    weight, table = made(ops, dtype, 64), made(ops, dtype, 3, 64)
    assert ops.rms_norm(x, weight, 1e-5).shape == (0, 64)
    assert ops.add_rms_norm(x, x, weight, 1e-5)[1].shape == (0, 64)
    assert ops.silu_mul(x).shape == (0, 32)
    assert ops.add_scaled(x, x).shape == (0, 64)
    assert ops.fuse_inputs(ids, table, x).shape == (0, 128)
    assert ops.concat_rope(*x.view(0, 2, 32).expand(2, -1, -1, -1), x[:, None, :32], x[:, None, :32]).shape == (
        0,
        2,
        64,
    )
    assert ops.take_rows(table, ids).shape == (0, 64)
    assert ops.exact_logits(x, table, ids.view(0, 1)).shape == (0, 1)
    assert ops.cluster_tokens(x, 2, torch.arange(128, device=ops.device)).shape == (0, 4)
    assert ops.spread_logits(x[:, :1].float(), ids.view(0, 1), 9, dtype).shape == (0, 9)
