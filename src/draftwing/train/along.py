"""What a head computes along a text that is there, as in serving: the judge compares by it, and heads are merged by the
inputs that their matrices get."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.layers.linear import Linear
from draftwing.models.heads.block import BlockHead
from draftwing.train import blocks, ttt
from draftwing.train.batches import in_order, load, to_device, usable
from draftwing.train.heads import AnyHead
from draftwing.train.store import Part
from draftwing.train.teacher import Batch

BATCH_TOKENS = 4096  # of a forward, padding included


class Along(NamedTuple):
    """A batch of texts. numbers: of the texts in their part.  drafts: of each draft 1, 2, .. of the chains that begin
    at the batch's n loss positions, the products whose sum are its logits: (x [n, width], layer) of each.  uncalled:
    what layers got on the way that were not called: (x [m, width], layer), of a table (ids [m], table)."""

    numbers: list[int]
    batch: Batch
    drafts: Iterator[Sequence[tuple[Tensor, Linear]]]
    uncalled: Sequence[tuple[Tensor, Linear]]


@torch.no_grad()
def along(head: AnyHead, part: Part, depth: int, max_length: int) -> Iterator[Along]:
    """Gives batches of the texts, drafted along in chains of `depth`."""
    lengths, param = usable(part, max_length), next(head.parameters())
    ahead = head.config_of_block.rows if isinstance(head, BlockHead) else depth
    head.set_max_positions(max_length + ahead)
    order = in_order(lengths, BATCH_TOKENS)
    for numbers, loaded in zip(order, load(part, order, max_length), strict=True):
        batch = to_device(loaded, param.device, param.dtype)
        if isinstance(head, BlockHead):
            yield Along(numbers, batch, *blocks.chains(head, batch, depth))
        else:
            yield Along(numbers, batch, ttt.chains(head, batch, depth), ())


def most_drafts(head: AnyHead) -> int | None:
    """Returns how long a chain of the head can be, None: of any length."""
    return head.config_of_block.steps if isinstance(head, BlockHead) else None
