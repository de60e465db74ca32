"""GEMMs on weights packed for oneDNN, in a way that gives each row the same bits among any number of rows.

This is what makes greedy text with speculation equal text without it in bfloat16. How oneDNN sums depends on the CPU,
so it is tried out.
"""

from __future__ import annotations

import ctypes
import functools

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows of every GEMM where the order of sums changes with their number: few enough to cost little more than one row,
# for it is the weight that takes time.
BLOCK = 32
MAX_TRIED = 8192  # outputs; the GEMMs of more are summed as these are
_TRIED = (2, 3, 4, 7, 16, 33, 64, 130)  # numbers of rows that are compared with 300


def takes(weight: Tensor) -> bool:
    """Returns whether oneDNN takes this weight: a CPU tensor of a dtype for which its GEMMs are faster than torch's."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


def pack(weight: Tensor) -> Tensor:
    """weight [outputs, inputs] -> a copy in oneDNN's layout, of the same shape."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return packed


def copy(source: Tensor, target: Tensor) -> None:
    """Copies a packed weight into the memory of another one of the same shape and type."""
    size = torch.ops.mkldnn._nbytes(target)
    assert source.shape == target.shape and source.dtype == target.dtype
    assert torch.ops.mkldnn._nbytes(source) == size
    ctypes.memmove(torch.ops.mkldnn.data_ptr(target), torch.ops.mkldnn.data_ptr(source), size)


def gemm(x: Tensor, packed: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """x [M, inputs] @ weight^T + bias [outputs] + residual [M, outputs] -> [M, outputs]."""
    out: Tensor
    if residual is None:
        out = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    else:
        out = torch.ops.mkldnn._linear_pointwise.binary(x, residual, packed, bias, "add")
    return out


def gemm_alike(x: Tensor, packed: Tensor, bias: Tensor | None, residual: Tensor | None, alike: int) -> Tensor:
    """Multiplies, each row with the same bits among any number of rows; alike: as `rows_summed_alike` has it."""
    rows = x.shape[0]
    if alike == 2 and rows == 1:
        both = None if residual is None else torch.cat((residual, residual))
        return gemm(torch.cat((x, x)), packed, bias, both)[:1]
    if alike <= 2:
        return gemm(x, packed, bias, residual)
    missing = -rows % alike
    parts = F.pad(x, (0, 0, 0, missing)).split(alike)
    if residual is None:
        return torch.cat([gemm(part, packed, bias, None) for part in parts])[:rows]
    added = F.pad(residual, (0, 0, 0, missing)).split(alike)
    return torch.cat([gemm(part, packed, bias, more) for part, more in zip(parts, added, strict=True)])[:rows]


@functools.cache
def rows_summed_alike(in_features: int, out_features: int, dtype: torch.dtype, threads: int) -> int:
    """1 if oneDNN sums a row of such a GEMM in the same order among any number of rows on this CPU, 2 if among any
    but for a row alone, else `BLOCK`: then the number must always be the same. threads: that torch has.

    Tried out on rows whose terms cancel, so that what is left is the rounding of the partial sums, another one for
    each order. Weights are ones.
    """
    x, packed = order_probe(in_features, out_features, dtype)
    expected = gemm(x, packed, None, None)
    residual = torch.zeros_like(expected)

    def agree(begin: int, rows: int) -> bool:
        some, kept = x[begin : begin + rows], expected[begin : begin + rows]
        added = gemm(some, packed, None, residual[:rows])
        return torch.equal(gemm(some, packed, None, None), kept) and torch.equal(added, kept)

    if not all(agree(rows, rows) for rows in _TRIED):
        return BLOCK
    return 1 if all(agree(row, 1) for row in range(4)) else 2


def summed_as(weight: Tensor, whole: int, threads: int) -> bool:
    """Returns whether a row's sums with this share of a matrix of so many rows have the order of those with all."""
    rows, columns = weight.shape
    some, every = min(rows, MAX_TRIED), min(whole, MAX_TRIED)
    return every <= some or _same_order(columns, some, every, weight.dtype, threads)


@functools.cache
def _same_order(in_features: int, one: int, other: int, dtype: torch.dtype, threads: int) -> bool:
    (x, first), (_, second) = (order_probe(in_features, outputs, dtype) for outputs in (one, other))
    return torch.equal(gemm(x, first, None, None)[:, 0], gemm(x, second, None, None)[:, 0])


def order_probe(in_features: int, out_features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows [300, in_features] whose terms cancel, and a weight of ones, packed."""
    return _cancelling_rows(in_features, dtype), pack(torch.ones(out_features, in_features, dtype=dtype, device="cpu"))


@functools.lru_cache(maxsize=1)
def _cancelling_rows(in_features: int, dtype: torch.dtype) -> Tensor:
    """Returns the rows of `order_probe`, which take longer to make than to multiply. They are kept for the next GEMM,
    which mostly has as many inputs."""
    generator = torch.Generator().manual_seed(0)
    half = in_features // 2
    size = torch.randint(0, 20, (300, half), generator=generator).float().exp2()
    terms = (torch.randn(300, half, generator=generator, dtype=torch.float32) * size).to(dtype)
    x = torch.cat((terms, -terms, terms.new_zeros(300, in_features % 2)), 1)
    return x.gather(1, torch.rand(x.shape, generator=generator, dtype=torch.float32).argsort(1))
