"""Trains the selector of a DFlash2 head: among the most likely tokens of each row it learns which one follows the
text's own token above. What it reads of the rest of the head is taken as it is, so that the rest learns as a DFlash
head does."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.layers.linear import Linear
from draftwing.models.heads.block import BlockHead
from draftwing.train.losses import BlockLoss, Rows, chunks, wide


def pair_loss(
    head: BlockHead, hidden: Tensor, readout: tuple[Tensor, Tensor], above: Tensor, probs: Tensor, rows: Rows,
    loss: BlockLoss,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the loss [N, S], weighted, and the token that is chosen, [N, S] as the head counts.

    hidden [N, S, H] of the rows that predict; readout: state [N, S, H] and weight [V, H], whose product are the logits;
    above [N * S] int64: the text's own tokens, probs [n, V]: the target's distributions. The loss is the cross-entropy
    of scores with the target's distribution, or with the text where that is what the head is trained for, as far as it
    is among the candidates."""
    assert head.selector is not None
    likely, places = _candidates(*readout, min(head.selector.count, head.vocab))  # [N, S, C]
    ids = places if head.target_ids is None else head.target_ids[places]
    gated = paired(head, hidden.detach(), above)  # [N, S, R]
    scores = likely + (head.selector.after[ids] @ gated.unsqueeze(-1)).squeeze(-1).to(likely.dtype)
    if loss.kind in ("text", "d_pace"):
        share = (places == rows.token.unsqueeze(-1)).to(likely.dtype)
    else:
        share = probs[rows.place.unsqueeze(-1), places].to(likely.dtype) * rows.known.unsqueeze(-1)
    steps = loss.decay ** torch.arange(places.shape[1], dtype=likely.dtype, device=places.device)
    value = -(share * scores.log_softmax(-1)).sum(-1) * rows.counts * steps
    return value, places.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)


@torch.no_grad()
def _candidates(state: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """state [N, S, H], weight [V, H] -> the largest `count` of each row's logits and their places, [N, S, count]"""
    (blocks, steps, _), found = state.shape, []
    for part in chunks(blocks, steps * len(weight), state.device):
        logits = state[part].flatten(0, 1) @ weight.t()
        found.append(logits.to(wide(logits)).topk(count))
    shape = blocks, steps, count
    return torch.cat([one.values for one in found]).view(shape), torch.cat([one.indices for one in found]).view(shape)


def paired(head: BlockHead, hidden: Tensor, above: Tensor) -> Tensor:
    """Returns what candidates' vectors are multiplied with, [N, S, rank]: hidden [N, S, H], above [N * S] the tokens
    above."""
    selector = head.selector
    assert selector is not None
    gate = selector(hidden.flatten(0, 1))
    return (selector.before[above] * gate).view(*hidden.shape[:2], -1)


def as_layer(head: BlockHead) -> Linear:
    """Returns a layer whose product with what `paired` gives are the scores of all tokens that the head drafts."""
    selector, ids = head.selector, head.target_ids
    assert selector is not None
    vectors = selector.after if ids is None else selector.after[ids]
    made = Linear(vectors.shape[1], len(vectors), False, vectors.dtype, torch.device("meta"))
    made.weight = torch.nn.Parameter(vectors.detach(), False)
    return made
