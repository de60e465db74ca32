"""Weights in blocks: what is kept of a checkpoint, and what is multiplied."""

from __future__ import annotations

import logging

import gguf
import numpy as np
import pytest
import torch
from block_ops import BlockTorchOps
from gguf import GGMLQuantizationType as Type
from torch import Tensor, nn

from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import PackedBlocks, PackMode, ParamSlice
from draftwing.layers.linear_ops.blocks import BlockFormat, block_sizes, log_blocks
from draftwing.ops.gemm.stored import BlockRows

CPU = torch.device("cpu")
OPS = BlockTorchOps(CPU)
Q8 = BlockFormat("Q8_0", OPS)


def dense(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def stored(weight: Tensor, kind: str) -> BlockRows:
    """By another way than the product's."""
    return BlockRows(kind, torch.from_numpy(gguf.quantize(weight.numpy(), Type[kind])), weight.shape[1])


def rounded(weight: Tensor, kind: str) -> Tensor:
    return torch.from_numpy(gguf.dequantize(stored(weight, kind).data.numpy(), Type[kind]))


def filled(form: BlockFormat, *parts: Tensor | BlockRows, bias: bool = False) -> Linear:
    sizes = [len(part.data) if isinstance(part, BlockRows) else len(part) for part in parts]
    columns = parts[0].columns if isinstance(parts[0], BlockRows) else parts[0].shape[1]
    linear, start = Linear(columns, sum(sizes), bias, torch.float32, CPU, form), 0
    for part, size in zip(parts, sizes, strict=True):
        assert linear.op.keep(ParamSlice("a.weight", start, size), part)
        start += size
    return linear


def test_parts_of_several_kinds_are_one_weight() -> None:
    parts = [dense(6, 64, 0), dense(3, 64, 1), dense(4, 64, 2)]
    linear = filled(Q8, stored(parts[0], "Q4_1"), stored(parts[1], "Q8_0"), parts[2], bias=True)
    weight = torch.cat([rounded(parts[0], "Q4_1"), rounded(parts[1], "Q8_0"), rounded(parts[2], "Q8_0")])
    assert linear.bias is not None
    linear.bias.data.copy_(dense(1, 13)[0])
    x, residual, ids = dense(5, 64, 3), dense(5, 13, 4), torch.tensor([[0, 12], [7, 6]])
    before = linear(x, residual)
    linear.pack(OPS, PackMode(keep_weight=True))
    expected = x.double() @ weight.double().T + linear.bias.double() + residual.double()
    for found in (before, linear(x, residual)):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(linear.dense_weight(), weight)
    assert torch.equal(linear.rows(ids), weight[ids])
    again = linear.exact_logits(x[:2], ids)
    torch.testing.assert_close(again.double(), (expected - residual.double())[:2].gather(1, ids), rtol=1e-5, atol=1e-5)
    assert block_sizes(linear) == {"Q4_1": 6 * 40, "Q8_0": 7 * 68}


def test_rows_that_came_as_they_are_stay_views_until_they_are_packed() -> None:
    raw = stored(dense(4, 64), "Q8_0")
    linear = filled(Q8, raw)
    assert not list(linear.parameters()), "the parameter only named what was to come"
    assert block_sizes(linear) == {"Q8_0": raw.data.nbytes}
    op = linear.op
    assert op._parts[0].data.data_ptr() == raw.data.data_ptr()  # type: ignore[attr-defined]
    linear.pack(OPS)
    assert linear.op is not op and isinstance(linear.op, PackedBlocks)


def test_a_linear_is_gated_as_any_other() -> None:
    gate, up, x = dense(4, 32, 0), dense(4, 32, 1), dense(3, 32, 2)
    linear = filled(Q8, gate, up)
    linear.pack(OPS)
    expected = nn.functional.silu(x @ rounded(gate, "Q8_0").T) * (x @ rounded(up, "Q8_0").T)
    torch.testing.assert_close(linear.gated(x), expected, rtol=1e-5, atol=1e-5)


def test_a_type_without_a_kernel_is_quantised_again() -> None:
    raw = BlockRows("Q2_K", torch.from_numpy(np.random.default_rng(0).integers(0, 60, (3, 84), np.uint8)), 256)
    linear = filled(BlockFormat("Q4_0", OPS), raw)
    values = torch.from_numpy(gguf.dequantize(raw.data.numpy(), Type.Q2_K))
    assert block_sizes(linear) == {"Q8_0": 3 * 8 * 34}
    torch.testing.assert_close(linear.dense_weight(), values, rtol=0.01, atol=float(values.abs().max()) / 200)


@pytest.mark.parametrize(("kind", "columns", "expected"), [("Q4_0", 32, "Q4_0"), ("Q4_K", 96, "Q8_0")])
def test_the_kind_fits_the_columns(kind: str, columns: int, expected: str) -> None:
    assert set(block_sizes(filled(BlockFormat(kind, OPS), dense(2, columns)))) == {expected}
    assert BlockFormat("Q4_K", OPS).kind_for(512) == "Q4_K"


def test_columns_that_are_no_whole_blocks_stay_dense(caplog: pytest.LogCaptureFixture) -> None:
    linear = Linear(48, 3, False, torch.float32, CPU, Q8)
    weight = dense(3, 48)
    assert not linear.op.keep(ParamSlice("a.weight", 0, 3), weight)
    linear.weight.data.copy_(weight)
    with caplog.at_level(logging.WARNING):
        log_blocks(nn.Sequential(linear))
    assert caplog.messages == ["dequantised, for their columns are no multiple of a block of 32: 0 (48)"]
    linear.pack(OPS)
    torch.testing.assert_close(linear(weight), weight @ weight.T, rtol=1e-5, atol=1e-5)
    assert not block_sizes(linear)


@pytest.mark.parametrize(("dtype", "columns", "in_blocks"), [
    (torch.bfloat16, 64, True), (torch.float32, 64, False), (torch.bfloat16, 48, False),
])  # fmt: skip
def test_a_draft_heads_dense_weight_is_multiplied_in_blocks(dtype: torch.dtype, columns: int, in_blocks: bool) -> None:
    linear, weight, x = Linear(columns, 5, False, dtype, CPU), dense(5, columns).to(dtype), dense(20, columns, 1)
    linear.weight.data.copy_(weight)
    linear.pack(OPS, PackMode(draft_8bit=True))
    assert isinstance(linear.op, PackedBlocks) == in_blocks
    assert not (in_blocks and list(linear.parameters())), "the weight has one copy"
    torch.testing.assert_close(linear(x.to(dtype)).float(), x @ weight.float().T, rtol=0.02, atol=0.2)
