"""Results of steps, taken in by the requests that they are of: tokens, ends and what became of drafts. And what belongs
to that: log probabilities of prompts, computed once for all who want the same, and what a last output reports."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from draftwing.config.trees import TreeShape
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
    stretch_start,
)
from draftwing.errors import RequestError
from draftwing.sched.draft_backlog import DraftExtendPlanner
from draftwing.sched.guidance import Guidance
from draftwing.sched.kv_manager import KVManager
from draftwing.sched.policy.choice import ShapeChoice
from draftwing.sched.req import Req

log = logging.getLogger("draftwing")
NOT_FINITE_MESSAGE = (
    "the model's logits are not finite (NaN or infinity): its weights are damaged, or --dtype is too narrow for them"
)


class PromptLogprobCache:
    """Keeps those of the requests that run, and of the newest one reported, which may have ended with its first token
    while others wait."""

    def __init__(self) -> None:
        self._newest: Req | None = None

    def add(self, req: Req) -> None:
        """Adds a request whose prompt has been run."""
        if _wants(req):
            self._newest = req

    def clear(self) -> None:
        """Forgets all, as nobody waits."""
        self._newest = None

    def share(self, req: Req, running: Iterable[Req]) -> None:
        """Gives what is known of the prompt to a request that is about to get a row, whose KV may then be cached,
        too."""
        if req.next_prompt_logprob is None:
            return
        known = [*running] if self._newest is None else [self._newest, *running]
        for other in known:
            if _wants(other) and other.next_prompt_logprob is None and _alike(req, other):
                req.prompt_logprobs = other.prompt_logprobs  # one list: nobody changes it any more
                return


def _wants(req: Req) -> bool:
    wanted = req.request.logprobs
    return wanted is not None and wanted.start >= 0


def _alike(one: Req, other: Req) -> bool:
    same = one.salt == other.salt and one.request.logprobs == other.request.logprobs
    return same and one.request.prompt_ids == other.request.prompt_ids and _digests(one) == _digests(other)


def _digests(req: Req) -> list[bytes]:
    return [image.digest for image in req.request.images]


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
            self._catch_ups.prompts.share(req)
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
            req.note_accepted(drafts[: len(kept)], len(kept))
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


def append_until_stop(req: Req, new: Sequence[int]) -> tuple[list[int], dict[str, Any] | None]:
    """Adds tokens up to the first that ends the request. Returns those, and why it ends; None if it goes on."""
    kept: list[int] = []
    for token in new:
        req.tokens.append(token)
        kept.append(token)
        reason = _stop_reason(req, token)
        if reason is None:
            continue
        if reason["type"] == "abort":  # the newest token is not one that the request allows
            req.tokens.pop()
            kept.pop()
        return kept, reason
    return kept, None


def _stop_reason(req: Req, token: int) -> dict[str, Any] | None:
    """Returns why the request ends with `token`, its newest; None if it goes on."""
    found = req.scanner.push(token) if req.scanner is not None else None
    if req.scanner is not None and req.scanner.failed is not None:
        return {"type": "abort", "message": req.scanner.failed}
    if token in req.stop_ids:
        return {"type": "stop", "matched": token}
    complete = False
    if req.grammar is not None:
        try:
            complete = req.follow(token)
        except RequestError as error:
            return {"type": "abort", "message": str(error)}
    if found is None and not complete and len(req.tokens) < req.max_total:
        return None
    if found is None and req.scanner is not None:
        # Text that is certain only now that nothing follows may hold a stop string.
        found = req.scanner.finish()
    if found is not None or complete:
        return {"type": "stop", "matched": found}
    return {"type": "length", "length": req.completion_tokens}


def finish_meta(req: Req, credited: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Returns the metadata of a request that has ended. credited: whom a draft counts for, by its source."""
    correct = sum(drafts * times for drafts, times in enumerate(req.accepted))
    return {
        "prompt_tokens": req.prompt_len,
        "completion_tokens": req.completion_tokens,
        "cached_tokens": req.cached_tokens,
        "num_retractions": req.retractions,
        "e2e_latency": time.monotonic() - req.created,
        "queue_time": (req.admitted or time.monotonic()) - req.created,
        "spec_verify_ct": req.verify_steps,
        "spec_num_proposed_drafts": req.proposed,
        "spec_num_correct_drafts": correct,
        "spec_accept_length": 1 + correct / req.verify_steps if req.verify_steps else 1.0,
        "spec_accept_rate": correct / req.proposed if req.proposed else 0.0,
        "spec_correct_drafts_histogram": list(req.accepted),
        "spec_by_output_position": [[stretch_start(i), *counts] for i, counts in enumerate(req.by_stretch)],
        "spec_drafters": _by_drafter(req, credited),
    }


def _by_drafter(req: Req, credited: Sequence[Sequence[str]]) -> dict[str, dict[str, int]]:
    """Returns what each drafter has proposed, and what of it was accepted; drafts of two drafters count for both."""
    found: dict[str, dict[str, int]] = {}
    for source, names in enumerate(credited):
        for name in names if source or req.proposed_by[0] else ():
            counts = found.setdefault(name, {"proposed": 0, "accepted": 0})
            counts["proposed"] += req.proposed_by[source]
            counts["accepted"] += req.accepted_by[source]
    return found
