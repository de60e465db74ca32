"""Picks of blocks of tokens: an indexer whose keys are means over blocks of consecutive tokens.

**Path of the data.** A token keeps its key as it is made, and what its position is turned by (`KVPool.index`). The last
token of a block keeps the block's key in place of its own, which nobody else needs: the mean of the block's keys under
a norm, turned as its first token is. A node of a tree makes it of its own path. So no key of a block is made twice, and
they are found by page tables and paths as all else. A query picks the best `topk` of the blocks that it sees all of,
and the tokens behind these, fewer than a block has, it always sees. What it picked becomes a page table of its own, as
in `ops.indexer.spec`.

**Exactness.** As there: what is rounded to 22 bits is multiplied and summed exactly. Before that all is computed in
float64, whose last bits, which may depend on where in a tensor a value stands, are gone then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.ops.attention.batch import Batch
from draftwing.ops.indexer.spec import Picks, Rows, by_position, chosen_of, parts_of, rounded, scores, table_of
from draftwing.ops.row_states.spec import ancestor_slots


class BlockIndex(NamedTuple):
    """topk: blocks that a query picks at most, each of `ratio` tokens.  norm [size] float32 or wider, eps: of the norm
    of keys."""

    topk: int
    ratio: int
    norm: Tensor
    eps: float

    @property
    def width(self) -> int:
        """Returns how many tokens a query attends to at most."""
        return self.topk * self.ratio + self.ratio - 1


def write_blocks(batch: Batch, kept: Tensor, keys: Tensor, turn: Tensor, blocks: BlockIndex) -> None:
    """Leaves what tokens keep, and the keys of blocks that end with one of them.

    batch: with `chunks` or a `path`.  kept [slots + 1, size + turned].  keys [M, size]; turn [M, turned]: cosines, then
    sines.
    """
    kept.index_copy_(0, batch.write_slots, torch.cat((keys, turn), 1).to(kept.dtype))
    before = ancestor_slots(batch, blocks.ratio - 1).flip(1)  # the first token of the block first
    members = kept[torch.cat((before, batch.write_slots.unsqueeze(1)), 1)]  # [M, ratio, size + turned]
    ends = (batch.positions + 1) % blocks.ratio == 0
    made = torch.where(ends.unsqueeze(1), _block_keys(members, blocks).to(kept.dtype), members[:, -1, : keys.shape[1]])
    kept.index_copy_(0, batch.write_slots, torch.cat((made, members[:, -1, keys.shape[1] :]), 1))


def block_picks(batch: Batch, kept: Tensor, q: Tensor, turn: Tensor, blocks: BlockIndex) -> Iterator[Picks]:
    """Gives what all queries pick, some queries at a time, behind `write_blocks`. q [M, heads, size], normed and not
    turned; turn [M, turned] of the queries."""
    heads = 1 << (q.shape[1] - 1).bit_length()
    q = rounded(_turned(q.double(), turn.double().unsqueeze(1)))
    q = F.pad(q, (0, 0, 0, heads - q.shape[1]))
    for part in parts_of(batch, heads, blocks.width):
        rows, count = part.lengths.shape
        found = _scores(part, batch.window, kept, q[part.queries].unflatten(0, (rows, count)), blocks)
        whole = part.lengths // blocks.ratio
        complete = torch.arange(found.shape[2], device=q.device) < whole.unsqueeze(2)
        found = found.nan_to_num(0.0, 0.0, 0.0).masked_fill_(~complete, -torch.inf)
        chosen = chosen_of(found, complete, blocks.topk).repeat_interleave(blocks.ratio, 2)
        position = torch.arange(part.slots.shape[1], device=q.device)
        attended = (position >= (whole * blocks.ratio).unsqueeze(2)) & (position < part.lengths.unsqueeze(2))
        attended[:, :, : chosen.shape[2]] |= chosen
        slots = by_position(part, None)[1]
        yield Picks(part.queries, *(x.flatten(0, 1) for x in table_of(attended, slots, blocks.width)))


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    """x [..., size], turn [..., turned] -> x, whose first `turned` elements are turned in pairs, of one of the first
    half and one of the second."""
    half = turn.shape[-1] // 2
    cos, sin = turn[..., :half], turn[..., half:]
    first, second = x[..., :half], x[..., half : 2 * half]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]), -1)


def _block_keys(members: Tensor, blocks: BlockIndex) -> Tensor:
    """members [M, ratio, size + turned]: what the tokens of blocks keep -> their keys, [M, size] float64, `rounded`."""
    size = blocks.norm.shape[0]
    total, *others = members[..., :size].double().unbind(1)
    for other in others:
        total = total + other
    mean = rounded(total / blocks.ratio)
    normed = mean / (mean.square().mean(-1, keepdim=True) + blocks.eps).sqrt() * blocks.norm.double()
    return rounded(_turned(normed, members[:, 0, size:].double()))


def _scores(part: Rows, window: int, kept: Tensor, q: Tensor, blocks: BlockIndex) -> Tensor:
    """Scores of blocks by their number on each query's path. window: entries behind the committed tokens that paths may
    name.  q [B, n, heads, size] -> [B, n, blocks] float64"""
    size, last = q.shape[3], part.slots.shape[1] - 1
    ends = (torch.arange((last + 1) // blocks.ratio, device=q.device) + 1) * blocks.ratio - 1
    slots = part.slots[:, ends]
    if part.prefix is not None:
        place = part.prefix.unsqueeze(1) + torch.arange(window, device=q.device)
        slots = torch.cat((slots, part.slots.gather(1, place.clamp(max=last))), 1)
    weights = q.new_ones(q.shape[:3])
    found = scores(q, weights, rounded(kept[slots][..., :size]))  # of the page table's blocks, then of nodes
    if part.path is None or part.prefix is None:
        return found
    step = (ends - part.prefix[:, None, None]).expand(*part.lengths.shape, -1)
    node = part.path.gather(2, step.clamp(0, part.path.shape[2] - 1))
    return found.gather(2, torch.where(step < 0, torch.arange(len(ends), device=q.device), len(ends) + node))
