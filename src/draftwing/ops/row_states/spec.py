"""Reading what layers keep of earlier tokens besides keys and values (`kv.pool.StateSpec`): by page tables and paths,
as attention reads keys. An entry depends on those of its ancestors alone, so trees, chunks and cached prefixes need no
more.

In plain torch, and capturable for trees. A layer whose speed matters has a kernel in place of `scan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from draftwing.kv.pool import RowStates
from draftwing.ops.attention.batch import Batch


def ancestor_slots(batch: Batch, count: int, step: int = 1) -> Tensor:
    """Returns the slots of the `count` tokens before each query, the nearest first, or of every `step`th alone, [M,
    count] int64; slot 0, which no text owns, where there are none. batch: with `chunks`, `query_rows` or a `path`."""
    back = torch.arange(1, count + 1, device=batch.rows.device) * step
    if batch.path is None or batch.path_len is None:
        rows = batch.query_rows
        if rows is None:
            rows = torch.cat([batch.rows[span.row].expand(span.length) for span in batch.chunks])
        rows, place = rows.unsqueeze(1), batch.positions.unsqueeze(1) - back
    else:
        rows = batch.rows[:, None, None]
        at = batch.path_len.unsqueeze(2) - 1 - back  # [B, Q, count] on the path; below 0: before the tree
        entry = torch.where(at >= 0, batch.path.gather(2, at.clamp(min=0)), at)
        place = batch.prefix_len[:, None, None] + entry
    slots = torch.where(place >= 0, batch.table[rows, place.clamp(min=0)].long(), 0)
    return slots.flatten(0, -2)


def scan(batch: Batch, kept: Tensor, update: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Makes each query's entry of that of the token before it, and writes it to the query's slot.

    kept: as `Attend.state` gives it.  update(before [m, *shape], queries [m] int64) -> [m, *shape]: the entries of some
    queries of the batch, `before` being zeros for the first token of a text; a row must have the same bits whatever is
    with it.  Returns the entries [M, *shape].
    """
    before = ancestor_slots(batch, 1).squeeze(1)
    for queries, slots in _levels(batch):
        slot = before[queries]
        given = torch.where(slot.view(-1, *[1] * (kept.dim() - 1)) > 0, kept[slot], 0)
        kept.index_copy_(0, slots, update(given, queries).to(kept.dtype))
    return kept[batch.write_slots]


def _levels(batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """Gives queries and where they write, those before which others stand after these. In a tree it is all queries at
    every level: those of other levels write to slot 0, so that no size depends on the tree."""
    everyone = torch.arange(len(batch.write_slots), device=batch.rows.device)
    if batch.path is None or batch.path_len is None:
        for step in range(max(span.length for span in batch.chunks)):
            here = [span.offset + step for span in batch.chunks if step < span.length]
            queries = torch.cat([everyone[at : at + 1] for at in here])  # nothing comes from the host
            yield queries, batch.write_slots[queries]
        return
    level = batch.path_len.flatten()
    for length in range(1, batch.path.shape[2] + 1):
        yield everyone, torch.where(level == length, batch.write_slots, 0)


class StateOps:
    """What the commit of a step does with states of rows."""

    lazy_states = False  # whether every second plain step leaves states as they are, see `kv.pool`

    def advance_states(self, states: RowStates, rows: Tensor, prefix_len: Tensor, nodes: int = 0) -> None:
        """Makes what a step of trees wrote of rows [B] what the next one reads: the states after their roots.
        prefix_len [B]: tokens before these; of a prefill's chunk, all but its last. nodes: of each tree; 0: of
        chunks."""
        states.advance(rows, prefix_len + 1, nodes)
