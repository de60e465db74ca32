"""Products of few rows with a large weight on CUDA: the Python side of skinny.cu.

A row's result has the same bits whatever other rows are in the batch, for any number of rows.
"""

from __future__ import annotations

import functools
from importlib import resources

import torch
from torch import Tensor

from draftwing.kernels.nvrtc import Kernel, Module, compile_source

_DTYPES = (torch.bfloat16, torch.float16)
_WARPS, _CHUNK = 8, 64  # of skinny.cu: warps of a block; K comes in chunks
_SMALL = (8, 16, 32, 64)  # rows of x that a block takes
_LARGE, _STAGES = 128, 3  # rows of x and features of the largest block, and how many chunks it has in shared memory
_BLOCKS = 2  # that shared memory of a multiprocessor is set aside for; the rest caches weights on their way
_KINDS = ("plain", "add", "silu")


def tile_of(rows: int, features: int, processors: int) -> int:
    """Rows of x that a block takes, which has no influence on the result. features: rows of the weight."""
    if rows <= _SMALL[-1]:
        return next(tile for tile in _SMALL if tile >= rows)
    # The largest needs a lot of work to be faster: blocks for half of the processors.
    return _LARGE if 2 * -(-rows // _LARGE) * -(-features // _LARGE) >= processors else _SMALL[-1]


def features_of(kind: str, tile: int) -> int:
    """Rows of the weight that a block takes, as in skinny.cu."""
    if tile > 32:
        return _LARGE if tile == _LARGE else 32
    return 16 if kind == "add" or (kind, tile) == ("plain", 16) else 32


def grid_of(kind: str, tile: int, rows: int, width: int) -> tuple[int, int]:
    """width: of the result."""
    outputs = features_of(kind, tile) // (2 if kind == "silu" else 1)  # of a block
    features, tokens = -(-width // outputs), -(-rows // tile)
    # Blocks that run at the same time share weights where x is the larger part of what they read.
    return (features, tokens) if tile in _SMALL else (tokens, features)


def shared_bytes(kind: str, tile: int) -> int:
    sums = features_of(kind, tile) * (tile + 1) * 4
    return _WARPS * sums if tile in _SMALL else max(_STAGES * 2 * _LARGE * _CHUNK * 2, sums)


class SkinnyProducts:
    """The kernels of one dtype on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, source: str | None = None) -> None:
        """source: in place of skinny.cu, to try variants of it."""
        module = Module(source or read_source(), _options(dtype), device)
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._kernels: dict[tuple[str, int], Kernel] = {
            (kind, tile): module.kernel(f"{kind}_{tile}", _WARPS * 32, shared_bytes(kind, tile), blocks=_BLOCKS)
            for tile in (*_SMALL, _LARGE)
            for kind in _KINDS
        }

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
        tile = tile_of(rows, weight.shape[0], self._processors)
        out = x.new_empty(rows, width)
        args = (x, weight, bias, residual, out, rows, width, depth)
        self._kernels[kind, tile](grid_of(kind, tile, rows, width), *args)
        return out


def compile_ahead(dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """Puts what `SkinnyProducts` compiles into the user's cache folder, for devices of this compute capability."""
    if dtype in _DTYPES:
        compile_source(read_source(), _options(dtype), capability)


def _options(dtype: torch.dtype) -> list[str]:
    return [f"-DTYPE_BF16={int(dtype == torch.bfloat16)}"]


def read_source() -> str:
    return resources.files("draftwing.kernels").joinpath("skinny.cu").read_text(encoding="utf-8")


@functools.cache
def skinny_products(device: torch.device, dtype: torch.dtype) -> SkinnyProducts:
    """Compiles on first use. Raises OSError without NVRTC, RuntimeError where the device is too old."""
    return SkinnyProducts(device, dtype)


def takes(weight: Tensor) -> bool:
    """Whether the kernels multiply with this weight, which they read 16 bytes at a time."""
    fits = weight.dtype in _DTYPES and weight.shape[1] % _CHUNK == 0
    return weight.is_cuda and fits and weight.is_contiguous() and weight.data_ptr() % 16 == 0
