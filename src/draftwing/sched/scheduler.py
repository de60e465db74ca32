"""Who runs, on which slots: admission, plans, commits, preemption. Host only, one step behind the device if asked.

Ownership: a KV slot belongs to the allocator, to the radix tree, or to one running request (`Req.owned`), and
`_release` is the only function that takes slots and rows from a request. Freeing while a step that still writes
those slots is in flight is safe, because whoever gets them next is launched later on the same stream.
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from draftwing.core import (
    LAG,
    NOT_FINITE,
    PLAIN,
    Admission,
    Chunk,
    IntArray,
    Output,
    Plan,
    StepResult,
    TokenLogprobs,
    TreeShape,
)
from draftwing.errors import RequestError
from draftwing.sched.alloc import SlotAllocator
from draftwing.sched.ending import ending, told
from draftwing.sched.foresight import Foresight, Workers, await_any
from draftwing.sched.guidance import Guidance, GuidedRow
from draftwing.sched.lag import CatchUps
from draftwing.sched.pace import Pace
from draftwing.sched.planning import divided, make_plan
from draftwing.sched.policy import Load, ShapePolicy
from draftwing.sched.prices import PricedSteps
from draftwing.sched.queue import FairQueue
from draftwing.sched.radix import RadixCache
from draftwing.sched.req import Req, ReqState
from draftwing.sched.trace import traced_step

log = logging.getLogger("draftwing")
REST = 0.02  # seconds
LOOKED_AT = 32  # requests that wait, each time rows are given: some may have to wait for another's prefill
SPOILT = (
    "the model's logits are not finite (NaN or infinity): its weights are damaged, or --dtype is too narrow for them"
)


@dataclass(frozen=True)
class SchedulerConfig:
    slots: int  # KV slots in the pool
    max_rows: int  # requests that may run at once
    max_span: int  # most page-table entries past kv_len that a step may write
    chunk_tokens: int  # most prompt tokens in one prefill plan
    lookahead: int = 0
    tail: int = 0  # page-table entries past a prompt's end that its last chunk may write
    radix: bool = True
    initial_confidence: int = 0  # the drafter's confidence, as long as no result has told it
    ahead: int = 0  # page-table entries to hand out beyond what a tree step needs, so that most steps upload none
    vocab: int = 0  # width of the target's logits
    lagging: frozenset[TreeShape] = frozenset()  # shapes whose steps the drafter does not see until it catches up
    lag: int = LAG  # most positions of a row that it may lack then
    credited: tuple[tuple[str, ...], ...] = ()  # whom a draft counts for, by its source
    draws_alike: bool = False  # whether a step of which nodes are picked can only draw greedily


class Scheduler:
    # Share of the running requests' remaining tokens that admission leaves free; grows when a guess was too bold.
    RESERVE_MIN, RESERVE_STEP, RESERVE_DECAY = 0.1, 0.3, 0.998

    def __init__(self, config: SchedulerConfig, policy: ShapePolicy, spans: dict[TreeShape, int]) -> None:
        """spans: page-table entries past kv_len that a step of each shape in the policy's menu may write."""
        assert set(policy.menu) <= set(spans) and max(spans.values()) <= config.max_span
        self.config = config
        self.policy = policy
        self.spans = spans
        self.pool = SlotAllocator(config.slots)
        self.radix = RadixCache(config.lookahead, config.radix)
        self.waiting = FairQueue()
        self._workers = Workers()
        self.running: list[Req] = []
        self.retractions = 0
        self.stale_results = 0
        self._free_rows = deque(range(config.max_rows))  # first in, first out: row-indexed memories are all used
        self._by_row: dict[int, Req] = {}
        self._by_uid: dict[str, Req] = {}
        self._deadlines: list[tuple[float, str]] = []  # heap; entries of requests that have ended are ignored
        self._first_of_prompt: dict[tuple[int, bytes], Req] = {}  # prompts that are being prefilled, by salt and tokens
        self._reserve = self.RESERVE_MIN
        self._admissions = self._steps = 0
        self._prefilled: Sequence[Chunk] = ()  # by the plan before
        self._priced = PricedSteps(config.lagging)
        self._pace = Pace()
        self._held: set[Req] = set()  # guided requests that cannot go on yet
        self._catch_ups = CatchUps(config.lagging, config.lag)
        self._admits: dict[int, Admission] = {}  # uploads of the next plan, by row
        self._new_slots: dict[int, list[tuple[int, IntArray]]] = {}  # of plans to come: (first position, slots)
        self._spoilt: list[IntArray] = []  # slots, see `take_spoilt`
        self._news: list[Output] = []

    # -- requests in, requests out ------------------------------------------------------------------------------

    def submit(self, req: Req) -> None:
        """`req.max_total` must leave room for one step in the pool; the engine checks that before."""
        assert req.max_total + self._step_room() <= self.config.slots
        self._by_uid[req.uid] = req
        if req.grammar is not None:
            req.foresight = Foresight(req.grammar, self._workers)
        if req.deadline is not None:
            heapq.heappush(self._deadlines, (req.deadline, req.uid))
        self.waiting.join(req)

    def abort(self, uid: str, message: str = "aborted") -> None:
        """Ends a request wherever it is; a step still in flight for it is ignored when it comes back."""
        req = self._by_uid.get(uid)
        if req is not None:
            self._finish(req, [], {"type": "abort", "message": message})

    def take_spoilt(self) -> IntArray | None:
        """Slots whose KV nobody may read, not even where it has no weight; mostly None."""
        if not self._spoilt:
            return None
        out, self._spoilt = np.concatenate(self._spoilt), []
        return out

    def take_outputs(self) -> list[Output]:
        out, self._news = self._news, []
        return out

    @property
    def needs_results(self) -> bool:
        """Whether the next step is better planned when the results of all steps before it are known: all who run would
        have to wait for them. Beside others guided requests take part in every second step."""
        return bool(self.running) and all(req.guided for req in self.running)

    def rest(self) -> None:
        """Waits a moment for what keeps all requests from going on, if there is nothing else to wait for."""
        ones = [req.foresight.pending() for req in self.running if req.foresight is not None]
        await_any([one for one in ones if one is not None], REST)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def flush_cache(self) -> bool:
        """Empties the prefix cache; only when nothing runs."""
        if not self.idle:
            return False
        self.pool.free(self.radix.evict(self.radix.evictable))
        self._catch_ups.clear()
        return True

    # -- planning -----------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """The next step, or None when nothing can run before a result comes back."""
        self._expire()
        self._admit()
        self._reserve = max(self.RESERVE_MIN, self._reserve * self.RESERVE_DECAY)
        plan = None
        self._foresee()
        decoding = bool(self._ready())
        if not (self._prefilled and decoding):  # prefill chunks and decode steps alternate
            plan = self._plan_prefill(decoding)
        if plan is None:
            plan = self._plan_tree()
        self._prefilled = plan.chunks if plan is not None else ()
        return plan

    def _foresee(self) -> None:
        """Finds out which guided requests can go on."""
        self._held.clear()
        for req in [req for req in self.running if req.guided]:
            if req.inflight:  # what comes next depends on what comes now
                self._held.add(req)
            elif req.foresight is not None:
                try:
                    if not req.foresight.ready():
                        self._held.add(req)
                except RequestError as error:
                    self._finish(req, [], {"type": "abort", "message": str(error)})

    def _ready(self) -> list[Req]:
        return [req for req in self.running if req.state is ReqState.DECODE and req.may_grow and req not in self._held]

    def _admit(self) -> None:
        for req in self.waiting.first(LOOKED_AT):
            if not self._free_rows:
                return
            tokens = np.asarray(req.tokens, np.int64)
            prompt = (req.salt, tokens.tobytes())
            if self.radix.enabled and prompt in self._first_of_prompt:
                continue  # its KV is on its way: computed once for all who ask alike
            if not self._admit_one(req, tokens, prompt):
                return  # whoever needs less must not pass for ever whoever needs more

    def _admit_one(self, req: Req, tokens: IntArray, prompt: tuple[int, bytes]) -> bool:
        """Gives it a row, if there are slots enough."""
        match = self.radix.match(tokens, req.salt, self._may_reuse(req))
        self.radix.lock(match.node)
        cached = len(match.slots)
        need = len(tokens) - cached + self._step_room()
        growth = sum(max(other.max_total - other.covered, 0) for other in self.running)
        reserve = int(self._reserve * growth) + self._step_room() * len(self.running)
        if self.running and need + reserve > self.pool.available + self.radix.evictable:
            self.radix.unlock(match.node)
            return False
        self.waiting.admit(req)
        req.node = match.node
        req.row = self._free_rows.popleft()
        req.admission = self._admissions
        self._admissions += 1
        req.state = ReqState.PREFILL
        req.admitted = req.admitted or time.monotonic()
        req.covered = 0
        req.append_slots(match.slots)
        req.owned[:cached] = False
        req.kv = req.sent = req.bound = cached
        req.inflight, req.confidence = 0, self.config.initial_confidence
        if not req.retractions:
            req.cached_tokens = cached
        self._by_row[req.row] = req
        self.running.append(req)
        if cached < self._may_reuse(req):
            self._first_of_prompt[prompt] = req
        self._admits[req.row] = Admission(
            req.row, list(req.tokens), match.slots, req.request, req.seed, tuple(sorted(req.stop_ids)), req.salt,
            req.edited, req.bad_word_ids,
        )  # fmt: skip
        return True

    def _may_reuse(self, req: Req) -> int:
        """Most cached positions that a request can use: it must run the last one, and those whose outcome it wants."""
        most = len(req.tokens) - max(1, self.config.lookahead)
        wanted = req.next_prompt_logprob
        return most if wanted is None else min(most, max(wanted - 1, 0))

    def _plan_prefill(self, decoding: bool) -> Plan | None:
        """decoding: whether anybody waits for it who decodes."""
        chunks: list[Chunk] = []
        chosen: list[Req] = []
        todo = sorted(
            (req for req in self.running if req.state is ReqState.PREFILL and req not in self._held),
            key=lambda r: r.rank,
        )
        for req, length in divided(self.config.chunk_tokens, todo, self._pace, decoding):
            if req.state is not ReqState.PREFILL:  # retracted for a better-placed one
                continue
            final = req.sent + length == len(req.tokens)
            if not self._cover(req, req.sent + length + (self.config.tail if final else 0)):
                continue
            chunks.append(Chunk(req.row, req.sent, length, final))
            chosen.append(req)
            req.sent += length
            req.bound = req.sent
            if final:  # decodable before its first token is known here
                req.state = ReqState.DECODE
                req.inflight += 1
        if not chunks:
            return None
        order = sorted(range(len(chunks)), key=lambda i: not chunks[i].final)  # the first rows draw
        chosen, chunks = [chosen[i] for i in order], [chunks[i] for i in order]
        return self._make_plan("prefill", PLAIN, chosen, max(r.bound for r in chosen), chunks)

    def _plan_tree(self) -> Plan | None:
        ready = self._ready()
        if not ready:
            return None
        shape = self._choose(ready)
        span = self.spans[shape]
        ahead = self._ahead(ready, span)
        chosen = []
        for req in sorted(ready, key=lambda r: r.rank):
            # A worse-placed request may have been retracted for a better-placed one.
            need = req.bound + span
            if req.state is ReqState.DECODE and self._cover(req, min(need + ahead, max(need, req.max_total))):
                chosen.append(req)
        if not chosen:
            return None
        max_kv_len, most = max(req.bound for req in chosen), shape.max_commit
        self._catch_ups.plan(self._steps, shape, chosen)
        for req in chosen:
            req.bound += most
            req.inflight += 1
        self._priced.planned(self._steps, bool(self._prefilled))
        return self._make_plan("tree", shape, chosen, max_kv_len, [])

    def _choose(self, ready: Sequence[Req]) -> TreeShape:
        if not self.policy.sees_predictions and all(req.request.prediction for req in ready):
            return self.policy.menu[0]
        return self.policy.choose(self._load(ready, self._pace.longer(self._prefilled)))

    def _load(self, ready: Sequence[Req], longer: float = math.inf) -> Load:
        confidences = [req.confidence if req.may_draft and not req.slow else 0 for req in ready]
        whole = any(req.special or (self.config.draws_alike and req.draws_specially) for req in ready)
        return Load(confidences, _context(ready), longer, whole)

    def load(self) -> Load:
        """Of a step that ran now; for whoever explains."""
        ready = [req for req in self.running if req.state is ReqState.DECODE]
        return self._load(ready)

    def _make_plan(self, kind: Any, shape: TreeShape, reqs: list[Req], max_kv_len: int, chunks: list[Chunk]) -> Plan:
        admits = tuple(self._admits.values())
        plan = make_plan(
            self._steps, kind, shape, reqs, max_kv_len, chunks, admits, self._new_slots, self._catch_ups.take()
        )
        self._steps += 1
        self._admits, self._new_slots = {}, {}
        return plan

    def guidance(self, plan: Plan) -> Guidance | None:
        """For a plan just made: the host's part in it, if it has any."""
        if not len(plan.guided):
            return None
        reqs = [self._by_row[row] for row in plan.rows[plan.guided].tolist()]
        rows = [GuidedRow(req.tokens, req.grammar, req.processor, req.request.limits, req.foresight) for req in reqs]
        return Guidance(rows, plan.guided.tolist(), self.config.vocab)

    def _cover(self, req: Req, upto: int) -> bool:
        """Gives `req` slots for positions below `upto`, retracting worse-placed requests if it must; False when
        `req` itself was the worst-placed and has been retracted."""
        need = upto - req.covered
        if need <= 0:
            return True
        while need > self.pool.available + self.radix.evictable:
            victim = max(self.running, key=lambda r: r.rank)
            self._retract(victim)
            if victim is req:
                return False
        if need > self.pool.available:
            self.pool.free(self.radix.evict(need - self.pool.available))
        new = self.pool.alloc(need)
        self._new_slots.setdefault(req.row, []).append((req.covered, new))
        req.append_slots(new)
        return True

    def _ahead(self, ready: list[Req], span: int) -> int:
        """When one row needs slots all get some in advance, where the pool has plenty: a step with nothing to upload
        costs the host less, and rows that grow alike run short together."""
        if all(req.bound + span <= req.covered for req in ready):
            return 0
        plenty = self.pool.available + self.radix.evictable
        return self.config.ahead if 4 * len(ready) * (self.config.ahead + span) <= plenty else 0

    def _retract(self, req: Req) -> None:
        """Back to the queue with everything generated so far. Noise is keyed by position, so resuming is exact."""
        self._release(req)
        req.retractions += 1
        self.retractions += 1
        self._reserve = min(1.0, self._reserve + self.RESERVE_STEP)
        req.state = ReqState.WAITING
        self.waiting.rejoin(req)

    def _release(self, req: Req) -> None:
        """The only function that frees: the committed prefix goes to the radix tree, all else that is owned back to
        the allocator, the row to the free rows."""
        assert req.running and req.node is not None
        self._prompt_is_known(req)
        known = np.asarray(req.tokens[: req.kv + self.config.lookahead], np.int64)
        self.radix.insert(known, req.slots, req.owned, req.salt)
        self.radix.unlock(req.node)
        self.pool.free(req.slots[: req.covered][req.owned[: req.covered]])
        req.slots, req.owned, req.covered, req.node = np.empty(0, np.int64), np.empty(0, bool), 0, None
        self._catch_ups.release(req, self.radix.enabled)
        self._admits.pop(req.row, None)
        self._new_slots.pop(req.row, None)
        del self._by_row[req.row]
        self._free_rows.append(req.row)
        self.running.remove(req)
        req.row = req.admission = -1

    def _prompt_is_known(self, req: Req) -> None:
        """Nobody needs to wait for its prefill any more."""
        for prompt in [prompt for prompt, first in self._first_of_prompt.items() if first is req]:
            del self._first_of_prompt[prompt]

    # -- results ------------------------------------------------------------------------------------------------

    def commit(self, plan: Plan, result: StepResult, guidance: Guidance | None = None) -> None:
        """Takes a step's result, and what became of the host's part in it; the news are in `take_outputs`. Rows whose
        request is no longer the one that was planned are skipped."""
        live = [self._live(*place) for place in zip(plan.rows.tolist(), plan.admission.tolist(), strict=True)]
        self.stale_results += live.count(None)
        if plan.kind == "prefill":
            self._pace.record(plan.chunks, result.seconds)
        else:
            self._pace.record_step(result.seconds)
            self.policy.record(plan.shape, self._load_before(live), result, self._priced.take(plan))
        logprobs = dict(zip((i for i, _ in plan.logprobs), result.logprobs, strict=True))
        for part, values in zip(plan.prompt_parts, result.prompt_logprobs, strict=True):
            if (req := live[part.chunk]) is not None:
                req.prompt_logprobs += values
        traced = {i: at for at, i in enumerate(plan.traced.tolist())}
        rows = zip(live, result.count.tolist(), result.tokens.tolist(), result.confidence.tolist(), strict=True)
        for i, (req, count, tokens, confidence) in enumerate(rows):
            if req is None:
                continue
            new, failure = tokens[:count], None
            if count and new[-1] >= NOT_FINITE:
                self._fail(req)
                continue
            if guidance is not None:
                new, failure = guidance.until_failure(i, new)
                if failure is not None and not new:
                    self._finish(req, [], {"type": "abort", "message": failure})
                    continue
            if count:  # a chunk that is not the last says nothing of drafts yet
                req.confidence = confidence
            if plan.kind == "prefill":
                self._commit_chunk(req, plan.chunks[i], new, logprobs.get(i, []))
            else:
                self._catch_ups.commit(plan.step, plan.shape, req, count)
                self._commit_path(req, plan.shape, result, i, count)
                self._emit(req, new, logprobs.get(i, []), drafts=result.accepted_source[i, : count - 1].tolist())
            if i in traced:
                number = 0 if plan.kind == "prefill" else req.verify_steps
                self._trace(req, result, i, traced[i], len(plan.rows), number)
            if failure is not None and req.running:
                self._finish(req, [], {"type": "abort", "message": failure})

    def _fail(self, req: Req) -> None:
        """Ends a request whose logits are not finite. Neither its KV is kept nor what is cached and it may have read:
        some of it may be what spoils them."""
        log.error("request %.100r: the model's logits are not finite", req.request.name)
        self._spoilt.append(req.slots[: req.covered][req.owned[: req.covered]])
        req.kv = 0
        self._finish(req, [], {"type": "abort", "message": SPOILT, "status_code": 500})
        self._spoilt.append(self.radix.evict(self.radix.evictable))
        self.pool.free(self._spoilt[-1])

    def _trace(self, req: Req, result: StepResult, i: int, traced: int, requests: int, number: int) -> None:
        """Adds the step to the request's newest output, which is of this step."""
        output = self._news[-1]
        assert output.uid == req.uid
        output.trace.append(traced_step(result, i, traced, number, requests, output.token_ids))

    def _live(self, row: int, admission: int) -> Req | None:
        req = self._by_row.get(row)
        return req if req is not None and req.admission == admission else None

    def _load_before(self, live: Sequence[Req | None]) -> Load:
        """What `record` is told of a step's rows: nothing of those that say nothing of its shape."""
        sees = self.policy.sees_predictions
        confidences = [
            0 if req is None or req.limited or req.slow or (req.request.prediction and not sees) else req.confidence
            for req in live
        ]
        return Load(confidences, _context(req for req in live if req is not None))

    def _commit_chunk(self, req: Req, chunk: Chunk, tokens: list[int], logprobs: list[TokenLogprobs]) -> None:
        req.kv = chunk.start + chunk.length
        if not chunk.final:
            return
        req.inflight -= 1
        self._emit(req, tokens, logprobs)
        if req.running:
            self._share(req)

    def _share(self, req: Req) -> None:
        """Gives the prompt to the radix tree at once, so that others can use it.

        Where somebody else was first, the row moves over to the tree's slots (same content) and frees its own: with
        both pinned, a request could need twice its length. A step in flight still reads the old slots; whoever gets
        them is launched after it.
        """
        self._prompt_is_known(req)
        known = np.asarray(req.tokens[: req.kv + self.config.lookahead], np.int64)
        node = self.radix.insert(known, req.slots, req.owned, req.salt)
        assert req.node is not None
        self.radix.lock(node)
        self.radix.unlock(req.node)
        req.node = node
        held = self.radix.path_slots(node)
        twice = np.flatnonzero(req.owned[: len(held)])
        if len(twice):
            self.pool.free(req.slots[twice])
            req.slots[twice] = held[twice]
            req.owned[twice] = False
            start, end = int(twice[0]), int(twice[-1]) + 1
            self._new_slots.setdefault(req.row, []).append((start, held[start:end]))

    def _commit_path(self, req: Req, shape: TreeShape, result: StepResult, i: int, count: int) -> None:
        """count: tokens that row i of the result committed for it."""
        if shape.nodes > 1:
            window = slice(req.kv, req.kv + shape.nodes)
            req.slots[window] = req.slots[window][result.order[i]]  # as the device permuted its page table
            req.note_proposed(result.proposed_by[i].tolist())
        req.kv += count
        req.bound -= shape.max_commit - count
        req.inflight -= 1
        req.verify_steps += 1

    def _emit(
        self, req: Req, new: list[int], logprobs: list[TokenLogprobs], drafts: Sequence[int] | None = None
    ) -> None:
        """Appends tokens up to the first stop; what the device committed past it is dropped. drafts: the sources of the
        first tokens, which are accepted drafts; None for the token of a prefill."""
        reason = None
        kept: list[int] = []
        for token in new:
            req.tokens.append(token)
            kept.append(token)
            reason = ending(req, token)
            if reason is not None:
                break
        if reason is not None and reason["type"] == "abort":  # the newest token is not one that the request allows
            req.tokens.pop()
            kept.pop()
        if drafts is not None:
            req.note_accepted(drafts[: len(kept)])
        first = req.completion_tokens == len(kept)
        output = Output(
            req.uid, kept, logprobs=logprobs[: len(kept)], prompt_logprobs=req.prompt_logprobs if first else []
        )
        if reason is not None:
            self._finish(req, kept, reason, output)
        else:
            self._news.append(output)

    def _finish(self, req: Req, new: list[int], reason: dict[str, Any], output: Output | None = None) -> None:
        if req.running:
            req.kv = min(req.kv, len(req.tokens) - 1)  # the device may have committed past a stop
            self._release(req)
        else:
            self.waiting.leave(req)
        req.state = ReqState.DONE
        del self._by_uid[req.uid]
        output = Output(req.uid, new) if output is None else output
        self._news.append(replace(output, finish_reason=reason, meta=told(req, self.config.credited)))

    # -- small things -------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        now = time.monotonic() if self._deadlines else 0.0
        while self._deadlines and self._deadlines[0][0] < now:
            _, uid = heapq.heappop(self._deadlines)
            self.abort(uid, "the request exceeded its timeout")

    def _step_room(self) -> int:
        """Slots past the committed length that two steps in flight may need."""
        return self.config.max_span + max(shape.max_commit for shape in self.policy.menu)

    def check_idle(self) -> None:
        """With nothing running, every slot is free or cached and every row is free: cheap enough for every pause."""
        owned = self.pool.available + self.radix.size
        assert owned == self.config.slots, f"{owned} slots are accounted for, the pool has {self.config.slots}"
        assert self.radix.locked == 0, "a lock outlived its request"
        assert len(self._free_rows) == self.config.max_rows and not self._by_row, "a row was lost"

    def check_integrity(self) -> None:
        """Every slot has exactly one owner, every row one holder, every lock its request. For tests: it is slow."""
        owned = [req.slots[: req.covered][req.owned[: req.covered]] for req in self.running]
        slots = np.concatenate([self.pool.free_slots(), self.radix.slots(), *owned])
        assert len(slots) == self.config.slots, f"{len(slots)} slots are owned, the pool has {self.config.slots}"
        assert len(np.unique(slots)) == len(slots), "a slot has two owners"
        rows = Counter([*self._free_rows, *self._by_row])
        assert len(rows) == self.config.max_rows and max(rows.values()) == 1, "a row was lost or given twice"
        assert set(self._by_row.values()) == set(self.running)
        if not self.running:
            assert self.radix.locked == 0, "a lock outlived its request"


def _context(reqs: Iterable[Req]) -> int:
    """Tokens in their KV, as far as the host knows."""
    return sum(req.kv for req in reqs)
