"""Runs plans: the device side of a step, which never waits for the device and never reads from it.

launch: let the drafter catch up, upload, draft, target forward.  commit: what `CommitStage` does, and the download.
Everything in between is device state indexed by row; the host learns of it from the packed result.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.core import NO_DEFERRAL, DraftDeferral, DraftExtend, IntArray, Plan, StepResult
from draftwing.engine.captures import Captures
from draftwing.engine.commit import CommitStage, Simulation
from draftwing.engine.devices.base import Device, Download
from draftwing.engine.devices.put_away import PutAway
from draftwing.engine.draft_kv_backlog import DraftKVBacklog
from draftwing.engine.graphs import GraphCache, RecordedStages, batch_sizes
from draftwing.engine.image_features import ImageFeatures
from draftwing.engine.rank_broadcast import SINGLE_RANK, LoadedHeads, RankBroadcast
from draftwing.engine.request_features import RequestFeatures
from draftwing.engine.row_table import RowTable
from draftwing.engine.step_state import Batches, DraftBatch, InFlight, Pending, TreeStep, fetch_drafts
from draftwing.engine.target import TargetForward
from draftwing.engine.tower_graphs import TowerGraphs
from draftwing.engine.tree_steps import TreeSteps
from draftwing.kv.host_share import HostShare
from draftwing.models.adapters.adapter import Adapter, AdapterSlots
from draftwing.models.adapters.heads import HeadSlots
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.base import FeatureHead
from draftwing.ops.assign.spec import new_calibration
from draftwing.ops.attention.attend import AttnBackend
from draftwing.ops.attention.batch import Mutual
from draftwing.ops.types import Draft
from draftwing.requests.images import RequestImage
from draftwing.sched.guidance import Guides
from draftwing.sched.tower_schedule import TowerPiece
from draftwing.spec.drafter import Drafter, PastText

log = logging.getLogger("draftwing")
T = TypeVar("T")


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
        self._images: ImageFeatures | None = None
        # A rank captures nothing while requests run: the others would have to do the same.
        self.towers = TowerGraphs(model.tower if graph_size and model.ranks.size == 1 else None, device)
        if model.tower is not None:
            in_axes = any(rope.sections for rope in model.config.ropes)
            heads = drafter is not None and drafter.reads_images
            self._images = ImageFeatures(
                model.tower, in_axes, table.rows + 1, device, model.config.products, heads, self.towers
            )
            table.shift = self._images.shift
        self._backlog: DraftKVBacklog | None = None
        if drafter is not None and drafter.kv_layers:
            width = len(self.aux_layers) * model.config.hidden_size
            self._backlog = DraftKVBacklog(
                drafter, table, self.ops, width, model.dtype, deferral, batch_sizes(graph_size), attn.pool.slots,
                self._images,
            )  # fmt: skip
        self._tail = drafter.tail if drafter is not None else 0
        self._batches = Batches(table, device.ops)
        self.calibration = new_calibration(device.device, None if simulation is None else simulation.share)
        self._kept_calibration: Sequence[Tensor] = ()
        if drafter is not None:
            drafter.calibration = self.calibration
        self.heads = LoadedHeads(drafter, device, self.calibration)
        self.adapters: AdapterSlots | None = None
        self.head_slots: HeadSlots | None = None
        self._features = RequestFeatures(model, drafter, table, device, self.calibration)
        self.commit_stage = CommitStage(
            model, drafter, table, self.ops, self._batches, self._features, self._backlog, self.calibration, simulation
        )
        self.steps = TreeSteps(
            drafter, self.target, table, device, self.graphs, self._batches, self._features, self._images,
            self.calibration, self.commit_stage.tree,
        )  # fmt: skip
        self.captures = Captures(
            self.steps, self.graphs, self.prefills, self.towers, self._backlog, table, device, model.ranks
        )
        self.run_stage: Callable[..., Any] = self.graphs.run  # whoever wants to time the stages wraps it
        self.on_result: Callable[[StepResult], None] | None = None  # is told each result, where ranks are compared
        self.broadcast: RankBroadcast = SINGLE_RANK  # has the other ranks do the same
        self.away: PutAway | None = None  # while the engine sleeps
        self.host_share: HostShare | None = None  # of a rank from 1 on, where cached prefixes go to host memory

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
        step = self.steps.step(plan, mine)
        marks = started, self._show(plan, begun)
        drafted, verified = self.steps.forward(step, self.run_stage)
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
            packed = self.steps.finish(step, pending.drafted, pending.verified, self.run_stage)
        if step is not None and packed.shape[0] > len(plan.rows):  # of a graph, which was padded
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
    def states(self, plan: Plan, draft: Draft | None = None, mutual: Mutual = "") -> Tensor:
        """Returns the target's hidden states of a prefill, of plain steps, or of a tree step with these drafts. Nobody
        drafts, nothing is committed, and no other rank is told. mutual: in which layers tokens of a chunk see each
        other, as those of an image."""
        if plan.kind == "prefill":
            batch = self._batches.prompts(plan, self.table.upload(plan), 0)
            if mutual:
                spans = (span._replace(mutual=((span.start, span.start + span.length),)) for span in batch.chunks)
                batch = batch._replace(mutual=mutual, chunks=tuple(spans))
            return self.target.run(batch)[0]
        rows, _ = self.table.upload_step(plan)
        if draft is None:
            return self.target.run(self._batches.last_tokens(rows, plan.max_kv_len).batch)[0]
        drafted = self._batches.trees(rows, draft, plan.shape, plan.max_kv_len, self.calibration, 0)
        return self.target.run(drafted.batch)[0]

    def set_rows(self, rows: IntArray, size: int) -> None:
        """Sets the rows that replays of graphs run, of so many; the others are the dummy."""
        self.graphs.set_rows(rows, size)

    def take_adapters(self, slots: AdapterSlots, heads: HeadSlots | None = None) -> None:
        """Serves adapters from now on. slots: of the model.  heads: of the draft head."""
        self.adapters, self.head_slots = slots, heads
        self.table.take_adapters(heads is not None)
        for every in (slots, heads) if not self.ops.can_record else ():  # kernels that are compiled
            if every is not None:
                every.warm_up(self.ops)

    @torch.inference_mode()
    def put_adapter(self, slot: int, adapter: Adapter) -> None:
        """Fills a slot, which no request that runs has."""
        assert self.adapters is not None
        arrived = None
        if adapter.image:
            with suppress(self.device.out_of_memory):  # a copy of the image on its way; factors need less
                arrived, _ = self.device.copy_in(adapter.image)
        if arrived is None:
            self.adapters.put(slot, adapter)
        else:
            self.adapters.fill(slot, arrived)

    @torch.inference_mode()
    def put_head(self, slot: int, head: Adapter) -> None:
        """Fills a slot of adapters' own draft heads, which no request that runs has."""
        assert self.head_slots is not None
        self.head_slots.put(slot, head)

    @property
    def head(self) -> FeatureHead | None:
        """Returns the head that drafts, the first of two; None where a draft model does, or nobody."""
        head = getattr(getattr(self.drafter, "model", self.drafter), "head", None)
        return head if isinstance(head, FeatureHead) else None

    def see_at_most(self, positions: int | None) -> None:
        """Does as `FeatureHead.see_at_most`, and drops what was captured or recorded."""
        assert self.head is not None
        self.head.see_at_most(positions)
        self.graphs.clear()
        self.prefills.clear()

    def take_head(self, number: int) -> None:
        """Does as `LoadedHeads.take`."""
        self.heads.take(number)

    def unseen(self, images: Sequence[RequestImage], salt: int, start: int, tokens: int) -> RequestImage | None:
        """Does as `ImageFeatures.unseen`."""
        return None if self._images is None else self._images.unseen(images, salt, start, tokens)

    @torch.inference_mode()
    def run_tower_piece(self, piece: TowerPiece) -> None:
        """Has the tower go on. Of several ranks each has a clock of its own, and all do the same parts."""
        assert self._images is not None
        self._images.run_piece(piece if self.model.ranks.size == 1 else piece._replace(seconds=math.inf))

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
        self.towers.clear()
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

    # -- a tree step --------------------------------------------------------------------------------------------------

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
        step = self.steps.step(plan, guidance)
        marks = marks[0], self._show(plan, marks[1])
        prompts = self._upload_prefill(prefill, marks, other)
        marks = prompts.started  # what was shown of prompts is no part of the step, either
        key, drafted, read = self.steps.drafts(step, self.run_stage)
        adapted = step.adapted or prefill.adapted
        provisional = key is not None and self.target.is_left(key, prompts, adapted)
        of_trees, of_prompts = self.target.mixed(key, read.batch, prompts, step.adapted)
        return Pending(
            plan, marks, of_trees, step=step, drafted=drafted, guidance=guidance,
            drafts=self._traced(plan, step, drafted), mixed_prefill=prompts._replace(verified=of_prompts),
            provisional=provisional,
        )  # fmt: skip
