"""What makes it free not to draft: a drafter with KV sees text when it is wanted, not at every step and every chunk.

A step without drafts of a model keeps what the drafter will need (`keep`): how far it is behind in each row, and the
target's auxiliary hidden states of these positions. To catch up is one pass of the drafter over all that it has not
seen of several rows, as over an accepted path (`catch_up`). The host knows bounds of the lag and says when
(`sched.lag`).

Of the chunks of a prompt the same is kept (`defer`), of as many positions as there are places for, which the host gives
out. Their lengths the host knows: they are shown as a prefill is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from draftwing.core import AT_ONCE, LAG, NOBODY, CatchUp, Chunk, Deferral, Deferred, IntArray, TreeShape
from draftwing.engine.device import Device
from draftwing.engine.row_table import RowTable
from draftwing.kv.pool import zeros_as_written
from draftwing.ops.attention import Batch, spans_of
from draftwing.ops.torch.ops import TorchOps
from draftwing.ops.types import Unseen
from draftwing.spec.drafter import Drafter

ROOM = LAG + 1  # page-table entries past those of a step that a pass over unseen text may name
COUNTS = (1, 2, 16)  # of rows: kernels are compiled for one, for a multiple of 16 and for others
WIDTHS = (2, 8, 16, LAG)  # positions of a row in one pass, where kernels are compiled for each
MOST_QUERIES = 4096  # of one pass
PROMPTS = 4  # of which parts may be deferred to a pass as long as any
DEFERRED = 2048  # positions of a pass over a prompt through one layer, for which requests that decode wait
LEAST = 1024  # the same through many: fewer are not worth what a pass takes at least


class Lag:
    def __init__(
        self,
        drafter: Drafter,
        table: RowTable,
        ops: TorchOps,
        width: int,
        dtype: torch.dtype,
        deferral: Deferral = AT_ONCE,
    ) -> None:
        """width: of the target's auxiliary hidden states, 0 for none; dtype: of them.  deferral: of prompts."""
        assert drafter.kv_layers
        self._drafter, self._table, self._ops = drafter, table, ops
        rows, device = table.rows + 1, table.kv_len.device
        self._unseen = Unseen(
            behind=torch.zeros(rows, dtype=torch.int64, device=device),
            hidden=zeros_as_written((rows, LAG, width), dtype, device)
            if width
            else table.floats.new_empty(rows, LAG, 0),
        )
        self._deferral, places = deferral, deferral.places
        self._prompts = zeros_as_written((places, width), dtype, device) if width and places else None

    def lags(self, shape: TreeShape) -> bool:
        """Whether the drafter does not see a step of this shape."""
        return self._drafter.lags(shape)

    @staticmethod
    def deferral(drafter: Drafter | None, device: Device, most: int) -> Deferral:
        """Returns how much of prompts a drafter sees later than the target. most: positions of a pass for which there
        is memory.

        A GPU reads the drafter's weights once for each pass, launches it, and has hardly more to do for a chunk than
        for a token. A CPU has no such cheap positions, so there the drafter sees each chunk while it is in the
        caches."""
        if drafter is None or not drafter.kv_layers or not device.has_own_memory:
            return AT_ONCE
        most = min(most, max(DEFERRED // len(drafter.kv_layers), LEAST))
        return Deferral(PROMPTS * most, most, drafter.from_tokens)

    @staticmethod
    def bytes_of(rows: int, width: int, dtype: torch.dtype, places: int) -> int:
        """Returns the bytes that it takes; rows: of the row table, its dummy included."""
        return rows * (LAG * width * dtype.itemsize + 8) + places * width * dtype.itemsize

    def keep(self, rows: Tensor, before: Tensor, count: Tensor, hidden: Tensor | None, nodes: Tensor | None) -> None:
        """A step that the drafter does not see has committed count [B] positions of rows [B], from before [B] on.
        hidden [M, T]: of the step's queries; nodes [B * Q]: the query of each position, None where Q = 1 and M = B."""
        self._ops.keep_unseen(self._unseen, rows, before, count, hidden, nodes)

    def defer(self, chunks: Sequence[Chunk], hidden: Tensor | None) -> None:
        """A prefill has run over the chunks; hidden [M, T]: of their queries. Keeps those that are to be kept."""
        if self._prompts is None:
            return
        assert hidden is not None
        for chunk, span in zip(chunks, spans_of(chunks), strict=True):
            if chunk.kept is not None:
                self._prompts[chunk.kept : chunk.kept + span.length] = hidden[span.offset : span.offset + span.length]

    def reset(self, rows: Tensor) -> None:
        """The drafter has seen all of these rows [B]."""
        self._unseen.behind.index_fill_(0, rows, 0)

    def catch_up(self, who: CatchUp, noisy: IntArray, drafts: bool) -> None:
        """Shows the drafter what it has not seen. noisy: rows with a temperature.  drafts: whether it proposes next."""
        self.see(who.prompts)
        if not len(who.rows):
            return
        width = who.behind if self._ops.records_calls else next(width for width in WIDTHS if width >= who.behind)
        most, upload = MOST_QUERIES // width, self._table.device.upload
        for first in range(0, len(who.rows), most):
            rows = who.rows[first : first + most]
            self._extend(upload(rows), upload(np.flatnonzero(np.isin(rows, noisy))), width, who.max_kv_len, drafts)

    def warm_up(self) -> None:
        """Runs everything that `catch_up` may run, on the dummy row."""
        if self._deferral.places:
            most = min(self._deferral.most, self._table.length - 1)
            self.catch_up(CatchUp(NOBODY, 0, 0, (Deferred(self._table.rows, 0, most, 0),)), NOBODY, False)
        for count, width in product(COUNTS, WIDTHS):
            self.catch_up(CatchUp(np.full(count, self._table.rows, np.int64), width, 0), np.empty(0, np.int64), True)

    def see(self, parts: Sequence[Deferred]) -> None:
        """Shows the drafter what was deferred of prompts."""
        for part in parts:
            self._see(part)

    def _see(self, part: Deferred) -> None:
        """A part of a prompt that is not the last, as `Drafter.extend` sees a chunk. Nothing here is a view of the row
        table: Triton compiles a kernel once more for addresses that are no multiple of 16 bytes."""
        table, (row, start, length, at) = self._table, part
        here, end = slice(start, start + length), start + length
        rows = self._table.device.upload(np.asarray([row]))
        batch = Batch(
            rows, table.tokens[row, here].clone(), table.steps[here].clone(), table.page_table[row, here].clone(),
            table.page_table, table.steps[start : start + 1].clone(),
            chunks=spans_of([Chunk(row, start, length, False)]), bound=end,
        )  # fmt: skip
        aux_hidden = None if self._prompts is None else self._prompts[at : at + length]
        next_ids = table.tokens[row, start + 1 : end + 1].clone()
        self._drafter.catch_up(table, batch, aux_hidden, next_ids, None, rows[:0], False)

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
        aux_hidden = None
        if hidden.shape[2]:
            aux_hidden = self._ops.take_rows(hidden.flatten(0, 1), (column * LAG + at % LAG).flatten())
        chain = self._ops.chain(table, rows, start, width)
        batch = Batch(
            rows, chain.ids, chain.positions, chain.write_slots, table.page_table, start, chain.path, chain.path_len,
            window=width, bound=min(bound + width + 1, table.length),
        )  # fmt: skip
        count = (kv_len - start).clamp(min=1)
        drafter.catch_up(table, batch, aux_hidden, table.tokens[column, at + 1].flatten(), count, noisy, drafts)
        table.page_table.index_put_((column, past), entries)
        self.reset(rows)
