"""GEMMs of weights in quantised blocks: ops/cpu/csrc/block_gemm.c. Weights are copied into panels once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftwing.ops.cpu.arena import Arena
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.cpu.workers import Workers
from draftwing.ops.gemm.contract import ANY_ROWS
from draftwing.ops.gemm.stored import BlockRows

TYPES = {  # GGML's numbers
    **{"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14},
    "MXFP4": 39,
}
QUANTIZED = {"Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_K": (256, 144)}  # (values, bytes) of a block that is made here
_PANEL = 16  # outputs that are stored together
_SLICE = 1 << 22  # values that are quantised at a time


class _Panels(NamedTuple):
    """Rows of a weight of one kind, packed."""

    data: Tensor  # [panels, bytes]
    kind: int
    rows: int


class BlockedGemm:
    """Implements `BlockGemm`: x @ weight.T + bias + residual. Rows are rounded to 8 bits in blocks of 32."""

    max_rows = ANY_ROWS
    block = 0  # see `PackedGemm`

    def __init__(self, parts: Sequence[BlockRows], dtype: torch.dtype, workers: Workers, arena: Arena) -> None:
        """dtype: float32 or bfloat16, of x, bias, residual and the result. arena: where the panels lie."""
        self.raw: Any = load_extension()
        self.workers = workers
        self.dtype, self.inputs = dtype, parts[0].columns
        self.rounded = self.inputs + self.inputs // 32 * 20  # bytes of a row in 8 bits, as C's `rounded_size` has it
        self._take([_Panels(self._packed(part, arena), TYPES[part.kind], part.data.shape[0]) for part in parts])

    def _take(self, parts: Sequence[_Panels]) -> None:
        """Takes parts; its outputs are those of the parts, in their order."""
        self._panels, numbers, first = parts, [len(parts)], 0
        for part in parts:
            numbers += [part.data.data_ptr(), part.kind, first, part.rows]
            first += part.rows
        self.outputs = first
        self.nbytes = sum(part.data.nbytes for part in parts)
        self._numbers = torch.tensor(numbers)
        self.address, self.parts = 0, self._numbers.data_ptr()
        # Whether threads share outputs, which they do in panels, if these are the same for all parts.
        self.shared = all(part.rows % _PANEL == 0 for part in parts[:-1])

    def last(self, outputs: int) -> BlockedGemm:
        """Returns the GEMM of the last so many outputs, or of some more where they do not begin with a panel, on the
        same memory; with the same bits."""
        parts: list[_Panels] = []
        for part in reversed(self._panels):
            if outputs <= 0:
                break
            skipped = max(part.rows - outputs, 0) // _PANEL
            parts.insert(0, _Panels(part.data[skipped:], part.kind, part.rows - skipped * _PANEL))
            outputs -= part.rows
        found = copy(self)
        found._take(parts)
        return found

    def _packed(self, part: BlockRows, arena: Arena) -> Tensor:
        """Returns panels [panels, bytes]."""
        rows, kind = part.data.shape[0], TYPES[part.kind]
        panels = arena.empty(-(-rows // _PANEL), self.raw.panel_bytes(kind, self.inputs))
        assert part.columns == self.inputs and part.data.dtype == torch.uint8 and part.data.stride(1) == 1
        data = part.data.contiguous()
        self.raw.block_pack(panels, data, kind, rows, self.inputs, self.workers.address)
        return panels

    def gated(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        return None

    def linear(self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False) -> Tensor:
        rows, outputs = x.shape[0], self.outputs
        assert x.shape[1] == self.inputs and x.dtype == self.dtype
        x, out = x.contiguous(), x.new_empty(rows, outputs)
        if residual is not None:
            assert residual.shape == out.shape and residual.dtype == out.dtype
            residual = residual.contiguous()
        spare = x.new_empty(rows * self.rounded, dtype=torch.uint8)
        self.raw.block_gemm(
            out, x, residual, rows, 0, bias, self.inputs, outputs, 0, self.parts, x.dtype == torch.bfloat16,
            _PANEL if self.shared else outputs, spare, self.workers.address,
        )  # fmt: skip
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """ids [...] int64 -> rows of the weight, [..., inputs]; zeros for an id that is no output."""
        ids = ids.contiguous()
        out = torch.empty(*ids.shape, self.inputs, dtype=torch.float32)
        self.raw.block_rows(out, ids, self.parts, self.inputs, ids.numel())
        return out if self.dtype == torch.float32 else out.to(self.dtype)

    def copy_from(self, other: BlockedGemm) -> None:
        for own, theirs in zip(self._panels, other._panels, strict=True):
            assert (own.kind, own.rows, own.data.shape) == (theirs.kind, theirs.rows, theirs.data.shape)
            own.data.copy_(theirs.data)

    def pack(self, data: Tensor) -> None:
        """Puts other rows [n, bytes] into the only panel, of as many as that has."""
        ((panel, kind, _),) = self._panels
        self.raw.block_pack(panel, data, kind, len(data), self.inputs, self.workers.address)

    def dense(self) -> Tensor:
        return self.rows(torch.arange(self.outputs))


class BlockReader:
    """Rows of blocks as a file has them, by their ids: some are taken and packed, and then read as a weight's."""

    def __init__(
        self,
        source: BlockRows,
        dtype: torch.dtype,
        workers: Workers,
        arena: Arena,
        take_rows: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """take_rows: `LayerOps.take_rows`."""
        self._source, self._take_rows = source, take_rows
        nothing = torch.zeros(_PANEL, source.data.shape[1], dtype=torch.uint8)
        self._panel = BlockedGemm([source._replace(data=nothing)], dtype, workers, arena)
        self._places = torch.arange(_PANEL)

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [M] int64 -> [M, columns]"""
        if len(ids) <= _PANEL:
            return self._few(ids)
        return torch.cat([self._few(some) for some in ids.split(_PANEL)])

    def _few(self, ids: Tensor) -> Tensor:
        data = self._take_rows(self._source.data, ids)
        self._panel.pack(data)
        return self._panel.rows(self._places[: len(ids)])


def quantize(raw: Any, workers: Workers, weight: Tensor, kind: str) -> BlockRows:
    """weight [rows, columns], floating point -> blocks of a kind of `QUANTIZED`."""
    values, size = QUANTIZED[kind]
    rows, columns = weight.shape
    assert columns % values == 0
    data = torch.empty(rows, columns // values * size, dtype=torch.uint8)
    step = max(1, _SLICE // columns)  # all of it in float32 would be several times what is kept
    for start in range(0, rows, step):
        wide = weight.detach()[start : start + step].float().contiguous()
        part = data[start : start + step]
        raw.block_quantize(part, wide, TYPES[kind], wide.numel() // values, workers.address)
    return BlockRows(kind, data, columns)
