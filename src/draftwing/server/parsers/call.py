"""Reads one tool call while a model writes it: `{"name": "f", "arguments": {...}}`; of a custom tool its input."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from typing import Any

import pydantic_core

from draftwing.server.parsers.json_scan import JsonScanner
from draftwing.text.unicode import well_formed

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
