"""When an engine's process is taken for hung, when a dead one is replaced, and whose request may have killed it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b

from draftwing.errors import RequestError
from draftwing.requests.grammar_field import Grammar
from draftwing.requests.request import GenerationRequest

logger = logging.getLogger(__name__)
DEATHS = 5  # of engines within WINDOW seconds; one more, and the server ends
WINDOW = 600.0
LONGEST_BACK_OFF = 30.0  # seconds; the first restart is at once, the next after one second, each after twice as long
ALONE = 2  # deaths after which a request that was alone in the engine is refused
SUSPECTS = 1024  # requests that are remembered
SILENCE = 20.0  # seconds without any message, though one was due; a thread of its own answers while a step runs


class Watchdog:
    """Says when an engine hangs. It counts looks, not the clock: where the whole machine stood still, nobody hung."""

    def __init__(self, timeout: float) -> None:
        """timeout: seconds that a step may take."""
        self.timeout, self.silence = timeout, min(SILENCE, timeout)
        self.every = min(1.0, self.silence / 4)  # seconds between looks
        self._silent = self._stuck = 0
        self._progress: int | None = None

    def look(self, heard: bool, progress: int | None) -> str | None:
        """Why the engine is taken for hung, or None. heard: whether a message came since the last look.
        progress: the newest of `Engine.stats`."""
        self._silent = 0 if heard else self._silent + 1
        self._stuck = self._stuck + 1 if progress is not None and progress == self._progress else 0
        self._progress = progress
        if self._silent * self.every >= self.silence:
            return f"nothing was heard of it for {self.silence:g} s"
        if self._stuck * self.every >= self.timeout:
            return f"a step took more than {self.timeout:g} s"
        return None


class CrashHistory:
    """Deaths of engines, the latest of them, and the requests and grammars that were alone in one."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()
        self._alone: dict[bytes, int] = {}  # deaths by fingerprint, the oldest suspect first

    def back_off(self, now: float) -> float | None:
        """Counts a death. Returns seconds to wait before the next engine starts, None if there were too many."""
        while self._times and self._times[0] < now - WINDOW:
            self._times.popleft()
        self._times.append(now)
        count = len(self._times)
        if count > DEATHS:
            return None
        return 0.0 if count == 1 else min(2.0 ** (count - 2), LONGEST_BACK_OFF)

    def suspect(self, requests: Sequence[GenerationRequest]) -> None:
        """Remembers requests that came together and were alone in the engine when it died."""
        if self._count(fingerprint(requests)) == ALONE:
            grammar = requests[0].params.grammar
            logger.error(
                "request %.100r was alone in the engine when it stopped, twice: it is refused from now on "
                "(%d prompts, tokens of the first: %d, grammar: %s)",
                requests[0].name, len(requests), len(requests[0].prompt_ids), grammar and grammar.kind,
            )  # fmt: skip

    def suspect_grammar(self, grammar: Grammar) -> None:
        """Remembers a grammar that was the only one being compiled when the engine died."""
        if self._count(_grammar_print(grammar)) == ALONE:
            logger.error(
                "a grammar (%s, %d characters) was compiled alone when the engine stopped, twice: it is refused "
                "from now on", grammar.kind, len(grammar.text),
            )  # fmt: skip

    def _count(self, print_: bytes) -> int:
        count = self._alone.pop(print_, 0) + 1
        self._alone[print_] = count
        if len(self._alone) > SUSPECTS:
            del self._alone[next(iter(self._alone))]
        return count

    def check(self, requests: Sequence[GenerationRequest]) -> None:
        """Raises RequestError for requests that were alone in too many deaths."""
        if ALONE in self._alone.values() and self._alone.get(fingerprint(requests), 0) >= ALONE:
            logger.error(
                "refused a request that was alone in the engine when it stopped, twice: %.100r", requests[0].name
            )
            raise RequestError(f"the engine stopped {ALONE} times while it ran this request alone; it is refused")

    def check_grammar(self, grammar: Grammar, param: str | None) -> None:
        """Raises RequestError for a grammar that was alone in too many deaths. param: the field that it came in."""
        if ALONE in self._alone.values() and self._alone.get(_grammar_print(grammar), 0) >= ALONE:
            logger.error("refused a grammar that was compiled alone when the engine stopped, twice: %s", grammar.kind)
            raise RequestError(
                f"the engine stopped {ALONE} times while it compiled this grammar alone; it is refused", param
            )


def fingerprint(requests: Sequence[GenerationRequest]) -> bytes:
    """The same for requests that ask for the same: by what they ask, not by their ids and seeds."""
    digest = blake2b(digest_size=16)
    for one in requests:
        asked = one._replace(uid="", name="", terms=None, arrived=None, params=one.params.replace(sampling_seed=None))
        digest.update(repr(asked).encode())
    return digest.digest()


def _grammar_print(grammar: Grammar) -> bytes:
    return blake2b(repr(grammar).encode(), digest_size=16).digest()
