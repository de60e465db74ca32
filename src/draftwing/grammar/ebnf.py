"""Reads EBNF as structured output uses it (`root ::= "a" | [0-9]+ tail`) and writes it in llguidance's Lark dialect.

llguidance cuts text into lexemes, each as long as it can be, before it parses: `[a-z]+ "!x"` works, `[a-z]+ "x"` would
never see its "x". Grammars in EBNF know no lexemes, so that must not happen: a grammar without recursion becomes one
regular expression, one lexeme; in any other each lexeme is a single character, where there is nothing to be greedy
about, and the parser alone decides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_DEPTH = 100  # nested groups; deeper ones would meet Python's own limit
MAX_REGEX = 10_000  # characters of a grammar written as one expression

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_BLANK = re.compile(r"(?:\s|#[^\n]*)*")
_REPEAT = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d+)?\s*)?\}")
MAX_COUNT_DIGITS = 30
_CODES = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b"}


class GrammarError(ValueError):
    """What is wrong with a grammar, in words."""


def written_count(digits: str) -> int:
    """How often a part is to be repeated. Raises GrammarError for more digits than any limit lets through; Python
    does not even read some thousands of them."""
    if len(digits) > MAX_COUNT_DIGITS:
        raise GrammarError(f"a repetition's count has {len(digits)} digits, at most {MAX_COUNT_DIGITS} are allowed")
    return int(digits)


@dataclass(frozen=True)
class Literal:
    text: str


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
    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    node: Node
    low: int
    high: int | None


Node = Literal | Chars | Ref | Seq | Alt | Repeat


def to_lark(text: str, root: str = "root") -> str:
    """The grammar `text`, whose first symbol is `root`, in Lark. Raises GrammarError."""
    rules = Parser(text).rules()
    if root not in rules:
        raise GrammarError(f"there is no rule {root!r}")
    for name, node in rules.items():
        for used in _refs(node):
            if used not in rules:
                raise GrammarError(f"rule {name!r} uses {used!r}, which is not defined")
    if root not in _ending(rules):
        raise GrammarError(f"no text fulfils it: {root!r} never ends")
    if not _recursive(rules, root):
        expression = _regex(rules[root], rules)
        if expression is not None:
            return f"start: /{expression}/"
    return _by_characters(rules, root)


class Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        self._blank()
        while self.at < len(self.text):
            name = self._name()
            if name is None:
                raise self._error("expected the name of a rule")
            if not self._take("::="):
                raise self._error(f"expected '::=' after {name!r}")
            if name in found:
                raise self._error(f"rule {name!r} is defined twice")
            found[name] = self._alternatives()
        return found

    def _error(self, message: str) -> GrammarError:
        line = self.text.count("\n", 0, self.at) + 1
        return GrammarError(f"line {line}: {message}, found {self.text[self.at : self.at + 20]!r}")

    def _blank(self) -> None:
        match = _BLANK.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def _take(self, token: str) -> bool:
        if not self.text.startswith(token, self.at):
            return False
        self.at += len(token)
        self._blank()
        return True

    def _name(self) -> str | None:
        match = _NAME.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        self._blank()
        return match.group()

    def _alternatives(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self._error(f"groups are nested more than {MAX_DEPTH} deep")
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        self.depth -= 1
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while (node := self._atom()) is not None:
            parts.append(self._repeated(node))
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

    def _atom(self) -> Node | None:
        start = self.text[self.at : self.at + 1]
        if start == '"':
            return self._literal()
        if start == "[":
            return self._set()
        if start == ".":
            self._take(".")
            return Chars("(?s:.)")
        if self.text.startswith("(=", self.at):
            raise self._error("lookahead is not supported")
        if self._take("("):
            node = self._alternatives()
            if not self._take(")"):
                raise self._error("expected ')'")
            return node
        before = self.at
        name = self._name()
        if name is None:
            return None
        if self.text.startswith("::=", self.at):  # the next rule begins here
            self.at = before
            return None
        if self.text.startswith("(", before + len(name)):
            raise self._error(f"{name}(...) is not supported")
        return Ref(name)

    def _repeated(self, node: Node) -> Node:
        for sign, low, high in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self._take(sign):
                return self._repeated(Repeat(node, low, high))
        match = _REPEAT.match(self.text, self.at)
        if match is None:
            return node
        low = written_count(match[1])
        high = low if match[2] is None else None if match[3] is None else written_count(match[3])
        if high is not None and high < low:
            raise self._error("expected {low,high} with low <= high")
        self.at = match.end()
        self._blank()
        return self._repeated(Repeat(node, low, high))

    def _literal(self) -> Literal:
        self.at += 1
        text = ""
        while (char := self.text[self.at : self.at + 1]) != '"':
            if char in ("", "\n"):
                raise self._error("expected '\"' at the end of a string")
            text += self._char()
        self.at += 1
        self._blank()
        return Literal(text)

    def _set(self) -> Chars:
        self.at += 1
        negated = self.text.startswith("^", self.at)
        self.at += negated
        parts: list[str] = []
        while not self.text.startswith("]", self.at):
            if self.at >= len(self.text):
                raise self._error("expected ']'")
            low = self._char()
            high = low
            if self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at):
                self.at += 1
                high = self._char()
            if high < low:
                raise self._error("the range of characters is empty")
            parts.append(_code(low) if low == high else f"{_code(low)}-{_code(high)}")
        self.at += 1
        self._blank()
        if not parts:
            if not negated:
                raise self._error("a set of no characters")
            return Chars("(?s:.)")
        return Chars(f"[{'^' * negated}{''.join(parts)}]")

    def _char(self) -> str:
        char = self.text[self.at : self.at + 1]
        self.at += 1
        if char != "\\":
            if char == "":
                raise self._error("the grammar ends too early")
            return char
        kind = self.text[self.at : self.at + 1]
        self.at += 1
        if kind in _CODES:
            digits = self.text[self.at : self.at + _CODES[kind]]
            self.at += _CODES[kind]
            try:
                code = int(digits, 16)
                if len(digits) < _CODES[kind] or 0xD800 <= code < 0xE000:
                    raise ValueError
                return chr(code)
            except (ValueError, OverflowError):
                raise self._error(f"\\{kind}{digits} is no character") from None
        if kind.isalnum() and kind not in _ESCAPES:
            raise self._error(f"\\{kind} is no escape sequence")
        if kind == "":
            raise self._error("the grammar ends too early")
        return _ESCAPES.get(kind, kind)


def _code(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"


def _children(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Seq):
        return node.parts
    if isinstance(node, Alt):
        return node.options
    return (node.node,) if isinstance(node, Repeat) else ()


def _refs(node: Node) -> Iterator[str]:
    if isinstance(node, Ref):
        yield node.name
    for child in _children(node):
        yield from _refs(child)


def _ending(rules: dict[str, Node]) -> set[str]:
    """Rules that some finite text fulfils."""
    found: set[str] = set()

    def ends(node: Node) -> bool:
        if isinstance(node, Ref):
            return node.name in found
        if isinstance(node, Alt):
            return any(map(ends, node.options))
        return (isinstance(node, Repeat) and node.low == 0) or all(map(ends, _children(node)))

    while more := {name for name, node in rules.items() if name not in found and ends(node)}:
        found |= more
    return found


def _recursive(rules: dict[str, Node], root: str) -> bool:
    """Whether a rule that `root` reaches can contain itself."""
    open_rules: list[tuple[str, Iterator[str]]] = [(root, _refs(rules[root]))]
    on_path, done = {root}, set()
    while open_rules:
        name, used = open_rules[-1]
        for child in used:
            if child in on_path:
                return True
            if child not in done:
                on_path.add(child)
                open_rules.append((child, _refs(rules[child])))
                break
        else:
            open_rules.pop()
            on_path.remove(name)
            done.add(name)
    return False


def _regex(node: Node, rules: dict[str, Node]) -> str | None:
    """A regular expression of a grammar without recursion; None when it would be too long."""
    known: dict[str, str | None] = {}

    def write(node: Node) -> str | None:
        if isinstance(node, Literal):
            return "".join(map(_code, node.text))
        if isinstance(node, Chars):
            return node.regex
        if isinstance(node, Ref):
            if node.name not in known:
                known[node.name] = write(rules[node.name])
            return known[node.name]
        parts: list[str] = []
        for child in _children(node):
            part = write(child)
            if part is None:
                return None
            parts.append(part)
        if sum(map(len, parts)) > MAX_REGEX:
            return None
        if isinstance(node, Repeat):
            return f"(?:{parts[0]}){_times(node)}"
        return "".join(parts) if isinstance(node, Seq) else f"(?:{'|'.join(parts)})"

    try:
        return write(node)
    except RecursionError:  # a long chain of rules
        return None


def _times(node: Repeat) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((node.low, node.high))
    return short or f"{{{node.low},{'' if node.high is None else node.high}}}"


def _by_characters(rules: dict[str, Node], root: str) -> str:
    numbers = {name: f"r{i}" for i, name in enumerate(rules)}
    sets: dict[str, str] = {}

    def write(node: Node) -> str:
        if isinstance(node, Literal):
            return " ".join(json.dumps(char, ensure_ascii=False) for char in node.text) or '""'
        if isinstance(node, Chars):
            return sets.setdefault(node.regex, f"C{len(sets)}")
        if isinstance(node, Ref):
            return numbers[node.name]
        if isinstance(node, Repeat):
            return f"({write(node.node)}){_times(node)}"
        if isinstance(node, Seq):
            return " ".join(f"({write(p)})" if isinstance(p, Alt) else write(p) for p in node.parts) or '""'
        return " | ".join(write(option) for option in node.options)

    lines = [f"start: {numbers[root]}"]
    lines += [f"{numbers[name]}: {write(node)}" for name, node in rules.items()]
    return "\n".join(lines + [f"{name}: /{regex}/" for regex, name in sets.items()])
