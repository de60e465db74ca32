"""What is left of requests that have ended: in a memory of lookups, as cached prefixes, and to be replayed. All of it
is forgotten with the client."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from draftwing.engine.answer_checks import AnswerChecks
from draftwing.engine.build import Parts
from draftwing.engine.executor import Executor
from draftwing.engine.lookup_memory import LookupMemory
from draftwing.engine.namespaces import CacheNamespaces
from draftwing.engine.saved_prefixes import SavedPrefixes
from draftwing.errors import GenerationError
from draftwing.sched.req import Req
from draftwing.spec.drafter import PastText

log = logging.getLogger("draftwing")


class ClientData:
    """The scheduler tells it who ends. Belongs to the engine's thread, but for `forget`, which any may call."""

    def __init__(
        self, parts: Parts, checks: AnswerChecks, memory: LookupMemory | None, saved: SavedPrefixes | None
    ) -> None:
        """memory, saved: None where nothing is kept there. What they have of earlier engines is taken."""
        self.namespaces = CacheNamespaces()
        self._checks, self._memory, self._saved = checks, memory, saved
        self._forgetting = threading.Lock()  # held while it is decided whether something is kept
        sched = parts.sched
        sched.answered = self._answered
        if saved is not None:
            sched.cached = partial(self._unless_forgotten, saved.cached)
            sched.retracted = partial(self._unless_forgotten, saved.retracted)
            sched.brings_back, sched.kv.spoilt = saved.bring_back, saved.spoilt
        if memory is not None:
            self._remember(parts, memory)

    def _remember(self, parts: Parts, memory: LookupMemory) -> None:
        """Has the drafter learn the answers of a memory, which gets those to come."""
        texts = [
            PastText(self.namespaces.named(past.client, past.salt), past.tokens, past.first)
            for past in memory.answers()
            if past.tokens.max() < parts.executor.model.config.vocab_size
        ]
        parts.executor.run_on_all_ranks(Executor.remember, texts)
        log.info("--speculative-memory: %d answers of before are remembered", len(texts))
        policy = parts.sched.choice.policy
        policy.recall(memory.before)
        memory.learnt = policy.learnt
        memory.start()

    def _answered(self, req: Req, reason: dict[str, Any]) -> None:
        if not req.adapter:  # what is kept and replayed is the model's own
            self._unless_forgotten(self._keep, req, reason)

    def _unless_forgotten(self, keep: Callable[..., None], req: Req, *more: Any) -> None:
        """Has something of a request kept, unless its client was forgotten meanwhile."""
        with self._forgetting:
            if req.salt == self.namespaces.of(req.request):
                keep(req, *more)

    def _keep(self, req: Req, reason: dict[str, Any]) -> None:
        """Keeps what a request was answered; for lookups unless it opts out, or shares its memory with nobody."""
        request = req.request
        if self._memory is not None and request.learnable and req.draft_salt == req.salt:
            self._memory.add(request.client, request.cache_salt, req.tokens, req.prompt_len)
        self._checks.answered(req, reason)

    def forget(self, client: str) -> int:
        """Forgets what a client's requests left, those that run included. Returns how many answers the memory had of
        it. Raises GenerationError where the disk fails."""
        with self._forgetting:
            self.namespaces.forget(client)
            self._checks.forget(client)
        with _removing("for lookups"):
            try:
                return 0 if self._memory is None else self._memory.delete(client)
            finally:
                if self._saved is not None:
                    self._saved.forget(client)

    def clear(self) -> None:
        """Forgets what is kept of all clients. Raises GenerationError where the disk fails."""
        with _removing("on the disk"):
            for kept in (self._memory, self._saved):
                if kept is not None:
                    kept.clear()


@contextmanager
def _removing(what: str) -> Iterator[None]:
    """Raises GenerationError in place of OSError. what: is removed of what is kept."""
    try:
        yield
    except OSError as error:
        raise GenerationError(f"what is kept {what} could not be removed: {error}") from error
