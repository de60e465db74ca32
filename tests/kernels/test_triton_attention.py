"""Triton attention against a brute force in float64, and its promise about bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftwing.attn.base import Batch, ChunkSpan
from draftwing.kv.pool import KVPool, LayerSpec
from draftwing.layers.norm import RMSNorm
from draftwing.layers.rope import RopeConfig, rope_table, rotate
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderLayer

attention = pytest.importorskip("draftwing.kernels.attention")
paged = pytest.importorskip("draftwing.attn.paged")
rope = pytest.importorskip("draftwing.kernels.rope")

# Small sizes, so that few keys reach many splits and the interpreter has time for them.
TINY = attention.Tiling(
    unit=32, short=32, tier=64, long=64, own=64, programs=24, prefill_rows=16, fast_rows=32, stages=1, prefill_stages=1
)
GPU = torch.cuda.is_available()
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mends Triton 3.6's interpreter: with numpy 2.4 or later it cannot loop to a number that a kernel computed, for
    int() takes no array of one element; and its products take bfloat16 for integers, and float32 in any order."""
    triton = pytest.importorskip("triton.runtime.interpreter")
    patch = triton._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def dot(self: Any, a: Any, b: Any, acc: Any, *_: Any) -> Any:
        left, right = widen(a), widen(b)
        total = acc.data.copy()
        for k in range(left.shape[1]):  # in key order, as a GPU's chunks are
            total += left[:, k, None] * right[k]
        return triton.TensorHandle(total, acc.dtype.scalar)

    monkeypatch.setattr(triton, "_patch_lang_tensor", patched)
    monkeypatch.setattr(triton.InterpreterBuilder, "create_dot", dot)


def widen(handle: Any) -> np.ndarray:
    if handle.data.dtype == np.uint16:  # how the interpreter keeps bfloat16
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


@dataclass
class Case:
    """B rows of one layer's pool. Every slot that nobody may read is NaN."""

    kv: Tensor  # [slots, kv_heads, 2, dim]
    table: Tensor  # [R + 1, L]
    rows: Tensor  # [B]
    prefix: Tensor  # [B]
    path: Tensor  # [B, Q, D]
    path_len: Tensor  # [B, Q]
    q: Tensor  # [B * Q, heads, dim]

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
                out.append(brute(self.q[b * nodes + node], self.kv[slots]))
        return torch.stack(out)

    def run(self, exact: bool = True, tiling: object = TINY, workspace: object = None) -> Tensor:
        heads, dim = self.q.shape[1:]
        out = self.q.new_full((self.q.shape[0], heads * dim), torch.nan)
        workspace = workspace or attention.Workspace(self.q.device)
        attention.tree_attention(
            self.q, self.kv, self.table, self.rows, self.prefix, self.path, self.path_len, out, workspace, exact, 0,
            tiling,
        )  # fmt: skip
        assert not workspace.take("tickets", 1, torch.int32).any(), "tickets are left behind"
        return out


def brute(q: Tensor, kv: Tensor) -> Tensor:
    """q [heads, dim], kv [keys, kv_heads, 2, dim] -> [heads * dim] float64"""
    q, kv = q.double(), kv.double()
    out = []
    for head in range(q.shape[0]):
        k, v = kv[:, head // (q.shape[0] // kv.shape[1])].unbind(1)
        out.append(torch.softmax(k @ q[head] * q.shape[1] ** -0.5, 0) @ v)
    return torch.cat(out)


def make_case(
    lengths: list[int],
    nodes: int,
    device: torch.device,
    heads: tuple[int, int] = (4, 2),
    dim: int = 32,
    dtype: torch.dtype = torch.float32,
    chain: bool = False,
    seed: int = 0,
) -> Case:
    """Random trees of up to `nodes` nodes with dead ones; the last batch row is the slot table's dummy."""
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
    kv = torch.full((int(slots.max()) + 1, kv_heads, 2, dim), torch.nan)
    case = Case(kv, slots, rows, prefix, path, path_len, torch.randn(batch * nodes, q_heads, dim, generator=rng))
    for b in range(batch):
        read = slots[rows[b], : int(prefix[b]) + nodes]
        kv[read] = torch.randn(len(read), kv_heads, 2, dim, generator=rng)
    for name, value in vars(case).items():
        setattr(case, name, value.to(device, dtype) if value.is_floating_point() else value.to(device))
    return case


def prefill(q: Tensor, kv: Tensor, table: Tensor, row: int, start: int, exact: bool = True) -> Tensor:
    out = q.new_full((q.shape[0], q.shape[1] * q.shape[2]), torch.nan)
    rows = torch.tensor([row], device=q.device)
    group = q.shape[1] // kv.shape[1]
    tiles = attention.prefill_tiles([(0, 0, start, q.shape[0])], group, attention.prefill_rows(kv, exact, TINY))
    attention.prefill_attention(q, kv, table, rows, tiles.to(q.device), out, exact, TINY)
    return out


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("heads", [(4, 1), (3, 3), (6, 2), (8, 1), (32, 1)])
@pytest.mark.parametrize("nodes", [1, 6])
def test_trees_against_brute_force(heads: tuple[int, int], nodes: int, exact: bool, device: torch.device) -> None:
    case = make_case([37, 70, 0], nodes, device, heads, dim=16)
    torch.testing.assert_close(case.run(exact).double(), case.expected(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("length", [0, 15, 16, 29, 31, 32, 63, 64, 130])
@pytest.mark.parametrize("chain", [True, False])
def test_around_the_edges(length: int, chain: bool, device: torch.device) -> None:
    case = make_case([length, 0], 6, device, (2, 1), dim=16, chain=chain, seed=length)
    torch.testing.assert_close(case.run().double(), case.expected(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("length", [33, 130])
def test_bits_do_not_depend_on_who_merges(length: int, device: torch.device) -> None:
    case = make_case([length, 0], 6, device, (2, 1), dim=16)
    assert torch.equal(case.run(tiling=TINY._replace(merge_last=False)), case.run())
    assert torch.equal(case.run(tiling=TINY._replace(programs=1)), case.run())  # one lane: no partial results


@pytest.mark.parametrize("exact", [True, False])
def test_a_chain_longer_than_units(exact: bool, device: torch.device) -> None:
    case = make_case([41, 0], 40, device, (2, 1), chain=True)
    torch.testing.assert_close(case.run(exact).double(), case.expected(), atol=2e-5, rtol=1e-4)


def test_a_window_too_wide_to_be_masked(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([41, 0], 20, device, (2, 1), chain=True)
    exact, masked = case.run(), case.run(exact=False)
    monkeypatch.setattr(attention, "WINDOW_BYTES", 32 * 32 * 4 - 1)
    assert torch.equal(case.run(exact=False), exact)
    torch.testing.assert_close(masked, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU: the interpreter's memory has no end")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim, nodes", [(64, 300), (128, 140), (256, 70), (256, 300)])
def test_wide_windows_fit(dtype: torch.dtype, dim: int, nodes: int, device: torch.device) -> None:
    case = make_case([50, 0], nodes, device, (4, 2), dim, dtype)
    masked, exact = (case.run(how, tiling=None) for how in (False, True))
    torch.testing.assert_close(masked, exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [48, 128])
def test_dtypes_and_head_sizes(dtype: torch.dtype, dim: int, device: torch.device) -> None:
    case = make_case([50, 21, 0], 3, device, (4, 2), dim, dtype)
    for exact in (True, False):
        tiling = None if GPU else TINY
        torch.testing.assert_close(
            case.run(exact, tiling).double(), case.expected(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 1), (3, 1), (2, 2)])
def test_bits_do_not_depend_on_tree_or_batch(dtype: torch.dtype, heads: tuple[int, int], device: torch.device) -> None:
    """A node of a tree, the same query as a plain decode (its path committed), in a batch, and in a prefill chunk."""
    case = make_case([39, 70, 0], 6, device, heads, dim=16, dtype=dtype)
    together = case.run().view(3, 6, -1)
    for b, node in [(0, 0), (0, 5), (1, 4)]:
        table = case.table.clone()
        where = case.positions(b, node)
        table[0, : len(where)] = case.table[case.rows[b], where]
        alone = Case(
            case.kv, table,
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.tensor([len(where) - 1], device=device),
            torch.zeros(1, 1, 1, dtype=torch.int64, device=device),
            torch.ones(1, 1, dtype=torch.int64, device=device),
            case.q[b * 6 + node, None],
        )  # fmt: skip
        assert torch.equal(alone.run()[0], together[b, node])
        chunk = prefill(alone.q, case.kv, table, 0, len(where) - 1)
        assert torch.equal(chunk[0], together[b, node])
        queries = alone.q.expand(21, -1, -1).contiguous()
        chunk = prefill(queries, case.kv, table, 0, len(where) - 21)
        assert torch.equal(chunk[-1], together[b, node])


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU: too large for the interpreter")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("length", [300, 511, 2050, 5000])
@pytest.mark.parametrize("heads", [(32, 8), (9, 3), (8, 8)])
def test_bits_of_the_real_tiling(dtype: torch.dtype, length: int, heads: tuple[int, int], device: torch.device) -> None:
    case = make_case([length, 40, 0], 32, device, heads, 64 if heads[0] == 9 else 128, dtype)
    tiling = attention.pick_tiling(case.kv)
    together = case.run(tiling=tiling).view(3, 32, -1)
    one_lane = case.run(tiling=tiling._replace(programs=1)).view(3, 32, -1)
    assert torch.equal(together, one_lane)
    for b in (0, 1):
        for node in range(32):
            where = case.positions(b, node)
            table = case.table.clone()
            table[0, : len(where)] = case.table[case.rows[b], where]
            alone = Case(
                case.kv, table,
                torch.zeros(1, dtype=torch.int64, device=device),
                torch.tensor([len(where) - 1], device=device),
                torch.zeros(1, 1, 1, dtype=torch.int64, device=device),
                torch.ones(1, 1, dtype=torch.int64, device=device),
                case.q[b * 32 + node, None],
            )  # fmt: skip
            assert torch.equal(alone.run(tiling=tiling)[0], together[b, node]), (b, node)
            out = torch.full_like(together[b, node, None], torch.nan).repeat(30, 1)
            queries = alone.q.expand(30, -1, -1).contiguous()
            tiles = attention.prefill_tiles(
                [(0, 0, len(where) - 30, 30)], heads[0] // heads[1], attention.prefill_rows(case.kv, True)
            )
            attention.prefill_attention(queries, case.kv, table, alone.rows, tiles.to(device), out)
            assert torch.equal(out[-1], together[b, node]), (b, node)


@pytest.mark.parametrize("exact", [True, False])
def test_prefill_chunks_against_brute_force(exact: bool, device: torch.device) -> None:
    case = make_case([70, 45, 0], 3, device, (6, 2))
    spans = [(1, 0, 0, 19), (0, 19, 23, 40), (1, 59, 19, 3)]  # chunks of two rows, one with an earlier chunk
    q = torch.randn(62, 6, 32, generator=torch.Generator().manual_seed(3)).to(device)
    out = torch.full((62, 6 * 32), torch.nan, device=device)
    tiles = attention.prefill_tiles(spans, 3, attention.prefill_rows(case.kv, exact, TINY)).to(device)
    attention.prefill_attention(q, case.kv, case.table, case.rows, tiles, out, exact, TINY)
    for row, offset, start, length in spans:
        for i in range(length):
            slots = case.table[case.rows[row], : start + i + 1]
            torch.testing.assert_close(
                out[offset + i].double(), brute(q[offset + i], case.kv[slots]), atol=2e-5, rtol=1e-4
            )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim, norm", [(128, False), (48, False), (64, True)])
def test_rope_and_write(dtype: torch.dtype, dim: int, norm: bool, device: torch.device) -> None:
    rng = torch.Generator().manual_seed(dim)
    heads, kv_heads, count = 6, 2, 5
    qkv = torch.randn(count, heads + 2 * kv_heads, dim, generator=rng).to(device, dtype)
    table = rope_table(RopeConfig(), dim, 40, dtype, device)
    positions = torch.randint(40, (count,), generator=rng).to(device)
    slots = (torch.randperm(9, generator=rng)[:count] + 1).to(device)
    norms = [RMSNorm(dim, 1e-6, dtype, device) for _ in range(2)]
    for layer in norms:
        layer.weight.data.copy_(torch.rand(dim, generator=rng) + 0.5)

    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    if norm:
        q, k = norms[0](q), norms[1](k)
    cos, sin = table[positions].unsqueeze(2).unbind(1)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    expected = torch.zeros(10, kv_heads, 2, dim, device=device, dtype=dtype)
    expected[slots] = torch.stack((k, v), 2)

    for gathered in (True, False):
        turned, kv = qkv.clone(), torch.zeros_like(expected)
        weights = [layer.weight.data for layer in norms] if norm else [None, None]
        where = (cos, sin, slots, kv, None) if gathered else (table[:, 0], table[:, 1], slots, kv, positions)
        rope.rope_and_write(turned, *where, *weights, 1e-6)
        torch.testing.assert_close(turned[:, :heads], q, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        torch.testing.assert_close(kv, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert torch.equal(kv[:, :, 1], expected[:, :, 1])


def test_a_layer_that_norms_its_heads(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Qwen3's layers leave norm, rope and the pool to the kernel, and get what they would get without it."""
    config = ModelConfig(
        architecture="Qwen3ForCausalLM", hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=32,
        ffn_size=64, vocab_size=16, max_positions=64, qk_norm=True,
    )  # fmt: skip
    layer = DecoderLayer(config, 0, torch.float32, device)
    rng = torch.Generator().manual_seed(3)
    for param in layer.parameters():
        param.data.copy_(torch.randn(param.shape, generator=rng) * 0.2 + (param.dim() == 1))
        param.requires_grad_(False)
    count = 6
    x = torch.randn(count, 64, generator=rng).to(device)
    pool = KVPool([LayerSpec(2, 32)], 20, torch.float32, device)
    table = torch.arange(1, 21, device=device).view(1, 20)
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    positions = torch.arange(count, device=device)
    batch = Batch(rows, positions, positions, table[0, :count], table, rows, chunks=(ChunkSpan(0, 0, 0, count),))
    cos, sin = rope_table(RopeConfig(), 32, count, torch.float32, device).unsqueeze(2).unbind(1)
    calls, kernel = [], paged.rope_and_write
    monkeypatch.setattr(paged, "rope_and_write", lambda *args: (calls.append(args), kernel(*args))[1])
    results, written = [], []
    for fused in (True, False):
        attend = paged.PagedAttention(pool, exact=True).bind(batch, 0)
        results.append(layer(x, cos, sin, attend if fused else lambda *args, attend=attend: attend(*args)))
        written.append(pool.kv[0].clone())
    assert len(calls) == 1
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(written[0], written[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunks", [True, False])
def test_the_backend(chunks: bool, device: torch.device) -> None:
    """Both ways into it, for a layer behind others, against the brute force."""
    case = make_case([20, 33, 0], 4, device, (4, 2))
    pool = KVPool([LayerSpec(1, 16), LayerSpec(2, 32)], case.kv.shape[0] - 1, torch.float32, device)
    rng = torch.Generator().manual_seed(1)
    count = 12
    qkv = torch.randn(count, 8, 32, generator=rng).to(device)
    nothing = torch.zeros(count, dtype=torch.int64, device=device)
    positions = torch.arange(count, device=device)
    cos, sin = rope_table(RopeConfig(), 32, count, torch.float32, device).unsqueeze(2).unbind(1)
    if chunks:
        slots = case.table[case.rows[0], 20:32]
        where = dict(chunks=(ChunkSpan(0, 0, 20, 5), ChunkSpan(0, 5, 25, 7)))
    else:
        slots = torch.cat([case.table[case.rows[b], case.prefix[b] : case.prefix[b] + 4] for b in range(3)])
        where = dict(path=case.path, path_len=case.path_len, window=4)
    batch = Batch(case.rows, nothing, positions, slots, case.table, case.prefix, **where)
    turned = rotate(qkv[:, :6], cos, sin)

    results = []
    for fused in (True, False):
        pool.kv[1].copy_(case.kv)
        attend = paged.PagedAttention(pool, exact=True).bind(batch, 1)
        if fused:
            results.append(attend.fused(0, qkv.clone(), cos, sin))
        else:
            results.append(attend(0, turned[:, :4], turned[:, 4:], qkv[:, 6:]))
    torch.testing.assert_close(*results)
    case.kv, case.q = pool.kv[1], turned[:, :4]
    if chunks:
        read = [case.table[case.rows[0], : 21 + i] for i in range(count)]
        expected = torch.stack([brute(case.q[i], case.kv[read[i]]) for i in range(count)])
    else:
        expected = case.expected()
        real = 8  # the dummy's slot is written several times
        results, expected = [r[:real] for r in results], expected[:real]
    torch.testing.assert_close(results[0].double(), expected, atol=2e-5, rtol=1e-4)
