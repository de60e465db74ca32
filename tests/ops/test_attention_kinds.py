"""Sliding windows, sinks and scales of attention on all backends: brute force in float64, and bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_attention import TILINGS, brute_force
from torch import Tensor

from draftwing.kv.pool import KVPool, KVSpec
from draftwing.ops.attention import AttentionKind, Batch, ChunkSpan, Ragged
from draftwing.ops.torch.ops import TorchOps

HEADS, KV_HEADS, DIM = 4, 2, 16
LENGTH = 300  # of the one text
SINKS = torch.tensor([0.5, -2.0, 30.0, 1.5])  # one above all scores
PARENTS = [-1, 0, 1, 1, 2, 4, 0, 6]  # of a tree's nodes
KINDS = {
    "window 1": AttentionKind(window=1),
    "window 3, less than a path": AttentionKind(window=3),
    "window 40": AttentionKind(window=40),
    "longer than all": AttentionKind(window=400),
    "sinks": AttentionKind(sinks=SINKS),
    "all": AttentionKind(window=128, sinks=SINKS, scalar=40),
    "latents": AttentionKind(scalar=40, values=DIM),  # and 8 elements behind them that are turned
}


class Text:
    """One text in the pool, and its tokens as decodes, as parts of trees, and in chunks."""

    def __init__(self, ops: TorchOps, kind: AttentionKind, dtype: torch.dtype = torch.float32, exact: bool = True):
        rng = torch.Generator().manual_seed(2)
        self.device = ops.device
        self.kind = kind._replace(sinks=None if kind.sinks is None else kind.sinks.to(ops.device))
        dim = DIM + 8 if kind.values else DIM
        self.q = torch.randn(LENGTH, HEADS, dim, generator=rng).to(dtype) * 2
        self.k, self.v = torch.randn(2, LENGTH, KV_HEADS, dim, generator=rng).to(dtype)
        if kind.values:
            self.v = self.k[..., : kind.values]
        pool = KVPool([KVSpec(KV_HEADS, dim, kind.values > 0)], 3 * LENGTH, dtype, ops.device)
        pool.kv[0].copy_(torch.randn(pool.kv[0].shape, generator=rng))
        self.table = (torch.randperm(2 * LENGTH, generator=rng) + 1)[None, : LENGTH + 40]
        pool.write(0, self.table[0, :LENGTH].to(ops.device), self.k.to(ops.device), self.v.to(ops.device))
        self.pool, self.backend = pool, ops.attention(pool, exact)

    def run(self, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        device = self.device
        batch = Batch(*(part.to(device) if isinstance(part, Tensor) else part for part in batch))
        if batch.ragged is not None:
            there = (part.to(device) if isinstance(part, Tensor) else part for part in batch.ragged)
            batch = batch._replace(ragged=Ragged(*there))
        kept = self.pool.kv[0].clone()
        out = self.backend.bind(batch, 0)(0, q.to(device), k.to(device), v.to(device), self.kind)
        self.pool.kv[0].copy_(kept)
        return out.cpu()

    def chunk(self, start: int, length: int) -> Tensor:
        """[length, heads * dim]"""
        end, none = start + length, torch.zeros(length, dtype=torch.int64)
        span = ChunkSpan(0, 0, start, length)
        batch = Batch(
            none[:1], none, none, self.table[0, start:end], self.table, none[:1], chunks=(span,), bound=LENGTH
        )
        return self.run(batch, self.q[start:end], self.k[start:end], self.v[start:end])

    def tree(self, prefixes: list[int], ragged: bool = False) -> Tensor:
        """The tree of `PARENTS` after so many tokens, for each of the prefixes: the node at depth d is the text's token
        there in whatever branch it lies. ragged: asked for as trees of different sizes. [B, nodes, heads * dim]"""
        nodes, size = len(PARENTS), len(prefixes)
        paths: list[list[int]] = []
        for node, parent in enumerate(PARENTS):
            paths.append([*(paths[parent] if parent >= 0 else []), node])
        path, path_len = torch.zeros(size, nodes, 6, dtype=torch.int64), torch.zeros(size, nodes, dtype=torch.int64)
        for node, mine in enumerate(paths):
            path[:, node, : len(mine)], path_len[:, node] = torch.tensor(mine), len(mine)
        prefix = torch.tensor(prefixes)
        at = (prefix[:, None] + path_len - 1).flatten()  # [B * N] positions
        # Rows of one text may not write to the same entries: each has scratch of its own.
        table = self.table.repeat(size, 1)
        spare = self.pool.slots + 1 - size * nodes + torch.arange(size * nodes).view(size, nodes)
        table.scatter_(1, prefix[:, None] + torch.arange(nodes), spare)
        batch = Batch(
            torch.arange(size), at, at, spare.flatten(), table, prefix, path, path_len, window=nodes, bound=LENGTH + 20
        )
        if ragged:
            batch = batch._replace(
                rows=batch.rows.repeat_interleave(nodes), prefix_len=prefix.repeat_interleave(nodes),
                path=path.view(-1, 1, 6), path_len=path_len.view(-1, 1),
                ragged=Ragged(batch.rows, prefix, torch.arange(size + 1) * nodes, nodes, nodes),
            )  # fmt: skip
        return self.run(batch, self.q[at], self.k[at], self.v[at]).view(size, nodes, -1)

    def decode(self, position: int) -> Tensor:
        at = torch.tensor([position])
        one = torch.ones(1, 1, dtype=torch.int64)
        slots = self.table[0, at]
        batch = Batch(at * 0, at, at, slots, self.table, at, one[None] * 0, one, window=1, bound=LENGTH)
        return self.run(batch, self.q[at], self.k[at], self.v[at])[0]

    def expected(self, position: int) -> Tensor:
        return brute_force(self.q[position], self.k[: position + 1], self.v[: position + 1], self.kind)


PREFIXES = [2, 41, 127, 128, 201]
DEPTHS = [0, 1, 2, 2, 3, 4, 1, 2]


@pytest.mark.further(ops="triton", exact=False)
@pytest.mark.further(ops="triton", name=["longer than all", "sinks", "window 1"])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_equal_brute_force(name: str, exact: bool, ops: TorchOps) -> None:
    text = Text(ops, KINDS[name], exact=exact)
    tree, close = text.tree(PREFIXES).double(), dict(atol=2e-5, rtol=1e-4)
    for b, prefix in enumerate(PREFIXES):
        for node, depth in enumerate(DEPTHS):
            torch.testing.assert_close(tree[b, node], text.expected(prefix + depth), **close)
    for start, length in ((0, 30), (120, 50), (230, 1)):
        chunk = text.chunk(start, length).double()
        for i in {0, length // 2, length - 1}:
            torch.testing.assert_close(chunk[i], text.expected(start + i), **close)
    for position in (0, 5, 140):
        torch.testing.assert_close(text.decode(position).double(), text.expected(position), **close)


@pytest.mark.further(ops="triton", dtype=torch.float32, name=["window 40", "all"])
@pytest.mark.further(ops="triton", dtype=torch.bfloat16, name=["window 3, less than a path", "all", "latents"])
@pytest.mark.parametrize("name", ["window 3, less than a path", "window 40", "all", "latents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_how_a_query_is_asked(name: str, dtype: torch.dtype, ops: TorchOps) -> None:
    if ops.name == "torch":
        pytest.skip("whose bits are a matter of the CPU's GEMM")
    text = Text(ops, KINDS[name], dtype)
    tree = text.tree(PREFIXES)
    assert torch.equal(text.tree(PREFIXES, ragged=True), tree)
    whole = text.chunk(120, 90)
    for b, node in ((2, 0), (2, 3), (3, 5), (4, 7)):
        position = PREFIXES[b] + DEPTHS[node]
        expected = text.decode(position)
        assert torch.equal(tree[b, node], expected), (b, node)
        assert torch.equal(whole[position - 120], expected), (b, node)
        assert torch.equal(text.chunk(position, 1)[0], expected), (b, node)


@pytest.mark.further(name=["window 3, less than a path", "window 40", "latents"])
@pytest.mark.parametrize("name", ["window 3, less than a path", "window 40", "all", "latents"])
def test_triton_tilings(name: str, mended_interpreter: None, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits in lanes and launches, which begin where the window does."""
    kernels = pytest.importorskip("draftwing.ops.triton.attention")
    from attention_cases import TINY

    from draftwing.ops.triton.ops import TritonOps

    results = []
    for changes in TILINGS.values():
        tiling = TINY._replace(**changes)
        monkeypatch.setattr(kernels, "pick_tiling", lambda kv, tiling=tiling: tiling)
        results.append(Text(TritonOps(device), KINDS[name]).tree(PREFIXES))
    text = Text(TritonOps(device), KINDS[name])
    torch.testing.assert_close(results[0][3, 5].double(), text.expected(132), atol=2e-5, rtol=1e-4)
    for other in results[1:]:
        assert torch.equal(other, results[0])
