"""Windows, sinks and scales of attention, parts of trees, and layers that differ, on all backends: brute force in
float64, and bit for bit however a query is asked for."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from plain_attention import TILINGS, brute_force
from torch import Tensor

from draftwing.kv.pool import KVPool, KVSpec
from draftwing.ops.attention.batch import FULL, AttentionKind, Batch, ChunkSpan, HeadShape, Ragged
from draftwing.ops.table import TorchOps

SINKS = torch.tensor([0.5, -2.0, 30.0, 1.5])  # one above all scores
VALUES = 16  # elements of latents that are the value
PARENTS = [-1, 0, 1, 1, 2, 4, 0, 6]  # of a tree's nodes
OTHERS = [-1, 0, 1, 1, 3, 4, 0, 1]  # of every second one's, at the same depths
KINDS = {
    "window 1": AttentionKind(window=1),
    "window 3, less than a path": AttentionKind(window=3),
    "window 40": AttentionKind(window=40),
    "chunks of 43": AttentionKind(chunk=43),  # in which trees of three prefixes do not end
    "longer than all": AttentionKind(window=400),
    "sinks": AttentionKind(sinks=SINKS),
    "cap": AttentionKind(cap=1.5),
    "all": AttentionKind(window=128, sinks=SINKS, scalar=40, cap=3.0),
    "latents": AttentionKind(scalar=40, values=VALUES),  # and 8 elements behind them that are turned
}
PREFIXES = [2, 41, 127, 128, 201]
DEPTHS = [0, 1, 2, 2, 3, 4, 1, 2]
# Nodes of each of these trees with those that they follow: not simply the first ones.
PICKED = [[0, 1, 2, 4, 5, 6], [0, 1, 3, 4, 7], [0, 6, 7], [], [0]]


def paths_of(parents: list[int]) -> list[list[int]]:
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    return paths


class Text:
    """One text in the pool, and its tokens as decodes, as parts of trees, and in chunks."""

    def __init__(
        self, ops: TorchOps, kind: AttentionKind = FULL, dtype: torch.dtype = torch.float32, exact: bool = True,
        heads: tuple[int, int] = (4, 2), dim: int = 16, length: int = 300,
        parents: tuple[list[int], ...] = (PARENTS, OTHERS),
    ) -> None:  # fmt: skip
        rng = torch.Generator().manual_seed(2)
        self.device, self.length = ops.device, length
        self.kind = kind._replace(sinks=None if kind.sinks is None else kind.sinks.to(ops.device))
        self.paths = [paths_of(tree) for tree in parents]
        dim = dim + 8 if kind.values else dim
        self.q = torch.randn(length, heads[0], dim, generator=rng).to(dtype) * 2
        self.k, self.v = torch.randn(2, length, heads[1], dim, generator=rng).to(dtype)
        if kind.values:
            self.v = self.k[..., : kind.values]
        pool = KVPool([KVSpec(heads[1], dim, kind.values > 0)], 3 * length, dtype, ops.device)
        pool.kv[0].copy_(torch.randn(pool.kv[0].shape, generator=rng))
        self.table = (torch.randperm(2 * length, generator=rng) + 1)[None, : length + 40]
        pool.write(0, self.table[0, :length].to(ops.device), self.k.to(ops.device), self.v.to(ops.device))
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

    def chunk(self, start: int, length: int, images: tuple[tuple[int, int], ...] = ()) -> Tensor:
        """images: positions of those whose tokens see each other -> [length, heads * dim]"""
        end, none = start + length, torch.zeros(length, dtype=torch.int64)
        span = ChunkSpan(0, 0, start, length, mutual=images)
        batch = Batch(
            none[:1], none, none, self.table[0, start:end], self.table, none[:1], chunks=(span,), bound=self.length,
            mutual="all" if images else "",
        )  # fmt: skip
        return self.run(batch, self.q[start:end], self.k[start:end], self.v[start:end])

    def tree(
        self, prefixes: list[int], picked: list[list[int]] | None = None, with_trees: bool = True, own: bool = False
    ) -> Tensor:
        """The trees after so many tokens, for each of the prefixes: the node at depth d is the text's token there in
        whatever branch it lies, or of its own. picked: these of the nodes of each tree alone; with_trees: the batch
        says which trees they are of, too. [B, nodes, heads * dim], or [queries, heads * dim]"""
        nodes, size = len(self.paths[0]), len(prefixes)
        deepest = max(len(path) for paths in self.paths for path in paths)
        path, path_len = torch.zeros(size, nodes, deepest, dtype=torch.int64), torch.zeros(size, nodes).long()
        for b in range(size):
            for node, mine in enumerate(self.paths[b % len(self.paths)]):
                path[b, node, : len(mine)], path_len[b, node] = torch.tensor(mine), len(mine)
        prefix = torch.tensor(prefixes)
        at = (prefix[:, None] + path_len - 1).flatten()  # [B * N] positions
        # Rows of one text may not write to the same entries: each has scratch of its own; they are in another order.
        rows, table = torch.arange(size).roll(1), self.table.repeat(size, 1)
        spare = self.pool.slots + 1 - size * nodes + torch.arange(size * nodes).view(size, nodes)
        table[rows] = table[rows].scatter(1, prefix[:, None] + torch.arange(nodes), spare)
        bound = max(prefixes) + nodes
        batch = Batch(rows, at, at, spare.flatten(), table, prefix, path, path_len, window=nodes, bound=bound)
        tokens = [part[at] for part in (self.q, self.k, self.v)]
        if own:
            generator = torch.Generator().manual_seed(size)
            tokens = [torch.randn(part.shape, generator=generator).to(part.dtype) for part in tokens]
        if picked is None:
            return self.run(batch, *tokens).view(size, nodes, -1)
        query = torch.tensor([b * nodes + node for b, mine in enumerate(picked) for node in mine])
        tree = query // nodes
        starts = torch.tensor([0, *map(len, picked)]).cumsum(0)
        ragged = Ragged(rows, prefix, starts, nodes, 3) if with_trees else None
        batch = batch._replace(
            rows=rows[tree], prefix_len=prefix[tree], write_slots=batch.write_slots[query], ragged=ragged,
            path=path.flatten(0, 1)[query, None], path_len=path_len.flatten()[query, None],
        )  # fmt: skip
        return self.run(batch, *(part[query] for part in tokens))

    def decode(self, position: int) -> Tensor:
        at = torch.tensor([position])
        one = torch.ones(1, 1, dtype=torch.int64)
        slots = self.table[0, at]
        batch = Batch(at * 0, at, at, slots, self.table, at, one[None] * 0, one, window=1, bound=self.length)
        return self.run(batch, self.q[at], self.k[at], self.v[at])[0]

    def expected(self, position: int) -> Tensor:
        return brute_force(self.q[position], self.k[: position + 1], self.v[: position + 1], self.kind)


@pytest.mark.further(ops="triton", exact=False, name=["cap", "latents", "chunks of 43"])
@pytest.mark.further(ops="triton", name=["longer than all", "sinks", "window 1", "window 40", "all"])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.covering("ops")
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


@pytest.mark.further(
    ops="triton", dtype=torch.float32, name=["window 3, less than a path", "window 40", "chunks of 43", "all"]
)
@pytest.mark.further(
    ops="triton", dtype=torch.bfloat16, name=["window 3, less than a path", "chunks of 43", "all", "latents"]
)
@pytest.mark.parametrize("name", ["window 3, less than a path", "window 40", "chunks of 43", "all", "latents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_how_a_query_is_asked(name: str, dtype: torch.dtype, ops: TorchOps) -> None:
    if ops.name == "torch":
        pytest.skip("whose bits are a matter of the CPU's GEMM")
    text = Text(ops, KINDS[name], dtype)
    tree = text.tree(PREFIXES)
    every = [list(range(len(PARENTS)))] * len(PREFIXES)
    assert torch.equal(text.tree(PREFIXES, every), tree.flatten(0, 1))
    whole = text.chunk(120, 90)
    for b, node in ((2, 0), (2, 3), (3, 5), (4, 7)):
        position = PREFIXES[b] + DEPTHS[node]
        expected = text.decode(position)
        assert torch.equal(tree[b, node], expected), (b, node)
        assert torch.equal(whole[position - 120], expected), (b, node)
        assert torch.equal(text.chunk(position, 1)[0], expected), (b, node)


@pytest.mark.further(ops="triton", dtype=torch.float32)  # on a GPU activations have 16 bits
@pytest.mark.parametrize("name", ["window 3, less than a path", "window 40", "all", "latents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_whose_tokens_see_each_other(name: str, dtype: torch.dtype, ops: TorchOps) -> None:
    """In windows, too, which end where a token stands. A chunk may begin within an image."""
    text, images = Text(ops, KINDS[name], dtype), ((7, 20), (100, 231), (240, 290))
    window, seen = text.kind.window, {at: end for start, end in images for at in range(start, end)}
    whole = text.chunk(0, 300, images)
    assert not torch.equal(whole, text.chunk(0, 300))
    close = dict(atol=2e-5, rtol=1e-4) if dtype == torch.float32 else dict(atol=2e-2, rtol=2e-2)
    for position in (0, 6, 7, 12, 19, 20, 99, 100, 111, 112, 160, 230, 231, 250, 289, 299):
        low, end = max(position + 1 - window, 0) if window else 0, seen.get(position, position + 1)
        k, v = text.k[low:end], text.v[low:end]
        expected = brute_force(text.q[position], k, v, text.kind._replace(window=0))
        torch.testing.assert_close(whole[position].double(), expected, **close)
    for start, end in ((3, 99), (12, 21), (90, 240), (100, 231), (180, 231), (231, 290), (260, 300)):
        part, here = text.chunk(start, end - start, images), whole[start:end]
        if ops.name == "torch":  # whose bits are a matter of the CPU's GEMM, and so which way bfloat16 is rounded
            torch.testing.assert_close(part, here, atol=2e-6, rtol=1e-5 if dtype == torch.float32 else 2**-7)
        else:
            assert torch.equal(part, here)


def of_whole(tree: Tensor, picked: list[list[int]]) -> Tensor:
    """The picked queries of whole trees."""
    return torch.cat([whole[mine] for whole, mine in zip(tree, picked, strict=True)])


@pytest.mark.further(ops="triton", heads=[(4, 2), (3, 1)])
@pytest.mark.further(ops="triton", with_trees=False)
@pytest.mark.parametrize("with_trees", [True, False])
@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (16, 1)])
def test_a_part_of_each_tree(ops: TorchOps, heads: tuple[int, int], with_trees: bool) -> None:
    """And every tree's root alone, of a batch without drafts."""
    text = Text(ops, heads=heads)
    whole = text.tree(PREFIXES, own=True)
    for picked in (PICKED, [[0]] * len(PREFIXES)):
        alone, expected = text.tree(PREFIXES, picked, with_trees, own=True), of_whole(whole, picked)
        if ops.name == "torch":  # whose bits are a matter of the CPU's GEMM
            torch.testing.assert_close(alone, expected, atol=2e-6, rtol=1e-5)
        else:
            assert torch.equal(alone, expected)


@pytest.fixture
def kernels(mended_interpreter: None) -> Any:
    return pytest.importorskip("draftwing.ops.attention.triton_decode")


@pytest.mark.further(name=["window 3, less than a path", "window 40", "chunks of 43", "latents"])
@pytest.mark.parametrize("name", ["window 3, less than a path", "window 40", "chunks of 43", "all", "latents"])
def test_triton_tilings(name: str, kernels: Any, triton_ops: TorchOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits in lanes and launches, which begin where the window does."""
    from attention_cases import TINY

    results = []
    for changes in TILINGS.values():
        tiling = TINY._replace(**changes)
        monkeypatch.setattr(kernels, "pick_tiling", lambda kv, tiling=tiling: tiling)
        results.append(Text(triton_ops, KINDS[name]).tree(PREFIXES))
    text = Text(triton_ops, KINDS[name])
    torch.testing.assert_close(results[0][3, 5].double(), text.expected(132), atol=2e-5, rtol=1e-4)
    for other in results[1:]:
        assert torch.equal(other, results[0])


@pytest.mark.further(name=["lanes", "one lane", "two launches, one lane"])
@pytest.mark.further(exact=False)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", TILINGS)
def test_triton_tilings_of_parts(
    name: str, exact: bool, kernels: Any, triton_ops: TorchOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles that cut groups and trees, splits in several lanes and launches."""
    from attention_cases import TINY

    monkeypatch.setattr(kernels, "pick_tiling", lambda kv: TINY._replace(**TILINGS[name]))
    for heads in ((6, 1), (16, 1)):
        text = Text(triton_ops, exact=exact, heads=heads, parents=(PARENTS[:7], OTHERS[:7]))
        picked = [[node for node in mine if node < 7] for mine in PICKED]
        alone, expected = text.tree(PREFIXES, picked, own=True), of_whole(text.tree(PREFIXES, own=True), picked)
        if exact:
            assert torch.equal(alone, expected)
        else:
            torch.testing.assert_close(alone, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: too large for the interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("counts", [[6, 1, 3, 0, 2, 5], [32, 1, 20, 0, 7, 9], [1] * 6], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [((32, 8), 128), ((9, 3), 64), ((16, 16), 128)])
def test_the_real_tiling(
    heads: tuple[int, int], dim: int, counts: list[int], dtype: torch.dtype, triton_ops: TorchOps
) -> None:
    prefixes, rng = [851, 1610, 0, 5497, 2944, 2323], random.Random(0)
    parents = tuple([-1, *(rng.randrange(max(node // 2, 1)) for node in range(1, 32))] for _ in prefixes)
    for exact in (True, False):
        text = Text(triton_ops, FULL, dtype, exact, heads, dim, 5600, parents)
        whole = text.tree(prefixes, own=True)
        picked = [closed(paths, count) for paths, count in zip(text.paths, counts, strict=True)]
        for with_trees in (True, False) if exact else (True,):
            alone, expected = text.tree(prefixes, picked, with_trees, own=True), of_whole(whole, picked)
            if exact:
                assert torch.equal(alone, expected)
            else:
                torch.testing.assert_close(alone, expected, atol=2e-2, rtol=2e-2)


def closed(paths: list[list[int]], count: int) -> list[int]:
    """So many nodes with those that they follow, the last ones first."""
    found: set[int] = set()
    for path in reversed(paths):
        found = more if len(more := found | set(path)) <= count else found
    return sorted(found)


def test_every_tile_of_ragged_trees_has_a_number(kernels: Any) -> None:
    from draftwing.ops.attention.triton_tree import ragged_tiles

    rng = torch.Generator().manual_seed(0)
    for group, rows in ((1, 16), (3, 16), (4, 128), (32, 16), (5, 64)):
        counts = torch.randint(0, 20, (40,), generator=rng).tolist()
        start, taken = 0, -1
        for b, count in enumerate(counts):
            first = start * group // rows + b
            assert first > taken or not count
            taken = first + -(-count * group // rows) - 1
            start += count
        assert taken < ragged_tiles(start, len(counts), group, rows)


# -- layers that differ -----------------------------------------------------------------------------------------------

# As many heads of queries in most, so that only the whole shape tells them apart.
LAYERS = [HeadShape(4, 2, 16), HeadShape(4, 4, 16), HeadShape(4, 1, 32), HeadShape(4, 2, 32), HeadShape(2, 1, 32)]
CACHED, LAYERS_LENGTH = 9, 45  # of the text
PATHS = [[0], [0, 1], [0, 2], [0, 2, 3], [0, 1, 4]]


def chunk_of_layers(table: Tensor) -> tuple[Batch, list[list[int]]]:
    """One chunk behind the cached tokens, and which entries of the page table each of its queries sees."""
    length, zero = LAYERS_LENGTH - CACHED, torch.zeros(1, dtype=torch.int64)
    at = torch.arange(CACHED, LAYERS_LENGTH)
    spans = (ChunkSpan(0, 0, CACHED, length),)
    batch = Batch(zero, at, at, table[0, CACHED:LAYERS_LENGTH], table, zero + CACHED, chunks=spans, bound=LAYERS_LENGTH)
    return batch, [list(range(position + 1)) for position in at.tolist()]


def tree_of_layers(table: Tensor) -> tuple[Batch, list[list[int]]]:
    nodes, zero = len(PATHS), torch.zeros(1, dtype=torch.int64)
    path = torch.tensor([[own + [0] * (3 - len(own)) for own in PATHS]])
    path_len = torch.tensor([[len(own) for own in PATHS]])
    slots = table[0, CACHED : CACHED + nodes]
    at = CACHED + path_len[0] - 1
    batch = Batch(zero, at, at, slots, table, zero + CACHED, path, path_len, window=nodes, bound=LAYERS_LENGTH)
    return batch, [[*range(CACHED), *(CACHED + entry for entry in own)] for own in PATHS]


@pytest.mark.parametrize("make", [chunk_of_layers, tree_of_layers])
def test_each_is_as_it_is_alone(ops: TorchOps, make) -> None:  # type: ignore[no-untyped-def]
    rng, device = torch.Generator().manual_seed(4), ops.device
    table = (torch.randperm(2 * LAYERS_LENGTH, generator=rng) + 1)[None, : LAYERS_LENGTH + 10]
    batch, seen = make(table)
    on = [part.to(device) if isinstance(part, Tensor) else part for part in batch]
    pool = KVPool([KVSpec(1, 16), *(KVSpec(*shape[1:]) for shape in LAYERS)], 2 * LAYERS_LENGTH, torch.float32, device)
    for kv in pool.kv:
        kv.copy_(torch.randn(kv.shape, generator=rng))
    backend, count = ops.attention(pool, True), len(seen)
    together = backend.bind(Batch(*on), 1)
    for layers in (range(len(LAYERS)), (0, 3)):  # what was made for a layer is there for the next one of its shape
        for layer in layers:
            shape = LAYERS[layer]
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
