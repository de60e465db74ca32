"""How one vector is made of the hidden states of a text, as a checkpoint's files say."""

from __future__ import annotations

from typing import Literal, NamedTuple

PoolingKind = Literal["last", "mean", "cls"]
Scores = Literal["", "sigmoid", "raw"]


class Pooling(NamedTuple):
    """kind: the last token's hidden state, the mean of all, or the first token's.  normalize: whether vectors have
    length 1.  stated: whether files say that the model makes vectors; one that does not ranks by judgements.
    refused: why there are no right vectors of this model; empty: there are.  scores: of a model that scores pairs of
    texts by a head of its own, what that is made of the logit; empty: it has no such head.
    """

    kind: PoolingKind = "last"
    normalize: bool = True
    stated: bool = False
    refused: str = ""
    scores: Scores = ""
