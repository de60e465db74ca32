"""What Triton kernels store of their results for products with activations in fp8 (`ops.fp8.spec.Fp8Rows`)."""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.fp8.spec import EIGHT, WIDE, Fp8Rows

Out = TypeVar("Out", Tensor, Fp8Rows)  # what a launch stores and returns


@triton.jit
def store_fp8(codes, scales, value, row, group, there, padded):
    """value [N, 128] float32 in the values of bfloat16, row, group, there [N]: 128 columns of a row each -> as
    `quantised` and `packed_rows` of `ops.fp8.spec` make them, of `padded` rows. Bits are those of `quantise_fp8`."""
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(value), 1), 1e-10), 448.0)
    code = tl.div_rn(value, tl.broadcast_to(scale[:, None], value.shape)).to(codes.dtype.element_ty)
    place = group.to(tl.int64) * padded + row
    tl.store(scales + place, scale, mask=there)
    column = tl.arange(0, 128)
    at = ((column // 16)[None, :] ^ (row % 8)[:, None]) * 16 + (column % 16)[None, :]
    tl.store(codes + place[:, None] * 128 + at, code, mask=there[:, None])


@triton.jit
def store_rows_fp8(
    codes, scales, value, row0, rows, padded, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """value [ROWS, BLOCK], of SIZE columns, the rows from row0 on of `rows`: as `store_fp8`."""
    GROUPS: tl.constexpr = BLOCK // 128
    i = tl.arange(0, ROWS * GROUPS)
    row, group = row0 + i // GROUPS, i % GROUPS
    there = (row < rows) & (group < SIZE // 128)
    store_fp8(codes, scales, tl.reshape(value, [ROWS * GROUPS, 128]), row, group, there, padded)


def empty_rows(shape: Sequence[int], device: torch.device, x: Tensor | None = None) -> Fp8Rows:
    """Returns room for activations of shape [rows, columns]. x: where they are stored as they are, too."""
    rows, columns = shape
    padded = triton.cdiv(rows, EIGHT) * EIGHT
    codes = torch.empty(columns // WIDE, padded, WIDE, dtype=torch.float8_e4m3fn, device=device)
    return Fp8Rows(codes, torch.empty(columns // WIDE, padded, dtype=torch.float32, device=device), rows, x)


def parts_of(out: Tensor | Fp8Rows) -> tuple[Tensor | None, Tensor | None, Tensor | None, int]:
    """Returns what kernels are given for their result: where it is stored as it is, codes, scales, and how many rows
    these have."""
    return (out, None, None, 0) if isinstance(out, Tensor) else (out.x, out.codes, out.scales, out.codes.shape[1])
