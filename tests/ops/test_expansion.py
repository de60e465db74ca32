"""A drafter's work around its head: tree expansion against the reference's, continuations against float64, and what is
read and kept of committed text."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from reference import draft_heads
from reference.noise import gumbel64
from torch import Tensor

from draftwing.config.trees import TreeShape
from draftwing.engine.devices import pick_device
from draftwing.engine.row_table import RowTable
from draftwing.ops.table import TorchOps
from draftwing.ops.types import Continuations, Draft, First, RowTensors, Unseen

LogProbs = Callable[[tuple[int, ...]], list[float]]
CLOSE = 2e-5


def make_table(ops: TorchOps, rows: int, length: int, vocab: int, seed: int, noisy: bool = False) -> RowTable:
    """Rows of garbage, every other one of them with a temperature if noisy."""
    g, slots = torch.Generator().manual_seed(seed), RowTable(rows, length, pick_device(ops.device.type, ops=ops))
    slots.page_table[:rows] = torch.randint(1, (1 << 31) - 1, (rows, length), generator=g)
    slots.tokens[:] = torch.randint(0, vocab, (rows + 1, length), generator=g)
    slots.kv_len[:rows] = torch.randint(0, length - 64, (rows,), generator=g)
    slots.last[:] = torch.randint(0, vocab, (rows + 1,), generator=g)
    slots.seed[:] = torch.randint(-(1 << 62), 1 << 62, (rows + 1,), generator=g)
    if noisy:
        slots.floats[1::2, 0] = torch.rand(slots.floats[1::2, 0].shape, generator=g).mul(1.5).add(0.2).to(ops.device)
    return slots


# -- tree expansion ---------------------------------------------------------------------------------------------------


def quantised(seed: int) -> LogProbs:
    """Log probabilities that are multiples of a quarter, many of them zero: exact in float32, and full of ties."""

    def log_probs(path: tuple[int, ...]) -> list[float]:
        rng = random.Random(f"{seed} {path}")
        return [-0.25 * max(0, rng.randrange(-3, 5)) for _ in range(10)]

    return log_probs


def partly_impossible(seed: int) -> LogProbs:
    """The same, where some tokens cannot follow."""

    def log_probs(path: tuple[int, ...]) -> list[float]:
        rng = random.Random(f"{seed} {path} possible")
        return [-math.inf if rng.random() < 0.3 else value for value in quantised(seed)(path)]

    return log_probs


def worked_example(path: tuple[int, ...]) -> list[float]:
    table = {(): (0.6, 0.3), (0,): (0.5, 0.35), (1,): (0.9, 0.05), (0, 0): (0.8, 0.1), (1, 0): (0.7, 0.2)}
    return [math.log(p) for p in table[path]]


def continuations_of(ops: TorchOps, ids: Tensor, logp: Tensor) -> Continuations:
    """Of ids and log probabilities [M, topk], best first, as the implementation has them."""
    if ops.name == "triton":  # one chunk, whose sum of exponentials is 1
        bits = (logp + 0.0).view(torch.int32)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        keys = (bits.long() << 32) | (0x7FFFFFFF - ids)
        sums = torch.tensor([0.0, 1.0]).expand(len(ids), 1, 2)
        ids, logp = keys.unsqueeze(1), sums.contiguous()
    return Continuations(ids.to(ops.device), logp.to(ops.device))


def best_of(table: LogProbs, path: tuple[int, ...], topk: int) -> tuple[list[int], list[float]]:
    row = table(path)
    ids, _ = draft_heads.best(row, topk)
    return ids, [row[i] for i in ids]


def expand(
    ops: TorchOps, tables: list[LogProbs], shape: TreeShape, tail: int = 0, lookahead: int = 1, width: int = 3
) -> tuple[Draft, RowTable, Tensor]:
    """A tree for each of the tables, whose nodes stand where they should all along; with the table and its rows."""
    size, topk, length = len(tables), shape.topk, 200
    slots = make_table(ops, size + 2, length, 50, size * 100 + topk)
    rows = torch.arange(size - 1, -1, -1)
    first_best = [best_of(table, (), topk) for table in tables]
    first = First(
        torch.full((size + 3, topk + 2), -5), torch.full((size + 3, topk + 2), -99.0), torch.randn(size + 3, width)
    )
    first.ids[rows, :topk] = torch.tensor([ids for ids, _ in first_best])
    first.logp[rows, :topk] = torch.tensor([logp for _, logp in first_best])
    hidden = first.feature[rows].unsqueeze(1)  # of the level above
    on_device = First(*(part.to(ops.device) for part in first))
    expansion = ops.expand(slots, rows.to(ops.device), shape, on_device, tail, lookahead, None)
    paths: list[list[tuple[int, ...]]] = [[()] for _ in tables]  # of each row's level before
    entries: list[list[tuple[int, ...]]] = [[tuple(range(tail))] for _ in tables]  # page-table entries past kv_len
    kv_len, page = slots.kv_len.tolist(), slots.page_table.tolist()
    for level in range(1, shape.depth):
        ids, parent = (part.cpu() for part in expansion.level())
        at = expansion.level_rows()
        assert expansion.root_at.tolist() == [kv_len[row] for row in rows.tolist()]
        for b, row in enumerate(rows.tolist()):
            above, own = paths[b], [tail + (level - 1) * topk + k for k in range(topk)]
            chosen = list(zip(ids[b].tolist(), parent[b].tolist(), strict=True))
            paths[b] = [(*above[p], i) for i, p in chosen]
            entries[b] = [(*entries[b][p], own[k]) for k, (_, p) in enumerate(chosen)]
            assert at.positions[b].tolist() == [kv_len[row] + level - lookahead] * topk
            assert at.write_slots[b].tolist() == [page[row][kv_len[row] + entry] for entry in own]
            assert at.path_len[b].tolist() == [tail + level] * topk
            assert at.path[b, :, : tail + level].tolist() == [list(entry) for entry in entries[b]]
            assert not at.path[b, :, tail + level :].any()
        fed = torch.stack([hidden[b, parent[b]] for b in range(size)]).flatten(0, 1)
        assert at.feature is None if not width else torch.equal(at.feature.cpu(), fed)
        found = [best_of(table, path, topk) for table, row in zip(tables, paths, strict=True) for path in row]
        following = torch.tensor([ids for ids, _ in found]), torch.tensor([logp for _, logp in found])
        hidden = torch.randn(size, topk, 3, width + 1)[:, :, 2, :width]  # rows apart, as of several MTP layers
        expansion.add(continuations_of(ops, *following), hidden.to(ops.device))
    return Draft(*(part.cpu() for part in expansion.draft())), slots, rows


def test_expansion_of_the_worked_example(ops: TorchOps) -> None:
    """K = 2, S = 3, N = 6, flat scores .6 .3 | .30 .21 .27 .015 | .24 .03 .189 .054."""
    draft, slots, rows = expand(ops, [worked_example] * 2, TreeShape(3, 2, 6))
    assert draft.tokens[:, 0].tolist() == slots.last[rows].tolist()
    assert draft.tokens[:, 1:].tolist() == [[0, 1, 0, 0, 0]] * 2
    assert draft.parent.tolist() == [[0, 0, 0, 1, 2, 3]] * 2
    assert draft.alive.all() and draft.alive.dtype == torch.bool


SHAPES = [(1, 4, 5), (2, 2, 7), (3, 3, 9), (5, 4, 8), (5, 1, 6), (4, 5, 40), (6, 3, 49), (4, 10, 64)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("tail", "lookahead", "width"), [(0, 1, 40), (1, 0, 0)])
@pytest.mark.covering("ops")
def test_expansion_with_ties(ops: TorchOps, shape: tuple[int, int, int], tail: int, lookahead: int, width: int) -> None:
    torch.manual_seed(0)
    makers = [quantised, partly_impossible]
    tables = [makers[seed % 2](seed) for seed in range(2 if ops.name == "triton" else 6)]
    draft, slots, rows = expand(ops, tables, TreeShape(*shape), tail, lookahead, width)
    for b, table in enumerate(tables):
        tree = draft_heads.grow(table, range(10), int(slots.last[rows[b]]), 0, *shape)
        assert draft.tokens[b].tolist() == tree.tokens
        assert draft.parent[b].tolist() == tree.parents
        assert draft.grade is not None
        assert draft.grade[b].tolist() == [0, *(grade(tree, node) for node in range(1, shape[2]))]
    assert draft.alive.all()


def grade(tree: draft_heads.Tree, node: int) -> int:
    """By the probability of a node if the one above it is right."""
    score, above = tree.scores[node], tree.scores[tree.parents[node]]
    p = min(max(math.exp(score - above) if score > -math.inf else 0, 1e-6), 1 - 1e-6)
    return 16 + min(max(math.floor(1.25 * math.log(p / (1 - p)) + 7.5), 0), 15)


# -- continuations ----------------------------------------------------------------------------------------------------


def read(ops: TorchOps, following: Continuations, topk: int, target_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Ids and log probabilities of M nodes, by way of rows M - 1, ..., 0 that keep them."""
    nodes = following.ids.shape[0]
    first = First(
        torch.full((nodes + 1, topk), -7, device=ops.device), torch.full((nodes + 1, topk), 9.0, device=ops.device),
        torch.zeros(nodes + 1, 0, device=ops.device),
    )  # fmt: skip
    rows = torch.arange(nodes, device=ops.device).flip(0)
    ops.keep_first(following, rows, first, target_ids)
    assert (first.ids[-1] == -7).all() and (first.logp[-1] == 9.0).all()
    return first.ids[rows].cpu(), first.logp[rows].cpu()


def expected_continuations(
    logits: Tensor, table: RowTensors, rows: Tensor, ahead: int, target_ids: Tensor | None
) -> Tensor:
    """Noisy logits [M, V] in float64."""
    z = logits.double().cpu()
    each = rows.cpu().repeat_interleave(len(z) // len(rows))
    seed, position = table.seed.cpu()[each], table.kv_len.cpu()[each] + ahead
    ids = np.arange(z.shape[1]) if target_ids is None else target_ids.cpu().numpy()
    noise = torch.from_numpy(gumbel64(seed.numpy(), position.numpy(), ids))
    temperature, _, min_p = (column[:, None].double() for column in table.floats.cpu()[each].unbind(1))
    below = z.amax(1, keepdim=True) - z + temperature * min_p.log()  # more than 0: out of min-p's reach
    return z + noise * temperature - torch.where((temperature > 0) & (min_p > 0), below.clamp(min=0), 0.0)


@pytest.mark.slower(dtype=torch.float16)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
@pytest.mark.parametrize(
    ("vocab", "topk", "mapped"), [(11, 1, False), (1003, 3, True), (4096, 8, False), (5000, 10, True)]
)
@pytest.mark.covering("ops")
def test_continuations(ops: TorchOps, dtype: torch.dtype, min_p: float, vocab: int, topk: int, mapped: bool) -> None:
    g = torch.Generator().manual_seed(vocab)
    table = make_table(ops, 6, 200, vocab, vocab, noisy=True)
    table.floats[:, 2] = min_p
    rows = torch.tensor([4, 1, 3, 6], device=ops.device)
    noisy = (table.floats[rows, 0] > 0).nonzero().flatten()
    assert 0 < len(noisy) < 4
    # Padding past the vocabulary, as a head's logits have it, larger than all that counts.
    wide = (torch.randn(8, vocab + 9, generator=g) * 3).to(dtype)
    wide[:, vocab:] = 60.0
    logits = wide.to(ops.device)[:, :vocab]
    target_ids = torch.randperm(4 * vocab, generator=g)[:vocab].sort().values.to(ops.device) if mapped else None
    z = expected_continuations(logits, table, rows, 3, target_ids)
    ids, logp = read(ops, ops.continuations(logits, table, rows, 3, topk, target_ids, noisy), topk, target_ids)
    wanted = z.sort(dim=-1, descending=True, stable=True)
    gap = wanted.values.diff(dim=-1).abs()
    clear = torch.nn.functional.pad(gap, (1, 1), value=1.0)
    clear = torch.minimum(clear[:, :-1], clear[:, 1:])[:, :topk] > 1e-4  # of either neighbour
    places = wanted.indices[:, :topk]
    named = places if target_ids is None else target_ids.cpu()[places]
    assert torch.equal(ids[clear], named[clear]) and clear.double().mean() > 0.4
    expected = (wanted.values - z.logsumexp(-1, keepdim=True))[:, :topk]
    torch.testing.assert_close(logp.double(), expected, atol=5 * CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("min_p", [0.0, 0.1])
@pytest.mark.parametrize(
    ("vocab", "count", "mapped"), [(11, 5, False), (11, 11, False), (5000, 16, True), (9001, 16, False)]
)
@pytest.mark.covering("ops")
def test_candidates_of_levels(ops: TorchOps, min_p: float, vocab: int, count: int, mapped: bool) -> None:
    """Of greedy rows exactly, with ties between and within groups of tokens; of one that draws, up to rounding."""
    g, levels = torch.Generator().manual_seed(vocab), 3
    table = make_table(ops, 6, 200, vocab, vocab, noisy=True)
    table.floats[:, 2] = min_p
    rows = torch.tensor([4, 1, 2], device=ops.device)
    noisy = (table.floats[rows, 0] > 0).nonzero().flatten()
    assert noisy.tolist() == [1]
    logits = torch.randint(-40, 9, (levels * 3, vocab), generator=g).float() / 4
    logits[0, : vocab - 2 * count] = -torch.inf
    logits[1::3] += torch.randn(levels, vocab, generator=g)
    target_ids = torch.randperm(4 * vocab, generator=g)[:vocab].sort().values.to(ops.device) if mapped else None
    found = ops.level_candidates(logits.clone().to(ops.device), table, rows, 2, count, target_ids, noisy)
    assert len(found) == levels
    for level, following in enumerate(found):
        z = expected_continuations(logits[level * 3 : level * 3 + 3], table, rows, 2 + level, target_ids)
        ids, logp = read(ops, following, count, target_ids)
        wanted = z.sort(dim=-1, descending=True, stable=True)
        named = wanted.indices if target_ids is None else target_ids.cpu()[wanted.indices]
        assert torch.equal(ids[[0, 2]], named[[0, 2], :count])
        gap = wanted.values[1].diff().abs()
        clear = torch.nn.functional.pad(gap, (1, 1), value=1.0)
        clear = torch.minimum(clear[:-1], clear[1:])[:count] > 1e-4
        assert torch.equal(ids[1][clear], named[1, :count][clear]) and clear.double().mean() > 0.5
        expected = (wanted.values - z.logsumexp(-1, keepdim=True))[:, :count]
        torch.testing.assert_close(logp.double(), expected, atol=5 * CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("vocab", "count", "topk", "rank", "mapped"),
    [(11, 5, 2, 7, False), (5000, 16, 4, 33, True), (1003, 16, 1, 256, False)],
)
@pytest.mark.covering("ops")
def test_pair_continuations(
    ops: TorchOps, dtype: torch.dtype, vocab: int, count: int, topk: int, rank: int, mapped: bool
) -> None:
    """Of three nodes of each row, by what is above them, with noise in some rows."""
    g = torch.Generator().manual_seed(vocab)
    table = make_table(ops, 6, 200, vocab, vocab, noisy=True)
    rows = torch.tensor([4, 1, 3], device=ops.device)
    noisy = (table.floats[rows, 0] > 0).nonzero().flatten()
    logits = (torch.randn(3, vocab, generator=g) * 3).to(ops.device)
    target_ids = torch.randperm(4 * vocab, generator=g)[:vocab].sort().values.to(ops.device) if mapped else None
    z = expected_continuations(logits, table, rows, 2, target_ids).log_softmax(-1)
    known = 4 * vocab if mapped else vocab
    before, after = (torch.randn(known, rank, generator=g).to(dtype) for _ in range(2))
    gate, above = torch.randn(3, rank, generator=g).to(dtype) * rank**-0.5, torch.randint(0, known, (9,), generator=g)
    (candidates,) = ops.level_candidates(logits, table, rows, 2, count, target_ids, noisy)
    on_device = [part.to(ops.device) for part in (above, gate, before, after)]
    found = ops.pair_continuations(candidates, *on_device, topk, target_ids)
    ids, logp = read(ops, found, topk, target_ids)
    for node in range(9):
        row = node // 3
        best, places = z[row].topk(count)
        named = places if target_ids is None else target_ids.cpu()[places]
        gated = before[above[node]].double() * gate[row].double()
        scores = best + after[named].double() @ gated
        scores += best.logsumexp(0) - scores.logsumexp(0)
        wanted, order = scores.sort(descending=True)
        torch.testing.assert_close(logp[node].double(), wanted[:topk], atol=1e-4, rtol=1e-5)
        assert ids[node].tolist() == named[order[:topk]].tolist()


def test_ties_go_to_the_lower_id(ops: TorchOps) -> None:
    """Values from a handful, both zeros among them, and a row all alike; chunks meet in the middle of a tie."""
    vocab, topk = 2500, 10
    g = torch.Generator().manual_seed(1)
    table = make_table(ops, 4, 200, vocab, 1)
    values = torch.tensor([-1.5, -0.0, 0.0, 0.0])
    logits = values[torch.randint(0, 4, (4, vocab), generator=g)]
    logits[1] = -3.0
    logits[2, :2045] = -1.0
    rows, none = torch.arange(4, device=ops.device), torch.empty(0, dtype=torch.int64, device=ops.device)
    wanted = [draft_heads.best((row + 0.0).tolist(), topk)[0] for row in logits]
    expected = logits.double().log_softmax(-1).gather(1, torch.tensor(wanted))
    following = ops.continuations(logits.to(ops.device), table, rows, 1, topk, None, none)
    ids, logp = read(ops, following, topk, None)
    assert ids.tolist() == wanted and wanted[1] == list(range(topk))
    torch.testing.assert_close(logp.double(), expected, atol=CLOSE, rtol=CLOSE)


def test_masked_logits(ops: TorchOps) -> None:
    """A head may rule tokens out: whole chunks of -inf."""
    vocab = 5000
    table = make_table(ops, 2, 200, vocab, 2)
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(2))
    logits[:, :2200] = -torch.inf
    wanted = logits.double().log_softmax(-1).topk(4)
    rows, none = torch.arange(2, device=ops.device), torch.empty(0, dtype=torch.int64, device=ops.device)
    ids, logp = read(ops, ops.continuations(logits.to(ops.device), table, rows, 1, 4, None, none), 4, None)
    assert torch.equal(ids, wanted.indices)
    torch.testing.assert_close(logp.double(), wanted.values, atol=CLOSE, rtol=CLOSE)


# -- committed text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "width", "apart"), [(torch.bfloat16, 1050, False), (torch.float32, 33, True)])
def test_newest_rows(ops: TorchOps, dtype: torch.dtype, width: int, apart: bool) -> None:
    hidden = torch.randn(12, width * 2, generator=torch.Generator().manual_seed(0)).to(dtype).to(ops.device)
    hidden = hidden[:, :width] if apart else hidden[:, :width].contiguous()
    rows, count = torch.tensor([5, 0, 2], device=ops.device), torch.tensor([4, 1, 3], device=ops.device)
    kept = torch.full((7, width), 9.0, dtype=dtype, device=ops.device)
    wanted = hidden[torch.tensor([3, 4, 10], device=ops.device)]
    assert torch.equal(ops.newest_rows(hidden, count, 1, rows, kept), wanted)
    assert torch.equal(kept[rows], wanted) and (kept[[1, 3, 4, 6]] == 9).all()
    assert torch.equal(ops.newest_rows(hidden, count - 1, 0, rows, None), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("width", "steps"), [(33, None), (0, 1), (1050, 4), (33, 4)])
def test_keep_unseen(ops: TorchOps, dtype: torch.dtype, width: int, steps: int | None) -> None:
    places, g = 8, torch.Generator().manual_seed(3)
    behind, kept = torch.tensor([5, 0, 1, 0, 2, 0, 7]), torch.randn(7, places, width, generator=g).to(dtype)
    rows, prefix, count = [5, 0, 2], [0, 14, 7], [3, 1, 4] if steps == 4 else [1, 1, 1]
    hidden = torch.randn(12 if steps else 3, 2 * width, generator=g).to(dtype)[:, :width]
    nodes = torch.randperm(12, generator=g)[: 3 * steps] if steps else None
    unseen = Unseen(behind.clone().to(ops.device), kept.clone().to(ops.device))
    at, start, number = (torch.tensor(part, device=ops.device) for part in (rows, prefix, count))
    given = None if nodes is None else nodes.to(ops.device)
    ops.keep_unseen(unseen, at, start, number, hidden.to(ops.device) if width else None, given)
    for b, (row, first) in enumerate(zip(rows, prefix, strict=True)):
        behind[row] += count[b]
        for j in range(steps or 1):
            kept[row, (first + j) % places] = hidden[b if nodes is None else nodes[b * (steps or 1) + j]]
    assert unseen.behind.tolist() == behind.tolist() and torch.equal(unseen.hidden.cpu(), kept)


@pytest.mark.parametrize(("window", "width"), [(2, 1), (5, 4), (16, 8)])
def test_windowed(ops: TorchOps, window: int, width: int) -> None:
    length, g = 16, torch.Generator().manual_seed(window)
    table = torch.randint(1, 500, (6, length), generator=g)
    rows, prefix_len = torch.tensor([4, 0, 2, 5]), torch.tensor([0, 3, 11, 14])
    before, own = ops.windowed(table.to(ops.device), rows.to(ops.device), prefix_len.to(ops.device), window, width)
    for b, (row, prefix) in enumerate(zip(rows.tolist(), prefix_len.tolist(), strict=True)):
        count = min(prefix, window - 1)
        expected = [table[row, min(prefix - count + i, length - 1)].item() for i in range(window - 1 + width)]
        assert before[b] == count and own[b].tolist() == expected


@pytest.mark.parametrize("width", [1, 4, 7])
def test_chain(ops: TorchOps, width: int) -> None:
    table = make_table(ops, 5, 200, 1000, width)
    rows = [3, 4, 0, 5]
    at = torch.tensor(rows, device=ops.device)
    found = ops.chain(table, at, table.kv_len[at], width)
    tokens, pages, kv_len = table.tokens.tolist(), table.page_table.tolist(), table.kv_len.tolist()
    spans = [slice(kv_len[row], kv_len[row] + width) for row in rows]
    assert found.ids.tolist() == [x for row, span in zip(rows, spans, strict=True) for x in tokens[row][span]]
    assert found.write_slots.tolist() == [x for row, span in zip(rows, spans, strict=True) for x in pages[row][span]]
    assert found.positions.tolist() == [kv_len[row] + i for row in rows for i in range(width)]
    assert found.path.tolist() == [[list(range(width))] * width] * 4
    assert found.path_len.tolist() == [list(range(1, width + 1))] * 4


def test_block_inputs(ops: TorchOps) -> None:
    """Ids and slots are int64, whatever tables have: others index with them."""
    table, width, mask = make_table(ops, 5, 200, 1000, 1), 4, 999
    rows = [3, 4, 0]
    found = ops.block_inputs(table, torch.tensor(rows, device=ops.device), width, mask)
    kv_len = table.kv_len.tolist()
    assert found.ids.tolist() == [x for row in rows for x in (int(table.last[row]), *[mask] * (width - 1))]
    slots = [table.page_table[row, kv_len[row] : kv_len[row] + width].tolist() for row in rows]
    assert found.write_slots.tolist() == [x for own in slots for x in own]
    assert found.positions.tolist() == [kv_len[row] + i for row in rows for i in range(width)]
    assert all(part.dtype == torch.int64 for part in found)
