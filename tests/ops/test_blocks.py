"""Weights in quantised blocks, against the `gguf` package's dequantisation and products in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from block_ops import HALVES, blocks
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf import quants as reference
from torch import Tensor

from draftwing.ops import make_ops
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.cpu.ops import CpuOps
from draftwing.ops.types import BlockRows

pytestmark = pytest.mark.skipif(load_extension() is None, reason="the C extension was not built")

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    made = make_ops(torch.device("cpu"))
    assert isinstance(made, CpuOps)
    return made


def dequantized(part: BlockRows) -> npt.NDArray[np.float32]:
    return reference.dequantize(part.data.numpy(), GGMLQuantizationType[part.kind])


def rounded(x: Tensor) -> npt.NDArray[np.float64]:
    """Rows as the kernel rounds them, to 127 steps of the largest of each 32."""
    blocks = x.float().numpy().reshape(x.shape[0], -1, 32)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    whole = np.rint(blocks * np.divide(np.float32(1), scale, where=scale > 0, out=np.zeros_like(scale)))
    return (whole.astype(np.float64) * scale).reshape(x.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(16, 256), (100, 768), (1, 512)])
def test_rows_are_those_of_the_file(ops: CpuOps, kind: str, rows: int, columns: int) -> None:
    part = blocks(kind, rows, columns)
    gemm = ops.block_gemm([part], torch.float32)
    expected = dequantized(part)
    assert np.array_equal(gemm.dense().numpy(), expected)
    ids = torch.tensor([[rows - 1, 0], [rows // 2, rows - 1]])
    assert np.array_equal(gemm.rows(ids).numpy(), expected[ids.numpy()])
    reader, some = ops.row_reader(part, torch.float32), torch.arange(37) * 7 % rows  # more than are read at a time
    assert reader is not None
    for count in (0, 1, 16, 37):
        assert np.array_equal(reader(some[:count]).numpy(), expected[some[:count].numpy()])


@pytest.mark.parametrize("kind", KINDS)
def test_products(ops: CpuOps, kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    part = blocks(kind, 83, 512, seed=2)
    x = torch.randn(70, 512, generator=generator) * torch.linspace(0.001, 30, 70)[:, None]
    x[3], x[5, :64] = 0, 0
    bias, residual = torch.randn(83, generator=generator), torch.randn(70, 83, generator=generator)
    gemm, weight = ops.block_gemm([part], torch.float32), dequantized(part).astype(np.float64)
    exact = rounded(x) @ weight.T
    terms = np.abs(rounded(x)) @ np.abs(weight).T  # what a sum in float32 may be off by is a share of these
    found = gemm.linear(x, None, None).numpy()
    assert (np.abs(found - exact) <= 4e-6 * terms).all() and not found[3].any()
    more = gemm.linear(x, bias, residual).numpy()
    assert (np.abs(more - (exact + bias.numpy() + residual.numpy())) <= 4e-6 * terms + 1e-5).all()
    # Rounding rows to 8 bits costs under a percent of a result's size.
    unrounded = x.double().numpy() @ weight.T
    size = np.linalg.norm(x.double().numpy(), axis=1)[:, None] * np.linalg.norm(weight, axis=1)
    assert (np.abs(found - unrounded) <= 0.02 * size + 1e-12).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_numbers_fit(ops: CpuOps, kind: str) -> None:
    """All bits of the weight and of the row set, in every way: sums of pairs stay within what instructions hold."""
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    for fill in (0x00, 0xFF, 0x7F, 0x80):
        data = np.full((16, 512 // values, size), fill, np.uint8)
        for at in HALVES.get(kind, (0, 2)):
            data[:, :, at : at + 2] = np.asarray([0.5], np.float16).view(np.uint8)
        if kind == "MXFP4":
            data[:, :, 0] = 127
        part = BlockRows(kind, torch.from_numpy(data.reshape(16, -1)), 512)
        for sign in (1, -1):
            x = torch.full((2, 512), 127.0 * sign)
            x[1, ::2] *= -1
            exact = x.double().numpy() @ dequantized(part).astype(np.float64).T
            found = ops.block_gemm([part], torch.float32).linear(x, None, None).numpy()
            np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_among_any_number_and_any_threads(ops: CpuOps, dtype: torch.dtype) -> None:
    kinds = (("Q4_1", 16), ("Q6_K", 16), ("Q4_K", 16), ("MXFP4", 16), ("Q8_0", 37))
    parts = [blocks(kind, outputs, 256, seed) for seed, (kind, outputs) in enumerate(kinds)]
    gemm, before = ops.block_gemm(parts, dtype), torch.get_num_threads()
    x = torch.randn(101, 256, generator=torch.Generator().manual_seed(4)).to(dtype)
    residual = torch.randn(101, 101, generator=torch.Generator().manual_seed(5)).to(dtype)
    whole = gemm.linear(x, None, residual)
    weight = np.concatenate([dequantized(part) for part in parts]).astype(np.float64)
    exact, terms = rounded(x) @ weight.T + residual.double().numpy(), np.abs(rounded(x)) @ np.abs(weight).T
    unit = 2**-8 if dtype == torch.bfloat16 else 0
    assert (np.abs(whole.double().numpy() - exact) <= unit * np.abs(exact) + 4e-6 * terms + 1e-5).all()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            for rows in (1, 2, 3, 4, 5, 6, 7, 8, 31, 32, 33, 64, 101):
                found = torch.cat(
                    [
                        gemm.linear(*pair)
                        for pair in ((a, None, b) for a, b in zip(x.split(rows), residual.split(rows), strict=True))
                    ]
                )
                assert torch.equal(found, whole)
    finally:
        torch.set_num_threads(before)


def test_parts_that_threads_cannot_share(ops: CpuOps) -> None:
    """The first part ends within 16 outputs."""
    parts = [blocks("Q5_1", 24, 64, 1), blocks("Q4_0", 8, 64, 2), blocks("Q5_0", 8, 64, 3)]
    gemm, x = ops.block_gemm(parts, torch.float32), torch.randn(40, 64, generator=torch.Generator().manual_seed(4))
    each = [ops.block_gemm([part], torch.float32).linear(x, None, None) for part in parts]
    assert torch.equal(gemm.linear(x, None, None), torch.cat(each, 1))
    assert torch.equal(gemm.dense(), torch.cat([ops.block_gemm([part], torch.float32).dense() for part in parts]))


@pytest.mark.parametrize("outputs", [1, 37, 38, 48, 60, 101])
def test_the_last_outputs_alone(ops: CpuOps, outputs: int) -> None:
    """Of parts of several types; some more where they do not begin with a panel."""
    parts = [blocks("Q4_1", 48, 256, 1), blocks("Q6_K", 16, 256, 2), blocks("Q8_0", 37, 256, 3)]
    x, bias = torch.randn(40, 256, generator=torch.Generator().manual_seed(4)), torch.arange(101.0)
    weight = np.concatenate([dequantized(part) for part in parts])[-outputs:].astype(np.float64)
    whole = ops.block_gemm(parts, torch.float32)
    gemm = whole.last(outputs)
    assert outputs <= gemm.outputs < outputs + 16
    found = gemm.linear(x, bias[-gemm.outputs :], None)
    assert torch.equal(found, whole.linear(x, bias, None)[:, -gemm.outputs :])
    exact, terms = rounded(x) @ weight.T + bias[-outputs:].numpy(), np.abs(rounded(x)) @ np.abs(weight).T
    assert (np.abs(found[:, -outputs:].numpy() - exact) <= 4e-6 * terms + 1e-5).all()
    assert np.array_equal(gemm.dense()[-outputs:].numpy(), weight.astype(np.float32))


def test_mxfp4_has_the_bits_of_its_values_in_other_blocks(ops: CpuOps) -> None:
    """Twice its values are whole numbers of 5 bits; exponents of all sizes, and those that float16 has."""
    part = blocks("MXFP4", 48, 512)
    data = part.data.view(48, 16, 17)
    low, high = data[:, :, 1:] & 15, data[:, :, 1:] >> 4
    sizes = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12])
    whole = torch.cat((sizes, -sizes))[torch.cat((low, high), 2).int()] + 16
    scales = torch.exp2(data[:, :, :1].float() - 128).half().view(torch.uint8)
    fifth = (whole >> 4 << torch.arange(32)).sum(2, keepdim=True).int().view(torch.uint8)
    nibbles = (whole[:, :, :16] & 15 | (whole[:, :, 16:] & 15) << 4).to(torch.uint8)
    other = BlockRows("Q5_0", torch.cat((scales, fifth, nibbles), 2).flatten(1), 512)
    x = torch.randn(40, 512, generator=torch.Generator().manual_seed(6))
    assert np.array_equal(dequantized(part), dequantized(other))
    assert torch.equal(
        ops.block_gemm([part], torch.float32).linear(x, None, None),
        ops.block_gemm([other], torch.float32).linear(x, None, None),
    )
    data[:, :, 0] = torch.randint(0, 256, (48, 16), generator=torch.Generator().manual_seed(7))
    assert np.array_equal(ops.block_gemm([part], torch.float32).dense().numpy(), dequantized(part))


def test_what_is_no_number_is_not_lost(ops: CpuOps) -> None:
    gemm = ops.block_gemm([blocks("Q4_0", 32, 128)], torch.float32)
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = torch.ones(3, 128)
        x[1, 77] = bad
        found = gemm.linear(x, None, None)
        assert found[1].isnan().all() and found[[0, 2]].isfinite().all()


def test_the_smallest_numbers_count_as_zeros(ops: CpuOps) -> None:
    """Where 1 / scale would be infinite."""
    parts, residual = [blocks("Q6_K", 32, 256), blocks("Q4_0", 32, 256)], torch.ones(3, 64)
    gemm = ops.block_gemm(parts, torch.float32)
    x = torch.tensor([1e-45, 1e-39, 1e-36])[:, None] * torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    assert torch.equal(gemm.linear(x, None, residual), residual) and not gemm.linear(x[:2], None, None).any()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K"])
def test_weights_that_are_no_numbers_are_not_lost(ops: CpuOps, kind: str) -> None:
    weight = torch.ones(4, 512)
    weight[1, 300], weight[2, 0], weight[3, 511] = float("nan"), float("inf"), -float("inf")
    dense = ops.block_gemm([ops.quantize(weight, kind)], torch.float32).dense()
    assert dense[[1, 2, 3], [300, 0, 511]].isnan().all() and (dense[0] - 1).abs().max() < 0.01
    assert dense[1, :256].isfinite().all() and dense[2, 256:].isfinite().all()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_quantised_as_the_reference_does(ops: CpuOps, kind: str) -> None:
    weight = torch.randn(50, 512, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 50)[:, None]
    weight[4], weight[5, :32] = 0, 1
    found = ops.quantize(weight, kind)
    assert np.array_equal(found.data.numpy(), reference.quantize(weight.numpy(), GGMLQuantizationType[kind]))
    assert torch.equal(found.data, ops.quantize(weight.double(), kind).data)


def test_quantised_to_k_blocks(ops: CpuOps) -> None:
    """A 4-bit grid with 16 values over +-3 sigma has steps of 0.4, an error of 0.115 sigma; a fitted one less."""
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 2, 64)[:, None]
    found = ops.quantize(weight, "Q4_K")
    error = (torch.from_numpy(dequantized(found)) - weight).square().mean(1).sqrt() / weight.std(1)
    simple = reference.dequantize(ops.quantize(weight, "Q4_0").data.numpy(), GGMLQuantizationType.Q4_0)
    assert (
        error.max() < 0.085
        and error.mean() < 0.9 * ((torch.from_numpy(simple) - weight).square().mean(1).sqrt() / weight.std(1)).mean()
    )
    shifted = weight.abs() + 1  # all above 0, and all below: mins can only lower
    equal = torch.tensor([[0.0], [0.03], [7.0], [-2.0]]).expand(4, 256)
    for some in (shifted, -shifted, equal):
        off = torch.from_numpy(dequantized(ops.quantize(some, "Q4_K"))) - some
        assert (off.square().mean(1).sqrt() <= 0.1 * some.abs().amax(1)).all()
