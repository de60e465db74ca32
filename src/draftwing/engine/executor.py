"""Runs plans: the device side of a step, which never waits for the device and never reads from it.

launch: upload, draft, target forward.  settle: sample, accept, advance the rows, let the drafter observe, pack.
Everything in between is device state indexed by row; the host learns of it from the packed result.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftwing.attn.base import AttnBackend, Batch, ChunkSpan
from draftwing.core import PLAIN, Plan, StepResult, TreeShape
from draftwing.engine.device import Device, Download
from draftwing.engine.slots import SlotTable, Upload
from draftwing.models.decoder import DecoderModel
from draftwing.sampling.sampler import sample
from draftwing.spec.drafter import Draft, Drafter
from draftwing.spec.tree import Accepted, Tree, accept, derive


class Pending(NamedTuple):
    """A launched step: the target has run, nothing is sampled yet."""

    plan: Plan
    upload: Upload
    hidden: Tensor  # tree: [B * N, H]; prefill: [M, H]
    taps: Tensor | None
    batch: Batch
    draft: Draft | None  # tree only
    tree: Tree | None
    started: float


class InFlight:
    """A settled step whose result is on its way to the host."""

    def __init__(self, plan: Plan, download: Download, started: float) -> None:
        self.plan = plan
        self._download = download
        self._started = started

    def wait(self, previous_ready: float) -> tuple[StepResult, float]:
        """The result and the monotonic time it was ready; the step is charged from the later of its own launch and
        `previous_ready`, the end of the step before it."""
        packed = self._download.wait()
        ready = self._download.ready_at
        assert ready is not None
        shape = self.plan.shape
        commit, nodes = shape.max_commit, shape.nodes
        count, proposed, hint = packed[:, :3].T
        result = StepResult(
            tokens=packed[:, 3 : 3 + commit],
            count=count,
            order=packed[:, 3 + commit : 3 + commit + nodes],
            proposed=proposed,
            hint=hint,
            seconds=ready - max(self._started, previous_ready),
        )
        return result, ready


class Executor:
    def __init__(
        self, model: DecoderModel, drafter: Drafter | None, slots: SlotTable, attn: AttnBackend, device: Device
    ) -> None:
        self.model = model
        self.drafter = drafter
        self.slots = slots
        self.attn = attn
        self.device = device
        self._taps: tuple[int, ...] = drafter.taps if drafter is not None else ()
        self._tail = drafter.tail if drafter is not None else 0
        self._roots: dict[int, tuple[tuple[Tensor, Tensor], Tree]] = {}

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Pending:
        started = time.monotonic()
        upload = self.slots.upload(plan)
        if plan.kind == "prefill":
            return self._launch_prefill(plan, upload, started)
        draft = self.propose(upload.rows, plan.shape, plan.max_bound, upload.noisy)
        return self._launch_tree(plan, upload, draft, started)

    @torch.inference_mode()
    def settle(self, pending: Pending) -> InFlight:
        plan = pending.plan
        packed = self._settle_prefill(pending) if plan.kind == "prefill" else self._settle_tree(pending)
        return InFlight(plan, self.device.download(packed), pending.started)

    # -- the three stages of a tree step --------------------------------------------------------------------------

    def propose(self, rows: Tensor, shape: TreeShape, max_bound: int, noisy: Tensor) -> Draft:
        if shape == PLAIN:
            root = self.slots.last[rows].unsqueeze(1)  # [B, 1]
            return Draft(root, *self._lone_roots(rows.shape[0])[0])
        assert self.drafter is not None, "without a drafter every step is plain"
        return self.drafter.propose(self.slots, rows, shape, max_bound, noisy)

    def verify(self, rows: Tensor, draft: Draft, shape: TreeShape, max_bound: int) -> tuple[Batch, Tree]:
        """The target's batch for a tree: node n of a row is written at page-table entry kv_len + n."""
        tree = self._lone_roots(rows.shape[0])[1] if shape == PLAIN else derive(draft.parent, draft.alive, shape.depth)
        kv_len = self.slots.kv_len[rows]  # [B]
        table = self.slots.table[rows, : max_bound + shape.nodes]  # [B, P]
        entries = kv_len.unsqueeze(1) + _arange(shape.nodes, rows)  # [B, N]
        batch = Batch(
            rows=rows,
            ids=draft.tokens.flatten(),
            positions=(kv_len.unsqueeze(1) + tree.depth).flatten(),
            write_slots=table.gather(1, entries).flatten(),
            table=table,
            prefix_len=kv_len,
            path=tree.path,
            path_len=tree.path_len,
            window=shape.nodes,
        )
        return batch, tree

    def _lone_roots(self, size: int) -> tuple[tuple[Tensor, Tensor], Tree]:
        """Parents, which nodes are alive, and geometry of `size` trees that are a root each: always the same."""
        known = self._roots.get(size)
        if known is None:
            parent = torch.zeros(size, 1, dtype=torch.int64, device=self.device.device)
            alive = parent == 0
            known = self._roots[size] = (parent, alive), derive(parent, alive, 0)
        return known

    def advance(self, rows: Tensor, accepted: Accepted, kv_len: Tensor) -> None:
        """Commits: permutes the page-table entries past kv_len, appends the tokens, moves kv_len and last."""
        slots = self.slots
        nodes, commit = accepted.order.shape[1], accepted.committed.shape[1]
        column = rows.unsqueeze(1)
        if nodes > 1:
            entries = kv_len.unsqueeze(1) + _arange(nodes, rows)  # [B, N]
            window = slots.table[column, entries].gather(1, accepted.order)
            slots.table.index_put_((column, entries), window)
        # Entries past the count are overwritten before anybody reads them.
        where = kv_len.unsqueeze(1) + 1 + _arange(commit, rows)  # [B, D + 1]
        slots.tokens.index_put_((column, where), accepted.committed)
        slots.kv_len.index_copy_(0, rows, kv_len + accepted.count)
        newest = accepted.committed.gather(1, accepted.count.unsqueeze(1) - 1)
        slots.last.index_copy_(0, rows, newest.squeeze(1))

    def _launch_tree(self, plan: Plan, upload: Upload, draft: Draft, started: float) -> Pending:
        batch, tree = self.verify(upload.rows, draft, plan.shape, plan.max_bound)
        hidden, taps = self.model(batch.ids, batch.positions, self.attn.bind(batch, 0), self._taps)
        return Pending(plan, upload, hidden, taps, batch, draft, tree, started)

    def _settle_tree(self, pending: Pending) -> Tensor:
        plan, upload, batch, tree, draft = pending.plan, pending.upload, pending.batch, pending.tree, pending.draft
        assert tree is not None and draft is not None
        rows, shape = upload.rows, plan.shape
        size = (len(plan.rows), shape.nodes)
        hidden = pending.hidden.view(*size, -1)  # [B, N, H]
        target = self._sample(upload, rows, hidden, batch.positions.view(size), tree.depth, shape.depth)
        accepted = accept(draft.tokens, draft.parent, draft.alive, tree, target)
        self.advance(rows, accepted, batch.prefix_len)
        hint = self._observe_path(plan, upload, accepted, batch.prefix_len, pending.taps)
        proposed = draft.alive.sum(1) - 1 if shape != PLAIN else tree.depth.squeeze(1)  # none
        head = torch.stack((accepted.count, proposed, hint), 1)
        return torch.cat((head, accepted.committed, accepted.order), 1)

    def _sample(
        self, upload: Upload, rows: Tensor, hidden: Tensor, positions: Tensor, depth: Tensor, depth_max: int
    ) -> Tensor:
        """A token for every node: hidden [B, N, H], positions and depth [B, N] -> [B, N]."""
        logits = self.model.logits(hidden.flatten(0, 1)).view(*positions.shape, -1)

        def exact(ids: Tensor, only: Tensor | None) -> Tensor:
            return self.model.exact_logits(hidden if only is None else hidden.index_select(0, only), ids)

        asked = upload.noisy.numel() + upload.banning.numel()
        params = self.slots.sampling(rows) if asked else None  # greedy rows need none
        half = logits.dtype.itemsize < 4
        return sample(
            logits, positions, depth, depth_max, params, upload.noisy, upload.filtered, upload.banning,
            exact if half else None,
        )  # fmt: skip

    def _observe_path(
        self, plan: Plan, upload: Upload, accepted: Accepted, before: Tensor, taps: Tensor | None
    ) -> Tensor:
        """Shows the drafter the accepted path of each row, as a chain of depth + 1 tokens; returns its outlook."""
        if self.drafter is None:
            return torch.zeros_like(before)
        rows, width = upload.rows, plan.shape.max_commit
        bound = plan.max_bound + width
        if not self.drafter.kv_layers:  # it runs no model: which rows went on, and from where, is all there is to see
            nothing = rows[:0]
            seen = Batch(rows, nothing, nothing, nothing, nothing, before)
            self.drafter.observe(self.slots, seen, None, accepted.committed.flatten(), accepted.count, upload.noisy)
            return self.drafter.outlook(self.slots, rows, bound)
        step = _arange(width, rows)  # [D + 1]
        positions = before.unsqueeze(1) + step  # [B, D + 1]
        table = self.slots.table[rows, : bound + 1]  # up to the newest token's entry
        batch = Batch(
            rows=rows,
            ids=self.slots.tokens[rows.unsqueeze(1), positions].flatten(),
            positions=positions.flatten(),
            write_slots=table.gather(1, positions).flatten(),
            table=table,
            prefix_len=before,
            path=step.expand(len(plan.rows), width, width),
            path_len=(step + 1).expand(len(plan.rows), width),
            window=width,
        )
        if taps is not None:  # [B * N, T] -> the accepted path's rows
            picked = accepted.order[:, :width].unsqueeze(2)
            nodes = taps.view(len(plan.rows), plan.shape.nodes, -1)
            taps = nodes.gather(1, picked.expand(-1, -1, nodes.shape[2])).flatten(0, 1)
        self.drafter.observe(self.slots, batch, taps, accepted.committed.flatten(), accepted.count, upload.noisy)
        return self.drafter.outlook(self.slots, rows, bound)

    # -- prefill ----------------------------------------------------------------------------------------------------

    def _launch_prefill(self, plan: Plan, upload: Upload, started: float) -> Pending:
        slots = self.slots
        ids = slots.tokens[upload.token_rows, upload.positions]  # [M]
        batch = Batch(
            rows=upload.rows,
            ids=ids,
            positions=upload.positions,
            write_slots=slots.table[upload.token_rows, upload.positions],
            table=slots.table[upload.rows, : plan.max_bound + self._tail],
            prefix_len=slots.kv_len[upload.rows],
            chunks=tuple(_spans(plan)),
        )
        hidden, taps = self.model(batch.ids, batch.positions, self.attn.bind(batch, 0), self._taps)
        return Pending(plan, upload, hidden, taps, batch, None, None, started)

    def _settle_prefill(self, pending: Pending) -> Tensor:
        """Result rows: one token for each final chunk, none for the last chunk if it is not. So the first rows draw,
        and batch indices of the plan's rows are also those of the rows that draw."""
        assert all(chunk.final for chunk in pending.plan.chunks[:-1])
        plan, upload, slots = pending.plan, pending.upload, self.slots
        rows = upload.rows
        slots.kv_len.index_copy_(0, rows, upload.kv_len)
        zero = torch.zeros_like(rows)
        token, drawn, hint = zero, zero, zero
        if upload.final.numel():
            drawing = rows[: upload.final.numel()]
            position = upload.positions[upload.last].unsqueeze(1)  # [F, 1]
            hidden = pending.hidden[upload.last].unsqueeze(1)  # [F, 1, H]
            picked = self._sample(upload, drawing, hidden, position, torch.zeros_like(position), 0).squeeze(1)
            slots.last.index_copy_(0, drawing, picked)
            slots.tokens.index_put_((drawing, position.squeeze(1) + 1), picked)
            token = zero.index_copy(0, upload.final, picked)
            drawn = zero.index_fill(0, upload.final, 1)
        if self.drafter is not None:
            next_ids = slots.tokens[upload.token_rows, upload.positions + 1]
            self.drafter.observe(slots, pending.batch, pending.taps, next_ids, None, upload.noisy)
            if upload.final.numel():
                hint = self.drafter.outlook(slots, rows, plan.max_bound)
        return torch.stack((drawn, zero, hint, token, zero), 1)


def _spans(plan: Plan) -> Sequence[ChunkSpan]:
    offsets = np.cumsum([0, *(chunk.length for chunk in plan.chunks)])
    return [
        ChunkSpan(i, int(offsets[i]), chunk.start, chunk.length, chunk.final) for i, chunk in enumerate(plan.chunks)
    ]


def _arange(length: int, like: Tensor) -> Tensor:
    return torch.arange(length, device=like.device)
