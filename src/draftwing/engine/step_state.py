"""What passes between the stages of a step, and from a step to whoever waits for its result; and the batches that a
forward pass of the target, or a drafter that extends, gets. These are made on the row table, on the device alone; what
is the same in every step of one size is made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftwing.config.trees import TreeShape
from draftwing.core import DraftTokens, Plan, StepResult
from draftwing.engine.devices.base import Device, Download
from draftwing.engine.graphs import Key
from draftwing.engine.request_features import Logprobs, unpacked
from draftwing.engine.row_table import RowTable, Upload
from draftwing.ops.attention.batch import Batch, spans_of
from draftwing.ops.table import TorchOps
from draftwing.ops.types import AcceptedPath, Calibration, Draft, SamplingGroups, Tree, unpack
from draftwing.sched.guidance import Guides


class DraftBatch(NamedTuple):
    """A draft, and the target's batch for it."""

    draft: Draft  # alive: the nodes that are verified
    batch: Batch
    tree: Tree
    mark: Tensor | None = None  # [B, N] int64, see `core.MARK_DEPTH`; None for roots alone
    place: Tensor | None = None  # [B, N] int64: which of the batch's queries a node is; None: all are, in their order


class Batches:
    def __init__(self, table: RowTable, ops: TorchOps) -> None:
        self._table, self._ops = table, ops
        self._roots: dict[int, tuple[tuple[Tensor, Tensor], Tree]] = {}
        self._chains: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def prompts(self, plan: Plan, upload: Upload, tail: int) -> Batch:
        """Returns a prefill's chunks; tail: page-table entries past a prompt's end that the drafter may write."""
        table = self._table
        return Batch(
            rows=upload.rows,
            ids=table.tokens_at(upload.token_rows, upload.positions),
            positions=upload.positions,
            write_slots=table.slots_at(upload.token_rows, upload.positions),
            table=table.page_table,
            prefix_len=table.kv_len[upload.rows],
            chunks=spans_of(plan.chunks),
            bound=plan.max_kv_len + tail,
        )

    def last_tokens(self, rows: Tensor, max_kv_len: int) -> DraftBatch:
        """Returns trees of the rows' last tokens alone, for plain decoding."""
        (parent, alive), tree = self.roots(rows.shape[0])
        ids, kv_len, write_slots = self._ops.plain_inputs(self._table, rows)
        batch = Batch(
            rows, ids, kv_len, write_slots, self._table.page_table, kv_len, tree.path, tree.path_len,
            window=1, bound=max_kv_len + 1,
        )  # fmt: skip
        return DraftBatch(Draft(ids.unsqueeze(1), parent, alive), batch, tree)

    def trees(
        self, rows: Tensor, draft: Draft, shape: TreeShape, max_kv_len: int, calibration: Calibration, total: int
    ) -> DraftBatch:
        """Drafts, of which the best `total` nodes of the batch are verified, all if it is 0. Node n of a row is written
        at page-table entry kv_len + n."""
        table = self._table
        tree, inputs = self._ops.tree_inputs(table, rows, draft, shape.depth)
        ranked = self._ops.rank(draft, tree, rows, table.rows, calibration)
        if total and total < draft.tokens.numel():
            done = self._ops.assign(table, rows, draft, tree, inputs, ranked, total)
            queries, bound = done.queries, max_kv_len + shape.nodes
            batch = Batch(
                queries.rows, queries.ids, queries.positions, queries.write_slots, table.page_table,
                queries.prefix_len, queries.path, queries.path_len, window=shape.nodes, bound=bound,
                ragged=done.trees,
            )  # fmt: skip
            return DraftBatch(draft._replace(alive=done.alive), batch, tree, done.mark, done.place)
        batch = Batch(
            rows, draft.tokens.flatten(), inputs.positions, inputs.write_slots, self._table.page_table,
            inputs.prefix_len, tree.path, tree.path_len, window=shape.nodes, bound=max_kv_len + shape.nodes,
        )  # fmt: skip
        return DraftBatch(draft, batch, tree, ranked.mark)

    def accepted(self, rows: Tensor, before: Tensor, path: AcceptedPath | None, width: int, bound: int) -> Batch:
        """Returns the accepted paths, chains of `width` tokens; before [B]: kv_len before the step; bound: of it now.
        Without paths which rows went on, and from where, is all that the batch has."""
        if path is None:
            nothing = rows[:0]
            return Batch(rows, nothing, nothing, nothing, self._table.page_table, before)
        size = rows.shape[0]
        known = self._chains.get((size, width))
        if known is None:
            step = torch.arange(width, device=rows.device)
            chain, chain_len = step.expand(size, width, width), (step + 1).expand(size, width)
            known = self._chains[size, width] = chain.contiguous(), chain_len.contiguous()
        return Batch(
            rows, path.ids, path.positions, path.write_slots, self._table.page_table, before, *known, window=width,
            bound=bound + 1,  # up to the newest token's entry
        )  # fmt: skip

    def roots(self, size: int) -> tuple[tuple[Tensor, Tensor], Tree]:
        """Parents, which nodes are alive, and geometry of `size` trees that are a root each."""
        known = self._roots.get(size)
        if known is None:
            zero = torch.zeros(size, 1, dtype=torch.int64, device=self._table.kv_len.device)
            known = self._roots[size] = (zero, zero == 0), Tree(zero, zero[:, :, None], zero + 1)
        return known


def fetch_drafts(device: Device, plan: Plan, draft: Draft) -> Download:
    """Starts the copy of the tokens and parents [T, 2 * N] of rows whose requests asked to see their drafts."""
    at = device.upload(plan.traced)
    return device.download(torch.cat((draft.tokens[at], draft.parent[at]), 1))


def _fetched(download: Download | None) -> DraftTokens | None:
    """Returns what `fetch_drafts` has started; waits for it."""
    return None if download is None else DraftTokens(*np.split(download.wait(), 2, axis=1))


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
    groups: SamplingGroups  # nobody, where it is decided on the device row by row
    filtered: bool  # whether any row has top-k, top-p or min-p: known on the host, for filters cost something
    special: Plan | None = None  # where rows ask for more than drafts and sampling: no graphs but `forward_key`'s
    guidance: Guides | None = None  # the host's part in it
    total: int = 0  # nodes that are verified, over all rows; 0: all
    edited: bool = False  # whether rows have penalties or biases that the sampler applies by row
    adapted: bool = False  # whether rows have adapters
    forward_key: Key | None = None  # whose forward of the target is replayed, where there is no `key`


class Pending(NamedTuple):
    """A launched step: the target has run, nothing is sampled yet."""

    plan: Plan
    started: tuple[Any, Any]  # marks of the device: before and after the drafter caught up; one where it had not to
    verified: Verified | None  # None as long as the target has not run
    upload: Upload | None = None  # prefill only
    batch: Batch | None = None
    step: TreeStep | None = None  # tree only
    drafted: DraftBatch | None = None
    guidance: Guides | None = None  # the host's part in the plan
    drafts: Download | None = None  # of the traced rows, see `fetch_drafts`
    mixed_prefill: Pending | None = None  # of `Plan.mixed_prefill`
    provisional: bool = False  # as of `StepResult`


class InFlight(NamedTuple):
    """A committed step whose result is on its way to the host."""

    plan: Plan
    download: Download
    # Seconds that the device took, from the later of the launch and the end of the step before, and of them those in
    # which the drafter caught up; known once the result is there.
    seconds: Callable[[], tuple[float, float]]
    threads: float = 1.0  # see `StepResult`
    logprobs: Logprobs | None = None
    drafts: Download | None = None  # as `fetch_drafts` gives them
    on_result: Callable[[StepResult], None] | None = None  # gets the result
    mixed_prefill: InFlight | None = None  # of `Plan.mixed_prefill`
    provisional: bool = False  # as of `StepResult`

    @property
    def parts(self) -> tuple[InFlight, ...]:
        """As `Plan.parts`."""
        return (self,) if self.mixed_prefill is None else (self, self.mixed_prefill)

    def wait(self) -> StepResult:
        packed = self.download.wait()
        rows, parts = unpacked(self.plan, self.logprobs) if self.logprobs is not None else ((), ())
        seconds, catching_up = self.seconds()
        rest = dict(logprobs=rows, prompt_logprobs=parts, drafts=_fetched(self.drafts), provisional=self.provisional)
        result = unpack(packed, self.plan.shape, seconds=seconds, catching_up=catching_up, threads=self.threads, **rest)
        if self.on_result is not None and self.plan.step:  # before the first request rows may compute on the same slot
            self.on_result(result)
        return result
