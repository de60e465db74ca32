"""Tree geometry and acceptance against a walk in plain Python."""

import itertools
import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from draftwing.ops.torch.tree import accept, derive


class RandomTree:
    """A tree of N nodes, parents first, siblings distinct, some subtrees dead, and a target that often agrees."""

    def __init__(self, rng: random.Random, nodes: int, depth_max: int, vocab: int = 20, chain: bool = False) -> None:
        self.parent, self.depth, self.alive = [0], [0], [True]
        self.tokens = [rng.randrange(vocab)]
        children: dict[int, set[int]] = {}
        while len(self.parent) < nodes:
            p = len(self.parent) - 1 if chain else rng.randrange(len(self.parent))
            token = rng.randrange(vocab)
            alive = self.alive[p] and rng.random() < 0.85
            # A dead node may name any parent and any token: it is not part of the tree.
            if alive and (self.depth[p] >= depth_max or token in children.get(p, ())):
                continue
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


def check(trees: list[RandomTree], depth_max: int) -> list[list[int]]:
    def batch(name: str) -> torch.Tensor:
        return torch.tensor([getattr(t, name) for t in trees])

    parent, alive = batch("parent"), batch("alive")
    tree = derive(parent, alive, depth_max)
    result = accept(batch("tokens"), parent, alive, tree, batch("target"))
    nodes = parent.shape[1]
    assert tree.depth.dtype == tree.path.dtype == tree.path_len.dtype == torch.int64
    assert tree.path.shape == (len(trees), nodes, depth_max + 1)
    walks = []
    for b, t in enumerate(trees):
        for i in range(nodes):
            path = t.path(i)
            assert tree.depth[b, i] == t.depth[i] == len(path) - 1
            assert tree.path_len[b, i] == len(path)
            assert tree.path[b, i].tolist() == path + [i] * (depth_max + 1 - len(path))
        walk = t.walk()
        assert result.leaf[b] == walk[-1] and result.count[b] == len(walk)
        assert result.order[b].tolist() == walk + [i for i in range(nodes) if i not in walk]
        committed = [t.tokens[i] for i in walk[1:]] + [t.target[walk[-1]]]
        assert result.committed[b].tolist() == committed + [0] * (depth_max + 1 - len(committed))
        walks.append(walk)
    return walks


def test_random_trees() -> None:
    rng = random.Random(0)
    first = later = dead = 0
    longest = 0
    for _ in range(150):
        depth_max = rng.randint(1, 7)
        nodes = rng.randint(2, 14)
        trees = [RandomTree(rng, nodes, depth_max) for _ in range(rng.randint(1, 3))]
        for t, walk in zip(trees, check(trees, depth_max), strict=True):
            dead += t.alive.count(False)
            longest = max(longest, len(walk))
            for above, node in itertools.pairwise(walk):
                siblings = [i for i in range(1, nodes) if t.alive[i] and t.parent[i] == above]
                first += node == siblings[0]
                later += node != siblings[0]
    assert first > 50 and later > 20 and dead > 50 and longest >= 4


@pytest.mark.parametrize("nodes", [2, 3, 5, 12, 17])
def test_chain_keeps_its_order(nodes: int) -> None:
    rng = random.Random(nodes)
    trees = [RandomTree(rng, nodes, nodes - 1, chain=True) for _ in range(20)]
    check(trees, nodes - 1)
    parent = torch.arange(nodes).sub(1).clamp(min=0)[None]
    alive = torch.ones(1, nodes, dtype=torch.bool)
    tokens = torch.arange(nodes)[None] + 7
    for agreed in range(nodes):
        target = tokens + 1
        target[:, agreed:] = 0
        result = accept(tokens, parent, alive, derive(parent, alive, nodes - 1), target)
        assert result.order.tolist() == [list(range(nodes))]
        assert result.count.tolist() == [agreed + 1] and result.leaf.tolist() == [agreed]


def test_one_node() -> None:
    trees = [RandomTree(random.Random(seed), 1, 0) for seed in range(3)]
    check(trees, 0)
    check(trees, 3)  # all drafts absent, in a shape that allows them


def test_later_child_and_dead_twin() -> None:
    # 0 -> {1, 2, 3}, 2 -> {4, 5}; node 3 repeats node 2's token but is dead, and so is 6 below it.
    parent = torch.tensor([[0, 0, 0, 0, 2, 2, 3]])
    alive = torch.tensor([[True, True, True, False, True, True, False]])
    tokens = torch.tensor([[9, 1, 2, 2, 4, 5, 5]])
    target = torch.tensor([[2, 0, 5, 5, 0, 8, 0]])
    tree = derive(parent, alive, 2)
    result = accept(tokens, parent, alive, tree, target)
    assert result.order.tolist() == [[0, 2, 5, 1, 3, 4, 6]]
    assert result.committed.tolist() == [[2, 5, 8]]
    assert tree.depth.tolist() == [[0, 1, 1, 0, 2, 2, 0]]
    assert tree.path[0, 6].tolist() == [6, 6, 6]


def test_all_dead_is_plain_decoding() -> None:
    parent = torch.zeros(2, 5, dtype=torch.int64)
    alive = torch.tensor([[True] + [False] * 4] * 2)
    target = torch.full((2, 5), 3)
    result = accept(torch.full((2, 5), 3), parent, alive, derive(parent, alive, 3), target)
    assert result.count.tolist() == [1, 1] and result.committed.tolist() == [[3, 0, 0, 0]] * 2


@pytest.mark.parametrize(("nodes", "depth_max"), [(1, 0), (6, 3)])
def test_runs_on_fake_tensors(nodes: int, depth_max: int) -> None:
    with FakeTensorMode():
        parent = torch.zeros(2, nodes, dtype=torch.int64)
        alive = torch.ones(2, nodes, dtype=torch.bool)
        tree = derive(parent, alive, depth_max)
        result = accept(parent, parent, alive, tree, parent)
        assert result.committed.shape == (2, depth_max + 1) and result.order.shape == (2, nodes)
