"""Runs plans: the device side of a step, which never waits for the device and never reads from it.

launch: let the drafter catch up, upload, draft, target forward.  commit: what `CommitStage` does, and the download.
Everything in between is device state indexed by row; the host learns of it from the packed result.

A tree step has three stages, each a function of the rows and of the stage before: `draft` (propose, the target's
batch), `verify` (the target's forward), `commit`. On CUDA they are captured as graphs, see `engine/graphs.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.core import NO_DEFERRAL, NOBODY, DraftDeferral, DraftExtend, IntArray, Plan, StepResult
from draftwing.engine.commit import CommitStage, Simulation
from draftwing.engine.devices.base import Device, Download
from draftwing.engine.devices.put_away import PutAway
from draftwing.engine.draft_kv_backlog import DraftKVBacklog
from draftwing.engine.graphs import Beside, GraphCache, Key, RecordedStages, batch_sizes, first_sizes, graph_keys
from draftwing.engine.image_features import ImageFeatures
from draftwing.engine.rank_broadcast import SINGLE_RANK, LoadedHeads, RankBroadcast
from draftwing.engine.request_features import RequestFeatures
from draftwing.engine.row_table import RowTable
from draftwing.engine.step_state import Batches, DraftBatch, InFlight, Pending, TreeStep, Verified, fetch_drafts
from draftwing.engine.target import TargetForward
from draftwing.log import progress_bar
from draftwing.models.adapters.adapter import Adapter, AdapterSlots
from draftwing.models.decoder import DecoderModel
from draftwing.ops.assign.spec import forget, new_calibration, roots_alone
from draftwing.ops.attention.attend import AttnBackend
from draftwing.ops.types import Draft, DraftEdits, SamplingGroups
from draftwing.requests.images import RequestImage
from draftwing.sched.guidance import Guides
from draftwing.sched.tower_schedule import TowerPiece
from draftwing.spec.drafter import Drafter, DraftStep, PastText

log = logging.getLogger("draftwing")
T = TypeVar("T")
FORGET_EVERY = 64  # steps with drafts: see `forget`


def in_inference_mode(function: Callable[..., T]) -> Callable[..., T]:
    """As `torch.inference_mode()`, which takes some dozen us even where the mode is on."""

    @wraps(function)
    def call(*args: Any) -> T:
        if torch.is_inference_mode_enabled():
            return function(*args)
        with torch.inference_mode():
            return function(*args)

    return call


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
        deferral: DraftDeferral = NO_DEFERRAL,
        mixed: bool = False,
    ) -> None:
        """graph_size: largest batch that `capture` captures graphs of; simulation: decides what is accepted; chunk:
        most queries of a prefill, 0 for any number; deferral: of prompts to a drafter with KV; mixed: whether there
        will be plans that are."""
        self.model = model
        self.drafter = drafter
        self.table = table
        self.attn = attn
        table.states = attn.pool.states
        self.device = device
        self.ops = device.ops
        self.graphs = GraphCache(device, table.rows, graph_size)
        if not graph_size and self.ops.can_record:
            self.graphs = RecordedStages(device, table.rows, drafter)
        self.deferral = deferral
        self.aux_layers: tuple[int, ...] = drafter.aux_layers if drafter is not None else ()
        self.target = TargetForward(model, self.aux_layers, table, attn, device, self.graphs, graph_size, chunk, mixed)
        self.prefills = self.target.prefills
        self._backlog: DraftKVBacklog | None = None
        if drafter is not None and drafter.kv_layers:
            width = len(self.aux_layers) * model.config.hidden_size
            self._backlog = DraftKVBacklog(
                drafter, table, self.ops, width, model.dtype, deferral, batch_sizes(graph_size), attn.pool.slots
            )
        self._tail = drafter.tail if drafter is not None else 0
        self._batches = Batches(table, device.ops)
        self.calibration = new_calibration(device.device, None if simulation is None else simulation.share)
        self._kept_calibration: Sequence[Tensor] = ()
        if drafter is not None:
            drafter.calibration = self.calibration
        self.heads = LoadedHeads(drafter, device, self.calibration)
        self.adapters: AdapterSlots | None = None
        self._steps = 0  # with drafts
        self._nobody = SamplingGroups(*torch.empty(3, 0, dtype=torch.int64, device=device.device))
        self._images: ImageFeatures | None = None
        if model.tower is not None:
            in_axes = any(rope.sections for rope in model.config.ropes)
            self._images = ImageFeatures(model.tower, in_axes, table.rows + 1, device, model.config.products)
        self._features = RequestFeatures(model, drafter, table, device, self.calibration)
        self.commit_stage = CommitStage(
            model, drafter, table, self.ops, self._batches, self._features, self._backlog, self.calibration, simulation
        )
        self._graph_steps: dict[tuple[Key, bool, bool, bool], TreeStep] = {}
        self.run_stage: Callable[..., Any] = self.graphs.run  # whoever wants to time the stages wraps it
        self.on_result: Callable[[StepResult], None] | None = None  # is told each result, where ranks are compared
        self.broadcast: RankBroadcast = SINGLE_RANK  # has the other ranks do the same
        self.away: PutAway | None = None  # while the engine sleeps

    def run_on_all_ranks(self, function: Callable[..., T], *args: Any) -> T:
        """Calls the function of a module, or a method, with the executor of every rank, this one's last."""
        self.broadcast.call(function, *args)
        return function(self, *args)

    @in_inference_mode
    def launch(self, plan: Plan, *guidance: Guides | None) -> Pending:
        """Launches a step. guidance: the host's part in each of `Plan.parts`. With it this waits for the drafts, if
        there are any."""
        mine, *others = self.broadcast.step(plan, guidance or (None,))
        started = begun = self.device.mark()
        if plan.catch_up is not None and not plan.catch_up.late:
            begun = self._catch_up(plan, plan.catch_up)
        self._features.admit(plan)
        if self._images is not None and plan.admits:
            self._images.admit(plan.admits)
        if plan.kind == "prefill":
            return self._launch_prefill(plan, (started, begun), mine)
        if plan.mixed_prefill is not None:
            return self._launch_mixed(plan, plan.mixed_prefill, (started, begun), mine, *others)
        step = self._tree_step(plan, mine)
        marks = started, self._show(plan, begun)
        drafted, verified = self._forward(step, self.run_stage)
        return Pending(
            plan, marks, verified, step=step, drafted=drafted, guidance=mine, drafts=self._traced(plan, step, drafted)
        )

    @in_inference_mode
    def commit(self, pending: Pending) -> InFlight:
        first = self._commit(pending)
        if pending.mixed_prefill is None:
            return first
        mark = self.device.mark()  # its seconds in the forward are those of the first, too
        return first._replace(mixed_prefill=self._commit(pending.mixed_prefill._replace(started=(mark, mark))))

    def _commit(self, pending: Pending) -> InFlight:
        plan, step, logprobs = pending.plan, pending.step, None
        if step is None:
            packed, logprobs = self.commit_stage.prefill(pending)
        elif step.special is not None:
            packed, logprobs = self.run_stage("commit", None, self.commit_stage.special, pending)
        else:
            packed = self._finish(step, pending.drafted, pending.verified, self.run_stage)
            if step.key is not None and step.key.size > len(plan.rows):
                packed = packed[: len(plan.rows)]
        download = self.device.download(packed)
        seconds = partial(self._seconds, *pending.started, download.done)
        return InFlight(
            plan, download, seconds, self.device.active_threads, logprobs, pending.drafts, self.on_result,
            provisional=pending.provisional,
        )  # fmt: skip

    def _seconds(self, started: Any, begun: Any, done: Any) -> tuple[float, float]:
        """Between marks, all past: of a step, and of them those in which the drafter caught up."""
        return self.device.seconds(started, done), self.device.seconds(started, begun)

    @torch.inference_mode()
    def states(self, plan: Plan, draft: Draft | None = None) -> Tensor:
        """Returns the target's hidden states of a prefill, of plain steps, or of a tree step with these drafts. Nobody
        drafts, nothing is committed, and no other rank is told."""
        if plan.kind == "prefill":
            return self.target.run(self._batches.prompts(plan, self.table.upload(plan), 0))[0]
        rows, _ = self.table.upload_step(plan)
        if draft is None:
            return self.target.run(self._batches.last_tokens(rows, plan.max_kv_len).batch)[0]
        drafted = self._batches.trees(rows, draft, plan.shape, plan.max_kv_len, self.calibration, 0)
        return self.target.run(drafted.batch)[0]

    def set_rows(self, rows: IntArray, size: int) -> None:
        """Sets the rows that replays of graphs run, of so many; the others are the dummy."""
        self.graphs.set_rows(rows, size)

    def take_adapters(self, slots: AdapterSlots) -> None:
        """Serves adapters from now on. slots: of the model."""
        self.adapters = slots
        self.table.take_adapters()
        if not self.ops.can_record:  # kernels that are compiled
            slots.warm_up(self.ops)

    @torch.inference_mode()
    def put_adapter(self, slot: int, adapter: Adapter) -> None:
        """Fills a slot, which no request that runs has."""
        assert self.adapters is not None
        self.adapters.put(slot, adapter)

    def take_head(self, number: int) -> None:
        """Does as `LoadedHeads.take`."""
        self.heads.take(number)

    def unseen(self, images: Sequence[RequestImage], salt: int, start: int, tokens: int) -> RequestImage | None:
        """Does as `ImageFeatures.unseen`."""
        return None if self._images is None else self._images.unseen(images, salt, start, tokens)

    @torch.inference_mode()
    def run_tower_piece(self, piece: TowerPiece) -> None:
        """Has the tower go on."""
        assert self._images is not None
        self._images.run_piece(piece)

    def flush(self) -> None:
        """Lets the drafter forget what it has learnt."""
        if self.drafter is not None:
            self.drafter.flush()
        if self._images is not None:
            self._images.clear()

    @torch.inference_mode()
    def remember(self, texts: Sequence[PastText]) -> None:
        """Lets the drafter learn from requests before this engine. Nothing may run."""
        if self.drafter is not None:
            self.drafter.remember(self.table, texts)

    @torch.inference_mode()
    def clear(self, slots: IntArray) -> None:
        """Zeroes KV of slots [n] that is not finite, and what lies beside it: times a weight of 0 it would still be
        NaN."""
        device_slots = self.device.upload(slots)
        self.attn.pool.clear(device_slots)
        if self._backlog is not None:
            self._backlog.clear(device_slots)

    @property
    def by_slot(self) -> list[Tensor]:
        """Returns all that is kept of tokens by KV slot, which is the first axis."""
        return [*self.attn.pool.tensors, *(() if self._backlog is None else self._backlog.tensors)]

    def shorten_timeouts(self) -> None:
        """Does as `Ranks.shorten_timeouts`, now that all ranks have started."""
        self.model.ranks.shorten_timeouts()

    def close(self) -> None:
        """Leaves the other ranks. Nothing can run afterwards."""
        self.graphs.clear()
        self.prefills.clear()
        self.broadcast.close()

    @torch.inference_mode()
    def scatter_routes(self, on: bool) -> None:
        """`DecoderModel.scatter_routes` of the target."""
        self.model.scatter_routes(on)

    def keep_calibration(self) -> None:
        """Keeps what is known for `restore_calibration`: what follows says nothing of a drafter."""
        self._kept_calibration = [counts.clone() for counts in self.calibration]

    def restore_calibration(self) -> None:
        for counts, kept in zip(self.calibration, self._kept_calibration, strict=True):
            counts.copy_(kept)

    def common_shapes(self, menu: Sequence[TreeShape]) -> tuple[TreeShape, ...]:
        """Returns what steps run whose rows ask for nothing special: drafts that no drafter makes were predicted."""
        return tuple(menu) if self.drafter is not None else (PLAIN,)

    # -- a tree step and its graphs ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self, menu: Sequence[TreeShape], some: bool = False) -> list[Key]:
        """Captures the graphs of every shape for every batch size, the largest first, and returns of which. Works on
        the dummy row alone, so it may run at any time. some: of the `first_sizes`, none with parts of prompts beside
        them, and leaves the others to `capture_next`."""
        every = graph_keys(menu, self.graphs.sizes)
        first = {s: first_sizes([key.size for key in reversed(every) if key.shape == s]) for s in menu}
        todo = [key for key in every if not some or key.size in first[key.shape]]
        self.graphs.later = dict.fromkeys((key for key in reversed(every) if key not in todo), 0)
        prefills, quiet = self.prefills, self.model.ranks.rank > 0
        count = len(todo) + prefills.planned(() if some else todo)
        with progress_bar(total=count, desc="capturing graphs", disable=quiet) as bar:
            self.graphs.set_rows(NOBODY, max(self.graphs.sizes, default=0))
            prefills.capture(bar)
            if self._backlog is not None:
                self._backlog.warm_up()
            for key in todo:
                self._capture(key)
                bar.update()
                prefills.leave(key)
                while not some and prefills.later:
                    self._capture_mixed(*next(iter(prefills.later)))
                    bar.update()
        self.device.trim()  # what the first calls took
        return todo

    @property
    def later(self) -> int:
        """Returns how many batch sizes of steps, and graphs of these beside prompts, are left to `capture_next`."""
        return len(self.graphs.later) + len(self.prefills.later)

    @property
    def wants_capture(self) -> bool:
        """Returns whether steps were slower for want of a graph so often that it is worth an interruption."""
        return max(self.graphs.wanted, self.prefills.wanted) >= 1

    @torch.inference_mode()
    def capture_next(self) -> None:
        """Captures what is wanted most of what `capture` has left, if there is anything."""
        steps, mixed = self.graphs.later, self.prefills.later
        try:
            if mixed and (self.prefills.wanted > self.graphs.wanted or not steps):
                self._capture_mixed(*max(mixed, key=lambda one: mixed[one]))
            elif steps:
                key = max(steps, key=lambda key: steps[key])
                del steps[key]
                self._capture(key)  # prompts are not mixed with so many rows: see `MIXED_ROWS`
            else:
                return
        except self.device.out_of_memory:
            log.warning("%d CUDA graphs are not captured, for want of memory: steps are padded further", self.later + 1)
            steps.clear()
            mixed.clear()
            self.graphs.drop_unfinished()
        if not self.later:
            log.debug("captured %d CUDA graphs in all", self.captured)
            self.device.trim()

    @property
    def captured(self) -> int:
        """Returns how many graphs there are."""
        return len(self.graphs) + len(self.prefills)

    @property
    def replays(self) -> int:
        """Returns how often one of them, or on a CPU a recorded stage, was replayed."""
        return self.graphs.replays + self.prefills.replays + self.prefills.mixed_replays

    @property
    def recorded_bytes(self) -> int:
        """Returns what recorded stages keep on a CPU."""
        return self.graphs.memory.nbytes if isinstance(self.graphs, RecordedStages) else 0

    def _capture(self, key: Key) -> None:
        self.graphs.set_rows(NOBODY, key.size)
        step = self._graph_step(key, False)
        launched = self._forward(step, self.graphs.capture)
        if self.adapters is not None:
            self.graphs.capture_beside("verify", key, self._verify_adapted, launched[0])
        for filtered in (False, True) if self.ops.draws_by_row else (False,):
            self._finish(step._replace(filtered=filtered), *launched, self.graphs.capture)
        del launched  # its memory is for the next key's graphs
        self.graphs.finish(key)

    def _capture_mixed(self, size: int, key: Key) -> None:
        """Captures a graph of a step with parts of prompts beside it."""
        self.graphs.set_rows(NOBODY, key.size)
        drafted = self.graphs.run("draft", key, self._draft, self._graph_step(key, False))
        self.prefills.capture_mixed(size, key, drafted.batch, self.graphs.left("verify", key))

    @torch.inference_mode()
    def replay(self, key: Key) -> None:
        """Runs the graphs of a step that was captured, on the rows that are set, and leaves its result."""
        step = self._graph_step(key, False)
        self._finish(step, *self._forward(step, self.graphs.run), self.graphs.run)

    def _tree_step(self, plan: Plan, guidance: Guides | None) -> TreeStep:
        """Uploads a plan."""
        edited = plan.penalised and self.ops.edits_by_row
        special = plan.special and not edited
        known = not special and (self.ops.draws_by_row or not len(plan.noisy) + len(plan.banning))
        whole = special or edited  # rows that ask for more get whole trees
        key = None
        if known and not (whole and plan.shape.verified):
            if not plan.mixed:
                key = self.graphs.key(plan.shape, len(plan.rows))
                self.graphs.count(plan.shape, len(plan.rows))
            else:
                key = self.prefills.mixed_key(plan.shape, len(plan.rows))
        drafts = plan.shape.depth > 0
        self._steps += drafts
        if drafts and self._steps % FORGET_EVERY == 0:
            forget(self.calibration)
        filtered = len(plan.filtered) > 0
        shifted = self._shifts(plan)
        if shifted and self.ops.can_record:  # such steps are not recorded
            key = None
        if key is None:
            rows, groups = self.table.upload_step(plan)
            total = len(plan.rows) * plan.shape.verified if known and not whole else 0
            return TreeStep(
                None, rows, plan.shape, plan.max_kv_len, groups, filtered, plan if special else None, guidance, total,
                edited, shifted, plan.adapted,
            )  # fmt: skip
        self.table.upload_state(plan)
        self.graphs.set_rows(plan.rows, key.size)
        return self._graph_step(key, filtered, edited, plan.adapted)

    def _graph_step(self, key: Key, filtered: bool, edited: bool = False, adapted: bool = False) -> TreeStep:
        known = self._graph_steps.get((key, filtered, edited, adapted))
        if known is None:
            rows, total = self.graphs.rows[: key.size], key.size * key.shape.verified
            known = TreeStep(
                key, rows, key.shape, self.table.length, self._nobody, filtered, total=total, edited=edited,
                shifted=self._shifts(None), adapted=adapted,
            )  # fmt: skip
            self._graph_steps[key, filtered, edited, adapted] = known
        return known

    def _forward(self, step: TreeStep, run: Callable[..., Any]) -> tuple[DraftBatch, Verified]:
        """run: `GraphCache.run` or `capture`"""
        key = (step.key, step.edited) if step.key is not None and step.edited else step.key
        drafted = run("draft", key, self._draft, step)
        if step.adapted:
            return drafted, run("verify", None if key is None else Beside(key), self._verify_adapted, drafted)
        return drafted, run("verify", key, self._verify, drafted)

    def _finish(
        self, step: TreeStep, drafted: DraftBatch | None, verified: Verified | None, run: Callable[..., Any]
    ) -> Tensor:
        """Returns the packed result, as in `Committed`."""
        key: Hashable = None if step.key is None else (step.key, step.filtered, step.edited)
        if step.adapted and key is not None and isinstance(self.graphs, RecordedStages):
            key = Beside(key)  # what it reads lies elsewhere
        return run("commit", key, self.commit_stage.tree, step, drafted, verified, keep=True)

    def _shifts(self, plan: Plan | None) -> bool:
        """Returns whether rows of a plan have other positions for the rotary embedding than in their text. None: of
        steps with graphs, which know no rows: whether any row may."""
        if self._images is None or self._images.shift is None:
            return False
        return plan is None or not self.ops.can_record or self._images.any_shifted(plan.rows)

    def _draft(self, step: TreeStep) -> DraftBatch:
        drafted = self._drafted(step)
        if not step.shifted:
            return drafted
        assert self._images is not None
        return drafted._replace(batch=self._images.turned(drafted.batch))

    def _drafted(self, step: TreeStep) -> DraftBatch:
        rows, shape, special, guidance = step.rows, step.shape, step.special, step.guidance
        if shape == PLAIN:  # there is nothing to propose
            return self._batches.last_tokens(rows, step.bound)
        if special is not None and guidance is not None:
            self._features.constrain(special, rows, guidance)
        edits = self._features.draft_edits(special) if step.edited or special is not None else None
        draft = self.propose(rows, shape, step.bound, step.groups.noisy, edits)
        if special is not None:
            draft = self._features.adjust(special, rows, draft, guidance)
        return self._batches.trees(rows, draft, shape, step.bound, self.calibration, step.total)

    def _verify(self, drafted: DraftBatch) -> Verified:
        return Verified(*self.target.run(drafted.batch))

    def _verify_adapted(self, drafted: DraftBatch) -> Verified:
        return Verified(*self.target.verify_adapted(drafted.batch))

    def propose(
        self, rows: Tensor, shape: TreeShape, max_kv_len: int, noisy: Tensor, edits: DraftEdits | None = None
    ) -> Draft:
        if self.drafter is None:  # there is nothing in the tree yet, see `RequestFeatures.adjust`
            return roots_alone(self.table, rows, shape.nodes)
        return self.drafter.propose(DraftStep(self.table, rows, shape, max_kv_len, noisy, edits))

    def _traced(self, plan: Plan, step: TreeStep, drafted: DraftBatch) -> Download | None:
        """Returns the drafts of the rows that the plan wants traced."""
        if not len(plan.traced) or not step.shape.depth:
            return None
        return fetch_drafts(self.device, plan, drafted.draft)

    def _show(self, plan: Plan, begun: Any) -> Any:
        """Shows the drafter what the plan says of prompts, and what is late -> the mark of when the step itself
        begins."""
        if plan.shown:
            assert self._backlog is not None
            self._backlog.see(plan.shown)
            begun = self.device.mark()
        if plan.catch_up is not None and plan.catch_up.late:
            begun = self._catch_up(plan, plan.catch_up)
        return begun

    def _catch_up(self, plan: Plan, who: DraftExtend) -> Any:
        """-> the mark of when that has ended"""
        assert self._backlog is not None
        proposes = plan.kind == "tree" and not self._backlog.skips_extend(plan.shape)
        self._backlog.catch_up(who, plan.rows[plan.noisy], proposes)
        return self.device.mark()

    # -- prefill ----------------------------------------------------------------------------------------------------

    def _launch_prefill(self, plan: Plan, marks: tuple[Any, Any], guidance: Guides | None) -> Pending:
        pending = self._upload_prefill(plan, marks, guidance)
        return pending._replace(verified=self.target.prefill(pending))

    def _upload_prefill(self, plan: Plan, marks: tuple[Any, Any], guidance: Guides | None) -> Pending:
        """Returns all that comes before the target's forward. marks: as `Pending.started`."""
        upload = self.table.upload(plan)
        marks = marks[0], self._show(plan, marks[1])
        batch = self._batches.prompts(plan, upload, self._tail)
        if self._images is not None:
            batch = self._images.of_prompts(plan, batch)
        return Pending(plan, marks, None, upload, batch, guidance=guidance)

    # -- both in one forward ----------------------------------------------------------------------------------------

    def _launch_mixed(
        self, plan: Plan, prefill: Plan, marks: tuple[Any, Any], guidance: Guides | None, other: Guides | None = None
    ) -> Pending:
        """prefill: `Plan.mixed_prefill`.  marks: as `Pending.started`.  other: the host's part in it."""
        assert prefill.catch_up is None and not prefill.admits, "they come with the plan in front"
        step = self._tree_step(plan, guidance)
        marks = marks[0], self._show(plan, marks[1])
        prompts = self._upload_prefill(prefill, marks, other)
        marks = prompts.started  # what was shown of prompts is no part of the step, either
        drafted = self.run_stage("draft", step.key, self._draft, step)
        provisional = step.key is not None and self.target.is_left(step.key, prefill.chunks)
        of_trees, of_prompts = self.target.mixed(step.key, drafted.batch, prompts, step.adapted)
        return Pending(
            plan, marks, of_trees, step=step, drafted=drafted, guidance=guidance,
            drafts=self._traced(plan, step, drafted), mixed_prefill=prompts._replace(verified=of_prompts),
            provisional=provisional,
        )  # fmt: skip
