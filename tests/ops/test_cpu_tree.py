"""The C kernels of a tree step against the torch functions that they stand in for: the same integers and scores."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from draftwing.core import TreeShape
from draftwing.engine import commit as committing
from draftwing.engine.device import Device
from draftwing.engine.executor import Executor
from draftwing.engine.row_table import SlotTable
from draftwing.ops.cpu import tree as cpu_tree
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.torch import growth as grow
from draftwing.ops.torch import tree as reference
from draftwing.spec import model_drafter
from draftwing.spec.drafter import Draft

KERNELS = cpu_tree.load()
if KERNELS is None:
    pytest.skip("the C extension was not built, or is not wanted", allow_module_level=True)
assert KERNELS is not None

ROWS, LENGTH = 6, 160
SHAPES = [(1, 0), (2, 1), (4, 3), (7, 2), (8, 7), (17, 5), (33, 16), (64, 8)]  # nodes, depth


def random_draft(g: torch.Generator, batch: int, nodes: int, depth_max: int) -> tuple[Draft, Tensor]:
    """Trees with dead nodes and their dead children, siblings distinct, and what the target says at each node: mostly
    the token of one of the children."""

    below = random.Random(int(torch.randint(0, 1 << 30, (), generator=g))).randrange
    tokens, parents = torch.randint(0, 50, (batch, nodes), generator=g), torch.zeros(batch, nodes, dtype=torch.int64)
    alive, target = torch.ones(batch, nodes, dtype=torch.bool), torch.randint(0, 50, (batch, nodes), generator=g)
    for b in range(batch):
        depth, taken = [0] * nodes, set()
        lively, leaning = below(101), below(3)  # from lone roots to whole trees; the last means chains
        for i in range(1, nodes):
            p = i - 1 if leaning == 0 else below(i)
            name = p, int(tokens[b, i])
            parents[b, i] = p
            live = bool(alive[b, p]) and depth[p] < depth_max and name not in taken and below(100) < lively
            alive[b, i], depth[i] = live, depth[p] + 1 if live else 0
            taken |= {name} if live else set()
            if below(10) < 7:
                target[b, p] = tokens[b, i]
    return Draft(tokens, parents, alive), target


def random_slots(g: torch.Generator) -> SlotTable:
    slots = SlotTable(ROWS, LENGTH, Device(torch.device("cpu")))
    slots.table[:ROWS] = torch.randperm(ROWS * LENGTH, generator=g).view(ROWS, LENGTH) + 1
    slots.tokens[:ROWS] = torch.randint(0, 50, (ROWS, LENGTH), generator=g)
    slots.kv_len[:ROWS] = torch.randint(0, LENGTH - 70, (ROWS,), generator=g)
    slots.last[:ROWS] = slots.tokens[:ROWS].gather(1, slots.kv_len[:ROWS, None]).squeeze(1)
    return slots


def copy_of(slots: SlotTable) -> SlotTable:
    other = SlotTable(ROWS, LENGTH, slots.device)
    for name in ("table", "tokens", "kv_len", "last"):
        getattr(other, name).copy_(getattr(slots, name))
    return other


def rows_of(g: torch.Generator, batch: int) -> Tensor:
    """Distinct rows, not in order; the last two pad where there are so many."""
    rows = torch.randperm(ROWS, generator=g)[:batch]
    if batch > 2:
        rows[-2:] = ROWS
    return rows


def same(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@pytest.fixture
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Calls a function with the kernels left out."""

    def call(function: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            for module in ("engine.commit", "engine.executor", "spec.model_drafter"):
                patch.setattr(f"draftwing.{module}.tree_kernels_for", lambda tensor: None)
            return function()

    yield call


@pytest.mark.parametrize("nodes, depth_max", SHAPES)
def test_verify_and_commit(nodes: int, depth_max: int, torch_alone: Callable[[Callable[[], Any]], Any]) -> None:
    """420 trees of each shape: what the target is given, and what becomes of its tokens."""
    g = torch.Generator().manual_seed(nodes)
    shape, accepted = TreeShape(depth_max, 1, nodes), 0
    for turn in range(120):
        batch = 1 + turn % 6
        draft, target = random_draft(g, batch, nodes, depth_max)
        rows, slots = rows_of(g, batch), random_slots(g)
        padding = rows == ROWS
        executor: Any = type("Alone", (), {"slots": slots})()
        batch_of, tree = Executor.verify(executor, rows, draft, shape, 100)
        expected = torch_alone(lambda d=draft, e=executor, r=rows: Executor.verify(e, r, d, shape, 100))
        same(tree, expected[1])
        for name in ("ids", "positions", "write_slots", "prefix_len", "path", "path_len"):
            assert torch.equal(getattr(batch_of, name), getattr(expected[0], name)), name

        theirs, observed = copy_of(slots), turn % 3 > 0
        given = draft, tree, target, batch_of.prefix_len, turn, observed
        ours = committing.commit(slots, rows, *given)
        wanted = torch_alone(lambda t=theirs, r=rows, x=given: committing.commit(t, r, *x))
        same(ours[:3], wanted[:3])
        assert (ours.path is None) == (wanted.path is None) == (not observed)
        for a, b in zip(ours.path or (), wanted.path or (), strict=True):
            assert torch.equal(a.view(batch, -1)[~padding], b.view(batch, -1)[~padding])
        for name in ("table", "tokens", "kv_len", "last"):
            got = getattr(slots, name)
            assert torch.equal(got[:ROWS], getattr(theirs, name)[:ROWS]) and not got[ROWS].any(), name
        accepted += int((ours.count > 1).sum())
    assert accepted > 10 or depth_max == 0


def test_alive_and_parent_may_be_views(torch_alone: Callable[[Callable[[], Any]], Any]) -> None:
    g = torch.Generator().manual_seed(0)
    draft, target = random_draft(g, 3, 9, 4)
    slots, rows = random_slots(g), torch.tensor([9, 2, 9, 0, 9, 5])[1::2]
    views = Draft(*(torch.stack((part, part), 2)[:, :, 1] for part in draft))
    assert not any(part.is_contiguous() for part in (*views, rows))
    executor: Any = type("Alone", (), {"slots": slots})()
    batch, tree = Executor.verify(executor, rows, views, TreeShape(4, 1, 9), 100)
    same(tree, reference.derive(draft.parent, draft.alive, 4))
    theirs = copy_of(slots)
    ours = committing.commit(slots, rows, views, tree, target.t().contiguous().t(), batch.prefix_len, 0, False)
    given = draft, tree, target, batch.prefix_len, 0, False
    same(ours[:3], torch_alone(lambda: committing.commit(theirs, rows, *given))[:3])


def test_plain_inputs(torch_alone: Callable[[Callable[[], Any]], Any]) -> None:
    slots = random_slots(torch.Generator().manual_seed(1))
    for rows in (torch.tensor([4]), torch.tensor([5, 0, 3, 6, 6])):
        kv_len = slots.kv_len[rows]
        same(KERNELS.plain_inputs(rows, slots), (slots.last[rows], kv_len, slots.table[rows, kv_len]))


def test_what_does_not_fit_is_refused() -> None:
    """Rather than read and written beyond a row."""
    slots, rows = random_slots(torch.Generator().manual_seed(2)), torch.tensor([1])
    slots.kv_len[1] = LENGTH - 3
    draft = Draft(torch.zeros(1, 4, dtype=torch.int64), torch.tensor([[0, 0, 1, 2]]), torch.ones(1, 4) > 0)
    with pytest.raises(IndexError, match="row 1: expected room for 4 entries past 157, found 160"):
        KERNELS.target_inputs(draft, rows, slots, 3)
    slots.kv_len[1] = 9
    with pytest.raises(ValueError, match="node 3: expected a parent before it, at a depth below 2"):
        KERNELS.target_inputs(draft, rows, slots, 2)
    with pytest.raises(ValueError, match="node 1: expected a parent before it"):
        KERNELS.target_inputs(draft._replace(parent=torch.tensor([[0, 1, 1, 2]])), rows, slots, 3)


@pytest.mark.parametrize("topk, depth", [(1, 1), (1, 4), (3, 1), (3, 2), (4, 5), (7, 3), (10, 4)])
@pytest.mark.parametrize("tail, width", [(1, 0), (0, 5)])
def test_growth(topk: int, depth: int, tail: int, width: int) -> None:
    """Level by level, among scores of which many are equal and some infinite."""
    g = torch.Generator().manual_seed(topk * 10 + depth)
    most = grow.capacity(depth, topk)
    for nodes in {depth + 1, 1 + most // 2, 1 + most} - {1}:
        for turn in range(12):
            batch, slots = 1 + turn % 4, random_slots(g)
            rows = rows_of(g, batch)
            scale = [0.5, 1e-3, 1.0][turn % 3]

            def scores(*size: int, coarse: bool = turn % 3 < 2, scale: float = scale) -> Tensor:
                z = torch.rand(*size, generator=g).log()
                z = (z / scale).round() * scale if coarse else z
                return torch.where(z < -4, -torch.inf, z).sort(-1, descending=True).values

            first = grow.First(
                torch.randint(0, 99, (ROWS + 1, topk + 2), generator=g), scores(ROWS + 1, topk + 2),
                torch.randn(ROWS + 1, width, generator=g),
            )  # fmt: skip
            shape = TreeShape(depth, topk, nodes)
            given = slots, rows, shape, first, tail, 1 - tail
            ours, theirs = cpu_tree.RowGrowth(KERNELS, *given), grow.RowGrowth(*given)
            for _ in range(1, depth):
                same(ours.level(), theirs.level())
                at, wanted = ours.level_rows(), theirs.level_rows()
                same(at, wanted._replace(feature=wanted.feature if width else None))
                assert torch.equal(ours.root_at, slots.kv_len[rows])
                following = torch.randint(0, 99, (batch, topk, topk), generator=g), scores(batch, topk, topk)
                hidden = torch.randn(batch, topk, 3, 5, generator=g)[:, :, 2]  # rows apart, as of several MTP layers
                ours.add(following, hidden), theirs.add(following, hidden)
            same(ours.draft(), theirs.draft())


def test_newest_and_first() -> None:
    g = torch.Generator().manual_seed(3)
    for dtype, apart in ((torch.bfloat16, False), (torch.float32, True)):
        hidden = torch.randn(12, 66, generator=g).to(dtype)
        hidden = hidden[:, :33] if apart else hidden
        rows, count = torch.tensor([5, 0, 2]), torch.tensor([4, 1, 3])
        kept = torch.full((7, hidden.shape[1]), 9.0, dtype=dtype)
        wanted = hidden[torch.tensor([3, 4, 10])]
        assert torch.equal(KERNELS.newest_rows(hidden, count, 1, rows, kept), wanted)
        assert torch.equal(kept[rows], wanted) and (kept[[1, 3, 4, 6]] == 9).all()
        assert torch.equal(KERNELS.newest_rows(hidden, count - 1, 0, rows, None), wanted)
    first = grow.First(torch.zeros(7, 5, dtype=torch.int64), torch.zeros(7, 5), torch.zeros(7, 0))
    ids, logp = torch.randint(1, 99, (3, 1, 5), generator=g), torch.rand(3, 1, 5, generator=g) + 1
    KERNELS.keep_first(ids, logp, rows, first)
    assert torch.equal(first.ids[rows], ids[:, 0]) and torch.equal(first.logp[rows], logp[:, 0])
    assert not first.ids[[1, 3, 4, 6]].any() and not first.logp[[1, 3, 4, 6]].any()
    names = torch.randperm(200, generator=g)
    wanted = names[ids]
    assert torch.equal(KERNELS.rename(ids, names), wanted)


@pytest.mark.parametrize("width", [1, 4])
def test_chain(width: int, torch_alone: Callable[[Callable[[], Any]], Any]) -> None:
    """The accepted path with the token after it, as a drafter without lookahead wants it."""
    from draftwing.ops.attention import Batch

    slots, rows = random_slots(torch.Generator().manual_seed(width)), torch.tensor([3, 5, 0])
    prefix, column = slots.kv_len[rows], rows.unsqueeze(1)
    at = prefix.unsqueeze(1) + torch.arange(width)
    nothing = torch.empty(0, dtype=torch.int64)
    batch = Batch(rows, slots.tokens[column, at].flatten(), nothing, nothing, slots.table, prefix)
    next_ids = slots.tokens[column, at + 1].flatten()
    ours = model_drafter._with_newest(slots, batch, next_ids)
    theirs = torch_alone(lambda: model_drafter._with_newest(slots, batch, next_ids))
    assert ours.window == theirs.window
    for name in ("ids", "positions", "write_slots", "path", "path_len"):
        same([getattr(ours, name)], [getattr(theirs, name)])


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWING_NATIVE", "0")
    assert load_extension.__wrapped__() is None
