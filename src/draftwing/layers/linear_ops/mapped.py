"""A matrix of which single rows are read, and so few of them that it stays in its file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from draftwing.gguf_file import dequantized
from draftwing.layers.linear_ops.base import LinearBase, LinearOp, PackMode, ParamSlice, WeightFormat
from draftwing.layers.linear_ops.dense import Dense, DenseFormat
from draftwing.ops.gemm.stored import BlockRows, MXRows, QuantizedRows
from draftwing.ops.table import LayerOps

logger = logging.getLogger(__name__)
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # types of GGML that are no blocks


@dataclass(frozen=True)
class MappedFormat(WeightFormat):
    """Rows as a checkpoint stores them, mapped from its file; a device with memory of its own gets them all, there or
    in the host's memory (`Runtime.host_matrix`). ranks: that have all of them, each by itself.  count: such matrices of
    the model."""

    ranks: int = field(default=1, compare=False)
    count: int = field(default=1, compare=False)
    takes_blocks: ClassVar[bool] = True

    def create(self, layer: LinearBase, dtype: torch.dtype, device: torch.device) -> LinearOp:
        DenseFormat().create(layer, dtype, device)
        return Mapped(layer, dtype, self.ranks, self.count)


class Mapped(Dense):
    """A weight that is never multiplied with."""

    def __init__(self, layer: LinearBase, dtype: torch.dtype, ranks: int, count: int) -> None:
        super().__init__(layer)
        self._dtype, self._ranks, self._count = dtype, ranks, count
        self._kept: Tensor | BlockRows | None = None
        self._parts: dict[int, Tensor] = {}  # by their first row, of a matrix that is stored in several
        self._read: Callable[[Tensor], Tensor] | None = None  # ids [M] -> rows, as the device does it best

    def keep(self, part: ParamSlice, value: Tensor | BlockRows | QuantizedRows | MXRows) -> bool:
        if not isinstance(value, Tensor | BlockRows):
            return False
        if isinstance(value, BlockRows) and value.kind in _PLAIN:
            value = value.data.view(_PLAIN[value.kind])
        if part.size < self.layer.out_features:
            return self._keep_part(part, value)
        self._kept = value
        del self.layer.weight
        size = (value if isinstance(value, Tensor) else value.data).nbytes
        logger.info("embeddings by layer, %.2f GB, stay in the model's file and are read row by row", size / 1e9)
        return True

    def _keep_part(self, part: ParamSlice, value: Tensor | BlockRows) -> bool:
        if not isinstance(value, Tensor):
            return False
        self._parts[part.start] = value
        if sum(map(len, self._parts.values())) == self.layer.out_features:
            del self.layer.weight
            size = sum(value.nbytes for value in self._parts.values())
            logger.info("a table of n-grams, %.2f GB, stays in the model's file and is read row by row", size / 1e9)
        return True

    @property
    def stored(self) -> Tensor | None:
        return super().stored if self._kept is None and not self._parts else None

    def dense_weight(self) -> Tensor:
        if self._kept is None and not self._parts:
            return super().dense_weight()
        return self.rows(torch.arange(self.layer.out_features))

    def rows(self, ids: Tensor) -> Tensor:
        kept, where = self._kept, ids.device
        if self._parts:
            return self._rows_of_parts(ids.flatten().to("cpu")).to(where).view(*ids.shape, -1)
        if kept is None:
            return super().rows(ids)
        if self._read is not None:
            return self._read(ids.flatten()).view(*ids.shape, -1)
        source = kept if isinstance(kept, Tensor) else kept.data
        taken = source.index_select(0, ids.flatten().to(source.device))
        if isinstance(kept, BlockRows):
            taken = torch.from_numpy(dequantized(taken.numpy(), kept.kind))
        return taken.to(where, self._dtype).view(*ids.shape, -1)

    def _rows_of_parts(self, ids: Tensor) -> Tensor:
        """ids [M] on the CPU -> rows [M, in_features]. Parts are in memory of files, so each that has some is read by
        itself."""
        starts = sorted(self._parts)
        where = torch.bucketize(ids, torch.tensor(starts), right=True) - 1
        rows = torch.empty(len(ids), self.layer.in_features, dtype=self._dtype)
        for at in where.unique().tolist():
            of_part = (where == at).nonzero().squeeze(1)
            taken = self._parts[starts[at]].index_select(0, ids[of_part] - starts[at])
            rows.index_copy_(0, of_part, taken.to(self._dtype))
        return rows

    def packed(self, ops: LayerOps, mode: PackMode) -> LinearOp:
        count = self.layer.out_features
        mapped = self._kept is not None or bool(self._parts)
        at_host = ops.host_matrix(self.rows, count, self._ranks, self._count) if mapped else None
        held = ops.upload_matrix(self.rows, count) if mapped and at_host is None else None
        if at_host is not None:
            self._kept, self._read = at_host, partial(ops.take_rows, at_host)
            self._parts.clear()
        elif held is not None:
            self.layer.weight, self._kept = nn.Parameter(held, False), None
            self._parts.clear()
        elif isinstance(self._kept, BlockRows):
            self._read = ops.row_reader and ops.row_reader(self._kept, self._dtype)
        elif self._kept is not None and self._kept.dtype == self._dtype:
            self._read = partial(ops.take_rows, self._kept)
        return self
