"""Quantised matrices of a checkpoint in the blocks that a device multiplies: the one place that says which become
which."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.layers.linear_ops.packed_blocks import SAFE_KIND, SMALLEST
from draftwing.ops.torch.layer_ops import LayerOps
from draftwing.ops.types import MX_BLOCK, BlockRows, MXRows, QuantizedRows

MX_KIND = "MXFP4"
_SLICE = 1 << 22  # codes that are packed at a time


def to_blocks(rows: QuantizedRows | MXRows, ops: LayerOps) -> BlockRows:
    """Returns the matrix, whose columns are a multiple of 32, in the kind of blocks that holds its values best.

    Codes of up to 4 bits stay as they are in `Q4_0`, with zeros in `Q4_1`, and those of 5 and of 8 bits without zeros
    in `Q5_0` and `Q8_0`, where each block of 32 lies in one group; MXFP4 has a kind of its own. Everything else is
    rounded to `Q8_0`.
    """
    if isinstance(rows, MXRows):
        return _mx_blocks(rows) if MX_KIND in ops.block_kinds else to_blocks(rows.integers(), ops)
    kind, columns = _same_codes(rows, ops), rows.codes.shape[1]
    if kind is None:
        return ops.quantize(rows.dense(torch.float32), SAFE_KIND)
    step = max(1, _SLICE // columns)
    parts = [_blocks(rows, kind, start, start + step) for start in range(0, len(rows.codes), step)]
    return BlockRows(kind, torch.cat(parts), columns)


def becomes(rows: QuantizedRows | MXRows, ops: LayerOps) -> str:
    """Returns what `to_blocks` does, for the log."""
    if isinstance(rows, MXRows):
        return f"kept, as {MX_KIND}" if MX_KIND in ops.block_kinds else becomes(rows.integers(), ops)
    kind = _same_codes(rows, ops)
    return f"quantised again, to {SAFE_KIND}" if kind is None else f"kept, as {kind}"


def _mx_blocks(rows: MXRows) -> BlockRows:
    """A block has its exponent, then 16 values in the low bits of 16 bytes and 16 in the high ones."""
    pairs = rows.codes.unflatten(1, (-1, MX_BLOCK // 2))  # [rows, blocks, 16]: value 2i, and 2i + 1 above it
    first, second = pairs.unflatten(2, (2, MX_BLOCK // 4)).unbind(2)
    low = torch.stack((first & 15, first >> 4), -1).flatten(2)
    high = torch.stack((second << 4, second & 240), -1).flatten(2)
    data = torch.cat((rows.exponents.unsqueeze(2), low | high), 2)
    return BlockRows(MX_KIND, data.flatten(1), rows.columns)


def _same_codes(rows: QuantizedRows, ops: LayerOps) -> str | None:
    """Returns the kind of blocks that the codes fit into as they are, or None."""
    if rows.codes.is_floating_point() or rows.group_of is not None or (rows.bits > 4 and rows.zeros is not None):
        return None
    if rows.scales.shape[1] > 1 and rows.wide % SMALLEST:
        return None
    kind = {8: "Q8_0", 5: "Q5_0"}.get(rows.bits, "Q4_0" if rows.zeros is None else "Q4_1")
    if rows.bits == 5 and not _powers_fit(rows):  # a power of 2 may be anything
        return None
    return kind if kind in ops.block_kinds else None


def _powers_fit(rows: QuantizedRows) -> bool:
    """Returns whether float16 has each scale, which are powers of 2. One that is too small does not count where all
    codes of its group are 0."""
    limits, scales = torch.finfo(torch.float16), rows.scales.float()
    if float(scales.max()) > limits.max:
        return False
    small = scales < limits.smallest_normal * limits.eps  # 2^-24
    if not small.any():
        return True
    if rows.tall > 1 or rows.codes.shape[1] % rows.wide:
        return False
    return not (small & rows.codes.unflatten(1, (-1, rows.wide)).any(-1)).any()


def _blocks(rows: QuantizedRows, kind: str, start: int, stop: int) -> Tensor:
    """Rows [start, stop) as [rows, bytes of a row] uint8."""
    codes = rows.codes[start:stop]
    blocks = codes.shape[1] // SMALLEST
    group = torch.arange(start, start + len(codes)) // rows.tall

    def by_block(values: Tensor) -> Tensor:  # [groups down, groups across] -> [rows, blocks]
        values = values[group]
        if values.shape[1] == 1:
            return values.expand(-1, blocks)
        return values.repeat_interleave(rows.wide // SMALLEST, 1)[:, :blocks]

    scales = by_block(rows.scales).float()
    halves = [scales]
    # What codes are stored more by: `Q4_0` takes 8 off again; for `Q4_1` the least that leaves none negative.
    more = 8 if rows.zeros is None else 1 << rows.bits - 1
    if rows.zeros is not None:
        halves.append(-scales.half().float() * (by_block(rows.zeros).float() + more))
    head = torch.stack(halves, -1).half().view(torch.uint8)  # [rows, blocks, 2 or 4]
    body = codes.unflatten(1, (blocks, SMALLEST))
    if kind == "Q8_0":
        packed = body.contiguous().view(torch.uint8)
    elif kind == "Q5_0":
        values = (body + 16).to(torch.uint8)
        places = torch.arange(SMALLEST, dtype=torch.int64)
        fifth = ((values >> 4).long() << places).sum(-1).to(torch.uint32).unsqueeze(-1).view(torch.uint8)
        low, high = (values & 15).unflatten(2, (2, SMALLEST // 2)).unbind(2)
        packed = torch.cat((fifth, low | high << 4), -1)
    else:
        low, high = (body + more).to(torch.uint8).unflatten(2, (2, SMALLEST // 2)).unbind(2)
        packed = low | high << 4
    return torch.cat((head, packed), -1).flatten(1)
