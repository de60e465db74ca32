"""Weights in fp8 (e4m3) with a scale for some rows and 128 columns, and activations with one for a row and 128 columns.

They lie as kernels of a GPU read them (`gemm_fp8.cu`): both operands of a product are fp8, and 128 columns of a row lie
together. Within 8 rows the 128 bytes of a row are permuted as the tensor cores' instructions read them from shared
memory: its 16 bytes number u are number u ^ (row % 8). So a copy of any rows, 8 or a multiple, is one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.ops.gemm.stored import QuantizedRows

WIDE = 128  # columns of a group, of weights and of activations
TALL = 16  # rows of weights that share a scale
EIGHT = 8  # rows that codes are permuted within
# Values of a weight from which its products are to have activations in fp8. On an H200 27B's o, of 31 million, gains
# with many rows; with DeepSeek-V2-Lite's matrices, of 6 million and fewer, a step of one request took 1,713 us instead
# of 1,330. Between them nothing was swept.
FP8_FROM = 1 << 24
LARGEST = 448.0  # of e4m3
SMALLEST_AMAX = 1e-10  # columns of zeros have its scale


class Fp8Blocks(NamedTuple):
    """A matrix [rows, columns]: a value is code * scale, with the scale of its 16 rows and 128 columns."""

    codes: Tensor  # [columns / 128, rows, 128] float8_e4m3fn, permuted
    scales: Tensor  # [rows / 16, columns / 128] float32

    @property
    def rows(self) -> int:
        return self.codes.shape[1]

    @property
    def columns(self) -> int:
        return len(self.codes) * WIDE

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def quantized(self) -> QuantizedRows:
        """Returns the same rows as a checkpoint stores them."""
        return QuantizedRows(_straight(self.codes), 8, self.scales, None, TALL, WIDE, None, dynamic=True)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Returns [rows, columns]: the values, computed in float32."""
        return self.quantized().dense(dtype)


class Fp8Rows(NamedTuple):
    """Activations [rows, columns], quantised. Behind `rows` is what happened to be there, up to a multiple of 8."""

    codes: Tensor  # [columns / 128, rows padded to a multiple of 8, 128] float8_e4m3fn, permuted
    scales: Tensor  # [columns / 128, rows padded] float32
    rows: int
    x: Tensor | None = None  # [rows, columns] what was quantised, where others read it

    @property
    def columns(self) -> int:
        return len(self.codes) * WIDE

    def plain(self) -> tuple[Tensor, Tensor]:
        """Returns codes [rows, columns] and scales [rows, columns / 128], as `quantised` does."""
        return _straight(self.codes)[: self.rows], self.scales.T[: self.rows]


def unsupported_reason(rows: QuantizedRows, dtype: torch.dtype) -> str | None:
    """Returns what keeps these rows, as a part of a weight, from being packed for activations of `dtype`, or None."""
    height, width = rows.codes.shape
    if rows.codes.dtype != torch.float8_e4m3fn or rows.zeros is not None or rows.group_of is not None:
        return "codes that are no fp8 in order"
    if dtype != torch.bfloat16:
        return f"activations in {str(dtype).removeprefix('torch.')}"
    if height % TALL or width % WIDE:
        return f"a shape of {height} x {width}, no multiple of {TALL} x {WIDE}"
    if (rows.scales.shape[0] > 1 and rows.tall % TALL) or (rows.scales.shape[1] > 1 and rows.wide % WIDE):
        return f"groups of {rows.tall} x {rows.wide}, no multiple of {TALL} x {WIDE}"
    return None


def pack(rows: QuantizedRows, device: torch.device | str) -> Fp8Blocks:
    """Returns the rows, for which `unsupported_reason` has nothing to say, on `device`."""
    height, width = rows.codes.shape
    down = torch.arange(height // TALL, device=device) * TALL // rows.tall
    across = torch.arange(width // WIDE, device=device) * WIDE // rows.wide
    scales = rows.scales.to(device).float()[down][:, across].contiguous()
    return Fp8Blocks(_permuted(rows.codes.to(device)), scales)


def join(parts: Sequence[Fp8Blocks]) -> Fp8Blocks:
    """Returns the rows of one part after those of another."""
    if len(parts) == 1:
        return parts[0]
    return Fp8Blocks(torch.cat([part.codes for part in parts], 1), torch.cat([part.scales for part in parts]))


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., columns] -> codes [..., columns] float8_e4m3fn, scales [..., columns / 128] float32: of 128 columns the
    largest magnitude, divided by 448. `gemm_fp8.cu` and kernels before it have the same bits."""
    blocks = x.float().unflatten(-1, (-1, WIDE))
    most = blocks.abs().amax(-1).clamp_min(SMALLEST_AMAX)
    scales = most / torch.full_like(most, LARGEST)  # by a number, a GPU would multiply with its inverse
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
    units = codes.view(torch.uint8).view(rows // EIGHT, EIGHT, columns // WIDE, EIGHT, WIDE // EIGHT)
    row, unit = _places(codes.device)
    return units.permute(2, 0, 1, 3, 4)[:, :, row, unit].reshape(-1, rows, WIDE).view(codes.dtype)


def _straight(codes: Tensor) -> Tensor:
    """[columns / 128, rows, 128] -> [rows, columns]"""
    blocks, rows, _ = codes.shape
    row, unit = _places(codes.device)
    units = codes.view(torch.uint8).view(blocks, rows // EIGHT, EIGHT, EIGHT, WIDE // EIGHT)[:, :, row, unit]
    return units.permute(1, 2, 0, 3, 4).reshape(rows, blocks * WIDE).view(codes.dtype)
