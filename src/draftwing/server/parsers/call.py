"""Reads one tool call while a model writes it: `{"name": "f", "arguments": {...}}`; of a custom tool its input.
`JsonScanner` follows the JSON, character by character."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from typing import Any

import pydantic_core

from draftwing.requests.refusals import well_formed

MAX_DEPTH = 128  # lists and objects inside of each other; readers of JSON take some 200, with those that are around
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_NUMERIC = frozenset("+-.0123456789eE")
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSES = {"{": "}", "[": "]"}
_LONE = "\\ufffd"  # in place of half a character
# JSON's own, what Python writes in their place, and numbers that JSON does not have.
_LITERALS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_LITERALS |= dict.fromkeys(("NaN", "Infinity", "-Infinity"), "null")


class JsonScanner:
    """Follows one JSON object or array; `push` raises ValueError at the first character that cannot be there, and where
    it is nested too deeply.

    depth: containers that are open.  state: what the next character belongs to: "value", "key", "colon", "string",
    "escape", "hex", "literal", "number", "after" (a comma or the container's end), or "end".
    """

    def __init__(self) -> None:
        self.state = "value"
        self._stack: list[str] = []
        self._may_close = False  # the container has nothing in it yet
        self._is_key = False
        self._word: list[str] = []  # a literal, number or escape that is not complete
        self._high = ""  # the escape of half a character, whose other half may follow
        self._comma: list[str] = []  # with what is blank after it: one before the end of a container is left out

    @property
    def depth(self) -> int:
        return len(self._stack)

    def push(self, char: str) -> str:
        """Returns what is certain of the text up to this character, as JSON that any reader takes.

        That is the text but for what models write all the same: control characters in strings as they are, escapes that
        JSON does not know, escapes of half a character (U+FFFD), a comma too many, Python's literals, numbers that JSON
        or a float does not have (null). What was returned is always the beginning of JSON, and never ends inside of an
        escape, a number or a literal.
        """
        match self.state:
            case "string":
                return self._string(char)
            case "escape":
                return self._escape(char)
            case "hex":
                return self._hex(char)
            case "literal":
                return self._literal(char)
            case "number" if char in _NUMERIC:
                self._word.append(char)
                return ""
            case "number":
                return self._number(char)
        return self._structure(char)

    def _string(self, char: str) -> str:
        if char == "\\":
            self.state = "escape"
            return ""
        if char == '"':
            self.state = "colon" if self._is_key else "after"
        return self._half() + (json.dumps(char)[1:-1] if char < " " else char)

    def _half(self) -> str:
        """Returns what half a character is that nothing belongs to."""
        half, self._high = self._high and _LONE, ""
        return half

    def _escape(self, char: str) -> str:
        self.state = "string"
        if char == "u":
            self.state, self._word = "hex", []
            return ""
        if char in '"\\/bfnrt':
            return f"{self._half()}\\{char}"
        # JSON has no such escape: the backslash is meant, but for the quote that Python escapes.
        return self._half() + ("" if char == "'" else "\\\\") + self._string(char)

    def _hex(self, char: str) -> str:
        if char not in _HEX:
            self.state = "string"
            return f"{self._half()}\\\\u{''.join(self._word)}{self._string(char)}"
        self._word.append(char)
        if len(self._word) < 4:
            return ""
        self.state, word = "string", "".join(self._word)
        code, escape = int(word, 16), f"\\u{word}"
        if 0xDC00 <= code < 0xE000:
            high, self._high = self._high, ""
            return high + escape if high else _LONE
        before = self._half()
        if 0xD800 <= code < 0xDC00:
            self._high = escape
            return before
        return before + escape

    def _literal(self, char: str) -> str:
        self._word.append(char)
        word = "".join(self._word)
        if word in _LITERALS:
            self.state = "after"
            return _LITERALS[word]
        if not any(literal.startswith(word) for literal in _LITERALS):
            raise ValueError(f"{word!r} is no JSON")
        return ""

    def _number(self, char: str) -> str:
        """Takes the character behind a number."""
        word = "".join(self._word)
        if word == "-" and char == "I":
            self.state = "literal"
            return self._literal(char)
        if not _NUMBER.fullmatch(word):
            raise ValueError(f"{word[:100]!r} is no number")
        self.state = "after"
        return (word if math.isfinite(float(word)) else "null") + self._structure(char)

    def _structure(self, char: str) -> str:
        """Takes what stands between strings, literals and numbers."""
        if char in _BLANK:
            if not self._comma:
                return char
            self._comma.append(char)
            return ""
        empty, self._may_close = self._may_close, False
        if self.state in ("after", "value", "key") and self._stack and char == _CLOSES[self._stack[-1]]:
            if self.state != "after" and not empty and not self._comma:
                raise ValueError(f"{char!r} in place of a value")
            self._stack.pop()
            self.state, blank = "after" if self._stack else "end", "".join(self._comma[1:])
            self._comma = []
            return blank + char
        if self.state == "after" and char == ",":
            self.state = "key" if self._stack[-1] == "{" else "value"
            self._comma = [char]
            return ""
        before, self._comma = "".join(self._comma), []
        if self.state == "colon" and char == ":":
            self.state = "value"
            return char
        if self.state in ("key", "value") and char == '"' and self._stack:
            self._is_key, self.state = self.state == "key", "string"
            return before + char
        if self.state == "value":
            return before + self._value(char)
        raise ValueError(f"{char!r} is not expected here")

    def _value(self, char: str) -> str:
        """Takes the beginning of a value that is no string."""
        if char in _CLOSES:
            if len(self._stack) == MAX_DEPTH:
                raise ValueError(f"nested in more than {MAX_DEPTH} levels")
            self._stack.append(char)
            self.state, self._may_close = "key" if char == "{" else "value", True
            return char
        if not self._stack:
            raise ValueError(f"expected an object or an array, found {char!r}")
        if char == "-" or char in "0123456789":
            self.state, self._word = "number", [char]
            return ""
        self.state, self._word = "literal", []
        return self._literal(char)


_NAME_KEYS = ("name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type")  # models write them, they say nothing
_BLANK = " \t\n\r"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_MAX_DIGITS = 4300  # of a number that Python reads
_INPUT = '{"input":"'
_IN_KEY = range(2, 8)  # places in it before which no blank may stand
_HALF = r"\\u[dD][89abAB][0-9a-fA-F]{2}"  # of a character, the first
_PARTIAL = rf"(?:(?:{_HALF})?\\(?:u[0-9a-fA-F]{{0,3}})?|{_HALF})\Z"  # an escape that the next piece may change
_CERTAIN = re.compile(rf'(?:[^"\\]++|(?!{_PARTIAL})\\.)*+', re.DOTALL)


def read_arguments(text: str) -> dict[str, Any] | None:
    """Returns the arguments of a call, which come as a text, whoever wrote it; None for a text that is no object.

    Nothing at all, and null, are no arguments. What was cut is what there is of it. Halves of characters become U+FFFD,
    numbers that JSON or a float does not have null.
    """
    if text.strip() in ("", "null"):
        return {}
    try:
        value = _parsed(text)
        if _SURROGATE.search(text):
            value = _parsed(well_formed(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        try:
            value = _parsed(json.dumps(pydantic_core.from_json(text, allow_partial=True)))
        except ValueError:
            return None
    return value if isinstance(value, dict) else None


def _parsed(text: str) -> Any:
    return json.loads(text, strict=False, parse_constant=_null, parse_float=_float, parse_int=_integer)


def _null(name: str) -> None:
    return None


def _float(text: str) -> float | None:
    return value if math.isfinite(value := float(text)) else None


def _integer(text: str) -> int | None:
    return int(text) if len(text) <= _MAX_DIGITS else None


class CallReader:
    """Reads the JSON object of a call, character by character.

    names: of the functions that there are; any other name means that this is no call.
    name: of the function whose arguments the object is, where the name came before it.
    marked: a marker says that this is a call. Without one, members that no call has come after the name, and besides
    arguments; with one they may be anywhere. They are passed over, and so is what comes a second time.
    """

    def __init__(self, names: Collection[str], name: str | None = None, marked: bool = True) -> None:
        self.name = name
        self.done = False
        self._names, self._marked = names, marked
        self._scanner = JsonScanner()
        self._bare = name is not None  # the whole object is the arguments
        self._key: str | None = None  # of the member that is being written; "" for one that is passed over
        self._keys: set[str] = set()
        self._raw: list[str] = []  # of the key or value that is being written
        self._arguments: list[str] = []  # what has not been taken
        self._has_arguments = False

    @property
    def known(self) -> bool:
        """Tells whether this is a call for sure."""
        return self.name is not None and (self._has_arguments or self.done)

    def take(self) -> str:
        """Returns the text of the arguments since the last time: the beginning of a JSON object that any reader takes,
        whatever the model wrote (`JsonScanner.push`)."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def push(self, char: str) -> None:
        """Takes a character. Raises ValueError where the text is no JSON, or JSON that is no call."""
        scanner = self._scanner
        before, depth = scanner.state, scanner.depth
        if depth == 0 and char != "{" and before != "end":
            if char in _BLANK:
                return
            raise ValueError(f"expected an object, found {char!r}")
        written = scanner.push(char)
        if self._bare:
            self._arguments.append(written)
            self._has_arguments = True
        elif depth == 1 and before != "end":
            self._member(char, written, before)
        elif depth > 1:
            self._value(written)
            if scanner.depth == 1:
                self._end_value()
        if scanner.state == "end":
            self._end()

    def _end(self) -> None:
        self.done = True
        if self.name is None:
            raise ValueError("no function is named")
        if not self._has_arguments:
            if "" in self._keys and not self._marked:
                raise ValueError("there are members of other objects and no arguments")
            self._arguments.append("{}")

    def _member(self, char: str, written: str, before: str) -> None:
        """Takes a character of the object itself: of a key, or of a value that is no container, or the start of one."""
        state = self._scanner.state
        if before == "number" and state not in ("number", "literal"):
            self._end_value()  # by its delimiter
        elif self._key is None:
            if before == "key" and state == "string":
                self._raw = [char]
            elif before in ("string", "escape", "hex"):
                self._raw.append(written)
                if state == "colon":
                    self._begin_value(json.loads("".join(self._raw)))
        elif before != "colon" and not (before == "value" and char in _BLANK):
            self._value(written)
            if state == "after":
                self._end_value()

    def _begin_value(self, key: str) -> None:
        kind = next((kind[0] for kind in (_NAME_KEYS, _ARGUMENT_KEYS) if key in kind), "")
        if not kind and key not in _OTHER_KEYS:
            if not self._marked and self.name is None:
                raise ValueError(f"a call has no {key!r}")
            self._keys.add("")
        self._key, self._raw = "" if kind in self._keys else kind, []
        self._keys |= {kind} if kind else set()

    def _value(self, written: str) -> None:
        if self._key == "arguments" and (self._has_arguments or (written == "{" and not self._raw)):
            self._has_arguments = True
            self._arguments.append(written)
        elif self._key:
            self._raw.append(written)

    def _end_value(self) -> None:
        key, self._key = self._key, None
        if key == "name":
            name = json.loads("".join(self._raw))
            if isinstance(name, dict):  # as OpenAI's API nests calls
                given = next((name[key] for key in _ARGUMENT_KEYS if key in name), None)
                name = name.get("name")
                if given is not None and "arguments" not in self._keys:
                    self._keys.add("arguments")
                    self._take_arguments(given)
            if not isinstance(name, str) or name not in self._names:
                raise ValueError(f"there is no function {name!r}")
            self.name = name
        elif key == "arguments" and not self._has_arguments:
            self._take_arguments(json.loads("".join(self._raw)))

    def _take_arguments(self, value: Any) -> None:
        """Takes arguments that are complete. Some models write the object as a text, or nothing at all."""
        text = value.strip() if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        inner = JsonScanner()
        text = "{}" if text in ("", "null") else "".join(map(inner.push, text))
        if not text.startswith("{") or (text != "{}" and inner.state != "end"):
            raise ValueError("the arguments are no object")
        self._has_arguments = True
        self._arguments.append(text)


class InputReader:
    """Reads the input of a custom tool from the arguments of a call while they grow; arguments that are none, as of a
    model that was not held to them, are the input as they are."""

    def __init__(self) -> None:
        self._held: list[str] = []  # all of the beginning
        self._begun = 0  # characters of `_INPUT` that were found
        self._rest = ""  # what the next piece may change
        self._state = "begin"  # then "text", and "end" or "raw"

    def push(self, arguments: str) -> str:
        """Returns the text that the next piece of the arguments adds."""
        if self._state == "begin":
            arguments = self._begin(arguments)
        if self._state != "text":
            return arguments if self._state == "raw" else ""
        text = self._rest + arguments
        whole = _CERTAIN.match(text)
        assert whole is not None
        self._rest = text[whole.end() :]
        if self._rest.startswith('"'):
            self._state = "end"
        return well_formed(json.loads(f'"{whole.group()}"', strict=False))  # half a character is none

    def _begin(self, arguments: str) -> str:
        """Takes a piece of the beginning. Returns what of it, or of all until now, is for the state that follows."""
        self._held.append(arguments)
        for i, char in enumerate(arguments):
            if char == _INPUT[self._begun]:
                self._begun += 1
                if self._begun == len(_INPUT):
                    self._state = "text"
                    return arguments[i + 1 :]
            elif self._begun in _IN_KEY or not char.isspace():
                self._state = "raw"
                return "".join(self._held)
        return ""

    def finish(self) -> str:
        """Returns the text that was held back: of arguments that are none."""
        return "".join(self._held) if self._state == "begin" else ""
