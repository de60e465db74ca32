"""What one rank reads of a checkpoint's tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.gguf_file import block_values
from draftwing.ops.types import MX_BLOCK, BlockRows, MXRows
from draftwing.parallel.ranks import Share


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

    def of(self, name: str, value: Tensor | BlockRows | MXRows) -> Tensor | BlockRows | MXRows:
        """The part of what was read or mapped, a view. Raises CheckpointError for a tensor of another size, and where
        columns do not begin and end with a block."""
        if isinstance(value, Tensor):
            return self.of_tensor(name, value)
        if isinstance(value, MXRows):
            return self._of_mx(name, value)
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

    def _check(self, name: str, shape: list[int]) -> None:
        if self.axis >= len(shape) or shape[self.axis] != self.share.whole:
            raise CheckpointError(f"{name}: expected {self.share.whole} in axis {self.axis}, found shape {shape}")
