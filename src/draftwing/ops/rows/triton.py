"""Rows of a table that is cut among ranks, in Triton."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.rows.spec import RowOps
from draftwing.ops.triton.common import launch_options, start

_MOST_COLUMNS = 1024  # of a program


@triton.jit(do_not_specialize=["begin", "count"])
def _share_rows_kernel(
    out, source, source_stride, index, begin, count, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Grid (M, blocks of a row)."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < SIZE
    start(PDL)
    own = tl.load(index + row).to(tl.int64) - begin
    there = (own >= 0) & (own < count)
    value = tl.load(source + tl.where(there, own, 0) * source_stride + col, mask=mask & there, other=0.0)
    tl.store(out + row * SIZE + col, value, mask=mask)


def share_rows(source: Tensor, index: Tensor, begin: int) -> Tensor:
    """source [R, size], the rows [begin, begin + R) of a whole, index [M] int64 into the whole -> [M, size], 0 where
    the row is not in `source`."""
    (count, size), rows = source.shape, len(index)
    assert index.dim() == 1 and source.stride(1) == 1
    out = torch.empty(rows, size, dtype=source.dtype, device=source.device)
    if out.numel() == 0:
        return out
    block = min(triton.next_power_of_2(size), _MOST_COLUMNS)
    _share_rows_kernel[(rows, triton.cdiv(size, block))](
        out, source, source.stride(0), index.contiguous(), begin, count, SIZE=size, BLOCK=block, num_warps=4,
        **launch_options(source.device),
    )  # fmt: skip
    return out


class TritonRowOps(RowOps):
    share_rows = staticmethod(share_rows)
