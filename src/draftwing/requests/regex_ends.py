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
