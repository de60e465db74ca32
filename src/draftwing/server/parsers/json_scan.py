"""Follows JSON while it is being written, character by character."""

from __future__ import annotations

import json
import math
import re

MAX_DEPTH = 128  # lists and objects inside of each other; readers of JSON take some 200, with those that are around
_BLANK = " \t\n\r"
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
