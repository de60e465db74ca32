"""Products of heads with matrices of their own on CUDA: the Python side of gemm_heads.cu.

A row's result has the same bits whatever other rows are in the batch, for any number of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from draftwing.ops.cuda.nvrtc import ALL_SHARED, Kernel, Module, compile_source
from draftwing.ops.gemm.cuda import options_for, read_files
from draftwing.ops.gemm.shapes import SHARES

_CHUNK, _FEATURES = 64, 16  # of gemm.cu: columns of a chunk, and features of a warp
_WARPS, _TILE = 2, 8  # of gemm_heads.cu: of a block, and rows at a time
_ROWS = 32  # that blocks share at most; a few tiles, for a matrix is small beside the rows. Not swept


class HeadGemm:
    """`HeadProducts` of weights in 16 bits."""

    def __init__(self, weight: Tensor, heads: int) -> None:
        """weight [heads * outputs, inputs]; such that `takes` it."""
        self.weight, self.heads = weight.detach(), heads
        self.outputs, self.inputs = weight.shape[0] // heads, weight.shape[1]
        self.chunks = self.inputs // _CHUNK

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], self.heads, self.outputs)
        return self._run(x, out, 1.0, None, x, x)

    def queries(self, x: Tensor, turned: Tensor, cos: Tensor, sin: Tensor, factor: float) -> Tensor:
        """See `LayerOps.head_queries`."""
        out = x.new_empty(x.shape[0], self.heads, self.outputs + turned.shape[2])
        return self._run(x, out, factor, turned, cos, sin)

    def _run(self, x: Tensor, out: Tensor, factor: float, turned: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
        rows, heads, inputs = x.shape
        assert (heads, inputs) == (self.heads, self.inputs) and x.dtype == self.weight.dtype == cos.dtype
        if x.stride(0) % 8 or x.stride(1) % 8:  # 8 elements are loaded at a time
            x = x.contiguous()
        assert x.stride(2) == 1 and x.storage_offset() % 8 == 0
        if x.is_meta or not rows:
            return out
        beside = 0, 0, 0, 0  # width; strides of rows and heads, and of angles
        if turned is not None:
            assert turned.stride(2) == cos.stride(-1) == sin.stride(-1) == 1 and cos.stride(0) == sin.stride(0)
            beside = turned.shape[2], turned.stride(0), turned.stride(1), cos.stride(0)
        head_kernel(x.device, x.dtype, self.chunks)(
            grid(rows, heads, self.outputs, beside[0]), x, self.weight, out, rows, self.outputs, heads, *x.stride()[:2],
            *out.stride()[:2], factor, turned, cos, sin, *beside,
        )  # fmt: skip
        return out


def grid(rows: int, heads: int, outputs: int, turned: int) -> tuple[int, int]:
    """Blocks: of features and, behind them, of pairs that are turned; and of rows. turned: elements of a head."""
    features, pairs = heads * outputs // _FEATURES, min(rows, _TILE) * heads * turned // 2
    return -(-features // _WARPS) + -(-pairs // (_WARPS * 32)), -(-rows // _ROWS)


def takes(weight: Tensor, heads: int, dtype: torch.dtype) -> bool:
    """Returns whether the kernels multiply activations of `dtype` with this weight [heads * outputs, inputs]."""
    outputs, inputs = weight.shape[0] // heads, weight.shape[1]
    fits = inputs % _CHUNK == 0 and inputs <= SHARES * _CHUNK and outputs % _FEATURES == 0
    fits = fits and weight.dtype == dtype and dtype in (torch.bfloat16, torch.float16) and weight.is_contiguous()
    return fits and (weight.is_meta or (weight.is_cuda and weight.data_ptr() % 16 == 0))


@functools.cache
def head_kernel(device: torch.device, dtype: torch.dtype, chunks: int) -> Kernel:
    """Compiles on first use. Raises OSError without NVRTC, RuntimeError where the device is too old."""
    module = Module(read_source((chunks,)), options_for(dtype), device)
    # Attention and the GEMM behind it come up meanwhile, and find no room where little shared memory is set aside.
    return module.kernel(f"heads_{chunks}", _WARPS * 32, blocks=ALL_SHARED)


def compile_ahead(dtype: torch.dtype, chunks: int, capability: tuple[int, int]) -> None:
    """Puts what `HeadGemm` compiles into the user's cache folder, for devices of this compute capability."""
    compile_source(read_source((chunks,)), options_for(dtype), capability)


def read_source(chunks: Iterable[int]) -> str:
    """Returns what is compiled, for matrices of so many chunks of columns."""
    return "".join([*read_files(("gemm.cu", "gemm_heads.cu")), *(f"HEAD_KERNEL({count})\n" for count in chunks)])
