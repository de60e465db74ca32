"""Results of steps: tokens, ends, and what became of drafts, taken in by the requests that they are of."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from draftwing.core import (
    FORBIDDEN,
    NOT_FINITE,
    Chunk,
    Output,
    Plan,
    StepResult,
    TokenLogprobs,
    TracedNode,
    TracedStep,
    TreeShape,
)
from draftwing.sched.draft_backlog import DraftExtendPlanner
from draftwing.sched.guidance import Guidance
from draftwing.sched.kv_manager import KVManager
from draftwing.sched.policy.choice import ShapeChoice
from draftwing.sched.prompt_logprobs import PromptLogprobCache
from draftwing.sched.req import Req
from draftwing.sched.stop import append_until_stop

log = logging.getLogger("draftwing")
NOT_FINITE_MESSAGE = (
    "the model's logits are not finite (NaN or infinity): its weights are damaged, or --dtype is too narrow for them"
)


class Finish(Protocol):
    """Ends a request, wherever it is. output: its last; by default one without tokens."""

    def __call__(self, req: Req, reason: dict[str, Any], output: Output | None = None) -> None: ...


class Results:
    """Takes results of steps in, and leaves what they mean for their requests in `news`."""

    def __init__(
        self,
        kv: KVManager,
        choice: ShapeChoice,
        catch_ups: DraftExtendPlanner,
        prompt_logprobs: PromptLogprobCache,
        finish: Finish,
        news: list[Output],
    ) -> None:
        """news: takes the outputs of requests that go on."""
        self.stale = 0  # rows whose request was no longer the one that was planned
        self._kv = kv
        self._choice = choice
        self._catch_ups = catch_ups
        self._prompt_logprobs = prompt_logprobs
        self._finish = finish
        self._news = news

    def commit(self, plan: Plan, result: StepResult, guidance: Guidance | None = None) -> None:
        """Takes a step's result, and what became of the host's part in it. Rows whose request is no longer the one that
        was planned are skipped."""
        live = [self._live(*place) for place in zip(plan.rows.tolist(), plan.admission.tolist(), strict=True)]
        self.stale += live.count(None)
        self._choice.record(plan, live, result)
        logprobs = dict(zip((i for i, _ in plan.logprobs), result.logprobs, strict=True))
        for part, values in zip(plan.prompt_parts, result.prompt_logprobs, strict=True):
            if (req := live[part.chunk]) is not None:
                req.prompt_logprobs += values
        traced = {i: at for at, i in enumerate(plan.traced.tolist())}
        rows = zip(live, result.count.tolist(), result.tokens.tolist(), result.confidence.tolist(), strict=True)
        for i, (req, count, tokens, confidence) in enumerate(rows):
            if req is None:
                continue
            new, failure, nonfinite = self._valid(req, i, tokens[:count], guidance)
            if not new and (nonfinite or failure is not None):
                if nonfinite:
                    self._kv.quarantine(req)
                self._fail(req, failure)
                continue
            if count:  # a chunk that is not the last says nothing of drafts yet
                req.confidence = confidence
            if plan.kind == "prefill":
                output = self._commit_chunk(req, plan.chunks[i], new, logprobs.get(i, []))
            else:
                self._catch_ups.commit(plan.step, plan.shape, req, count)
                self._commit_path(req, plan.shape, result, i, count)
                if nonfinite:
                    self._kv.quarantine(req)
                output = self._emit(req, new, logprobs.get(i, []), drafts=result.accepted_source[i])
            if i in traced:
                assert output is not None, "rows that draw are traced"
                number = 0 if plan.kind == "prefill" else req.verify_steps
                output.trace.append(traced_step(result, i, traced[i], number, len(plan.rows), output.token_ids))
            if (failure is not None or nonfinite) and req.running:
                self._fail(req, failure)

    def _valid(self, req: Req, i: int, new: list[int], guidance: Guidance | None) -> tuple[list[int], str | None, bool]:
        """Returns those of the tokens of row i that count, why the request cannot go on behind them, if it cannot, and
        whether its logits are not finite there."""
        last = new[-1] if new else 0
        nonfinite = bool(last & NOT_FINITE)
        if nonfinite and not (new := new[:-1]):  # of drafts before it one may be the last token of the answer
            return new, None, True
        failure = None
        if guidance is not None:
            new, failure = guidance.until_failure(i, new)
        # Logits that are not finite cannot be edited.
        if last & FORBIDDEN and not nonfinite and failure is None:
            new, failure = new[:-1], req.forbidding
        return new, failure, nonfinite

    def _fail(self, req: Req, failure: str | None) -> None:
        """Ends a request that cannot go on. failure: why; None of one whose logits are not finite, and whose KV may
        not be read."""
        if failure is not None:
            self._finish(req, {"type": "abort", "message": failure})
            return
        log.error("request %.100r: the model's logits are not finite", req.request.name)
        self._finish(req, {"type": "abort", "message": NOT_FINITE_MESSAGE, "status_code": 500})
        self._kv.quarantine_cache()

    def _live(self, row: int, admission: int) -> Req | None:
        req = self._kv.by_row.get(row)
        return req if req is not None and req.admission == admission else None

    def _commit_chunk(self, req: Req, chunk: Chunk, tokens: list[int], logprobs: list[TokenLogprobs]) -> Output | None:
        """Returns the request's output, None for a chunk that is not the last."""
        req.kv = chunk.start + chunk.length
        if self._kv.states is not None:
            self._kv.states.committed(req, req.kv)
        if not chunk.final:
            return None
        req.inflight -= 1
        output = self._emit(req, tokens, logprobs)
        if req.running:
            self._kv.share(req)
            self._catch_ups.share(req)
        return output

    def _commit_path(self, req: Req, shape: TreeShape, result: StepResult, i: int, count: int) -> None:
        """count: tokens that row i of the result committed for it."""
        if self._kv.states is not None:
            self._kv.states.committed(req, req.kv + 1)
        if shape.nodes > 1:
            window = slice(req.kv, req.kv + shape.nodes)
            req.slots[window] = req.slots[window][result.order[i]]  # as the device permuted its page table
            req.note_proposed(result.proposed_by[i])
        req.kv += count
        req.bound -= shape.max_commit - count
        req.inflight -= 1
        req.verify_steps += 1

    def _emit(
        self, req: Req, new: list[int], logprobs: list[TokenLogprobs], drafts: Sequence[int] | None = None
    ) -> Output:
        """Appends tokens up to the first stop; what the device committed past it is dropped. drafts: the sources of the
        first tokens, which are accepted drafts; None for the token of a prefill."""
        kept, reason = append_until_stop(req, new)
        if drafts is not None:
            req.note_accepted(drafts[: len(kept)])
        first = req.completion_tokens == len(kept)
        if first:
            self._prompt_logprobs.add(req)
        output = Output(
            req.uid, kept, logprobs=logprobs[: len(kept)], prompt_logprobs=req.prompt_logprobs if first else []
        )
        if reason is not None:
            self._finish(req, reason, output)
        else:
            self._news.append(output)
        return output


def traced_step(
    result: StepResult, row: int, traced: int, number: int, requests: int, tokens: Sequence[int]
) -> TracedStep:
    """row: of the result.  traced: its place among the plan's traced rows.  number, requests: as in `TracedStep`.
    tokens: that the request takes of the step; drafts past them do not count as accepted."""
    nodes = [] if result.drafts is None else _nodes(result, row, traced, len(tokens))
    return TracedStep(number, result.seconds, requests, nodes, list(tokens))


def _nodes(result: StepResult, row: int, traced: int, taken: int) -> list[TracedNode]:
    assert result.drafts is not None
    drafts = min(taken, int(result.count[row]) - 1)
    accepted = set(result.order[row, 1 : 1 + drafts].tolist())
    live = result.depth[row].nonzero()[0].tolist()
    place = {node: at for at, node in enumerate(live)}  # the root, node 0, has none
    tokens, parents = (part[traced].tolist() for part in result.drafts)
    source, verified = result.source[row].tolist(), result.verified[row].tolist()
    survival = result.survival[row].tolist()
    return [
        TracedNode(
            place.get(parents[node]), tokens[node], source[node], survival[node], verified[node], node in accepted
        )
        for node in live
    ]
