"""What one rank reads of a checkpoint's tensors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.gguf_file import block_values
from draftwing.ops.types import MX_BLOCK, BlockRows, MXRows, QuantizedRows
from draftwing.parallel.ranks import Share

Stored = Tensor | BlockRows | MXRows | QuantizedRows


class Cut(NamedTuple):
    """`share` of an axis of a tensor as it is stored."""

    axis: int
    share: Share

    def read(self, name: str, stored: Any) -> Tensor:
        """The part of a tensor in a safetensors file, whose other bytes are not read. stored: its slice object."""
        self._check(name, stored.get_shape())
        start, size, _ = self.share
        part: Tensor = stored[start : start + size] if self.axis == 0 else stored[:, start : start + size]
        return part

    def of(self, name: str, value: Stored) -> Stored:
        """The part of what was read or mapped, a view. Raises CheckpointError for a tensor of another size, and where
        columns do not begin and end with a block."""
        if isinstance(value, Tensor):
            return self.of_tensor(name, value)
        if isinstance(value, MXRows):
            return self._of_mx(name, value)
        if isinstance(value, QuantizedRows):
            return self._of_quantized(name, value)
        (start, size, whole), (kind, data, columns) = self.share, value
        self._check(name, [len(data), columns])
        if self.axis == 0:
            return BlockRows(kind, data[start : start + size], columns)
        block = block_values(kind)
        if start % block or size % block:
            raise CheckpointError(
                f"{name}: a share of {size} of its {whole} columns in {kind} is no whole number of blocks of {block}: "
                "expected a smaller --tp-size, or a checkpoint that is not quantised"
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
                f"{MX_BLOCK}: expected a smaller --tp-size"
            )
        codes, exponents = value.codes, value.exponents
        first = start // MX_BLOCK
        return MXRows(codes[:, start // 2 : (start + size) // 2], exponents[:, first : first + size // MX_BLOCK])

    def of_tensor(self, name: str, value: Tensor) -> Tensor:
        """The part, a view. Raises CheckpointError for a tensor of another size."""
        self._check(name, list(value.shape))
        return value.narrow(self.axis, self.share.start, self.share.size)

    def _of_quantized(self, name: str, value: QuantizedRows) -> QuantizedRows:
        """The same of a quantised matrix, to the bit: where a share begins inside a group, groups become smaller."""
        self._check(name, list(value.codes.shape))
        start, size, _ = self.share
        codes = value.codes.narrow(self.axis, start, size).contiguous()
        if self.axis == 1 and value.group_of is not None:
            return value._replace(codes=codes, group_of=value.group_of[start : start + size])
        whole = value.wide if self.axis else value.tall
        span = math.gcd(start, whole)
        of = (start + torch.arange(0, size, span, device=codes.device)) // whole
        scales = value.scales.index_select(self.axis, of)
        zeros = None if value.zeros is None else value.zeros.index_select(self.axis, of)
        tall, wide = (value.tall, span) if self.axis else (span, value.wide)
        return value._replace(codes=codes, scales=scales, zeros=zeros, tall=tall, wide=wide)

    def _check(self, name: str, shape: list[int]) -> None:
        if self.axis >= len(shape) or shape[self.axis] != self.share.whole:
            raise CheckpointError(f"{name}: expected {self.share.whole} in axis {self.axis}, found shape {shape}")
