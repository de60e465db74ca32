"""Regular expressions whose end looks at what follows, at the end of a text that grows.

The library tells where a match is under way at the end of a text, but takes that end for one: `a\\B` is not under way
after `a`, for there `\\B` is false, and is a match once `b` follows. So where an expression has such parts another one
says what is under way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

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
_LOOKAHEADS, _LOOKBEHINDS = {"(?=", "(?!"}, {"(?<=", "(?<!"}
_PEEK = (
    r"\n?(?s:.)(?!)"  # is under way at the end, and never true; `$` is also before a newline that is the last character
)
_LAZY = re.compile(r"[*+?}]\?")
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
        if part.startswith("(?") and re.match(r"\(\?[a-zA-Z0]*V1", pattern[at:]):
            return "the flag V1"
    return None


def under_way(pattern: str) -> str | None:
    """Returns an expression that never matches, and is under way wherever `pattern` is, or may come to match by what
    follows; None where the library's own answer for `pattern` will do.

    What looks ahead is always true in it, and under way where it looks past the end; what goes back on nothing does go
    back, and what takes little takes much (the library is wrong about `.+?(?<=a)c`). So more may be under way, never
    less."""
    parts = list(PARTS.finditer(pattern))
    looking = _looking(parts)
    relaxed = "".join(_relaxed(parts, looking))
    around = any((parts[at]["open"] or "").endswith(("=", "!")) for at in looking)
    if not around and not any(part[0] in _LOOKS_AHEAD for part in parts) and not _LAZY.search(pattern):
        return None
    return f"(?:{relaxed}){_PEEK}"


def _looking(parts: Sequence[re.Match[str]]) -> set[int]:
    """The groups, by the part that opens them, in which something looks ahead."""
    found, groups = set[int](), list[int]()
    for at, part in enumerate(parts):
        if part[0] in _LOOKS_AHEAD or part["open"] in _LOOKAHEADS:
            found.update(groups)
        if part["open"] is not None:
            groups.append(at)
        elif part[0] == ")" and groups:
            groups.pop()
    return found


def _relaxed(parts: Sequence[re.Match[str]], looking: set[int]) -> Iterator[str]:
    groups: list[tuple[str, bool]] = []  # how each is closed, and whether it is read backwards
    before = ""  # what stands before
    for at, part in enumerate(parts):
        text, was, before = part[0], before, ""
        back = bool(groups) and groups[-1][1]
        if text in _LOOKS_AHEAD:
            yield "(?:)" if back else f"(?:{_PEEK}|)"
        elif text in _LOOKAHEADS:
            groups.append(("(?!))|)", False))
            yield "(?:(?="  # tries all, and fails
        elif text in _LOOKBEHINDS and at in looking:
            groups.append((")|)", True))
            yield f"(?:{_PEEK}|(?<="
        elif part["open"] is not None:
            groups.append((")", back or text in _LOOKBEHINDS))
            before = "open"
            yield "(?:" if text == "(?>" else text
        elif text == ")" and groups:
            yield groups.pop()[0]
        elif part["repeat"] is not None or text in {"*", "+", "?"}:
            if was != "repeat" or text not in {"+", "?"}:
                before = "repeat" if was != "open" else ""
                yield text
        else:
            yield text
