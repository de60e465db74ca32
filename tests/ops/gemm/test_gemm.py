"""GEMMs without a GPU. In C against float64: of few rows, bit for bit oneDNN's; with weights in blocks, against the
`gguf` package's dequantisation. Memory for weights; packed groups, which are joined and cut as their rows are."""

from __future__ import annotations

import gc
import random
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
import torch
from block_ops import HALVES, blocks
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf import quants as reference
from torch import Tensor

from draftwing.layers.linear import Linear
from draftwing.ops import make_ops
from draftwing.ops.cpu.arena import Arena
from draftwing.ops.cpu.ops import CpuOps
from draftwing.ops.cpu.workers import Workers
from draftwing.ops.gemm import onednn
from draftwing.ops.gemm.contract import FEW_ROWS
from draftwing.ops.gemm.cpu import PackedGemm, summed_in_blocks
from draftwing.ops.gemm.groups import cut, join, pack, unpacked, unsupported_reason
from draftwing.ops.gemm.stored import BlockRows, QuantizedRows

CPU = torch.device("cpu")
OPS = make_ops(CPU)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.usefixtures("known_layout")
@pytest.mark.parametrize(("inputs", "outputs", "block"), [(64, 64, 64), (576, 192, 4096), (1184, 320, 192)])
def test_equals_float64(inputs: int, outputs: int, block: int) -> None:
    weight, bias = numbers(outputs, inputs, seed=1), numbers(outputs, seed=2)
    gemm = PackedGemm(onednn.pack(weight), block, Workers())
    for rows in range(1, 14):
        x, residual = numbers(rows, inputs, seed=3), numbers(rows, outputs, seed=rows)
        expected = x.double() @ weight.double().T
        # Half a unit of bfloat16, and what float32 sums are off by.
        tolerance = {"rtol": 2**-8, "atol": 1e-3}
        torch.testing.assert_close(gemm.linear(x, None, None).double(), expected, **tolerance)
        expected += bias.double() + residual.double()
        torch.testing.assert_close(gemm.linear(x, bias, residual).double(), expected, **tolerance)


@pytest.mark.usefixtures("known_layout")
def test_rows_may_be_views() -> None:
    weight, x = numbers(64, 96, seed=1), numbers(4, 128, seed=2)
    gemm = PackedGemm(onednn.pack(weight), 64, Workers())
    assert torch.equal(gemm.linear(x[:, 32:], None, None), gemm.linear(x[:, 32:].contiguous(), None, None))


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize("shape", [(64, 100), (96, 64), (50, 64)])
def test_other_layouts_are_left_to_onednn(shape: tuple[int, int]) -> None:
    assert not PackedGemm.takes(onednn.pack(torch.zeros(shape, dtype=torch.bfloat16)))
    assert not PackedGemm.takes(onednn.pack(torch.zeros(64, 64)))


@pytest.mark.usefixtures("in_bfloat16")
def test_a_wrong_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,728 inputs no oneDNN is known to sum blocks of 192."""
    threads = torch.get_num_threads()
    monkeypatch.setattr("draftwing.ops.gemm.cpu._BLOCKS", (192,))
    assert summed_in_blocks.__wrapped__(1728, 64, threads) == 0


@pytest.mark.usefixtures("in_bfloat16")
def test_own_gemms_are_used_where_the_sums_are_onednns() -> None:
    linear = Linear(576, 192, False, torch.bfloat16, CPU)
    linear.weight.data.copy_(numbers(192, 576, seed=1))
    linear.pack(OPS)
    own = linear.op.first_gemm
    if not isinstance(own, PackedGemm):
        pytest.skip("this oneDNN sums in another order")
    x = numbers(300, 576, seed=2)
    every = linear(x)  # by oneDNN
    assert torch.equal(torch.cat([own.linear(part, None) for part in x.split(FEW_ROWS)]), every)


KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")


def dequantized(part: BlockRows) -> npt.NDArray[np.float32]:
    return reference.dequantize(part.data.numpy(), GGMLQuantizationType[part.kind])


def rounded(x: Tensor) -> npt.NDArray[np.float64]:
    """Rows as the kernel rounds them, to 127 steps of the largest of each 32."""
    blocks = x.float().numpy().reshape(x.shape[0], -1, 32)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    whole = np.rint(blocks * np.divide(np.float32(1), scale, where=scale > 0, out=np.zeros_like(scale)))
    return (whole.astype(np.float64) * scale).reshape(x.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slower(rows=100)
@pytest.mark.parametrize(("rows", "columns"), [(100, 768), (1, 512)])
def test_rows_are_those_of_the_file(cpu_ops: CpuOps, kind: str, rows: int, columns: int) -> None:
    part = blocks(kind, rows, columns)
    gemm = cpu_ops.block_gemm([part], torch.float32)
    expected = dequantized(part)
    assert np.array_equal(gemm.dense().numpy(), expected)
    ids = torch.tensor([[rows - 1, 0], [rows // 2, rows - 1]])
    assert np.array_equal(gemm.rows(ids).numpy(), expected[ids.numpy()])
    reader, some = cpu_ops.row_reader(part, torch.float32), torch.arange(37) * 7 % rows  # more than are read at a time
    assert reader is not None
    for count in (0, 1, 16, 37):
        assert np.array_equal(reader(some[:count]).numpy(), expected[some[:count].numpy()])


@pytest.mark.parametrize("kind", KINDS)
def test_products(cpu_ops: CpuOps, kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    part = blocks(kind, 83, 512, seed=2)
    x = torch.randn(70, 512, generator=generator) * torch.linspace(0.001, 30, 70)[:, None]
    x[3], x[5, :64] = 0, 0
    bias, residual = torch.randn(83, generator=generator), torch.randn(70, 83, generator=generator)
    gemm, weight = cpu_ops.block_gemm([part], torch.float32), dequantized(part).astype(np.float64)
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
def test_the_largest_numbers_fit(cpu_ops: CpuOps, kind: str) -> None:
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
            found = cpu_ops.block_gemm([part], torch.float32).linear(x, None, None).numpy()
            np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_among_any_number_and_any_threads(cpu_ops: CpuOps, dtype: torch.dtype) -> None:
    kinds = (("Q4_1", 16), ("Q6_K", 16), ("Q4_K", 16), ("MXFP4", 16), ("Q8_0", 37))
    parts = [blocks(kind, outputs, 256, seed) for seed, (kind, outputs) in enumerate(kinds)]
    gemm, before = cpu_ops.block_gemm(parts, dtype), torch.get_num_threads()
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


def test_parts_that_threads_cannot_share(cpu_ops: CpuOps) -> None:
    """The first part ends within 16 outputs."""
    parts = [blocks("Q5_1", 24, 64, 1), blocks("Q4_0", 8, 64, 2), blocks("Q5_0", 8, 64, 3)]
    gemm, x = cpu_ops.block_gemm(parts, torch.float32), torch.randn(40, 64, generator=torch.Generator().manual_seed(4))
    each = [cpu_ops.block_gemm([part], torch.float32).linear(x, None, None) for part in parts]
    assert torch.equal(gemm.linear(x, None, None), torch.cat(each, 1))
    assert torch.equal(gemm.dense(), torch.cat([cpu_ops.block_gemm([part], torch.float32).dense() for part in parts]))


@pytest.mark.parametrize("outputs", [1, 37, 38, 48, 60, 101])
def test_the_last_outputs_alone(cpu_ops: CpuOps, outputs: int) -> None:
    """Of parts of several types; some more where they do not begin with a panel."""
    parts = [blocks("Q4_1", 48, 256, 1), blocks("Q6_K", 16, 256, 2), blocks("Q8_0", 37, 256, 3)]
    x, bias = torch.randn(40, 256, generator=torch.Generator().manual_seed(4)), torch.arange(101.0)
    weight = np.concatenate([dequantized(part) for part in parts])[-outputs:].astype(np.float64)
    whole = cpu_ops.block_gemm(parts, torch.float32)
    gemm = whole.last(outputs)
    assert outputs <= gemm.outputs < outputs + 16
    found = gemm.linear(x, bias[-gemm.outputs :], None)
    assert torch.equal(found, whole.linear(x, bias, None)[:, -gemm.outputs :])
    exact, terms = rounded(x) @ weight.T + bias[-outputs:].numpy(), np.abs(rounded(x)) @ np.abs(weight).T
    assert (np.abs(found[:, -outputs:].numpy() - exact) <= 4e-6 * terms + 1e-5).all()
    assert np.array_equal(gemm.dense()[-outputs:].numpy(), weight.astype(np.float32))


def test_mxfp4_has_the_bits_of_its_values_in_other_blocks(cpu_ops: CpuOps) -> None:
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
        cpu_ops.block_gemm([part], torch.float32).linear(x, None, None),
        cpu_ops.block_gemm([other], torch.float32).linear(x, None, None),
    )
    data[:, :, 0] = torch.randint(0, 256, (48, 16), generator=torch.Generator().manual_seed(7))
    assert np.array_equal(cpu_ops.block_gemm([part], torch.float32).dense().numpy(), dequantized(part))


def test_what_is_no_number_is_not_lost(cpu_ops: CpuOps) -> None:
    gemm = cpu_ops.block_gemm([blocks("Q4_0", 32, 128)], torch.float32)
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = torch.ones(3, 128)
        x[1, 77] = bad
        found = gemm.linear(x, None, None)
        assert found[1].isnan().all() and found[[0, 2]].isfinite().all()


def test_the_smallest_numbers_count_as_zeros(cpu_ops: CpuOps) -> None:
    """Where 1 / scale would be infinite."""
    parts, residual = [blocks("Q6_K", 32, 256), blocks("Q4_0", 32, 256)], torch.ones(3, 64)
    gemm = cpu_ops.block_gemm(parts, torch.float32)
    x = torch.tensor([1e-45, 1e-39, 1e-36])[:, None] * torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    assert torch.equal(gemm.linear(x, None, residual), residual) and not gemm.linear(x[:2], None, None).any()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K"])
def test_weights_that_are_no_numbers_are_not_lost(cpu_ops: CpuOps, kind: str) -> None:
    weight = torch.ones(4, 512)
    weight[1, 300], weight[2, 0], weight[3, 511] = float("nan"), float("inf"), -float("inf")
    dense = cpu_ops.block_gemm([cpu_ops.quantize(weight, kind)], torch.float32).dense()
    assert dense[[1, 2, 3], [300, 0, 511]].isnan().all() and (dense[0] - 1).abs().max() < 0.01
    assert dense[1, :256].isfinite().all() and dense[2, 256:].isfinite().all()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_quantised_as_the_reference_does(cpu_ops: CpuOps, kind: str) -> None:
    weight = torch.randn(50, 512, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 50)[:, None]
    weight[4], weight[5, :32] = 0, 1
    found = cpu_ops.quantize(weight, kind)
    assert np.array_equal(found.data.numpy(), reference.quantize(weight.numpy(), GGMLQuantizationType[kind]))
    assert torch.equal(found.data, cpu_ops.quantize(weight.double(), kind).data)


def test_quantised_to_k_blocks(cpu_ops: CpuOps) -> None:
    """A 4-bit grid with 16 values over +-3 sigma has steps of 0.4, an error of 0.115 sigma; a fitted one less."""
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 2, 64)[:, None]
    found = cpu_ops.quantize(weight, "Q4_K")
    error = (torch.from_numpy(dequantized(found)) - weight).square().mean(1).sqrt() / weight.std(1)
    simple = reference.dequantize(cpu_ops.quantize(weight, "Q4_0").data.numpy(), GGMLQuantizationType.Q4_0)
    assert (
        error.max() < 0.085
        and error.mean() < 0.9 * ((torch.from_numpy(simple) - weight).square().mean(1).sqrt() / weight.std(1)).mean()
    )
    shifted = weight.abs() + 1  # all above 0, and all below: mins can only lower
    equal = torch.tensor([[0.0], [0.03], [7.0], [-2.0]]).expand(4, 256)
    for some in (shifted, -shifted, equal):
        off = torch.from_numpy(dequantized(cpu_ops.quantize(some, "Q4_K"))) - some
        assert (off.square().mean(1).sqrt() <= 0.1 * some.abs().amax(1)).all()


@pytest.mark.slow
def test_pieces_do_not_overlap() -> None:
    rng, arena = random.Random(0), Arena()
    pieces = [arena.empty(rng.choice([0, 1, 7]), rng.randrange(1, 1 << rng.randrange(1, 22))) for _ in range(60)]
    pieces.append(arena.empty(65 << 20))  # more than one array has
    pieces.append(arena.empty(64))
    assert all(piece.data_ptr() % 64 == 0 for piece in pieces)
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    del arena
    gc.collect()
    assert all(bool((piece == number).all()) for number, piece in enumerate(pieces))


def test_arrays_are_mostly_pieces() -> None:
    """Also of pieces of which two do not fit into one array. An array counts as memory under a limit of addresses,
    though what nobody writes is never taken."""
    arena = Arena()
    for size in (15, 17, 33, 65):
        pieces = [piece for _ in range(8) for piece in (arena.empty(size << 20), arena.empty(1 << 10))]
        arrays = {piece.untyped_storage().data_ptr(): piece.untyped_storage().nbytes() for piece in pieces}
        assert sum(arrays.values()) < 1.3 * sum(piece.nbytes for piece in pieces) + (64 << 20), size


# -- packed groups ----------------------------------------------------------------------------------------------------

COLUMNS = 320  # of which the last group of 128, 192 or 96 columns has fewer
WIDTHS = (32, 64, 96, 128, 192, COLUMNS)


def rows_of(bits: int, wide: int, seed: int, zeros: bool = False) -> QuantizedRows:
    """16 random rows of integers."""
    made, most = torch.Generator().manual_seed(seed), 2 ** (bits - 1)
    codes = torch.randint(-most, most, (16, COLUMNS), generator=made).to(torch.int8)
    scales = (torch.rand(16, -(-COLUMNS // wide), generator=made) / 16 + 0.01).bfloat16()
    zero = torch.randint(-8, 8, scales.shape, generator=made).to(torch.int16) if zeros else None
    return QuantizedRows(codes, bits, scales, zero, 1, wide, None)


@pytest.mark.parametrize(("bits", "zeros"), [(4, True), (8, False)])
def test_groups_of_two_sizes_are_joined(bits: int, zeros: bool) -> None:
    """zeros: of the second part alone."""
    for one, other in product(WIDTHS, WIDTHS):
        parts = [rows_of(bits, one, 1), rows_of(bits, other, 2, zeros)]
        assert [unsupported_reason(part, torch.bfloat16) for part in parts] == [None, None]
        packed = [pack(part, torch.bfloat16, "cpu") for part in parts]
        for at in ((0, 1), (1, 0)):
            whole = join([packed[i] for i in at])
            assert whole is not None
            right = torch.cat([parts[i].dense(torch.bfloat16) for i in at])
            assert torch.equal(unpacked(whole), right), (one, other)


@pytest.mark.parametrize(("bits", "zeros"), [(4, True), (8, False)])
@pytest.mark.parametrize("wide", WIDTHS)
def test_a_part_is_what_it_was_in_the_whole(bits: int, zeros: bool, wide: int) -> None:
    """But where a tile or a group would be cut."""
    rows = [rows_of(bits, wide, seed, zeros) for seed in (1, 2, 3)]
    whole = join([pack(part, torch.bfloat16, "cpu") for part in rows])
    assert whole is not None
    for down in (range(48), range(16, 32)):
        for across in (range(COLUMNS), range(128), range(128, COLUMNS), range(192, 256)):
            part = cut(whole, down, across)
            group = 128 if wide == 128 else 64 if wide in (64, 192) else 32
            if wide < COLUMNS and (across.start % group or (across.stop % group and across.stop < COLUMNS)):
                assert part is None
                continue
            assert part is not None and (part.rows, part.columns) == (len(down), len(across))
            right = unpacked(whole)[down.start : down.stop, across.start : across.stop]
            assert torch.equal(unpacked(part), right), (down, across)
    assert cut(whole, range(8, 24), range(COLUMNS)) is None and cut(whole, range(16), range(32, 96)) is None
    other = whole._replace(order=torch.arange(COLUMNS - 1, -1, -1))
    assert cut(other, range(16), range(128)) is None and cut(other, range(16), range(COLUMNS)) is not None
