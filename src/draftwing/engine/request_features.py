"""The device side of what few requests ask for: edited logits, guidance by the host, thinking budgets, limits on
drafts, predicted outputs, log probabilities. Steps without any of it never come here.

All of it works on a sub-batch, the rows that ask, so that a row's result does not depend on what runs with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.core import FORBIDDEN, NOT_FINITE, TOKEN, IntArray, Plan, TokenLogprobs
from draftwing.engine.devices.base import Device, Download
from draftwing.engine.row_table import RowTable
from draftwing.models.decoder import DecoderModel
from draftwing.ops.types import Calibration, Draft, Edits, SampleInputs
from draftwing.requests.request import MAX_PREDICTED, LogprobParams
from draftwing.sampling.edits import BudgetTable, EditTable, Nodes
from draftwing.sampling.logprobs import path_logprobs, prompt_logprobs, unpack, width
from draftwing.sched.guidance import Guides, Masks
from draftwing.spec.drafter import Drafter
from draftwing.spec.prediction import PredictedOutput, limit

_UNLIMITED = np.iinfo(np.int32).max


class Logprobs(NamedTuple):
    """Log probabilities on their way to the host: of a plan's rows [b, P, W], of its prompt parts [m, W] each."""

    rows: Download | None
    parts: list[Download]


class RequestFeatures:
    def __init__(
        self, model: DecoderModel, drafter: Drafter | None, table: RowTable, device: Device, calibration: Calibration
    ) -> None:
        self.model, self.drafter, self.table, self.device = model, drafter, table, device
        self._calibration = calibration
        rows, vocab = table.rows + 1, model.config.vocab_size
        self.edits = EditTable(rows, vocab, device.device, device.upload)
        self.budgets = BudgetTable(rows, device.device, device.upload)
        self.predicted = PredictedOutput(
            rows, min(table.length, MAX_PREDICTED), device.device, device.upload, model.config.image_token
        )
        self._limits: IntArray = np.full((rows, 3), _UNLIMITED, np.int64)  # depth, topk, nodes

    def admit(self, plan: Plan) -> None:
        """Takes note of what the plan's new requests ask for."""
        for admit in plan.admits:
            request = admit.request
            self._limits[admit.row] = request.limits or _UNLIMITED
            if admit.edited or self.edits.is_edited(admit.row):  # by an earlier request
                self.edits.write(admit.row, request.params, admit.prompt_len, request.bad_word_ids or ())
            if request.thinking is not None:
                self.budgets.write(admit.row, request.thinking, admit.prompt_len)
            if request.prediction:
                self.predicted.write(admit.row, request.prediction, admit.prompt_len)

    # -- drafts -----------------------------------------------------------------------------------------------------

    def constrain(self, plan: Plan, rows: Tensor, guidance: Guides) -> None:
        """Lets the drafter begin with tokens that the grammars allow."""
        masks = guidance.roots() if self.drafter is not None and self.drafter.kv_layers else None
        if masks is None or self.drafter is None:
            return
        at, bits = self._rows_of(plan.guided), self._bits(masks[:, None])
        noisy = self._rows_of(_places(plan.guided, plan.noisy))
        self.drafter.constrain(self.table, rows[at], self.edits.banned(bits).squeeze(1), noisy)

    def adjust(self, plan: Plan, rows: Tensor, draft: Draft, guidance: Guides | None) -> Draft:
        """Returns the draft with predicted text in it, within the requests' limits, and as the host wants it."""
        shape = plan.shape
        if len(plan.predicted):
            longest = self.predicted.longest(plan.rows[plan.predicted].tolist())
            draft = self.predicted.merge(
                draft, self.table, rows, self._rows_of(plan.predicted), shape, longest, self.device.ops,
                self._calibration,
            )  # fmt: skip
        if len(plan.limited):
            wanted = np.full((len(rows), 3), _UNLIMITED, np.int64)  # of padding, too
            wanted[: len(plan.rows)] = self._limits[plan.rows]
            limits = self.device.upload(wanted.ravel()).view(-1, 3)
            draft = limit(draft, shape.depth, *limits.unbind(1))
        if guidance is not None and shape != PLAIN:
            draft = self._fit(plan, draft, shape, guidance)
        return draft

    def _fit(self, plan: Plan, draft: Draft, shape: TreeShape, guidance: Guides) -> Draft:
        """Waits for the drafts of the guided rows: what they may be is known to the host alone."""
        at = self._rows_of(plan.guided)
        packed = torch.cat((draft.tokens[at], draft.parent[at], draft.alive[at].long()), 1)  # [g, 3 * N]
        tokens, parent, alive = np.split(self.device.download(packed).wait(), 3, axis=1)
        fitted = guidance.fit(tokens, parent, alive.astype(bool), shape.depth)
        host = np.concatenate([part.astype(np.int64).ravel() for part in fitted])
        tokens_, parent_, alive_ = self.device.upload(host).view(3, len(plan.guided), shape.nodes)
        return draft._replace(
            tokens=draft.tokens.index_copy(0, at, tokens_),
            parent=draft.parent.index_copy(0, at, parent_),
            alive=draft.alive.index_copy(0, at, alive_.bool()),
        )

    def confidence(self, plan: Plan, rows: Tensor, confidence: Tensor) -> Tensor:
        """Returns `confidence` [B] with what the predictions promise."""
        if not len(plan.predicted):
            return confidence
        at = self._rows_of(plan.predicted)
        longest = self.predicted.longest(plan.rows[plan.predicted].tolist())
        promised = self.predicted.confidence(self.table, rows[at], longest)
        return confidence.index_copy(0, at, torch.maximum(confidence[at], promised))

    def draft_edits(self, plan: Plan | None) -> Edits | None:
        """Returns what drafts are told of the edits of a plan that asks for more, None where there are none; without a
        plan those of all rows, by value."""
        edits, at = self.edits, None
        if plan is not None:
            used = edits.features(plan.rows[plan.edited].tolist())
            if not (used.counts or used.seen or used.repeats or used.biases):
                return None
            at = self._rows_of(plan.edited)
        return edits.of_rows(at)

    # -- sampling ---------------------------------------------------------------------------------------------------

    def draw(self, plan: Plan, drawn: SampleInputs, target: Tensor, guidance: Guides | None) -> Tensor:
        """Returns `target` [B, N] with the tokens of edited rows drawn from their edited logits (`FORBIDDEN` where
        the edits left none), and with those that end reasoning whose budget is spent."""
        if not len(plan.edited) + len(plan.thinking):
            return target
        masks = guidance.masks() if guidance is not None else None
        processed = plan.guided[guidance.processed] if guidance is not None else plan.guided[:0]
        for which in (np.setdiff1d(plan.edited, processed), processed):
            if len(which):
                at = self._rows_of(which)
                edited = self._draw_rows(plan, which, at, drawn, masks, guidance)
                # What edits have made of the logits is no fault of the model's.
                target = target.index_copy(0, at, edited | target.index_select(0, at) & NOT_FINITE)
        return self._end_reasoning(plan, drawn, target, masks) if len(plan.thinking) else target

    def _end_reasoning(self, plan: Plan, drawn: SampleInputs, target: Tensor, masks: Masks | None) -> Tensor:
        """After all else: nothing forbids the end marker, but a grammar may first want the rest of a character."""
        at = self._rows_of(plan.thinking)
        drew, rows = target.index_select(0, at), plan.rows[plan.thinking].tolist()
        nodes = Nodes(
            drawn.rows[at], self.table.tokens, drawn.positions[at, 0], plan.max_kv_len, drawn.tokens[at],
            drawn.path[at], drawn.path_len[at],
        )  # fmt: skip
        forced = self.budgets.forced(rows, nodes)
        now = forced >= 0
        bits = self._masks_of(plan.thinking, plan, masks)
        if bits is not None:
            words = bits.gather(-1, forced.clamp(min=0)[..., None] >> 5).squeeze(-1)
            now = now & ((words >> (forced & 31)) & 1 == 1)
        return target.index_copy(0, at, torch.where(now, forced | drew & NOT_FINITE, drew))

    def _draw_rows(
        self,
        plan: Plan,
        which: IntArray,
        at: Tensor,
        drawn: SampleInputs,
        masks: Masks | None,
        guidance: Guides | None,
    ) -> Tensor:
        """Returns the tokens, with `FORBIDDEN`. which: batch indices, `at` on the device. All of them have a logits
        processor, or none has."""
        part = drawn.pick(at)
        guided = _places(plan.guided, which)  # of `plan.guided`
        bits = self._masks_of(which, plan, masks)
        features = self.edits.features(plan.rows[which].tolist(), guided=bits is not None)
        nodes = Nodes(
            part.rows, self.table.tokens, part.positions[:, 0], plan.max_kv_len, part.tokens, part.path, part.path_len
        )
        edit = self.edits.apply(part.logits.float(), features, nodes, bits)
        logits = edit.logits
        processing = guidance is not None and len(guided) > 0 and int(guided[0]) in guidance.processed
        if guidance is not None and processing:
            logits = self._processed(logits, guided, guidance)

        def exact(ids: Tensor, only: Tensor | None) -> Tensor:
            hidden = part.hidden if only is None else part.hidden[only]
            return edit.at(self.model.exact_logits(hidden, ids), ids, only)

        half = drawn.logits.dtype.itemsize < 4
        noisy, filtered, banning = (
            self._rows_of(_places(which, some)) for some in (plan.noisy, plan.filtered, plan.banning)
        )
        params = self.table.sampling(part.rows)
        rescore = exact if half and not processing else None
        drawn_from = logits, part.positions, part.depth, part.depth_max
        tokens = self.device.ops.sample(*drawn_from, params, noisy, filtered, banning, rescore)
        ids = tokens & TOKEN
        # The best is not finite where all is banned, by the sampler, too; or where an edit wants a token that much.
        wanted = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) == torch.inf
        return torch.where((tokens != ids) & ~wanted, ids | FORBIDDEN, ids)

    def _processed(self, logits: Tensor, guided: IntArray, guidance: Guides) -> Tensor:
        """logits [b, N, V] after the rows' processors; what was banned stays banned."""
        assert logits.dtype == torch.float32, "two of them make a word of 64 bits"
        words = pad(logits.flatten(), (0, logits.numel() % 2)).view(torch.int64)
        host = self.device.download(words).wait()
        rows = torch.from_numpy(host).view(logits.dtype)[: logits.numel()].view(logits.shape)  # in `host`'s memory
        for row, number in enumerate(guided.tolist()):
            guidance.process(number, rows[row])
        edited = self.device.upload(host).view(logits.dtype)[: logits.numel()].view(logits.shape)
        return edited.masked_fill(logits == -torch.inf, -torch.inf)

    def _masks_of(self, which: IntArray, plan: Plan, masks: Masks | None) -> Tensor | None:
        """Returns masks of the batch indices `which`, [b, N, W] int32 on the device; None where none of them has a
        mask. masks: of `plan.guided`."""
        guided = _places(plan.guided, which)
        if masks is None or not len(guided):
            return None
        wide = np.full((len(which), *masks.shape[1:]), 0xFFFFFFFF, np.uint32)
        wide[_places(which, plan.guided)] = masks[guided]
        return self._bits(wide)

    def _bits(self, masks: Masks) -> Tensor:
        """[g, N, W] uint32 on the host -> int32 on the device"""
        host = np.zeros(masks.size + masks.size % 2, np.uint32)  # whole int64 words
        host[: masks.size] = masks.ravel()
        return self.device.upload(host.view(np.int64)).view(torch.int32)[: masks.size].view(masks.shape)

    # -- log probabilities ------------------------------------------------------------------------------------------

    def path_logprobs(self, plan: Plan, drawn: SampleInputs, nodes: Tensor, tokens: Tensor) -> Download | None:
        """Returns log probabilities of what a step gives. nodes [B, P]: those that the step's tokens [B, P] were drawn
        at."""
        if not plan.logprobs:
            return None
        at = self._rows_of(np.asarray([i for i, _ in plan.logprobs]))
        every = [params for _, params in plan.logprobs]
        top, ids = _widest(every)
        place = nodes[at].unsqueeze(2)  # [b, P, 1]
        hidden = drawn.hidden[at].gather(1, place.expand(-1, -1, drawn.hidden.shape[2]))
        if any(one.shown for one in every):
            logits = drawn.logits[at].gather(1, place.expand(-1, -1, drawn.logits.shape[2]))
            half = logits.dtype.itemsize < 4
            wanted = self.device.upload(ids.ravel()).view(ids.shape) if ids.size else None
            exact = (lambda chosen: self.model.exact_logits(hidden, chosen)) if half else None
            packed = path_logprobs(logits, tokens[at], top, wanted, exact)
        else:
            packed = hidden.new_zeros((*hidden.shape[:2], width(0, 0)), dtype=torch.float64)
        return self._send(with_hidden(packed, hidden, every).flatten(1))

    def prompt_logprobs(self, plan: Plan, hidden: Tensor, positions: Tensor, offsets: Sequence[int]) -> list[Download]:
        """Returns log probabilities of prompts. hidden [M, H] and positions [M]: of the plan's queries; offsets: of its
        chunks."""
        half = hidden.dtype.itemsize < 4
        sent = []
        for part in plan.prompt_parts:
            begin = offsets[part.chunk] + part.first
            here = slice(begin, begin + part.length)
            row = int(plan.rows[part.chunk])
            following = self.table.tokens[row].index_select(0, positions[here] + 1).long()
            ids = np.asarray(part.params.token_ids, np.int64)
            if part.params.shown:
                packed = prompt_logprobs(
                    hidden[here], self.model.logits, following, part.params.top,
                    self.device.upload(ids) if ids.size else None, self.model.exact_logits if half else None,
                )  # fmt: skip
            else:
                packed = hidden.new_zeros((part.length, width(0, 0)), dtype=torch.float64)
            sent.append(self._send(with_hidden(packed, hidden[here], [part.params])))
        return sent

    def _send(self, packed: Tensor) -> Download:
        """packed [b, n] float64"""
        return self.device.download(packed.contiguous().view(torch.int64))

    def _rows_of(self, indices: IntArray) -> Tensor:
        return self.device.upload(np.ascontiguousarray(indices))


def unpacked(plan: Plan, sent: Logprobs) -> tuple[tuple[list[TokenLogprobs], ...], tuple[list[TokenLogprobs], ...]]:
    """Waits for log probabilities: of the plan's rows, and of its prompt parts."""
    rows: tuple[list[TokenLogprobs], ...] = ()
    if sent.rows is not None:
        every = [params for _, params in plan.logprobs]
        top, _ = _widest(every)
        packed = _floats(sent.rows).reshape(len(every), plan.shape.max_commit, -1)
        rows = tuple(unpack(one, top, params) for one, params in zip(packed, every, strict=True))
    parts = zip(plan.prompt_parts, sent.parts, strict=True)
    return rows, tuple(unpack(_floats(one), part.params.top, part.params) for part, one in parts)


def with_hidden(packed: Tensor, hidden: Tensor, asked: Sequence[LogprobParams]) -> Tensor:
    """Returns log probabilities [..., n] float64 with hidden states [..., H] behind them, if any of a batch wants
    these: in float32, two in a number."""
    if not any(one.hidden for one in asked):
        return packed
    before, size = packed.shape[-1], hidden.shape[-1]
    out = pad(packed, (0, (size + 1) // 2))  # the one copy: a whole chunk's states are as much as its activations
    out.view(torch.float32)[..., 2 * before : 2 * before + size] = hidden
    return out


def _floats(download: Download) -> npt.NDArray[np.float64]:
    return cast(npt.NDArray[np.float64], download.wait().view(np.float64))


def _widest(params: Sequence[LogprobParams]) -> tuple[int, IntArray]:
    """Returns the most top tokens that any of them wants, and the further tokens [b, T] of each, padded with token
    0."""
    longest = max(len(one.token_ids) for one in params)
    ids = np.zeros((len(params), longest), np.int64)
    for row, one in enumerate(params):
        ids[row, : len(one.token_ids)] = one.token_ids
    return max(one.top for one in params), ids


def _places(among: IntArray, some: IntArray) -> IntArray:
    """Returns where in `among` the elements are that are in `some`, too."""
    return np.flatnonzero(np.isin(among, some))
