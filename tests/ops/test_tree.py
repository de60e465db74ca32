"""A tree step between its forwards against a walk in plain Python: geometry and inputs, what is accepted, and what
becomes of the row table."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from draftwing.core import NOT_FINITE, TreeShape
from draftwing.engine.devices import pick_device
from draftwing.engine.row_table import RowTable
from draftwing.ops.torch.ops import TorchOps
from draftwing.ops.types import Committed, Draft, TargetInputs, Tree, unpack

SHAPES = [(1, 0), (2, 1), (2, 3), (4, 3), (7, 2), (8, 7), (17, 5), (33, 16), (64, 8)]  # nodes, depth
ROWS, LENGTH = 6, 160


class RandomTree:
    """A tree of N nodes, parents first, siblings distinct, some subtrees dead, and a target that often agrees."""

    def __init__(
        self, rng: random.Random, nodes: int, depth_max: int, vocab: int = 20, chain: bool = False, lively: float = 0.85
    ) -> None:
        self.parent, self.depth, self.alive = [0], [0], [True]
        self.tokens = [rng.randrange(vocab)]
        children: dict[int, set[int]] = {}
        while len(self.parent) < nodes:
            p = len(self.parent) - 1 if chain else rng.randrange(len(self.parent))
            token = rng.randrange(vocab)
            alive = self.alive[p] and rng.random() < lively
            # A dead node may name any parent and any token: it is not part of the tree.
            if alive and (self.depth[p] >= depth_max or token in children.get(p, ())):
                if not chain and rng.random() < 0.8:
                    continue
                alive = False
            if alive:
                children.setdefault(p, set()).add(token)
            self.parent.append(p)
            self.alive.append(alive)
            self.depth.append(self.depth[p] + 1 if alive else 0)
            self.tokens.append(token)
        self.target = [rng.randrange(vocab) for _ in range(nodes)]
        for i in range(1, nodes):
            if rng.random() < 0.6:
                self.target[self.parent[i]] = self.tokens[i]

    def path(self, node: int) -> list[int]:
        path = [node]
        while self.alive[node] and node:
            node = self.parent[node]
            path.insert(0, node)
        return path

    def walk(self) -> list[int]:
        path = [0]
        while True:
            agreeing = [
                i
                for i in range(1, len(self.parent))
                if self.alive[i] and self.parent[i] == path[-1] and self.tokens[i] == self.target[path[-1]]
            ]
            if not agreeing:
                return path
            assert len(agreeing) == 1
            path += agreeing


class World(NamedTuple):
    """A row table with garbage everywhere, and what it holds as lists."""

    slots: RowTable
    table: list[list[int]]
    text: list[list[int]]
    kv_len: list[int]


def make_world(ops: TorchOps, seed: int, kv_len: list[int] | None = None) -> World:
    g = torch.Generator().manual_seed(seed)
    slots = RowTable(ROWS, LENGTH, pick_device(ops.device.type, ops=ops))
    table = torch.randperm(ROWS * LENGTH, generator=g).view(ROWS, LENGTH) + 1
    text = torch.randint(0, 50, (ROWS, LENGTH), generator=g)
    lengths = torch.randint(0, LENGTH - 70, (ROWS,), generator=g)
    if kv_len is not None:
        lengths = torch.tensor(kv_len)
    slots.page_table[:ROWS], slots.tokens[:ROWS], slots.kv_len[:ROWS] = table, text, lengths
    slots.last[:ROWS] = text.gather(1, lengths[:, None]).squeeze(1)
    return World(slots, table.tolist(), text.tolist(), lengths.tolist())


def draft_of(trees: list[RandomTree], device: torch.device) -> tuple[Draft, Tensor]:
    """The draft, and what the target drew at its nodes."""
    tokens, parent, alive, target = (
        torch.tensor([getattr(t, name) for t in trees], device=device)
        for name in ("tokens", "parent", "alive", "target")
    )
    return Draft(tokens, parent, alive), target


def check_inputs(world: World, rows: list[int], trees: list[RandomTree], tree: Tree, inputs: TargetInputs) -> None:
    batch, nodes = len(trees), len(trees[0].parent)
    width = tree.path.shape[2]
    assert {x.dtype for x in (*tree, *inputs)} == {torch.int64}
    positions, write_slots = (x.view(batch, nodes).tolist() for x in inputs[:2])
    depth, path, path_len = (x.tolist() for x in tree)
    for b, (row, t) in enumerate(zip(rows, trees, strict=True)):
        paths = [t.path(i) for i in range(nodes)]
        assert depth[b] == t.depth == [len(p) - 1 for p in paths]
        assert path_len[b] == [len(p) for p in paths]
        assert path[b] == [p + [i] * (width - len(p)) for i, p in enumerate(paths)]
        start = world.kv_len[row] if row < ROWS else 0
        assert int(inputs.prefix_len[b]) == start
        assert positions[b] == [start + d for d in t.depth]
        assert write_slots[b] == (world.table[row][start : start + nodes] if row < ROWS else [0] * nodes)


def check_commit(
    world: World, rows: list[int], trees: list[RandomTree], done: Committed, depth_max: int, confidence: int
) -> list[list[int]]:
    """-> the accepted paths"""
    nodes, width = len(trees[0].parent), depth_max + 1
    packed = unpack(done.packed.cpu().numpy(), TreeShape(depth_max, 1, nodes))
    table, text = ([*part] for part in (world.table, world.text))
    slots, walks = world.slots, []
    for b, (row, t) in enumerate(zip(rows, trees, strict=True)):
        walk = t.walk()
        walks.append(walk)
        order = walk + [i for i in range(nodes) if i not in walk]
        tokens = [t.tokens[i] for i in walk[1:]] + [t.target[walk[-1]]]
        padded = tokens + [0] * (width - len(tokens))
        assert (packed.confidence[b], packed.count[b]) == (confidence, len(walk)) and int(done.count[b]) == len(walk)
        assert packed.tokens[b].tolist() == padded == done.tokens[b].tolist()
        assert packed.order[b].tolist() == order and packed.depth[b].tolist() == t.depth
        if row == ROWS:
            continue
        at, past = world.kv_len[row], world.kv_len[row] + len(walk)
        window = world.table[row][at : at + nodes]
        table[row] = world.table[row][:at] + [window[i] for i in order] + world.table[row][at + nodes :]
        text[row] = world.text[row][: at + 1] + padded + world.text[row][at + 1 + width :]
        text[row] = text[row][:LENGTH]
        assert int(slots.kv_len[row]) == past and int(slots.last[row]) == tokens[-1]
        if done.path is not None:
            ids, positions, write_slots, step = (x.view(len(rows), -1)[b].tolist() for x in done.path)
            known = len(walk)
            assert ids[:known] == [text[row][at], *tokens[:-1]][:known]
            assert positions == [at + i for i in range(width)]
            assert write_slots[:known] == table[row][at:past]
            assert step[:known] == [b * nodes + i for i in walk]
    assert slots.page_table[:ROWS].tolist() == table and slots.tokens[:ROWS].tolist() == text
    touched = {row for row in rows if row < ROWS}
    for row in set(range(ROWS)) - touched:
        assert int(slots.kv_len[row]) == world.kv_len[row]
    for part in (slots.kv_len, slots.last):
        assert int(part[ROWS]) == 0 or part is slots.last
    return walks


def rows_of(rng: random.Random, batch: int) -> list[int]:
    """Distinct rows, not in order; the last two pad where there are so many."""
    rows = rng.sample(range(ROWS), batch)
    return rows[:-2] + [ROWS] * 2 if batch > 3 else rows


@pytest.mark.slow
@pytest.mark.further(ops="triton", nodes=[2, 3, 4, 8, 64])
@pytest.mark.further(ops="torch", nodes=[2, 3, 8])
@pytest.mark.further(ops="cpu", nodes=[4, 17])
@pytest.mark.parametrize("nodes, depth_max", SHAPES)
def test_inputs_and_commit(ops: TorchOps, nodes: int, depth_max: int) -> None:
    rng, accepted = random.Random(nodes), 0
    for turn in range(12 if ops.name == "triton" else 36):
        batch = 1 + turn % 6
        kind = {"chain": turn % 4 == 3, "lively": [0.9, 0.85, 0.3, 1.0][turn % 4]}
        trees = [RandomTree(rng, nodes, depth_max, 20 if nodes < 40 else 400, **kind) for _ in range(batch)]
        rows, world = rows_of(rng, batch), make_world(ops, turn)
        (draft, target), at = draft_of(trees, ops.device), torch.tensor(rows, device=ops.device)
        tree, inputs = ops.tree_inputs(world.slots, at, draft, depth_max)
        check_inputs(world, rows, trees, tree, inputs)
        # The root is the row's last token.
        last = [world.text[row][world.kv_len[row]] if row < ROWS else 0 for row in rows]
        done = ops.commit(world.slots, at, draft, tree, target, inputs.prefix_len, turn, turn % 3 > 0)
        assert (done.path is None) == (turn % 3 == 0)
        walks = check_commit(world, rows, trees, done, depth_max, turn)
        accepted += sum(len(walk) > 1 for walk in walks)
        if done.path is not None:
            assert done.path.ids.view(batch, -1)[:, 0].tolist() == last
    assert accepted > 5 or depth_max == 0


def test_tensors_may_be_views(ops: TorchOps) -> None:
    rng = random.Random(0)
    trees = [RandomTree(rng, 9, 4) for _ in range(3)]
    world, (draft, target) = make_world(ops, 0), draft_of(trees, ops.device)
    views = Draft(*(torch.stack((part, part), 2)[:, :, 1] for part in draft[:3]))
    assert not any(part.is_contiguous() for part in views[:3])
    rows = [2, 0, 5]
    at = torch.tensor(rows, device=ops.device)
    tree, inputs = ops.tree_inputs(world.slots, at, views, 4)
    check_inputs(world, rows, trees, tree, inputs)
    target = target.t().contiguous().t()
    done = ops.commit(world.slots, at, views, tree, target, inputs.prefix_len, 0, False)
    check_commit(world, rows, trees, done, 4, 0)


def test_plain_inputs(ops: TorchOps) -> None:
    world = make_world(ops, 1)
    for rows in ([4], [5, 0, 3, ROWS, ROWS], [3] * 40):
        ids, positions, write_slots = ops.plain_inputs(world.slots, torch.tensor(rows, device=ops.device))
        kv_len = [world.kv_len[row] if row < ROWS else 0 for row in rows]
        assert positions.tolist() == kv_len
        assert ids.tolist() == [world.text[row][n] if row < ROWS else 0 for row, n in zip(rows, kv_len, strict=True)]
        assert write_slots.tolist() == [
            world.table[row][n] if row < ROWS else 0 for row, n in zip(rows, kv_len, strict=True)
        ]


def test_a_row_that_ends_at_the_last_entry(ops: TorchOps) -> None:
    """The chain of the accepted path looks up to the table's end, and nothing is written elsewhere."""
    rng, nodes = random.Random(1), 4
    trees = [RandomTree(rng, nodes, 3, chain=True, lively=1.0)]
    kv_len = [LENGTH - nodes - 1, *[9] * (ROWS - 1)]
    world, (draft, target) = make_world(ops, 1, kv_len), draft_of(trees, ops.device)
    at = torch.tensor([0], device=ops.device)
    tree, inputs = ops.tree_inputs(world.slots, at, draft, 3)
    done = ops.commit(world.slots, at, draft, tree, target, inputs.prefix_len, 0, True)
    check_commit(world, [0], trees, done, 3, 0)


def test_what_does_not_fit_is_refused(ops: TorchOps) -> None:
    """Rather than read and written beyond a row: the C code looks, for nobody else would."""
    if ops.name != "cpu":
        pytest.skip("lengths are not known on the host")
    world, at = make_world(ops, 2, [9, LENGTH - 3, *[9] * (ROWS - 2)]), torch.tensor([1])
    draft = Draft(torch.zeros(1, 4, dtype=torch.int64), torch.tensor([[0, 0, 1, 2]]), torch.ones(1, 4) > 0)
    with pytest.raises(IndexError, match="row 1: expected room for 4 entries past 157, found 160"):
        ops.tree_inputs(world.slots, at, draft, 3)
    world.slots.kv_len[1] = 9
    with pytest.raises(ValueError, match="node 3: expected a parent before it, at a depth below 2"):
        ops.tree_inputs(world.slots, at, draft, 2)
    with pytest.raises(ValueError, match="node 1: expected a parent before it"):
        ops.tree_inputs(world.slots, at, draft._replace(parent=torch.tensor([[0, 1, 1, 2]])), 3)


def run(ops: TorchOps, draft: Draft, target: Tensor, depth_max: int) -> tuple[Tree, Committed]:
    world = make_world(ops, 0)
    at = torch.arange(len(draft.tokens), device=ops.device)
    draft, target = Draft(*(part.to(ops.device) for part in draft[:3])), target.to(ops.device)
    tree, inputs = ops.tree_inputs(world.slots, at, draft, depth_max)
    return tree, ops.commit(world.slots, at, draft, tree, target, inputs.prefix_len, 0, False)


def test_later_child_and_dead_twin(ops: TorchOps) -> None:
    # 0 -> {1, 2, 3}, 2 -> {4, 5}; node 3 repeats node 2's token but is dead, and so is 6 below it.
    parent = torch.tensor([[0, 0, 0, 0, 2, 2, 3]])
    alive = torch.tensor([[True, True, True, False, True, True, False]])
    tokens = torch.tensor([[9, 1, 2, 2, 4, 5, 5]])
    target = torch.tensor([[2, 0, 5, 5, 0, 8, 0]])
    tree, done = run(ops, Draft(tokens, parent, alive), target, 2)
    assert unpack(done.packed.cpu().numpy(), TreeShape(2, 1, 7)).order.tolist() == [[0, 2, 5, 1, 3, 4, 6]]
    assert done.tokens.tolist() == [[2, 5, 8]]
    assert tree.depth.tolist() == [[0, 1, 1, 0, 2, 2, 0]]
    assert tree.path[0, 6].tolist() == [6, 6, 6]


@pytest.mark.parametrize("nodes", [1, 4])
def test_what_is_not_finite_ends_the_path_and_is_told_to_the_host_alone(ops: TorchOps, nodes: int) -> None:
    parent = torch.arange(nodes).sub(1).clamp(min=0)[None].expand(2, -1)
    tokens = torch.arange(nodes)[None].expand(2, -1) + 7
    target = tokens + 1
    target[0, nodes // 2] |= NOT_FINITE
    world = make_world(ops, 0)
    at = torch.arange(2, device=ops.device)
    draft = Draft(*(part.to(ops.device) for part in (tokens, parent, torch.ones(2, nodes, dtype=torch.bool))))
    tree, inputs = ops.tree_inputs(world.slots, at, draft, nodes - 1)
    done = ops.commit(world.slots, at, draft, tree, target.to(ops.device), inputs.prefix_len, 0, True)
    reported, count = unpack(done.packed.cpu().numpy(), TreeShape(nodes - 1, 1, nodes)), nodes // 2 + 1
    assert reported.count.tolist() == [count, nodes]
    assert (reported.tokens >= NOT_FINITE).nonzero()[1].tolist() == [count - 1]
    assert done.tokens[0, count - 1] == world.slots.last[0] == 7 + count and done.path is not None
    for kept in (done.tokens, world.slots.tokens, world.slots.last, done.path.ids):
        assert int(kept.max()) < NOT_FINITE
