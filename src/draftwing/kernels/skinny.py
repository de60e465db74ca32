"""Products of few rows with a large weight on CUDA: the Python side of skinny.cu.

A row's result has the same bits whatever other rows are in the batch, for any number of rows.
"""

from __future__ import annotations

import functools
from importlib import resources

import torch
from torch import Tensor

from draftwing.kernels.nvrtc import Kernel, Module

_DTYPES = (torch.bfloat16, torch.float16)
_WARPS, _CHUNK, _FEATURES = 8, 64, 16  # of skinny.cu: warps and features of a block; K comes in chunks
_TILES = (8, 16, 32)  # rows of x that a block takes


class SkinnyProducts:
    """The kernels of one dtype on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, source: str | None = None) -> None:
        """source: in place of skinny.cu, to try variants of it."""
        module = Module(source or read_source(), [f"-DTYPE_BF16={int(dtype == torch.bfloat16)}"], device)
        self._kernels: dict[tuple[str, int], Kernel] = {}
        for rows in _TILES:
            shared = _WARPS * _FEATURES * (rows + 1) * 4
            for kind in ("plain", "add", "silu"):
                self._kernels[kind, rows] = module.kernel(f"{kind}_{rows}", _WARPS * 32, shared)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
        """x [M, K] @ weight [N, K]^T + bias [N] + residual [M, N] -> [M, N], rounded once."""
        return self._run("plain" if residual is None else "add", x, weight, bias, residual, weight.shape[0])

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """silu(x @ gate^T) * (x @ up^T), weight [2 * N, K] the gates and then the ups -> [M, N]"""
        return self._run("silu", x, weight, bias, None, weight.shape[0] // 2)

    def _run(
        self, kind: str, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, width: int
    ) -> Tensor:
        x = x.contiguous()
        rows, depth = x.shape
        assert weight.is_contiguous() and (residual is None or residual.is_contiguous())
        tile = next((t for t in _TILES if t >= rows), _TILES[-1])
        features = _FEATURES // 2 if kind == "silu" else _FEATURES
        out = x.new_empty(rows, width)
        grid = (-(-width // features), -(-rows // tile))
        self._kernels[kind, tile](grid, x, weight, bias, residual, out, rows, width, depth, None, 0)
        return out


def read_source() -> str:
    return resources.files("draftwing.kernels").joinpath("skinny.cu").read_text(encoding="utf-8")


@functools.cache
def skinny_products(device: torch.device, dtype: torch.dtype) -> SkinnyProducts:
    """Compiles on first use. Raises OSError without NVRTC, RuntimeError where the device is too old."""
    return SkinnyProducts(device, dtype)


def takes(weight: Tensor) -> bool:
    """Whether the kernels multiply with this weight."""
    return weight.is_cuda and weight.dtype in _DTYPES and weight.shape[1] % _CHUNK == 0 and weight.is_contiguous()
