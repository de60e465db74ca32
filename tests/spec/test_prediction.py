"""Chains from predictions against a search in Python lists, and acceptance when an answer follows its prediction."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from draftwing.config.trees import TreeShape
from draftwing.ops.assign.spec import new_calibration
from draftwing.ops.table import TorchOps
from draftwing.ops.tree.spec import accept, derive
from draftwing.ops.types import Draft
from draftwing.spec.prediction import LEVEL, WINDOW, PredictedOutput, limit

LENGTH = 200
IMAGE = 77


class Slots(NamedTuple):
    tokens: Tensor
    kv_len: Tensor


def slots_of(histories: list[list[int]]) -> Slots:
    tokens = torch.full((len(histories), LENGTH), 3)  # stale tokens past the newest
    for r, history in enumerate(histories):
        tokens[r, : len(history)] = torch.tensor(history)
    return Slots(tokens, torch.tensor([len(h) - 1 for h in histories]))


def with_images(ids: list[int], rng: random.Random) -> list[int]:
    return [each for token in ids for each in (token, *[IMAGE] * rng.choice((0, 0, 0, 1, 5)))]


def merged(predicted: PredictedOutput, inner: Draft, *args: Any) -> Draft:
    cpu = torch.device("cpu")
    return predicted.merge(inner, *args, ops=TorchOps(cpu), calibration=new_calibration(cpu))


def roots(slots: Slots, rows: Tensor, nodes: int) -> Draft:
    last = slots.tokens[rows, slots.kv_len[rows]]
    alive = torch.zeros(len(rows), nodes, dtype=torch.bool)
    alive[:, 0] = True
    return Draft(last[:, None].repeat(1, nodes), torch.zeros(len(rows), nodes, dtype=torch.int64), alive)


class Follower:
    """One row's prediction, searched in the open."""

    def __init__(self, ids: list[int], prompt_len: int) -> None:
        self.ids, self.prompt_len = ids, prompt_len
        self.at, self.seen = -1, prompt_len - 1

    def follow(self, history: list[int]) -> tuple[list[int] | None, int]:
        """What follows the newest tokens, None without a match; and the confidence."""
        newest = len(history) - 1
        expected = self.at + newest - self.seen
        best: tuple[int, int] | None = None
        if newest < self.prompt_len:
            end, length, best = -1, 0, (0, 0)
            expected = -1
        else:
            for e in range(len(self.ids)):
                n = 0
                while n < min(WINDOW, e + 1, len(history)) and self.ids[e - n] == history[-1 - n]:
                    n += 1
                order = 0 if e == expected else 1 + (e - self.at - 1 if e > self.at else 10_000 + e)
                if n and (best is None or (-n, order) < best):
                    best, end, length = (-n, order), e, n
        if best is None or end + 1 >= len(self.ids):
            return None, 0
        self.at, self.seen = end, newest
        return self.ids[end + 1 :], length + (WINDOW if end == expected else 0)


def chain_of(draft: Draft, b: int, others: int = 0) -> list[int]:
    """The tokens of a chain, behind which come so many other nodes under the root."""
    live = [n for n in range(draft.tokens.shape[1]) if draft.alive[b, n]]
    chain = len(live) - others
    above = [*range(chain - 1), *([0] * others)]
    assert live == list(range(len(live))) and [int(draft.parent[b, n]) for n in live[1:]] == above
    return draft.tokens[b, 1:chain].tolist()


def test_random_predictions_step_by_step() -> None:
    """Few tokens, so that most suffixes occur often; rows without a prediction keep their own draft, of one node. What
    stands for images is left out."""
    rng = random.Random(0)
    found = missed = steady = kept = 0
    for _ in range(15):
        shape = TreeShape(rng.randint(1, 6), 2, rng.randint(2, 9))
        vocab = rng.choice([1, 2, 4, 40])  # 1: every place matches alike
        histories = [[rng.randrange(vocab) for _ in range(rng.randint(1, 12))] for _ in range(5)]
        predicted = PredictedOutput(5, 64, torch.device("cpu"), image_token=IMAGE)
        followers: dict[int, Follower] = {}
        for row in (0, 2, 3):
            ids = [rng.randrange(vocab) for _ in range(rng.randint(1, 40))]
            predicted.write(row, [9] * rng.randint(1, 60), 1)
            predicted.write(row, with_images(ids, rng), len(histories[row]))
            followers[row] = Follower(ids, len(histories[row]))
        rows, which = torch.tensor([3, 1, 0, 4, 2]), torch.tensor([4, 0, 2])
        bound = predicted.longest([0, 2, 3])
        assert bound == max(len(f.ids) for f in followers.values())
        for _ in range(6):
            slots = slots_of(histories)
            inner = roots(slots, rows, shape.nodes)
            inner.alive[:, 1] = True
            before = [x.clone() for x in inner[:3]]
            confidence = predicted.confidence(slots, rows[which], bound)
            draft = merged(predicted, inner, slots, rows, which, shape, bound)
            assert all(torch.equal(a, b) for a, b in zip(inner[:3], before, strict=True))
            confidences = dict(zip(which.tolist(), confidence.tolist(), strict=True))
            for b, row in enumerate(rows.tolist()):
                following, confidence = followers[row].follow(histories[row]) if row in followers else (None, 0)
                if row in followers:
                    assert confidences[b] == confidence
                    steady += confidence > WINDOW
                if following is None:
                    assert all(torch.equal(x[b], y[b]) for x, y in zip(draft[:3], inner[:3], strict=True))
                    missed += row in followers
                else:
                    want = following[: min(shape.depth, shape.nodes - 1)]
                    own = len(want) < shape.nodes - 1 and histories[row][-1] != want[0]
                    assert chain_of(draft, b, own) == want
                    assert draft.grade is not None and (draft.grade[b, 1 : len(want) + 1] == LEVEL).all()
                    kept += own
                    found += 1
                assert draft.tokens[b, 0] == histories[row][-1]
                histories[row] += [rng.randrange(vocab) for _ in range(rng.randint(1, 3))]
                if following and rng.random() < 0.6:  # the answer follows
                    histories[row] = histories[row][: int(slots.kv_len[row]) + 1] + following[: rng.randint(1, 4)]
    assert found > 100 and missed > 25 and steady > 25 and kept > 25


def test_an_answer_that_follows_is_accepted_whole() -> None:
    """An answer equal to its prediction but for one replaced, one dropped and one added token, repetitions and all."""
    text = [5, 6, 7, 8, 5, 6, 9, 1, 5, 6, 7, 8, 5, 6, 9, 2] * 5
    answer = text.copy()
    answer[20] = 33
    del answer[41]
    answer.insert(60, 44)
    prompt, shape = [70, 71, 72], TreeShape(7, 1, 8)
    predicted = PredictedOutput(2, 256, torch.device("cpu"))
    predicted.write(0, text, len(prompt))
    history, steps, row = prompt + answer[:1], 0, torch.tensor([0])
    while len(history) < len(prompt) + len(answer):
        slots = slots_of([history, [0]])
        draft = merged(predicted, roots(slots, row, shape.nodes), slots, row, row, shape, predicted.longest([0]))
        tree = derive(draft.parent, draft.alive, shape.depth)
        done = len(history) - len(prompt)
        left = answer[done:] + [0] * shape.nodes
        # The target's sample at a chain's node n is the answer's token after n drafts; accept stops where they part.
        target = torch.tensor([left[: shape.nodes]])
        accepted = accept(draft.tokens, draft.parent, draft.alive, tree, target)
        history += left[: int(accepted.count)]
        steps += 1
    assert history[len(prompt) : len(prompt) + len(answer)] == answer
    assert steps <= len(answer) // 8 + 8


def test_nothing_to_do() -> None:
    slots, row = slots_of([[1, 2, 3]]), torch.tensor([0])
    predicted = PredictedOutput(1, 4, torch.device("cpu"))
    inner = roots(slots, row, 1)
    assert merged(predicted, inner, slots, row, row, TreeShape(0, 1, 1), 0) is inner
    assert predicted.confidence(slots, row, predicted.longest([0])).tolist() == [0]
    predicted.write(0, range(9), 1)
    assert predicted.longest([0]) == 4 and predicted.tokens.shape == (1, 4)
    predicted = PredictedOutput(1, 4, torch.device("cpu"), image_token=IMAGE)
    predicted.write(0, [IMAGE] * 3, 1)
    assert predicted.longest([0]) == 0


@pytest.mark.slow
def test_runs_on_fake_tensors() -> None:
    with FakeTensorMode():
        predicted = PredictedOutput(3, 64, torch.device("cpu"))
        predicted.tokens = torch.zeros(3, 32, dtype=torch.int64)
        slots = Slots(torch.zeros(3, 50, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
        rows, which = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        inner = Draft(*(torch.zeros(2, 5, dtype=d) for d in (torch.int64, torch.int64, torch.bool)))
        draft = merged(predicted, inner, slots, rows, which, TreeShape(4, 1, 5), 20)
        assert [x.shape for x in draft[:3]] == [(2, 5)] * 3
        assert predicted.confidence(slots, which, 20).shape == (1,)


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
    for _ in range(60):
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
    assert 150 < fewer < 300


def test_mixed_rows_and_roots() -> None:
    chain = Draft(torch.zeros(3, 5).long(), torch.tensor([[0, 0, 1, 2, 3]] * 3), torch.ones(3, 5, dtype=torch.bool))
    got = limit(chain, 4, torch.tensor([4, 0, 2]), torch.tensor([1, 1, 1]), torch.tensor([5, 1, 9]))
    assert got.alive.sum(1).tolist() == [5, 1, 3]
    root = Draft(*(x[:, :1] for x in chain[:3]))
    assert limit(root, 0, *torch.tensor([[0] * 3, [1] * 3, [1] * 3])) == root


@pytest.mark.slow
def test_limits_run_on_fake_tensors() -> None:
    with FakeTensorMode():
        draft = Draft(*(torch.zeros(2, 6, dtype=d) for d in (torch.int64, torch.int64, torch.bool)))
        one = torch.ones(2, dtype=torch.int64)
        assert limit(draft, 3, one, one, one).alive.shape == (2, 6)
