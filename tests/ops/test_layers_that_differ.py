"""Layers of one forward whose keys and values differ in number and size, and layers that read another's, on all
backends: the bits of each are those that it has alone."""

from __future__ import annotations

import pytest
import torch
from plain_attention import brute_force
from torch import Tensor

from draftwing.kv.pool import KVPool, KVSpec
from draftwing.ops.attention import AttentionKind, Batch, ChunkSpan, HeadShape
from draftwing.ops.torch.ops import TorchOps

# As many heads of queries in most, so that only the whole shape tells them apart.
SHAPES = [HeadShape(4, 2, 16), HeadShape(4, 4, 16), HeadShape(4, 1, 32), HeadShape(4, 2, 32), HeadShape(2, 1, 32)]
CACHED, LENGTH = 9, 45  # of the text
PATHS = [[0], [0, 1], [0, 2], [0, 2, 3], [0, 1, 4]]


def chunk(table: Tensor) -> tuple[Batch, list[list[int]]]:
    """One chunk behind the cached tokens, and which entries of the page table each of its queries sees."""
    length, zero = LENGTH - CACHED, torch.zeros(1, dtype=torch.int64)
    at = torch.arange(CACHED, LENGTH)
    spans = (ChunkSpan(0, 0, CACHED, length),)
    batch = Batch(zero, at, at, table[0, CACHED:LENGTH], table, zero + CACHED, chunks=spans, bound=LENGTH)
    return batch, [list(range(position + 1)) for position in at.tolist()]


def tree(table: Tensor) -> tuple[Batch, list[list[int]]]:
    nodes, zero = len(PATHS), torch.zeros(1, dtype=torch.int64)
    path = torch.tensor([[own + [0] * (3 - len(own)) for own in PATHS]])
    path_len = torch.tensor([[len(own) for own in PATHS]])
    slots = table[0, CACHED : CACHED + nodes]
    at = CACHED + path_len[0] - 1
    batch = Batch(zero, at, at, slots, table, zero + CACHED, path, path_len, window=nodes, bound=LENGTH)
    return batch, [[*range(CACHED), *(CACHED + entry for entry in own)] for own in PATHS]


@pytest.mark.parametrize("make", [chunk, tree])
def test_each_is_as_it_is_alone(ops: TorchOps, make) -> None:  # type: ignore[no-untyped-def]
    rng, device = torch.Generator().manual_seed(4), ops.device
    table = (torch.randperm(2 * LENGTH, generator=rng) + 1)[None, : LENGTH + 10]
    batch, seen = make(table)
    on = [part.to(device) if isinstance(part, Tensor) else part for part in batch]
    pool = KVPool([KVSpec(1, 16), *(KVSpec(*shape[1:]) for shape in SHAPES)], 2 * LENGTH, torch.float32, device)
    for kv in pool.kv:
        kv.copy_(torch.randn(kv.shape, generator=rng))
    backend, count = ops.attention(pool, True), len(seen)
    together = backend.bind(Batch(*on), 1)
    for _ in range(2):  # what was made for a layer is there for the next one of its shape
        for layer, shape in enumerate(SHAPES):
            kind = AttentionKind(window=5 if layer == 3 else 0)
            q = torch.randn(count, shape.heads, shape.head_dim, generator=rng).to(device)
            k, v = torch.randn(2, count, shape.kv_heads, shape.head_dim, generator=rng).to(device)
            found = together(layer, q, k, v, kind)
            kept = pool.kv[1 + layer].clone()
            assert torch.equal(backend.bind(Batch(*on), 1)(layer, q, k, v, kind), found)
            assert torch.equal(together.read(layer, q, kind), found), "other queries over the same keys and values"
            assert torch.equal(pool.kv[1 + layer], kept)
            entries = kept[table[0]]
            expected = torch.stack(
                [brute_force(query, *entries[own].unbind(2), kind) for query, own in zip(q, seen, strict=True)]
            )
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=2e-5)
