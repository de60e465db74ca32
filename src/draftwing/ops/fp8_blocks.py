"""Weights in fp8 (e4m3) with a scale for each block of 128 x 128, and activations with one for each row and 128 columns,
as kernels of a GPU read them (`gemm_fp8.cu`): both operands of a product are fp8, and 128 columns of a row lie together.

Within 8 rows the 128 bytes of a row are permuted as the tensor cores' instructions read them from shared memory: its
16 bytes number u are number u ^ (row % 8). So a copy of any rows, 8 or a multiple, is one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.ops.types import QuantizedRows

BLOCK = 128  # rows and columns that have a scale
EIGHT = 8  # rows that codes are permuted within
LARGEST = 448.0  # of e4m3
SMALLEST_AMAX = 1e-10  # rows of zeros have its scale


class Fp8Blocks(NamedTuple):
    """A matrix [rows, columns]: a value is code * scale."""

    codes: Tensor  # [columns / 128, rows, 128] float8_e4m3fn, permuted
    scales: Tensor  # [ceil(rows / 128), columns / 128] float32

    @property
    def rows(self) -> int:
        return self.codes.shape[1]

    @property
    def columns(self) -> int:
        return len(self.codes) * BLOCK

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """Returns [rows, columns], multiplied in float32."""
        scales = self.scales.repeat_interleave(BLOCK, 0)[: self.rows].unsqueeze(2)
        return (_straight(self.codes).unflatten(1, (-1, BLOCK)).float() * scales).flatten(1).to(dtype)


class Fp8Rows(NamedTuple):
    """Activations [rows, columns], quantised. Behind `rows` is what happened to be there, up to a multiple of 8."""

    codes: Tensor  # [columns / 128, rows padded to a multiple of 8, 128] float8_e4m3fn, permuted
    scales: Tensor  # [columns / 128, rows padded] float32
    rows: int

    @property
    def columns(self) -> int:
        return len(self.codes) * BLOCK

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """Returns [rows, columns], multiplied in float32."""
        values = _straight(self.codes).unflatten(1, (-1, BLOCK)).float() * self.scales.T.unsqueeze(2)
        return values[: self.rows].flatten(1).to(dtype)


def why_not(rows: QuantizedRows) -> str | None:
    """Returns what keeps these rows from being packed, or None where they can be."""
    height, width = rows.codes.shape
    if rows.codes.dtype != torch.float8_e4m3fn:
        return f"codes in {str(rows.codes.dtype).removeprefix('torch.')}"
    if (rows.tall, rows.wide) != (BLOCK, BLOCK) or rows.group_of is not None:
        return f"groups of {rows.tall} x {rows.wide}, not of {BLOCK} x {BLOCK}"
    if height % EIGHT or width % BLOCK:
        return f"a shape of {height} x {width}, no multiple of {EIGHT} x {BLOCK}"
    return None


def pack(rows: QuantizedRows, device: torch.device | str) -> Fp8Blocks:
    """Returns the rows, for which `why_not` has nothing to say, on `device`."""
    return Fp8Blocks(_permuted(rows.codes.to(device)), rows.scales.to(device, torch.float32).contiguous())


def join(parts: Sequence[Fp8Blocks]) -> Fp8Blocks | None:
    """Returns the rows of one part after those of another, or None where a scale would be of rows of two."""
    if len(parts) == 1:
        return parts[0]
    if any(part.rows % BLOCK for part in parts[:-1]):
        return None
    return Fp8Blocks(torch.cat([part.codes for part in parts], 1), torch.cat([part.scales for part in parts]))


def cut(weight: Fp8Blocks, rows: range, columns: range) -> Fp8Blocks | None:
    """Returns these rows and columns, or None where they begin or end within a block."""
    down, across = (range(of.start // BLOCK, -(-of.stop // BLOCK)) for of in (rows, columns))
    if rows.start % BLOCK or columns.start % BLOCK or columns.stop % BLOCK or rows.stop % EIGHT:
        return None
    if rows.stop % BLOCK and rows.stop < weight.rows:
        return None
    codes = weight.codes[across.start : across.stop, rows.start : rows.stop].contiguous()
    return Fp8Blocks(codes, weight.scales[down.start : down.stop, across.start : across.stop].contiguous())


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., columns] -> codes [..., columns] float8_e4m3fn and scales [..., columns / 128] float32: of each 128 columns
    the largest magnitude, divided by 448. `gemm_fp8.cu` and kernels before it have the same bits."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1).clamp_min(SMALLEST_AMAX) / LARGEST
    return (blocks / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(-2), scales


def packed_rows(codes: Tensor, scales: Tensor) -> Fp8Rows:
    """codes [M, K] and scales [M, K / 128] as `quantised` returns them -> the same for kernels"""
    behind = -len(codes) % EIGHT
    padded = torch.nn.functional.pad(codes.view(torch.uint8), (0, 0, 0, behind)).view(codes.dtype)
    return Fp8Rows(_permuted(padded), torch.nn.functional.pad(scales, (0, 0, 0, behind)).T.contiguous(), len(codes))


def _places(device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns indices [8, 8] of rows and of their 16 bytes: what lies where, and what is to lie there."""
    row, unit = torch.meshgrid(*[torch.arange(EIGHT, device=device)] * 2, indexing="ij")
    return row, row ^ unit


def _permuted(codes: Tensor) -> Tensor:
    """[rows, columns] -> [columns / 128, rows, 128]"""
    rows, columns = codes.shape
    units = codes.view(torch.uint8).view(rows // EIGHT, EIGHT, columns // BLOCK, EIGHT, BLOCK // EIGHT)
    row, unit = _places(codes.device)
    return units.permute(2, 0, 1, 3, 4)[:, :, row, unit].reshape(-1, rows, BLOCK).view(codes.dtype)


def _straight(codes: Tensor) -> Tensor:
    """[columns / 128, rows, 128] -> [rows, columns]"""
    blocks, rows, _ = codes.shape
    row, unit = _places(codes.device)
    units = codes.view(torch.uint8).view(blocks, rows // EIGHT, EIGHT, EIGHT, BLOCK // EIGHT)[:, :, row, unit]
    return units.permute(1, 2, 0, 3, 4).reshape(rows, blocks * BLOCK).view(codes.dtype)
