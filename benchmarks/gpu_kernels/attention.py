"""Attention at the sizes of an 8B Llama: microseconds per layer inside a CUDA graph, the pool not in the L2 cache.

`bench` has the shapes of the engine and torch's own attention with them: "exact" as in deterministic mode, trees
also under a mask, which is the default without that mode. FlashInfer's kernels stand by them where it is installed.
`attention.py flashinfer` leaves torch out (names after it: FlashInfer's backends for prompts, fa2 and fa3 by default),
`attention.py sweep` tries tilings instead, `attention.py latents` those of DeepSeek's latents.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timing import read_rate, replayed_layers

HEADS, KV_HEADS, DIM, LAYERS = 32, 8, 128, 32
COLD = 256 << 20  # bytes of keys and values that one replay goes through, where there are enough layers


class Shape(NamedTuple):
    """Of a layer. parts: 2, keys and values, or 1, keys of which the first `values` elements are the value."""

    heads: int
    kv_heads: int
    parts: int
    dim: int
    values: int


LLAMA = Shape(HEADS, KV_HEADS, 2, DIM, 0)
LATENT = Shape(16, 1, 1, 576, 512)  # of DeepSeek-V2-Lite, and of V3 on 8 ranks


class Work:
    """B rows of `context` committed positions and trees of `nodes`, in a page table for 16k positions."""

    def __init__(self, batch: int, context: int, nodes: int, depth: int, layers: int = 0, shape: Shape = LLAMA) -> None:
        longest = context + nodes
        slots = batch * longest + 1
        heads, kv_heads, parts, dim, values = self.shape = shape
        self.bytes = slots * kv_heads * parts * dim * 2
        self.layers = layers or max(8, min(128, COLD // self.bytes))
        self.kv = [torch.randn(slots, kv_heads, parts, dim, device="cuda").bfloat16() for _ in range(self.layers)]
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
        self.q = torch.randn(batch * nodes, heads, dim, device="cuda").bfloat16()
        self.out = torch.empty(batch * nodes, heads * (values or dim), device="cuda", dtype=torch.bfloat16)
        self.batch, self.context, self.nodes = batch, context, nodes

    def mask(self) -> torch.Tensor:
        """[B, nodes, context + nodes]: who attends to what."""
        mask = torch.zeros(self.batch, self.nodes, self.context + self.nodes, dtype=torch.bool, device="cuda")
        mask[..., : self.context] = True
        mask[..., self.context :].scatter_(-1, self.path, True)
        return mask

    def ours(self, exact: bool, tiling: Any = None) -> float:
        from draftwing.ops.attention import triton_decode
        from draftwing.ops.attention.batch import AttentionKind

        workspace = triton_decode.Workspace(self.q.device)
        kind = AttentionKind(values=self.shape.values)
        return replayed_layers(
            lambda i: triton_decode.tree_attention(
                self.q, self.kv[i], self.table, self.rows, self.prefix, self.path, self.path_len, self.out, workspace,
                exact, self.nodes, tiling, kind=kind,
            ),
            self.layers,
        )  # fmt: skip

    def part(self, mean: int, known: bool, exact: bool) -> float:
        """Of each tree the first nodes, 1 to 2 * mean - 1 and `mean` on average; known: which are one tree, else
        each is a row of its own."""
        from draftwing.ops.attention import triton_decode
        from draftwing.ops.attention.batch import Ragged

        counts = (torch.arange(self.batch) + mean - 1) % (2 * mean - 1) + 1
        picked = torch.cat([b * self.nodes + torch.arange(int(count)) for b, count in enumerate(counts)]).cuda()
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).cuda()
        tree = picked // self.nodes
        ragged = Ragged(self.rows, self.prefix, starts, self.nodes, -(-len(picked) // self.batch)) if known else None
        path, path_len = self.path.flatten(0, 1)[picked].unsqueeze(1), self.path_len.flatten()[picked].unsqueeze(1)
        q, out, rows, prefix = self.q[picked], torch.empty_like(self.out[picked]), self.rows[tree], self.prefix[tree]
        workspace = triton_decode.Workspace(q.device)
        return replayed_layers(
            lambda i: triton_decode.tree_attention(
                q, self.kv[i], self.table, rows, prefix, path, path_len, out, workspace, exact, self.nodes, None, ragged
            ),
            self.layers,
        )

    def torch(self) -> float:
        """Gather, then scaled_dot_product_attention under a mask; lengths known on the host, the mask ready."""
        longest = self.context + self.nodes
        slots = self.table[: self.batch, :longest].flatten()
        mask = self.mask().unsqueeze(1)
        q = self.q.view(self.batch, self.nodes, HEADS, DIM).transpose(1, 2)

        def call(i: int) -> torch.Tensor:
            kv = self.kv[i][slots].view(self.batch, longest, KV_HEADS, 2, DIM)
            k, v = kv[..., 0, :].transpose(1, 2), kv[..., 1, :].transpose(1, 2)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

        return replayed_layers(call, self.layers)

    def flashinfer(self, backend: str) -> float:
        """FlashInfer's attention over the same keys, each slot a page. backend: of its tree and prefill kernels, or
        "plain" for a decode without tensor cores.

        The keys and values are copied to FlashInfer's own layout: this compares kernels, it is no integration. What
        its `plan` does on the host, once a step, is left out; so is what the engine does there.
        """
        longest = self.context + self.nodes
        call = flashinfer_call(
            self.q, [flashinfer_pool(kv) for kv in self.kv], self.table[: self.batch, :longest], self.nodes,
            self.mask() if self.nodes > 1 else None, backend,
        )  # fmt: skip
        self.ours_once()
        check_alike(call(0), self.out)
        return replayed_layers(call, self.layers)

    def ours_once(self) -> None:
        """Layer 0, exact, into `out`."""
        from draftwing.ops.attention import triton_decode

        triton_decode.tree_attention(
            self.q, self.kv[0], self.table, self.rows, self.prefix, self.path, self.path_len, self.out,
            triton_decode.Workspace(self.q.device), True, self.nodes, None,
        )  # fmt: skip


def flashinfer_pool(kv: torch.Tensor) -> torch.Tensor:
    """[slots, kv_heads, 2, dim] -> [slots, 2, 1, kv_heads, dim]: pages of one slot, all keys before all values."""
    return kv.transpose(1, 2).unsqueeze(2).contiguous()


def flashinfer_call(
    q: torch.Tensor,
    pools: list[torch.Tensor],
    table: torch.Tensor,
    queries: int,
    mask: torch.Tensor | None,
    backend: str,
) -> Callable[[int], torch.Tensor]:
    """Attention of layer i; q [B * queries, heads, dim], table [B, keys] of slots. Without a mask, queries are the last
    of their row's keys. Rows of one query are decoded, all else goes to what prefills."""
    flashinfer = importlib.import_module("flashinfer")
    batch, keys = table.shape
    space = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    pages = table.flatten().int()
    ends = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    key_ends, query_ends, last = ends * keys, ends * queries, torch.ones_like(ends[1:])
    buffers = [torch.empty_like(each) for each in (key_ends, pages, last)]
    out = torch.empty_like(q)
    types = {"q_data_type": q.dtype, "kv_data_type": q.dtype}
    wrapper: Any
    if queries == 1:
        names = [f"paged_kv_{name}_buffer" for name in ("indptr", "indices", "last_page_len")]
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            space, "NHD", use_cuda_graph=True, use_tensor_cores=backend != "plain",
            **dict(zip(names, buffers, strict=True)),
        )  # fmt: skip
        wrapper.plan(key_ends, pages, last, HEADS, KV_HEADS, DIM, 1, **types)
    else:
        graph: dict[str, Any] = {}
        if mask is not None:  # prompts run without graphs, and are planned more freely then
            names = [f"paged_kv_{name}_buf" for name in ("indptr", "indices", "last_page_len")]
            graph = {"use_cuda_graph": True, "qo_indptr_buf": torch.empty_like(query_ends)}
            graph |= {"mask_indptr_buf": torch.empty_like(ends), **dict(zip(names, buffers, strict=True))}
            graph["custom_mask_buf"] = torch.empty(mask.numel() // 8 + 8 * batch, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend=backend, **graph)
        wrapper.plan(
            query_ends, key_ends, pages, last, HEADS, KV_HEADS, DIM, 1, causal=mask is None,
            custom_mask=None if mask is None else mask.flatten(), **types,
        )  # fmt: skip
    torch.cuda.synchronize()
    run: Callable[..., torch.Tensor] = wrapper.run
    return lambda i: run(q, pools[i], out=out)


def check_alike(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    """That two kernels were given the same work."""
    difference = (theirs.flatten().float() - ours.flatten().float()).abs().max().item()
    assert difference < 0.05, f"their result is not ours, by up to {difference:.3f}"


def without_flashinfer() -> str:
    """Why its rows are left out; empty where it is installed."""
    try:
        importlib.import_module("flashinfer")
    except ImportError as error:
        return f"flashinfer: left out, {error}"
    return ""


def attempts(name: str, backends: tuple[str, ...], time: Callable[[str], float]) -> Iterator[tuple[str, float]]:
    """A row for each of FlashInfer's backends; one that fails says why and stops nothing."""
    for backend in backends:
        label = f"{name}, flashinfer {backend}"
        try:
            yield label, time(backend)
        except Exception as error:  # it compiles its kernels here, and not all are for every device
            yield f"{label}: {type(error).__name__}: {' '.join(str(error).split())[:200]}", float("nan")


# batch, context, nodes, depth + 1
SHAPES = [
    (1, 400, 1, 1), (1, 8192, 1, 1), (16, 400, 1, 1), (64, 400, 1, 1), (64, 2000, 1, 1), (1, 400, 4, 4),
    (16, 400, 4, 4), (64, 400, 4, 4), (1, 512, 32, 6), (1, 8192, 32, 6), (4, 400, 32, 6), (8, 400, 32, 6),
    (16, 400, 32, 6),
]  # fmt: skip


PARTS = [(1, 400, 32, 6, 8), (16, 400, 32, 6, 4), (64, 400, 32, 6, 2), (64, 2000, 32, 6, 3)]  # nodes picked on average


def parts() -> Iterator[tuple[str, float]]:
    for *shape, mean in PARTS:
        work = Work(*shape)
        name = f"{shape[0]} x {shape[1]} keys, {mean} of {shape[2]} nodes"
        yield f"{name}, exact", work.part(mean, True, True)
        yield f"{name}, masked", work.part(mean, True, False)
        yield f"{name}, a row each", work.part(mean, False, True)


def bench(with_torch: bool, prompt_backends: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    """prompt_backends: FlashInfer's for prefills; none where it is missing."""
    missing = without_flashinfer()
    if missing:
        yield missing, float("nan")
    for batch, context, nodes, depth in SHAPES:
        work = Work(batch, context, nodes, depth)
        name = f"{batch} x {context} keys, {nodes} nodes"
        yield f"{name}, exact", work.ours(True)
        if nodes > 1:
            yield f"{name}, masked", work.ours(False)
        if with_torch:
            yield f"{name}, torch", work.torch()
        if not missing:
            yield from attempts(name, ("fa2",) if nodes > 1 else ("fa2", "plain"), work.flashinfer)
    yield from parts()
    for length, start in CHUNKS:
        yield from chunk(length, start, with_torch, () if missing else prompt_backends)
    if with_torch:
        yield from rope()


# Of latents: the same, with trees of 8; and tilings.
LATENT_SHAPES = [
    (1, 400, 1, 1), (1, 8192, 1, 1), (16, 400, 1, 1), (64, 400, 1, 1), (64, 2000, 1, 1), (1, 400, 8, 5),
    (1, 8192, 8, 5), (16, 400, 8, 5), (64, 400, 8, 5),
]  # fmt: skip
LATENT_TILINGS: list[dict[str, int]] = [
    {}, {"stages": 3}, {"warps": 4}, {"unit": 32, "own": 32}, {"unit": 32, "own": 32, "stages": 3},
    {"unit": 32, "own": 32, "warps": 4}, {"unit": 64, "own": 32}, {"context_rows": 32}, {"programs": 132},
    {"programs": 528}, {"short": 64},
]  # fmt: skip


def latents() -> Iterator[tuple[str, float]]:
    """Latents of one key row for all heads: tilings around the default, exact, and the time of a read at full rate."""
    from draftwing.ops.attention.triton_common import pick_tiling

    rate = read_rate()
    for case in LATENT_SHAPES:
        work = Work(*case, shape=LATENT)
        yield f"{case}: a read of all latents", work.bytes / rate
        for changes in LATENT_TILINGS:
            label = ", ".join(f"{name} {value}" for name, value in changes.items()) or "as it is"
            try:
                yield f"{case}: {label}", work.ours(True, pick_tiling(work.kv[0])._replace(**changes))
            except Exception as error:  # it may want more shared memory than there is
                yield f"{case}: {label}: {type(error).__name__}", float("nan")
        if case[2] > 1:
            yield f"{case}: masked", work.ours(False)


CHUNKS = [(512, 0), (2048, 0), (4096, 0), (512, 4096), (768, 2700), (1024, 12000)]  # length, start


def chunk(length: int, start: int, with_torch: bool, backends: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    from draftwing.ops.attention.triton_common import pick_tiling
    from draftwing.ops.attention.triton_decode import Workspace
    from draftwing.ops.attention.triton_prefill import prefill_attention, prefill_room, prefill_rows
    from draftwing.ops.attention.triton_tiles import WHOLE, prefill_tiles

    workspace = Workspace(torch.device("cuda"))
    work = Work(1, start + length, 1, 1, layers=4)
    tiling = pick_tiling(work.kv[0])
    q = torch.randn(length, HEADS, DIM, device="cuda").bfloat16()
    out = torch.empty(length, HEADS * DIM, device="cuda", dtype=torch.bfloat16)
    slots = work.table[0, : start + length]
    mask = torch.ones(length, start + length, dtype=torch.bool, device="cuda").tril(start)

    def ours(exact: bool, whole: bool = False, **changes: int) -> float:
        changed = tiling._replace(**changes)
        rows, room = prefill_rows(work.kv[0], exact, changed), prefill_room(work.kv[0], exact, changed)
        tiles = prefill_tiles([(0, 0, start, length)], HEADS // KV_HEADS, rows, WHOLE if whole else room).cuda()

        def call(i: int) -> None:
            prefill_attention(q, work.kv[i], work.table, work.rows, tiles, out, workspace, exact, changed)

        return replayed_layers(call, work.layers)

    def torch_call(i: int) -> torch.Tensor:
        k, v = work.kv[i][slots].permute(2, 1, 0, 3).unsqueeze(1)
        how: dict[str, Any] = {"attn_mask": mask} if start else {"is_causal": True}
        return F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, enable_gqa=True, **how)

    def flashinfer(backend: str) -> float:
        call = flashinfer_call(q, [flashinfer_pool(kv) for kv in work.kv], slots[None], length, None, backend)
        ours(True)
        check_alike(call(work.layers - 1), out)  # `ours` ends with the last layer
        return replayed_layers(call, work.layers)

    name = f"prefill {length} after {start}"
    yield f"{name}, exact", ours(True)
    yield f"{name}, default", ours(False)
    yield f"{name}, default, tiles whole", ours(False, True)
    if tiling.overlap_unit:
        yield f"{name}, exact by Triton", ours(True, overlap_unit=0)
        yield f"{name}, default by Triton", ours(False, overlap_unit=0)
    yield f"{name}, exact, tiles of 64", ours(True, prefill_rows=64, prefill_stages=3)
    if with_torch:
        yield f"{name}, torch", replayed_layers(torch_call, work.layers)
    yield from attempts(name, backends, flashinfer)


def rope() -> list[tuple[str, float]]:
    from draftwing.ops.rope.triton import rope_and_write

    found = []
    for count in (1, 32, 64, 512):
        qkv = torch.randn(count, HEADS + 2 * KV_HEADS, DIM, device="cuda").bfloat16()
        kv = torch.zeros(count + 1, KV_HEADS, 2, DIM, device="cuda", dtype=torch.bfloat16)
        slots = torch.arange(1, count + 1, device="cuda")
        table = torch.randn(8192, 2, DIM, device="cuda").bfloat16()
        cos, sin = table[:count].unsqueeze(2).unbind(1)
        given = (qkv, cos, sin, slots, kv)
        found.append(
            (f"rope_and_write, {count} rows", replayed_layers(lambda i, given=given: rope_and_write(*given), 20))
        )
    return found


def sweep() -> list[tuple[str, float]]:
    """Tilings around the default, for the shapes that matter most."""
    from draftwing.ops.attention.triton_common import pick_tiling

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
    mode, *names = sys.argv[1:] or [""]
    if mode == "latents":
        rows = latents()
    else:
        rows = iter(sweep()) if mode == "sweep" else bench(mode != "flashinfer", tuple(names) or ("fa2", "fa3"))
    for label, microseconds in rows:
        print(f"{microseconds:9.2f}  {label}", flush=True)
