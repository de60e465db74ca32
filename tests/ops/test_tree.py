"""A tree step between its forwards against a walk in plain Python: geometry and inputs, what is accepted, what becomes
of the row table; and simulated lengths, which the walk takes whatever the tree and the samples are."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from draftwing.config.trees import TreeShape
from draftwing.core import NOT_FINITE
from draftwing.engine.commit import Simulation
from draftwing.engine.devices import pick_device
from draftwing.engine.row_table import RowTable
from draftwing.errors import ConfigError
from draftwing.ops.assign.spec import graded, learn, new_calibration
from draftwing.ops.table import TorchOps
from draftwing.ops.tree.spec import Accepted, accept, derive, fraction_bits
from draftwing.ops.types import Calibration, Committed, Draft, TargetInputs, Tree, unpack

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


# -- simulated lengths ------------------------------------------------------------------------------------------------

VOCAB = 12  # small: samples and siblings collide often


def random_draft(rng: random.Random, batch: int, nodes: int, depth: int) -> Draft:
    """Parents first, siblings distinct, no deeper than `depth`, some nodes dead."""
    every = []
    for _ in range(batch):
        tokens, parent, level, alive = [rng.randrange(VOCAB)], [0], [0], [True]
        for i in range(1, nodes):
            p = rng.randrange(i)
            token = rng.randrange(VOCAB)
            taken = {tokens[j] for j in range(1, i) if alive[j] and parent[j] == p}
            live = alive[p] and level[p] < depth and token not in taken and rng.random() < 0.9
            tokens.append(token)
            parent.append(p)
            level.append(level[p] + 1 if live else 0)
            alive.append(live)
        every.append((tokens, parent, alive))
    return Draft(*(torch.tensor(part) for part in zip(*every, strict=True)))


def chain(batch: int, nodes: int) -> Draft:
    parent = torch.arange(nodes).sub(1).clamp(min=0).expand(batch, nodes).contiguous()
    return Draft(torch.randint(VOCAB, (batch, nodes)), parent, torch.ones(batch, nodes, dtype=torch.bool))


def simulated(
    ops: TorchOps, simulation: Simulation, draft: Draft, tree: Tree, target: Tensor, rows: Tensor, kv_len: Tensor
) -> Tensor:
    """What the simulation makes of the samples, where the operations run."""
    given = target, rows, kv_len
    target, rows, kv_len = (x.to(ops.device) for x in given)
    draft, tree = Draft(*(x.to(ops.device) for x in draft[:3])), Tree(*(x.to(ops.device) for x in tree))
    return simulation(ops, draft, tree, target, rows, kv_len).cpu()


def accepted(ops: TorchOps, draft: Draft, depth: int, simulation: Simulation, rows: Tensor, kv_len: Tensor) -> Accepted:
    tree = derive(draft.parent, draft.alive, depth)
    target = torch.randint(VOCAB, draft.tokens.shape, generator=torch.Generator().manual_seed(1))
    before = target.clone()
    altered = simulated(ops, simulation, draft, tree, target, rows, kv_len)
    assert torch.equal(target, before), "the samples were changed in place"
    assert altered.shape == target.shape and altered.min().item() >= 0 and altered.max().item() < VOCAB
    return accept(draft.tokens, draft.parent, draft.alive, tree, altered)


def test_a_walk_goes_as_far_as_powers_of_the_chance_say(ops: TorchOps) -> None:
    rng, batch, depth = random.Random(0), 200, 4
    draft = random_draft(rng, batch, 9, depth)
    deepest = derive(draft.parent, draft.alive, depth).depth.amax(1)
    rows, kv_len = torch.arange(batch), torch.randint(1000, (batch,))
    simulation = Simulation(2.5, depth, VOCAB)
    count = accepted(ops, draft, depth, simulation, rows, kv_len).count
    # Where a node's children hold the first and the last id there is no token next to them.
    spoilt = []
    for tokens, parent, alive in zip(*(part.tolist() for part in draft[:3]), strict=True):
        children = [{tokens[i] for i in range(1, 9) if alive[i] and parent[i] == node} for node in range(9)]
        spoilt.append(any({0, VOCAB - 1} <= found for found in children))
    kept = ~torch.tensor(spoilt)
    assert kept.float().mean() > 0.8
    draws = fraction_bits(rows, kv_len) / 2**24
    wanted = sum((draws < (simulation.chance / 2**24) ** level).long() for level in range(1, depth + 1))
    assert len(set(wanted.tolist())) == depth + 1
    assert torch.equal(count[kept], (1 + torch.minimum(deepest, wanted))[kept])


@pytest.mark.further(ops="triton", mean=[1, 5])
@pytest.mark.parametrize("mean", [1, 2.3, 5])
def test_lengths_of_the_deepest_trees_and_of_others(ops: TorchOps, mean: float) -> None:
    batch = 200 if ops.name == "triton" else 4000  # interpreted rows take long
    rows, kv_len, simulation = torch.arange(batch) % 50, torch.arange(batch) // 50 * 3 + 7, Simulation(mean, 4, VOCAB)
    chance = simulation.chance / 2**24
    assert sum(chance**level for level in range(5)) == pytest.approx(mean, abs=1e-5)
    for depth in (4, 2):
        count = accepted(ops, chain(batch, depth + 1), depth, simulation, rows, kv_len).count.double()
        expected = sum(chance**level for level in range(depth + 1))
        assert abs(count.mean().item() - expected) <= 4 * count.std().item() / batch**0.5


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("mean", [1.3, 2.5, 3.4])
def test_the_first_guesses_of_a_calibration_are_what_is_accepted(topk: int, mean: float) -> None:
    """Of whole trees, whose drafts have no grades that say anything."""
    depth, batch = 3, 2000
    levels = [topk**level for level in range(depth + 1)]
    parent = [0, *(node for node in range(sum(levels[:-1])) for _ in range(topk))]
    tokens = torch.tensor([2 + at % topk for at in range(len(parent))]).expand(batch, -1)
    draft = graded(Draft(tokens, torch.tensor(parent).expand(batch, -1), torch.ones_like(tokens, dtype=torch.bool)))
    rows, simulation = torch.arange(batch), Simulation(mean, depth, VOCAB, topk)
    found, tree = (
        accepted(TorchOps(torch.device("cpu")), draft, depth, simulation, rows, rows),
        derive(*draft[1:3], depth),
    )
    packed = torch.cat((tree.depth[:, :1], found.count[:, None], found.committed, found.order), 1)
    guesses = new_calibration(torch.device("cpu"), simulation.share)
    seen, right = (counts.clone() for counts in guesses)
    learn(draft, tree, packed, rows < 0, Calibration(seen, right))
    tried, was_right = (seen - guesses.seen)[0], (right - guesses.accepted)[0]
    assert tried[1] == batch * topk and tried[depth + 1 :].sum() == 0
    for level in range(1, depth + 1):
        error = 4 * (simulation.share / tried[level].item()) ** 0.5
        assert abs((was_right / tried)[level].item() - simulation.share) <= error


@pytest.mark.parametrize("mean", [0.5, 4.5])
def test_a_length_that_no_tree_has_is_refused(mean: float) -> None:
    with pytest.raises(ConfigError, match=rf"from 1 to 4, found {mean}"):
        Simulation(mean, 3, VOCAB)


@pytest.mark.slow
def test_it_reads_no_data() -> None:
    """The steps of `tests/engine/test_no_host_reads.py` simulate nothing."""
    with FakeTensorMode():
        draft, rows = chain(3, 4), torch.arange(3)
        tree = derive(draft.parent, draft.alive, 3)
        found = Simulation(2.5, 3, VOCAB)(TorchOps(torch.device("cpu")), draft, tree, draft.tokens, rows, rows)
        assert found.shape == (3, 4)


@pytest.mark.parametrize("mean", [1.0, 2.4, 9.0])
def test_every_implementation_gives_the_same(ops: TorchOps, mean: float) -> None:
    for nodes, depth in ((2, 1), (9, 4), (33, 6)):
        draft = random_draft(random.Random(nodes), 6, nodes, depth)
        tree = derive(draft.parent, draft.alive, depth)
        target = torch.randint(VOCAB, draft.tokens.shape)
        rows, kv_len = torch.tensor([0, 1, 2, 63, 64, 64]), torch.tensor([0, 5, 900, 1 << 33, 0, 0])
        given = Simulation(mean, 8, VOCAB), draft, tree, target, rows, kv_len
        assert torch.equal(simulated(ops, *given), simulated(TorchOps(torch.device("cpu")), *given))
