"""What a head is trained on: a batch of the target's texts, and the target's own predictions for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.models.heads.base import FeatureHead
from draftwing.train.chain_attention import wide
from draftwing.train.cross_entropy import chunks
from draftwing.train.heads import TargetHead


class Batch(NamedTuple):
    """B sequences, padded at their ends to the length T of the longest, and the n loss positions."""

    ids: Tensor  # [B, T] int64
    aux_hidden: Tensor  # [B, T, len(aux_layers) * hidden]
    final: Tensor  # [n, hidden]: the target's state after its final norm at each loss position
    position: Tensor  # [n] int64: index into the flat [B * T]
    depth: Tensor  # [n] int64: index within the sequence
    lengths: Tensor  # [B] int64
    max_positions: int  # loss positions of the sequence that has the most


class Teacher(NamedTuple):
    """The target's predictions at each loss position."""

    probs: Tensor  # [n, Vd]: its probabilities, restricted to the draft vocabulary and normalised there
    best: Tensor  # [n] int64: its most likely token, -1 where the head cannot say it
    known: Tensor  # [n] bool: whether that is in the draft vocabulary
    share: Tensor  # [n]: of its probability, how much that vocabulary has; 1 where that was not asked for


@torch.no_grad()
def teach(
    head: FeatureHead, target_head: TargetHead, final: Tensor, temperature: float, shares: bool = False
) -> Teacher:
    """final [n, hidden] -> the predictions at n positions, at a temperature. shares: whether `Teacher.share` is
    needed."""
    kept = head.target_ids
    # Half precision holds a probability to 3 digits and saves half of what is this step's largest tensor.
    half = torch.is_autocast_enabled(final.device.type)
    dtype = torch.bfloat16 if half else next(head.parameters()).dtype
    probs = final.new_empty(final.shape[0], head.vocab, dtype=dtype)
    best = final.new_empty(final.shape[0], dtype=torch.int64)
    known = torch.ones_like(best, dtype=torch.bool)
    asked = temperature if shares else None
    share = torch.ones(final.shape[0], dtype=wide(final), device=final.device)
    for part in chunks(final.shape[0], head.config.vocab_size, final.device):
        with torch.autocast(final.device.type, enabled=False):
            if kept is None:
                logits = target_head(final[part])
            else:
                logits, known[part], share[part] = target_head.of(kept, final[part], asked)
        best[part] = logits.argmax(-1)
        if temperature != 1:
            logits = logits / temperature
        probs[part] = logits.softmax(-1).to(dtype)
    if kept is not None:
        best = torch.where(known, kept[best], -1)
    return Teacher(probs, best, known, share)


@torch.no_grad()
def lean_to_text(teacher: Teacher, head: FeatureHead, said: Tensor, share: float) -> Teacher:
    """Returns predictions of which `share` is the text's own token, `said` [n] ids of the target, and the rest the
    target's. Where the head cannot say that token, all of it is the target's."""
    at, rows = said, torch.arange(len(said), device=said.device)
    moved = teacher.probs.new_full((len(said),), share)
    draft_ids = head.draft_ids()
    if draft_ids is not None:
        at = draft_ids[said]
        moved *= at >= 0
    probs = teacher.probs.mul_((1 - moved).unsqueeze(1))  # in place: nothing of a step is larger
    probs[rows, at] += moved  # nothing where `at` is -1
    return teacher._replace(probs=probs)


def ratio(part: float, whole: float) -> float:
    """Returns their quotient, 0 of nothing."""
    return part / whole if whole else 0.0


def acceptance(chains: Sequence[float], hits: Sequence[float]) -> dict[str, float]:
    """Returns the acceptance length, and by place of a draft how often it is accepted: of chains that reach the place,
    `hits` are right up to it."""
    rates = [ratio(*pair) for pair in zip(hits, chains, strict=True)]
    return {"accept_length": 1 + sum(rates), **{f"accept_{k}": rate for k, rate in enumerate(rates, 1)}}
