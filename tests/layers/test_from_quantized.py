"""Quantised matrices in blocks: codes that fit stay exactly what they are, others are rounded by a known amount."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import tiny_quantised as tiny
import torch
from gguf import GGMLQuantizationType as Type
from tiny_quantised import matrix, read

from draftwing.layers.linear_ops.blocks import becomes, to_blocks
from draftwing.ops import make_ops
from draftwing.ops.gemm.spec import GemmOps
from draftwing.ops.gemm.stored import BlockRows, MXRows
from draftwing.ops.table import TorchOps

OPS = make_ops(torch.device("cpu"))
pytestmark = pytest.mark.skipif(not OPS.block_kinds, reason="needs GEMMs of weights in blocks")

KEPT = {
    "compressed int4": "Q4_0", "compressed int4 channel": "Q4_0", "compressed int4 weight order": "Q4_0",
    "compressed int4 zeros": "Q4_1", "awq": "Q4_1", "gptq": "Q4_0", "gptq v2": "Q4_0", "gptq row": "Q4_0",
    "gptq zeros": "Q4_1", "gptq zeros v2": "Q4_1", "gptq 2": "Q4_1", "gptq 8": "Q8_0", "compressed int8 packed": "Q8_0",
    "compressed int8 plain": "Q8_0",
}  # fmt: skip


def values(blocks: BlockRows) -> np.ndarray:
    return gguf.dequantize(blocks.data.numpy(), Type[blocks.kind]).astype(np.float64)


@pytest.mark.parametrize("name", tiny.FORMATS)
def test_they_hold_what_was_written(name: str) -> None:
    config, write = tiny.FORMATS[name]
    weight = matrix(48, 512, seed=1)
    written = write(weight)
    rows = read(config, written.tensors)
    blocks = to_blocks(rows, OPS)
    off = values(blocks) - written.exact
    spread = written.exact.std()
    if name in KEPT:
        assert blocks.kind == KEPT[name] and becomes(rows, OPS) == f"kept, as {blocks.kind}"
        if blocks.kind == "Q4_1":  # the product of scale and zero is rounded to float16
            largest = float(rows.scales.abs().max())
            assert np.abs(off).max() < 2 * 15 * largest / 2**11
            assert np.sqrt((off**2).mean()) < 5e-4 * spread
        else:  # scales are rounded to float16, which those of float16 and most of bfloat16 are
            np.testing.assert_allclose(values(blocks), written.exact, rtol=2**-11, atol=0)
    else:
        assert blocks.kind == "Q8_0" and becomes(rows, OPS) == "quantised again, to Q8_0"
        assert np.sqrt((off**2).mean()) < 0.006 * spread
        assert (off != 0).any()
    # The loss compared with that of the checkpoint itself is small.
    before, after = ((found - weight).std() for found in (written.exact, values(blocks)))
    assert after < 1.06 * before + 0.006 * spread


@pytest.mark.parametrize(("exponent", "kept"), [(90, False), (103, False), (104, True), (143, True), (144, False)])
def test_powers_of_2_that_float16_does_not_have(exponent: int, kept: bool) -> None:
    codes = torch.randint(0, 256, (4, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    exponents = torch.full((4, 2), 120, dtype=torch.uint8)
    exponents[2, 1] = exponent
    rows = MXRows(codes, exponents).integers()
    # A value is doubled, to be an integer: its scale is 2^(exponent - 128).
    assert becomes(rows, OPS) == ("kept, as Q5_0" if kept else "quantised again, to Q8_0")
    if kept:
        np.testing.assert_array_equal(values(to_blocks(rows, OPS)), rows.dense(torch.float32).double().numpy())
    codes[2, 16:] = 0  # of zeros the scale says nothing, if it is not too large
    rows = MXRows(codes, exponents).integers()
    assert (becomes(rows, OPS) == "kept, as Q5_0") == (exponent < 144)
    np.testing.assert_array_equal(values(to_blocks(rows, OPS))[2, 32:], 0)


def test_parts_of_a_matrix_give_the_same_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    config, write = tiny.FORMATS["awq"]
    rows = read(config, write(matrix(48, 128)).tensors)
    whole = to_blocks(rows, OPS)
    monkeypatch.setattr("draftwing.layers.linear_ops.blocks._SLICE", 7 * 128)
    assert torch.equal(to_blocks(rows, OPS).data, whole.data)


def test_a_kind_without_a_kernel_is_not_taken() -> None:
    class Few(GemmOps):
        block_kinds = frozenset({"Q8_0"})

        def quantize(self, weight: torch.Tensor, kind: str) -> BlockRows:
            return OPS.quantize(weight, kind)

    few = TorchOps(gemms=Few())
    config, write = tiny.FORMATS["gptq"]
    written = write(matrix(48, 128))
    rows = read(config, written.tensors)
    blocks = to_blocks(rows, few)
    assert blocks.kind == "Q8_0" and becomes(rows, few) == "quantised again, to Q8_0"
    assert np.abs(values(blocks) - written.exact).max() < 0.01 * np.abs(written.exact).max()
