"""Quantised weights as kernels of a GPU read them: codes in tiles, scales and zeros by group (`gemm_groups.cu`).

The one layout for each width: integers of 4 and of 8 bits, and fp8 (e4m3). A weight is (code - zero) * scale, where the
scale is rounded to the type of activations, and then the product: `unpacked` is the matrix that kernels multiply with,
bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.ops.fp8.spec import TALL as BLOCK_ROWS
from draftwing.ops.fp8.spec import WIDE as BLOCK_COLUMNS
from draftwing.ops.gemm.stored import QuantizedRows

TILE_ROWS, CHUNK = 16, 64  # rows and columns of a tile
SMALLEST = 32  # columns of a group
WHOLE = 20  # shift of groups that are whole rows
_FP8_UNIT = 120  # bfloat16's offset of exponents over that of e4m3
# Of integers, as mantissas: what 1 is, 2^-unit; the bit of a word that 4 bits begin at; and the power of 2 by which
# their scales are less than codes ask for (LESS of gemm_groups.cu).
_UNITS = {torch.bfloat16: 133, torch.float16: 18}
_FIRST = {torch.bfloat16: 0, torch.float16: 6}
_LESS = {torch.bfloat16: 15, torch.float16: 0}
# Scales from these on are beyond all numbers in these units.
_LARGEST_FP8_SCALE, _LARGEST_SCALES = 128.0, {torch.bfloat16: 1019.0, torch.float16: 0.249}


class PackedGroups(NamedTuple):
    """Rows of a matrix, of which 16 and 64 columns are a tile."""

    codes: Tensor  # [rows / 16, columns * 8 * bits / 4] uint8: tiles along the columns, each as gemm_groups.cu has it
    scales: Tensor  # [rows / 16, groups, 8, 2] bfloat16 or float16: of features g and g + 8, in the kernels' units
    zeros: Tensor | None  # as scales: what is added to a code of 4 bits from 0; None: -8
    bits: int  # of a code, 4 or 8
    shift: int  # chunk c, 64 columns, is of group c >> shift: 1, 0 or WHOLE; -1: it has two groups
    order: Tensor | None  # [columns] int64: column i of these is order[i] of the matrix; None: i
    fp8: bool  # of 8 bits, no integers

    @property
    def rows(self) -> int:
        return len(self.codes) * TILE_ROWS

    @property
    def columns(self) -> int:
        return self.codes.shape[1] // (2 * self.bits)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.scales, self.zeros, self.order) if part is not None)


def unsupported_reason(rows: QuantizedRows, dtype: torch.dtype) -> str | None:
    """Returns what keeps these rows from being packed for activations of `dtype`, or None where they can be."""
    fp8, (height, width) = rows.codes.is_floating_point(), rows.codes.shape
    if dtype not in (torch.bfloat16, torch.float16) or (fp8 and dtype != torch.bfloat16):
        return f"activations in {str(dtype).removeprefix('torch.')}"
    if not fp8 and rows.bits > 4 and (rows.bits != 8 or rows.zeros is not None or dtype != torch.bfloat16):
        return f"integers of {rows.bits} bits{'' if rows.zeros is None else ' with zeros'}"
    if height % TILE_ROWS or width % CHUNK:
        return f"a shape of {height} x {width}, no multiple of {TILE_ROWS} x {CHUNK}"
    if rows.scales.shape[1] > 1 and rows.wide % SMALLEST:
        return f"groups of {rows.wide} columns, no multiple of {SMALLEST}"
    if rows.group_of is not None and not _even(rows.group_of, rows.wide):
        return "groups of different sizes"
    largest = _LARGEST_FP8_SCALE if fp8 else _LARGEST_SCALES[dtype]
    if not rows.scales.float().abs().max() < largest:
        return f"a scale beyond {largest:g}"
    return None


def pack(rows: QuantizedRows, dtype: torch.dtype, device: torch.device | str) -> PackedGroups:
    """Returns the rows, for which `unsupported_reason` has nothing to say, on `device`. dtype: of activations."""
    codes, fp8, zeros, order = rows.codes.to(device), rows.codes.is_floating_point(), rows.zeros, None
    if rows.group_of is not None:
        order = torch.argsort(rows.group_of, stable=True).to(device)
        codes = codes.view(torch.uint8)[:, order].view(codes.dtype)
    shift = shift_of(rows.wide if rows.scales.shape[1] > 1 else 0)
    of_row = torch.arange(len(codes), device=device) // rows.tall
    groups = torch.arange(groups_of_row(rows.codes.shape[1], shift), device=device)
    across = groups * _group_columns(shift) // rows.wide

    def by_tile(values: Tensor) -> Tensor:  # [groups down, groups across] -> [tiles, groups, 8, 2]
        spread = values.to(device)[of_row][:, across]
        return spread.unflatten(0, (-1, 2, 8)).permute(0, 3, 2, 1).contiguous()

    unit = _FP8_UNIT if fp8 else _UNITS[dtype] - _LESS[dtype]
    scales = by_tile(_times_power(rows.scales.to(dtype), unit).to(dtype))
    if fp8:
        assert zeros is None, "no format has such"
        return PackedGroups(_fp8_tiles(codes), scales, None, 8, shift, order, True)
    if rows.bits == 8:
        return PackedGroups(_byte_tiles(codes), scales, None, 8, shift, order, False)
    if zeros is not None:
        zeros = by_tile(_times_power(-8 - zeros.cpu(), -_UNITS[dtype]).to(dtype))
    return PackedGroups(_nibble_tiles(codes, _FIRST[dtype]), scales, zeros, 4, shift, order, False)


def joinable(parts: Sequence[PackedGroups]) -> bool:
    """Returns whether one kernel can read them all."""
    kind, order = (parts[0].bits, parts[0].fp8), parts[0].order
    return all((part.bits, part.fp8) == kind and _same(part.order, order) for part in parts)


def join(parts: Sequence[PackedGroups]) -> PackedGroups | None:
    """Returns the rows of one part after those of another, or None where they are not `joinable`."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if not joinable(parts):
        return None
    shift = min(part.shift for part in parts)
    groups = groups_of_row(first.columns, shift)
    with_zeros = any(part.zeros is not None for part in parts)

    def spread(values: Tensor, part: PackedGroups) -> Tensor:
        if part.shift == shift:
            return values
        of = torch.arange(groups, device=values.device) * _group_columns(shift) // _group_columns(part.shift)
        return values[:, of]

    def zeros(part: PackedGroups) -> Tensor:
        if part.zeros is not None:
            return part.zeros
        dtype = part.scales.dtype
        return _times_power(torch.tensor(-8), -_UNITS[dtype]).to(dtype).to(part.scales.device).expand_as(part.scales)

    return PackedGroups(
        torch.cat([part.codes for part in parts]), torch.cat([spread(part.scales, part) for part in parts]),
        torch.cat([spread(zeros(part), part) for part in parts]) if with_zeros else None,
        first.bits, shift, first.order, first.fp8,
    )  # fmt: skip


def cut(weight: PackedGroups, rows: range, columns: range) -> PackedGroups | None:
    """Returns these rows and columns, or None where they begin or end within a tile or a group, or where some columns
    are asked of a weight that has them in another order."""
    tile = [range(of.start // size, of.stop // size) for of, size in ((rows, TILE_ROWS), (columns, CHUNK))]
    even = all(of.start % size == of.stop % size == 0 for of, size in ((rows, TILE_ROWS), (columns, CHUNK)))
    if not even or (weight.order is not None and len(columns) < weight.columns):
        return None
    group = range(weight.scales.shape[1])
    if weight.shift != WHOLE:
        wide = _group_columns(weight.shift)
        if columns.start % wide or (columns.stop % wide and columns.stop < weight.columns):
            return None
        group = range(columns.start // wide, -(-columns.stop // wide))

    def part(values: Tensor, across: range) -> Tensor:
        return values[tile[0].start : tile[0].stop, across.start : across.stop]

    of_chunk = CHUNK * 2 * weight.bits  # bytes of 16 rows
    return weight._replace(
        codes=part(weight.codes, range(tile[1].start * of_chunk, tile[1].stop * of_chunk)),
        scales=part(weight.scales, group),
        zeros=None if weight.zeros is None else part(weight.zeros, group),
    )


def unit_of(weight: PackedGroups) -> int:
    """Returns the power of 2 that scales are to be multiplied with."""
    dtype = weight.scales.dtype
    return -(_FP8_UNIT if weight.fp8 else _UNITS[dtype] - _LESS[dtype])


def unpacked(weight: PackedGroups) -> Tensor:
    """[rows, columns] in the type of activations: the values that kernels compute, columns in the matrix's order."""
    chunks, dtype = weight.columns // CHUNK, weight.scales.dtype
    group = torch.arange(2 * chunks, device=weight.codes.device) * SMALLEST // _group_columns(weight.shift)

    def by_half_chunk(values: Tensor, power: int) -> Tensor:  # [tiles, groups, 8, 2] -> [tiles, 2, 8, chunks, 2, 1]
        spread = values[:, group].permute(0, 3, 2, 1).unflatten(3, (chunks, 2)).unsqueeze(-1)
        return _times_power(spread, power)

    scales = by_half_chunk(weight.scales, unit_of(weight))
    codes = codes_of(weight).view(-1, 2, 8, chunks, 2, SMALLEST).float()
    if weight.bits == 4:
        codes += -8 if weight.zeros is None else by_half_chunk(weight.zeros, _UNITS[dtype])
    values = (codes * scales).to(dtype).view(weight.rows, weight.columns)
    return values if weight.order is None else torch.empty_like(values).index_copy_(1, weight.order, values)


def codes_of(weight: PackedGroups) -> Tensor:
    """[rows, columns] int8, those of 4 bits from 0; or float8_e4m3fn. Columns are in the order of the packed weight."""
    chunks = weight.columns // CHUNK
    if weight.bits == 4:
        codes = _from_nibble_tiles(weight.codes, chunks, _FIRST[weight.scales.dtype])
    else:
        codes = (_from_fp8_tiles if weight.fp8 else _from_byte_tiles)(weight.codes, chunks)
    return codes.reshape(weight.rows, weight.columns)


def by_group(weight: PackedGroups) -> tuple[Tensor, Tensor | None]:
    """Returns scales, and what is added to a code from 0, [rows, groups] float32."""

    def by_row(values: Tensor, power: int) -> Tensor:
        return _times_power(values.permute(0, 3, 2, 1).reshape(weight.rows, -1), power)

    unit, dtype = unit_of(weight), weight.scales.dtype
    return by_row(weight.scales, unit), None if weight.zeros is None else by_row(weight.zeros, _UNITS[dtype])


def _even(group_of: Tensor, wide: int) -> bool:
    counts = torch.bincount(group_of)
    return bool((counts == wide).all())


def shift_of(wide: int) -> int:
    """Returns the shift for groups of so many columns, 0: of all."""
    return WHOLE if wide == 0 else -1 if wide % CHUNK else 0 if wide % (2 * CHUNK) else 1


def _group_columns(shift: int) -> int:
    """Returns the columns of a group, more than any matrix has for WHOLE."""
    return int(CHUNK * 2.0**shift)


def groups_of_row(columns: int, shift: int) -> int:
    return columns // SMALLEST if shift < 0 else ((columns // CHUNK - 1) >> shift) + 1


def _times_power(values: Tensor, power: int) -> Tensor:
    """values * 2^power in float32, which has neither the factor nor its inverse."""
    half = power // 2
    return values.float() * 2.0**half * 2.0 ** (power - half)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


# Dimensions of a code: tiles, which half of 16 features, feature g, chunks, half j of 64 columns, part t of it, and of
# its 8 columns pairs i and which of the pair.


def _nibble_tiles(codes: Tensor, first: int) -> Tensor:
    """codes [rows, columns] int8 in [-8, 8) -> [tiles, bytes]. first: the bit of a word that they begin at."""
    columns = codes.shape[1]
    split = (codes + 8).view(torch.uint8).view(-1, 2, 8, columns // CHUNK, 2, 4, 2, 2, 2)  # pairs i: two by two
    packed = split[..., 0, :] | split[..., 1, :] << 4  # [tiles, half, g, chunks, j, t, i // 2, which]
    words = packed.permute(0, 3, 2, 5, 4, 1, 7, 6).flatten(1).contiguous().view(torch.int32)
    return _rotated(words, first).view(torch.uint8)


def _from_nibble_tiles(tiles: Tensor, chunks: int, first: int) -> Tensor:
    packed = _rotated(tiles.view(torch.int32), 32 - first).view(torch.uint8)
    packed = packed.view(-1, chunks, 8, 4, 2, 2, 2, 2).permute(0, 5, 2, 1, 4, 3, 7, 6)
    return torch.stack((packed & 15, packed >> 4), -2).flatten(5)  # [tiles, half, g, chunks, j, 32]


def _rotated(words: Tensor, bits: int) -> Tensor:
    """words int32, to the left."""
    return words << bits | (words >> (32 - bits)) & ((1 << bits) - 1)


def _byte_tiles(codes: Tensor) -> Tensor:
    """codes [rows, columns] int8 -> [tiles, bytes]"""
    value = (codes.view(torch.uint8) ^ 128).view(-1, 2, 8, codes.shape[1] // CHUNK, 2, 4, 2, 2, 2)
    return value.permute(0, 3, 4, 2, 5, 1, 6, 8, 7).flatten(1).contiguous()


def _from_byte_tiles(tiles: Tensor, chunks: int) -> Tensor:
    value = (tiles ^ 128).view(-1, chunks, 2, 8, 4, 2, 2, 2, 2).permute(0, 5, 3, 1, 2, 4, 6, 8, 7)
    return value.flatten(5).contiguous().view(torch.int8)  # [tiles, half, g, chunks, j, 32]


def _fp8_tiles(codes: Tensor) -> Tensor:
    """codes [rows, columns] float8_e4m3fn -> [tiles, bytes]"""
    columns = codes.shape[1]
    value = codes.view(torch.uint8).int().view(-1, 2, 8, columns // CHUNK, 2, 4, 2, 2, 2)
    sign, body = value >> 7, value & 127
    first = sign << 15 | body << 4
    second = sign << 11 | body & 15 | (body >> 4) << 12
    words = first[..., 0, :] | second[..., 1, :]  # [tiles, half, g, chunks, j, t, i // 2, which]
    words = torch.where(words > 32767, words - 65536, words).to(torch.int16)
    return words.permute(0, 3, 4, 2, 5, 1, 6, 7).flatten(1).contiguous().view(torch.uint8)


def _from_fp8_tiles(tiles: Tensor, chunks: int) -> Tensor:
    words = tiles.view(torch.int16).int().view(-1, chunks, 2, 8, 4, 2, 2, 2).permute(0, 5, 3, 1, 2, 4, 6, 7)
    first = words >> 8 & 128 | words >> 4 & 127
    second = words >> 4 & 128 | words & 15 | (words >> 12 & 7) << 4
    return torch.stack((first, second), -2).flatten(5).to(torch.uint8).view(torch.float8_e4m3fn)


# -- quantising -------------------------------------------------------------------------------------------------------

SCHEMES = ("fp8", "w4a16")
_GROUP = 128  # columns
_LARGEST_FP8 = 448.0
_TRIED = 12  # scales of a group, of which the one with the least error is taken
_ROWS = 1024  # that are quantised at a time


def quantized(weight: Tensor, scheme: str, dynamic: bool = False) -> QuantizedRows:
    """weight [rows, columns] floating point -> the same, on its device, as one of `SCHEMES` has it: `fp8`, with a scale
    for each row; `w4a16`, 4 bits in groups of 128 columns; or `int8`, by row as well. Scales are bfloat16.

    dynamic: of fp8, in blocks of `fp8_blocks`, whose sizes the matrix's are multiples of, with scales in float32."""
    rounded = _to_fp8_blocks if dynamic else _ROUNDED[scheme]
    parts = [rounded(part.float()) for part in weight.split(_ROWS)]
    codes, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    if dynamic:
        return QuantizedRows(codes, 8, scales, None, BLOCK_ROWS, BLOCK_COLUMNS, None, True)
    wide = _GROUP if scheme == "w4a16" else weight.shape[1]
    return QuantizedRows(codes, 4 if scheme == "w4a16" else 8, scales, None, 1, wide, None)


def _to_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / _LARGEST_FP8).clamp_min(1e-30).bfloat16()
    return (weight / scales.float()).clamp(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn), scales


def _to_fp8_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    blocks = weight.unflatten(1, (-1, BLOCK_COLUMNS)).unflatten(0, (-1, BLOCK_ROWS))
    scales = (blocks.abs().amax((1, 3), keepdim=True) / _LARGEST_FP8).clamp_min(1e-30)
    return (blocks / scales).to(torch.float8_e4m3fn).flatten(2).flatten(0, 1), scales[:, 0, :, 0]


def _to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 127).clamp_min(1e-30).bfloat16()
    return (weight / scales.float()).round().clamp(-128, 127).to(torch.int8), scales


def _to_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    columns = weight.shape[1]
    groups = torch.nn.functional.pad(weight, (0, -columns % _GROUP)).unflatten(1, (-1, _GROUP))
    # What the value that is farthest from 0 becomes, which is then clipped or rounded; the scale has its sign.
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    best = best_scales = best_error = None
    for i in range(_TRIED):
        scales = (extreme / (-9.5 + 0.25 * i)).bfloat16()
        codes = (groups / torch.where(scales == 0, 1, scales).float()).round().clamp(-8, 7)
        error = (codes * scales.float() - groups).square().sum(2, keepdim=True)
        if best is None or best_scales is None or best_error is None:
            best, best_scales, best_error = codes, scales, error
            continue
        better = error < best_error
        best, best_scales = torch.where(better, codes, best), torch.where(better, scales, best_scales)
        best_error = torch.minimum(error, best_error)
    assert best is not None and best_scales is not None
    return best.flatten(1)[:, :columns].to(torch.int8), best_scales.squeeze(2)


_ROUNDED = {"fp8": _to_fp8, "w4a16": _to_int4, "int8": _to_int8}
