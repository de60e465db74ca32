"""Picks of an indexer (DeepSeek sparse attention, arXiv 2512.02556): which earlier tokens a query attends to.

**Path of the data.** An indexer's key of a token lies in the token's slot, beside what attention keeps
(`KVSpec.index_size`, `KVPool.index`). So prefix cache, preemption and trees need nothing more: keys are found by page
tables and paths. Each query scores all tokens on its path, itself among them, and picks the `topk` best. What it picked
becomes a page table of its own, of their slots in order of positions, and attention reads that as the whole context of
one row (`PickedAttend`): a step, a tree and a chunk of a prompt are the same to it, and every backend's kernels serve.
Where no query sees more than `topk` tokens, attention reads the batch as it is: a row has the same bits so.

**Exactness.** Picks must not depend on what else is in a batch, so scores are the same bits however they are asked for.
Elements of queries and keys are rounded to 22 bits below the row's largest power of two. Sums of their products are
then exact in float64, in any order and on any device: no more is asked of a library's product. Heads are weighted,
exactly again, and summed in float64, pairwise, in one fixed order. Of equal scores the earlier token is picked.

Devices may have a kernel in its place, whose sums have the same bits however they are asked for, but others than here.

Factors that all scores of a query share change no pick and are left out, and so is the Hadamard transform, which
queries and keys have in common: products are the same without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.ops.attention.batch import Batch

MOST_SIZE = 512  # elements of a key: a sum of more products is not exact
_BITS = 22  # of a rounded element; 2 * 22 bits of a product, and 9 of so many in a sum, are those of float64
_SCORES = 1 << 24  # of heads that are computed at once
_PICKED = 1 << 17  # slots that are picked at once: plain attention copies what they hold


class Picks(NamedTuple):
    """What n queries picked."""

    queries: slice  # of the batch
    table: Tensor  # [n, topk] int64: slots, in order of positions
    last: Tensor  # [n] int64: how many there are but one


class Rows(NamedTuple):
    """Rows of the batch whose queries see as many tokens at most, and what they see."""

    queries: slice
    slots: Tensor  # [B, L] int64: of the rows' page tables
    lengths: Tensor  # [B, n] int64: tokens on each query's path
    prefix: Tensor | None = None  # [B] int64, of trees: committed tokens
    path: Tensor | None = None  # [B, n, D] int64, as `Batch.path`

    def some(self, rows: slice, of: slice) -> Rows:
        """Returns some queries of each of some rows: of all rows, or of one."""
        first, (_, count) = self.queries.start + rows.start * self.lengths.shape[1], self.lengths.shape
        first, last = first + of.start, first + (rows.stop - rows.start - 1) * count + of.stop
        parts = self.slots[rows], self.lengths[rows, of]
        if self.prefix is None or self.path is None:
            return Rows(slice(first, last), *parts)
        return Rows(slice(first, last), *parts, self.prefix[rows], self.path[rows, of])


def most_seen(batch: Batch) -> int:
    """Returns tokens that a query sees at most, as far as the host knows."""
    if batch.chunks:
        return max(span.start + span.length for span in batch.chunks)
    return batch.bound or batch.table.shape[1]


def picks(batch: Batch, kept: Tensor, q: Tensor, weights: Tensor, topk: int) -> Iterator[Picks]:
    """Gives what all queries pick, some queries at a time.

    batch: with `chunks` or a `path`.  kept [slots + 1, size]: keys, those of the batch among them.  q [M, heads, size];
    weights [M, heads] float32: of heads.  topk: tokens that a query attends to at most.
    """
    heads = q.shape[1]
    padding = (1 << (heads - 1).bit_length()) - heads
    q, weights = F.pad(rounded(q), (0, 0, 0, padding)), F.pad(weights.double(), (0, padding))
    for part in parts_of(batch, q.shape[1], topk):
        rows, count = part.lengths.shape
        keys = rounded(kept[part.slots])  # [B, L, size]
        found = scores(q[part.queries].unflatten(0, (rows, count)), weights[part.queries].view(rows, count, -1), keys)
        yield Picks(part.queries, *(x.flatten(0, 1) for x in _best(part, found, topk)))


def rows_of_one(like: Tensor) -> tuple[Tensor, ...]:
    """Returns rows, paths and their lengths of queries that are rows of their own. like [n] int64"""
    one = torch.ones_like(like).unsqueeze(1)
    return torch.arange(len(like), device=like.device), one.unsqueeze(2) - 1, one


def one_by_one(batch: Batch, picked: Picks, alone: tuple[Tensor, ...]) -> Batch:
    """Returns a batch of these queries as rows of their own, whose texts are what they picked. alone: see
    `rows_of_one`."""
    rows, path, path_len = alone
    return Batch(
        rows=rows, ids=batch.ids[picked.queries], positions=batch.positions[picked.queries],
        write_slots=batch.write_slots[picked.queries], table=picked.table.to(batch.table.dtype),
        prefix_len=picked.last, path=path, path_len=path_len, window=1, bound=picked.table.shape[1],
    )  # fmt: skip


def rounded(x: Tensor) -> Tensor:
    """x [..., n] -> [..., n] float64: multiples of 2^-22 of twice the largest power of two that no row's maximum is
    below."""
    x = x.double()
    most = x.abs().amax(-1, keepdim=True)
    power = (most.view(torch.int64) & 0x7FF0_0000_0000_0000).view(torch.float64)
    shift = power * (3.0 * 2.0 ** (52 - _BITS))  # beside which what is finer has no room
    return (x + shift) - shift


def scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """q [.., n, heads, size], keys [.., L, size], both `rounded`; weights [.., n, heads] float64, heads a power of two
    -> [.., n, L]: sums over heads of weight * relu(q . key)."""
    made = (q.flatten(-3, -2) @ keys.mT).view(*weights.shape, keys.shape[-2])
    # In float32, so that products with weights are exact, too: it does not matter whether they are fused with sums.
    made = made.clamp_(min=0).float().double().mul_(weights.unsqueeze(-1))
    while made.shape[-2] > 1:
        half = made.shape[-2] // 2
        made = made[..., :half, :].add_(made[..., half:, :])
    return made[..., 0, :]


def _rows(batch: Batch) -> Iterator[Rows]:
    pages = batch.pages()
    for span in batch.chunks:
        end = span.start + span.length
        lengths = torch.arange(span.start + 1, end + 1, device=pages.device)
        queries, row = slice(span.offset, span.offset + span.length), slice(span.row, span.row + 1)
        yield Rows(queries, pages[row, :end], lengths[None])
    if batch.chunks:
        return
    assert batch.path is not None and batch.path_len is not None, "prompts come as the host's chunks"
    lengths = batch.prefix_len.unsqueeze(1) + batch.path_len
    yield Rows(slice(0, lengths.numel()), pages, lengths, batch.prefix_len, batch.path)


def parts_of(batch: Batch, heads: int, topk: int) -> Iterator[Rows]:
    """Yields as many queries at a time as there is room for."""
    for rows in _rows(batch):
        batches, count = rows.lengths.shape
        queries = max(1, min(_SCORES // (heads * rows.slots.shape[1]), _PICKED // topk))
        each, some = max(1, queries // count), min(queries, count)  # rows, and queries of one where there are more
        for row in range(0, batches, each):
            for query in range(0, count, some):
                yield rows.some(slice(row, min(row + each, batches)), slice(query, min(query + some, count)))


def by_position(part: Rows, found: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """found [B, n, L]: scores by entries of the page tables, if any -> scores and slots, each [B, n, L], by position on
    the path."""
    length = part.slots.shape[1]
    position = torch.arange(length, device=part.slots.device)
    slots = part.slots.unsqueeze(1).expand(*part.lengths.shape, length)
    if part.path is None or part.prefix is None:
        return found, slots
    step = (position - part.prefix[:, None, None]).expand_as(slots)
    entry = part.prefix[:, None, None] + part.path.gather(2, step.clamp(0, part.path.shape[2] - 1))
    entry = torch.where(step < 0, position, entry).clamp(max=length - 1)
    return None if found is None else found.gather(2, entry), slots.gather(2, entry)


def _best(part: Rows, found: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """found [B, n, L]: scores by entries of the page tables -> table and `last` of `Picks`."""
    ordered, slots = by_position(part, found)
    assert ordered is not None
    seen = torch.arange(found.shape[2], device=found.device) < part.lengths.unsqueeze(2)
    ordered = ordered.nan_to_num(0.0, 0.0, 0.0).masked_fill_(~seen, -torch.inf)
    return table_of(chosen_of(ordered, seen, topk), slots, topk)


def chosen_of(found: Tensor, seen: Tensor, topk: int) -> Tensor:
    """found, seen [B, n, L]: scores, and which of them count -> which are chosen: the `topk` best, of equal ones the
    earlier."""
    count = min(topk, found.shape[2])
    if not count:
        return seen
    least = found.topk(count, 2, sorted=False).values.amin(2, keepdim=True)
    above, equal = (found > least) & seen, (found == least) & seen
    return above | (equal & (equal.cumsum(2) <= count - above.sum(2, keepdim=True)))


def table_of(chosen: Tensor, slots: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """chosen, slots [B, n, L]: at most `width` are -> table and `last` of `Picks`."""
    place = torch.where(chosen, chosen.cumsum(2) - 1, width)  # one more column for those that were not
    table = slots.new_zeros(*slots.shape[:2], width + 1).scatter_(2, place, slots)
    return table[..., :width].contiguous(), (chosen.sum(2) - 1).clamp_(min=0)
