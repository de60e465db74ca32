"""A drafter's work around its head in C (ops/cpu/csrc/tree.c and sampling.c): integers and scores as in torch, bit for
bit, noise aside."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from draftwing.config.trees import TreeShape
from draftwing.ops.cpu.arguments import empty_draft, ints, with_rows
from draftwing.ops.cpu.extension import DTYPES, MAX_TOPK
from draftwing.ops.cpu.runtime import CpuRuntime
from draftwing.ops.expansion.spec import ExpansionOps, capacity
from draftwing.ops.rows.spec import RowOps
from draftwing.ops.sampling.cpu import CpuLogitEditor, CpuSamplingOps
from draftwing.ops.types import (
    BlockInputs,
    Chain,
    Continuations,
    Draft,
    Edits,
    Expansion,
    First,
    Level,
    LevelRows,
    NoiseKey,
    RowTensors,
    Unseen,
)


@functools.cache
def _levels(batch: int, width: int, first: int, levels: int) -> Tensor:
    """Returns which rows `of_levels` takes; kept, for what is recorded makes no such tensor again."""
    row = torch.arange(batch) * width
    return (row + torch.arange(first, first + levels).unsqueeze(1)).flatten()


@functools.cache
def _repeated(count: int, times: int) -> Tensor:
    """Returns which rows `repeat_rows` takes."""
    return torch.arange(count).repeat_interleave(times)


class CpuExpansionOps(ExpansionOps):
    """Overrides all of `ExpansionOps`."""

    def __init__(self, runtime: CpuRuntime, sampling: CpuSamplingOps, rows: RowOps) -> None:
        super().__init__(sampling)
        self.raw, self.workers = runtime.raw, runtime.workers
        self._sampler, self._rows = sampling, rows

    def chain(self, table: RowTensors, rows: Tensor, prefix: Tensor, width: int) -> Chain:
        batch, rows, prefix = rows.shape[0], rows.contiguous(), prefix.contiguous()
        ids, positions, write_slots = ints(batch * width), ints(batch * width), ints(batch * width)
        path_len, path = ints(batch, width), ints(batch, width, width)
        self.raw.line(
            table.tokens, table.page_table, table.length, None, None, rows, batch, width, 0, ids, positions,
            write_slots, prefix, path, path_len,
        )  # fmt: skip
        return Chain(ids, positions, write_slots, path, path_len)

    def keep_unseen(
        self, unseen: Unseen, rows: Tensor, prefix_len: Tensor, count: Tensor, hidden: Tensor | None,
        nodes: Tensor | None,
    ) -> None:  # fmt: skip
        batch, rows, prefix_len, count = rows.shape[0], rows.contiguous(), prefix_len.contiguous(), count.contiguous()
        kept, steps, size = unseen.hidden, 1, 0
        if hidden is not None:
            hidden = with_rows(hidden)
            assert kept.is_contiguous() and hidden.shape[1] == kept.shape[2] and hidden.dtype == kept.dtype
            size = hidden.stride(0) * hidden.element_size()
        if nodes is not None:
            nodes, steps = nodes.contiguous(), nodes.shape[0] // batch
        self.raw.keep_unseen(
            unseen.behind, kept, kept.shape[1], kept.shape[2] * kept.element_size(), rows, batch, prefix_len, count,
            hidden, size, nodes, steps,
        )  # fmt: skip

    def newest_rows(self, hidden: Tensor, count: Tensor, lookahead: int, rows: Tensor, kept: Tensor | None) -> Tensor:
        batch, width = rows.shape[0], hidden.shape[1]
        newest, rows, count = hidden.new_empty(batch, width), rows.contiguous(), count.contiguous()
        hidden, size = with_rows(hidden), hidden.element_size()
        assert kept is None or (kept.shape[1] == width and kept.is_contiguous() and kept.dtype == hidden.dtype)
        self.raw.newest(
            newest, hidden, hidden.stride(0) * size, width * size, count, lookahead, hidden.shape[0] // batch, rows,
            batch, kept,
        )  # fmt: skip
        return newest

    def block_inputs(self, table: RowTensors, rows: Tensor, width: int, mask: int) -> BlockInputs:
        batch, rows = rows.shape[0], rows.contiguous()
        found = BlockInputs(
            ints(batch * width), ints(batch * width), ints(batch * width), ints(batch), ints(batch, width, width),
            ints(batch, width),
        )  # fmt: skip
        self.raw.line(None, table.page_table, table.length, table.kv_len, table.last, rows, batch, width, mask, *found)
        return found

    def windowed(
        self, table: Tensor, rows: Tensor, prefix_len: Tensor, window: int, width: int
    ) -> tuple[Tensor, Tensor]:
        batch, rows, prefix_len = rows.shape[0], rows.contiguous(), prefix_len.contiguous()
        assert table.is_contiguous() and table.dtype == torch.int64
        before, own = ints(batch), ints(batch, window - 1 + width)
        self.raw.windowed(before, own, table, table.shape[1], rows, prefix_len, batch, window, own.shape[1])
        return before, own

    def of_levels(self, x: Tensor, batch: int, first: int, levels: int) -> Tensor:
        if batch == 1:
            return x[first : first + levels]
        return self._rows.take_rows(x, _levels(batch, len(x) // batch, first, levels))

    def repeat_rows(self, x: Tensor, times: int) -> Tensor:
        return x if times == 1 else self._rows.take_rows(x, _repeated(len(x), times))

    def confident(self, draft: Draft, hidden: Tensor, weight: Tensor, token_odds: Tensor) -> Draft:
        if hidden.dtype not in DTYPES:
            return super().confident(draft, hidden, weight, token_odds)
        (batch, nodes), (rows, size) = draft.parent.shape, hidden.shape
        assert draft.grade is not None and draft.grade.is_contiguous() and draft.parent.is_contiguous()
        assert draft.tokens.is_contiguous() and hidden.is_contiguous() and weight.shape == (size,)
        grade, scratch = ints(batch, nodes), torch.empty(rows + 2 * nodes, dtype=torch.float32)
        self.raw.confident(
            grade, draft.grade, draft.parent, draft.tokens, batch, nodes, hidden, rows // batch, size,
            hidden.dtype == torch.bfloat16, weight, token_odds, scratch,
        )  # fmt: skip
        return draft._replace(grade=grade)

    def continuations(
        self, logits: Tensor, table: RowTensors, rows: Tensor, ahead: int, topk: int, target_ids: Tensor | None,
        noisy: Tensor,
    ) -> Continuations:  # fmt: skip
        if logits.dtype not in DTYPES or topk > MAX_TOPK:
            return super().continuations(logits, table, rows, ahead, topk, target_ids, noisy)
        key = self.noise_key(table, rows, ahead)  # by value: of rows without a temperature there is none
        ids, logp = self.top_tokens(logits, rows.shape[0], topk, key, target_ids)
        if target_ids is not None:
            assert target_ids.is_contiguous()
            self.raw.row_numbers(ids, target_ids, ids, ids.numel(), 1, None)
        return Continuations(ids, logp)

    def pair_continuations(
        self, candidates: Continuations, above: Tensor, gate: Tensor, before: Tensor, after: Tensor, topk: int,
        target_ids: Tensor | None,
    ) -> Continuations:  # fmt: skip
        if gate.dtype not in DTYPES or type(gate) is not Tensor:
            return super().pair_continuations(candidates, above, gate, before, after, topk, target_ids)
        known, likely, above, gate = (part.contiguous() for part in (*candidates, above, gate))
        (batch, count), nodes, rank = known.shape, len(above), gate.shape[1]
        assert before.is_contiguous() and after.is_contiguous() and gate.dtype == before.dtype == after.dtype
        assert nodes % batch == 0 and topk <= count and likely.dtype == torch.float32
        ids, logp = ints(nodes, topk), torch.empty(nodes, topk, dtype=torch.float32)
        self.raw.pairs(
            ids, logp, known, likely, above, gate, before, after, gate.dtype == torch.bfloat16, nodes, batch, count,
            rank, topk, torch.empty(count + rank, dtype=torch.float32),
        )  # fmt: skip
        return Continuations(ids, logp)

    def logit_editor(
        self, table: RowTensors, rows: Tensor, edits: Edits, bound: int, vocab: int, draft_ids: Tensor | None
    ) -> CpuLogitEditor:
        return CpuLogitEditor(
            self.raw, self.workers, self._sampler.scratch, table, rows, edits, bound, vocab, draft_ids
        )

    def noise_key(self, table: RowTensors, rows: Tensor, ahead: int) -> NoiseKey:
        return self._sampler.noise_key(table, rows, ahead)

    def keep_first(self, following: Continuations, rows: Tensor, first: First, target_ids: Tensor | None) -> None:
        (batch, topk), rows = following.ids.shape, rows.contiguous()
        ids, logp = following.ids.contiguous(), following.logp.contiguous()
        assert first.ids.shape[1] == topk and first.ids.is_contiguous() and first.logp.is_contiguous()
        self.raw.keep_first(ids, logp, batch, topk, rows, first.ids, first.logp)

    def expand(
        self, table: RowTensors, rows: Tensor, shape: TreeShape, first: First, tail: int, lookahead: int,
        target_ids: Tensor | None,
    ) -> Expansion:  # fmt: skip
        return CpuTreeExpansion(self.raw, table, rows, shape, first, tail, lookahead)

    def top_tokens(
        self,
        logits: Tensor,
        batch: int,
        topk: int,
        key: NoiseKey | None,
        target_ids: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """`ops.expansion.spec.top_tokens` with the noise of sampling.

        logits [M, V] float32 or bfloat16, M / batch nodes a row; topk: at most `MAX_TOPK` and V; key: seed [B] int64,
        position [B] int64 and temperature, top-p, min-p [3, B] float32 of the rows' noise, which all nodes of a row
        share, None where all rows are greedy; target_ids [V]: what the noise takes the logits' tokens for, None for 0
        .. V - 1. Returns indices (not target ids) [M, topk] int64 and log probabilities [M, topk] float32, best first,
        of equals the lower index.
        """
        nodes, vocab = logits.shape
        assert nodes % batch == 0 and topk <= min(MAX_TOPK, vocab)
        assert key is None or [part.dtype for part in key] == [torch.int64, torch.int64, torch.float32]
        assert key is None or key.floats.shape == (3, batch)
        logits = logits.contiguous()
        names = None if target_ids is None or key is None else target_ids.contiguous()
        noise = [None] * 3 if key is None else [part.contiguous() for part in key]
        scratch = torch.empty(self.workers.most, vocab + 15, dtype=torch.float32)
        ids, logp = ints(nodes, topk), torch.empty(nodes, topk, dtype=torch.float32)
        self.raw.top_tokens(
            ids, logp, topk, logits, logits.dtype == torch.bfloat16, batch, nodes // batch, vocab, *noise, names,
            scratch, self.workers.address,
        )  # fmt: skip
        return ids, logp


class CpuTreeExpansion:
    """An `Expansion` in C: three calls a level, and one for the draft."""

    def __init__(
        self, raw: Any, table: RowTensors, rows: Tensor, shape: TreeShape, first: First, tail: int, lookahead: int
    ) -> None:
        """raw: the extension module; the others as for `ExpansionOps.expand`."""
        size, topk = rows.shape[0], shape.topk
        candidates = capacity(shape.depth, topk)
        assert shape.nodes - 1 <= candidates, "more nodes than expansion has candidates"
        assert topk <= first.ids.shape[1], "fewer continuations of the root than a level has nodes"
        assert rows.dtype == first.ids.dtype == torch.int64
        assert first.ids.stride() == first.logp.stride() and first.ids.stride(1) == 1
        self._raw, self._table, self._rows, self._shape, self._first = raw, table, rows.contiguous(), shape, first
        self._tail, self._lookahead = tail, lookahead
        self._number = 0  # of the level that was chosen last
        self.root_at = ints(size)  # written with the first level
        # Of all candidates: ids, which one each follows. Of the level's nodes: candidate numbers. Then the scores.
        self._ints = ints(2 * candidates + topk, size)
        self._floats = torch.empty(candidates + topk, size, dtype=torch.float32)
        at, scores, known = self._ints.data_ptr(), self._floats.data_ptr(), candidates * size
        self._state = candidates, topk, at, at + 8 * known, scores, at + 16 * known, scores + 4 * known
        self._parent = self._path = rows  # of that level; nothing yet
        self._hidden: Tensor | None = None  # what the nodes of that level are fed to their children

    def level(self) -> Level:
        size, topk = self._rows.shape[0], self._shape.topk
        self._number += 1
        found = Level(ints(size, topk), ints(size, topk))
        if self._number == 1:
            first = self._first
            self._raw.first_level(
                *self._state, first.ids, first.logp, first.ids.stride(0), self._rows, size, *found, self._table.kv_len,
                self.root_at,
            )  # fmt: skip
        else:
            self._raw.next_level(*self._state, self._number, size, *found)
        self._parent = found.parent
        return found

    def level_rows(self) -> LevelRows:
        (size,), topk, table = self._rows.shape, self._shape.topk, self._table
        found = ints(size, topk), ints(size, topk), ints(size, topk), ints(size, topk, self._tail + self._number)
        self._raw.level_rows(
            self._number, size, topk, self._tail, self._lookahead, self._rows, self.root_at, table.page_table,
            table.page_table.stride(0), self._parent, self._path, *found,
        )  # fmt: skip
        positions, write_slots, path_len, self._path = found
        feature = self.level_feature() if self._first.feature.shape[1] else None
        return LevelRows(positions, write_slots, self._path, path_len, feature)

    def level_feature(self) -> Tensor:
        size, topk = self._parent.shape
        source = self._first.feature if self._hidden is None else self._hidden
        source, width = with_rows(source), source.shape[1]
        out, item = source.new_empty(size * topk, width), source.element_size()
        self._raw.features(
            out, source, source.stride(0) * item, width * item, self._rows if self._hidden is None else None,
            self._parent, size, topk,
        )  # fmt: skip
        return out

    def add(self, following: Continuations, hidden: Tensor) -> None:
        ids, logp = (part.contiguous() for part in following)
        self._raw.add(*self._state, self._number, ids, logp, hidden.shape[0])
        self._hidden = hidden.flatten(0, 1)

    def draft(self) -> Draft:
        (size,), shape = self._rows.shape, self._shape
        if not self._number:
            self.level()  # for its candidates
        draft = empty_draft(size, shape.nodes)
        self._raw.draft(*self._state, size, shape.nodes, self._rows, self._table.last, *draft)
        return draft
