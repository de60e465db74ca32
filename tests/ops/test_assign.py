"""What is verified: estimates, the best nodes of a batch, learning; against plain Python."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from draftwing.core import MARK_DEPTH, MARK_ONE, MARK_SOURCE, MARK_SOURCES, MARK_SURVIVAL, MARK_VERIFIED
from draftwing.engine.devices import pick_device
from draftwing.engine.row_table import RowTable
from draftwing.ops.assign.spec import DEPTHS, GRADES, LEVELS, MEMORY, SURE, forget, level_of, new_calibration
from draftwing.ops.table import TorchOps
from draftwing.ops.types import Calibration, Draft

ROWS, LENGTH = 9, 64


def trees(rng: random.Random, batch: int, nodes: int, depth: int) -> tuple[Draft, list[list[int]]]:
    """Random trees no deeper than `depth`, and the depths of their nodes."""
    tokens, parents, alive, grades, depths = [], [], [], [], []
    for _ in range(batch):
        parent, level, live = [0], [0], [True]
        for node in range(1, nodes):
            above = rng.choice([n for n in range(node) if level[n] < depth])
            parent.append(above)
            level.append(level[above] + 1)
            live.append(live[above] and rng.random() < 0.9)
        tokens.append(rng.sample(range(50), nodes))  # siblings differ
        parents.append(parent)
        alive.append(live)
        grades.append([0, *(rng.randrange(GRADES) for _ in range(nodes - 1))])
        depths.append([one if ok else 0 for one, ok in zip(level, live, strict=True)])
    return Draft(*(torch.tensor(x) for x in (tokens, parents, alive, grades))), depths


def calibration(rng: random.Random) -> Calibration:
    seen = torch.tensor([[float(rng.randrange(1, 200)) for _ in range(DEPTHS)] for _ in range(GRADES)])
    share = torch.tensor([[rng.random() for _ in range(DEPTHS)] for _ in range(GRADES)])
    return Calibration(seen, (seen * share).round())


def expected_survival(draft: Draft, depths: list[list[int]], counts: Calibration, b: int, node: int) -> float:
    if not bool(draft.alive[b, node]):
        return 0.0
    found = 1.0
    while node:
        cell = int(draft.grade[b, node]), min(depths[b][node], DEPTHS - 1)
        found *= min(float(counts.accepted[cell]) / float(counts.seen[cell]), SURE)
        node = int(draft.parent[b, node])
    return found


def table_for(ops: TorchOps) -> RowTable:
    table = RowTable(ROWS, LENGTH, pick_device(ops.device.type, ops=ops))
    table.page_table.copy_(torch.arange(1, table.page_table.numel() + 1).view_as(table.page_table))
    table.kv_len[:ROWS] = torch.arange(3, 3 + ROWS)
    return table


@pytest.mark.parametrize(
    ("batch", "nodes", "depth", "total"), [(1, 8, 3, 5), (4, 6, 5, 9), (7, 16, 4, 40), (3, 4, 1, 12)]
)
def test_the_best_nodes_of_the_batch_are_verified(
    ops: TorchOps, batch: int, nodes: int, depth: int, total: int
) -> None:
    rng = random.Random(batch * nodes + total)
    draft, depths = trees(rng, batch, nodes, depth)
    counts, table = calibration(rng), table_for(ops)
    rows = torch.tensor(rng.sample(range(ROWS), batch))
    if batch > 1:
        rows[-1] = table.rows  # padding: its drafts are worth nothing
    draft, counts = Draft(*(x.to(ops.device) for x in draft)), Calibration(*(x.to(ops.device) for x in counts))
    rows = rows.to(ops.device)
    tree, inputs = ops.tree_inputs(table, rows, draft, depth)
    ranked = ops.rank(draft, tree, rows, table.rows, counts)

    survival = [[expected_survival(draft, depths, counts, b, n) for n in range(nodes)] for b in range(batch)]
    if batch > 1:
        survival[-1] = [1.0] + [0.0] * (nodes - 1)
    assert torch.allclose(ranked.survival.cpu().double(), torch.tensor(survival, dtype=torch.float64), rtol=1e-5)
    mark = ranked.mark.cpu()
    assert (mark & MARK_DEPTH).tolist() == depths
    assert ((mark >> MARK_SOURCE) & MARK_SOURCES).tolist() == (draft.grade.cpu() // LEVELS).tolist()
    assert torch.allclose((mark >> MARK_SURVIVAL) / MARK_ONE, ranked.survival.cpu(), atol=2 / MARK_ONE)

    done = ops.assign(table, rows, draft, tree, inputs, ranked, total)
    # By the device's own survivals, whose last bits may differ: best first, of equals the first.
    flat = ranked.survival.cpu().flatten().tolist()
    order = sorted((i for i in range(batch * nodes) if flat[i] > 0), key=lambda i: (-flat[i], i))
    chosen = set(order[:total])
    alive = done.alive.cpu()
    assert {int(i) for i in alive.flatten().nonzero()} == chosen
    assert bool(alive[:, 0].all())
    for i in chosen:  # closed under parents
        b, n = divmod(i, nodes)
        assert n == 0 or bool(alive[b, int(draft.parent[b, n])])
    verified = (done.mark.cpu() & MARK_VERIFIED) != 0
    assert {int(i) for i in verified.flatten().nonzero()} == chosen
    assert torch.equal(done.mark.cpu() & ~MARK_VERIFIED, mark & ~MARK_VERIFIED)

    queries, ascending = done.queries, sorted(chosen)
    flat_tree = tree.path.flatten(0, 1)
    counted = [0]
    for b in range(batch):
        counted.append(counted[-1] + sum(1 for i in chosen if i // nodes == b))
    starts = done.trees.starts.tolist()
    assert starts[: batch + 1] == counted and starts[-1] == total
    assert all(0 <= end - begin <= nodes == done.trees.cap for begin, end in itertools.pairwise(starts))
    assert done.trees.mean == math.ceil(total / batch)
    spare = len(starts) - 1 - batch
    assert done.trees.rows.tolist() == rows.tolist() + [table.rows] * spare
    assert done.trees.prefix_len.tolist() == inputs.prefix_len.tolist() + [0] * spare
    for q, i in enumerate(ascending):
        b, n = divmod(i, nodes)
        assert int(done.place[b, n]) == q
        assert int(queries.ids[q]) == int(draft.tokens[b, n])
        assert int(queries.rows[q]) == int(rows[b])
        assert int(queries.positions[q]) == int(inputs.positions[i])
        assert int(queries.write_slots[q]) == int(inputs.write_slots[i])
        assert int(queries.prefix_len[q]) == int(inputs.prefix_len[b])
        assert torch.equal(queries.path[q, 0], flat_tree[i])
        assert int(queries.path_len[q, 0]) == depths[b][n] + 1
    for q in range(len(ascending), total):  # of the dummy row
        assert int(queries.rows[q]) == table.rows and int(queries.write_slots[q]) == 0
        assert int(queries.path_len[q, 0]) == 1 and not queries.path[q].any()
    assert not (done.place < 0).any() and not (done.place >= total).any()


def test_learns_from_nodes_whose_parent_was_accepted(ops: TorchOps) -> None:
    rng, batch, nodes, depth = random.Random(5), 6, 9, 4
    draft, depths = trees(rng, batch, nodes, depth)
    table = table_for(ops)
    rows = torch.tensor([*rng.sample(range(ROWS), batch - 1), table.rows])
    target = torch.tensor([[rng.choice([t, 7]) for t in line] for line in draft.tokens.tolist()])
    for b in range(batch):  # some walks go on
        for n in range(1, nodes):
            if rng.random() < 0.6:
                target[b, int(draft.parent[b, n])] = draft.tokens[b, n]
    counts = Calibration(torch.ones(GRADES, DEPTHS), torch.zeros(GRADES, DEPTHS))
    expected = [[[1.0] * DEPTHS for _ in range(GRADES)], [[0.0] * DEPTHS for _ in range(GRADES)]]
    for b in range(batch - 1):
        node, going = 0, True
        while going:
            going, here = False, node
            for n in range(1, nodes):
                if int(draft.parent[b, n]) == here and bool(draft.alive[b, n]):
                    cell = int(draft.grade[b, n]), depths[b][n]
                    hit = int(draft.tokens[b, n]) == int(target[b, here])
                    expected[0][cell[0]][cell[1]] += 1
                    expected[1][cell[0]][cell[1]] += hit
                    if hit:
                        node, going = n, True
    draft, counts = Draft(*(x.to(ops.device) for x in draft)), Calibration(*(x.to(ops.device) for x in counts))
    rows, target = rows.to(ops.device), target.to(ops.device)
    tree, inputs = ops.tree_inputs(table, rows, draft, depth)
    ranked = ops.rank(draft, tree, rows, table.rows, new_calibration(ops.device))
    ops.commit(table, rows, draft, tree, target, inputs.prefix_len, 0, False, ranked.mark, counts)
    assert counts.seen.tolist() == expected[0]
    assert counts.accepted.tolist() == expected[1]


def test_levels_are_log_odds() -> None:
    for p in (0.001, 0.02, 0.3, 0.5, 0.77, 0.99, 1.0):
        odds = math.log(max(min(p, 1 - 1e-6), 1e-6) / (1 - min(p, 1 - 1e-6)))
        assert int(level_of(torch.tensor(math.log(p)))) == max(0, min(15, round(1.25 * odds + 7)))


def test_old_nodes_count_for_less() -> None:
    counts = Calibration(torch.full((GRADES, DEPTHS), 4 * MEMORY), torch.full((GRADES, DEPTHS), MEMORY))
    counts.seen[0, 0] = 8
    forget(counts)
    assert float(counts.seen[1, 1]) == MEMORY and float(counts.accepted[1, 1]) == MEMORY / 4
    assert float(counts.seen[0, 0]) == 8
