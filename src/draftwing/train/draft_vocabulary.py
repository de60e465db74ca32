"""Which tokens a head may draft: the most frequent ones of what the target answered, for the row of each in a head's
lm_head is most of what a draft step costs where the target is small."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwing.errors import ConfigError
from draftwing.train.store import Tokens

SEEN = 2  # times that a token must be there to get a row: once may be a name that never comes back
RENEWED = 0.125  # share of the rows: as many as the bundled head's rarest, which 1 of 300 tokens of a general text is
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


def renewed(ids: Sequence[int], tokens: Iterable[Tokens], vocab: int, ending: Iterable[int]) -> list[int]:
    """Returns a draft vocabulary of the same size, ascending, with the tokens of these answers that `ids` lack, the
    most frequent first, in place of those that are less than half as frequent: the rarest first, of equals the highest
    id, which is a tokenizer's rarest.

    At most a share of `RENEWED` changes at once. ending: ids that are kept in any case.
    """
    counts, _ = _counted(tokens, vocab)
    known, kept = set(ids), set(ending)
    wanted = [token for token in np.argsort(-counts, kind="stable").tolist() if token not in known]
    spare = sorted(known - kept, key=lambda token: (counts[token], -token))
    pairs = zip(wanted[: int(RENEWED * len(known))], spare, strict=False)
    changed = [(new, old) for new, old in pairs if counts[new] >= max(SEEN, 2 * counts[old] + 1)]
    return sorted(known.difference(old for _, old in changed).union(new for new, _ in changed))


def _counted(tokens: Iterable[Tokens], vocab: int) -> tuple[NDArray[np.int64], int]:
    """Counts each token in the answers, [vocab], and all together."""
    counts = np.zeros(vocab, np.int64)
    for one in tokens:
        counts += np.bincount(one.ids[one.loss_mask], minlength=vocab)
    total = int(counts.sum())
    if not total:
        raise ConfigError("there is no answer to count tokens of: run `draftwing train generate` first")
    return counts, total


def unused_token(tokens: Iterable[Tokens], vocab: int) -> int:
    """Returns the highest token id that no text has. Raises ConfigError where there is none."""
    free = np.ones(vocab, np.bool_)
    for one in tokens:
        free[one.ids] = False
    found = np.flatnonzero(free)
    if not len(found):
        raise ConfigError("every token of the vocabulary is in the texts: name one as --mask-token")
    return int(found[-1])
