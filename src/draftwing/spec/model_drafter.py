"""Drafters with a head, which is anything that drafts with a model: a small language model, EAGLE heads, MTP layers.

`HeadDrafter` is what they have in common: how they reach the head's KV, what they keep of roots, and that another head
may take its place. For a `ModelDrafter` they differ in their `DraftHead` alone. The head's KV lies in the same slots as
the target's. After every step it runs once over the committed tokens, which rewrites its entries of the accepted path
from the text (and the target's true features), and whose last row gives the root's continuations: the first level of
the next tree's expansion. Some devices read these when a tree is wanted (`ops.reads_root_late`), for a step without
drafts can do without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwing.config.trees import TreeShape
from draftwing.models.adapters.heads import takes_factors
from draftwing.models.heads.base import DraftHead, FeatureHead
from draftwing.models.heads.swap import HeadSwap
from draftwing.ops.attention.attend import Attend, AttnBackend
from draftwing.ops.attention.batch import Batch, ChunkSpan
from draftwing.ops.gemm.contract import FEW_ROWS, HeadTopK
from draftwing.ops.table import TorchOps
from draftwing.ops.types import Continuations, Draft, Expansion, First, Level, LogitEditor, RowTensors
from draftwing.spec.drafter import Drafter, DraftStep, SeenTokens, chain_menu, tree_menu

BANNED = -1e30  # a logit that nothing legal has


class HeadDrafter(Drafter):
    """A `Drafter` around a `DraftHead`."""

    swap: HeadSwap | None = None  # of heads that are read from a folder

    def __init__(self, head: DraftHead, rows: int, topk: int, width: int, dtype: torch.dtype, ops: TorchOps) -> None:
        """rows: those of the row table, its dummy included; topk: the largest of any shape that will be asked for;
        width, dtype: of the feature that is kept of a root."""
        self.head, self.topk, self.ops = head, topk, ops
        self.aux_layers, self.kv_layers = head.aux_layers, head.kv_layers
        self._draft_ids = head.draft_ids()
        self._first = First(  # the root's best continuations and its feature, row-indexed as `ops.expand` reads them
            ids=torch.zeros(rows, topk, dtype=torch.int64, device=ops.device),
            logp=torch.zeros(rows, topk, dtype=torch.float32, device=ops.device),
            feature=torch.zeros(rows, width, dtype=dtype, device=ops.device),
        )
        self._constrained: Any = None  # what `constrain` leaves for the next `propose`
        self._attn: AttnBackend | None = None
        self._first_layer = 0

    def attach(self, attn: AttnBackend, first_layer: int, positions: int) -> None:
        self._attn, self._first_layer = attn, first_layer
        self.head.set_max_positions(positions)

    def unconstrain(self) -> None:
        """Undoes `constrain`, which no `propose` follows."""
        self._constrained = None

    def _bind(self, batch: Batch) -> Attend:
        assert self._attn is not None, "attach comes first"
        return self._attn.bind(batch, self._first_layer)

    def _editor(self, step: DraftStep) -> LogitEditor | None:
        if step.edits is None:
            return None
        where = step.table, step.rows, step.edits, step.max_kv_len
        return self.ops.logit_editor(*where, self.head.vocab, self._draft_ids)

    def _next_level(self, expansion: Expansion, editor: LogitEditor | None) -> Level:
        level = expansion.level()
        if editor is not None:
            editor.follow(level)
        return level

    def read_head(self, folder: Path | None) -> FeatureHead:
        return super().read_head(folder) if self.swap is None else self.swap.read(folder)

    def take_head(self, head: FeatureHead) -> None:
        assert self.swap is not None
        self.swap.take(head)
        draft_ids = self.head.draft_ids()
        if self._draft_ids is not None and draft_ids is not None:
            self._draft_ids.copy_(draft_ids)  # recorded calls know where it is


class ModelDrafter(HeadDrafter):
    """A `Drafter` around a `DraftHead`."""

    max_lookahead = 1  # of a head
    _adapting = False  # whether rows of what runs next may have factors beside the head

    def __init__(self, head: DraftHead, rows: int, topk: int, dtype: torch.dtype, ops: TorchOps) -> None:
        """rows: those of the row table, its dummy included; topk: the largest of any shape that will be asked for."""
        super().__init__(head, rows, topk, head.width, dtype, ops)
        assert 0 <= head.lookahead <= self.max_lookahead
        self.lookahead, self.reads_images = head.lookahead, head.reads_images
        self.from_tokens = not head.aux_layers and not head.lookahead
        self.tail = int(head.lookahead == 0)  # without lookahead the first root has a row of its own
        # `extend` writes `_first`, but for the continuations where `ops.reads_root_late`: these are made by `propose`,
        # from this: the root's feature, else made when it is first known.
        self._newest_hidden = self._first.feature

    def menu(self, shape: TreeShape) -> tuple[TreeShape, ...]:
        """Returns chains on a CPU, which are cheaper to draft."""
        return chain_menu(shape) if self.ops.can_record else tree_menu(shape)

    def span(self, shape: TreeShape) -> int:
        """Returns the most of: verified nodes; committed tokens, with the root where it has a row; scratch rows."""
        return max(shape.nodes, shape.max_commit + self.tail, self.tail + shape.topk * (shape.depth - 1))

    # -- tree expansion ---------------------------------------------------------------------------------------------

    def propose(self, step: DraftStep) -> Draft:
        table, rows, shape, max_kv_len, noisy, _ = step
        size, topk = rows.shape[0], shape.topk
        window = self.tail + topk * max(shape.depth - 1, 0)
        editor = self._editor(step)
        self._read_first(table, rows, noisy, editor)
        expansion, beside = self._expand(table, rows, shape), self._slots(table, rows, topk)
        for level in range(1, shape.depth):
            ids = self._next_level(expansion, editor).ids
            at = expansion.level_rows()
            batch = Batch(
                rows=rows,
                ids=ids.flatten(),
                positions=at.positions.flatten(),
                write_slots=at.write_slots.flatten(),
                table=table.page_table,
                prefix_len=expansion.root_at,
                path=at.path,
                path_len=at.path_len,
                window=window,
                bound=max_kv_len + window,
                turns=self._turns(table, rows, at.positions.flatten()),
            )
            with self.head.beside(*beside):
                hidden = self._run(batch, at.feature, level).view(size, topk, -1)
            expansion.add(self._continuations(table, rows, hidden, level + 1, topk, noisy, editor), hidden)
        return expansion.draft()

    def _expand(self, table: RowTensors, rows: Tensor, shape: TreeShape) -> Expansion:
        return self.ops.expand(table, rows, shape, self._first, self.tail, self.lookahead, self.head.target_ids)

    def begin(self, step: DraftStep) -> bool:
        """Writes the roots' continuations, on a GPU, where `propose` reads them."""
        if self.ops.reads_root_late:
            return False
        self._read_first(step.table, step.rows, step.noisy, self._editor(step))
        return True

    def constrain(self, table: RowTensors, rows: Tensor, banned: Tensor, noisy: Tensor) -> None:
        logits, ids = self.head.logits(self.ops.take_rows(self._newest_hidden, rows)), self.head.target_ids
        logits = without(logits, banned, ids)
        self._constrained = rows, self.ops.continuations(logits, table, rows, 1, self.topk, ids, noisy)

    # -- committed text ---------------------------------------------------------------------------------------------

    def extend(self, seen: SeenTokens) -> None:
        if seen.count is None:
            more = 0 if self.lookahead else sum(span.final for span in seen.batch.chunks)  # see `_with_sampled`
            seen = self.evened(self.ops, seen, more)
        table, batch, aux_hidden, next_ids, count, noisy = seen
        if count is None:
            self._extend_chunks(table, batch, aux_hidden, next_ids, noisy)
            return
        batch = self._shifted(seen) if self.lookahead else self._with_newest(table, batch, next_ids)
        with self.head.beside(*self._slots_of(table, batch)):
            hidden = self._run(batch, self._features(aux_hidden), 0)
        newest = self._newest(hidden, batch.rows, count, self.lookahead)
        self._keep_first(table, batch.rows, newest, noisy)

    def catch_up(self, seen: SeenTokens, drafts: bool) -> None:
        table, batch, aux_hidden, next_ids, count, noisy = seen
        if self.lookahead != 1 or count is None:
            self.extend(seen)
            return
        assert aux_hidden is not None
        size = next_ids.shape[0]
        last = count + torch.arange(-1, size - 1, seen.width, device=count.device)  # [B] which query is the newest
        rows = batch.rows if drafts else batch.rows[:0]
        self._write(table, self._shifted(seen), aux_hidden, rows, lambda x: x.index_select(0, last), noisy)

    def _shifted(self, seen: SeenTokens) -> Batch:
        """Returns the accepted path of each row with the token behind each query in place of its own."""
        table, batch = seen.table, seen.batch
        return batch._replace(ids=seen.next_ids, turns=self._turns(table, batch.rows, batch.positions))

    def _turns(self, table: RowTensors, rows: Tensor, positions: Tensor) -> Tensor | None:
        """Returns where as many queries of each row stand for a rotary embedding in three axes: behind all images."""
        if not self.head.in_axes or table.shift is None:
            return None
        return self.ops.row_numbers(table.shift, rows, len(positions) // len(rows), positions)

    def _write(
        self, table: RowTensors, batch: Batch, aux_hidden: Tensor, rows: Tensor, newest: Callable[[Tensor], Tensor],
        noisy: Tensor,
    ) -> None:  # fmt: skip
        """Writes keys and values of all queries, and runs the head on the newest alone, whose output is all that is
        wanted. newest: of the batch's queries [M, ...] those of rows [F]; noisy: among these."""
        with self.head.beside(*self._slots_of(table, batch)), self.head.showing(batch.following):
            feature = self.head.features(aux_hidden)
            self.head.write(batch.ids, self._places(batch), feature, self._bind(batch))
        if not rows.shape[0]:
            return
        positions = newest(batch.positions)
        zero = torch.zeros_like(positions).unsqueeze(1)
        alone = Batch(
            rows, newest(batch.ids), positions, newest(batch.write_slots), batch.table, positions, zero.unsqueeze(2),
            zero + 1, window=1, bound=batch.bound, turns=self._turns(table, rows, positions),
        )  # fmt: skip
        with self.head.beside(*self._slots(table, rows, 1)):
            hidden = self._run(alone, newest(feature), 0)
        self._keep_feature(rows, hidden)
        self._keep_first(table, rows, hidden, noisy)

    def _newest(self, hidden: Tensor, rows: Tensor, count: Tensor, lookahead: int) -> Tensor:
        """hidden [B * Q, H] -> [B, H]: per row, the query that the newest token is in; kept as the root's feature."""
        return self.ops.newest_rows(hidden, count, lookahead, rows, self._first.feature if self.head.width else None)

    def _with_newest(self, table: RowTensors, batch: Batch, next_ids: Tensor) -> Batch:
        """Returns the accepted path of each row [B, Q] with the token after it: one query more, a chain of Q + 1."""
        width = next_ids.shape[0] // batch.rows.shape[0] + 1
        chain = self.ops.chain(table, batch.rows, batch.prefix_len, width)
        return batch._replace(**chain._asdict(), window=width)

    def _keep_feature(self, rows: Tensor, newest: Tensor) -> None:
        if self.head.width:
            self._first.feature.index_copy_(0, rows, newest)

    def _extend_chunks(
        self, table: RowTensors, batch: Batch, aux_hidden: Tensor | None, next_ids: Tensor, noisy: Tensor
    ) -> None:
        if not self.lookahead:
            chunks = _with_sampled(batch, next_ids)
            self._keep_first_of_prompts(table, chunks, self._run(chunks, self._features(aux_hidden), 0), noisy)
            return
        assert aux_hidden is not None
        rows, newest = prompt_ends(batch)
        self._write(table, batch._replace(ids=next_ids), aux_hidden, rows, newest, noisy)

    def _keep_first_of_prompts(self, table: RowTensors, chunks: Batch, hidden: Tensor, noisy: Tensor) -> None:
        """hidden [M, H]; the last row of each last chunk is the one that the newest token is in."""
        rows, newest = prompt_ends(chunks)
        if len(rows):
            hidden = newest(hidden)  # [F, H]
            self._keep_feature(rows, hidden)
            self._keep_first(table, rows, hidden, noisy)

    def _keep_first(self, table: RowTensors, rows: Tensor, newest: Tensor, noisy: Tensor) -> None:
        """newest [B, H]: of the queries that the newest tokens are in, which is kept, on a GPU with what may follow."""
        if not self.head.width:
            if not self._newest_hidden.shape[1]:
                self._newest_hidden = newest.new_zeros(self._newest_hidden.shape[0], newest.shape[1])
            self._newest_hidden.index_copy_(0, rows, newest)
        if not self.ops.reads_root_late:
            self._write_first(rows, self._continuations(table, rows, newest.unsqueeze(1), 1, self.topk, noisy))

    def _read_first(self, table: RowTensors, rows: Tensor, noisy: Tensor, editor: LogitEditor | None = None) -> None:
        """The root's continuations are known afterwards. Those that were written before know of no edits."""
        constrained, self._constrained = self._constrained, None
        native = self._readout(rows.shape[0])
        if native is not None:
            key = self.ops.noise_key(table, rows, 1)
            native.best(self._newest_hidden, rows, self._first.ids, self._first.logp, key, editor)
        elif self.ops.reads_root_late or editor is not None:
            newest = self.ops.take_rows(self._newest_hidden, rows).unsqueeze(1)
            self._write_first(rows, self._continuations(table, rows, newest, 1, self.topk, noisy, editor))
        if constrained is not None:
            self._write_first(*constrained)

    def _write_first(self, rows: Tensor, following: Continuations) -> None:
        self.ops.keep_first(following, rows, self._first, self.head.target_ids)

    def beside_adapters(self, on: bool) -> None:
        self._adapting = on and self.head.adapted

    @property
    def adaptable(self) -> FeatureHead | None:
        return self.head if isinstance(self.head, FeatureHead) and takes_factors(self.head) else None

    def _slots_of(self, table: RowTensors, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        """Returns as `_slots`, for the queries of a batch."""
        rows = batch.rows
        if not self._adapting or not batch.chunks:
            return self._slots(table, rows, len(batch.ids) // max(len(rows), 1))
        each = [rows[span.row : span.row + 1].expand(span.length) for span in batch.chunks]
        return self._slots(table, torch.cat(each), 1)

    def _slots(self, table: RowTensors, rows: Tensor, each: int) -> tuple[Tensor | None, Tensor | None]:
        """Returns the slots of factors for so many queries of each row, and what `adapter_plan` makes of them; None:
        nobody has any."""
        if not self._adapting:
            return None, None
        assert table.heads is not None
        slots = self.ops.row_numbers(table.heads, rows, each)
        return slots, self.ops.adapter_plan(slots)

    def _features(self, aux_hidden: Tensor | None) -> Tensor | None:
        return None if aux_hidden is None else self.head.features(aux_hidden)

    def _run(self, batch: Batch, feature: Tensor | None, level: int) -> Tensor:
        return self.head.run(batch.ids, self._places(batch), feature, level, self._bind(batch))

    def _places(self, batch: Batch) -> Tensor:
        """Returns positions for the head's rotary embedding."""
        return batch.positions if batch.turns is None or not self.head.in_axes else batch.turns

    def _continuations(
        self, table: RowTensors, rows: Tensor, hidden: Tensor, ahead: int, topk: int, noisy: Tensor,
        editor: LogitEditor | None = None,
    ) -> Continuations:  # fmt: skip
        """hidden [B, K, H] -> the best tokens that may follow its B * K nodes at kv_len + ahead."""
        hidden = hidden.flatten(0, 1)
        native = self._readout(hidden.shape[0])
        if native is not None:
            best = torch.empty(hidden.shape[0], topk, dtype=torch.int64)
            logp = torch.empty(hidden.shape[0], topk, dtype=torch.float32)
            native.best(hidden, None, best, logp, self.ops.noise_key(table, rows, ahead), editor)
            return Continuations(best, logp)
        logits = self.head.logits(hidden)
        if editor is not None:
            editor.apply(logits)
        return self.ops.continuations(logits, table, rows, ahead, topk, self.head.target_ids, noisy)

    def _readout(self, rows: int) -> HeadTopK | None:
        native = self.head.top_k
        if native is None or rows > FEW_ROWS or self.topk > native.max_topk:
            return None
        return native


def prompt_ends(batch: Batch) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Returns the rows [F] whose last chunk is in the batch, and what takes their last queries of all: [M, ...] -> [F,
    ...]."""
    final = [span for span in batch.chunks if span.final]
    rows = torch.cat([batch.rows[:0], *(batch.rows[span.row : span.row + 1] for span in final)])
    return rows, lambda x: torch.stack([x[span.offset + span.length - 1] for span in final])


def _with_sampled(batch: Batch, next_ids: Tensor) -> Batch:
    """Prefill chunks, each last one with the token that was sampled after it."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []  # ids, positions, write slots
    spans: list[ChunkSpan] = []
    offset = 0
    for span in batch.chunks:
        here, end = slice(span.offset, span.offset + span.length), span.start + span.length
        parts.append((batch.ids[here], batch.positions[here], batch.write_slots[here]))
        length = span.length
        if span.final:
            last = slice(here.stop - 1, here.stop)
            row = batch.rows[span.row : span.row + 1]
            parts.append((next_ids[last], batch.positions[last] + 1, batch.table[row, end].long()))
            length += 1
        spans.append(span._replace(offset=offset, length=length))
        offset += length
    ids, positions, write_slots = (torch.cat(column) for column in zip(*parts, strict=True))
    return batch._replace(ids=ids, positions=positions, write_slots=write_slots, chunks=tuple(spans))


def without(logits: Tensor, banned: Tensor, target_ids: Tensor | None) -> Tensor:
    """logits [b, V of the head], banned [b, V of the target] bool -> float32, with nothing left of what is banned.
    target_ids: of the head's tokens, None where they are the target's first ones."""
    banned = banned[:, : logits.shape[1]] if target_ids is None else banned[:, target_ids]
    # Not minus infinity: where everything is banned the scores must still be numbers.
    return logits.float().masked_fill(banned, BANNED)
