"""Weights quantised in blocks: taken as a GGUF file stores them, or quantised when they are loaded."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from draftwing.errors import listed
from draftwing.gguf_file import dequantized
from draftwing.layers.linear_ops.base import (
    SAFE_KIND,
    SMALLEST,
    LinearBase,
    LinearOp,
    PackedBlocks,
    PackMode,
    ParamSlice,
    WeightFormat,
    sizes_of,
)
from draftwing.layers.linear_ops.dense import Dense, DenseFormat
from draftwing.ops.gemm.stored import MX_BLOCK, BlockRows, MXRows, QuantizedRows
from draftwing.ops.table import LayerOps, TorchOps

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


logger = logging.getLogger(__name__)

LARGE_BLOCK = 256  # of the K kinds


@dataclass(frozen=True)
class BlockFormat(WeightFormat):
    """Blocks of any of `ops.block_kinds`, as they come; other values are quantised to `kind`.

    Weights whose rows are no whole number of blocks stay dense.
    """

    takes_blocks: ClassVar[bool] = True

    kind: str = SAFE_KIND
    ops: LayerOps = field(default_factory=TorchOps, compare=False, repr=False)  # of the device that will multiply

    @property
    def block(self) -> int:
        return LARGE_BLOCK if self.kind.endswith("_K") else 1

    def create(self, layer: LinearBase, dtype: torch.dtype, device: torch.device) -> LinearOp:
        if layer.in_features % SMALLEST:
            DenseFormat().create(layer, dtype, device)
            return LeftDense(layer)
        # It gives a name and a shape to what is loaded, which never lies in it.
        shape = layer.out_features, layer.in_features
        layer.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), False)
        return Blocks(layer, self, dtype)

    def kind_for(self, columns: int) -> str:
        """Returns the kind that a dense weight of so many columns is quantised to."""
        return SAFE_KIND if columns % self.block else self.kind

    def has_kernel(self, kind: str) -> bool:
        """Returns whether blocks of this kind are multiplied as they are."""
        return kind in self.ops.block_kinds

    def rows(self, value: Tensor | BlockRows | QuantizedRows | MXRows) -> BlockRows:
        """value [rows, columns] -> the same in blocks that there is a GEMM for."""
        if isinstance(value, QuantizedRows | MXRows):
            return to_blocks(value, self.ops)
        if isinstance(value, BlockRows):
            if self.has_kernel(value.kind):
                return value
            value = torch.from_numpy(dequantized(value.data.numpy(), value.kind))
            return self.ops.quantize(value, SAFE_KIND)
        return self.ops.quantize(value, self.kind_for(value.shape[1]))


class LeftDense(Dense):
    """A weight that blocks do not fit into."""


class Blocks(LinearOp):
    """A weight as it was loaded: its rows, in parts by where they start. Takes no gradient."""

    def __init__(self, layer: LinearBase, form: BlockFormat, dtype: torch.dtype) -> None:
        super().__init__(layer)
        self._format, self._dtype = form, dtype
        self._parts: dict[int, BlockRows] = {}
        self.changed: Counter[str] = Counter()  # what became of parts that came in anything but these blocks

    def keep(self, part: ParamSlice, value: Tensor | BlockRows | QuantizedRows | MXRows) -> bool:
        if not part.param.endswith("weight"):
            return False
        assert part.axis == 0 and part.start not in self._parts
        if isinstance(value, BlockRows) and not self._format.has_kernel(value.kind):
            self.changed[f"in {value.kind} have no kernel here and are quantised again, to {SAFE_KIND}"] += 1
        elif isinstance(value, QuantizedRows | MXRows):
            self.changed[f"in {value.label}: {becomes(value, self._format.ops)}"] += 1
        self._parts[part.start] = self._format.rows(value)
        if sum(rows.data.shape[0] for rows in self._parts.values()) == self.layer.out_features:
            del self.layer.weight  # nothing is missing
        return True

    @property
    def sizes(self) -> Counter[str]:
        return sizes_of(self._parts.values())

    def stored_rows(self, start: int, rows: int) -> list[tuple[int, BlockRows]]:
        found = []
        for at, part in sorted(self._parts.items()):
            first, last = max(start, at), min(start + rows, at + len(part.data))
            if first < last:
                found.append((first, BlockRows(part.kind, part.data[first - at : last - at], part.columns)))
        return found

    def dense_weight(self) -> Tensor:
        parts = [dequantized(rows.data.numpy(), rows.kind) for rows in self._in_order()]
        return torch.cat([torch.from_numpy(part) for part in parts]).to(self._dtype)

    def packed(self, ops: LayerOps, mode: PackMode) -> LinearOp:
        return PackedBlocks(self.layer, ops, self._in_order(), self._dtype)

    def _in_order(self) -> list[BlockRows]:
        assert not hasattr(self.layer, "weight"), "rows are missing"
        return [self._parts[start] for start in sorted(self._parts)]


def block_sizes(module: nn.Module) -> Counter[str]:
    """Returns bytes of a model's weights in blocks, by their kind."""
    sizes: Counter[str] = Counter()
    for part in module.modules():
        op = getattr(part, "op", None)
        if isinstance(op, PackedBlocks | Blocks):
            sizes += op.sizes
    return sizes


def log_blocks(module: nn.Module) -> None:
    """Says of a loaded model, not packed yet, what its weights in blocks are, and which matrices could not be."""
    linears = [(name, part.op) for name, part in module.named_modules() if hasattr(part, "op")]
    changed: Counter[str] = sum((op.changed for _, op in linears if isinstance(op, Blocks)), Counter())
    for what, count in sorted(changed.items()):
        logger.info("%d tensors %s", count, what)
    dense = [f"{name} ({op.layer.in_features})" for name, op in linears if isinstance(op, LeftDense)]
    if dense:
        logger.warning("dequantised, for their columns are no multiple of a block of 32: %s", listed(dense, 4))
    sizes = block_sizes(module)
    if sizes:
        logger.info("weights: %.0f MB block-quantised (%s)", sizes.total() / 1e6, ", ".join(sorted(sizes)))
