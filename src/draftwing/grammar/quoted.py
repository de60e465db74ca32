"""Rewrites grammars of a text to grammars, in EBNF, of the same text as it stands between the quotes of a JSON string.

Each character has one way to be written there: `"`, `\\` and control characters by their shortest escape, all others as
they are. So what stands for a character is rewritten, and the rules of a grammar stay as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from draftwing.grammar.ebnf import GrammarError
from draftwing.grammar.limits import MAX_CHARS
from draftwing.requests.grammar_field import MAX_REGEX_CHARS

Ranges = Sequence[tuple[int, int]]  # of characters, ends included

_ALL: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
_SPECIAL = {code: json.dumps(chr(code))[1:-1] for code in (*range(32), ord('"'), ord("\\"))}
_KINDS: dict[str, Ranges] = {  # of ASCII, as everywhere here
    "d": ((48, 57),),
    "w": ((48, 57), (65, 90), (95, 95), (97, 122)),
    "s": ((9, 13), (32, 32)),
}
_CONTROLS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "a": 7}
_CODE = re.compile(r"x\{([0-9a-fA-F]+)\}|x([0-9a-fA-F]{2})|u\{([0-9a-fA-F]+)\}|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})")
_GROUP = re.compile(r"\((\?:|\?P?<[A-Za-z_]\w*>|(?!\?))")
_TIMES = re.compile(r"([*+?]|\{\d+(?:,\d*)?\})\??")  # with what makes it lazy, which changes no text as a whole
_TOKEN = re.compile(
    r"""(?P<blank>(?:\s+|(?:\#|//)[^\n]*)+)
    |[!?]{0,2}(?P<defined>[_A-Za-z]\w*)(?:\.-?\d+)?\s*:
    |(?P<text>"(?:\\.|[^"\\\n])*")(?:\s*\.\.\s*(?P<last>"(?:\\.|[^"\\\n])*")|(?P<folded>i)\b)?
    |/(?P<regex>(?:\\.|[^/\\])+)/(?P<flags>[a-z]*)
    |%import\s+common\s*(?:\.\s*(?P<one>\w+)(?:\s*->\s*(?P<alias>\w+))?|\(\s*(?P<many>[\w\s,]+)\))
    |(?P<ignore>%ignore\b)
    |->\s*(?P<label>\w+)
    |(?P<name>[_A-Za-z]\w*)
    |~\s*(?P<low>\d+)(?:\s*\.\.\s*(?P<high>\d+))?
    |(?P<sign>[|()+*?\[\]]|\{\d*,?\d*\})
    |(?P<other>%\w+|<[^<>\s]+>|.)""",
    re.VERBOSE | re.DOTALL,
)
_EXPONENT = "[eE][+-]?[0-9]+"
_REAL = r"(?:[0-9]+\.[0-9]*|\.[0-9]+)"
# Terminals of Lark's own library.
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": _REAL,
    "FLOAT": f"{_REAL}(?:{_EXPONENT})?|[0-9]+{_EXPONENT}",
    "SIGNED_FLOAT": f"[+-]?(?:{_REAL}(?:{_EXPONENT})?|[0-9]+{_EXPONENT})",
    "NUMBER": f"(?:{_REAL}|[0-9]+)(?:{_EXPONENT})?",
    "SIGNED_NUMBER": f"[+-]?(?:{_REAL}|[0-9]+)(?:{_EXPONENT})?",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}
_SIGNS = {"[": "(", "]": ")?"}  # what is optional
_ROOT, _IGNORED = "root-", "ignored-"  # no name in Lark


def quoted(syntax: str, definition: str) -> str:
    """Returns a grammar in EBNF. syntax: "lark" or "regex", of `definition`. Raises GrammarError for what is wrong with
    it, and for what is not known here: special tokens, look-around, classes by property, other grammars inside."""
    if len(definition) > MAX_CHARS:
        raise GrammarError(f"it has {len(definition)} characters, at most {MAX_CHARS} are allowed")
    writer = _Writer()
    rules = writer.lark(definition) if syntax == "lark" else f"root ::= {writer.regex(definition, anchors=True)}"
    return "\n".join([rules, *(f"{name} ::= {body}" for body, name in writer.classes.items())])


class _Writer:
    def __init__(self) -> None:
        self.classes: dict[str, str] = {}  # names of rules, by what they hold
        self._known: dict[tuple[tuple[int, int], ...], str] = {}  # what `one_of` gave

    def lark(self, grammar: str) -> str:
        tokens = list(_tokens(grammar))
        ignores = any(token["ignore"] for token in tokens)
        out = [f"root ::= {f'{_IGNORED} ' * ignores}start"]
        ignored: list[str] = []
        in_rule, to = False, out  # of terminals there is nothing to ignore
        for token in tokens:
            if token["ignore"]:
                ignored.append("|")
                in_rule, to = False, ignored
            elif token["one"] or token["many"]:
                out += self._imported(token)
            elif (name := token["defined"]) is not None:
                out.append(f"\n{_named(name)} ::=")
                in_rule, to = name.lstrip("_")[:1].islower(), out
            else:
                written, terminal = self._part(token)
                to.append(f"({written} {_IGNORED})" if terminal and in_rule and ignores else written)
        return " ".join(out) + (f"\n{_IGNORED} ::= ({' '.join(ignored[1:])})*" if ignores else "")

    def _part(self, token: re.Match[str]) -> tuple[str, bool]:
        """Returns a part of a rule, and whether it is a terminal."""
        if token["text"] is not None:
            return self._literal(token), True
        if token["regex"] is not None:
            return f"({self.regex(token['regex'], token['flags'])})", True
        if token["name"] is not None:
            return _named(token["name"]), token["name"].lstrip("_")[:1].isupper()
        if token["low"] is not None:
            return f"{{{token['low']},{token['high'] or token['low']}}}", False
        sign = token["sign"] or ""  # a label says nothing about the text
        return _SIGNS.get(sign, sign.replace("{,", "{0,")), False

    def _literal(self, token: re.Match[str]) -> str:
        text = _text(token["text"])
        if token["last"] is not None:
            last = _text(token["last"])
            if not (len(text) == len(last) == 1 and text <= last):
                raise GrammarError(f"{token.group()[:40]} is no range of characters")
            return self.one_of([(ord(text), ord(last))])
        if token["folded"]:
            either = {char: self.one_of(_folded([(ord(char), ord(char))])) for char in set(text)}
            return f"({' '.join(map(either.__getitem__, text))})"
        return _written(json.dumps(text, ensure_ascii=False)[1:-1])

    def _imported(self, token: re.Match[str]) -> list[str]:
        names = [token["one"]] if token["one"] else token["many"].replace(",", " ").split()
        for name in names:
            if name not in _COMMON:
                raise GrammarError(f"common.{name[:40]} is not known; there are {', '.join(_COMMON)}")
        return [f"\n{_named(token['alias'] or name)} ::= {self.regex(_COMMON[name])}" for name in names]

    def regex(self, pattern: str, flags: str = "", anchors: bool = False) -> str:
        """flags: of "i" and "s".  anchors: whether `^` and `$` may stand at the ends, where they say nothing."""
        if len(pattern) > MAX_REGEX_CHARS:
            raise GrammarError(f"an expression has {len(pattern)} characters, at most {MAX_REGEX_CHARS} are allowed")
        if others := set(flags) - {"i", "s"}:
            raise GrammarError(f"the flag {min(others)!r} of an expression is not supported; i and s are")
        out, at, depth = list[str](), 0, 0
        while at < len(pattern):
            char = pattern[at]
            if char == "(":
                group = _GROUP.match(pattern, at)
                if group is None:
                    raise GrammarError(f"{pattern[at : at + 4]!r} of an expression is not supported")
                out.append("(")
                at, depth = group.end(), depth + 1
            elif char in ")|":
                depth -= char == ")"
                out.append(char)
                at += 1
            elif (times := _TIMES.match(pattern, at)) is not None:
                out.append(times[1])
                at = times.end()
            elif char in "^$":
                begins = at == 0 or pattern[at - 1] == "|"
                ends = at + 1 == len(pattern) or pattern[at + 1] == "|"
                if not anchors or depth or not (begins if char == "^" else ends):
                    raise GrammarError(f"{char!r} is not supported there: all of the text has to match")
                at += 1
            else:
                ranges, at = _atom(pattern, at, "s" in flags)
                out.append(self.one_of(_folded(ranges) if "i" in flags else ranges))
        return " ".join(out)

    def one_of(self, ranges: Ranges) -> str:
        """Returns an expression of one of these characters."""
        key = tuple(ranges)
        if key not in self._known:
            self._known[key] = self._one_of(ranges)
        return self._known[key]

    def _one_of(self, ranges: Ranges) -> str:
        if not ranges:
            raise GrammarError("a class of an expression holds nothing")
        special = [code for code in _SPECIAL if any(low <= code <= high for low, high in ranges)]
        plain = _without(ranges, [(code, code) for code in special])
        parts = [_set(plain)] if plain else []
        short = [ord(_SPECIAL[code][1]) for code in special if len(_SPECIAL[code]) == 2]
        parts += [f'"\\\\" {_set([(code, code) for code in short])}'] if short else []
        for digit in "01":
            last = [ord(text[5]) for text in map(_SPECIAL.__getitem__, special) if text[4:5] == digit]
            parts += [f'"\\\\u00{digit}" {_set([(code, code) for code in last])}'] if last else []
        body = " | ".join(parts)
        return body if len(parts) == 1 and plain else self.classes.setdefault(body, f"c-{len(self.classes)}")


def _tokens(grammar: str) -> Iterator[re.Match[str]]:
    """Yields what a grammar in Lark is made of. Raises GrammarError at the first thing that is not known: behind a `/`
    without another one, say, each next one would be looked for to the end of the text."""
    for token in _TOKEN.finditer(grammar):
        if token["other"] is not None:
            raise GrammarError(f"{token.group()[:40]!r} is not supported in Lark here")
        if token["blank"] is None:
            yield token


def _named(name: str) -> str:
    return _ROOT if name == "root" else name


def _text(written: str) -> str:
    """Returns the text of a literal in Lark."""
    try:
        text = json.loads(re.sub(r"\\x([0-9a-fA-F]{2})|\\.", lambda m: rf"\u00{m[1]}" if m[1] else m[0], written))
    except ValueError:
        raise GrammarError(f"{written[:40]} is no text in Lark") from None
    assert isinstance(text, str)
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise GrammarError(f"{written[:40]} holds half a character")
    return text


def _atom(pattern: str, at: int, dot_all: bool) -> tuple[Ranges, int]:
    """Reads what stands for one character of an expression: those that it may be, and where it ends."""
    char = pattern[at]
    if char == ".":
        return _ALL if dot_all else _without(_ALL, [(10, 10)]), at + 1
    if char == "[":
        return _class(pattern, at + 1)
    return _escape(pattern, at + 1) if char == "\\" else ([(ord(char), ord(char))], at + 1)


def _escape(pattern: str, at: int) -> tuple[Ranges, int]:
    """at: behind the backslash."""
    code = _CODE.match(pattern, at)
    char = pattern[at : at + 1]
    if code is not None:
        digits = next(group for group in code.groups() if group)
        number = int(digits[-7:], 16) if len(digits.lstrip("0")) < 7 else 0x110000
        if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
            raise GrammarError(f"'\\{code.group()[:20]}' is no character")
        return [(number, number)], code.end()
    if char.lower() in _KINDS:
        kind = _KINDS[char.lower()]
        return kind if char.islower() else _without(_ALL, kind), at + 1
    if char in _CONTROLS:
        return [(_CONTROLS[char], _CONTROLS[char])], at + 1
    if not char or char.isalnum():
        raise GrammarError(f"'\\{char}' of an expression is not supported")
    return [(ord(char), ord(char))], at + 1


def _class(pattern: str, at: int) -> tuple[Ranges, int]:
    """at: behind the bracket."""
    negated = pattern.startswith("^", at)
    at = begin = at + negated
    found: list[tuple[int, int]] = []
    while not pattern.startswith("]", at) or at == begin:
        if pattern.startswith(("[", "&&", "--", "~~"), at):
            raise GrammarError(f"{pattern[at : at + 2]!r} in a class of an expression is not supported")
        members, at = _member(pattern, at)
        if pattern.startswith("-", at) and not pattern.startswith(("-]", "--"), at):
            last, at = _member(pattern, at + 1)
            low, high = members[0][0], last[-1][1]
            if len(members) + len(last) > 2 or members[0][1] != low or last[0][0] != high or low > high:
                raise GrammarError("a class of an expression has a range that is none")
            members = [(low, high)]
        found += members
    others = _without(_ALL, found)
    return others if negated else _without(_ALL, others), at + 1


def _member(pattern: str, at: int) -> tuple[Ranges, int]:
    if at >= len(pattern):
        raise GrammarError("a class of an expression has no end")
    if pattern[at] == "\\":
        return _escape(pattern, at + 1)
    return [(ord(pattern[at]), ord(pattern[at]))], at + 1


def _without(ranges: Ranges, others: Ranges) -> Ranges:
    kept, others = list[tuple[int, int]](), sorted(others)
    for first, last in ranges:
        for low, high in others:
            if low > last:
                break
            if low > first:
                kept.append((first, low - 1))
            first = max(first, high + 1)
        if first <= last:
            kept.append((first, last))
    return kept


def _folded(ranges: Ranges) -> Ranges:
    """Adds the other case of ASCII's letters. Raises GrammarError for other letters, but in ranges."""
    found = list(ranges)
    for low, high in ranges:
        if low == high > 127 and chr(low).swapcase() != chr(low):
            raise GrammarError(f"{chr(low)!r} without regard to its case is not supported")
        for first, shift in ((65, 32), (97, -32)):
            if (begin := max(low, first)) <= (end := min(high, first + 25)):
                found.append((begin + shift, end + shift))
    return _without(_ALL, _without(_ALL, found))


# What EBNF has.


def _set(ranges: Ranges) -> str:
    return f"[{''.join('-'.join(map(_code, dict.fromkeys(ends))) for ends in ranges)}]"


def _code(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\U{code:08x}"


def _written(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
