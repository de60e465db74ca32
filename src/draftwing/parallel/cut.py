"""What one rank reads of a checkpoint's tensors, and in what order."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.gguf_file import block_values
from draftwing.ops.gemm.stored import MX_BLOCK, BlockRows, MXRows, QuantizedRows
from draftwing.parallel.ranks import Share

Stored = Tensor | BlockRows | MXRows | QuantizedRows

# Instead of columns that are no whole blocks.
_INSTEAD = "expected a smaller --tp-size, --enable-tp-invariance (which cuts no columns)"


class Cut(NamedTuple):
    """`share` of an axis of a tensor as it is stored."""

    axis: int
    share: Share

    def read(self, name: str, stored: Any) -> Tensor:
        """Returns the part of a tensor in a safetensors file, whose other bytes are not read. stored: its slice
        object."""
        self._check(name, stored.get_shape())
        start, size, _ = self.share
        part: Tensor = stored[start : start + size] if self.axis == 0 else stored[:, start : start + size]
        return part

    def of(self, name: str, value: Stored) -> Stored:
        """Returns the part of what was read or mapped, a view. Raises CheckpointError for a tensor of another size, and
        where columns do not begin and end with a block."""
        if isinstance(value, Tensor):
            return self.of_tensor(name, value)
        if isinstance(value, MXRows):
            return self._of_mx(name, value)
        if isinstance(value, QuantizedRows):
            self._check(name, list(value.codes.shape))
            start, size, _ = self.share
            codes = value.codes.narrow(self.axis, start, size).contiguous()
            index = torch.arange(start, start + size, device=codes.device)
            return _quantized(value, self.axis, codes, index, (start,))
        (start, size, whole), (kind, data, columns) = self.share, value
        self._check(name, [len(data), columns])
        if self.axis == 0:
            return BlockRows(kind, data[start : start + size], columns)
        block = block_values(kind)
        if start % block or size % block:
            raise CheckpointError(
                f"{name}: a share of {size} of its {whole} columns in {kind} is no whole number of blocks of {block}: "
                f"{_INSTEAD}, or a checkpoint that is not quantised"
            )
        first, last = (data.shape[1] * at // columns for at in (start, start + size))  # bytes
        return BlockRows(kind, data[:, first:last].contiguous(), size)

    def _of_mx(self, name: str, value: MXRows) -> MXRows:
        start, size, whole = self.share
        self._check(name, [value.rows, value.columns])
        if self.axis == 0:
            return MXRows(*(part[start : start + size] for part in value))
        if start % MX_BLOCK or size % MX_BLOCK:
            raise CheckpointError(
                f"{name}: a share of {size} of its {whole} columns in MXFP4 is no whole number of blocks of "
                f"{MX_BLOCK}: {_INSTEAD}"
            )
        codes, exponents = value.codes, value.exponents
        first = start // MX_BLOCK
        return MXRows(codes[:, start // 2 : (start + size) // 2], exponents[:, first : first + size // MX_BLOCK])

    def of_tensor(self, name: str, value: Tensor) -> Tensor:
        """Returns the part, a view. Raises CheckpointError for a tensor of another size."""
        self._check(name, list(value.shape))
        return value.narrow(self.axis, self.share.start, self.share.size)

    def _check(self, name: str, shape: list[int]) -> None:
        if self.axis >= len(shape) or shape[self.axis] != self.share.whole:
            raise CheckpointError(f"{name}: expected {self.share.whole} in axis {self.axis}, found shape {shape}")


class Order(NamedTuple):
    """Runs of an axis of a stored tensor, (start, size) each, that are read one after the other."""

    axis: int
    runs: tuple[tuple[int, int], ...]
    whole: int

    def places(self) -> Tensor:
        """Returns [n] int64: where each row or column that is read lies."""
        return torch.cat([torch.arange(start, start + size) for start, size in self.runs])

    def of(self, name: str, value: Stored) -> Stored:
        """Returns what is read, a copy. Raises CheckpointError as `Cut.of`."""
        self._check(name, value)
        if isinstance(value, Tensor):
            return _picked(value, self.axis, self.places())
        if isinstance(value, QuantizedRows):
            index = self.places().to(value.codes.device)
            codes, ends = _picked(value.codes, self.axis, index), (n for run in self.runs for n in run)
            return _quantized(value, self.axis, codes, index, ends)
        if self.axis == 0:
            index = self.places()
            if isinstance(value, MXRows):
                return MXRows(*(_picked(part, 0, index) for part in value))
            return BlockRows(value.kind, _picked(value.data, 0, index), value.columns)
        parts = [Cut(1, Share(start, size, self.whole)).of(name, value) for start, size in self.runs]
        if isinstance(value, MXRows):
            return MXRows(*(torch.cat(part, 1) for part in zip(*parts, strict=True)))
        data = torch.cat([part.data for part in parts if isinstance(part, BlockRows)], 1)
        return BlockRows(value.kind, data, sum(size for _, size in self.runs))

    def back(self, value: Tensor) -> Tensor:
        """Returns the tensor as it is stored, of which all is read, some perhaps more than once."""
        shape = [*value.shape[: self.axis], self.whole, *value.shape[self.axis + 1 :]]
        return value.new_empty(shape).index_copy_(self.axis, self.places().to(value.device), value)

    def _check(self, name: str, value: Stored) -> None:
        shape = [len(value.data), value.columns] if isinstance(value, BlockRows) else []
        if isinstance(value, MXRows):
            shape = [value.rows, value.columns]
        elif not shape:
            shape = list(value.codes.shape if isinstance(value, QuantizedRows) else value.shape)  # type: ignore[union-attr]
        if self.axis >= len(shape) or shape[self.axis] != self.whole:
            raise CheckpointError(f"{name}: expected {self.whole} in axis {self.axis}, found shape {shape}")


def ordered(axis: int, runs: Iterable[tuple[int, int]], whole: int) -> Order | None:
    """Returns the order in as few runs as there can be; None where it is that of the tensor, all of it."""
    joined: list[tuple[int, int]] = []
    for start, size in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = joined[-1][0], joined[-1][1] + size
        else:
            joined.append((start, size))
    return None if joined == [(0, whole)] else Order(axis, tuple(joined), whole)


def _picked(x: Tensor, axis: int, index: Tensor) -> Tensor:
    """index_select, of any type."""
    if x.dtype.itemsize == 1:
        return x.view(torch.uint8).index_select(axis, index).view(x.dtype)
    return x.index_select(axis, index)


def _quantized(value: QuantizedRows, axis: int, codes: Tensor, index: Tensor, ends: Iterable[int]) -> QuantizedRows:
    """Returns the rows or columns `index` [n] of a quantised matrix, whose codes these are, to the bit. ends: where
    runs begin, and how long all but the last are; where one ends inside a group, groups become smaller."""
    if axis == 1 and value.group_of is not None:
        return value._replace(codes=codes, group_of=value.group_of[index])
    scales, zeros, span = value.scales, value.zeros, len(index)
    if scales.shape[axis] > 1:
        whole = value.wide if axis else value.tall
        span = math.gcd(whole, *ends)
        of = index[::span] // whole
        scales = scales.index_select(axis, of)
        zeros = None if zeros is None else zeros.index_select(axis, of)
    tall, wide = (value.tall, span) if axis else (span, value.wide)
    return value._replace(codes=codes, scales=scales, zeros=zeros, tall=tall, wide=wide)
