"""Quantised matrices as checkpoints store them: in blocks, in microscaling formats, or codes with scales by group."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_SLICE = 1 << 22  # values that are dequantised at a time


class BlockRows(NamedTuple):
    """Rows of a matrix whose values are quantised in blocks, as a GGUF file stores them."""

    kind: str  # GGML's name of the type: Q4_0, Q6_K, ...
    data: Tensor  # [rows, bytes of a row] uint8, on the CPU
    columns: int


MX_BLOCK = 32  # values that share an exponent


def e2m1(codes: Tensor) -> Tensor:
    """codes [rows, columns / 2] uint8: two values of 4 bits a byte, the first in the low bits -> twice the values,
    [rows, columns] int8"""
    doubled = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.int8, device=codes.device)
    return torch.cat((doubled, -doubled))[torch.stack((codes & 15, codes >> 4), -1).flatten(1).int()]


class MXRows(NamedTuple):
    """Rows of a matrix in MXFP4: values of 4 bits (e2m1), of which 32 share a power of 2."""

    codes: Tensor  # [rows, columns / 2] uint8: two values a byte, the first in the low bits
    exponents: Tensor  # [rows, columns / 32] uint8: of 2, more by 127

    @property
    def rows(self) -> int:
        return len(self.codes)

    @property
    def columns(self) -> int:
        return 2 * self.codes.shape[-1]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.exponents.nbytes

    @property
    def label(self) -> str:
        return "mxfp4"

    def integers(self) -> QuantizedRows:
        """Returns the codes as integers of 5 bits with a scale for each block."""
        return QuantizedRows(e2m1(self.codes), 5, torch.exp2(self.exponents.float() - 128), None, 1, MX_BLOCK, None)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Returns [rows, columns]: the values, computed in float32."""
        step = max(1, _SLICE // max(1, self.columns))
        parts = zip(self.codes.split(step), self.exponents.split(step), strict=True)
        return torch.cat([MXRows(*part).integers().dense(dtype) for part in parts])


class QuantizedRows(NamedTuple):
    """Rows of a matrix as the quantisers of checkpoints have them: a value is (code - zero) * scale, with the zero and
    the scale of its group."""

    codes: Tensor  # [rows, columns] int8 or float8_e4m3fn; all are on one device
    bits: int  # of a code; integers lie in [-2^(bits - 1), 2^(bits - 1)); 5: of twice a value of 4 bits (e2m1)
    scales: Tensor  # [ceil(rows / tall), groups] floating point
    zeros: Tensor | None  # as scales, int16; None: all are 0
    tall: int  # rows of a group
    wide: int  # columns of a group, where they follow each other
    group_of: Tensor | None  # [columns] int64: the group of each column; None: its number // wide
    dynamic: bool = False  # they were made for activations in fp8, quantised by row and 128 columns as they come

    @property
    def nbytes(self) -> int:
        """Returns what these take where codes lie side by side, without bits between them."""
        zeros = 0 if self.zeros is None else self.zeros.numel() * self.bits // 8
        return self.codes.numel() * self.bits // 8 + self.scales.nbytes + zeros

    @property
    def label(self) -> str:
        """Returns a name for the log: `int4 with zeros in groups of 128`."""
        rows, columns = self.codes.shape
        kind = "fp8" if self.codes.is_floating_point() else "fp4" if self.bits == 5 else f"int{self.bits}"
        zeros = "" if self.zeros is None else " with zeros"
        if self.tall == 1:
            groups = "a scale for each row" if self.wide >= columns else f"groups of {self.wide}"
        elif self.tall >= rows and self.wide >= columns:
            groups = "one scale"
        else:
            groups = f"groups of {self.tall} x {self.wide}"
        return f"{kind}{zeros}, {groups}{'' if self.group_of is None else ' in the order of activations'}"

    def by_column(self, values: Tensor) -> Tensor:
        """values [rows, groups] -> that of each column, [rows, columns]"""
        columns = self.codes.shape[1]
        if self.group_of is not None:
            return values[:, self.group_of]
        return values.repeat_interleave(self.wide, 1)[:, :columns] if values.shape[1] > 1 else values

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Returns [rows, columns]: the values, computed in float32."""
        rows, columns = self.codes.shape
        out = torch.empty(rows, columns, dtype=dtype, device=self.codes.device)
        step = max(1, _SLICE // max(1, columns))
        for start in range(0, rows, step):
            part = self.codes[start : start + step].float()
            group = torch.arange(start, start + len(part), device=out.device) // self.tall
            if self.zeros is not None:
                part -= self.by_column(self.zeros[group].float())
            out[start : start + step] = part.mul_(self.by_column(self.scales[group].float()))
        return out
