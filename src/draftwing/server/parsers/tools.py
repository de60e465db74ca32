"""Finds tool calls in what a model writes, in the styles of the common families, while the text grows."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass, replace

from draftwing.server.parsers.call import CallReader
from draftwing.text.detok import partial_end


@dataclass(frozen=True)
class ToolStyle:
    """Says how a family writes calls: JSON objects with a name and `arguments`, one or an array of them, between
    markers.

    begin, end: the markers, where there are any.  bare: characters that start calls, without a marker, at the very
    start of an answer.  separator: `name separator {arguments}` is another form behind `begin`.
    arguments: the key that models of the family know.  id_length: what their templates ask of call ids.
    """

    begin: str | None = None
    end: str | None = None
    bare: str = ""
    separator: str | None = None
    arguments: str = "arguments"
    id_length: int = 24


_HERMES = ToolStyle("<tool_call>", "</tool_call>")
_LLAMA = ToolStyle("<|python_tag|>", bare="{", arguments="parameters")
_MISTRAL = ToolStyle("[TOOL_CALLS]", separator="[ARGS]", id_length=9)
TOOL_STYLES = {
    "hermes": _HERMES,
    "json": ToolStyle(bare="{["),
    "llama3": _LLAMA,
    "llama3_json": _LLAMA,
    "mistral": _MISTRAL,
    "qwen": _HERMES,
    "qwen25": _HERMES,
    "qwen3": _HERMES,
}


def style_of(template: str | None) -> ToolStyle | None:
    """Returns how calls are written by the family whose chat template this is; None where it does not tell."""
    if template is None or any(marker in template for marker in _OTHERS):
        return None
    if '"name"' not in template and "tool_calls" not in template:
        return None
    found = (style for style in (_HERMES, _MISTRAL, _LLAMA) if style.begin and style.begin in template)
    return next(found, None)


# Of families whose calls are no JSON, or that nest it in other markers.
_OTHERS = ("<function=", "<arg_key>", "<|tool_calls_section_begin|>", "<｜tool▁calls▁begin｜>", "<minimax:tool_call>")


@dataclass(frozen=True)
class CallPiece:
    """A new piece of call `index`: its id and name come with the first piece, the text of its arguments with all of
    them."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


Piece = str | CallPiece


def new_call_id(length: int = 24) -> str:
    """The id of a call; length: of `ToolStyle`."""
    number = secrets.token_hex(12)
    return number[:9] if length == 9 else f"call_{number}"


class ToolParser:
    """Splits one answer into text and calls, in their order.

    Something is a call from where it names one of the functions and its arguments begin; they are given out as they
    come, and are incomplete where the answer is cut. What looked like a call before but is none is text, with its
    markers. Where arguments stop being JSON the call ends, and the rest is text. Whitespace around calls is dropped.
    """

    def __init__(self, style: ToolStyle, names: Collection[str], parallel: bool = True) -> None:
        """names: of the functions.  parallel: whether calls after the first are given out."""
        self._style, self._names, self._parallel = style, frozenset(names), parallel
        self._step = self._text
        self._fresh = True  # nothing but whitespace has come
        self._trim = False  # whitespace that comes next belongs to a call
        self._held = ""  # text that the next one may change
        self._raw = ""  # of what may turn out to be no call
        self._array = False
        self._call: CallReader | None = None
        self._label = ""  # a name before the separator
        self._out: list[Piece] = []
        self._announced = False
        self.calls = 0

    def push(self, delta: str, final: bool = False) -> list[Piece]:
        """Returns what became certain. Only what may be the beginning of a call waits."""
        self._out = []
        rest = self._held + delta
        self._held = ""
        while rest:
            rest = self._step(rest)
        self._arguments()
        if final:
            self._finish()
        return self._out

    def _emit(self, text: str) -> None:
        if text and self._out and isinstance(self._out[-1], str):
            self._out[-1] += text
        elif text:
            self._out.append(text)

    # Each step takes text and returns what is left of it, or keeps it in `_held` and returns nothing.

    def _text(self, text: str) -> str:
        if self._trim or self._fresh:
            body = text.lstrip()
            if not body:
                self._held = "" if self._trim else text
                return ""
            if self._fresh and body[0] in self._style.bare:
                self._fresh, self._raw, self._step = False, text[: len(text) - len(body)], self._open
                return body
            text = body if self._trim else text
        self._trim = self._fresh = False
        begin = self._style.begin
        if begin is None:
            self._emit(text)
            return ""
        at = text.find(begin)
        if at >= 0:
            before = text[:at].rstrip()
            self._emit(before)
            self._raw, self._step = text[len(before) : at + len(begin)], self._open
            return text[at + len(begin) :]
        sure = text[: len(text) - partial_end(text, begin)].rstrip()
        self._emit(sure)
        self._held = text[len(sure) :]
        return ""

    def _open(self, text: str) -> str:
        """Behind a marker, or a bracket: a call is to begin."""
        char = text[0]
        if char == "{":
            self._call, self._step = CallReader(self._names), self._object
            return text
        if char == "[" and not self._array:
            self._array = True
        elif not char.isspace():
            if self._style.separator is None or self._array:
                return self._no_call(text)
            self._label, self._step = "", self._named
            return text
        self._raw += char
        return text[1:]

    def _named(self, text: str) -> str:
        separator = self._style.separator
        assert separator is not None
        label = self._label + text[0]
        if not any((name + separator).startswith(label) for name in self._names):
            return self._no_call(text)
        self._label, self._raw = label, self._raw + text[0]
        if label.endswith(separator) and label[: -len(separator)] in self._names:
            self._call, self._step = CallReader(self._names, label[: -len(separator)]), self._object
        return text[1:]

    def _object(self, text: str) -> str:
        call = self._call
        assert call is not None
        for at, char in enumerate(text):
            try:
                call.push(char)
            except (ValueError, RecursionError):  # of arguments inside a string
                self._raw += text[:at]
                return self._no_call(text[at:])
            if call.known and not self._announced:
                self._announce(call)
            if call.done:
                self._arguments()
                self._call, self._announced, self._raw, self._step = None, False, "", self._after
                return text[at + 1 :]
        self._raw += "" if self._announced else text
        return ""

    def _after(self, text: str) -> str:
        """Behind a call: another one, or the end of the calls."""
        body = text.lstrip(" \t\r\n,;")
        begin, end = self._style.begin, self._style.end
        if not body or any(marker and marker != body and marker.startswith(body) for marker in (begin, end)):
            self._held = text
        elif end and body.startswith(end):
            self._end_calls()
            return body[len(end) :]
        elif begin and body.startswith(begin):
            self._array, self._step = False, self._open
            self._raw = text[: len(text) - len(body)] + begin
            return body[len(begin) :]
        elif body[0] == "{":
            self._raw, self._step = text[: len(text) - len(body)], self._open
            return body
        elif body[0] == "]" and self._array:
            self._array = False
            return body[1:]
        else:
            self._end_calls()
            return text
        return ""

    def _end_calls(self) -> None:
        self._array, self._trim, self._step = False, True, self._text

    def _no_call(self, rest: str) -> str:
        """Ends what was no call: it is text, and so is the rest."""
        self._arguments()
        if self._announced:  # this much of it was a call
            self._end_calls()
        else:
            self._emit(self._raw)
            self._array, self._step = False, self._text
        self._call, self._announced, self._raw = None, False, ""
        return rest

    def _announce(self, call: CallReader) -> None:
        self._announced = True
        if self._parallel or self.calls == 0:
            self._out.append(CallPiece(self.calls, "", new_call_id(self._style.id_length), call.name))
        self.calls += 1

    def _arguments(self) -> None:
        """Gives out what is new of the arguments."""
        if self._call is None or not self._announced:
            return
        text, index = self._call.take(), self.calls - 1
        if text and (self._parallel or index == 0):
            last = self._out[-1] if self._out else None
            if isinstance(last, CallPiece) and last.index == index:
                self._out[-1] = replace(last, arguments=last.arguments + text)
            else:
                self._out.append(CallPiece(index, text))

    def _finish(self) -> None:
        if self._step == self._after:
            body, end = self._held.lstrip(" \t\r\n,;"), self._style.end
            # A cut end marker is dropped with the whitespace before it: the call is complete.
            self._emit("" if end and end.startswith(body) else body)
        elif not self._announced:
            self._emit(self._raw + self._held)
        self._held = self._raw = ""
