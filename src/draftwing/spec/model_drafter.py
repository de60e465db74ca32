"""The drafter for everything that drafts with a model: a small language model, EAGLE heads, MTP layers.

They differ in their `DraftHead` alone. The head's KV lives in the same slots as the target's. After every step it runs
once over the committed tokens, which rewrites its entries of the accepted path from the text (and the target's true
features), and whose last row gives the root's continuations: the first step of the next tree's growth. On a CPU these
are read from that row when a tree is wanted, for a step without drafts can do without them; on a GPU at once, where
they cost little and the stages of a step stay what they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftwing.core import TreeShape
from draftwing.ops import use_triton
from draftwing.ops.attention import AttnBackend, Batch, ChunkSpan
from draftwing.ops.cpu.kernels import DTYPES, MOST, kernels_for
from draftwing.ops.cpu.tree import RowGrowth as NativeGrowth
from draftwing.ops.cpu.tree import tree_kernels_for
from draftwing.ops.pick import take_rows
from draftwing.ops.torch.growth import First, RowGrowth, top_tokens
from draftwing.ops.torch.layer_ops import FEW_ROWS, HeadTopK
from draftwing.ops.torch.noise import gumbel, gumbel_at
from draftwing.spec.drafter import Draft, Drafter
from draftwing.spec.heads import DraftHead

if TYPE_CHECKING:
    from draftwing.engine.row_table import SlotTable
    from draftwing.ops.triton.grow import RowGrowth as DeviceGrowth


_BANNED = -1e30  # a logit that nothing legal has


class ModelDrafter(Drafter):
    """A `Drafter` around a `DraftHead`."""

    max_lookahead = 1  # of a head

    def __init__(self, head: DraftHead, rows: int, topk: int, dtype: torch.dtype, device: torch.device) -> None:
        """rows: those of the slot table, its dummy included; topk: the largest of any shape that will be asked for."""
        assert 0 <= head.lookahead <= self.max_lookahead
        self.head, self.topk = head, topk
        self.taps, self.lookahead = head.taps, head.lookahead
        self.kv_layers = head.kv_layers
        self.tail = int(head.lookahead == 0)  # without lookahead the first root has a row of its own
        # The root's best continuations and its feature, row-indexed: written by `observe` (the continuations by
        # `propose` on a CPU), read by `propose`.
        self._first_ids = torch.zeros(rows, topk, dtype=torch.int64, device=device)
        self._first_logp = torch.zeros(rows, topk, dtype=torch.float32, device=device)
        self._seed_feature = torch.zeros(rows, head.width, dtype=dtype, device=device)
        # What the root's continuations are read from: its feature, else made when it is first known.
        self._newest_hidden = self._seed_feature
        # Rows with continuations that `constrain` chose, and these: for the next `propose`.
        self._constrained: tuple[Tensor, tuple[Tensor, Tensor]] | None = None
        self._attn: AttnBackend | None = None
        self._first_layer = 0

    def attach(self, attn: AttnBackend, first_layer: int, positions: int) -> None:
        self._attn, self._first_layer = attn, first_layer
        self.head.set_max_positions(positions)

    def span(self, shape: TreeShape) -> int:
        """The most of: verified nodes; committed tokens, with the root where it has a row; scratch rows of growth."""
        return max(shape.nodes, shape.max_commit + self.tail, self.tail + shape.topk * (shape.depth - 1))

    # -- growth -----------------------------------------------------------------------------------------------------

    def propose(self, slots: SlotTable, rows: Tensor, shape: TreeShape, max_bound: int, noisy: Tensor) -> Draft:
        size, topk = rows.shape[0], shape.topk
        window = self.tail + topk * max(shape.depth - 1, 0)
        self._read_first(slots, rows, noisy)
        growth = self._grow(slots, rows, shape)
        for level in range(1, shape.depth):
            ids = growth.level().ids
            at = growth.level_rows()
            batch = Batch(
                rows=rows,
                ids=ids.flatten(),
                positions=at.positions.flatten(),
                write_slots=at.write_slots.flatten(),
                table=slots.table,
                prefix_len=growth.root_at,
                path=at.path,
                path_len=at.path_len,
                window=window,
                bound=max_bound + window,
            )
            hidden = self._run(batch, at.feature, level).view(size, topk, -1)
            growth.add(self._continuations(slots, rows, hidden, level + 1, topk, noisy), hidden)
        return growth.draft()

    @property
    def _first(self) -> First:
        return First(self._first_ids, self._first_logp, self._seed_feature)

    def _grow(self, slots: SlotTable, rows: Tensor, shape: TreeShape) -> RowGrowth | NativeGrowth | DeviceGrowth:
        first = self._first
        if use_triton(rows):
            from draftwing.ops.triton.grow import RowGrowth as DeviceGrowth

            return DeviceGrowth(slots, rows, shape, first, self.tail, self.lookahead, self.head.target_ids)
        native = tree_kernels_for(rows)
        if native is not None:
            return NativeGrowth(native, slots, rows, shape, first, self.tail, self.lookahead)
        return RowGrowth(slots, rows, shape, first, self.tail, self.lookahead)

    def constrain(self, slots: SlotTable, rows: Tensor, banned: Tensor, noisy: Tensor) -> None:
        logits, ids = self.head.logits(take_rows(self._newest_hidden, rows)), self.head.target_ids
        banned = banned[:, : self.head.vocab] if ids is None else banned[:, ids]
        # Not minus infinity: where everything is banned the scores must still be numbers.
        logits = logits.float().masked_fill(banned, _BANNED)
        self._constrained = rows, self._best(slots, rows, logits.unsqueeze(1), 1, self.topk, noisy)

    # -- committed text ---------------------------------------------------------------------------------------------

    def observe(
        self,
        slots: SlotTable,
        batch: Batch,
        taps: Tensor | None,
        next_ids: Tensor,
        count: Tensor | None,
        noisy: Tensor,
    ) -> None:
        feature = self.head.features(taps) if taps is not None else None
        if count is None:
            self._observe_chunks(slots, batch, feature, next_ids, noisy)
            return
        batch = batch._replace(ids=next_ids) if self.lookahead else _with_newest(slots, batch, next_ids)
        newest = self._newest(self._run(batch, feature, 0), batch.rows, count, self.lookahead)
        self._keep_first(slots, batch.rows, newest, noisy)

    def _newest(self, hidden: Tensor, rows: Tensor, count: Tensor, lookahead: int) -> Tensor:
        """hidden [B * Q, H] -> [B, H]: per row, the query that the newest token is in; kept as the root's feature."""
        if use_triton(hidden):
            from draftwing.ops.triton.observe import newest_rows

            return newest_rows(hidden, count, lookahead, rows, self._seed_feature if self.head.width else None)
        native = tree_kernels_for(hidden)
        if native is not None:
            return native.newest_rows(hidden, count, lookahead, rows, self._seed_feature if self.head.width else None)
        hidden = hidden.unflatten(0, (rows.shape[0], -1))
        last = (count - lookahead).view(-1, 1, 1)
        newest = hidden.gather(1, last.expand(-1, 1, hidden.shape[2])).squeeze(1)
        self._keep_feature(rows, newest)
        return newest

    def _keep_feature(self, rows: Tensor, newest: Tensor) -> None:
        if self.head.width:
            self._seed_feature.index_copy_(0, rows, newest)

    def _observe_chunks(
        self, slots: SlotTable, batch: Batch, feature: Tensor | None, next_ids: Tensor, noisy: Tensor
    ) -> None:
        chunks = batch._replace(ids=next_ids) if self.lookahead else _with_sampled(batch, next_ids)
        self._keep_first_of_prompts(slots, chunks, self._run(chunks, feature, 0), noisy)

    def _keep_first_of_prompts(self, slots: SlotTable, chunks: Batch, hidden: Tensor, noisy: Tensor) -> None:
        """hidden [M, H]; the last row of each last chunk is the one that the newest token is in."""
        final = [(span, span.offset + span.length - 1) for span in chunks.chunks if span.final]
        if final:
            rows = torch.cat([chunks.rows[span.row : span.row + 1] for span, _ in final])
            newest = torch.stack([hidden[i] for _, i in final])  # [F, H]
            self._keep_feature(rows, newest)
            self._keep_first(slots, rows, newest, noisy)

    def _keep_first(self, slots: SlotTable, rows: Tensor, newest: Tensor, noisy: Tensor) -> None:
        """newest [B, H]: of the queries that the newest tokens are in, which is kept, on a GPU with what may follow."""
        if not self.head.width:
            if not self._newest_hidden.shape[1]:
                self._newest_hidden = newest.new_zeros(self._newest_hidden.shape[0], newest.shape[1])
            self._newest_hidden.index_copy_(0, rows, newest)
        if use_triton(newest):
            from draftwing.ops.triton.observe import keep_first

            following = self._continuations(slots, rows, newest.unsqueeze(1), 1, self.topk, noisy)
            keep_first(following, rows, self._first_ids, self._first_logp, self.head.target_ids)

    def _read_first(self, slots: SlotTable, rows: Tensor, noisy: Tensor) -> None:
        """The root's continuations are known afterwards, of greedy rows in one call."""
        constrained, self._constrained = self._constrained, None
        native = self._readout(rows.shape[0], noisy)
        if native is not None:
            native.best(self._newest_hidden, rows, self._first_ids, self._first_logp)
        elif not use_triton(rows):
            newest = take_rows(self._newest_hidden, rows).unsqueeze(1)
            self._write_first(rows, *self._continuations(slots, rows, newest, 1, self.topk, noisy))
        if constrained is not None:
            some, following = constrained
            self._write_first(some, *following)

    def _write_first(self, rows: Tensor, ids: Tensor, logp: Tensor) -> None:
        """ids, logp [B, 1, topk]"""
        native = tree_kernels_for(ids)
        if native is not None:
            native.keep_first(ids, logp, rows, self._first)
            return
        self._first_ids.index_copy_(0, rows, ids.squeeze(1))
        self._first_logp.index_copy_(0, rows, logp.squeeze(1))

    def _run(self, batch: Batch, feature: Tensor | None, level: int) -> Tensor:
        assert self._attn is not None, "attach comes first"
        return self.head.run(batch.ids, batch.positions, feature, level, self._attn.bind(batch, self._first_layer))

    def _continuations(
        self, slots: SlotTable, rows: Tensor, hidden: Tensor, ahead: int, topk: int, noisy: Tensor
    ) -> tuple[Tensor, Tensor]:
        """hidden [B, K, H] -> ids and log probabilities [B, K, topk] of the tokens that may follow at kv_len + ahead;
        on GPUs `ops.triton.continuations.Continuations`, from which whoever needs them makes these.

        Rows with a temperature get the noise that the target will draw with at that position, so that both pick the
        same token more often (arXiv 2408.07978); renormalised, so that scores still fall along a path.
        """
        size, nodes = hidden.shape[:2]
        native = self._readout(size * nodes, noisy)
        if native is not None:
            best = torch.empty(size * nodes, topk, dtype=torch.int64)
            logp = torch.empty(size * nodes, topk, dtype=torch.float32)
            native.best(hidden.flatten(0, 1), None, best, logp)
            return best.view(size, nodes, topk), logp.view(size, nodes, topk)
        logits, ids = self.head.logits(hidden.flatten(0, 1)), self.head.target_ids
        if use_triton(logits):
            from draftwing.ops.triton.continuations import continuations

            return continuations(logits, slots, rows, ahead, topk, ids)
        return self._best(slots, rows, logits.view(size, nodes, -1), ahead, topk, noisy)

    def _readout(self, rows: int, noisy: Tensor) -> HeadTopK | None:
        native = self.head.top_k
        return native if native is not None and rows <= FEW_ROWS and self.topk <= MOST and not noisy.shape[0] else None

    def _best(
        self, slots: SlotTable, rows: Tensor, z: Tensor, ahead: int, topk: int, noisy: Tensor
    ) -> tuple[Tensor, Tensor]:
        """z [B, K, V] of any float type, which may be overwritten; otherwise as `_continuations`."""
        size, nodes = z.shape[:2]
        ids = self.head.target_ids
        kernels = kernels_for(z)
        if kernels is not None and z.dtype in DTYPES and topk <= MOST:
            own = (slots.seed[rows], slots.kv_len[rows] + ahead, slots.floats[rows, 0]) if noisy.shape[0] else None
            best, logp = kernels.top_tokens(z, topk, own, ids)
            native = tree_kernels_for(best)
            if ids is not None:
                best = ids[best] if native is None else native.rename(best, ids)
            return best, logp
        z = z.float()
        if noisy.shape[0]:
            drawn = rows[noisy]
            key = (slots.seed[drawn], slots.kv_len[drawn].unsqueeze(1) + ahead)
            noise = gumbel(*key, self.head.vocab) if ids is None else gumbel_at(*key, ids)  # [Bn, 1, Vd]
            noise = noise * slots.floats[drawn, :1].unsqueeze(2)
            z = z.index_add(0, noisy, noise.expand(-1, nodes, -1))
        best, logp = top_tokens(z.reshape(size * nodes, -1), topk)
        if ids is not None:
            best = ids[best]
        return best.view(size, nodes, topk), logp.view(size, nodes, topk)


def _with_newest(slots: SlotTable, batch: Batch, next_ids: Tensor) -> Batch:
    """The accepted path of each row [B, Q] with the token after it: one query more, a chain of Q + 1."""
    size = batch.rows.shape[0]
    width = next_ids.shape[0] // size + 1
    if use_triton(next_ids):
        from draftwing.ops.triton import observe

        chain = observe.chain(slots, batch.rows, batch.prefix_len, width)
        return batch._replace(
            ids=chain.ids.flatten(),
            positions=chain.positions.flatten(),
            write_slots=chain.write_slots.flatten(),
            path=chain.path,
            path_len=chain.path_len,
            window=width,
        )
    native = tree_kernels_for(next_ids)
    if native is not None:
        ids, positions, write_slots, path_len, path = native.chain(slots, batch.rows, batch.prefix_len, width)
        return batch._replace(
            ids=ids, positions=positions, write_slots=write_slots, path=path, path_len=path_len, window=width
        )
    step = torch.arange(width, device=next_ids.device)
    positions = batch.prefix_len.unsqueeze(1) + step  # [B, Q + 1]
    return batch._replace(
        ids=torch.cat((batch.ids.view(size, -1)[:, :1], next_ids.view(size, -1)), 1).flatten(),
        positions=positions.flatten(),
        write_slots=batch.table[batch.rows.unsqueeze(1), positions].flatten(),
        path=step.expand(size, width, width),
        path_len=(step + 1).expand(size, width),
        window=width,
    )


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
            parts.append((next_ids[last], batch.positions[last] + 1, batch.table[row, end]))
            length += 1
        spans.append(span._replace(offset=offset, length=length))
        offset += length
    ids, positions, write_slots = (torch.cat(column) for column in zip(*parts, strict=True))
    return batch._replace(ids=ids, positions=positions, write_slots=write_slots, chunks=tuple(spans))
