"""Attention to all of a picture's patches in C. A query has the same bits with whichever others it is asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.kv.pool import zeros_as_written
from draftwing.ops.attention.whole import WholeAttention, whole_attention
from draftwing.ops.cpu.extension import DTYPES
from draftwing.ops.cpu.runtime import CpuRuntime


class NativeWhole:
    """Keys and values of a layer's heads, each head's in one piece, which is read faster. To the kernel a head is a row
    of a pool that has one head."""

    def __init__(self, runtime: CpuRuntime, k: Tensor, v: Tensor, scalar: int) -> None:
        self._raw, self._workers, self._scalar = runtime.raw, runtime.workers, scalar
        self._count, self._heads, self._size = k.shape
        self._kv = k.new_empty(self._heads, self._count, 2, self._size)
        self._kv[:, :, 0], self._kv[:, :, 1] = k.transpose(0, 1), v.transpose(0, 1)
        self._table = torch.arange(self._heads * self._count).view(self._heads, self._count)
        self._threads = self._workers.most
        # Nobody else's: pictures of others may be read at the same time.
        self._scratch_size = self._raw.scratch_size(1, 1, self._size, self._threads)
        self._scratch = zeros_as_written((self._scratch_size,), torch.float32, k.device)

    def __call__(self, q: Tensor) -> Tensor:
        queries, heads, size = q.shape
        assert (heads, size, q.dtype) == (self._heads, self._size, self._kv.dtype)
        assert self._workers.most == self._threads
        q = q.transpose(0, 1).contiguous()
        out, row = torch.empty_like(q), torch.arange(heads)
        start = torch.full((heads,), max(self._count - queries, 0))
        spans = torch.stack((row, row * queries, start, torch.full((heads,), queries)), 1)
        counts = torch.full((heads * queries,), self._count)
        half = q.dtype == torch.bfloat16
        self._raw.attend(
            out, q, self._kv, size, 1, 1, size, half, half, row, self._table, self._count, None, None, counts, spans,
            None, heads, queries, 0, self._scratch, self._scratch_size, self._workers.address, 0, 0, self._scalar, 2,
            0, 0.0,
        )  # fmt: skip
        return out.transpose(0, 1).flatten(1)


def native_whole(runtime: CpuRuntime, k: Tensor, v: Tensor, scalar: int = 0) -> WholeAttention:
    """Returns what `whole_attention` does, in C for tensors that it takes."""
    return NativeWhole(runtime, k, v, scalar) if k.dtype in DTYPES else whole_attention(k, v, scalar)
