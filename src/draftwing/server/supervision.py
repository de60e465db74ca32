"""Decides when an engine process counts as hung, when a dead one is replaced, and whose request may have killed it."""

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
WINDOW = 600.0  # seconds
LONGEST_BACK_OFF = 30.0  # seconds; the first restart is at once, the next after one second, each after twice as long
MAX_CRASHES = 2  # deaths after which a request that was alone in the engine is refused
SUSPECTS = 1024  # requests that are remembered
SILENCE = 20.0  # seconds without any message, though one was due; a thread of its own answers while a step runs

Suspect = Grammar | Sequence[GenerationRequest]  # a grammar that was compiled, or requests that came together


class Watchdog:
    """Says when an engine hangs. It counts looks, not the clock: where the whole machine stood still, nobody hung."""

    def __init__(self, timeout: float) -> None:
        """timeout: seconds that a step may take."""
        self.timeout, self.silence = timeout, min(SILENCE, timeout)
        self.every = min(1.0, self.silence / 4)  # seconds between looks
        self._silent = self._stuck = 0
        self._progress: int | None = None

    def look(self, heard: bool, progress: int | None) -> str | None:
        """Returns why the engine counts as hung, or None. heard: whether a message came since the last look.
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

    def suspect(self, what: Suspect) -> None:
        """Remembers what was alone in the engine when it died."""
        key = _fingerprint(what)
        self._alone[key] = count = self._alone.pop(key, 0) + 1
        if len(self._alone) > SUSPECTS:
            del self._alone[next(iter(self._alone))]
        if count == MAX_CRASHES:
            name, about = _described(what)
            logger.error(
                "%s was alone in the engine when it stopped, twice: it is refused from now on (%s)", name, about
            )

    def check(self, what: Suspect, param: str | None = None) -> None:
        """Raises RequestError for what was alone in too many deaths. param: the field that it came in."""
        if MAX_CRASHES in self._alone.values() and self._alone.get(_fingerprint(what), 0) >= MAX_CRASHES:
            logger.error("refused %s, which was alone in the engine when it stopped, twice", _described(what)[0])
            doing = "compiled this grammar" if isinstance(what, Grammar) else "ran this request"
            raise RequestError(f"the engine stopped {MAX_CRASHES} times while it {doing} alone; it is refused", param)


def _described(what: Suspect) -> tuple[str, str]:
    """Returns what the log calls it, and more about it."""
    if isinstance(what, Grammar):
        return "a grammar", f"{what.kind}, {len(what.text)} characters"
    first, grammar = what[0], what[0].params.grammar
    about = f"{len(what)} prompts, tokens of the first: {len(first.prompt_ids)}, grammar: {grammar and grammar.kind}"
    return f"request {first.name[:100]!r}", about


def _fingerprint(what: Suspect) -> bytes:
    """Returns a hash of what is asked: requests that differ in ids and seeds alone have the same."""
    digest = blake2b(digest_size=16)
    for one in [what] if isinstance(what, Grammar) else what:
        if isinstance(one, GenerationRequest):
            params = one.params.replace(sampling_seed=None)
            one = one._replace(uid="", name="", terms=None, arrived=None, params=params)
        digest.update(repr(one).encode())
    return digest.digest()
