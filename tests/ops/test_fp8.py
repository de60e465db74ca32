"""Weights in fp8 for activations in fp8: how they are packed and joined, products in torch against float64; and the
kernels of Triton that store activations so."""

from __future__ import annotations

import pytest
import torch
from delta_steps import DeltaSteps
from torch import Tensor

from draftwing.kv.pool import DeltaSpec
from draftwing.ops.fp8 import spec as fp8_blocks
from draftwing.ops.fp8.spec import Fp8Rows, quantised
from draftwing.ops.gemm.spec import TorchFp8Gemm
from draftwing.ops.gemm.stored import QuantizedRows
from draftwing.ops.table import TorchOps

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def rows_of(rows: int, columns: int, tall: int = 128, wide: int = 128, seed: int = 0) -> QuantizedRows:
    made = torch.Generator().manual_seed(seed)
    codes = (torch.randn(rows, columns, generator=made) * 64).to(E4M3)
    scales = torch.rand(-(-rows // tall), -(-columns // wide), generator=made) / 64 / columns**0.5
    return QuantizedRows(codes, 8, scales, None, tall, wide, None, True)


def as_in_transformers(x: Tensor, rows: QuantizedRows) -> Tensor:
    """The arithmetic of transformers' fp8 linear in blocks of 128 x 128, in float64 but for what it rounds: each group
    of 128 activations is divided by its largest over 448, and each block's sum has both scales."""
    weight, out = rows.codes.double(), torch.zeros(len(x), len(rows.codes), dtype=torch.float64)
    for at in range(0, x.shape[1], 128):
        group = x[:, at : at + 128].float()
        scale = group.abs().amax(1, keepdim=True) / 448.0
        codes = torch.where(scale == 0, 0.0, group / scale).to(E4M3)
        of_rows = rows.scales[:, at // rows.wide].repeat_interleave(rows.tall)[: len(weight)]
        out += (codes.double() @ weight[:, at : at + 128].T) * scale.double() * of_rows.double()
    return out


def inputs(rows: int, columns: int) -> Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 3, columns)
    x[0, :128] = 0
    return x.to(BF16)


@pytest.mark.parametrize(("tall", "wide"), [(128, 128), (32, 128), (16, 256), (256, 128)])
def test_products_are_those_of_transformers(tall: int, wide: int) -> None:
    rows, x = rows_of(192, 512, tall, wide), inputs(5, 512)
    weight, right = fp8_blocks.pack(rows, "cpu"), as_in_transformers(inputs(5, 512), rows)
    assert fp8_blocks.unsupported_reason(rows, BF16) is None and (weight.rows, weight.columns) == (192, 512)
    gemm, residual, bias = TorchFp8Gemm(), torch.randn(5, 192).to(BF16), torch.randn(192).to(BF16)

    def close(found: Tensor, expected: Tensor) -> None:
        error = (found.double() - expected).abs()
        assert bool((error <= expected.abs() * 2.0**-8 + right.abs().amax() * 1e-6).all())

    close(gemm.linear(x, weight, None), right)
    close(gemm.linear(x, weight, bias, residual), right + bias.double() + residual.double())
    gate, up = right.chunk(2, 1)
    close(gemm.gated(x, weight, None), torch.nn.functional.silu(gate) * up)


def test_a_row_has_the_same_bits_among_any_number() -> None:
    weight, x = fp8_blocks.pack(rows_of(64, 384), "cpu"), inputs(70, 384)
    whole = TorchFp8Gemm().linear(x, weight, None)
    for part in (x[:1], x[:8], x[:65]):
        assert torch.equal(TorchFp8Gemm().linear(part, weight, None), whole[: len(part)])


def test_the_largest_value_of_a_group_becomes_the_largest_code() -> None:
    x = inputs(6, 256)
    codes, scales = fp8_blocks.quantised(x)
    assert codes.dtype == E4M3 and scales.dtype == torch.float32 and scales.shape == (6, 2)
    assert bool((codes.float().unflatten(1, (2, 128)).abs().amax(2)[1:] == 448).all())
    assert not codes[0, :128].float().any() and bool(scales.isfinite().all() and (scales > 0).all())
    values = codes.float() * scales.repeat_interleave(128, 1)
    assert bool(
        ((values - x.float()).abs() <= x.float().abs() / 16 + scales.repeat_interleave(128, 1) * 2.0**-10).all()
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(value: float) -> None:
    """All of its row, which a server says so; no other row."""
    weight, x = fp8_blocks.pack(rows_of(32, 256), "cpu"), inputs(3, 256)
    x[1, 200] = value
    found = TorchFp8Gemm().linear(x, weight, None).isfinite()
    assert found.all(1).tolist() == [True, False, True] and not found[1].any()


def test_parts_are_joined_and_taken_apart() -> None:
    parts = [rows_of(48, 256, 16, seed=1), rows_of(80, 256, 80, seed=2)]
    packed = [fp8_blocks.pack(part, "cpu") for part in parts]
    whole = fp8_blocks.join(packed)
    expected = torch.cat([part.dense(torch.float32) for part in parts])
    assert torch.equal(whole.dense(torch.float32), expected)
    assert torch.equal(whole.quantized().dense(torch.float32), expected)
    assert whole.nbytes == 128 * 256 + 8 * 2 * 4


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (rows_of(40, 128), "a shape of 40 x 128"),
        (rows_of(64, 192), "a shape of 64 x 192"),
        (rows_of(64, 128, tall=8), "groups of 8 x 128"),
        (rows_of(64, 256, wide=64), "groups of 128 x 64"),
        (rows_of(64, 128)._replace(codes=torch.zeros(64, 128, dtype=torch.int8)), "codes"),
    ],
)
def test_what_has_no_kernel(rows: QuantizedRows, reason: str) -> None:
    found = fp8_blocks.unsupported_reason(rows, BF16)
    assert found is not None and reason in found


# -- kernels that quantise --------------------------------------------------------------------------------------------

GPU = torch.cuda.is_available()
SIZES = [(1, 128), (5, 384), (17, 640), (9, 2048), *([(64, 5120), (300, 6144)] if GPU else [])]


def check(ops: TorchOps, found: Fp8Rows, plain: Tensor) -> None:
    """The same scales and codes; the interpreter cuts where a GPU rounds to e4m3."""
    (codes, scales), expected = found.plain(), quantised(plain)
    assert found.rows == len(plain) and torch.equal(scales, expected[1])
    same = codes.view(torch.uint8) == expected[0].view(torch.uint8)
    assert bool(same.all()) if GPU or ops.name != "triton" else float(same.float().mean()) > 0.9


def values(rows: int, columns: int, device: torch.device, seed: int) -> Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-2, 2, columns)
    x[-1, -128:] = 0
    return x.bfloat16().to(device)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.covering("ops")
def test_norms(rows: int, columns: int, wide: bool, ops: TorchOps) -> None:
    x, delta = values(rows, columns, ops.device, 1), values(rows, columns, ops.device, 2)
    weight = values(1, columns, ops.device, 3)[0].to(torch.float32 if wide else torch.bfloat16)
    total, plain = ops.add_rms_norm(x, delta, weight, 1e-6)
    same_total, found = ops.add_rms_norm_fp8(x, delta, weight, 1e-6)
    assert torch.equal(same_total, total) and torch.equal(found.x, plain)
    check(ops, found, plain)
    alone, plain = ops.rms_norm_fp8(x, weight, 1e-6), ops.rms_norm(x, weight, 1e-6)
    assert torch.equal(alone.x, plain)
    check(ops, alone, plain)


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_gates(rows: int, columns: int, ops: TorchOps) -> None:
    both = values(rows, 2 * columns, ops.device, 1)
    gate, x = both[:, :columns], values(rows, columns, ops.device, 2)
    check(ops, ops.gate_fp8(gate, x), ops.gate(gate, x))


@pytest.mark.parametrize("heads", [2, 6])
def test_delta_nets(heads: int, triton_ops: TorchOps) -> None:
    spec, found = DeltaSpec(2, heads, 16, 128, 4), []
    for fp8 in (False, True):
        generator = torch.Generator().manual_seed(3)
        made = DeltaSteps(
            triton_ops, spec, torch.bfloat16,
            lambda *shape: torch.randn(shape, generator=generator).bfloat16().to(triton_ops.device),  # noqa: B023
        )  # fmt: skip
        made.weights = made.weights._replace(fp8=fp8)
        batch = made.chunks((3, 5))
        found.append(made.run(batch, made.inputs(8)))
    plain, rows = found
    assert isinstance(rows, Fp8Rows)  # type: ignore[unreachable]
    check(triton_ops, rows, plain)  # type: ignore[unreachable]
