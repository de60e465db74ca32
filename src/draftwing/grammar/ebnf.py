"""Reads EBNF as structured output uses it (`root ::= "a" | [0-9]+ tail`) and writes it in llguidance's Lark dialect.

llguidance cuts text into lexemes, each as long as it can be, before it parses: `[a-z]+ "!x"` works, `[a-z]+ "x"` would
never see its "x", which is why the library's own converter does not do. Grammars in EBNF know no lexemes: a grammar
without recursion becomes one regular expression, one lexeme; in any other each lexeme is a single character, where
there is nothing to be greedy about, and the parser alone decides.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

MAX_DEPTH = 100  # nested groups; deeper ones would meet Python's own limit
MAX_REGEX = 10_000  # characters of a grammar written as one expression
MAX_REPETITION = 200_000  # atoms of an expression whose counted repetitions are written out
MAX_COUNT_DIGITS = 30

_BLANK = re.compile(r"\s*(?:#[^\n]*\s*)*")  # and comments
_TOKEN = re.compile(
    r"""\s*(?:\#[^\n]*\s*)*  # blanks and comments
    (?P<token> (?P<name>[A-Za-z_][\w.-]*) | "(?P<text>(?:\\.|[^"\\\n])*)" | \[(?P<set>(?:\\.|[^\]\\])*)\]
    | \{\s*(?P<low>\d+)\s*(?:(?P<comma>,)\s*(?P<high>\d*)\s*)?\} | ::= | \(= | [.|()*+?] | \Z )""",
    re.DOTALL | re.VERBOSE,
)
_CHAR = re.compile(r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\.|.", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b"}
_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class GrammarError(ValueError):
    """Says what is wrong with a grammar."""


def written_count(digits: str) -> int:
    """Returns how often a part is to be repeated. Raises GrammarError for more digits than any limit lets through;
    Python does not even read some thousands of them."""
    if len(digits) > MAX_COUNT_DIGITS:
        raise GrammarError(f"a repetition's count has {len(digits)} digits, at most {MAX_COUNT_DIGITS} are allowed")
    return int(digits)


@dataclass(frozen=True)
class Chars:
    """One character of a set; `regex` is the set as a regular expression."""

    regex: str


@dataclass(frozen=True)
class Ref:
    name: str


@dataclass(frozen=True)
class Seq:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alt:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    parts: tuple[Node]
    low: int
    high: int | None

    @property
    def times(self) -> str:
        sign = next((sign for sign, bounds in _SIGNS.items() if bounds == (self.low, self.high)), None)
        return sign or f"{{{self.low},{'' if self.high is None else self.high}}}"


Node = Chars | Ref | Seq | Alt | Repeat


def to_lark(text: str) -> str:
    """Translates the grammar `text`, which starts at the rule `root`, to Lark. Raises GrammarError."""
    root = "root"
    rules = _Parser(text).rules()
    if root not in rules:
        raise GrammarError(f"there is no rule {root!r}")
    for name, node in rules.items():
        for used in _refs(node):
            if used not in rules:
                raise GrammarError(f"rule {name!r} uses {used!r}, which is not defined")
    if root not in _ending(rules):
        raise GrammarError(f"no text fulfils it: {root!r} never ends")
    expression = None if _recursive(rules, root) else _regex(rules[root], rules)
    return _by_characters(rules, root) if expression is None else f"start: /{expression}/"


class _Parser:
    """Reads rules by recursive descent, one token ahead."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._depth = 0
        self._token = self._after(0)

    def _after(self, at: int) -> re.Match[str]:
        """Returns the token after the position `at`."""
        found = _TOKEN.match(self._text, at)
        if found is None:
            blank = _BLANK.match(self._text, at)
            assert blank is not None
            at = blank.end()
            missing = {'"': "expected '\"' at the end of a string", "[": "expected ']'"}
            raise self._error(missing.get(self._text[at], "expected the name of a rule"), at)
        return found

    def _error(self, message: str, at: int | None = None) -> GrammarError:
        at = self._token.start("token") if at is None else at
        found = repr(self._text[at : at + 20]) if at < len(self._text) else "the end"
        return GrammarError(f"{self._place(at)}: {message}, found {found}")

    def _place(self, at: int) -> str:
        line = self._text.count("\n", 0, at) + 1
        return f"line {line}, column {at - self._text.rfind(chr(10), 0, at)}"

    def _next(self) -> None:
        self._token = self._after(self._token.end())

    def _take(self, sign: str) -> bool:
        """Steps over the token if it is `sign`."""
        found: bool = self._token["token"] == sign
        if found:
            self._next()
        return found

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        while self._token["token"]:
            name = self._token["name"]
            if name is None:
                raise self._error("expected the name of a rule")
            if name in found:
                raise self._error(f"rule {name!r} is defined twice")
            self._next()
            if not self._take("::="):
                raise self._error(f"expected '::=' after {name!r}")
            found[name] = self._alternatives()
        return found

    def _alternatives(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"groups are nested more than {MAX_DEPTH} deep")
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        self._depth -= 1
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while (node := self._atom()) is not None:
            parts.append(self._repeated(node))
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

    def _atom(self) -> Node | None:
        token = self._token
        if token["text"] is not None:
            node: Node = Seq(tuple(map(_one, self._characters(token["text"]))))
        elif token["set"] is not None:
            node = self._set(token["set"])
        elif token["token"] == ".":
            node = Chars("(?s:.)")
        elif token["token"] == "(=":
            raise self._error("lookahead is not supported")
        elif self._take("("):
            node = self._alternatives()
            if self._token["token"] != ")":
                raise self._error(f"expected ')' for the '(' of {self._place(token.start('token'))}")
        elif token["name"] is not None:
            after = self._after(token.end())["token"]
            if after == "::=":  # the next rule begins here
                return None
            if self._text.startswith("(", token.end()):
                raise self._error(f"{token['name']}(...) is not supported")
            node = Ref(token["name"])
        else:
            return None
        self._next()
        return node

    def _repeated(self, node: Node) -> Node:
        token = self._token
        if token["token"] in _SIGNS:
            low, high = _SIGNS[token["token"]]
        elif token["low"] is not None:
            low = written_count(token["low"])
            high = low if token["comma"] is None else written_count(token["high"]) if token["high"] else None
            if high is not None and high < low:
                raise self._error("expected {low,high} with low <= high")
        else:
            return node
        self._next()
        return self._repeated(Repeat((node,), low, high))

    def _set(self, body: str) -> Chars:
        negated = body.startswith("^")
        raw = _CHAR.findall(body[negated:])
        if not raw:
            if not negated:
                raise self._error("a set of no characters")
            return Chars("(?s:.)")
        parts, at = [], 0
        while at < len(raw):
            low = high = self._character(raw[at])
            if raw[at + 1 : at + 2] == ["-"] and at + 2 < len(raw):
                high = self._character(raw[at + 2])
                at += 2
            if high < low:
                raise self._error("the range of characters is empty")
            parts.append(_code(low) if low == high else f"{_code(low)}-{_code(high)}")
            at += 1
        return Chars(f"[{'^' * negated}{''.join(parts)}]")

    def _characters(self, body: str) -> str:
        """Returns the text that `body` stands for."""
        return "".join(map(self._character, _CHAR.findall(body))) if "\\" in body else body

    def _character(self, raw: str) -> str:
        if not raw.startswith("\\"):
            return raw
        if len(raw) > 2:
            code = int(raw[2:], 16)
            if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
                raise self._error(f"{raw} is no character")
            return chr(code)
        if raw[1].isalnum() and raw[1] not in _ESCAPES:
            raise self._error(f"{raw} is no escape sequence")
        return _ESCAPES.get(raw[1], raw[1])


def _code(char: str) -> str:
    """Returns a character as a regular expression has it."""
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"


@functools.lru_cache(4096)
def _one(char: str) -> Chars:
    return Chars(_code(char))


def _parts(node: Node) -> tuple[Node, ...]:
    return () if isinstance(node, Chars | Ref) else node.parts


def _refs(node: Node) -> Iterator[str]:
    if isinstance(node, Ref):
        yield node.name
    for part in _parts(node):
        yield from _refs(part)


def _ending(rules: dict[str, Node]) -> set[str]:
    """Returns the rules that some finite text fulfils."""
    found: set[str] = set()

    def ends(node: Node) -> bool:
        if isinstance(node, Ref):
            return node.name in found
        if isinstance(node, Alt):
            return any(map(ends, node.parts))
        return (isinstance(node, Repeat) and node.low == 0) or all(map(ends, _parts(node)))

    while more := {name for name, node in rules.items() if name not in found and ends(node)}:
        found |= more
    return found


def _recursive(rules: dict[str, Node], root: str) -> bool:
    """Tells whether a rule that `root` reaches can contain itself."""
    uses: dict[str, set[str]] = {}
    todo = [root]
    while todo:
        name = todo.pop()
        if name not in uses:
            uses[name] = set(_refs(rules[name]))
            todo += uses[name]
    try:
        TopologicalSorter(uses).prepare()
    except CycleError:
        return True
    return False


def _regex(node: Node, rules: dict[str, Node]) -> str | None:
    """Returns a grammar without recursion as one regular expression; None when it would be too long. Raises
    GrammarError for one whose repetitions stand for too much."""
    known: dict[str, tuple[str, int]] = {}

    def write(node: Node) -> tuple[str, int]:
        """-> the expression, and its characters with its counted repetitions written out"""
        if isinstance(node, Chars):
            return node.regex, 1
        if isinstance(node, Ref):
            if node.name not in known:
                known[node.name] = write(rules[node.name])
            return known[node.name]
        parts, sizes = zip(*map(write, node.parts), strict=True) if node.parts else ((), ())
        size = sum(sizes)
        if sum(map(len, parts)) > MAX_REGEX:
            raise OverflowError
        if isinstance(node, Repeat):
            size *= max(node.low, node.high or 0, 1)
            if size > MAX_REPETITION:
                raise GrammarError(f"its repetitions stand for more than {MAX_REPETITION} characters")
            return f"(?:{parts[0]}){node.times}", size
        return "".join(parts) if isinstance(node, Seq) else f"(?:{'|'.join(parts)})", size

    try:
        return write(node)[0]
    except (OverflowError, RecursionError):  # too long, or a long chain of rules
        return None


def _by_characters(rules: dict[str, Node], root: str) -> str:
    """Returns a grammar whose lexemes are single characters."""
    numbers = {name: f"r{i}" for i, name in enumerate(rules)}
    sets: dict[str, str] = {}

    def write(node: Node) -> str:
        if isinstance(node, Chars):
            return sets.setdefault(node.regex, f"C{len(sets)}")
        if isinstance(node, Ref):
            return numbers[node.name]
        parts = [write(part) for part in node.parts]
        if isinstance(node, Repeat):
            return f"({parts[0]}){node.times}"
        return f"({' | '.join(parts)})" if isinstance(node, Alt) else " ".join(parts) or '""'

    lines = [f"start: {numbers[root]}", *(f"{numbers[name]}: {write(node)}" for name, node in rules.items())]
    return "\n".join(lines + [f"{name}: /{regex}/" for regex, name in sets.items()])
