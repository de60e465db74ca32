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
    counts: Tensor  # [n] int64: how many there are


class _Row(NamedTuple):
    """Queries that share a row of the batch, and what they see."""

    queries: slice
    slots: Tensor  # [L] int64: of the row's page table
    lengths: Tensor  # [n] int64: tokens on each query's path
    prefix: Tensor | None = None  # [] int64, of a tree: committed tokens
    path: Tensor | None = None  # [n, D] int64, as `Batch.path`


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
    for row in _rows(batch):
        keys = rounded(kept[row.slots])  # [L, size]
        count = len(row.lengths)
        each = max(1, min(_SCORES // (q.shape[1] * len(keys)), _PICKED // topk))
        for first in range(0, count, each):
            here = slice(first, min(first + each, count))
            queries = slice(row.queries.start + here.start, row.queries.start + here.stop)
            found = scores(q[queries], weights[queries], keys)
            slots, seen, found = _by_position(row, here, found)
            yield Picks(queries, *_best(found, seen, slots, topk))


def one_by_one(batch: Batch, picked: Picks) -> Batch:
    """Returns a batch of these queries as rows of their own, whose texts are what they picked."""
    one = picked.counts.new_ones(len(picked.counts), 1)
    return Batch(
        rows=torch.arange(len(one), device=one.device), ids=batch.ids[picked.queries],
        positions=batch.positions[picked.queries], write_slots=batch.write_slots[picked.queries],
        table=picked.table.to(batch.table.dtype), prefix_len=picked.counts - 1, path=one.unsqueeze(2) - 1, path_len=one,
        window=1, bound=picked.table.shape[1],
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
    """q [n, heads, size], keys [L, size], both `rounded`; weights [n, heads] float64, heads a power of two -> [n, L]:
    sums over heads of weight * relu(q . key)."""
    made = (q.flatten(0, 1) @ keys.T).view(*weights.shape, len(keys))
    # In float32, so that products with weights are exact, too: it does not matter whether they are fused with sums.
    made = made.clamp_(min=0).float().double().mul_(weights.unsqueeze(2))
    while made.shape[1] > 1:
        half = made.shape[1] // 2
        made = made[:, :half].add_(made[:, half:])
    return made[:, 0]


def _rows(batch: Batch) -> Iterator[_Row]:
    pages = batch.pages()
    for span in batch.chunks:
        end = span.start + span.length
        lengths = torch.arange(span.start + 1, end + 1, device=pages.device)
        yield _Row(slice(span.offset, span.offset + span.length), pages[span.row, :end], lengths)
    if batch.chunks:
        return
    assert batch.path is not None and batch.path_len is not None, "prompts come as the host's chunks"
    nodes = batch.path.shape[1]
    for b, slots in enumerate(pages.unbind()):
        prefix = batch.prefix_len[b]
        yield _Row(slice(b * nodes, (b + 1) * nodes), slots, prefix + batch.path_len[b], prefix, batch.path[b])


def _by_position(row: _Row, here: slice, found: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """found [n, L]: scores of the queries `here` by entries of the page table -> slots [n, L], whether the query sees
    it [n, L], and scores [n, L], by position on the path."""
    position = torch.arange(len(row.slots), device=found.device)
    seen = position < row.lengths[here].unsqueeze(1)
    if row.path is None or row.prefix is None:
        return row.slots.expand_as(seen), seen, found
    step = (position - row.prefix).expand_as(seen)
    entry = row.prefix + row.path[here].gather(1, step.clamp(0, row.path.shape[1] - 1))
    entry = torch.where(step < 0, position, entry).clamp(max=len(position) - 1)
    return row.slots[entry], seen, found.gather(1, entry)


def _best(found: Tensor, seen: Tensor, slots: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Scores, whether they count, and slots, each [n, L] by position -> table and counts of `Picks`."""
    found = found.nan_to_num(0.0).masked_fill_(~seen, -torch.inf)
    count = min(topk, found.shape[1])
    least = found.topk(count, 1, sorted=False).values.amin(1, keepdim=True)
    above, equal = found > least, (found == least) & seen
    chosen = above | (equal & (equal.cumsum(1) <= count - above.sum(1, keepdim=True)))
    place = torch.where(chosen, chosen.cumsum(1) - 1, topk)  # one more column for those that were not
    table = slots.new_zeros(len(found), topk + 1).scatter_(1, place, slots)
    return table[:, :topk].contiguous(), chosen.sum(1)
