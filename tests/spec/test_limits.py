"""Limited trees against the rules in plain Python, node by node."""

import random

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from draftwing.spec.drafter import Draft
from draftwing.spec.limits import limit


def random_draft(rng: random.Random, batch: int, nodes: int, depth: int) -> Draft:
    parent, alive = torch.zeros(batch, nodes, dtype=torch.int64), torch.ones(batch, nodes, dtype=torch.bool)
    for b in range(batch):
        level = [0]
        for n in range(1, nodes):
            p = rng.choice([i for i in range(n) if level[i] < depth])
            parent[b, n], alive[b, n] = p, bool(alive[b, p]) and rng.random() < 0.9
            level.append(level[p] + 1)
    return Draft(torch.randint(0, 9, (batch, nodes)), parent, alive)


def by_hand(parent: list[int], alive: list[bool], depth: int, topk: int, nodes: int) -> list[bool]:
    kept, level = [True], [0]
    for n in range(1, len(parent)):
        p = parent[n]
        level.append(level[p] + 1)
        rank = sum(alive[i] and parent[i] == p for i in range(1, n))
        fits = alive[n] and kept[p] and level[n] <= depth and rank < topk
        kept.append(fits and sum(kept) < nodes)
    return kept


def test_random_trees() -> None:
    rng = random.Random(0)
    fewer = 0
    for _ in range(120):
        depth = rng.randint(1, 7)
        draft = random_draft(rng, 5, rng.randint(2, 20), depth)
        limits = [torch.tensor([rng.randint(*span) for _ in range(5)]) for span in ((0, 7), (1, 4), (1, 20))]
        got = limit(draft, depth, *limits)
        assert got.tokens is draft.tokens and got.parent is draft.parent
        for b in range(5):
            want = by_hand(draft.parent[b].tolist(), draft.alive[b].tolist(), *(int(x[b]) for x in limits))
            assert got.alive[b].tolist() == want
            fewer += want != draft.alive[b].tolist()
            assert all(want[int(draft.parent[b, n])] for n in range(len(want)) if want[n])
    assert 300 < fewer < 600


def test_mixed_rows_and_roots() -> None:
    chain = Draft(torch.zeros(3, 5).long(), torch.tensor([[0, 0, 1, 2, 3]] * 3), torch.ones(3, 5, dtype=torch.bool))
    got = limit(chain, 4, torch.tensor([4, 0, 2]), torch.tensor([1, 1, 1]), torch.tensor([5, 1, 9]))
    assert got.alive.sum(1).tolist() == [5, 1, 3]
    root = Draft(*(x[:, :1] for x in chain[:3]))
    assert limit(root, 0, *torch.tensor([[0] * 3, [1] * 3, [1] * 3])) == root


def test_runs_on_fake_tensors() -> None:
    with FakeTensorMode():
        draft = Draft(*(torch.zeros(2, 6, dtype=d) for d in (torch.int64, torch.int64, torch.bool)))
        one = torch.ones(2, dtype=torch.int64)
        assert limit(draft, 3, one, one, one).alive.shape == (2, 6)
