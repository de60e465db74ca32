"""Runs plans: the device side of a step, which never waits for the device and never reads from it.

launch: let the drafter catch up, upload, draft, target forward.  commit: sample, accept, advance the rows, let the
drafter extend or keep what it will need, pack.
Everything in between is device state indexed by row; the host learns of it from the packed result.

A tree step has three stages, each a function of the rows and of the stage before: `draft` (propose, the target's
batch), `verify` (the target's forward), `commit`. On CUDA they are captured as graphs, see `engine/graphs/cuda.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from draftwing.core import PLAIN, TOKEN, IntArray, Plan, StepResult, TreeShape
from draftwing.engine.batches import Batches, Drafted
from draftwing.engine.device import Device, Download
from draftwing.engine.graphs.cpu_tape import RecordedStages
from draftwing.engine.graphs.cuda import MOST_NODES, GraphCache, Key
from draftwing.engine.graphs.prefill import PrefillGraphs
from draftwing.engine.lag import Lag
from draftwing.engine.mirror import NO_OTHERS, Mirror
from draftwing.engine.row_options import Drawn, Logprobs, SpecialRows, unpacked
from draftwing.engine.row_table import RowTable, Upload
from draftwing.engine.traces import Traces, fetched
from draftwing.models.decoder import DecoderModel
from draftwing.ops.attention import AttnBackend, Batch, TiledAttention
from draftwing.ops.torch.assign import forget, new_calibration
from draftwing.ops.torch.tree import roots_alone
from draftwing.ops.types import CONFIDENCE, HEAD, Committed, Draft, Drawing, Rescoring, unpack
from draftwing.sched.guidance import Guides
from draftwing.spec.drafter import Drafter
from draftwing.spec.simulate import Simulation

T = TypeVar("T")
FORGET_EVERY = 64  # steps with drafts: see `forget`


class Verified(NamedTuple):
    """What the target's forward gives."""

    hidden: Tensor  # tree: [B * N, H]; prefill: [M, H]
    aux_hidden: Tensor | None


class TreeStep(NamedTuple):
    """A tree step on the device. With a key its graphs are replayed, on rows that are padded to the key's size."""

    key: Key | None
    rows: Tensor  # [B]
    shape: TreeShape
    bound: int  # host bound of kv_len; the table's length in graphs, which run at any length
    drawing: Drawing  # nobody, where it is decided on the device row by row
    filtered: bool  # whether any row has top-k, top-p or min-p: known on the host, for filters cost something
    special: Plan | None = None  # where rows ask for more than drafts and sampling; never in graphs
    guidance: Guides | None = None  # the host's part in it
    total: int = 0  # nodes that are verified, over all rows; 0: all


class Pending(NamedTuple):
    """A launched step: the target has run, nothing is sampled yet."""

    plan: Plan
    started: tuple[Any, Any]  # marks of the device: before and after the drafter caught up; one where it had not to
    verified: Verified | None  # None, as `drafted`, where it is left in the memory of graphs
    upload: Upload | None = None  # prefill only
    batch: Batch | None = None
    step: TreeStep | None = None  # tree only
    drafted: Drafted | None = None
    guidance: Guides | None = None  # the host's part in the plan
    drafts: Download | None = None  # of the traced rows, see `Traces`


class InFlight:
    """A committed step whose result is on its way to the host."""

    def __init__(
        self,
        plan: Plan,
        download: Download,
        seconds: Callable[[], tuple[float, float]],
        logprobs: Logprobs | None = None,
        drafts: Download | None = None,
    ) -> None:
        """seconds: that the device took, from the later of the launch and the end of the step before, and of them those
        in which the drafter caught up; known once the result is there.  drafts: as `Traces.fetch` gives them."""
        self.plan = plan
        self._download = download
        self._seconds = seconds
        self._logprobs = logprobs
        self._drafts = drafts

    def wait(self) -> StepResult:
        packed = self._download.wait()
        rows, parts = unpacked(self.plan, self._logprobs) if self._logprobs is not None else ((), ())
        seconds, catching_up = self._seconds()
        rest = dict(logprobs=rows, prompt_logprobs=parts, drafts=fetched(self._drafts))
        return unpack(packed, self.plan.shape, seconds=seconds, catching_up=catching_up, **rest)


class Executor:
    def __init__(
        self,
        model: DecoderModel,
        drafter: Drafter | None,
        table: RowTable,
        attn: AttnBackend,
        device: Device,
        graph_size: int = 0,
        simulation: Simulation | None = None,
        chunk: int = 0,
    ) -> None:
        """graph_size: largest batch that `capture` captures graphs of; simulation: decides what is accepted; chunk:
        most queries of a prefill, 0 for any number."""
        self.model = model
        self.drafter = drafter
        self.table = table
        self.attn = attn
        self.device = device
        self.ops = device.ops
        self._simulation = simulation
        self.graphs = GraphCache(device, table.rows, graph_size)
        if not graph_size and self.ops.records_calls:
            self.graphs = RecordedStages(device, table.rows)
        self.prefills: PrefillGraphs | None = None
        if graph_size and attn.takes_tiles:
            tiled, heads = cast(TiledAttention, attn), model.layer_config.heads
            self.prefills = PrefillGraphs(device, table, tiled, heads, chunk or table.length, self._target)
        self.aux_layers: tuple[int, ...] = drafter.aux_layers if drafter is not None else ()
        self._lag: Lag | None = None
        if drafter is not None and drafter.kv_layers:
            width = len(self.aux_layers) * model.config.hidden_size
            self._lag = Lag(drafter, table, self.ops, width, model.norm.weight.dtype)
        self._tail = drafter.tail if drafter is not None else 0
        # The confidence of every row, where nobody needs to ask for it.
        self._confidence = drafter.initial_confidence if drafter is not None and drafter.fixed_confidence else 0
        self._batches = Batches(table, device.ops)
        self.calibration = new_calibration(device.device)
        self._kept_calibration: Sequence[Tensor] = ()
        if drafter is not None:
            drafter.calibration = self.calibration
        self._traces = Traces(device)
        self._steps = 0  # with drafts
        self._nobody = Drawing(*torch.empty(3, 0, dtype=torch.int64, device=device.device))
        self._special = SpecialRows(model, drafter, table, device, self.calibration)
        self.run_stage: Callable[..., Any] = self.graphs.run  # whoever wants to time the stages wraps it
        self.mirror: Mirror = NO_OTHERS  # tells the other ranks of `launch` and of what is done `everywhere`

    def everywhere(self, function: Callable[..., T], *args: Any) -> T:
        """Calls the function of a module, or a method, with the executor of every rank, this one's last."""
        self.mirror.call(function, *args)
        return function(self, *args)

    @torch.inference_mode()
    def launch(self, plan: Plan, guidance: Guides | None = None) -> Pending:
        """guidance: the host's part in the plan. With it this waits for the drafts, if there are any."""
        guidance = self.mirror.step(plan, guidance)
        started = begun = self.device.mark()
        if plan.catch_up is not None:
            assert self._lag is not None
            proposes = plan.kind == "tree" and not self._lag.lags(plan.shape)
            self._lag.catch_up(plan.catch_up, plan.rows[plan.noisy], proposes)
            begun = self.device.mark()
        self._special.admit(plan)
        if plan.kind == "prefill":
            return self._launch_prefill(plan, (started, begun), guidance)
        step = self._tree_step(plan, guidance)
        drafted, verified = self._forward(step, self.run_stage)
        drafts = None
        if len(plan.traced) and step.shape.depth:
            drafts = self._traces.fetch(plan, step.key, None if drafted is None else drafted.draft)
        marks = started, begun
        return Pending(plan, marks, verified, step=step, drafted=drafted, guidance=guidance, drafts=drafts)

    @torch.inference_mode()
    def commit(self, pending: Pending) -> InFlight:
        plan, step, logprobs = pending.plan, pending.step, None
        if step is None:
            packed, logprobs = self._commit_prefill(pending)
        elif plan.special:
            packed, logprobs = self.run_stage("commit", None, self._commit_special, pending)
        else:
            packed = self._finish(step, pending.drafted, pending.verified, self.run_stage)[: len(plan.rows)]
        download = self.device.download(packed)
        seconds = partial(self._seconds, *pending.started, download.done)
        return InFlight(plan, download, seconds, logprobs, pending.drafts)

    def _seconds(self, started: Any, begun: Any, done: Any) -> tuple[float, float]:
        """Between marks, all past: of a step, and of them those in which the drafter caught up."""
        return self.device.seconds(started, done), self.device.seconds(started, begun)

    def set_rows(self, rows: IntArray, size: int) -> None:
        """The rows that replays of graphs run, of so many; the others are the dummy."""
        self.graphs.set_rows(rows, size)

    def flush(self) -> None:
        """Lets the drafter forget what it has learnt."""
        if self.drafter is not None:
            self.drafter.flush()

    @torch.inference_mode()
    def clear(self, slots: IntArray) -> None:
        """Zeroes KV of slots [n] that is not finite: times a weight of 0 it would still be NaN."""
        self.attn.pool.clear(self.device.upload(slots))

    def keep_calibration(self) -> None:
        """For `restore_calibration`: what follows says nothing of a drafter."""
        self._kept_calibration = [counts.clone() for counts in self.calibration]

    def restore_calibration(self) -> None:
        for counts, kept in zip(self.calibration, self._kept_calibration, strict=True):
            counts.copy_(kept)

    # -- a tree step and its graphs ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self, menu: Sequence[TreeShape]) -> dict[Key, float]:
        """Captures the graphs of every shape for every batch size, the largest first, and tells the seconds that a
        step of each takes (on an empty context). Works on the dummy row alone, so it may run at any time."""
        todo = [Key(s, size) for size in reversed(self.graphs.sizes) for s in menu if size * s.queries <= MOST_NODES]
        seconds = {}
        sizes = len(self.prefills.sizes) if self.prefills is not None else 0
        with tqdm(total=len(todo) + sizes, desc="capturing graphs", file=sys.stderr, leave=False) as bar:
            if self.prefills is not None:
                self.prefills.capture(bar)
            if self._lag is not None:
                self._lag.warm_up()
            for key in todo:
                seconds[key] = self._capture(key)
                bar.update()
        self.device.trim()  # what the first calls took
        return seconds

    @property
    def captured(self) -> int:
        """How many graphs there are."""
        return len(self.graphs) + (len(self.prefills) if self.prefills is not None else 0)

    @property
    def replays(self) -> int:
        """How often one of them, or on a CPU a recorded stage, was replayed."""
        return self.graphs.replays + (self.prefills.replays if self.prefills is not None else 0)

    def _capture(self, key: Key) -> float:
        """-> seconds of a step"""
        self.graphs.set_rows(np.empty(0, np.int64), key.size)
        step = self._graph_step(key, False)
        launched = self._forward(step, self.graphs.capture)
        self._traces.keep(key, launched[0].draft)
        for filtered in (False, True) if self.ops.draws_by_row else (False,):
            self._finish(step._replace(filtered=filtered), *launched, self.graphs.capture)
        del launched  # its memory is for the next key's graphs
        self.graphs.finish(key)
        return min(self.device.timed(lambda: self.replay(key), 2))

    @torch.inference_mode()
    def replay(self, key: Key) -> None:
        """Runs the graphs of a step that was captured, on the rows that are set, and leaves its result."""
        step = self._graph_step(key, False)
        self._finish(step, *self._forward(step, self.graphs.run), self.graphs.run)

    def _tree_step(self, plan: Plan, guidance: Guides | None) -> TreeStep:
        """Uploads a plan."""
        known = not plan.special and (self.ops.draws_by_row or not len(plan.noisy) + len(plan.banning))
        key = self.graphs.key(plan.shape, len(plan.rows)) if known else None
        drafts = plan.shape.depth > 0
        self._steps += drafts
        if drafts and self._steps % FORGET_EVERY == 0:
            forget(self.calibration)
        filtered = len(plan.filtered) > 0
        if key is None:
            rows, drawing = self.table.upload_step(plan)
            special = plan if plan.special else None
            total = len(plan.rows) * plan.shape.verified if known else 0  # rows that ask for more get whole trees
            return TreeStep(None, rows, plan.shape, plan.max_kv_len, drawing, filtered, special, guidance, total)
        self.table.upload_state(plan)
        self.graphs.set_rows(plan.rows, key.size)
        return self._graph_step(key, filtered)

    def _graph_step(self, key: Key, filtered: bool) -> TreeStep:
        rows, total = self.graphs.rows[: key.size], key.size * key.shape.verified
        return TreeStep(key, rows, key.shape, self.table.length, self._nobody, filtered, total=total)

    def _forward(self, step: TreeStep, run: Callable[..., Any]) -> tuple[Drafted, Verified]:
        """run: `GraphCache.run` or `capture`"""
        drafted = run("draft", step.key, self._draft, step)
        return drafted, run("verify", step.key, self._verify, drafted)

    def _finish(
        self, step: TreeStep, drafted: Drafted | None, verified: Verified | None, run: Callable[..., Any]
    ) -> Tensor:
        """The packed result, as in `Committed`."""
        key = None if step.key is None else (step.key, step.filtered)
        packed: Tensor = run("commit", key, self._commit, step, drafted, verified, keep=True)
        return packed

    def _draft(self, step: TreeStep) -> Drafted:
        rows, shape, special, guidance = step.rows, step.shape, step.special, step.guidance
        if shape == PLAIN:  # there is nothing to propose
            return self._batches.last_tokens(rows, step.bound)
        if special is not None and guidance is not None:
            self._special.constrain(special, rows, guidance)
        draft = self.propose(rows, shape, step.bound, step.drawing.noisy)
        if special is not None:
            draft = self._special.adjust(special, rows, draft, guidance)
        return self._batches.trees(rows, draft, shape, step.bound, self.calibration, step.total)

    def _verify(self, drafted: Drafted) -> Verified:
        return Verified(*self._target(drafted.batch))

    def _target(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        return self.model(batch.ids, batch.positions, self.attn.bind(batch, 0), self.aux_layers)

    def _commit(self, step: TreeStep, drafted: Drafted, verified: Verified) -> Tensor:
        if drafted.place is None:
            target = self._sample(step.drawing, step.filtered, self._nodes(step, drafted, verified))
        else:
            target = self._sample(step.drawing, step.filtered, self._queries(drafted, verified))
            target = self.ops.take_rows(target, drafted.place.flatten()).view_as(drafted.place)
        return self._accept(step, drafted, verified, target)

    def _commit_special(self, pending: Pending) -> tuple[Tensor, Logprobs]:
        plan, step, drafted, verified = pending.plan, pending.step, pending.drafted, pending.verified
        assert step is not None and drafted is not None and verified is not None
        drawn = self._nodes(step, drafted, verified)
        target = self._sample(step.drawing, step.filtered, drawn)
        target = self._special.draw(plan, drawn, target, pending.guidance)
        packed = self._accept(step, drafted, verified, target)
        packed[:, CONFIDENCE] = self._special.confidence(plan, step.rows, packed[:, CONFIDENCE])
        width = step.shape.max_commit
        tokens, nodes = packed[:, HEAD : HEAD + width] & TOKEN, packed[:, HEAD + width : HEAD + 2 * width]
        return packed, Logprobs(self._special.path_logprobs(plan, drawn, nodes, tokens), [])

    def _nodes(self, step: TreeStep, drafted: Drafted, verified: Verified) -> Drawn:
        draft, batch, tree, *_ = drafted
        size = draft.tokens.shape
        hidden = verified.hidden.view(*size, -1)  # [B, N, H]
        return Drawn(
            step.rows, self._logits(hidden), hidden, batch.positions.view(size), tree.depth, step.shape.depth,
            draft.tokens, tree.path, tree.path_len,
        )  # fmt: skip

    def _queries(self, drafted: Drafted, verified: Verified) -> Drawn:
        """Nodes of several rows, each as a row of its own; these rows ask for nothing special."""
        batch, (_, tree) = drafted.batch, self._batches.roots(drafted.batch.ids.shape[0])
        hidden = verified.hidden.unsqueeze(1)  # [R, 1, H]
        return Drawn(
            batch.rows, self._logits(hidden), hidden, batch.positions.unsqueeze(1), tree.depth, 0,
            batch.ids.unsqueeze(1), tree.path, tree.path_len,
        )  # fmt: skip

    def _accept(self, step: TreeStep, drafted: Drafted, verified: Verified, target: Tensor) -> Tensor:
        """target [B, N]: what was drawn at every node -> the packed result."""
        draft, batch, tree, mark, place = drafted
        trees = batch.ragged
        prefix_len = batch.prefix_len if trees is None else trees.prefix_len[: len(step.rows)]
        if self._simulation is not None:
            target = self._simulation(self.ops, draft, tree, target, step.rows, prefix_len)
        drafter, lags = self.drafter, self.drafter is not None and self.drafter.lags(step.shape)
        with_path = drafter is not None and bool(drafter.kv_layers or drafter.aux_layers)
        with_path &= not lags or step.shape.depth > 0  # else it is the root alone
        done = self.ops.commit(
            self.table, step.rows, draft, tree, target, prefix_len, self._confidence, with_path, mark,
            None if mark is None else self.calibration,
        )  # fmt: skip
        if drafter is not None:
            self._show(drafter, lags, step, done, prefix_len, verified.aux_hidden, place)
        if drafter is not None and not drafter.fixed_confidence:
            bound = step.bound + step.shape.max_commit
            drafter.confidence(self.table, step.rows, bound, out=done.packed[:, CONFIDENCE])
        return done.packed

    # -- what the stages are made of --------------------------------------------------------------------------------

    def propose(self, rows: Tensor, shape: TreeShape, max_kv_len: int, noisy: Tensor) -> Draft:
        if self.drafter is None:  # there is nothing in the tree yet, see `SpecialRows.adjust`
            return roots_alone(self.table, rows, shape.nodes)
        return self.drafter.propose(self.table, rows, shape, max_kv_len, noisy)

    def _logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, N, H] -> [B, N, V]"""
        return self.model.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

    def _sample(self, drawing: Drawing, filtered: bool, drawn: Drawn) -> Tensor:
        """A token for every node, [B, N]."""
        rows, logits, hidden, positions, depth, depth_max, *_ = drawn
        rescoring = None
        if logits.dtype.itemsize < 4:
            rescoring = Rescoring(hidden, self.model.lm_head.op.stored, self.model.exact_logits)
        return self.ops.draw(logits, positions, depth, depth_max, self.table, rows, drawing, filtered, rescoring)

    def _show(
        self, drafter: Drafter, lags: bool, step: TreeStep, done: Committed, before: Tensor, aux_hidden: Tensor | None,
        place: Tensor | None,
    ) -> None:  # fmt: skip
        """Shows the drafter the accepted path of each row, as a chain of depth + 1 tokens, or keeps what it will need.
        place [B, N]: which query of the target's forward a node was, None: all were, in their order."""
        rows, path, width, noisy = step.rows, done.path, step.shape.max_commit, step.drawing.noisy
        nodes = None if path is None else path.nodes
        if nodes is not None and place is not None:
            nodes = self.ops.take_rows(place.view(-1, 1), nodes).flatten()
        if lags:
            assert self._lag is not None
            self._lag.keep(rows, before, done.count, aux_hidden, nodes)
            path = None
        elif nodes is not None and aux_hidden is not None:
            aux_hidden = self.ops.take_rows(aux_hidden, nodes)  # [R, T] -> [B * (D + 1), T]
        batch = self._batches.accepted(rows, before, path, width, step.bound + width)
        if lags:
            drafter.watch(self.table, batch, done.tokens.flatten(), done.count, noisy)
        else:
            drafter.extend(self.table, batch, aux_hidden, done.tokens.flatten(), done.count, noisy)

    # -- prefill ----------------------------------------------------------------------------------------------------

    def _launch_prefill(self, plan: Plan, started: tuple[Any, Any], guidance: Guides | None) -> Pending:
        upload = self.table.upload(plan)
        batch = self._batches.prompts(plan, upload, self._tail)
        found = self.prefills.run(plan.chunks) if self.prefills is not None else None
        return Pending(plan, started, Verified(*found or self._target(batch)), upload, batch, guidance=guidance)

    def _commit_prefill(self, pending: Pending) -> tuple[Tensor, Logprobs | None]:
        """Result rows: one token for each final chunk, none for the others, which come last. So the first rows draw,
        and batch indices of the plan's rows are also those of the rows that draw."""
        final = [chunk.final for chunk in pending.plan.chunks]
        assert all(final[: sum(final)])
        plan, upload, batch, verified = pending.plan, pending.upload, pending.batch, pending.verified
        assert upload is not None and batch is not None and verified is not None
        table = self.table
        rows = upload.rows
        table.kv_len.index_copy_(0, rows, upload.kv_len)
        zero = torch.zeros_like(rows)
        token, drawn, confidence = zero, zero, zero + self._confidence if self._confidence else zero
        logprobs: Download | None = None
        sent: Logprobs | None = None
        if upload.final.numel():
            picked, logprobs = self._draw_first(pending, plan, upload, verified)
            token = zero.index_copy(0, upload.final, picked)
            drawn = zero.index_fill(0, upload.final, 1)
        if self.drafter is not None:
            next_ids = table.tokens[upload.token_rows, upload.positions + 1]
            self.drafter.extend(table, batch, verified.aux_hidden, next_ids, None, upload.drawing.noisy)
            if self._lag is not None:
                self._lag.reset(rows)
            if upload.final.numel() and not self.drafter.fixed_confidence:
                confidence = self.drafter.confidence(table, rows, plan.max_kv_len)
        if plan.special:
            confidence = self._special.confidence(plan, rows, confidence)
            offsets = [chunk.offset for chunk in batch.chunks]
            sent = Logprobs(logprobs, self._special.prompt_logprobs(plan, verified.hidden, upload.positions, offsets))
        return torch.stack((confidence, drawn, token, zero, zero), 1), sent

    def _draw_first(
        self, pending: Pending, plan: Plan, upload: Upload, verified: Verified
    ) -> tuple[Tensor, Download | None]:
        """The token after each final chunk [F], and the log probabilities that are wanted of them."""
        table = self.table
        rows = upload.rows[: upload.final.numel()]
        position = upload.positions[upload.last].unsqueeze(1)  # [F, 1]
        hidden = verified.hidden[upload.last].unsqueeze(1)  # [F, 1, H]
        _, tree = self._batches.roots(rows.shape[0])
        tokens = table.tokens[rows.unsqueeze(1), position]
        zero = torch.zeros_like(position)
        nodes = Drawn(rows, self._logits(hidden), hidden, position, zero, 0, tokens, tree.path, tree.path_len)
        drawn = self._sample(upload.drawing, len(plan.filtered) > 0, nodes)  # [F, 1]
        logprobs = None
        if plan.special:
            drawn = self._special.draw(plan, nodes, drawn, pending.guidance)
        picked = drawn & TOKEN
        if plan.special:
            logprobs = self._special.path_logprobs(plan, nodes, torch.zeros_like(picked), picked)
        table.last.index_copy_(0, rows, picked.squeeze(1))
        table.tokens.index_put_((rows, position.squeeze(1) + 1), picked.squeeze(1))
        return drawn.squeeze(1), logprobs
