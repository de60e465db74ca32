"""Attention over trees of which each has a number of queries of its own, on all backends: what the whole trees give."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from plain_attention import TILINGS
from torch import Tensor

from draftwing.kv.pool import KVPool, KVSpec
from draftwing.ops.attention import Batch, Ragged
from draftwing.ops.torch.ops import TorchOps

PREFIX = [37, 70, 0, 239, 128, 101]
PICKED = [6, 1, 3, 0, 2, 5]  # queries of each tree
DEPTH = 4


class Whole(NamedTuple):
    """Trees of N nodes over one layer of a pool, all of whose keys are written."""

    pool: KVPool
    batch: Batch
    q: Tensor  # [B * N, heads, dim]
    k: Tensor
    v: Tensor

    def part(self, picked: list[Tensor], with_trees: bool) -> tuple[Batch, Tensor]:
        """The batch of those nodes of each tree alone, and which of the B * N they are; with_trees: the batch
        says what the trees are, too."""
        batch, device = self.batch, self.q.device
        assert batch.path is not None and batch.path_len is not None
        nodes = batch.path.shape[1]
        query = torch.cat([b * nodes + mine for b, mine in enumerate(picked)]).to(device)
        tree = query // nodes
        starts = torch.tensor([0, *(len(mine) for mine in picked)], device=device).cumsum(0)
        batch = batch._replace(
            rows=batch.rows[tree],
            prefix_len=batch.prefix_len[tree],
            write_slots=batch.write_slots[query],
            path=batch.path.flatten(0, 1)[query].unsqueeze(1),
            path_len=batch.path_len.flatten()[query].unsqueeze(1),
            ragged=Ragged(batch.rows, batch.prefix_len, starts, nodes, 3) if with_trees else None,
        )
        return batch, query


def make_whole(
    nodes: int, heads: tuple[int, int], device: torch.device, dtype: torch.dtype, dim: int = 16, stretch: int = 1
) -> Whole:
    rng = torch.Generator().manual_seed(nodes)
    prefix = torch.tensor(PREFIX) * stretch
    size, bound = len(PREFIX), max(PREFIX) * stretch + nodes
    longest = bound + 3
    path = torch.zeros(size, nodes, DEPTH, dtype=torch.int64)
    path_len = torch.ones(size, nodes, dtype=torch.int64)
    for b in range(size):
        for node in range(1, nodes):
            above = torch.nonzero(path_len[b, :node] < DEPTH).flatten()
            parent = int(above[torch.randint(len(above), (), generator=rng)])
            level = int(path_len[b, parent])
            path[b, node, :level] = path[b, parent, :level]
            path[b, node, level:] = node
            path_len[b, node] = level + 1
    table = torch.randperm((size + 2) * longest, generator=rng).view(size + 2, longest) + 1
    rows = torch.randperm(size + 2, generator=rng)[:size]
    pool = KVPool([KVSpec(heads[1], dim)], int(table.max()), dtype, device)
    pool.kv[0].copy_(torch.randn(pool.kv[0].shape, generator=rng))
    write = table[rows[:, None], prefix[:, None] + torch.arange(nodes)].flatten()
    batch = Batch(rows, write, write, write, table, prefix, path, path_len, window=nodes, bound=bound)
    batch = Batch(*(part.to(device) if isinstance(part, Tensor) else part for part in batch))
    q, k, v = (torch.randn(size * nodes, count, dim, generator=rng).to(device, dtype) for count in (*heads, heads[1]))
    return Whole(pool, batch, q, k, v)


def closed_parts(whole: Whole, counts: list[int]) -> list[Tensor]:
    """So many nodes of each tree, with the nodes that they follow."""
    assert whole.batch.path is not None and whole.batch.path_len is not None
    found = []
    for path, path_len, count in zip(whole.batch.path, whole.batch.path_len, counts, strict=True):
        mine: set[int] = set()
        for node in reversed(range(len(path_len))):  # the last ones first: not simply the first nodes
            more = mine | set(path[node, : int(path_len[node])].tolist())
            mine = more if len(more) <= count else mine
        assert len(mine) <= count
        found.append(torch.tensor(sorted(mine), dtype=torch.int64))
    return found


def results(
    ops: TorchOps, whole: Whole, with_trees: bool, exact: bool = True, picked: list[int] = PICKED
) -> tuple[Tensor, Tensor]:
    """Of the picked queries: in their whole trees, and alone."""
    backend = ops.attention(whole.pool, exact)
    every = backend.bind(whole.batch, 0)(0, whole.q, whole.k, whole.v)
    batch, query = whole.part(closed_parts(whole, picked), with_trees)
    alone = backend.bind(batch, 0)(0, *(part[query] for part in whole[2:]))
    return every[query], alone


@pytest.mark.further(ops="triton", heads=[(4, 2), (3, 1)])
@pytest.mark.further(ops="triton", with_trees=False)
@pytest.mark.parametrize("with_trees", [True, False])
@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (16, 1)])
def test_a_part_of_each_tree(ops: TorchOps, heads: tuple[int, int], with_trees: bool) -> None:
    whole = make_whole(6, heads, ops.device, torch.float32)
    expected, alone = results(ops, whole, with_trees)
    if ops.name == "torch":  # whose bits are a matter of the CPU's GEMM
        torch.testing.assert_close(alone, expected, atol=2e-6, rtol=1e-5)
    else:
        assert torch.equal(alone, expected)


def test_a_batch_without_drafts(ops: TorchOps) -> None:
    """Every tree's root alone."""
    whole = make_whole(4, (4, 2), ops.device, torch.float32)
    backend = ops.attention(whole.pool, True)
    every = backend.bind(whole.batch, 0)(0, *whole[2:])
    batch, query = whole.part([torch.tensor([0])] * len(PREFIX), True)
    torch.testing.assert_close(
        backend.bind(batch, 0)(0, *(part[query] for part in whole[2:])), every[query], atol=2e-6, rtol=1e-5
    )


@pytest.fixture
def kernels(mended_interpreter: None) -> Any:
    return pytest.importorskip("draftwing.ops.triton.attention")


@pytest.mark.further(name=["lanes", "one lane", "two launches, one lane"])
@pytest.mark.further(exact=False)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", TILINGS)
def test_triton_tilings(
    name: str, exact: bool, kernels: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles that cut groups and trees, splits in several lanes and launches."""
    from attention_cases import TINY

    from draftwing.ops.triton.ops import TritonOps

    monkeypatch.setattr(kernels, "pick_tiling", lambda kv: TINY._replace(**TILINGS[name]))
    for heads in ((6, 1), (16, 1)):
        whole = make_whole(7, heads, device, torch.float32)
        expected, alone = results(TritonOps(device), whole, True, exact)
        if exact:
            assert torch.equal(alone, expected)
        else:
            torch.testing.assert_close(alone, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: too large for the interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("picked", [PICKED, [32, 1, 20, 0, 7, 9], [1, 1, 1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [((32, 8), 128), ((9, 3), 64), ((16, 16), 128)])
def test_the_real_tiling(
    heads: tuple[int, int], dim: int, picked: list[int], dtype: torch.dtype, kernels: Any, device: torch.device
) -> None:
    from draftwing.ops.triton.ops import TritonOps

    whole = make_whole(32, heads, device, dtype, dim, stretch=23)
    for with_trees in (True, False):
        expected, alone = results(TritonOps(device), whole, with_trees, True, picked)
        assert torch.equal(alone, expected)
    expected, alone = results(TritonOps(device), whole, True, False, picked)
    torch.testing.assert_close(alone, expected, atol=2e-2, rtol=2e-2)


def test_every_tile_of_ragged_trees_has_a_number(kernels: Any) -> None:
    from draftwing.ops.triton.attention_tree import ragged_tiles

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
