"""Regular expressions that end an answer, searched while its text grows.

The answer ends with the token whose text first makes an expression match somewhere in the text so far; the end of the
text so far counts as an end (`$`, `\\b`, a negative lookahead). So what is found depends on the tokens alone, not on
how many of them arrive at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import regex

MAX_PATTERN: Final = 1000  # characters
SEARCH_SECONDS: Final = 0.1  # of processor time, for one search


class Match(NamedTuple):
    """start, end: characters of the whole text."""

    start: int
    end: int
    text: str


def compile_stop(pattern: str) -> Any:
    """The compiled pattern. Raises ValueError, saying what is wrong, for one that cannot be used."""
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"has {len(pattern)} characters, at most {MAX_PATTERN} are allowed")
    try:
        compiled = regex.compile(pattern)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except Exception as error:  # beside regex.error, malformed flags and sets raise what they happen to meet
        raise ValueError(f"is not a regular expression: {str(error)[:200]}") from None
    if compiled.flags & regex.REVERSE:
        raise ValueError("must not search backwards: the text is read as it grows")
    try:
        empty = compiled.search("", timeout=SEARCH_SECONDS)
    except TimeoutError:
        raise ValueError("takes too long to search") from None
    if empty is not None:
        raise ValueError("must not match the empty text: every answer would end at once")
    return compiled


class RegexScanner:
    """Searches a growing text.

    After a search no match can begin before `_start[i]`: the library tells where the earliest match may still be
    under way. So the work of a token does not grow with the text, unless an expression is never done with its
    beginning, and then `SEARCH_SECONDS` bounds it.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self.failed: str | None = None  # why no more is searched
        self._patterns = [compile_stop(pattern) for pattern in patterns]
        self._start = [0] * len(patterns)
        self._text = ""

    @property
    def hold(self) -> int:
        """How many last characters may belong to a match that is still to come."""
        return len(self._text) - min(self._start)

    def push(self, new: str) -> Match | None:
        """Takes the next text; the match that ends first, of several the one that begins first."""
        if not self.failed:
            self._text += new
            return self._search()
        return None

    def _search(self) -> Match | None:
        best: Match | None = None
        for i, pattern in enumerate(self._patterns):
            try:
                found = pattern.search(self._text, self._start[i], partial=True, timeout=SEARCH_SECONDS)
            except TimeoutError:
                self.failed = f"stop_regex {pattern.pattern!r} takes too long to search"
                return None
            if found is None:
                self._start[i] = len(self._text)
            elif found.partial:
                self._start[i] = found.start()
            elif best is None or (found.end(), found.start()) < (best.end, best.start):
                best = Match(found.start(), found.end(), found.group())
        return best
