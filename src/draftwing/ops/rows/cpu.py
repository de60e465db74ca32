"""Rows of tables in C. Ids are not checked."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from draftwing.ops.cpu.arguments import with_rows
from draftwing.ops.cpu.runtime import InC
from draftwing.ops.rows.spec import RowOps
from draftwing.ops.runtime import RECORDED_ROWS


@functools.cache
def _of_few(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns, for `put_rows`, queries of each row, and a place for what nobody reads. Kept for the same reason."""
    return torch.ones(RECORDED_ROWS, dtype=torch.int64), torch.empty(RECORDED_ROWS, width, dtype=dtype)


class CpuRowOps(InC, RowOps):
    """Takes real tensors; others go to torch."""

    def concat_columns(self, *parts: Tensor) -> Tensor:
        if len(parts) > 3 or any(type(part) is not Tensor for part in parts):
            return super().concat_columns(*parts)
        rows, size = len(parts[0]), parts[0].element_size()
        assert all(len(part) == rows and part.dtype == parts[0].dtype for part in parts)
        kept = [with_rows(part) for part in parts]
        out = parts[0].new_empty(rows, sum(part.shape[1] for part in parts))
        numbers = [n for x in kept for n in (x, x.stride(0) * size, x.shape[1] * size)]
        self.raw.beside(out, rows, *numbers, *[0] * (9 - len(numbers)))
        return out

    def take_rows(self, source: Tensor, index: Tensor) -> Tensor:
        """Torch starts slowly on few rows."""
        if type(source) is not Tensor or type(index) is not Tensor or not source.is_contiguous():
            return super().take_rows(source, index)
        assert index.dtype == torch.int64
        index, count = index.contiguous(), index.shape[0]
        out = source.new_empty(count, *source.shape[1:])
        size = math.prod(source.shape[1:]) * source.element_size()  # a row alone may have any stride
        self.raw.take_rows(out, source, source.shape[0], size, index, count)
        return out

    def row_numbers(self, table: Tensor, rows: Tensor, each: int, added: Tensor | None = None) -> Tensor:
        assert added is None or (len(added) == len(rows) * each and added.is_contiguous())
        rows, out = rows.contiguous(), rows.new_empty(len(rows) * each)
        self.raw.row_numbers(out, table, rows, len(rows), each, added)
        return out

    def put_rows(self, target: Tensor, index: Tensor, source: Tensor) -> None:
        """Copies few rows, which steps that are recorded have, by the call that keeps the newest query of each row, of
        one."""
        count, width = source.shape
        plain = type(target) is Tensor and type(source) is Tensor
        if count > RECORDED_ROWS or not plain or not target.is_contiguous():
            super().put_rows(target, index, source)
            return
        source, index = with_rows(source), index.contiguous()
        assert index.dtype == torch.int64 and index.shape[0] == count
        assert target.shape[1] == width and target.dtype == source.dtype
        (ones, nowhere), size = _of_few(width, source.dtype), source.element_size()
        self.raw.newest(nowhere, source, source.stride(0) * size, width * size, ones, 1, 1, index, count, target)
