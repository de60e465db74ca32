"""The loss of heads that draft a block, from logits that are made and used up a piece at a time.

Of a row's logits z, q = softmax(z), the target's distribution p and the text's next token t it takes
- the cross-entropy with the text, -log q[t];
- the cross-entropy with the target's distribution, -sum p log q, whose gradient is that of KL(p, q);
- the distance of both distributions, 1 - a with a = sum min(p, q): a is how often a token that is drawn from q is
  accepted (Leviathan et al. 2023, arXiv 2211.17192).
Their gradients of z are q - [t], q sum p - p and, with m = [q < p], -q (m - sum q m).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from draftwing.train.chain_attention import wide
from draftwing.train.cross_entropy import linear_loss
from draftwing.train.kernels import kernels_take

Kind = Literal["text", "kl", "tv", "lk_hybrid", "d_pace"]  # as `train.settings.BLOCK_LOSSES`
_PACE = 0.5  # alpha of D-PACE


@dataclass(frozen=True)
class BlockLoss:
    """How a block is trained.

    kind: text: the cross-entropy with the text. kl: with the target's distribution. tv: DSpark's, 0.1 of the former and
    0.9 of the L1 distance to the target's distribution, which is twice 1 - a. lk_hybrid: of kl and 1 - a by
    exp(-3 a), so that a row which hardly ever is right learns as with kl, and one that is mostly right the share itself
    (arXiv 2602.23881). d_pace: text, where a position weighs what is to be won from it on, sum over m >= j of the
    product of (q[t] + 1) / 2 of the block's positions up to m, without a gradient.
    decay: weight of each position over the one before.  confidence: of the confidence head's cross-entropy with a.
    anchors: share of a text's tokens that open a block in each forward.  temperature: of the target's distribution.
    """

    kind: Kind = "kl"
    decay: float = math.exp(-1 / 4)
    confidence: float = 1.0
    anchors: float = 0.25
    temperature: float = 1.0

    def rate(self, hidden: int) -> float:
        """Returns the learning rate where none is asked for."""
        return 6e-4


class Rows(NamedTuple):
    """What N blocks of S positions are to predict."""

    place: Tensor  # [N, S] int64: which of the target's distributions
    token: Tensor  # [N, S] int64: the text's next token as the head counts, -1 where it cannot say it
    counts: Tensor  # [N, S] bool: whether there is anything to predict
    known: Tensor  # [N, S] bool: whether the target's distribution is among what counts


class Found(NamedTuple):
    """What came of them; only the first has gradients."""

    total: Tensor  # the loss, summed over all positions
    loss: Tensor  # [N, S]: that of each, as weighted
    best: Tensor  # [N, S] int64: the most likely token, as the head counts
    accepted: Tensor  # [N, S]: a, 0 where nothing is to be predicted


def block_loss(parts: Sequence[tuple[Tensor, Tensor]], probs: Tensor, rows: Rows, loss: BlockLoss) -> Found:
    """parts: (x [N, S, width], weight [V, width]) of the products whose sum are the logits; probs [n, V]: the target's
    distributions. Logits are made of whole blocks, as `linear_loss` does."""

    def of(logits: Tensor, part: slice, sloped: bool) -> tuple[Tensor, ...]:
        return terms(logits, probs, Rows(*(tensor[part] for tensor in rows)), loss, sloped)

    return Found(*linear_loss(parts, of))


class RowFacts(NamedTuple):
    """What the logits of R rows say with the target's distributions; [R] each, of rows that do not count, too."""

    best: Tensor  # int64: the most likely token
    cross: Tensor  # -sum p log q
    text: Tensor  # -log q[t], anything where there is no t
    accepted: Tensor  # sum min(p, q)
    kept: Tensor  # what the slopes are made of, as whoever made the facts likes it


def terms(
    logits: Tensor, probs: Tensor, rows: Rows, loss: BlockLoss, sloped: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits [N * S, V], probs [n, V] -> `loss`, `best` and `accepted` of `Found`, and the gradient of the loss
    [N * S, V], which may be the logits, overwritten; the logits where it is not asked for."""
    shape, place, token = rows.place.shape, rows.place.flatten(), rows.token.flatten()
    facts_of, slopes_of = _implementation(logits)
    facts = facts_of(logits, probs, place, token)
    best, cross, text, accepted = (fact.view(shape) for fact in facts[:4])
    text = text * ((rows.token >= 0) & rows.counts)
    accepted = accepted * rows.counts
    by_text, by_kl, by_tv, weight = _shares(loss, text, accepted, rows)
    value = weight * (by_text * text + by_kl * cross + by_tv * (1 - accepted))
    if not sloped:
        return value, best, accepted, logits
    shares = tuple((weight * share).flatten() for share in (by_text, by_kl, by_tv))
    return value, best, accepted, slopes_of(logits, probs, place, token, facts, shares)


def _implementation(logits: Tensor) -> tuple[Callable[..., RowFacts], Callable[..., Tensor]]:
    """Returns what gives the facts of rows, and what makes their slopes; it may overwrite the logits."""
    if not kernels_take(logits):
        return _facts_in_torch, _slopes_in_torch
    from draftwing.train.kernels.block_terms import row_facts, slopes

    return row_facts, slopes


def _facts_in_torch(logits: Tensor, probs: Tensor, place: Tensor, token: Tensor) -> RowFacts:
    """`train.kernels.block_terms.row_facts` of any device and floating dtype."""
    exact = wide(logits)
    log_q, p = logits.to(exact).log_softmax(-1), probs[place].to(exact)
    text = -log_q.gather(-1, token.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return RowFacts(logits.argmax(-1), -(p * log_q).sum(-1), text, torch.minimum(log_q.exp(), p).sum(-1), log_q)


def _slopes_in_torch(
    logits: Tensor, probs: Tensor, place: Tensor, token: Tensor, facts: RowFacts, shares: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """`train.kernels.block_terms.slopes` of any device and floating dtype."""
    q, p = facts.kept.exp(), probs[place].to(facts.kept.dtype)
    a, b, c = (share.unsqueeze(-1) for share in shares)
    less = (q < p).to(q.dtype)
    inner = (q * less).sum(-1, keepdim=True)
    slope = q * (a + b * p.sum(-1, keepdim=True) - c * (less - inner)) - b * p
    return slope.scatter_add_(-1, token.clamp(min=0).unsqueeze(-1), -a).to(logits.dtype)


def _shares(loss: BlockLoss, text: Tensor, accepted: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the weights [N, S] of the three terms, and of the positions."""
    steps, soft = rows.counts.shape[1], (rows.counts & rows.known).to(text.dtype)
    hard = ((rows.token >= 0) & rows.counts).to(text.dtype)
    weight = (loss.decay ** torch.arange(steps, dtype=text.dtype, device=text.device)).expand_as(text)
    none = torch.zeros_like(text)
    if loss.kind == "kl":
        return none, soft, none, weight
    if loss.kind == "tv":
        return 0.1 * hard, none, 1.8 * soft, weight
    if loss.kind == "lk_hybrid":
        blend = torch.exp(-3 * accepted)
        return none, blend * soft, (1 - blend) * soft, weight
    if loss.kind == "d_pace":
        said = torch.where(rows.token >= 0, torch.exp(-text), 0.0)  # nothing that follows is reached without it
        sure = (1 - _PACE) * said + _PACE
        reached = (sure * rows.counts).cumprod(1)  # [N, S]: of each m, the product up to it
        return hard, none, none, reached.flip(1).cumsum(1).flip(1)
    return hard, none, none, weight
