"""Weights in blocks of any bytes, and operations whose GEMMs dequantise them: what tests compare with, and run on
anywhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from group_ops import by_rows
from torch import Tensor

from draftwing.ops.gemm.contract import ANY_ROWS
from draftwing.ops.gemm.spec import GemmOps
from draftwing.ops.gemm.stored import BlockRows
from draftwing.ops.table import TorchOps

# Where a block has its float16 numbers; others: at 0 and 2.
HALVES = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "MXFP4": ()}


def blocks(kind: str, rows: int, columns: int, seed: int = 0) -> BlockRows:
    """Any bytes but for the float16 scales, which are of all sizes."""
    rng = np.random.default_rng(seed)
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    if kind == "MXFP4":  # an exponent each
        data[:, :, 0] = rng.integers(0, 2, (rows, columns // values)) + rng.integers(104, 125, (rows, 1))
    for at in HALVES.get(kind, (0, 2)):
        scale = rng.uniform(-1, 1, (rows, columns // values, 1)) * 10.0 ** rng.integers(-7, 0, (rows, 1, 1))
        data[:, :, at : at + 2] = scale.astype(np.float16).view(np.uint8)
    return BlockRows(kind, torch.from_numpy(data.reshape(rows, -1)), columns)


class DenseBlockGemm:
    max_rows = ANY_ROWS

    def __init__(self, parts: Sequence[BlockRows], dtype: torch.dtype) -> None:
        dense = [dequantize(rows.data.numpy(), GGMLQuantizationType[rows.kind]) for rows in parts]
        self.weight = torch.cat([torch.from_numpy(part) for part in dense])
        self.outputs, self.inputs = self.weight.shape
        self.dtype = dtype

    def gated(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        return None

    def linear(self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False) -> Tensor:
        assert x.dtype == self.dtype
        y = by_rows(x, self.weight)
        y = y if bias is None else y + bias
        return (y if residual is None else y + residual).to(self.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight[ids].to(self.dtype)

    def dense(self) -> Tensor:
        return self.weight.to(self.dtype)


class BlockGemmOps(GemmOps):
    block_kinds = frozenset({"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q6_K"})

    def block_gemm(self, parts: Sequence[BlockRows], dtype: torch.dtype) -> DenseBlockGemm:
        assert {rows.kind for rows in parts} <= self.block_kinds
        return DenseBlockGemm(parts, dtype)

    def quantize(self, weight: Tensor, kind: str) -> BlockRows:
        data = quantize(weight.detach().float().numpy(), GGMLQuantizationType[kind])
        return BlockRows(kind, torch.from_numpy(data), weight.shape[1])


class BlockTorchOps(TorchOps):
    def __init__(self, device: torch.device, kinds: frozenset[str] = BlockGemmOps.block_kinds) -> None:
        gemms = BlockGemmOps()
        gemms.block_kinds = kinds
        super().__init__(device, gemms=gemms)
