"""The last stage of a step: sample, accept, advance the rows, let the drafter extend or keep what it will need, and
pack the result.

`Simulation` is acceptance of a chosen length in place of the real one, to measure what a step costs without weights
that agree: only the target's samples are altered, so that the walk of `TreeOps.commit` takes as many drafts as it
should. The text is worthless, and everything that is reported of such a run says so."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from draftwing.core import TOKEN, Plan
from draftwing.engine.devices.base import Download
from draftwing.engine.draft_kv_backlog import DraftKVBacklog
from draftwing.engine.request_features import Logprobs, RequestFeatures
from draftwing.engine.row_table import RowTable, Upload
from draftwing.engine.step_state import Batches, DraftBatch, Pending, TreeStep, Verified
from draftwing.errors import ConfigError
from draftwing.models.decoder import DecoderModel
from draftwing.ops.attention.batch import Batch
from draftwing.ops.table import TorchOps
from draftwing.ops.tree.spec import FRACTION_BITS
from draftwing.ops.types import (
    CONFIDENCE,
    HEAD,
    Calibration,
    Committed,
    Draft,
    Edits,
    Rescoring,
    SampleInputs,
    SamplingGroups,
    Tree,
)
from draftwing.spec.drafter import Drafter, SeenTokens


@dataclass(frozen=True)
class Simulation:
    """mean: tokens that a step commits on average with trees of `depth` levels, the target's own included. Each level's
    draft is accepted with the same chance where that of the level before was, so trees that are less deep bring less.
    vocab: the target's. topk: siblings of a level, of which one may be accepted."""

    mean: float
    depth: int
    vocab: int
    topk: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= self.depth + 1:
            raise ConfigError(f"simulate_accept_length must be from 1 to {self.depth + 1}, found {self.mean}")

    @cached_property
    def chance(self) -> int:
        """Returns a draft's chance, out of 2^FRACTION_BITS: the largest with 1 + p + p^2 + ... + p^depth <= mean."""
        low, high, one = 0, (1 << FRACTION_BITS) + 1, 1 << FRACTION_BITS
        while high - low > 1:
            middle = (low + high) // 2
            length = sum((middle / one) ** level for level in range(self.depth + 1))
            low, high = (middle, high) if length <= self.mean else (low, middle)
        return low

    @property
    def share(self) -> float:
        """Returns the share of drafts that are accepted where their parent is."""
        return self.chance / (1 << FRACTION_BITS) / self.topk

    def __call__(self, ops: TorchOps, draft: Draft, tree: Tree, target: Tensor, rows: Tensor, kv_len: Tensor) -> Tensor:
        """The samples to give to `TorchOps.commit`: target [B, N] -> [B, N]; rows, kv_len [B], which the choice depends
        on."""
        if tree.path.shape[2] == 1:  # there are no drafts
            return target
        return ops.simulate(draft, tree, target, rows, kv_len, self.chance, self.vocab)


class CommitStage:
    """Of each kind of step. Packed results are those of `Committed`, int64 [rows, 2 + max_commit + 2 * nodes]."""

    def __init__(
        self, model: DecoderModel, drafter: Drafter | None, table: RowTable, ops: TorchOps, batches: Batches,
        special: RequestFeatures, backlog: DraftKVBacklog | None, calibration: Calibration,
        simulation: Simulation | None,
    ) -> None:  # fmt: skip
        """backlog: of a drafter with KV.  calibration: learns of drafts.  simulation: decides what is accepted."""
        self._model, self._drafter, self._table, self._ops = model, drafter, table, ops
        self._batches, self._features, self._backlog = batches, special, backlog
        self._calibration, self._simulation = calibration, simulation
        # The confidence of every row, where nobody needs to ask for it.
        self._confidence = drafter.initial_confidence if drafter is not None and drafter.fixed_confidence else 0

    def tree(self, step: TreeStep, drafted: DraftBatch, verified: Verified) -> Tensor:
        """Commits a tree step whose rows ask for drafts and sampling alone: what graphs hold."""
        if drafted.place is None:
            nodes = self._nodes(step, drafted, verified)
            edits = self._features.edits.of_rows() if step.edited else None
            target = self._sample(step.groups, step.filtered, nodes, edits)
        else:
            assert not step.edited
            target = self._sample(step.groups, step.filtered, self._queries(drafted, verified))
            target = self._ops.take_rows(target, drafted.place.flatten()).view_as(drafted.place)
        return self._accept(step, drafted, verified, target)

    def special(self, pending: Pending) -> tuple[Tensor, Logprobs]:
        """Commits a tree step in which rows ask for more."""
        plan, step, drafted, verified = pending.plan, pending.step, pending.drafted, pending.verified
        assert step is not None and drafted is not None and verified is not None
        drawn = self._nodes(step, drafted, verified)
        target = self._sample(step.groups, step.filtered, drawn)
        with self._table.device.torch_in_active_threads():  # the model and drafters have all: see `CpuDevice`
            target = self._features.draw(plan, drawn, target, pending.guidance)
        packed = self._accept(step, drafted, verified, target)
        packed[:, CONFIDENCE] = self._features.confidence(plan, step.rows, packed[:, CONFIDENCE])
        width = step.shape.max_commit
        tokens, nodes = packed[:, HEAD : HEAD + width] & TOKEN, packed[:, HEAD + width : HEAD + 2 * width]
        with self._table.device.torch_in_active_threads():
            return packed, Logprobs(self._features.path_logprobs(plan, drawn, nodes, tokens), [])

    def _nodes(self, step: TreeStep, drafted: DraftBatch, verified: Verified) -> SampleInputs:
        draft, batch, tree, *_ = drafted
        size = draft.tokens.shape
        hidden = verified.hidden.view(*size, -1)  # [B, N, H]
        return SampleInputs(
            step.rows, self._logits(hidden), hidden, batch.positions.view(size), tree.depth, step.shape.depth,
            draft.tokens, tree.path, tree.path_len,
        )  # fmt: skip

    def _queries(self, drafted: DraftBatch, verified: Verified) -> SampleInputs:
        """Returns nodes of several rows, each as a row of its own; these rows ask for nothing special."""
        batch, (_, tree) = drafted.batch, self._batches.roots(drafted.batch.ids.shape[0])
        hidden = verified.hidden.unsqueeze(1)  # [R, 1, H]
        return SampleInputs(
            batch.rows, self._logits(hidden), hidden, batch.positions.unsqueeze(1), tree.depth, 0,
            batch.ids.unsqueeze(1), tree.path, tree.path_len,
        )  # fmt: skip

    def _accept(self, step: TreeStep, drafted: DraftBatch, verified: Verified, target: Tensor) -> Tensor:
        """target [B, N]: what was drawn at every node -> the packed result."""
        draft, batch, tree, mark, place = drafted
        trees = batch.ragged
        prefix_len = batch.prefix_len if trees is None else trees.prefix_len[: len(step.rows)]
        if self._simulation is not None:
            target = self._simulation(self._ops, draft, tree, target, step.rows, prefix_len)
        drafter, skips = self._drafter, self._drafter is not None and self._drafter.skips_extend(step.shape)
        with_path = drafter is not None and bool(drafter.kv_layers or drafter.aux_layers)
        if skips:  # else it is the root alone, or lies with the slots
            with_path &= step.shape.depth > 0 and self._backlog is not None and not self._backlog.by_slot
        done = self._ops.commit(
            self._table, step.rows, draft, tree, target, prefix_len, self._confidence, with_path, mark,
            None if mark is None else self._calibration,
        )  # fmt: skip
        if self._table.states is not None:
            self._ops.advance_states(self._table.states, step.rows, prefix_len, step.shape.nodes)
        if self._backlog is not None:
            self._backlog.keep_by_slot(batch.write_slots, verified.aux_hidden)
        if drafter is not None:
            if self._table.heads is not None:
                drafter.beside_adapters(step.adapted)
            self._show(drafter, skips, step, done, prefix_len, verified.aux_hidden, place)
        if drafter is not None and not drafter.fixed_confidence:
            bound = step.bound + step.shape.max_commit
            drafter.confidence(self._table, step.rows, bound, out=done.packed[:, CONFIDENCE])
        return done.packed

    def prefill(self, pending: Pending) -> tuple[Tensor, Logprobs | None]:
        """Commits a prefill and returns result rows: one token for each final chunk, none for the others, which come
        last. So the first rows draw, and batch indices of the plan's rows are also those of the rows that draw."""
        final = [chunk.final for chunk in pending.plan.chunks]
        assert all(final[: sum(final)])
        plan, upload, batch, verified = pending.plan, pending.upload, pending.batch, pending.verified
        assert upload is not None and batch is not None and verified is not None
        table = self._table
        rows = upload.rows
        table.kv_len.index_copy_(0, rows, upload.kv_len)
        if table.states is not None:
            self._ops.advance_states(table.states, rows, upload.kv_len - 1)
        zero = torch.zeros_like(rows)
        token, drawn, confidence = zero, zero, zero + self._confidence if self._confidence else zero
        logprobs: Download | None = None
        sent: Logprobs | None = None
        if upload.final.numel():
            picked, logprobs = self._draw_first(pending, plan, upload, verified)
            token = zero.index_copy(0, upload.final, picked)
            drawn = zero.index_fill(0, upload.final, 1)
        if self._drafter is not None:
            if table.heads is not None:
                self._drafter.beside_adapters(plan.adapted)
            self._show_chunks(self._drafter, plan, upload, batch, verified.aux_hidden)
            if upload.final.numel() and not self._drafter.fixed_confidence:
                confidence = self._drafter.confidence(table, rows, plan.max_kv_len)
        if plan.special:
            confidence = self._features.confidence(plan, rows, confidence)
            offsets = [chunk.offset for chunk in batch.chunks]
            sent = Logprobs(logprobs, self._features.prompt_logprobs(plan, verified.hidden, upload.positions, offsets))
        return torch.stack((confidence, drawn, token, zero, zero), 1), sent

    def _show_chunks(
        self, drafter: Drafter, plan: Plan, upload: Upload, batch: Batch, aux_hidden: Tensor | None
    ) -> None:
        """Shows the drafter the chunks that it is to see at once, and keeps the others. Of those that draw, and of
        those that do not, the former come first."""
        end, rows = 0, upload.rows
        by_slot = self._backlog is not None and self._backlog.by_slot
        if self._backlog is not None:
            self._backlog.defer(plan.chunks, aux_hidden)
            self._backlog.keep_by_slot(batch.write_slots, aux_hidden)
            self._backlog.reset(rows)
        for seen, run in groupby(chunk.kept is None for chunk in plan.chunks):
            first, end = end, end + sum(1 for _ in run)
            if not seen and not by_slot:
                continue
            part = batch.part(first, end)._replace(mutual="")  # drafters' own layers see what comes before
            begin = batch.chunks[first].offset
            here = slice(begin, begin + part.ids.shape[0])
            next_ids = self._table.tokens_at(upload.token_rows[here], upload.positions[here] + 1)
            noisy = upload.groups.noisy
            if first or end < upload.final.numel():
                some = plan.noisy[(plan.noisy >= first) & (plan.noisy < end)] - first
                noisy = self._table.device.upload(some)
            if seen:
                fed = None if aux_hidden is None else aux_hidden[here]
                drafter.extend(SeenTokens(self._table, part, fed, next_ids, None, noisy))
            elif self._backlog is not None:
                drafter.watch(SeenTokens(self._table, part, None, next_ids, None, noisy))
                self._backlog.reset(rows[first:end], 1)  # a pass over the row sees the newest position last

    def _draw_first(
        self, pending: Pending, plan: Plan, upload: Upload, verified: Verified
    ) -> tuple[Tensor, Download | None]:
        """Returns the token after each final chunk [F], and the log probabilities that are wanted of them."""
        table = self._table
        rows = upload.rows[: upload.final.numel()]
        position = upload.positions[upload.last].unsqueeze(1)  # [F, 1]
        hidden = verified.hidden[upload.last].unsqueeze(1)  # [F, 1, H]
        _, tree = self._batches.roots(rows.shape[0])
        tokens = table.tokens_at(rows.unsqueeze(1), position)
        zero = torch.zeros_like(position)
        logits = hidden[..., :0] if plan.pooled else self._logits(hidden)
        nodes = SampleInputs(rows, logits, hidden, position, zero, 0, tokens, tree.path, tree.path_len)
        # What is drawn for hidden states alone nobody reads.
        drawn = zero if plan.pooled else self._sample(upload.groups, len(plan.filtered) > 0, nodes)  # [F, 1]
        logprobs = None
        if plan.special:
            with table.device.torch_in_active_threads():
                drawn = self._features.draw(plan, nodes, drawn, pending.guidance)
                picked = drawn & TOKEN
                logprobs = self._features.path_logprobs(plan, nodes, torch.zeros_like(picked), picked)
        picked = drawn & TOKEN
        table.last.index_copy_(0, rows, picked.squeeze(1))
        table.tokens.index_put_((rows, position.squeeze(1) + 1), picked.squeeze(1).to(table.tokens.dtype))
        return drawn.squeeze(1), logprobs

    # -- what these are made of --------------------------------------------------------------------------------------

    def _logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, N, H] -> [B, N, V]"""
        return self._model.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

    def _sample(
        self, groups: SamplingGroups, filtered: bool, drawn: SampleInputs, edits: Edits | None = None
    ) -> Tensor:
        """Returns a token for every node, [B, N]."""
        rescoring = None
        if drawn.logits.dtype.itemsize < 4:
            rescoring = Rescoring(drawn.hidden, self._model.rescored_by, self._model.exact_logits)
        return self._ops.draw(drawn, self._table, groups, filtered, rescoring, edits)

    def _show(
        self, drafter: Drafter, skips: bool, step: TreeStep, done: Committed, before: Tensor, aux_hidden: Tensor | None,
        place: Tensor | None,
    ) -> None:  # fmt: skip
        """Shows the drafter the accepted path of each row, as a chain of depth + 1 tokens, or keeps what it will need.
        place [B, N]: which query of the target's forward a node was, None: all were, in their order."""
        rows, path, width, noisy = step.rows, done.path, step.shape.max_commit, step.groups.noisy
        nodes = None if path is None else path.nodes
        if nodes is not None and place is not None:
            nodes = self._ops.take_rows(place.view(-1, 1), nodes).flatten()
        if skips:
            assert self._backlog is not None
            self._backlog.keep(rows, before, done.count, aux_hidden, nodes)
            path = None
        elif nodes is not None and aux_hidden is not None:
            aux_hidden = self._ops.take_rows(aux_hidden, nodes)  # [R, T] -> [B * (D + 1), T]
        batch = self._batches.accepted(rows, before, path, width, step.bound + width)
        seen = SeenTokens(self._table, batch, aux_hidden, done.tokens.flatten(), done.count, noisy)
        if skips:
            drafter.watch(seen._replace(aux_hidden=None))
        else:
            drafter.extend(seen)
