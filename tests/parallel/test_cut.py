"""Runs of rows and columns of a stored tensor, of every kind of values."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf.quants import quantize
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.gguf_file import dequantized
from draftwing.ops.gemm.stored import BlockRows, MXRows, QuantizedRows
from draftwing.parallel.cut import Order, ordered

ROWS, COLUMNS = 96, 128
RUNS = {0: ((64, 32), (0, 16), (80, 16)), 1: ((96, 32), (0, 64))}


def test_what_is_in_order_needs_none() -> None:
    assert ordered(0, [(0, 3), (3, 5)], 8) is None
    assert ordered(0, [(0, 3), (3, 4)], 8) == Order(0, ((0, 7),), 8)
    assert ordered(1, [(4, 4), (0, 2), (2, 2)], 8) == Order(1, ((4, 4), (0, 4)), 8)


def groups(tall: int, wide: int, zeros: bool, by_column: bool = False) -> QuantizedRows:
    down, across = -(-ROWS // tall), -(-COLUMNS // wide)
    generator = torch.Generator().manual_seed(0)
    group_of = torch.randperm(COLUMNS, generator=generator) % across if by_column else None
    return QuantizedRows(
        torch.randint(-8, 8, (ROWS, COLUMNS), generator=generator, dtype=torch.int8), 4,
        torch.rand(down, across, generator=generator),
        torch.randint(-8, 8, (down, across), generator=generator, dtype=torch.int16) if zeros else None,
        tall, wide, group_of,
    )  # fmt: skip


def stored(kind: str) -> tuple[Tensor | BlockRows | MXRows | QuantizedRows, Tensor]:
    """A value, and what it is dense."""
    dense = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))
    if kind == "dense":
        return dense, dense
    if kind in ("Q8_0", "Q4_0"):
        raw = torch.from_numpy(quantize(dense.numpy(), gguf.GGMLQuantizationType[kind]))
        return BlockRows(kind, raw, COLUMNS), torch.from_numpy(dequantized(raw.numpy(), kind))
    if kind == "mxfp4":
        codes = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8)
        rows = MXRows(codes, torch.randint(120, 130, (ROWS, COLUMNS // 32), dtype=torch.uint8))
        return rows, rows.dense(torch.float32)
    value = {
        "fp8": groups(48, 64, False)._replace(codes=dense.to(torch.float8_e4m3fn)),
        "one scale": groups(ROWS, COLUMNS, False), "rows": groups(1, 32, True),
        "act order": groups(1, 32, True, by_column=True),
    }[kind]  # fmt: skip
    return value, value.dense(torch.float32)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", ["dense", "Q8_0", "Q4_0", "mxfp4", "fp8", "one scale", "rows", "act order"])
def test_runs_of_every_kind_of_values(kind: str, axis: int) -> None:
    value, dense = stored(kind)
    order = ordered(axis, RUNS[axis], (ROWS, COLUMNS)[axis])
    assert order is not None
    found = order.of("x", value)
    if isinstance(found, BlockRows):
        found = torch.from_numpy(dequantized(found.data.numpy(), found.kind))
    elif not isinstance(found, Tensor):
        found = found.dense(torch.float32)
    assert torch.equal(found, dense.index_select(axis, order.places()))
    with pytest.raises(CheckpointError, match=f"x: expected 7 in axis {axis}, found shape"):
        order._replace(whole=7).of("x", value)


def test_blocks_are_not_cut_in_two() -> None:
    with pytest.raises(CheckpointError, match="no whole number of blocks"):
        Order(1, ((16, 32),), COLUMNS).of("x", stored("Q8_0")[0])


def test_back_where_it_was() -> None:
    dense = stored("dense")[1]
    order = Order(0, ((48, 48), (0, 48)), ROWS)
    taken = order.of("x", dense)
    assert isinstance(taken, Tensor) and torch.equal(order.back(taken), dense) and not torch.equal(taken, dense)
