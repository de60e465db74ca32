"""Pools with random tokens, and batches of trees and chunks over them, for tests of attention on a CPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.kv.pool import KVPool, KVSpec
from draftwing.ops.attention.batch import Batch, ChunkSpan
from draftwing.ops.attention.cpu import NativeAttention
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.cpu.workers import Workers

KERNELS = load_extension()
CPU = torch.device("cpu")
LAYER = 1  # of the pool: the attention under test is bound one layer past the first


def native(pool: KVPool) -> NativeAttention:
    assert KERNELS is not None
    return NativeAttention(pool, KERNELS, Workers())


class Tokens(NamedTuple):
    q: Tensor  # [S, heads, head_dim]
    k: Tensor  # [S, kv_heads, head_dim]
    v: Tensor


def make_tokens(count: int, shape: tuple[int, int, int], dtype: torch.dtype, seed: int) -> Tokens:
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(count, heads, dim, generator=generator) * 2
    k, v = torch.randn(2, count, kv_heads, dim, generator=generator)
    dtype = torch.float32 if dtype == torch.int8 else dtype  # the pool's
    return Tokens(q.to(dtype), k.to(dtype), v.to(dtype))


def make_pool(shape: tuple[int, int, int], dtype: torch.dtype, garbage: bool = False) -> KVPool:
    """Filled with NaN, which would show, or with finite garbage: nobody may read a slot that is not theirs."""
    pool = KVPool([KVSpec(*shape[1:])] * (LAYER + 1), 4000, dtype, CPU)
    for kv in pool.kv:
        kv.fill_(-1 if dtype == torch.int8 else torch.nan)  # as scales these bytes are NaN, too
        if garbage:
            kv.normal_(generator=torch.Generator().manual_seed(99))
    return pool


def make_batch(
    table: Tensor, prefix: list[int], write: Tensor, paths: list[list[list[int]]], window: int = 0, depth: int = 0
) -> Batch:
    """paths[b][i]: query i's path in row b; depth: entries of every path, those past its end are anything valid."""
    nodes = len(paths[0])
    depth = max(depth, *(len(entries) for row in paths for entries in row))
    generator = torch.Generator().manual_seed(5)
    path = torch.randint(0, window or nodes, (len(paths), nodes, depth), generator=generator)
    path_len = torch.ones(len(paths), nodes, dtype=torch.int64)
    for b, row in enumerate(paths):
        for i, entries in enumerate(row):
            path[b, i, : len(entries)] = torch.tensor(entries)
            path_len[b, i] = len(entries)
    none = torch.zeros(0, dtype=torch.int64)
    rows, whole = among_others(table)
    bound = table.shape[1]
    return Batch(rows, none, none, write, whole, torch.tensor(prefix), path, path_len, window or nodes, bound=bound)


def among_others(table: Tensor) -> tuple[Tensor, Tensor]:
    """Page tables [B, P] as rows of a row table, in another order and with room: the rows' numbers, and all of it."""
    size, width = table.shape
    rows = torch.arange(size, 0, -1)
    whole = torch.full((size + 2, width + 9), 1 << 40)  # a slot that nobody may read
    whole[rows, :width] = table
    return rows, whole


def chunk_batch(table: Tensor, chunks: tuple[ChunkSpan, ...], write: Tensor) -> Batch:
    none = torch.zeros(0, dtype=torch.int64)
    rows, whole = among_others(table)
    return Batch(rows, none, none, write, whole, none, chunks=chunks, bound=table.shape[1])


def random_paths(nodes: int, generator: torch.Generator) -> list[list[int]]:
    """Node 0 is the root; about one node in five is dead and sees only itself, like its children."""
    paths = [[0]]
    for i in range(1, nodes):
        parent = int(torch.randint(0, i, (1,), generator=generator))
        dead = int(torch.randint(0, 5, (1,), generator=generator)) == 0
        paths.append([*paths[parent], i] if not dead and paths[parent][0] == 0 else [i])
    return paths
