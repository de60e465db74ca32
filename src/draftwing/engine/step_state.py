"""What passes between the stages of a step, and from a step to whoever waits for its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftwing.core import DraftTokens, Plan, StepResult, TreeShape
from draftwing.engine.batches import DraftBatch
from draftwing.engine.devices.base import Device, Download
from draftwing.engine.graphs.cuda import Key
from draftwing.engine.request_features import Logprobs, unpacked
from draftwing.engine.row_table import Upload
from draftwing.ops.attention import Batch
from draftwing.ops.types import Draft, SamplingGroups, unpack
from draftwing.sched.guidance import Guides


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
    special: Plan | None = None  # where rows ask for more than drafts and sampling; never in graphs
    guidance: Guides | None = None  # the host's part in it
    total: int = 0  # nodes that are verified, over all rows; 0: all
    edited: bool = False  # whether rows have penalties or biases that the sampler applies by row


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
    beside: Pending | None = None  # of `Plan.beside`
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
    beside: InFlight | None = None  # of `Plan.beside`
    provisional: bool = False  # as of `StepResult`

    @property
    def parts(self) -> tuple[InFlight, ...]:
        """As `Plan.parts`."""
        return (self,) if self.beside is None else (self, self.beside)

    def wait(self) -> StepResult:
        packed = self.download.wait()
        rows, parts = unpacked(self.plan, self.logprobs) if self.logprobs is not None else ((), ())
        seconds, catching_up = self.seconds()
        rest = dict(logprobs=rows, prompt_logprobs=parts, drafts=_fetched(self.drafts), provisional=self.provisional)
        result = unpack(packed, self.plan.shape, seconds=seconds, catching_up=catching_up, threads=self.threads, **rest)
        if self.on_result is not None and self.plan.step:  # before the first request rows may compute on the same slot
            self.on_result(result)
        return result
