"""Follows JSON while it is being written, character by character."""

from __future__ import annotations

import json
import re

_BLANK = " \t\n\r"
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_NUMERIC = frozenset("+-.0123456789eE")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_CLOSES = {"{": "}", "[": "]"}


class JsonScanner:
    """Follows one JSON object or array; `push` raises ValueError at the first character that cannot be there.

    depth: containers that are open.  state: what the next character belongs to: "value", "key", "colon", "string",
    "escape", "hex", "literal", "number", "after" (a comma or the container's end), or "end".
    """

    def __init__(self) -> None:
        self.state = "value"
        self._stack: list[str] = []
        self._may_close = False  # the container has nothing in it yet
        self._is_key = False
        self._word = ""  # of a literal or escape
        self._digits: list[str] = []  # of a number

    @property
    def depth(self) -> int:
        return len(self._stack)

    def push(self, char: str) -> str:
        """Returns the character as JSON has it: control characters in strings, which models write as they are, are
        escaped."""
        match self.state:
            case "string":
                return self._string(char)
            case "escape":
                self._escape(char)
            case "hex":
                self._hex(char)
            case "literal":
                self._literal(char)
            case "number" if char in _NUMERIC:
                self._digits.append(char)
            case _:
                self._structure(char)
        return char

    def _string(self, char: str) -> str:
        if char == '"':
            self.state = "colon" if self._is_key else "after"
        elif char == "\\":
            self.state = "escape"
        elif char < " ":
            return json.dumps(char)[1:-1]
        return char

    def _escape(self, char: str) -> None:
        if char == "u":
            self.state, self._word = "hex", ""
        elif char in '"\\/bfnrt':
            self.state = "string"
        else:
            raise ValueError(f"\\{char} is no escape")

    def _hex(self, char: str) -> None:
        if char not in "0123456789abcdefABCDEF":
            raise ValueError(f"{char!r} is no hexadecimal digit")
        self._word += char
        if len(self._word) == 4:
            self.state = "string"

    def _literal(self, char: str) -> None:
        self._word += char
        word = _LITERALS[self._word[0]]
        if not word.startswith(self._word):
            raise ValueError(f"{self._word!r} is no JSON")
        if word == self._word:
            self.state = "after"

    def _structure(self, char: str) -> None:
        """Takes what stands between strings, literals and numbers."""
        if self.state == "number":
            word = "".join(self._digits)
            if not _NUMBER.fullmatch(word):
                raise ValueError(f"{word[:100]!r} is no number")
            self.state = "after"
        if char in _BLANK:
            return
        empty, self._may_close = self._may_close, False
        if self.state in ("after", "value", "key") and self._stack and char == _CLOSES[self._stack[-1]]:
            if self.state != "after" and not empty:
                raise ValueError(f"{char!r} after a comma")
            self._stack.pop()
            self.state = "after" if self._stack else "end"
        elif self.state == "after" and char == ",":
            self.state = "key" if self._stack[-1] == "{" else "value"
        elif self.state == "colon" and char == ":":
            self.state = "value"
        elif self.state in ("key", "value") and char == '"' and self._stack:
            self._is_key, self.state = self.state == "key", "string"
        elif self.state == "value":
            self._value(char)
        else:
            raise ValueError(f"{char!r} is not expected here")

    def _value(self, char: str) -> None:
        if char in _CLOSES:
            self._stack.append(char)
            self.state, self._may_close = "key" if char == "{" else "value", True
        elif not self._stack:
            raise ValueError(f"expected an object or an array, found {char!r}")
        elif char in _LITERALS:
            self.state, self._word = "literal", char
        elif char == "-" or char in "0123456789":
            self.state, self._digits = "number", [char]
        else:
            raise ValueError(f"{char!r} begins no value")
