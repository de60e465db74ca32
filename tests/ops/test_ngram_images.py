"""The n-gram index of every implementation on texts with images, of which hundreds of equal tokens stand for each: what
it finds in a row's own text, against a search of all places; and what it finds of others' answers."""

from __future__ import annotations

import random

import pytest
import torch
from lookup_slots import Slots

from draftwing.config.trees import MAX_CONFIDENCE, TreeShape
from draftwing.ops.ngram.spec import OWN, NGramIndex
from draftwing.ops.table import TorchOps

IMAGE = 7
BRANCH, WINDOW = 6, 5
TREE = TreeShape(BRANCH, 4, 24)


def index_on(ops: TorchOps, rows: int, image_token: int = IMAGE) -> NGramIndex:
    return ops.ngram_index(
        rows + 1, ops.device, max_window=WINDOW, branch_length=BRANCH, capacity=1, image_token=image_token
    )


def slots_of(ops: TorchOps, texts: list[list[int]]) -> Slots:
    tokens = torch.zeros(len(texts) + 1, max(map(len, texts)) + BRANCH, dtype=torch.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    last = torch.tensor([*(text[-1] for text in texts), 0])
    newest = torch.tensor([*(len(text) - 1 for text in texts), 0])
    return Slots(
        tokens.to(ops.device, ops.table_dtype), newest.to(ops.device), last.to(ops.device),
        torch.zeros_like(last).to(ops.device),
    )  # fmt: skip


def with_images(rng: random.Random) -> list[int]:
    """Words of few tokens, and images of up to 40."""
    kinds = [1, 2, 3], [2, 1], [3, 3, 1, 2], [IMAGE] * rng.randint(1, 40)
    return [token for part in rng.choices(kinds, k=rng.randint(1, 15)) for token in part]


def every_place(text: list[int], gap: int) -> list[tuple[int, int, list[int]]]:
    """(length of the match, whether it goes on at the row's gap, what follows up to an image) of the best places."""
    newest, found = len(text) - 1, []
    for end in range(newest):
        length = 0
        while length < WINDOW and length <= end and text[end - length] == text[newest - length]:
            length += 1
        if length and text[end + 1] != IMAGE:
            follows = [text[end + 1 + d % (newest - end)] for d in range(BRANCH)]
            follows = follows[: follows.index(IMAGE)] if IMAGE in follows else follows
            found.append((length, newest - 1 - end == gap, newest - 1 - end, follows))
    found.sort(key=lambda one: (-one[0], not one[1], one[2]))
    return [(length, goes_on, follows) for length, goes_on, _, follows in found[:OWN]]


def test_own_text(ops: TorchOps) -> None:
    rng = random.Random(4)
    texts = [with_images(rng) for _ in range(8 if ops.name == "triton" and ops.device.type == "cpu" else 60)]
    gaps = [rng.choice((-1, rng.randrange(len(text)))) for text in texts]
    index, slots, rows = index_on(ops, len(texts)), slots_of(ops, texts), torch.arange(len(texts), device=ops.device)
    index.gap.copy_(torch.tensor([*gaps, -1])[:, None])
    confidences = index.confidence(slots, rows, max(map(len, texts)) - 1).tolist()
    draft, found = index.propose(slots, rows, TREE), 0
    for row, (text, gap) in enumerate(zip(texts, gaps, strict=True)):
        expected = every_place(text, gap)
        match = [length for length in index.match[row].tolist() if length]
        assert match == [length for length, *_ in expected]
        for c, (*_, follows) in enumerate(expected):
            assert index.candidates[row, :, c].tolist() == [*follows, *[-1] * (BRANCH - len(follows))]
        best = expected[0] if expected else (0, False)
        assert confidences[row] == min(best[0] + best[1] * WINDOW, MAX_CONFIDENCE)
        proposed = draft.tokens[row, 1:][draft.alive[row, 1:]].tolist()
        assert IMAGE not in proposed
        found += len(proposed)
    assert found > 3 * len(texts)


def test_without_an_image_token_it_would_be_proposed(ops: TorchOps) -> None:
    text = [1, 2, *[IMAGE] * 20, 3, 1, 2]
    for token, proposed in ((IMAGE, False), (-1, True)):
        index, slots = index_on(ops, 1, token), slots_of(ops, [text])
        row = torch.tensor([0], device=ops.device)
        assert (int(index.confidence(slots, row, len(text) - 1)) > 0) == proposed
        draft = index.propose(slots, row, TREE)
        assert (IMAGE in draft.tokens[draft.alive].tolist()) == proposed


@pytest.mark.parametrize("asked, proposed", [([11, 12, 13], [14]), ([15, 16], [17, 18]), ([11, 12, 13, 14], [])])
def test_answers_of_others(ops: TorchOps, asked: list[int], proposed: list[int]) -> None:
    """Somebody drew the token that stands for images. What was said around it is found, and ends before it."""
    said = [11, 12, 13, 14, IMAGE, 15, 16, 17, 18]
    index, slots, rows = index_on(ops, 2), slots_of(ops, [[5, *said], [6, *asked]]), torch.arange(2, device=ops.device)
    index.begin(slots, rows)
    index.insert(slots, rows[:1], torch.zeros_like(rows[:1]), torch.full_like(rows[:1], len(said)), len(said))
    assert int(index.confidence(slots, rows[1:], len(asked))) == (len(asked) if proposed else 0)
    draft = index.propose(slots, rows[1:], TREE)
    assert draft.tokens[0, 1:][draft.alive[0, 1:]].tolist() == proposed
