"""Attention on a CPU, by torch and by the C kernels, against brute force in float64 and against itself bit for bit: as
a decode, in a tree, in a chunk, in any batch, in any threads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from plain_attention import brute_force
from pool_batches import CPU, KERNELS, LAYER, chunk_batch, make_batch, make_pool, make_tokens, native, random_paths
from torch import Tensor

from draftwing.kv.pool import KVPool, KVSpec
from draftwing.layers.rope import RopeConfig, rope_table
from draftwing.ops import make_ops
from draftwing.ops.attention.attend import AttnBackend
from draftwing.ops.attention.batch import AttentionKind, Batch, ChunkSpan
from draftwing.ops.attention.spec import TorchAttention
from draftwing.ops.rope.spec import rotate

needs_kernels = pytest.mark.skipif(KERNELS is None, reason="the C kernels were not built")
SHAPES = [(9, 3, 64), (4, 4, 16), (8, 1, 32), (6, 2, 128), (3, 1, 24), (40, 1, 40), (5, 5, 80), (4, 2, 100)]
PREFIXES = [237, 0, 112, 5, 110, 16, 15, 47]
MakeBackend = Callable[[KVPool], AttnBackend]


@pytest.fixture(params=["torch", pytest.param("cpu", marks=needs_kernels)])
def backend(request: pytest.FixtureRequest) -> MakeBackend:
    return TorchAttention if request.param == "torch" else native


@pytest.mark.further(nodes=[2, 100])
@pytest.mark.further(backend="torch", shape=SHAPES[4:])
@pytest.mark.further(dtype=torch.float32, shape=SHAPES[1:-1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("nodes", "rows"),
    [
        (1, 1),
        (12, 6),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 16), (2, 5), (7, 5), (64, 5), (100, 1))),
    ],
)
@pytest.mark.further(nodes=64, dtype=torch.float32)
@pytest.mark.further(backend="torch", nodes=64, shape=SHAPES[1:])
@pytest.mark.covering("backend")
def test_trees_equal_brute_force(
    backend: MakeBackend, shape: tuple[int, int, int], nodes: int, rows: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(nodes)
    prefix = [PREFIXES[b % len(PREFIXES)] for b in range(rows)]
    pool, bound = make_pool(shape, dtype), max(prefix) + nodes + 3
    table = (torch.randperm(rows * bound, generator=generator) + 1).view(rows, bound)
    paths = [random_paths(nodes, generator) for _ in prefix]
    write = torch.stack([table[b, p : p + nodes] for b, p in enumerate(prefix)]).flatten()
    for b, committed in enumerate(prefix):
        old = make_tokens(committed, shape, dtype, 100)
        pool.write(LAYER, table[b, :committed], old.k, old.v)
    new = make_tokens(rows * nodes, shape, dtype, 1)
    out = backend(pool).bind(make_batch(table, prefix, write, paths, depth=2), LAYER)(0, *new)
    assert out.shape == (rows * nodes, shape[0] * shape[2]) and out.dtype == dtype
    # Of bfloat16: half of its last bit, for the result and for each weight, whose sum has the same error. That all of
    # these are as large at once was not seen: at most 0.57 of it, and in float32 a third of this.
    unit = 3e-6 if dtype == torch.float32 else 0.75 * 2**-8
    for b, committed in enumerate(prefix):
        k, v = pool.kv[LAYER][table[b, :committed]].unbind(2)
        for i in range(nodes):
            mine, q = torch.tensor(paths[b][i]) + b * nodes, new.q[b * nodes + i]
            keys, values = torch.cat((k, new.k[mine])), torch.cat((v, new.v[mine]))
            expected, size = brute_force(q, keys, values), brute_force(q, keys, values.abs())
            assert ((out[b * nodes + i] - expected).abs() <= unit * (2 * expected.abs() + size) + 1e-6).all()


@pytest.mark.parametrize("nodes", [1, 3])
def test_window_larger_than_the_queries(backend: MakeBackend, nodes: int) -> None:
    """The growth of a draft tree: the queries are its last level, their ancestors were written before."""
    shape, prefix, bound = (6, 2, 32), [3, 108], 150
    pool = make_pool(shape, torch.float32, garbage=True)
    table = (torch.randperm(2 * bound, generator=torch.Generator().manual_seed(nodes)) + 1).view(2, bound)
    paths = [[[0, 2, 4, 7 + i] for i in range(nodes)], [[6, 7 + i] for i in range(nodes)]]
    write = torch.stack([table[b, p + 7 : p + 7 + nodes] for b, p in enumerate(prefix)])
    new = make_tokens(2 * nodes, shape, torch.float32, 1)
    wide = torch.zeros(2, 2 * bound, dtype=torch.int64)
    wide[:, :bound] = table
    batch = make_batch(wide[:, :bound], prefix, write.flatten(), paths, 10, depth=9)  # the table as a slice
    out = backend(pool).bind(batch, LAYER)(0, *new)
    for b, committed in enumerate(prefix):
        for i in range(nodes):
            seen = torch.cat((table[b, :committed], table[b, committed + torch.tensor(paths[b][i])]))
            k, v = pool.kv[LAYER][seen].unbind(2)
            torch.testing.assert_close(
                out[b * nodes + i].double(), brute_force(new.q[b * nodes + i], k, v), rtol=1e-4, atol=2e-5
            )


@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_equal_brute_force(backend: MakeBackend, shape: tuple[int, int, int]) -> None:
    pool = make_pool(shape, torch.float32)
    spans = [(0, 250), (3, 1), (100, 30), (224, 1), (0, 112), (0, 16)]  # start, length
    chunks, offset = [], 0
    for row, (start, length) in enumerate(spans):
        chunks.append(ChunkSpan(row, offset, start, length))
        offset += length
    table = (torch.randperm(len(spans) * 260, generator=torch.Generator().manual_seed(0)) + 1).view(len(spans), 260)
    for row, (start, _) in enumerate(spans):
        old = make_tokens(start, shape, torch.float32, row)
        pool.write(LAYER, table[row, :start], old.k, old.v)
    write = torch.cat([table[row, start : start + length] for row, (start, length) in enumerate(spans)])
    new = make_tokens(offset, shape, torch.float32, 2)
    out = backend(pool).bind(chunk_batch(table, tuple(chunks), write), LAYER)(0, *new)
    assert out.isfinite().all()
    for chunk in chunks:
        k, v = pool.kv[LAYER][table[chunk.row]].unbind(2)  # what was written included
        for i in {0, chunk.length // 2, chunk.length - 1}:
            end = chunk.start + i + 1
            assert torch.equal(k[end - 1], new.k[chunk.offset + i])
            expected = brute_force(new.q[chunk.offset + i], k[:end], v[:end])
            torch.testing.assert_close(out[chunk.offset + i].double(), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_nobody_reads_may_be_nan(backend: MakeBackend, nodes: int, dtype: torch.dtype) -> None:
    """Slots past a row's tokens, which a request with NaN has left, the dummy slot, and another row's tokens."""
    shape, prefix = (6, 2, 32), [3, 108, 20]
    bound = max(prefix) + nodes + 9
    table = (torch.randperm(3 * bound, generator=torch.Generator().manual_seed(nodes)) + 1).view(3, bound)
    table[1, prefix[1] + nodes :] = 0
    write = torch.stack([table[b, p : p + nodes] for b, p in enumerate(prefix)]).flatten()
    new = make_tokens(3 * nodes, shape, dtype, 1)
    batch = make_batch(table, prefix, write, [random_paths(nodes, torch.Generator().manual_seed(b)) for b in range(3)])
    span = ChunkSpan(1, 0, 40, 3 * nodes)
    chunk = chunk_batch(table, (span,), table[1, 40 : 40 + 3 * nodes])
    found = []
    for poisoned in (False, True):
        pool = make_pool(shape, dtype, garbage=True)
        if poisoned:
            for kv in pool.kv:
                kv[0] = math.nan
                kv[table[2]] = math.nan
                for b, p in enumerate(prefix):
                    kv[table[b, p + nodes :]] = math.nan
        found.append([backend(pool).bind(one, LAYER)(0, *new) for one in (batch, chunk)])
    (tree, chunks), (poisoned_tree, poisoned_chunks) = found
    assert torch.equal(tree[: 2 * nodes], poisoned_tree[: 2 * nodes]) and poisoned_tree[2 * nodes :].isnan().all()
    assert torch.equal(chunks, poisoned_chunks)


class Story:
    """One sequence of tokens, and every way to ask for the result of its token at a position."""

    def __init__(self, backend: MakeBackend, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        self.backend, self.shape, self.dtype = backend, shape, dtype
        self.tokens = make_tokens(400, shape, dtype, 3)
        self.table = torch.randperm(1200, generator=torch.Generator().manual_seed(4))[:400] + 1

    def chunk(self, start: int, length: int) -> Tensor:
        pool = make_pool(self.shape, self.dtype)
        pool.write(LAYER, self.table[:start], self.tokens.k[:start], self.tokens.v[:start])
        end = start + length
        batch = chunk_batch(self.table[None, :end], (ChunkSpan(0, 0, start, length),), self.table[start:end])
        return self.backend(pool).bind(batch, LAYER)(0, *(t[start:end] for t in self.tokens))

    def tree(self, position: int, path: list[int], nodes: int, rows: int, spare: int) -> Tensor:
        """The token at `position` as the last node of `path`, in the middle row; everything else is noise."""
        me, prefix = rows // 2, position - len(path) + 1
        pool = make_pool(self.shape, self.dtype)
        others = torch.arange(1300, pool.slots + 1)
        pool.write(LAYER, others, *torch.randn(2, len(others), *self.shape[1:]).to(self.tokens.k.dtype))
        pool.write(LAYER, self.table[:prefix], self.tokens.k[:prefix], self.tokens.v[:prefix])
        new = make_tokens(rows * nodes, self.shape, self.dtype, position + nodes + rows)
        for step, node in enumerate(path):
            for mine, theirs in zip(new, self.tokens, strict=True):
                mine[me * nodes + node] = theirs[prefix + step]
        table = torch.randint(1300, 2000, (rows, prefix + nodes + spare))
        table[me, :prefix] = self.table[:prefix]
        window = torch.arange(rows * nodes).view(rows, nodes) + 2000
        lengths = [prefix if row == me else (row * 37) % (prefix + 1) for row in range(rows)]
        for row, length in enumerate(lengths):
            table[row, length : length + nodes] = window[row]
        paths = [[i] for i in range(nodes)]
        for step, node in enumerate(path):
            paths[node] = path[: step + 1]
        batch = make_batch(table, lengths, window.flatten(), [paths] * rows, depth=9)
        return self.backend(pool).bind(batch, LAYER)(0, *new)[me * nodes + path[-1]]


def sums_in_order(kv_heads: int, group: int, dim: int) -> bool:
    """Whether this CPU's GEMMs keep to what `ops.attention.spec` takes for granted: a sum of up to 192 terms is one
    chain of multiply-adds in their order, so terms of 0 before and after the others change no bit, and neither do the
    numbers of rows, of columns and of GEMMs in a call. Tried out like `onednn.rows_summed_alike`, on terms of very
    different size, with operands laid out as there."""
    generator = torch.Generator().manual_seed(6)

    def spread(*shape: int) -> Tensor:
        size = torch.randint(-10, 10, shape, generator=generator).float().exp2()
        return torch.randn(shape, generator=generator) * size

    q, k, weights, values = spread(8, dim), spread(56, dim), spread(8, 56), spread(56, dim + 16)
    found: list[tuple[Tensor, Tensor]] = []
    for blocks in (1, 2, 3, 4):
        for nodes in (1, 2, 3, 5, 12, 16, 30, 64, 112):
            for width, first in ((112, 0), (112, 56), (128, 72), (192, 136)):
                count, tall = blocks * kv_heads, -(-nodes * group // 8) * 8
                left, scores = torch.zeros(count, tall, dim), torch.empty(count, tall, width)
                wide, shares = torch.zeros(count, width, 2 * dim + 16), torch.zeros(count, tall, width)
                left[:, :8], shares[:, :8, first : first + 56] = q, weights
                wide[:, first : first + 56, :dim], wide[:, first : first + 56, dim:] = k, values
                torch.baddbmm(scores, left, wide[..., :dim].transpose(1, 2), beta=0, alpha=0.18, out=scores)
                found.append((scores[:, :8, first : first + 56], torch.bmm(shares, wide[..., dim:])[:, :8]))
    return all(torch.equal(x, y[:1].expand_as(x)) for some in found for x, y in zip(some, found[0], strict=True))


@pytest.mark.slow
@pytest.mark.further(backend="torch", shape=[(4, 2, 128), (4, 4, 16), (5, 1, 40)])
@pytest.mark.further(backend="torch", shape=(9, 3, 64), dtype=torch.float32)
@pytest.mark.further(backend="cpu", shape=[(4, 4, 16), (4, 2, 16)])
@pytest.mark.further(shape=(9, 3, 64), dtype=torch.float32)
@pytest.mark.further(shape=(4, 2, 128), dtype=[torch.bfloat16, torch.int8])
@pytest.mark.further(backend="torch", shape=(4, 2, 16), dtype=torch.bfloat16)  # bits of float32 tell more
@pytest.mark.further(shape=(9, 3, 64), backend="torch")
@pytest.mark.parametrize(
    "backend", [pytest.param("torch", marks=pytest.mark.slow), pytest.param("cpu", marks=needs_kernels)], indirect=True
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 2, 128), (4, 4, 16), (4, 2, 16), (5, 1, 40)])
def test_bits_do_not_depend_on_how_a_query_is_asked(
    backend: MakeBackend, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    heads, kv_heads, dim = shape
    if backend is TorchAttention and dtype == torch.int8:
        pytest.skip("the C kernels' alone")
    if backend is TorchAttention and not sums_in_order(kv_heads, heads // kv_heads, dim):
        pytest.skip("the order of sums in this CPU's GEMMs, as this torch has them, follows from their sizes")
    story = Story(backend, shape, dtype)
    whole = story.chunk(0, 340)
    for position in (0, 1, 15, 16, 47, 111, 112, 230, 339):
        expected = story.tree(position, [0], 1, 1, 0)  # a plain decode
        assert torch.equal(whole[position], expected), position
        for rows, spare in ((1, 50), (3, 0), (16, 7)):
            assert torch.equal(story.tree(position, [0], 1, rows, spare), expected), (position, rows)
        for start, length in ((position, 1), (max(0, position - 3), 5), (max(0, position - 100), 130)):
            assert torch.equal(story.chunk(start, length)[position - start], expected), (position, start)
        for path, nodes, rows in (
            ([0], 12, 1),
            ([0, 1, 2, 3], 4, 3),
            ([0, 2, 5, 9, 11], 12, 1),
            ([0, 3], 16, 3),
            ([0, 7, 30, 63], 64, 2),
            (list(range(0, 120, 7)), 120, 2),
        ):
            if len(path) <= position + 1 and (nodes <= 80 or backend is not TorchAttention):
                assert torch.equal(story.tree(position, path, nodes, rows, rows), expected), (position, path, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kept_buffers_carry_nothing_over(backend: MakeBackend, dtype: torch.dtype) -> None:
    """One backend for forwards of several sizes, growing and shrinking, and for two layers of each."""
    story = Story(backend, (9, 3, 64), dtype)
    pool = make_pool((9, 3, 64), dtype, garbage=True)
    kept = backend(pool)

    def batch(start: int, length: int, tree: bool) -> Batch:
        here = story.table[start : start + length]
        if tree:
            paths = [[list(range(i + 1)) for i in range(length)]]
            return make_batch(story.table[None, : start + length], [start], here, paths)
        return chunk_batch(story.table[None, : start + length], (ChunkSpan(0, 0, start, length),), here)

    for start, length, tree in ((0, 120, False), (120, 8, True), (128, 200, False), (328, 1, True), (329, 3, True)):
        found, expected = kept.bind(batch(start, length, tree), 0), []
        for layer in (0, 1):
            tokens = [t[start : start + length] * (1 + layer) for t in story.tokens]
            expected.append((found(layer, *tokens), backend(pool).bind(batch(start, length, tree), 0), tokens))
        for layer, (out, fresh, tokens) in enumerate(expected):
            assert torch.equal(out, fresh(layer, *tokens)), (start, layer)


@needs_kernels
def test_memory_does_not_grow_with_what_comes() -> None:
    """A server's memory grew by tens of megabytes whenever a longer prompt met more rows than before."""
    story = Story(native, (9, 3, 64), torch.bfloat16)
    kept, places = native(make_pool((9, 3, 64), torch.bfloat16)), set()
    for length in (1, 30, 200, 328):
        batch = chunk_batch(story.table[None, :length], (ChunkSpan(0, 0, 0, length),), story.table[:length])
        kept.bind(batch, 0)(0, *[t[:length] for t in story.tokens])
        places.add((kept.scratch(1).data_ptr(), kept.spare(1, 1).data_ptr()))
        assert kept.spare(length << 16, length).numel() >= length << 16
    assert len(places) == 1


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.further(nodes=1, shape=[(9, 3, 64), (3, 3, 40)])
@pytest.mark.parametrize("shape", [(8, 2, 256), (9, 3, 64), (3, 3, 40)])
@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.further(nodes=1, dtype=torch.bfloat16)
@pytest.mark.further(nodes=3, dtype=torch.float32, shape=(8, 2, 256))
@pytest.mark.covering
def test_long_rows_equal_brute_force(nodes: int, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Chunks are fetched in one piece where their slots lie one after the other. A row of 13 chunks beside one of
    three, wherever their slots are, in one thread and in several."""
    prefix, paths = [3300, 530], [[[0], [0, 1], [0, 2]][:nodes]] * 2
    counts = [length + nodes for length in prefix]
    generator, before = torch.Generator().manual_seed(nodes), torch.get_num_threads()
    orders = [torch.arange(sum(counts)), torch.randperm(sum(counts), generator=generator)]
    orders.append(orders[0].roll(1700))  # a chunk of the long row in two pieces
    old, new, outs = make_tokens(sum(prefix), shape, dtype, 1), make_tokens(2 * nodes, shape, dtype, 2), []
    try:
        for threads, order in ((1, orders[0]), *((2, order) for order in orders), (3, orders[0])):
            torch.set_num_threads(threads)
            pool, own = make_pool(shape, dtype), (order + 1).split(counts)
            table = torch.zeros(2, counts[0], dtype=torch.int64)
            for b, slots in enumerate(own):
                table[b, : len(slots)] = slots
            kept = torch.cat([slots[:length] for slots, length in zip(own, prefix, strict=True)])
            pool.write(LAYER, kept, old.k, old.v)
            batch = make_batch(table, prefix, torch.cat([slots[-nodes:] for slots in own]), paths)
            outs.append(native(pool).bind(batch, LAYER)(0, *new))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(out, outs[0]) for out in outs)
    unit = 3e-6 if dtype == torch.float32 else 0.75 * 2**-8  # as above
    for b, i in itertools.product(range(2), range(nodes)):
        mine, first = torch.tensor(paths[b][i]) + b * nodes, sum(prefix[:b])
        committed = slice(first, first + prefix[b])
        keys, values = torch.cat((old.k[committed], new.k[mine])), torch.cat((old.v[committed], new.v[mine]))
        q = new.q[b * nodes + i]
        expected, size = brute_force(q, keys, values), brute_force(q, keys, values.abs())
        assert ((outs[0][b * nodes + i] - expected).abs() <= unit * (2 * expected.abs() + size) + 1e-6).all()


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_threads_change_nothing(dtype: torch.dtype) -> None:
    story, before = Story(native, (9, 3, 64), dtype), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(story.chunk(0, 400))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 2, 24)])
def test_fused_is_turn_store_attend(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Also that torch's backend says the same of the whole."""
    heads, kv_heads, dim = shape
    count = 70
    qkv = torch.cat(make_tokens(count, shape, dtype, 0), 1)
    cos, sin = rope_table(RopeConfig(), dim, count, dtype, "cpu").unsqueeze(2).unbind(1)
    table = torch.randperm(100, generator=torch.Generator().manual_seed(1))[None, :count] + 1
    batch = chunk_batch(table, (ChunkSpan(0, 0, 0, count),), table[0])
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    expected_pool, pool = make_pool(shape, dtype), make_pool(shape, dtype)
    for kv in (*expected_pool.kv, *pool.kv):
        kv.fill_(7.0)
    expected = TorchAttention(expected_pool).bind(batch, LAYER)(0, q, k, v)
    found = native(pool).bind(batch, LAYER).fused(0, qkv.clone(), cos, sin, None)  # type: ignore[attr-defined]
    tolerance = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found, expected, **tolerance)
    owned = table[0]
    tolerance = dict(rtol=1e-6, atol=1e-6) if dtype == torch.float32 else dict(rtol=1e-2, atol=0)  # an ulp
    torch.testing.assert_close(pool.kv[LAYER][owned], expected_pool.kv[LAYER][owned], **tolerance)
    others = torch.ones(pool.slots + 1, dtype=torch.bool).index_fill(0, owned, False)
    assert pool.kv[LAYER][others].eq(7.0).all()
    # Queries alone, of a layer that reads what another one wrote.
    again = native(pool).bind(batch, LAYER).fused(0, qkv[:, :heads].clone(), cos, sin, None, AttentionKind(reads=True))
    assert torch.equal(again, found)


def test_the_choice_of_a_backend() -> None:
    half = KVPool([KVSpec(1, 16)], 4, torch.float16, CPU)
    assert isinstance(make_ops(CPU).attention(half), TorchAttention), "the kernels know no float16"
    pool = KVPool([KVSpec(1, 16)], 4, torch.bfloat16, CPU)
    own = type(make_ops(CPU).attention(pool)).__name__
    assert own == ("NativeAttention" if KERNELS else "TorchAttention")
