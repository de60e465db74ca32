"""What makes it free not to draft: a drafter with KV sees text when it is wanted, not at every step and every chunk.

A step without drafts of a model keeps what the drafter will need (`keep`): how far it is behind in each row, and the
target's auxiliary hidden states of these positions. To catch up is one pass of the drafter over all that it has not
seen of several rows, as over an accepted path (`catch_up`). The host knows bounds of the backlog and says when
(`sched.draft_backlog`).

Of the chunks of a prompt the same is kept (`defer`), of as many positions as there are places for, which the host gives
out. Their lengths the host knows: they are shown as a prefill is. So is any text that the host knows to a drafter which
needs tokens alone.

On a CPU hidden states are kept as KV is, of every token that the target has run over, in the slot that it was written
to (`keep_by_slot`). They move with the slot: into a row's accepted path, into the radix tree and to whoever goes on
from there. So the drafter can be shown any text there, too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from draftwing.config.trees import TreeShape
from draftwing.core import MAX_BACKLOG, NO_DEFERRAL, Chunk, DraftChunk, DraftDeferral, DraftExtend, IntArray
from draftwing.engine.devices.base import Device
from draftwing.engine.image_features import ImageFeatures
from draftwing.engine.row_table import RowTable
from draftwing.kv.pool import zeros_as_written
from draftwing.ops.attention.batch import Batch, spans_of
from draftwing.ops.table import TorchOps
from draftwing.ops.types import Unseen
from draftwing.spec.drafter import Drafter, SeenTokens

ROOM = MAX_BACKLOG + 1  # page-table entries past those of a step that a pass over unseen text may name
WIDTHS = (2, 8, 16, MAX_BACKLOG)  # positions of a row in one pass, where kernels are compiled for each
MAX_QUERIES = 4096  # of one pass
PROMPTS = 4  # of which parts may be deferred to a pass as long as any
DEFERRED = 2048  # positions of a pass over a prompt through one layer, for which requests that decode wait
MIN_PREFILL = 1024  # the same through several: fewer are not worth what a pass takes at least
PARTS = (1, 2, 16)  # of a pass over texts: kernels are compiled for one, for a multiple of 16 and for others


class DraftKVBacklog:
    def __init__(
        self,
        drafter: Drafter,
        table: RowTable,
        ops: TorchOps,
        width: int,
        dtype: torch.dtype,
        deferral: DraftDeferral = NO_DEFERRAL,
        sizes: Sequence[int] = (),
        slots: int = 0,
        images: ImageFeatures | None = None,
    ) -> None:
        """width: of the target's auxiliary hidden states, 0 for none; dtype: of them.  deferral: of prompts.  sizes:
        numbers of rows that are tried before the first request, ascending; for others libraries would load kernels
        while somebody waits.  slots: of the pool.  images: in prompts."""
        assert drafter.kv_layers
        self._drafter, self._table, self._ops, self._images = drafter, table, ops, images
        rows, device = table.rows + 1, table.kv_len.device
        self.by_slot = deferral.by_slot
        self._slots = zeros_as_written((slots + 1, width), dtype, device) if self.by_slot and width else None  # [S, T]
        self._unseen = Unseen(
            behind=torch.zeros(rows, dtype=torch.int64, device=device),
            hidden=zeros_as_written((rows, MAX_BACKLOG, width), dtype, device)
            if width and not self.by_slot
            else table.floats.new_empty(rows, MAX_BACKLOG, 0),
        )
        self._deferral, places, self._sizes = deferral, deferral.places, sizes
        self._prompts = zeros_as_written((places, width), dtype, device) if width and places else None

    def skips_extend(self, shape: TreeShape) -> bool:
        """Returns whether the drafter does not see a step of this shape."""
        return self._drafter.skips_extend(shape)

    @staticmethod
    def deferral(drafter: Drafter | None, device: Device, max_pass: int) -> DraftDeferral:
        """Returns how much of prompts a drafter sees later than the target. max_pass: positions for which there
        is memory.

        A GPU reads the drafter's weights once for each pass, launches it, and has hardly more to do for a chunk than
        for a token. A CPU has no such cheap positions. There a drafter sees each chunk while it is in the caches, or,
        where nothing is drafted, none: memory for hidden states is cheap, work is not."""
        if drafter is None or not drafter.kv_layers:
            return NO_DEFERRAL
        if not drafter.from_tokens:  # a small model is launched for longer than it needs for a thousand positions
            max_pass = min(max_pass, max(DEFERRED // len(drafter.kv_layers), MIN_PREFILL))
        if not device.has_own_memory:
            # With more layers than one to look ahead, what it knows of a text lies with the row, too.
            return (
                DraftDeferral(0, max_pass, by_slot=True)
                if drafter.aux_layers and drafter.lookahead <= 1
                else NO_DEFERRAL
            )
        return DraftDeferral(PROMPTS * max_pass, max_pass, drafter.from_tokens)

    @staticmethod
    def bytes_of(rows: int, width: int, dtype: torch.dtype, places: int) -> int:
        """Returns the bytes that it takes; rows: of the row table, its dummy included."""
        return rows * (MAX_BACKLOG * width * dtype.itemsize + 8) + places * width * dtype.itemsize

    def keep_by_slot(self, slots: Tensor, hidden: Tensor | None) -> None:
        """Keeps hidden states [M, T] of queries of the target by their write slots [M]."""
        if self._slots is not None:
            assert hidden is not None
            self._ops.put_rows(self._slots, slots, hidden)

    @property
    def tensors(self) -> list[Tensor]:
        """Returns what it keeps by KV slot, which is the first axis."""
        return [] if self._slots is None else [self._slots]

    def clear(self, slots: Tensor) -> None:
        """Zeroes the hidden states of these slots [n]."""
        if self._slots is not None:
            self._slots.index_fill_(0, slots, 0)

    def keep(self, rows: Tensor, before: Tensor, count: Tensor, hidden: Tensor | None, nodes: Tensor | None) -> None:
        """Keeps states of a step that the drafter does not see, which has committed count [B] positions of rows [B],
        from before [B] on. hidden [M, T]: of the step's queries; nodes [B * Q]: the query of each position, None where
        Q = 1 and M = B."""
        if self._slots is not None:
            hidden = nodes = None
        self._ops.keep_unseen(self._unseen, rows, before, count, hidden, nodes)

    def defer(self, chunks: Sequence[Chunk], hidden: Tensor | None) -> None:
        """Takes a prefill that has run over the chunks; hidden [M, T]: of their queries. Keeps those that are to be
        kept."""
        if self._prompts is None:
            return
        assert hidden is not None
        for chunk, span in zip(chunks, spans_of(chunks), strict=True):
            if chunk.kept is not None:
                self._prompts[chunk.kept : chunk.kept + span.length] = hidden[span.offset : span.offset + span.length]

    def reset(self, rows: Tensor, behind: int = 0) -> None:
        """Notes that the drafter has seen all of these rows [B] but the newest positions, so many."""
        self._unseen.behind.index_fill_(0, rows, behind)

    def catch_up(self, who: DraftExtend, noisy: IntArray, drafts: bool) -> None:
        """Shows the drafter what it has not seen. noisy: rows with a temperature.  drafts: whether it proposes next."""
        self.see(who.texts)
        if not len(who.rows):
            return
        width = who.behind if self._ops.can_record else next(width for width in WIDTHS if width >= who.behind)
        count, upload = min((MAX_QUERIES // width, *self._sizes[-1:])), self._table.device.upload
        for first in range(0, len(who.rows), count):
            rows = self._padded(who.rows[first : first + count])
            self._extend(upload(rows), upload(np.flatnonzero(np.isin(rows, noisy))), width, who.max_kv_len, drafts)

    def _padded(self, rows: IntArray) -> IntArray:
        """Fills the rows up to the next of the sizes with the dummy row."""
        at = bisect_left(self._sizes, len(rows))
        if at == len(self._sizes) or self._sizes[at] == len(rows):
            return rows
        padded = np.full(self._sizes[at], self._table.rows, np.int64)
        padded[: len(rows)] = rows
        return padded

    def warm_up(self) -> None:
        """Runs everything that `catch_up` may run, on the dummy row: how kernels cut their work, and which of them a
        library takes, depends on the number of rows."""
        if self._deferral.places:
            length = min(self._deferral.most, self._table.length - 1)
            for parts in PARTS if self._deferral.from_tokens else PARTS[:1]:
                self.see([DraftChunk(self._table.rows, 0, max(length // parts, 1), 0)] * parts)
        for count, width in product(self._sizes, WIDTHS):
            self.catch_up(
                DraftExtend(np.full(count, self._table.rows, np.int64), width, 0), np.empty(0, np.int64), True
            )

    def see(self, parts: Sequence[DraftChunk]) -> None:
        """Shows the drafter texts, of each row in order, and several parts in one pass where they fit into one."""
        together: list[DraftChunk] = []
        for part in parts:
            if together and sum(one.length for one in together) + part.length > self._deferral.most:
                self._see(together)
                together = []
            together.append(part)
        if together:
            self._see(together)

    def _see(self, parts: Sequence[DraftChunk]) -> None:
        """Parts that are not the last of a prompt, as `Drafter.extend` sees chunks. Nothing here is a view of the row
        table: Triton compiles a kernel once more for addresses that are no multiple of 16 bytes."""
        table, upload, kept = self._table, self._table.device.upload, self._prompts
        starts = np.asarray([part.start for part in parts])
        lengths = np.asarray([part.length for part in parts])
        rows, prefix_len = upload(np.asarray([part.row for part in parts])), upload(starts)  # [P]
        row_of = upload(np.repeat([part.row for part in parts], lengths))  # [M]
        at = upload(np.concatenate([np.arange(part.start, part.start + part.length) for part in parts]))  # [M]
        batch = Batch(
            rows, table.tokens_at(row_of, at), at, table.slots_at(row_of, at), table.page_table, prefix_len,
            chunks=spans_of([Chunk(part.row, part.start, part.length, False) for part in parts]),
            bound=int((starts + lengths).max()),
        )  # fmt: skip
        if self._images is not None:
            batch = self._images.of_texts(parts, batch)
        aux_hidden = None if kept is None else torch.cat([kept[part.at : part.at + part.length] for part in parts])
        if self._slots is not None:
            aux_hidden = self._ops.take_rows(self._slots, batch.write_slots)
        if table.heads is not None:
            self._drafter.beside_adapters(True)  # nobody has counted whose rows these are
        self._drafter.catch_up(
            SeenTokens(table, batch, aux_hidden, table.tokens_at(row_of, at + 1), None, rows[:0]), False
        )
        # What comes after the parts is all that it has not seen of these rows.
        after = table.kv_len.index_select(0, rows) - (prefix_len + upload(lengths))
        behind = self._unseen.behind
        behind.index_copy_(0, rows, torch.minimum(behind.index_select(0, rows), after.clamp(min=0)))

    def _extend(self, rows: Tensor, noisy: Tensor, width: int, bound: int, drafts: bool) -> None:
        table, drafter, (behind, hidden) = self._table, self._drafter, self._unseen
        column, kv_len = rows.unsqueeze(1), table.kv_len.index_select(0, rows)
        start = (kv_len - behind.index_select(0, rows)).clamp(min=0)  # the dummy row has no text
        # Queries past the newest position write to the dummy slot: what stands there in the page table is nobody's, or
        # another request's.
        past = kv_len.unsqueeze(1) + (drafter.tail + table.steps[: width + 1])  # [B, width + 1]
        entries = table.page_table[column, past]
        table.page_table.index_put_((column, past), torch.zeros_like(entries))
        at = start.unsqueeze(1) + table.steps[:width]  # [B, Q]
        chain, aux_hidden = self._ops.chain(table, rows, start, width), None
        if self._slots is not None:
            aux_hidden = self._ops.take_rows(self._slots, chain.write_slots)
        elif hidden.shape[2]:
            aux_hidden = self._ops.take_rows(hidden.flatten(0, 1), (column * MAX_BACKLOG + at % MAX_BACKLOG).flatten())
        batch = Batch(
            rows, chain.ids, chain.positions, chain.write_slots, table.page_table, start, chain.path, chain.path_len,
            window=width, bound=min(bound + width + 1, table.length),
        )  # fmt: skip
        count = (kv_len - start).clamp(min=1)
        next_ids = table.tokens_at(column, at + 1).flatten()
        if table.heads is not None:
            drafter.beside_adapters(True)
        drafter.catch_up(SeenTokens(table, batch, aux_hidden, next_ids, count, noisy), drafts)
        table.page_table.index_put_((column, past), entries)
        self.reset(rows)
