"""Answers that are replayed while the engine has nothing else to do: one of so many that were given, without drafts and
alone, from its own prompt on. One that differs is a fault of ours, whatever made it: drafts, a batch, a cached prefix.

Requests never wait for it but for the step that runs when they come: `Engine` begins a replay after `IDLE_SECONDS`
without a request, and ends it with the first one. A replay that was ended is begun anew at the next rest."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftwing.core import Output
from draftwing.engine.admission import EngineInfo
from draftwing.engine.provenance import Digests
from draftwing.engine.receipts import COMPLETE, first_difference, make_receipt
from draftwing.errors import GenerationError, RequestError
from draftwing.requests.grammar_field import Grammar
from draftwing.requests.request import GenerationRequest, SpecLimits
from draftwing.sched.req import Req

log = logging.getLogger("draftwing")
PENDING = 16  # answers that wait for a replay; of more the oldest are left out
CLIENT = "/replay"  # who asks for replays
LOG_SECONDS = 600.0  # after a line in the log in which there is no other of its kind: each has the whole prompt


@dataclass(eq=False)
class Served:
    """An answer that was given, as `receipts.Complete`. forgotten: whether its client was forgotten since."""

    request: GenerationRequest
    token_ids: list[int]
    finish_reason: dict[str, Any]
    forgotten: bool = False


class AnswerChecks:
    """Chooses answers, makes requests of them and compares. Belongs to the engine's thread, but for `forget`.

    checked, different: answers that were compared, and those of them that were not the same. One whose replay was
    aborted is neither."""

    def __init__(self, every: int, info: Callable[[], EngineInfo]) -> None:
        """every: of how many answers one is checked; 0: none is.  info: of the engine."""
        self.checked = self.different = 0
        self._every, self._info = every, info
        self._seen = 0
        # Held while an answer goes from one of the next three to another, so that `forget` sees it, and while one is
        # logged.
        self._lock = threading.Lock()
        self._pending: deque[Served] = deque(maxlen=PENDING)
        self._now: tuple[str, Served] | None = None  # uid of the replay that runs, and what it is compared with
        self._ended: list[Served] = []  # that were replayed, until they are found the same or logged
        self._tokens: list[int] = []  # of that replay
        self._stopped: set[str] = set()  # uids of replays that were ended, whose last output is still to come
        self._logged: dict[bool, float] = {}  # when there was a line, monotonic, by whether a replay was aborted
        self._digests = Digests()

    @property
    def pending(self) -> bool:
        """Returns whether there is an answer to be replayed."""
        return bool(self._pending)

    @property
    def running(self) -> str | None:
        """Returns the uid of the replay that runs."""
        return None if self._now is None else self._now[0]

    def answered(self, req: Req, reason: dict[str, Any]) -> None:
        """Takes note of a request that has its whole answer. Those that may not be kept are left out: a difference is
        logged with all of its tokens."""
        if not self._every or not req.request.learnable:
            return
        self._seen += 1
        if self._seen % self._every == 0:
            params = req.params.replace(sampling_seed=req.seed)
            request = req.request._replace(params=params)
            with self._lock:
                self._pending.append(Served(request, req.tokens[req.prompt_len :], reason))

    def begin(self, knows: Callable[[Grammar], bool], admissible: Callable[[GenerationRequest], Req]) -> Req | None:
        """Returns a request for the oldest answer that waits, which is to run alone; None where none does. knows: says
        of a grammar whether it is compiled; else its answer is left out, for nobody can end a compilation.
        admissible: raises RequestError, such as for a grammar that is no longer compiled."""
        while (request := self._next(knows)) is not None:
            try:
                req = admissible(request)
            except RequestError as error:
                log.warning("an answer is not replayed: %s", error)
                with self._lock:
                    self._now = None
                continue
            req.private, req.deadline = True, None
            return req
        return None

    def _next(self, knows: Callable[[Grammar], bool]) -> GenerationRequest | None:
        served, uid = None, os.urandom(16).hex()
        with self._lock:
            while self._pending and served is None:
                served = self._pending.popleft()
                grammar = served.request.params.grammar
                served = served if grammar is None or knows(grammar) else None
            if served is None:
                return None
            self._now, self._tokens = (uid, served), []
        drafts = SpecLimits(0, 1, 1) if self._info().speculates else None
        return served.request._replace(
            uid=uid, cache_salt=uid, client=CLIENT, name="", priority=0, logprobs=None, limits=drafts, prediction=(),
            traced=False, learn=False, receipt=False, arrived=None,
        )  # fmt: skip

    def stop(self) -> str | None:
        """Returns the uid of the replay that runs, which is to be ended: it is begun anew later."""
        with self._lock:
            if self._now is None:
                return None
            (uid, served), self._now = self._now, None
            self._stopped.add(uid)
            if len(self._pending) < PENDING and not served.forgotten:
                self._pending.appendleft(served)
        return uid

    def forget(self, client: str) -> None:
        """Forgets the answers of a client that wait, and has none of it logged from now on. From any thread."""
        with self._lock:
            self._pending = deque((one for one in self._pending if one.request.client != client), PENDING)
            for one in (*self._ended, *(() if self._now is None else self._now[1:])):
                one.forgotten = one.forgotten or one.request.client == client

    def stats(self) -> dict[str, int]:
        """Returns what is counted, where answers are checked."""
        return {"checked_answers": self.checked, "different_answers": self.different} if self._every else {}

    def take(self, outputs: Sequence[Output]) -> list[Output]:
        """Returns the outputs that are of no replay, and compares an answer whose replay ends with these."""
        others = []
        for output in outputs:
            if self._now is None or output.uid != self._now[0]:
                if output.uid in self._stopped:
                    self._stopped.remove(output.uid)
                else:
                    others.append(output)
                continue
            self._tokens += output.token_ids
            if output.finish_reason is not None:
                with self._lock:
                    served, self._now = self._now[1], None
                    self._ended.append(served)
                self._compare(served, replace(served, token_ids=self._tokens, finish_reason=output.finish_reason))
        return others

    def _compare(self, served: Served, replayed: Served) -> None:
        index, reason = first_difference(served.token_ids, replayed.token_ids), replayed.finish_reason
        aborted = reason["type"] not in COMPLETE
        same = not aborted and index is None and served.finish_reason["type"] == reason["type"]
        with self._lock:
            counts = not (served.forgotten or aborted)
            logs = not (served.forgotten or same) and self._may_log(aborted)
            if not logs:
                self._ended.remove(served)
        self.checked += counts
        self.different += counts and not same
        if aborted:
            what = f"an answer could not be replayed without drafts: {reason.get('message', reason['type'])}"
        else:
            where = "in why it ended" if index is None else f"at token {index}"
            what = f"an answer differs from its replay without drafts, {where}"
        if logs:
            # Digests of a model may take a minute, for which nobody waits.
            args = (what, served, None if aborted else replayed)
            thread = threading.Thread(target=self._log, args=args, name="draftwing-difference", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # of too many threads, which is no reason for the engine to end
                log.error("%s; its receipt cannot be made: %s", what, error)
                with self._lock:
                    self._ended.remove(served)

    def _may_log(self, aborted: bool) -> bool:
        """Returns whether there was no such line for long enough, and counts one."""
        now, before = time.monotonic(), self._logged.get(aborted)
        if before is not None and now - before < LOG_SECONDS:
            return False
        self._logged[aborted] = now
        return True

    def _log(self, what: str, served: Served, replayed: Served | None) -> None:
        """Logs an answer, with its replay where there is a whole one."""
        info = self._info()

        def shown(one: Served) -> str:
            try:
                return json.dumps(make_receipt(info, self._digests.begin(info.provenance).result(), one))
            except GenerationError as error:
                return str(error)

        line = f"{what}; as it was given: {shown(served)}"
        if replayed is not None:
            line += f" as it was replayed: {shown(replayed)}"
        with self._lock:  # in which it is logged, too: what is forgotten is in no later line
            self._ended.remove(served)
            if served.forgotten:
                self._logged.pop(replayed is None, None)
            else:
                log.error("%s (for %d minutes no other is logged)", line, LOG_SECONDS // 60)
