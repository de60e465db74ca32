"""Attention at the sizes of an 8B Llama: microseconds per layer inside a CUDA graph, the pool not in the L2 cache.

`bench` has the shapes of the engine and torch's own attention beside them: "exact" as in deterministic mode, trees
also under a mask, which is the default without that mode. `attention.py sweep` tries tilings instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

HEADS, KV_HEADS, DIM, LAYERS = 32, 8, 128, 32
REPLAYS = 20
COLD = 256 << 20  # bytes of keys and values that one replay goes through, where there are enough layers


def replayed(call: Callable[[int], object], count: int) -> float:
    """Microseconds of one of `count` calls in a graph; call i is layer i's."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(count):
            call(i)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / (count * REPLAYS)


class Work:
    """B rows of `context` committed positions and trees of `nodes`, in a page table for 16k positions."""

    def __init__(self, batch: int, context: int, nodes: int, depth: int, layers: int = 0) -> None:
        longest = context + nodes
        slots = batch * longest + 1
        size = slots * KV_HEADS * 2 * DIM * 2
        self.layers = layers or max(8, min(128, COLD // size))
        self.kv = [torch.randn(slots, KV_HEADS, 2, DIM, device="cuda").bfloat16() for _ in range(self.layers)]
        self.table = torch.zeros(batch + 1, max(16384, longest), dtype=torch.int64, device="cuda")
        # As an allocator gives them: runs of neighbours, in any order.
        order = torch.randperm(-(-slots // 16), device="cuda")[:, None] * 16 + torch.arange(16, device="cuda")
        order = order.flatten()
        order = order[order < slots - 1][: batch * longest] + 1
        self.table[:batch, :longest] = order.view(batch, longest)
        self.rows = torch.arange(batch, device="cuda")
        self.prefix = torch.full((batch,), context, device="cuda")
        parent = [0, *((i - 1) // 2 if depth > 1 else 0 for i in range(1, nodes))]
        path = torch.zeros(nodes, depth, dtype=torch.int64)
        path_len = torch.ones(nodes, dtype=torch.int64)
        for node in range(1, nodes):
            above = int(path_len[parent[node]])
            path[node] = path[parent[node]]
            path[node, above:] = node
            path_len[node] = above + 1
        self.path = path.cuda().expand(batch, nodes, depth).contiguous()
        self.path_len = path_len.cuda().expand(batch, nodes).contiguous()
        self.q = torch.randn(batch * nodes, HEADS, DIM, device="cuda").bfloat16()
        self.out = torch.empty(batch * nodes, HEADS * DIM, device="cuda", dtype=torch.bfloat16)
        self.batch, self.context, self.nodes = batch, context, nodes

    def ours(self, exact: bool, tiling: Any = None) -> float:
        from draftwing.kernels import attention

        workspace = attention.Workspace(self.q.device)
        return replayed(
            lambda i: attention.tree_attention(
                self.q, self.kv[i], self.table, self.rows, self.prefix, self.path, self.path_len, self.out, workspace,
                exact, self.nodes, tiling,
            ),
            self.layers,
        )  # fmt: skip

    def torch(self) -> float:
        """Gather, then scaled_dot_product_attention under a mask; lengths known on the host, the mask ready."""
        longest = self.context + self.nodes
        slots = self.table[: self.batch, :longest].flatten()
        mask = torch.zeros(self.batch, 1, self.nodes, longest, dtype=torch.bool, device="cuda")
        mask[..., : self.context] = True
        mask[..., self.context :].scatter_(-1, self.path.unsqueeze(1), True)
        q = self.q.view(self.batch, self.nodes, HEADS, DIM).transpose(1, 2)

        def call(i: int) -> torch.Tensor:
            kv = self.kv[i][slots].view(self.batch, longest, KV_HEADS, 2, DIM)
            k, v = kv[..., 0, :].transpose(1, 2), kv[..., 1, :].transpose(1, 2)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

        return replayed(call, self.layers)


# batch, context, nodes, depth + 1
SHAPES = [
    (1, 400, 1, 1), (1, 8192, 1, 1), (16, 400, 1, 1), (64, 400, 1, 1), (64, 2000, 1, 1), (1, 400, 4, 4),
    (16, 400, 4, 4), (64, 400, 4, 4), (1, 512, 32, 6), (1, 8192, 32, 6), (4, 400, 32, 6), (8, 400, 32, 6),
    (16, 400, 32, 6),
]  # fmt: skip


def bench() -> list[tuple[str, float]]:
    found = []
    for batch, context, nodes, depth in SHAPES:
        work = Work(batch, context, nodes, depth)
        name = f"{batch} x {context} keys, {nodes} nodes"
        found.append((f"{name}, exact", work.ours(True)))
        if nodes > 1:
            found.append((f"{name}, masked", work.ours(False)))
        found.append((f"{name}, torch", work.torch()))
    return found + prefill() + rope()


CHUNKS = [(512, 0), (2048, 0), (4096, 0), (512, 4096)]  # length, start


def prefill() -> list[tuple[str, float]]:
    return [timed for length, start in CHUNKS for timed in chunk(length, start)]


def chunk(length: int, start: int) -> list[tuple[str, float]]:
    from draftwing.kernels.attention_common import pick_tiling
    from draftwing.kernels.attention_prefill import prefill_attention, prefill_rows, prefill_tiles

    work = Work(1, start + length, 1, 1, layers=4)
    tiling = pick_tiling(work.kv[0])
    q = torch.randn(length, HEADS, DIM, device="cuda").bfloat16()
    out = torch.empty(length, HEADS * DIM, device="cuda", dtype=torch.bfloat16)
    slots = work.table[0, : start + length]
    mask = torch.ones(length, start + length, dtype=torch.bool, device="cuda").tril(start)

    def ours(exact: bool, **changes: int) -> float:
        changed = tiling._replace(**changes)
        rows = prefill_rows(work.kv[0], exact, changed)
        tiles = prefill_tiles([(0, 0, start, length)], HEADS // KV_HEADS, rows).cuda()
        return replayed(
            lambda i: prefill_attention(q, work.kv[i], work.table, work.rows, tiles, out, exact, changed), work.layers
        )

    def theirs(i: int) -> torch.Tensor:
        k, v = work.kv[i][slots].permute(2, 1, 0, 3).unsqueeze(1)
        how: dict[str, Any] = {"attn_mask": mask} if start else {"is_causal": True}
        return F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, enable_gqa=True, **how)

    name = f"prefill {length} after {start}"
    found = [(f"{name}, exact", ours(True)), (f"{name}, default", ours(False))]
    found.append((f"{name}, exact, tiles of 64", ours(True, prefill_rows=64, prefill_stages=3)))
    return [*found, (f"{name}, torch", replayed(theirs, work.layers))]


def rope() -> list[tuple[str, float]]:
    from draftwing.kernels.rope import rope_and_write

    found = []
    for count in (1, 32, 64, 512):
        qkv = torch.randn(count, HEADS + 2 * KV_HEADS, DIM, device="cuda").bfloat16()
        kv = torch.zeros(count + 1, KV_HEADS, 2, DIM, device="cuda", dtype=torch.bfloat16)
        slots = torch.arange(1, count + 1, device="cuda")
        table = torch.randn(8192, 2, DIM, device="cuda").bfloat16()
        cos, sin = table[:count].unsqueeze(2).unbind(1)
        given = (qkv, cos, sin, slots, kv)
        found.append((f"rope_and_write, {count} rows", replayed(lambda i, given=given: rope_and_write(*given), 20)))
    return found


def sweep() -> list[tuple[str, float]]:
    """Tilings around the default, for the shapes that matter most."""
    from draftwing.kernels.attention_common import pick_tiling

    changes: list[dict[str, Any]] = [
        {}, {"unit": 32}, {"short": 64}, {"short": 256}, {"long": 256}, {"warps": 8}, {"stages": 2}, {"stages": 4},
        {"stages": 5}, {"stages": 7}, {"own": 128}, {"programs": 132}, {"programs": 396}, {"programs": 528},
        {"context_rows": 0}, {"context_rows": 64}, {"context_programs": 66},
        {"context_programs": 264}, {"context_rows": 128, "context_stages": 5},
    ]  # fmt: skip
    found = []
    for shape in SHAPES:
        work = Work(*shape)
        base = pick_tiling(work.kv[0])
        tries = [("exact", True, change) for change in changes]
        if shape[2] > 1:  # programs 1: large tiles at any size
            tries += [("masked", False, {"programs": 1, "window_rows": rows}) for rows in (16, 32, 64, 128)]
        for mode, exact, change in tries:
            label = f"{shape}, {mode}: " + (
                ", ".join(f"{name} {value}" for name, value in change.items()) or "as it is"
            )
            try:
                found.append((label, work.ours(exact, base._replace(**change))))
            except Exception as error:  # too much shared memory, most likely
                found.append((f"{label}: {type(error).__name__}", float("nan")))
    return found


if __name__ == "__main__":
    for label, microseconds in sweep() if sys.argv[1:] == ["sweep"] else bench():
        print(f"{microseconds:9.2f}  {label}")
