"""Random draft trees."""

from __future__ import annotations

import random

import torch
from torch import Tensor


def random_trees(rng: random.Random, batch: int, nodes: int, depth: int) -> tuple[Tensor, Tensor]:
    """Parents and which nodes are alive, no deeper than `depth`."""
    parent, alive = torch.zeros(batch, nodes, dtype=torch.int64), torch.ones(batch, nodes, dtype=torch.bool)
    for b in range(batch):
        level = [0]
        for n in range(1, nodes):
            p = rng.choice([i for i in range(n) if level[i] < depth])
            parent[b, n] = p
            level.append(level[p] + 1)
            alive[b, n] = bool(alive[b, p]) and rng.random() < 0.85
    return parent, alive


def path_of(parent: Tensor, b: int, n: int) -> list[int]:
    up = []
    while n:
        up.append(n)
        n = int(parent[b, n])
    return up[::-1]
