"""Tree steps on the device. One has three stages, each a function of the rows and of the stage before: `draft`
(propose, the target's batch), `verify` (the target's forward), `commit`. On CUDA they are captured as graphs, on a CPU
recorded, see `engine/graphs.py`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from draftwing.config.trees import PLAIN
from draftwing.core import Plan
from draftwing.engine.devices.base import Device
from draftwing.engine.graphs import FIRST, LAST, Beside, GraphCache, Key, RecordedStages, foreign_steps
from draftwing.engine.image_features import ImageFeatures
from draftwing.engine.request_features import RequestFeatures
from draftwing.engine.row_table import RowTable
from draftwing.engine.step_state import Batches, DraftBatch, TreeStep, Verified
from draftwing.engine.target import TargetForward
from draftwing.ops.assign.spec import forget, roots_alone
from draftwing.ops.types import Calibration, Draft, SamplingGroups
from draftwing.sched.guidance import Guides
from draftwing.spec.drafter import Drafter, DraftStep

CONTIGUOUS = torch.contiguous_format
FORGET_EVERY = 64  # steps with drafts: see `forget`


class TreeSteps:
    def __init__(
        self,
        drafter: Drafter | None,
        target: TargetForward,
        table: RowTable,
        device: Device,
        graphs: GraphCache,
        batches: Batches,
        features: RequestFeatures,
        images: ImageFeatures | None,
        calibration: Calibration,
        commit: Callable[..., Tensor],
    ) -> None:
        """commit: the last stage of steps whose rows ask for nothing special, which gives the packed result."""
        self._drafter, self._target, self._table, self._ops = drafter, target, table, device.ops
        self._graphs, self._prefills = graphs, target.prefills
        self._batches, self._features, self._images = batches, features, images
        self._calibration, self._commit = calibration, commit
        self._copies = bool(graphs.sizes and foreign_steps(drafter))
        self._drafted_steps = 0
        self._nobody = SamplingGroups(*torch.empty(3, 0, dtype=torch.int64, device=device.device))
        self._graph_steps: dict[tuple[Key, bool, bool, bool], TreeStep] = {}

    def step(self, plan: Plan, guidance: Guides | None) -> TreeStep:
        """Uploads a plan."""
        edited = plan.penalised and self._ops.edits_by_row
        special = plan.special and not edited
        known = not special and (self._ops.draws_by_row or not len(plan.noisy) + len(plan.banning))
        whole = special or edited  # rows that ask for more get whole trees
        key = None
        if known and not (whole and plan.shape.verified):
            if not plan.mixed:
                key = self._graphs.key(plan.shape, len(plan.rows))
                self._graphs.count(plan.shape, len(plan.rows))
            else:
                key = self._prefills.mixed_key(plan.shape, len(plan.rows))
        if plan.shape.depth:
            self._drafted_steps += 1
            if self._drafted_steps % FORGET_EVERY == 0:
                forget(self._calibration)
        filtered = len(plan.filtered) > 0
        if key is None:
            rows, groups = self._table.upload_step(plan)
            total = len(plan.rows) * plan.shape.verified if known and not whole else 0
            forward_key = self._forward_key(plan) if special else None
            if forward_key is not None:
                self._graphs.set_rows(plan.rows, forward_key.size)
                rows = self._graphs.rows[: forward_key.size]
            return TreeStep(
                None, rows, plan.shape, plan.max_kv_len, groups, filtered, plan if special else None, guidance, total,
                edited, plan.adapted, forward_key,
            )  # fmt: skip
        self._table.upload_state(plan)
        self._graphs.set_rows(plan.rows, key.size)
        return self.graph_step(key, filtered, edited, plan.adapted)

    def _forward_key(self, plan: Plan) -> Key | None:
        """Returns the key of the graphs whose forward of the target is replayed in a step with special rows."""
        if plan.shape.verified:
            return None
        if plan.mixed:  # `mixed_key` does not ask whether the shape was captured
            key = self._prefills.mixed_key(plan.shape, len(plan.rows))
            return key if key is not None and self._graphs.forward_key(*key) == key else None
        self._graphs.count(plan.shape, len(plan.rows))
        return self._graphs.forward_key(plan.shape, len(plan.rows))

    def graph_step(self, key: Key, filtered: bool, edited: bool = False, adapted: bool = False) -> TreeStep:
        known = self._graph_steps.get((key, filtered, edited, adapted))
        if known is None:
            rows, total = self._graphs.rows[: key.size], key.size * key.shape.verified
            known = TreeStep(
                key, rows, key.shape, self._table.length, self._nobody, filtered, total=total, edited=edited,
                adapted=adapted,
            )  # fmt: skip
            self._graph_steps[key, filtered, edited, adapted] = known
        return known

    def forward(self, step: TreeStep, run: Callable[..., Any]) -> tuple[DraftBatch, Verified]:
        """run: `GraphCache.run` or `capture`"""
        key, drafted, read = self.drafts(step, run)
        if step.adapted:
            return drafted, run("verify", None if key is None else Beside(key), self.verify_adapted, read)
        return drafted, run("verify", key, self._verify, read)

    def drafts(self, step: TreeStep, run: Callable[..., Any]) -> tuple[Any, DraftBatch, DraftBatch]:
        """Returns the key by which the step's forward runs, the drafts, and what the forward reads: a copy of these, or
        the same where they were made for it. run: as of `forward`."""
        key = (step.key, step.edited) if step.key is not None and step.edited else step.key
        drafted: DraftBatch = run(FIRST, self._of_heads(key, step), self.draft, step)
        if step.forward_key is None:
            return key, drafted, drafted
        return step.forward_key, drafted, self._graphs.give(step.forward_key, drafted)

    def finish(
        self, step: TreeStep, drafted: DraftBatch | None, verified: Verified | None, run: Callable[..., Any]
    ) -> Tensor:
        """Returns the packed result, as in `Committed`."""
        key: Hashable = None if step.key is None else (step.key, step.filtered, step.edited)
        if isinstance(self._graphs, RecordedStages) and key is not None and step.adapted:
            key = Beside(key)  # what it reads lies elsewhere
        else:
            key = self._of_heads(key, step)
        return run("commit", key, self._commit, step, drafted, verified, keep=True)

    def _of_heads(self, key: Hashable | None, step: TreeStep) -> Hashable | None:
        """Returns the key of a stage that runs the draft head, beside which rows may have factors."""
        return Beside(key) if key is not None and step.adapted and self._table.heads is not None else key

    def draft(self, step: TreeStep) -> DraftBatch:
        drafted = self._drafted(step)
        return drafted if self._images is None else drafted._replace(batch=self._images.turned(drafted.batch))

    def _drafted(self, step: TreeStep) -> DraftBatch:
        rows, shape, special = step.rows, step.shape, step.special
        if shape == PLAIN:  # there is nothing to propose
            return self._batches.last_tokens(rows, step.bound)
        draft = self._proposed(step)
        if special is not None:
            draft = self._features.adjust(special, rows, draft, step.guidance)
        return self._batches.trees(rows, draft, shape, step.bound, self._calibration, step.total)

    def _proposed(self, step: TreeStep) -> Draft:
        special, edits = step.special, None
        if special is not None and step.guidance is not None:
            self._features.constrain(special, step.rows, step.guidance)
        if step.edited or special is not None:
            edits = self._features.draft_edits(special)
        wanted = DraftStep(self._table, step.rows, step.shape, step.bound, step.groups.noisy, edits)
        if special is not None and step.forward_key is not None and self._begun(special, wanted):
            key = self._of_heads(step.forward_key, step)
            drafted: DraftBatch = self._graphs.run(FIRST, key, self.draft, step)
            return drafted.draft
        return self._propose(wanted, step.adapted)

    def _begun(self, special: Plan, wanted: DraftStep) -> bool:
        """Returns whether the draft may come from a graph: where no row has edits, or the drafter has edited its first
        level. Deeper levels of a graph know of no edits; without graphs, where they do, a step takes 18 ms in place of
        8 (8B, EAGLE-3, one request, an H200)."""
        return self._drafter is None or not len(special.edited) or self._drafter.begin(wanted)

    def _verify(self, drafted: DraftBatch) -> Verified:
        return Verified(*self._target.run(drafted.batch))

    def verify_adapted(self, drafted: DraftBatch) -> Verified:
        return Verified(*self._target.verify_adapted(drafted.batch))

    def _propose(self, wanted: DraftStep, adapted: bool) -> Draft:
        if self._drafter is None:  # there is nothing in the tree yet, see `RequestFeatures.adjust`
            return roots_alone(self._table, wanted.rows, wanted.shape.nodes)
        if self._table.heads is not None:
            self._drafter.beside_adapters(adapted)
        draft = self._drafter.propose(wanted)
        if self._copies:  # its tensors may be its own, or one number with stride 0, and a graph's are written to
            own: Iterable[Any] = (None if one is None else one.clone(memory_format=CONTIGUOUS) for one in draft)
            draft = Draft(*own)
        return draft

    def capture_heads(self, step: TreeStep, drafted: DraftBatch, verified: Verified) -> None:
        """Captures what runs the draft head of a step that has adapters, beside the graphs of one that has none and
        gave these."""
        assert step.key is not None
        self._graphs.capture_beside(FIRST, step.key, self.draft, step)
        for filtered in (False, True) if self._ops.draws_by_row else (False,):
            key, own = (step.key, filtered, step.edited), step._replace(filtered=filtered)
            self._graphs.capture_beside(LAST, key, self._commit, own, drafted, verified)

    @torch.inference_mode()
    def replay(self, key: Key) -> None:
        """Runs the graphs of a step that was captured, on the rows that are set, and leaves its result."""
        step = self.graph_step(key, False)
        self.finish(step, *self.forward(step, self._graphs.run), self._graphs.run)
