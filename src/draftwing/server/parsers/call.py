"""Reads one tool call while a model writes it: `{"name": "f", "arguments": {...}}`."""

from __future__ import annotations

import json
from collections.abc import Collection

from draftwing.server.parsers.json_scan import JsonScanner

_NAME_KEYS = ("name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type")  # models write them, they say nothing
_BLANK = " \t\n\r"


class CallReader:
    """Reads the JSON object of a call, character by character.

    names: of the functions that there are; any other name means that this is no call.
    name: of the function whose arguments the object is, where the name came before it.
    """

    def __init__(self, names: Collection[str], name: str | None = None) -> None:
        self.name = name
        self.done = False
        self._names = names
        self._scanner = JsonScanner()
        self._bare = name is not None  # the whole object is the arguments
        self._key: str | None = None  # of the member that is being written
        self._keys: set[str] = set()
        self._raw: list[str] = []  # of the key or value that is being written
        self._arguments: list[str] = []  # what has not been taken
        self._has_arguments = False

    @property
    def known(self) -> bool:
        """Tells whether this is a call for sure."""
        return self.name is not None and (self._has_arguments or self.done)

    def take(self) -> str:
        """Returns the text of the arguments since the last time."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def push(self, char: str) -> None:
        """Takes a character. Raises ValueError where the text is no JSON, or JSON that is no call."""
        scanner = self._scanner
        before, depth = scanner.state, scanner.depth
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
            self.done = True
            if not self._has_arguments:
                self._arguments.append("{}")
            if self.name is None:
                raise ValueError("no function is named")

    def _member(self, char: str, written: str, before: str) -> None:
        """Takes a character of the object itself: of a key, or of a value that is no container, or the start of one."""
        state = self._scanner.state
        if before == "number" and state != "number":
            self._end_value()  # by its delimiter
        elif self._key is None:
            if before == "key" and state == "string":
                self._raw = [written]
            elif before in ("string", "escape", "hex"):
                self._raw.append(written)
                if state == "colon":
                    self._begin_value(json.loads("".join(self._raw)))
        elif before != "colon" and not (before == "value" and char in _BLANK):
            self._value(written)
            if state == "after":
                self._end_value()

    def _begin_value(self, key: str) -> None:
        if key not in (*_NAME_KEYS, *_ARGUMENT_KEYS, *_OTHER_KEYS):
            raise ValueError(f"a call has no {key!r}")
        kind = next((kind for kind in (_NAME_KEYS, _ARGUMENT_KEYS) if key in kind), (key,))
        if kind[0] in self._keys:
            raise ValueError(f"{key!r} comes twice")
        self._keys.add(kind[0])
        self._key, self._raw = kind[0], []

    def _value(self, written: str) -> None:
        if self._key == "arguments" and (self._has_arguments or (written == "{" and not self._raw)):
            self._has_arguments = True
            self._arguments.append(written)
        else:
            self._raw.append(written)

    def _end_value(self) -> None:
        key, self._key = self._key, None
        if key == "name":
            name = json.loads("".join(self._raw))
            if not isinstance(name, str) or name not in self._names:
                raise ValueError(f"there is no function {name!r}")
            self.name = name
        elif key == "arguments" and not self._has_arguments:
            # Some models write the object as a string, or nothing at all.
            value = json.loads("".join(self._raw))
            text = "{}" if value is None else value
            if not isinstance(text, str) or not isinstance(json.loads(text), dict):
                raise ValueError("the arguments are no object")
            self._has_arguments = True
            self._arguments.append(text)
