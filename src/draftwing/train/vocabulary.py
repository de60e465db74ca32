"""Chooses the tokens that an EAGLE-3 head may draft: the most frequent ones of what the target answered.

Its own head has a row for each of them alone, which is most of what a draft step costs where the target is small.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwing.errors import ConfigError
from draftwing.train.store import Tokens

MULTIPLE = 64  # rows of a product that run at full speed on a GPU


class Vocabulary(NamedTuple):
    """ids: of the target, ascending.  coverage: share of the counted tokens that are among them."""

    ids: tuple[int, ...]
    counted: int
    coverage: float


def draft_vocabulary(tokens: Iterable[Tokens], size: int, vocab: int, ending: Iterable[int]) -> Vocabulary:
    """Chooses the `size` most frequent tokens of the answers, the lower id of equals; `size` is rounded up to a
    multiple of 64.

    vocab: of the target, which is all there is where `size` is not below it.  ending: ids that are kept in any case,
    for a drafter that cannot propose the end of an answer drafts past every end.
    Where fewer tokens occur, the lowest of the other ids fill it up.
    """
    counts, total = _counted(tokens, vocab)
    size = -(-size // MULTIPLE) * MULTIPLE
    if size >= vocab:
        return Vocabulary(tuple(range(vocab)), total, 1.0)
    ending = {token for token in ending if token < vocab}
    ranked = [token for token in np.argsort(-counts, kind="stable").tolist() if token not in ending]
    kept = sorted([*ending, *ranked[: size - len(ending)]])
    return Vocabulary(tuple(kept), total, int(counts[kept].sum()) / total)


def covered(tokens: Iterable[Tokens], ids: Sequence[int], vocab: int) -> Vocabulary:
    """Counts a head's own draft vocabulary, ids of a target with `vocab` tokens, in other answers."""
    counts, total = _counted(tokens, vocab)
    return Vocabulary(tuple(ids), total, int(counts[list(ids)].sum()) / total)


def _counted(tokens: Iterable[Tokens], vocab: int) -> tuple[NDArray[np.int64], int]:
    """Counts each token in the answers, [vocab], and all together."""
    counts = np.zeros(vocab, np.int64)
    for one in tokens:
        counts += np.bincount(one.ids[one.loss_mask], minlength=vocab)
    total = int(counts.sum())
    if not total:
        raise ConfigError("there is no answer to count tokens of: run `draftwing train generate` first")
    return counts, total
