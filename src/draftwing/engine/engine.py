"""The engine as its users see it: submit requests, turn the loop, take outputs.

Everything but `step` may be called from any thread; `step` belongs to one thread.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Iterable
from hashlib import blake2b

from draftwing.config import Options
from draftwing.core import GenRequest, Output, SamplingParams
from draftwing.engine.build import Parts, build
from draftwing.engine.loop import Loop
from draftwing.engine.report import Reporter
from draftwing.engine.slots import BAN_IDS
from draftwing.errors import RequestError
from draftwing.models.hub import resolve_model
from draftwing.models.stop import stop_ids
from draftwing.sched.request import Req
from draftwing.text.detok import StopStringScanner
from draftwing.text.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger("draftwing")


class Engine:
    def __init__(self, options: Options) -> None:
        """Loads everything; raises ConfigError or CheckpointError."""
        self.options = options.resolve()
        path = resolve_model(self.options.model, self.options.revision)
        tokenizer_path = path
        if self.options.tokenizer_path:
            tokenizer_path = resolve_model(self.options.tokenizer_path, self.options.revision)
        tokenizer = load_tokenizer(tokenizer_path, self.options.chat_template)
        parts = build(self.options, path)
        self._start(tokenizer, parts, stop_ids(path, parts.model.config, tokenizer.stop_ids))

    @classmethod
    def from_parts(cls, options: Options, tokenizer: Tokenizer, parts: Parts, stop: Iterable[int]) -> Engine:
        """An engine around a model that is already in memory; stop: token ids that end every answer."""
        engine = cls.__new__(cls)
        engine.options = options.resolve()
        engine._start(tokenizer, parts, stop)
        return engine

    def _start(self, tokenizer: Tokenizer, parts: Parts, stop: Iterable[int]) -> None:
        self.tokenizer = tokenizer
        self.model_name = self.options.served_model_name or self.options.model
        self.context_length = parts.context_length
        self.max_total_tokens = parts.pool_tokens
        self.stop_ids = frozenset(stop)
        self.parts = parts
        self.reporter = Reporter(parts.sched)
        lag = self.options.lag(parts.executor.device.device.type)
        self._loop = Loop(parts.sched, parts.executor, lag == 1, self.reporter.watch)
        self._vocab = parts.model.config.vocab_size
        self._inbox: queue.SimpleQueue[Req | str | None] = queue.SimpleQueue()
        self._turning = threading.Lock()  # held while a step runs
        self._seeds = random.Random(self.options.random_seed)

    def submit(self, request: GenRequest) -> None:
        """Queues a request. Raises RequestError if it can never run."""
        self._inbox.put(self._admissible(request))

    def abort(self, uid: str) -> None:
        """Ends a request; an unknown uid is ignored."""
        self._inbox.put(uid)

    def wake(self) -> None:
        """Makes a blocked `step` return."""
        self._inbox.put(None)

    def flush_cache(self) -> bool:
        """Forgets cached prefixes and n-grams; False when requests are running."""
        with self._turning:
            if not self._loop.idle or not self.parts.sched.flush_cache():
                return False
            if self.parts.executor.drafter is not None:
                self.parts.executor.drafter.flush()
            return True

    @property
    def accept_length(self) -> float:
        return self.reporter.accept_length

    def idle(self) -> bool:
        return self._loop.idle and self._inbox.empty()

    def step(self, block: bool = False) -> list[Output]:
        """One turn of the loop. block: with nothing to do, wait for a request first."""
        waited = self._inbox.get() if block and self._loop.idle else None
        with self._turning:
            self._receive(waited)
            if not self._loop.idle:
                self._loop.turn()
            if self._loop.idle:
                self.parts.sched.check_integrity()
            return self.parts.sched.take_outputs()

    def close(self) -> None:
        self.wake()

    def _receive(self, item: Req | str | None) -> None:
        while True:
            if isinstance(item, Req):
                self.parts.sched.submit(item)
            elif isinstance(item, str):
                self.parts.sched.abort(item)
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return

    def _admissible(self, request: GenRequest) -> Req:
        prompt, params = request.prompt_ids, request.params
        if not prompt:
            raise RequestError("the prompt is empty: at least one token is needed", "prompt")
        self._check_ids(prompt, "input_ids")
        self._check_ids(params.stop_token_ids, "stop_token_ids")
        room = self.context_length - len(prompt)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; with at least one new token the context of "
                f"{self.context_length} is exceeded",
                "prompt",
            )
        wanted = room if params.max_new_tokens is None else params.max_new_tokens
        if wanted > room:
            raise RequestError(
                f"{len(prompt)} prompt tokens and {wanted} new ones exceed the context of {self.context_length}: "
                f"at most {room} new tokens fit",
                "max_new_tokens",
            )
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.stop_ids)
        if params.min_new_tokens and len(stop_ids) > BAN_IDS:
            raise RequestError(f"min_new_tokens allows at most {BAN_IDS} stop ids, found {len(stop_ids)}", "stop")
        timeout = self.options.request_timeout
        return Req(
            uid=request.uid,
            tokens=list(prompt),
            params=params,
            seed=params.sampling_seed if params.sampling_seed is not None else self._seeds.getrandbits(62),
            max_total=len(prompt) + wanted,
            stop_ids=stop_ids,
            priority=request.priority,
            salt=salt_of(request.cache_salt),
            scanner=self._scanner(params),
            deadline=time.monotonic() + timeout if timeout else None,
        )

    def _check_ids(self, ids: Iterable[int], param: str) -> None:
        bad = next((token for token in ids if not 0 <= token < self._vocab), None)
        if bad is not None:
            raise RequestError(f"token id {bad} in {param} is outside of the vocabulary [0, {self._vocab})", param)

    def _scanner(self, params: SamplingParams) -> StopStringScanner | None:
        if not params.stop:
            return None
        return StopStringScanner(self.tokenizer, params.stop, params.skip_special_tokens)


def salt_of(cache_salt: str | None) -> int:
    """63-bit hash of a cache salt; 0 means none."""
    if cache_salt is None:
        return 0
    return (int.from_bytes(blake2b(cache_salt.encode(), digest_size=8).digest(), "big") >> 1) or 1
