"""Trees of two drafters against a union of sets of paths in plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from draftwing.config.trees import MAX_CONFIDENCE, TreeShape
from draftwing.ops.assign.spec import DEPTHS, GRADES, LEVELS, SURE
from draftwing.ops.table import TorchOps
from draftwing.ops.types import Calibration, Draft

Path = tuple[int, ...]
SIZES = [(4, 4, 4, 3), (8, 12, 8, 5), (8, 12, 16, 11), (2, 17, 9, 16), (12, 2, 24, 4), (33, 40, 30, 6), (64, 64, 64, 9)]


def random_draft(rng: random.Random, nodes: int, source: int, vocab: int, lively: float) -> dict[str, list[int]]:
    tree: dict[str, list[int]] = {"tokens": [7], "parent": [0], "alive": [1], "grade": [0]}
    children: set[tuple[int, int]] = set()
    for i in range(1, nodes):
        parent, token = max(rng.randrange(i), rng.randrange(i)), rng.randrange(vocab)
        alive = bool(tree["alive"][parent]) and rng.random() < lively and (parent, token) not in children
        if alive:
            children.add((parent, token))
        for name, value in zip(tree, (token, parent, alive, LEVELS * source + rng.randrange(LEVELS)), strict=True):
            tree[name].append(int(value))
    return tree


def paths_of(tree: dict[str, list[int]]) -> dict[Path, int]:
    """Live nodes in their order, with their grades."""
    path: list[Path] = []
    found: dict[Path, int] = {}
    for i, (token, parent, alive, grade) in enumerate(zip(*tree.values(), strict=True)):
        path.append((*path[parent], token) if i else ())
        if alive:
            found[path[i]] = grade
    return found


def union(first: dict[Path, int], second: dict[Path, int], shape: TreeShape, share: list[list[float]]) -> list[Path]:
    """The best paths in their order, and the grades of all in `first`."""
    order = [*first, *(path for path in second if path not in first)]
    for path, grade in second.items():
        old = first.get(path, grade)
        level = max(old % LEVELS, grade % LEVELS)
        first[path] = (old // LEVELS | grade // LEVELS) * LEVELS + level
    survival: dict[Path, float] = {(): 1.0}
    for path in sorted(order, key=len):
        if path:
            estimate = min(share[first[path]][min(len(path), DEPTHS - 1)], SURE)
            survival[path] = survival[path[:-1]] * estimate
    allowed = [path for path in order if len(path) <= shape.depth]
    best = sorted(allowed, key=lambda path: -survival[path])[: shape.nodes]
    return [path for path in order if path in best]


def as_draft(trees: list[dict[str, list[int]]], device: torch.device) -> Draft:
    tokens, parent, alive, grade = (torch.tensor([tree[name] for tree in trees], device=device) for name in trees[0])
    return Draft(tokens, parent, alive.bool(), grade)


def random_calibration(device: torch.device, seed: int) -> Calibration:
    generator = torch.Generator().manual_seed(seed)
    seen = 1 + 200 * torch.rand(GRADES, DEPTHS, generator=generator)
    return Calibration(seen.to(device), (seen * torch.rand(GRADES, DEPTHS, generator=generator)).to(device))


@pytest.mark.further(ops="triton", one=[2, 8, 33])
@pytest.mark.parametrize(("one", "two", "nodes", "depth"), SIZES)
@pytest.mark.covering("ops")
def test_the_best_of_both(ops: TorchOps, one: int, two: int, nodes: int, depth: int) -> None:
    rng = random.Random(one * two + nodes)
    both = cut = 0
    for turn in range(6):
        vocab, lively = rng.choice([2, 3, 6]), rng.choice([0.7, 0.95, 1.0])
        shape, calibration = TreeShape(depth, 4, nodes), random_calibration(ops.device, turn)
        share = (calibration.accepted.double() / calibration.seen.double()).tolist()
        trees = [
            [random_draft(rng, size, source, vocab, lively) for _ in range(5)] for size, source in ((one, 1), (two, 2))
        ]
        got = ops.merge(*(as_draft(part, ops.device) for part in trees), shape, calibration)
        assert got.grade is not None and [part.shape for part in got] == [(5, nodes)] * 4
        assert got.alive.dtype == torch.bool and got.alive[:, 0].all()
        assert (got.parent <= torch.arange(nodes, device=ops.device)).all()
        for b in range(5):
            first, second = (paths_of(part[b]) for part in trees)
            both += len(first.keys() & second.keys()) - 1
            want = union(first, second, shape, share)
            cut += len(first) > len(want)
            tree = {name: part[b].long().tolist() for name, part in zip(trees[0][0], got, strict=True)}
            found = paths_of(tree)
            assert list(found) == want
            assert all(found[path] == first[path] for path in want[1:])
            dead = [i for i in range(nodes) if not tree["alive"][i]]
            assert dead == list(range(len(want), nodes)), "what is missing comes last"
            assert all(tree["tokens"][i] == 7 and tree["parent"][i] == 0 for i in dead)
    assert both > 3 and (cut or nodes >= one + two)


def test_confidence_is_raised_in_place(ops: TorchOps) -> None:
    packed = torch.tensor([[0, 5], [3, 5], [MAX_CONFIDENCE, 5]], device=ops.device)
    assert ops.raise_confidence(packed[:, 0]).tolist() == [1, 4, MAX_CONFIDENCE]
    assert packed.tolist() == [[1, 5], [4, 5], [MAX_CONFIDENCE, 5]]
