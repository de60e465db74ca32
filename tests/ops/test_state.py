"""Where earlier tokens' entries are found, against lists in Python."""

from __future__ import annotations

import torch

from draftwing.ops.attention import Batch, ChunkSpan
from draftwing.ops.torch.state import ancestor_slots, scan

TABLE = torch.tensor([[0] * 12, [5, 9, 2, 14, 7, 3, 8, 1, 6, 0, 0, 0], [21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 0, 0]])
TEXT = {slot: 100 + slot for slot in range(40)}  # what the token in a slot adds


def chunks() -> tuple[Batch, list[list[int]]]:
    """Two chunks, one of which begins its text -> and the slots of each query's text, its own the last."""
    spans = (ChunkSpan(0, 0, 0, 3), ChunkSpan(1, 3, 4, 2))
    at = [(2, 0), (2, 1), (2, 2), (1, 4), (1, 5)]
    texts = [TABLE[row, : place + 1].tolist() for row, place in at]
    positions, slots = torch.tensor([place for _, place in at]), torch.tensor([text[-1] for text in texts])
    none = torch.zeros(2, dtype=torch.int64)
    return Batch(torch.tensor([2, 1]), positions, positions, slots, TABLE, none, chunks=spans), texts


def trees() -> tuple[Batch, list[list[int]]]:
    """A tree behind four tokens, one at the beginning of a text, and the dummy row."""
    paths, prefixes, rows = [[0], [0, 1], [0, 2], [0, 2, 3]], [4, 0, 0], [1, 2, 0]
    path = torch.tensor([own + [0] * (3 - len(own)) for own in paths]).expand(3, -1, -1)
    path_len = torch.tensor([len(own) for own in paths]).expand(3, -1)
    texts = [
        [*TABLE[row, :prefix].tolist(), *(int(TABLE[row, prefix + entry]) for entry in own)]
        for row, prefix in zip(rows, prefixes, strict=True)
        for own in paths
    ]
    slots, prefix = torch.tensor([text[-1] for text in texts]), torch.tensor(prefixes)
    at = (prefix[:, None] + path_len - 1).flatten()
    return Batch(torch.tensor(rows), at, at, slots, TABLE, prefix, path, path_len, window=4), texts


def test_ancestors_are_the_tokens_before() -> None:
    for batch, texts in (chunks(), trees()):
        found = ancestor_slots(batch, 3)
        assert found.tolist() == [[*reversed(text[:-1]), 0, 0, 0][:3] for text in texts]


def test_a_scan_goes_along_each_path() -> None:
    for batch, texts in (chunks(), trees()):
        own = torch.tensor([TEXT[text[-1]] for text in texts])
        kept = torch.full((40, 2), -7)
        for text in texts:  # of the tokens that were there before
            for end in range(1, len(text)):
                if text[end - 1] not in batch.write_slots.tolist():
                    kept[text[end - 1]] = folded(text[:end])
        found = scan(batch, kept, lambda before, queries, own=own: 3 * before + own[queries, None])
        real = [i for i, text in enumerate(texts) if text[-1]]
        assert found[real, 0].tolist() == [folded(texts[i]) for i in real]
        assert torch.equal(kept[batch.write_slots[real]], found[real])
        untouched = [slot for slot in range(1, 40) if not any(slot in text for text in texts)]
        assert kept[untouched].eq(-7).all()


def folded(text: list[int]) -> int:
    state = 0
    for slot in text:
        state = 3 * state + TEXT[slot]
    return state
