"""Who runs: admission, plans, preemption, ends. Host only, one step behind the device if asked."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.core import MAX_BACKLOG, NO_DEFERRAL, Chunk, DraftDeferral, IntArray, Output, Plan, StepResult
from draftwing.errors import RequestError
from draftwing.sched.draft_backlog import DraftExtendPlanner
from draftwing.sched.guidance import AsyncMask, Guidance, GuidedRow, Workers, await_any
from draftwing.sched.kv_manager import KVManager
from draftwing.sched.planning import divided, fair_decode_batch, make_plan, whole_prompts, with_whole_images
from draftwing.sched.policy.choice import Mixes, ShapeChoice
from draftwing.sched.policy.prefill_budget import PrefillBudget
from draftwing.sched.policy.shape_policy import ShapePolicy, StepContext
from draftwing.sched.queue import MAX_CANDIDATES, FairQueue, RowShares
from draftwing.sched.req import Req, ReqState
from draftwing.sched.results import PromptLogprobCache, Results, finish_meta
from draftwing.sched.state_slots import StateSizes
from draftwing.sched.tower_schedule import TowerSchedule

REST = 0.02  # seconds
TIMED_OUT = "the request exceeded its timeout"
PRIVATE_CHUNK = 32  # prompt tokens of a step for whom nobody waits: who comes meanwhile waits for one step


@dataclass(frozen=True)
class SchedulerConfig:
    slots: int  # KV slots in the pool
    max_rows: int  # requests that may run at once
    max_span: int  # most page-table entries past kv_len that a step may write
    chunk_tokens: int  # most prompt tokens in one prefill plan
    lookahead: int = 0
    tail: int = 0  # page-table entries past a prompt's end that its last chunk may write
    radix: bool = True
    whole_prompts: bool = False  # whether a prompt is prefilled at once
    initial_confidence: int = 0  # the drafter's confidence, as long as no result has told it
    ahead: int = 0  # page-table entries to hand out beyond what a tree step needs, so that most steps upload none
    vocab: int = 0  # width of the target's logits
    skips_extend: frozenset[TreeShape] = frozenset()  # shapes whose steps the drafter does not see until it catches up
    # Most positions of a row in one pass then, and that it may lack where `deferral` says nothing else.
    max_backlog: int = MAX_BACKLOG
    deferral: DraftDeferral = NO_DEFERRAL  # of prompts
    credited: tuple[tuple[str, ...], ...] = ()  # whom a draft counts for, by its source
    states: StateSizes | None = None  # of a model with recurrent layers
    draws_alike: bool = False  # whether a step of which nodes are picked can only draw greedily
    edits_by_row: bool = False  # whether a step with penalties or biases costs what others do
    # Queries of so many trees of a shape in one forward with parts of prompts, 0: they take turns; None: all do.
    mixes: Mixes | None = None
    prefill_sizes: tuple[int, ...] = ()  # tokens that a prefill is padded to, ascending; of more it is not
    mixed_sizes: tuple[int, ...] = ()  # queries that both together are padded to
    prefill_seconds: tuple[tuple[int, float], ...] = ()  # of prefills of so many tokens, none before them, measured
    at_once: int = 1  # tokens of prompts: fewer attend to their keys in the time of so many
    reads_images: bool = False  # whether the drafter reads an image's features, with the token before each of its own


class Scheduler:
    # Share of the running requests' remaining tokens that admission leaves free; grows when a guess was too bold.
    RESERVE_MIN, RESERVE_STEP, RESERVE_DECAY = 0.1, 0.3, 0.998

    def __init__(self, config: SchedulerConfig, policy: ShapePolicy, spans: dict[TreeShape, int]) -> None:
        """spans: page-table entries past kv_len that a step of each shape in the policy's menu may write."""
        assert set(policy.menu) <= set(spans) and max(spans.values()) <= config.max_span
        self.config = config
        self.spans = spans
        room = config.max_span + max(shape.max_commit for shape in policy.menu)
        self.kv = KVManager(config.slots, config.max_rows, config.lookahead, config.radix, room, config.states)
        self.waiting = FairQueue()
        self._workers = Workers()
        self.running: list[Req] = []
        self.retractions = 0
        self._by_uid: dict[str, Req] = {}
        # Heap, with arrivals, for a uid may come again. Requests that have ended leave it once they are most of it.
        self._deadlines: list[tuple[float, int, str]] = []
        self._reserve = self.RESERVE_MIN
        self._steps = 0
        self._prefilled: Sequence[Chunk] = ()  # by the plan before
        self._alone = False  # whether parts of prompts could not be beside the plan before: they are next
        self._prefills = PrefillBudget(config.at_once, config.prefill_seconds)
        self.tower_schedule = TowerSchedule(self._prefills, config.chunk_tokens, int(config.reads_images))
        self.choice = ShapeChoice(policy, self._prefills, config.draws_alike, config.deferral, config.edits_by_row)
        self._held: set[Req] = set()  # guided requests that cannot go on yet
        self._prompt_logprobs = PromptLogprobCache()
        self.catch_ups = DraftExtendPlanner(config.skips_extend, config.max_backlog, config.deferral, config.slots)
        # Is told each request that was not aborted, at its end, and why it ended; none that is private.
        self.answered: Callable[[Req, dict[str, Any]], None] = lambda req, reason: None
        # Is told each request that ends while it runs, aborted or not, when its KV is cached; none that is private.
        self.cached: Callable[[Req], None] = lambda req: None
        # Is told each request that goes back to the queue, when its KV is cached; none that is private.
        self.retracted: Callable[[Req], None] = lambda req: None
        # Is asked, of a request that would begin now, whether what is elsewhere of its text is brought back first.
        self.brings_back: Callable[[Req], bool] = lambda req: False
        self._news: list[Output] = []
        self._of_trees = 0, 0  # between which of them are those of the trees of a step whose prompts come next
        self.results = Results(self.kv, self.choice, self.catch_ups, self._prompt_logprobs, self._finish, self._news)

    # -- requests in, requests out ------------------------------------------------------------------------------

    def submit(self, req: Req) -> None:
        """Takes a new request. `req.max_total` must leave room for one step in the pool; the engine checks that
        before."""
        assert req.max_total + self.kv.room <= self.config.slots
        self._by_uid[req.uid] = req
        if req.grammar is not None:
            req.async_mask = AsyncMask(req.grammar, self._workers)
        self.waiting.join(req)
        if req.deadline is not None:
            if len(self._deadlines) > 2 * len(self._by_uid) + 64:
                self._deadlines = [one for one in self._deadlines if self._has(*one[1:])]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (req.deadline, req.arrival, req.uid))

    def abort(self, uid: str, message: str = "aborted") -> None:
        """Ends a request wherever it is; a step still in flight for it is ignored when it comes back."""
        req = self._by_uid.get(uid)
        if req is not None:
            self._finish(req, {"type": "abort", "message": message})

    def refuse(self, req: Req, message: str = "aborted", status: int | None = None) -> None:
        """Notes the end of a request that was never submitted. status: of HTTP, None: it is an answer that ended."""
        reason = {"type": "abort", "message": message, **({} if status is None else {"status_code": status})}
        self._news.append(Output(req.uid, [], reason, meta=finish_meta(req, self.config.credited)))

    def take_outputs(self) -> list[Output]:
        out = self._news.copy()
        self._news.clear()
        return out

    @property
    def needs_results(self) -> bool:
        """Returns whether the next step is better planned when the results of all steps before it are known: all who
        run would have to wait for them. Beside others guided requests take part in every second step."""
        return bool(self.running) and all(req.guided for req in self.running)

    def rest(self) -> None:
        """Waits a moment for what keeps all requests from going on, if there is nothing else to wait for."""
        ones = [req.async_mask.pending() for req in self.running if req.async_mask is not None]
        await_any([one for one in ones if one is not None], REST)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def flush_cache(self) -> bool:
        """Empties the prefix cache; only when nothing runs."""
        if not self.idle:
            return False
        self.kv.flush()
        self.catch_ups.clear()
        return True

    # -- planning -----------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """Returns the next step, or None when nothing can run before a result comes back."""
        self._expire()
        self._admit()
        self._reserve = max(self.RESERVE_MIN, self._reserve * self.RESERVE_DECAY)
        plan = None
        self._await_masks()
        ready = self._ready()
        if self.tower_schedule.plan(self.running, bool(ready), self._prefilled):
            self._prefilled = ()
            return self._plan_tree()
        alone, self._alone = self._alone, False
        mixes = None if alone else self._mixes(ready)
        if mixes is not None:
            return self._plan_both(ready, mixes)
        prefill_first = alone or not (self._prefilled and ready)  # prefill chunks and decode steps alternate
        if prefill_first:
            private = bool(self.running) and all(req.private for req in self.running)
            room = min(self.config.chunk_tokens, PRIVATE_CHUNK) if private else self.config.chunk_tokens
            plan = self._plan_prefill(ready, room, self.config.prefill_sizes)
        if plan is None:
            plan = self._plan_tree()
        if plan is None and not prefill_first:  # all who decode were retracted for prompts
            plan = self._plan_prefill([], self.config.chunk_tokens, self.config.prefill_sizes)
        self._prefilled = plan.chunks if plan is not None else ()
        return plan

    def _plan_both(self, ready: list[Req], mixes: Mixes) -> Plan | None:
        """Plans a step of those who decode, and parts of prompts beside it, for which nobody is retracted: they may be
        in the step. What they get no room for is planned alone, next, as all is if the step has come out as one that is
        not mixed."""
        tree, prompts, room, spared = self._plan_tree(mixes), None, self.config.chunk_tokens, None
        nodes = 0 if tree is None else mixes(tree.shape, len(tree.rows))
        sizes = self.config.prefill_sizes
        if tree is not None:
            sizes = tuple(size - nodes for size in self.config.mixed_sizes if size > nodes)
            room = min((room - tree.nodes, *sizes[-1:]))  # what is launched holds up results
            spared = self.choice.spared(tree.shape, [self.kv.by_row[row] for row in tree.rows.tolist()], nodes)
        if room > 0 and (tree is None or nodes):
            prompts = self._plan_prefill(ready, room, sizes, tree is None, spared)
        self._prefilled = prompts.chunks if prompts is not None and tree is None else ()
        if prompts is None:
            self._alone |= self._prompts_wait
        if tree is None or prompts is None:
            return tree or prompts
        return replace(tree, mixed=True, mixed_prefill=replace(prompts, mixed=True))

    def _await_masks(self) -> None:
        """Finds out which guided requests can go on."""
        self._held.clear()
        for req in [req for req in self.running if req.guided]:
            if req.inflight:  # what comes next depends on what comes now
                self._held.add(req)
            elif req.async_mask is not None:
                try:
                    if not req.async_mask.ready():
                        self._held.add(req)
                except RequestError as error:
                    self.abort(req.uid, str(error))

    def _mixes(self, ready: Sequence[Req]) -> Mixes | None:
        """`SchedulerConfig.mixes`, if a step of these requests can have parts of prompts in its forward."""
        mixes = self.config.mixes
        return mixes if mixes is not None and ready and mixes(PLAIN, len(ready)) else None

    @property
    def has_prompts(self) -> bool:
        """Returns whether there are prompts that are not prefilled."""
        return bool(self.waiting) or self._prompts_wait

    @property
    def _prompts_wait(self) -> bool:
        return any(req.state is ReqState.PREFILL for req in self.running)

    def _ready(self) -> list[Req]:
        return [req for req in self.running if req.state is ReqState.DECODE and req.may_grow and req not in self._held]

    def _admit(self) -> None:
        if not self.waiting:
            self._prompt_logprobs.clear()
            return
        admitted: list[Req] = []
        # Rows, for those whose turn it is but for the prompt that they wait for: of their client's share, and half of
        # all at most, since they are idle until it is there.
        kept, most = 0, max(self.config.max_rows // 2, 1)
        shares = RowShares(self.config.max_rows, self.running, self.waiting)
        # Where nobody decodes, as many get rows as the next prefill has tokens for.
        todo, alone = sum(req.unsent for req in self.running), not self._ready()
        for req in self.waiting.fair_order(shares.served, further=alone):
            if kept >= self.kv.free_rows and shares.preemption_victim(self.running, req) is None:
                break
            if len(admitted) >= MAX_CANDIDATES and todo >= self.config.chunk_tokens and alone:
                break
            if req.returning:
                continue
            tokens = req.array
            if self.kv.prefix_being_computed(req, tokens, self._held):
                if kept < most and not shares.served(req.request.client):
                    shares.give(req)
                    kept += 1  # computed once for all who begin alike
                continue
            if kept < self.kv.free_rows and len(tokens) + self.kv.room <= self.kv.obtainable and self.brings_back(req):
                continue
            self._prompt_logprobs.share(req, self.running)
            if not self._give_row(req, tokens, shares, self.kv.free_rows - kept):
                break  # whoever needs less must not pass for ever whoever needs more
            self.waiting.admit(req)
            req.state = ReqState.PREFILL
            req.admitted = req.admitted or time.monotonic()
            req.inflight, req.confidence = 0, self.config.initial_confidence
            self.running.append(req)
            admitted.append(req)
            todo += req.unsent
        self.choice.skip_prompts(admitted, self.running, self.config.initial_confidence)

    def _give_row(self, req: Req, tokens: IntArray, shares: RowShares, rows: int) -> bool:
        """Retracts requests of clients with more than their share for one that has less, where it must. rows: that it
        may have, of those that are free."""
        rows = max(rows, 0)
        while True:
            growth = sum(max(other.max_total - other.covered, 0) for other in self.running)
            reserve = int(self._reserve * growth) + self.kv.room * len(self.running)
            if rows and self.kv.admit(req, tokens, reserve):
                shares.give(req)
                return True
            victim = shares.preemption_victim(self.running, req)
            if victim is None:
                return False
            shares.take(victim)
            self._retract(victim)
            rows += 1

    def _plan_prefill(
        self, ready: list[Req], room: int, sizes: Sequence[int], retracts: bool = True, spared: float | None = None
    ) -> Plan | None:
        """ready: who decodes, and waits for it.  room: tokens.  sizes: tokens that it is padded to, ascending.
        retracts: whether others may be retracted for it.  spared: as of `PrefillBudget.max_seconds`."""
        chunks: list[Chunk] = []
        chosen: list[Req] = []
        todo = sorted(
            (
                req
                for req in self.running
                if req.state is ReqState.PREFILL and req not in self._held and self.tower_schedule.room(req)
            ),
            key=lambda r: r.rank,
        )
        shares = divided(room, todo, self._prefills, ready, spared, sizes)
        shares = [(req, min(length, self.tower_schedule.room(req))) for req, length in shares]
        if not retracts:  # an image that has no room beside a step comes without one, before others fill the next
            self._alone |= not all(with_whole_images([one], room, False) for one in shares)
        if self.config.whole_prompts:
            shares = whole_prompts(shares, room)
        whole = with_whole_images(shares, room, retracts)
        for req, length in sorted(whole, key=lambda one: one[0].rank):  # whoever is retracted has no chunk yet
            if req.state is not ReqState.PREFILL:  # retracted for a better-placed one
                continue
            final = req.sent + length == len(req.tokens)
            if not self._cover(req, req.sent + length + (self.config.tail if final else 0), retracts):
                if not retracts:  # whoever needs less must not pass
                    self._alone = True
                    break
                continue
            kept = self.catch_ups.prompts.plan(req, length, final)
            saves = () if self.kv.states is None else self.kv.states.saves(req, length)
            chunks.append(Chunk(req.row, req.sent, length, final, kept, saves, req.request.second))
            chosen.append(req)
            req.sent += length
            req.bound = req.sent
            if final:  # decodable before its first token is known here
                req.state = ReqState.DECODE
                req.inflight += 1
        if not chunks:
            return None
        # The first rows draw. Of those that do, and of the others, the last are those that the drafter does not see.
        order = sorted(range(len(chunks)), key=lambda i: (not chunks[i].final, chunks[i].kept is not None))
        chosen, chunks = [chosen[i] for i in order], [chunks[i] for i in order]
        return self._make_plan("prefill", PLAIN, chosen, max(r.bound for r in chosen), chunks)

    def _plan_tree(self, mixes: Mixes | None = None) -> Plan | None:
        """mixes: where parts of prompts will be in the same forward."""
        ready = fair_decode_batch(self._ready(), self.running, self.choice.policy.seconds)
        if not ready:
            return None
        waiting = self._prompts_wait
        mixes = mixes if waiting else None
        passes = self.catch_ups.passes(ready)
        shape = self.choice.choose(ready, self._prefilled, waiting, passes, mixes, len(self.running))
        span = self.spans[shape]
        ahead = self.kv.ahead(ready, span, self.config.ahead)
        chosen = []
        for req in sorted(ready, key=lambda r: r.rank):
            # A worse-placed request may have been retracted for a better-placed one.
            need = req.bound + span
            if req.state is ReqState.DECODE and self._cover(req, min(need + ahead, max(need, req.max_total))):
                chosen.append(req)
        if not chosen:
            return None
        max_kv_len, most = max(req.bound for req in chosen), shape.max_commit
        self.catch_ups.plan(self._steps, shape, chosen)
        for req in chosen:
            req.bound += most
            req.inflight += 1
        self.choice.planned(self._steps, chosen, bool(self._prefilled))
        return self._make_plan("tree", shape, chosen, max_kv_len, [])

    @property
    def pause(self) -> float:
        """Returns seconds for which other things may be done before the next step: as long as a part of a prompt."""
        return self._prefills.pause(any(req.state is ReqState.DECODE for req in self.running))

    def explain(self) -> tuple[StepContext, list[dict[str, Any]]]:
        """Returns what the policy would be given of a step of all who decode that was planned now, and each option as
        `ShapePolicy.explain` does."""
        ready = [req for req in self.running if req.state is ReqState.DECODE]
        mixes = self._mixes(ready) if self._prompts_wait else None
        passes = self.catch_ups.passes(ready)
        context = self.choice.context(ready, self._prefilled, passes, mixes, len(self.running))
        return context, self.choice.explain(ready, context)

    def _make_plan(self, kind: Any, shape: TreeShape, reqs: list[Req], max_kv_len: int, chunks: list[Chunk]) -> Plan:
        plan = make_plan(
            self._steps, kind, shape, reqs, max_kv_len, chunks, *self.kv.take_changes(), self.catch_ups.take(),
            self.catch_ups.prompts.take(), self.kv.take_states(),
        )  # fmt: skip
        if self.kv.states is not None:
            self.kv.states.planned(reqs, 0 if chunks else shape.nodes)
        self._steps += 1
        return plan

    def seconds(self, plan: Plan) -> float:
        """Returns what the device will take for a plan just made, about; 0 where that is unknown."""
        reqs = [req for row in plan.rows.tolist() if (req := self.kv.by_row.get(row)) is not None]
        return self.choice.seconds(plan, reqs)

    def guidance(self, plan: Plan) -> Guidance | None:
        """Returns the host's part in a plan just made, if it has any."""
        if not len(plan.guided):
            return None
        reqs = [self.kv.by_row[row] for row in plan.rows[plan.guided].tolist()]
        rows = [GuidedRow(req.tokens, req.grammar, req.processor, req.request.limits, req.async_mask) for req in reqs]
        return Guidance(rows, plan.guided.tolist(), self.config.vocab)

    def _cover(self, req: Req, upto: int, retracts: bool = True) -> bool:
        """Gives `req` slots for positions below `upto`, retracting worse-placed requests if it must and may; False when
        `req` itself was the worst-placed and has been retracted, or there are no slots."""
        while not self.kv.cover(req, upto):
            if not retracts:
                return False
            victim = max(self.running, key=lambda r: r.rank)
            self._retract(victim)
            self._reserve = min(1.0, self._reserve + self.RESERVE_STEP)
            if victim is req:
                return False
        return True

    def _retract(self, req: Req) -> None:
        """Back to the queue with everything generated so far. Noise is keyed by position, so resuming is exact."""
        self._release(req)
        if not req.private:
            self.retracted(req)
        req.retractions += 1
        self.retractions += 1
        req.state = ReqState.WAITING
        self.waiting.requeue(req)

    def _release(self, req: Req) -> None:
        self.catch_ups.release(req, self.kv.radix.enabled and not req.private)
        self.kv.release(req)
        self.running.remove(req)
        req.row = req.admission = -1

    def commit(self, plan: Plan, result: StepResult, guidance: Guidance | None = None) -> None:
        """Takes a step's result, and what became of the host's part in it; the news are in `take_outputs`. Those of
        prompts come before those of trees in the same forward: a first token is waited for, and whoever passes outputs
        on does so one by one."""
        before = len(self._news)
        self.results.commit(plan, result, guidance)
        if plan.mixed_prefill is not None:
            self._of_trees = before, len(self._news)
        elif plan.mixed:
            first, end = self._of_trees
            trees = self._news[first:end]
            del self._news[first:end]
            self._news += trees

    def _finish(self, req: Req, reason: dict[str, Any], output: Output | None = None) -> None:
        if req.running:
            req.kv = min(req.kv, len(req.tokens) - 1)  # the device may have committed past a stop
            self._release(req)
            if not req.private:
                self.cached(req)
        else:
            self.waiting.leave(req)
        req.state = ReqState.DONE
        del self._by_uid[req.uid]
        output = Output(req.uid, []) if output is None else output
        if reason["type"] != "abort" and not req.private:
            self.choice.answered(req)
            self.answered(req, reason)
        self._news.append(replace(output, finish_reason=reason, meta=finish_meta(req, self.config.credited)))

    # -- small things -------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        now = time.monotonic() if self._deadlines else 0.0
        while self._deadlines and self._deadlines[0][0] < now:
            _, arrival, uid = heapq.heappop(self._deadlines)
            if self._has(arrival, uid):
                self.abort(uid, TIMED_OUT)

    def _has(self, arrival: int, uid: str) -> bool:
        req = self._by_uid.get(uid)
        return req is not None and req.arrival == arrival

    def check_integrity(self) -> None:
        """Asserts as `KVManager.check_integrity` does, and that those who hold rows are those who run."""
        self.kv.check_integrity()
        assert set(self.kv.by_row.values()) == set(self.running)
