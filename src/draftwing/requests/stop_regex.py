"""Regular expressions that end an answer, searched while its text grows.

The answer ends with the token whose text first makes an expression match somewhere in the text so far; the end of the
text so far counts as an end (`$`, `\\b`, a negative lookahead). So what is found depends on the tokens alone, not on
how many of them arrive at once.

The library tells where a match is under way at the end of a text, but takes that end for one: `a\\B` is not under way
after `a`, for there `\\B` is false, and is a match once `b` follows. So where an expression has parts that look at what
follows, another one says what is under way (`under_way`).
"""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import regex

from draftwing.requests.refusals import show

PARTS = re.compile(
    r"""\\(?:[pPN]\{[^}]*\}|.)             # an escape
    | \[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]  # a set
    | (?P<repeat>\{(?:(?P<least>\d+)(?:,\d*)?|,\d*)\})
    | (?P<flags>\(\?[a-zA-Z0-9-]+\))    # a repeat that follows is of the part before them
    | (?P<open>\((?:\?(?:<?[=!]|>))?)
    | .""",
    re.DOTALL | re.VERBOSE,
)
_LOOKS_AHEAD = {"$", r"\b", r"\B", r"\m", r"\M", r"\Z", r"\z"}
_OPENS = {"(?=": "lookahead", "(?!": "lookahead", "(?<=": "lookbehind", "(?<!": "lookbehind", "(?>": "atomic"}
# Under way at the end, and never true; `$` is also before a newline that is the last character.
_PEEK = r"\n?(?s:.)(?!)"
_FUZZY = re.compile(r"\{(?:\d+<=?)?\d*[eids](?:[<=+,:\deids ][^}]*)?\}")
# What makes where a search begins count, or what the parts of an expression mean.
_REFUSED = (
    (r"\G", "where the last search ended"), (r"\K", "a match that begins anew"), ("(*", "verbs"),
    ("(?R", "a call of itself"), ("(?0", "a call of itself"), ("(?(?", "a condition that looks around"),
)  # fmt: skip


def refused(pattern: str) -> str | None:
    """Returns what it has that cannot be searched while the text grows, if anything."""
    parts = [(part.start(), part[0]) for part in PARTS.finditer(pattern)]
    for at, part in parts:
        for what, name in _REFUSED:
            if part == what or (part.startswith("(") and pattern.startswith(what, at)):
                return f"{name} ({what})"
        if part == "{" and _FUZZY.match(pattern, at):
            return "a count of errors ({e})"
        flag = re.match(r"\(\?[a-zA-Z0]*?(V1|[fw])[a-zA-Z0-9]*[-:)]", pattern[at:]) if part.startswith("(") else None
        if flag is not None:
            return f"the flag {flag[1]}"
    return None


def under_way(pattern: str) -> str | None:
    """Returns an expression that never matches, and is under way wherever `pattern` is, or may come to match by what
    follows; None where the library's own answer for `pattern` will do.

    What looks one character ahead is under way at the end, and elsewhere is what it was, so that a search takes little
    longer than for `pattern`. What takes little takes much (the library is wrong about `.+?(?<=a)c`), and a lookbehind
    that looks ahead is always true. A lookahead with one of these in it is always true, too, and what goes back on
    nothing does go back. So more may be under way, never less."""
    parts = list(PARTS.finditer(pattern))
    kinds = _kinds(parts)
    looking = _around(parts, [kind in ("ahead", "lookahead") for kind in kinds])
    around = any((parts[at]["open"] or "").endswith(("=", "!")) for at in looking)
    if not around and not any(kind in ("ahead", "lazy") for kind in kinds):
        return None
    marked = [kind == "lazy" or (kind == "lookbehind" and at in looking) for at, kind in enumerate(kinds)]
    loose = _around(parts, marked)
    return f"(?:{''.join(_relaxed(parts, kinds, looking, loose))}){_PEEK}"


def _kinds(parts: Sequence[re.Match[str]]) -> list[str]:
    """Returns what each part is, "" where it needs no care."""
    kinds = list[str]()
    for part in parts:
        text, before = part[0], kinds[-1] if kinds else ""
        if text in _LOOKS_AHEAD:
            kinds.append("ahead")
        elif part["open"] is not None:
            kinds.append(_OPENS.get(text, "open"))
        elif text == ")":
            kinds.append("close")
        elif before == "repeat" and text in {"+", "?"}:
            kinds.append("lazy" if text == "?" else "possessive")
        elif part["repeat"] is not None or (text in {"*", "+", "?"} and before != "open"):
            kinds.append("repeat")
        else:
            kinds.append("")
    return kinds


def _around(parts: Sequence[re.Match[str]], marked: Sequence[bool]) -> set[int]:
    """Returns the groups, by the part that opens them, in which a part is marked."""
    found, groups = set[int](), list[int]()
    for at, part in enumerate(parts):
        if marked[at]:
            found.update(groups)
        if part["open"] is not None:
            groups.append(at)
        elif part[0] == ")" and groups:
            groups.pop()
    return found


def _relaxed(parts: Sequence[re.Match[str]], kinds: Sequence[str], looking: set[int], loose: set[int]) -> Iterator[str]:
    groups: list[tuple[str, bool, bool]] = []  # how each is closed, whether it is read backwards, and whether loose
    last = False  # whether the part before is loose
    for at, (part, kind) in enumerate(zip(parts, kinds, strict=True)):
        text, free = part[0], at in loose
        back = bool(groups) and groups[-1][1]
        if kind == "ahead":
            yield "(?:)" if back else f"(?:{_PEEK}|{text})"
        elif kind == "lookahead" and (back or free):
            groups.append(("(?!))|)", False, True))
            yield "(?:(?="  # tries all, and fails
        elif kind == "lookbehind" and at in looking:
            groups.append((")|)", True, True))
            yield f"(?:{_PEEK}|(?<="
        elif part["open"] is not None:
            groups.append((")", back or kind == "lookbehind", free))
            yield "(?:" if kind == "atomic" and free else text
        elif kind == "close" and groups:
            close, _, last = groups.pop()
            yield close
        elif kind != "lazy" and not (kind == "possessive" and last):
            yield text
        if kind in ("", "ahead"):
            last = False


MAX_PATTERN: Final = 1000  # characters
MAX_UNROLLED: Final = 10_000  # parts of a pattern; the library writes out what must be repeated, about 1 KB for each
MAX_TOGETHER: Final = 20_000  # parts of all patterns of a request
SEARCH_SECONDS: Final = 0.1  # of processor time, for one search, and for all of a request beyond `TOKEN_SECONDS`
TOKEN_SECONDS: Final = 0.002  # of it, for all searches after one token: the other answers wait for them
MAX_SHARES: Final = 16  # answers that divide this among them; further ones get as much as the last of these

_VERBOSE = re.compile(r"\(\?(?:#|[a-zA-Z0-9-]*x)")


class Match(NamedTuple):
    """start, end: characters of the whole text.  pattern: the expression."""

    start: int
    end: int
    text: str
    pattern: str


def compile_stop(pattern: str) -> Any:
    """Returns the compiled pattern. Raises ValueError, saying what is wrong, for one that cannot be used."""
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"has {len(pattern)} characters, at most {MAX_PATTERN} are allowed")
    if _VERBOSE.search(pattern):
        raise ValueError("must have neither comments nor the flag x")
    size = parts(pattern)
    if size > MAX_UNROLLED:
        raise ValueError(f"repeats up to {size} parts, at most {MAX_UNROLLED} are allowed")
    compiled = _compiled(pattern)
    if compiled.flags & regex.REVERSE:
        raise ValueError("must not search backwards: the text is read as it grows")
    if (what := refused(pattern)) is not None:
        raise ValueError(f"must not have {what}: the text is read as it grows")
    try:
        empty = compiled.search("", timeout=SEARCH_SECONDS)
    except TimeoutError:
        raise ValueError("takes too long to search") from None
    if empty is not None:
        raise ValueError("must not match the empty text: every answer would end at once")
    return compiled


def _compiled(pattern: str) -> Any:
    try:
        return regex.compile(pattern, cache_pattern=False)  # else hundreds would be kept, of 10 MB each
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except Exception as error:  # besides regex.error, malformed flags and sets raise what they happen to meet
        raise ValueError(f"is not a regular expression: {str(error)[:200]}") from None


class Stops:
    """Compiled expressions of a request, and those that say what is under way (`under_way`)."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = list[Any]()
        self.under_way = list[Any]()
        for pattern in patterns:
            try:
                self.patterns.append(compile_stop(pattern))
                other = under_way(pattern)
                self.under_way.append(None if other is None else _compiled(other))
            except ValueError as error:
                raise ValueError(f"{show(pattern)} {error}") from None


class Allowance:
    """Processor time for the searches of all answers that were asked for together: they have it together, so that many
    answers hold up others no longer than one."""

    def __init__(self) -> None:
        self.left = SEARCH_SECONDS  # less than nothing: no more is searched
        self.answers = 0

    def token(self) -> None:
        """Counts one more token of one of the answers."""
        self.left = min(self.left + TOKEN_SECONDS / min(self.answers, MAX_SHARES), SEARCH_SECONDS)


class Patterns(tuple[str, ...]):
    """Expressions that were found fit. In the process that did so they keep what was compiled, so a request for many
    answers need not compile thousands of parts, which takes milliseconds, for each."""

    stops: Stops

    @classmethod
    def of(cls, patterns: Sequence[str]) -> Patterns:
        """Raises ValueError as `compile_stop`, and where all patterns of a request are too much, though each may do: to
        compile them takes time, in which others wait."""
        size = sum(map(parts, patterns))
        if size > MAX_TOGETHER:
            raise ValueError(f"has {size} parts in all expressions together, at most {MAX_TOGETHER} are allowed")
        found = cls(patterns)
        found.stops = Stops(patterns)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)


def parts(pattern: str) -> int:
    """Returns how many parts a pattern, and the one that says where it is under way, have when each is written out as
    often as it must occur; too many rather than too few.

    Compiling takes that much memory, so it is found out before.
    """
    other = under_way(pattern)
    return _written_out(pattern) + (0 if other is None else _written_out(other))


def _written_out(pattern: str) -> int:
    sizes, last = [0], 0  # of the groups that are open, and of the newest part
    for part in PARTS.finditer(pattern):
        if part["least"] is not None:
            more = last * (min(int(part["least"]), MAX_UNROLLED + 1) - 1)
            sizes[-1] += max(more, 0)
            last += max(more, 0)
        elif part["flags"] is not None or part["repeat"] is not None:
            continue
        elif part["open"] is not None:
            sizes.append(0)
        elif part[0] == ")":
            last = sizes.pop() if len(sizes) > 1 else sizes[0]
            sizes[-1] += last
        else:
            last = 1
            sizes[-1] += last
    return sum(sizes)


class RegexScanner:
    """Searches a growing text.

    After a search no match can begin before `_start[i]`: the library tells where the earliest match may still be
    under way. So the work of a token does not grow with the text, unless an expression is never done with its
    beginning. All expressions together may take `TOKEN_SECONDS` for each token and, once,
    `SEARCH_SECONDS` more; the answers of a request share that.
    """

    def __init__(self, stops: Stops, allowance: Allowance | None = None) -> None:
        """allowance: of all answers of the request, this one with them; None: it is alone."""
        self.failed: str | None = None  # why no more is searched
        self._stops = stops
        self._patterns = stops.patterns
        self._start = [0] * len(stops.patterns)
        self._text = ""
        self._allowance = Allowance() if allowance is None else allowance
        self._allowance.answers += 1
        self._last = 0  # the expression that was searched when it was used up

    @property
    def hold(self) -> int:
        """Returns how many last characters may belong to a match that is still to come."""
        return len(self._text) - min(self._start)

    def push(self, new: str) -> Match | None:
        """Takes the next text; the match that ends first, of several the one that begins first."""
        if self.failed:
            return None
        self._text += new
        if self._allowance.left >= 0:
            self._allowance.token()
            best = self._search(len(new))
            if self._allowance.left >= 0:
                return best
        pattern = self._patterns[self._last].pattern
        self.failed = f"stop_regex {pattern!r} takes too long to search"
        if len(self._patterns) > 1:
            self.failed += f", with the {len(self._patterns) - 1} others"
        return None

    def _search(self, new: int) -> Match | None:
        """new: characters since the last time."""
        best: Match | None = None
        allowance = self._allowance
        for i, pattern in enumerate(self._patterns):
            begun = time.thread_time()
            try:
                found = self._found(pattern, self._stops.under_way[i], self._start[i], new)
            except (TimeoutError, MemoryError):  # a call of itself without an end takes memory, too
                found, allowance.left = None, -1.0
            allowance.left -= time.thread_time() - begun
            if allowance.left < 0:
                self._last = i
                return None
            if found is None:
                self._start[i] = len(self._text)
            elif found.partial:
                self._start[i] = found.start()
            elif best is None or (found.end(), found.start()) < (best.end, best.start):
                best = Match(found.start(), found.end(), found.group(), pattern.pattern)
        return best

    def _found(self, pattern: Any, other: Any, start: int, new: int) -> Any:
        """Returns a match that begins at `start` or later, else the first one under way; None where there is
        neither."""
        partial: dict[str, Any] = {"partial": True, "timeout": SEARCH_SECONDS}
        if other is None:
            return pattern.search(self._text, start, **partial)
        found = pattern.search(self._text, start, timeout=SEARCH_SECONDS)
        if found is None and start < len(self._text) - new:
            # Mostly it still is: then other beginnings are not tried, each of them to the end of the text.
            found = other.match(self._text, start, **partial)
        return other.search(self._text, start, **partial) if found is None else found


class Searches:
    """Makes the scanners of answers. Those of a request share its compiled expressions and its processor time, for as
    long as one of them is there."""

    def __init__(self) -> None:
        self._stops: weakref.WeakValueDictionary[tuple[str, ...], Stops] = weakref.WeakValueDictionary()
        self._allowances: weakref.WeakValueDictionary[Hashable, Allowance] = weakref.WeakValueDictionary()

    def scanner(self, patterns: Sequence[str], together: Hashable | None = None) -> RegexScanner | None:
        """Makes a scanner for one more answer; None without expressions. together: what its request's others have, too,
        and nobody else's; None: it is alone. Raises ValueError as `compile_stop`."""
        if not patterns:
            return None
        return RegexScanner(self._compiled(patterns), self._allowance(together))

    def _compiled(self, patterns: Sequence[str]) -> Stops:
        if isinstance(patterns, Patterns):
            return patterns.stops
        found = self._stops.get(key := tuple(patterns))
        if found is None:
            found = self._stops[key] = Stops(key)
        return found

    def _allowance(self, together: Hashable | None) -> Allowance:
        found = Allowance() if together is None else self._allowances.get(together, Allowance())
        if together is not None:
            self._allowances[together] = found
        return found
