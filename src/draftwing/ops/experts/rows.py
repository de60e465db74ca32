"""Quantised weights of experts as kernels of a GPU read them: row by row, in words of 32 bits.

Two columns that are neighbours lie in the two halves of a word, at the same places in both, so that what turns codes
into bfloat16 works on two at once. Scales lie by the columns that they are for, those of all rows side by side, so that
a program loads its own in one piece.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.ops.gemm.groups import WHOLE, PackedGroups, by_group, codes_of
from draftwing.ops.gemm.stored import MX_BLOCK, MXRows

STEP = 128  # columns that have their scales side by side
INT4, INT8, FP8, MX = range(1, 5)  # kinds of codes
# A floating point code whose bits are put where a bfloat16 has those of the same meaning is less than it should be by
# this power of 2, which scales and exponents are kept with.
MX_LESS, FP8_LESS = 126, 120
# By kind: of each code of a word's half the bits, and by how much they are moved. Floating point codes lie so that
# signs and bodies come to their places in a bfloat16 by one shift or rotation, of the first code by none. The last one
# of four has what bits there are left, and takes two. From 16 on: to the other half.
_PLACES = {
    INT4: [[(15, 4 * i)] for i in range(4)],
    INT8: [[(255, 8 * i)] for i in range(2)],
    FP8: [[(128, 8), (127, 4)], [(128, 4), (112, 8), (15, 0)]],
    MX: [[(8, 12), (7, 6)], [(8, 6), (7, 0)], [(8, 0), (7, 26)], [(8, 10), (4, 12), (3, 4)]],
}
_CODES_AT_ONCE = 1 << 26  # codes that are turned into words at a time


class ExpertRows(NamedTuple):
    """[rows, columns] of all experts, one beneath the other."""

    words: Tensor  # [rows, columns * bits / 32] int32
    scales: Tensor  # [steps * groups, rows] int32, the bits of a float32; of MXFP4 [steps, rows], four exponents
    zeros: Tensor | None  # as scales: what is added to a code of 4 bits from 0; None: -8
    kind: int
    groups: int  # of a step; 0: one for whole rows
    columns: int
    order: Tensor | None  # [columns] int64: column i of these is order[i] of the matrix; None: i
    label: str

    @property
    def rows(self) -> int:
        return len(self.words)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.words, self.scales, self.zeros, self.order) if part is not None)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[rows, columns]: the values that kernels compute, columns in the matrix's order."""
        codes, column = _from_words(self.words, self.kind), torch.arange(self.columns)
        step = column.to(codes.device) // STEP
        within = column.to(codes.device) % STEP
        if self.kind == MX:
            exponents = self.scales.t()[:, step] >> 8 * (within // MX_BLOCK) & 255
            halves = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], device=codes.device) / 2
            values = torch.cat((halves, -halves))[codes.int()] * torch.exp2(exponents - float(127 + MX_LESS))
        else:
            group = step * self.groups + within * self.groups // STEP
            values = (codes.view(torch.float8_e4m3fn if self.kind == FP8 else torch.int8)).float()
            if self.kind == INT4:
                values += -8 if self.zeros is None else self.zeros.view(torch.float32).t()[:, group]
            values *= self.scales.view(torch.float32).t()[:, group]
            values *= 2.0**-FP8_LESS if self.kind == FP8 else 1.0
        values = values.to(dtype)
        return values if self.order is None else torch.empty_like(values).index_copy_(1, self.order, values)


def fits(weight: MXRows) -> bool:
    """Returns whether exponents are such that there are words for them: of weights below 12."""
    return weight.codes.is_meta or int(weight.exponents.max()) <= 254 - MX_LESS


def expert_rows(weight: PackedGroups | MXRows) -> ExpertRows:
    """Returns the codes in this layout."""
    if isinstance(weight, MXRows):
        exponents = _padded(weight.exponents.int() + MX_LESS, STEP // MX_BLOCK).unflatten(1, (-1, 4))
        scales = exponents[..., 0]
        for i in range(1, 4):
            scales = scales | exponents[..., i] << 8 * i
        words = torch.empty(weight.rows, weight.columns // 8, dtype=torch.int32, device=weight.codes.device)
        for at, rows in _parts(weight.codes, weight.columns):
            words[at] = _words(torch.stack((rows & 15, rows >> 4), -1).flatten(1), MX)
        return ExpertRows(words, scales.t().contiguous(), None, MX, 4, weight.columns, None, weight.label)
    kind = INT4 if weight.bits == 4 else FP8 if weight.fp8 else INT8
    groups = 0 if weight.shift == WHOLE else int(STEP / (64 * 2.0**weight.shift))
    words = torch.empty(weight.rows, weight.columns * weight.bits // 32, dtype=torch.int32, device=weight.codes.device)
    for at, codes in _parts(weight.codes, 16 * weight.columns):
        part = codes_of(weight._replace(codes=codes)).view(torch.uint8)
        words[16 * at.start : 16 * at.stop] = _words(part, kind)
    scales, zeros = by_group(weight)
    scales = _steps(scales * 2.0**FP8_LESS if weight.fp8 else scales, groups)
    zeros = None if zeros is None else _steps(zeros, groups)
    label = "fp8" if weight.fp8 else f"int{weight.bits}"
    return ExpertRows(words, scales, zeros, kind, groups, weight.columns, weight.order, label)


def _parts(codes: Tensor, size: int) -> list[tuple[slice, Tensor]]:
    """Items of so many codes, some at a time, so that what is made of them on the way is small."""
    if codes.is_meta:
        return []
    step = max(_CODES_AT_ONCE // size, 1)
    return [(slice(at, min(at + step, len(codes))), codes[at : at + step]) for at in range(0, len(codes), step)]


def _steps(values: Tensor, groups: int) -> Tensor:
    """values [rows, groups of a row] float32 -> [steps * groups, rows] int32"""
    return _padded(values, max(groups, 1)).t().contiguous().view(torch.int32)


def _padded(values: Tensor, multiple: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, -values.shape[1] % multiple))


def _words(codes: Tensor, kind: int) -> Tensor:
    """codes [rows, columns] uint8 -> [rows, words] int32; column 2i of a word's lies in its lower half"""
    places = _PLACES[kind]
    parts = codes.unflatten(1, (-1, len(places), 2))
    words = torch.zeros(parts.shape[:2], dtype=torch.int32, device=codes.device)
    for i, moves in enumerate(places):
        for bits, up in moves:
            for half in (0, 1):
                words |= (parts[:, :, i, half] & bits).int() << (up + 16 * half) % 32
    return words


def _from_words(words: Tensor, kind: int) -> Tensor:
    """-> [rows, columns] uint8"""
    codes = []
    for moves, half in itertools.product(_PLACES[kind], (0, 16)):
        code = torch.zeros_like(words)
        for bits, up in moves:
            code |= words >> (up + half) % 32 & bits
        codes.append(code.to(torch.uint8))
    return torch.stack(codes, -1).flatten(1)
