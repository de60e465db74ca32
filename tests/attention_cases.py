"""Trees, chains and chunks over one layer of a pool, and what their attention is by brute force in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from plain_attention import brute_force
from torch import Tensor

from draftwing.ops.attention.batch import FULL, AttentionKind
from draftwing.ops.attention.triton_tiles import prefill_tiles

attention = pytest.importorskip("draftwing.ops.attention.triton_decode")
common = pytest.importorskip("draftwing.ops.attention.triton_common")
chunked = pytest.importorskip("draftwing.ops.attention.triton_prefill")

# Small sizes, so that few keys reach many splits and the interpreter has time for them.
TINY = common.Tiling(
    unit=32, short=64, tier=128, long=128, programs=24, context_programs=24, prefill_rows=16, fast_rows=32, stages=1,
    context_stages=1, prefill_stages=1,
)  # fmt: skip
ONE_LANE = TINY._replace(programs=1, context_programs=1)


@dataclass
class Case:
    """B rows of one layer's pool. Every slot that nobody may read is NaN."""

    kv: Tensor  # [slots, kv_heads, 2, dim], or [slots, kv_heads, 1, dim]
    table: Tensor  # [R + 1, L]
    rows: Tensor  # [B]
    prefix: Tensor  # [B]
    path: Tensor  # [B, Q, D]
    path_len: Tensor  # [B, Q]
    q: Tensor  # [B * Q, heads, dim]
    kind: AttentionKind = FULL
    scales: tuple[float, float] = (1.0, 1.0)  # of the pool's keys and values

    def positions(self, b: int, node: int) -> list[int]:
        """Page-table positions that a query reads, in order."""
        prefix, length = int(self.prefix[b]), int(self.path_len[b, node])
        return [*range(prefix), *(prefix + int(w) for w in self.path[b, node, :length])]

    def expected(self) -> Tensor:
        batch, nodes = self.path_len.shape
        out = []
        for b in range(batch):
            for node in range(nodes):
                slots = self.table[self.rows[b], self.positions(b, node)]
                k, v = self.kv[slots, :, 0], self.kv[slots, :, -1, : self.kind.values or None]
                out.append(brute_force(self.q[b * nodes + node], k, v, self.kind))
        return torch.stack(out)

    def alone(self, b: int, node: int) -> Case:
        """The same query as a plain decode: what it reads is committed."""
        where = self.positions(b, node)
        table = self.table.clone()
        table[0, : len(where)] = self.table[self.rows[b], where]
        zero = torch.zeros(1, dtype=torch.int64, device=table.device)
        query = self.q[b * self.path.shape[1] + node, None]
        path, one = zero.view(1, 1, 1), zero.view(1, 1) + 1
        return Case(self.kv, table, zero, zero + len(where) - 1, path, one, query, self.kind, self.scales)

    def as_chunk(self, length: int, tiling: object = TINY) -> Tensor:
        """Of `alone`: what the last of `length` equal queries of a prefill chunk gets."""
        start = int(self.prefix[0]) + 1 - length
        queries = self.q.expand(length, -1, -1).contiguous()
        return prefill(queries, self.kv, self.table, 0, start, tiling, self.kind, self.scales)[-1]

    def run(
        self, exact: bool = True, tiling: object = None, workspace: object = None, inputs_ready: bool = False
    ) -> Tensor:
        heads, dim = self.q.shape[1:]
        out = self.q.new_full((self.q.shape[0], heads * (self.kind.values or dim)), torch.nan)
        workspace = workspace or attention.Workspace(self.q.device)
        tiling = tiling or (TINY if exact else ONE_LANE)
        attention.tree_attention(
            self.q, self.kv, self.table, self.rows, self.prefix, self.path, self.path_len, out, workspace, exact, 0,
            tiling, scales=self.scales, kind=self.kind, inputs_ready=inputs_ready,
        )  # fmt: skip
        assert not workspace.take("tickets", 1, torch.int32).any(), "tickets are left behind"
        return out


def make_case(
    lengths: list[int],
    nodes: int,
    device: torch.device,
    heads: tuple[int, int] = (4, 2),
    dim: int = 32,
    dtype: torch.dtype = torch.float32,
    chain: bool = False,
    seed: int = 0,
    values: int = 0,
) -> Case:
    """Random trees of up to `nodes` nodes with dead ones; the last batch row is the row table's dummy. values: of keys
    the elements that are the value, 0: it is apart."""
    rng = torch.Generator().manual_seed(seed)
    batch, (q_heads, kv_heads) = len(lengths), heads
    longest = max(lengths) + nodes + 7
    depth = nodes if chain else min(nodes, 5)
    path = torch.zeros(batch, nodes, depth, dtype=torch.int64)
    path_len = torch.ones(batch, nodes, dtype=torch.int64)
    for b in range(batch):
        for node in range(1, nodes):
            parent = node - 1 if chain else int(torch.randint(node, (), generator=rng))
            above = int(path_len[b, parent])
            dead = above == depth or (not chain and int(torch.randint(8, (), generator=rng)) == 0)
            if not dead:
                path[b, node, :above] = path[b, parent, :above]
                path_len[b, node] = above + 1
            path[b, node, int(path_len[b, node]) - 1 :] = node
    rows = torch.randperm(batch + 2, generator=rng)[:batch]
    rows[-1] = batch + 2
    slots = torch.randperm((batch + 3) * longest, generator=rng).view(batch + 3, longest) + 1
    slots[-1] = 0
    prefix = torch.tensor([*lengths[:-1], 0])
    parts, kind = (1, AttentionKind(scalar=dim // 3, values=values)) if values else (2, FULL)
    kv = torch.full((int(slots.max()) + 1, kv_heads, parts, dim), torch.nan)
    q = torch.randn(batch * nodes, q_heads, dim, generator=rng)
    case = Case(kv, slots, rows, prefix, path, path_len, q, kind)
    for b in range(batch):
        read = slots[rows[b], : int(prefix[b]) + nodes]
        kv[read] = torch.randn(len(read), kv_heads, parts, dim, generator=rng)
    for name, value in vars(case).items():
        if isinstance(value, Tensor):
            setattr(case, name, value.to(device, dtype) if value.is_floating_point() else value.to(device))
    return case


def prefill(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    row: int,
    start: int,
    tiling: object,
    kind: AttentionKind = FULL,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    out = q.new_full((q.shape[0], q.shape[1] * (kind.values or q.shape[2])), torch.nan)
    rows = torch.tensor([row], device=q.device)
    group = q.shape[1] // kv.shape[1]
    tiles = prefill_tiles([(0, 0, start, q.shape[0])], group, chunked.prefill_rows(kv, True, tiling))
    chunked.prefill_attention(
        q, kv, table, rows, tiles.to(q.device), out, attention.Workspace(q.device), True, tiling, scales, kind
    )
    return out
