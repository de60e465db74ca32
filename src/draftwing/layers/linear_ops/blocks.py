"""Weights quantised in blocks: taken as a GGUF file stores them, or quantised when they are loaded."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from draftwing.errors import listed
from draftwing.gguf_file import dequantized
from draftwing.layers.linear_ops.base import LinearOp, PackMode, ParamSlice, WeightFormat
from draftwing.layers.linear_ops.dense import Dense, DenseFormat
from draftwing.layers.linear_ops.from_quantized import becomes, to_blocks
from draftwing.layers.linear_ops.packed_blocks import SAFE_KIND, SMALLEST, PackedBlocks, sizes_of
from draftwing.ops.torch.layer_ops import LayerOps
from draftwing.ops.types import BlockRows, MXRows, QuantizedRows

if TYPE_CHECKING:
    from draftwing.layers.linear import Linear

logger = logging.getLogger(__name__)

LARGE_BLOCK = 256  # of the K kinds


@dataclass(frozen=True)
class BlockFormat(WeightFormat):
    """Blocks of any of `ops.block_kinds`, as they come; other values are quantised to `kind`.

    Weights whose rows are no whole number of blocks stay dense.
    """

    takes_blocks: ClassVar[bool] = True

    kind: str = SAFE_KIND
    ops: LayerOps = field(default_factory=LayerOps, compare=False, repr=False)  # of the device that will multiply

    def create(self, layer: Linear, dtype: torch.dtype, device: torch.device) -> LinearOp:
        if layer.in_features % SMALLEST:
            DenseFormat().create(layer, dtype, device)
            return LeftDense(layer)
        # It gives a name and a shape to what is loaded, which never lies in it.
        shape = layer.out_features, layer.in_features
        layer.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), False)
        return Blocks(layer, self, dtype)

    def kind_for(self, columns: int) -> str:
        """Returns the kind that a dense weight of so many columns is quantised to."""
        return SAFE_KIND if self.kind.endswith("_K") and columns % LARGE_BLOCK else self.kind

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

    def __init__(self, layer: Linear, form: BlockFormat, dtype: torch.dtype) -> None:
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
