"""Finds tool calls in what a model writes, in the styles of the common families, while the text grows."""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass, replace

from draftwing.server.parsers.call import CallReader
from draftwing.text.detok import partial_end


@dataclass(frozen=True)
class ToolStyle:
    """Says how a family writes calls: JSON objects with a name and `arguments`, one or an array of them, between
    markers.

    begin, end: the markers, where there are any.  bare: characters that start calls, without a marker, at the very
    start of an answer.  separator: `name separator {arguments}` is another form behind `begin`.  given_id: between the
    two there may be this and an id.  arguments: the key that models of the family know.  id_length: what their
    templates ask of call ids.
    """

    begin: str | None = None
    end: str | None = None
    bare: str = ""
    separator: str | None = None
    given_id: str | None = None
    arguments: str = "arguments"
    id_length: int = 24

    @property
    def markers(self) -> list[str]:
        found = (self.begin, self.end, self.separator, self.given_id)
        return [marker for marker in found if marker is not None]


_HERMES = ToolStyle("<tool_call>", "</tool_call>")
_LLAMA = ToolStyle("<|python_tag|>", bare="{", arguments="parameters")
_MISTRAL = ToolStyle("[TOOL_CALLS]", separator="[ARGS]", given_id="[CALL_ID]", id_length=9)
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
    """Returns how calls are written by the family whose chat template this is; None where it does not say."""
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
    them; of a custom tool, that of its input."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None
    custom: bool = False


Piece = str | CallPiece
_WHITE = re.compile(r"\s*")
_BLANK, _BETWEEN_CALLS = " \t\r\n", " \t\r\n,;"
_BETWEEN = re.compile(f"[{_BETWEEN_CALLS}]*")
_FENCE = re.compile(r"```[A-Za-z_]{0,16}[ \t\r\n]{0,8}")  # of code, which some models put around calls
_MAX_ID = 64  # characters of an id that the model gives a call


def new_call_id(length: int = 24) -> str:
    """Returns the id of a call; length: of `ToolStyle`."""
    number = secrets.token_hex(12)
    return number[:9] if length == 9 else f"call_{number}"


class ToolParser:
    """Splits one answer into text and calls, in their order.

    Something is a call from where it names one of the functions and its arguments begin; they are given out as they
    come, and are incomplete where the answer is cut. What looked like a call before but is none is text, with its
    markers. Where arguments stop being JSON the call ends. What follows it up to the end marker, or the next call's, is
    lost then, and so is what is no call behind another one in the same list or between the same markers. Whitespace
    around calls is dropped, but for that between two texts, of which the last stays: words do not run together.
    Brackets too many, end markers too many and code fences are dropped.
    """

    def __init__(
        self, style: ToolStyle, names: Collection[str], parallel: bool = True, needs_marker: bool = False,
        only_calls: bool = False,
    ) -> None:  # fmt: skip
        """names: of the functions.  parallel: whether calls after the first are given out.  needs_marker: nothing is a
        call without the family's marker. Else it may be left out at the start of the answer and behind another call.
        only_calls: a grammar holds the answer to them: what is cut before its arguments is one, and no text."""
        self._style, self._names, self._parallel = style, frozenset(names), parallel
        forms = (style.separator, style.given_id, "{") if style.separator else ()
        self._openings = sorted(f"{name}{form}" for name in self._names for form in forms)
        self._only_calls = only_calls
        self._starts = style.bare or ("" if needs_marker else "{")
        self._step = self._text
        self._fresh = True  # nothing but whitespace has come
        self._trim = False  # whitespace that comes next belongs to a call
        self._said = False  # a text has come
        self._gap = ""  # whitespace around calls, for the case that another text comes
        self._held: list[str] = []  # text that the next one may change
        self._idle = ""  # characters, of which more would not
        self._raw: list[str] = []  # of what may turn out to be no call
        self._marked = False  # a marker was there, before it
        self._inside = False  # a call came, and the marker or bracket behind it is still to come
        self._array = False
        self._fenced = False
        self._call: CallReader | None = None
        self._label = ""  # a name before the separator, or an id
        self._name = ""  # before an id
        self._out: list[Piece] = []
        self._announced = False
        self.calls = 0

    def push(self, delta: str, final: bool = False) -> list[Piece]:
        """Returns what became certain, a text perhaps in pieces. Only what may be the beginning of a call waits. The
        work is linear in the text, however it is cut."""
        if self._idle and not final and not delta.strip(self._idle):
            self._held.append(delta)
            return []
        self._out = []
        text, at = "".join(self._held) + delta, 0
        self._held, self._idle = [], ""
        while at < len(text):
            at = self._step(text, at)
        self._arguments()
        if final:
            self._finish()
        return self._out

    def _emit(self, text: str) -> None:
        if text:
            self._out.append(self._gap + text if self._said else text)
            self._said, self._gap = True, ""

    def _part(self, blank: str) -> None:
        """Keeps whitespace that stands before or behind a call."""
        self._gap = "".join(filter(str.isspace, blank)) or self._gap

    # Each step takes text from a place on, and returns where what is left of it begins, or keeps it in `_held` and
    # returns its end.

    def _hold(self, text: str, at: int, idle: str = _BLANK) -> int:
        """idle: characters that say nothing, however many there are."""
        held = text[at:]
        self._held, self._idle = [held], "" if held.strip(idle) else idle
        return len(text)

    def _text(self, text: str, at: int) -> int:
        if self._trim or self._fresh:
            body = _end(_WHITE, text, at)
            if body == len(text):
                return self._hold(text, at)
            if self._trim:
                self._part(text[at:body])
            else:
                start = self._behind_fence(text, body)
                if start == len(text):
                    return self._hold(text, at)
                if text[start] in self._starts:
                    self._begin(text[at:start], marked=False)
                    return start
            at = body if self._trim else at
        self._trim = self._fresh = self._fenced = False
        found, marker = self._marker(text, at)
        if marker is None:
            sure = text[at:found].rstrip() if found < len(text) or self._style.begin else text[at:]
            self._emit(sure)
            return self._hold(text, at + len(sure)) if at + len(sure) < len(text) else len(text)
        if marker == self._style.end:
            self._emit(text[at:found])
            self._inside = False
        else:
            before = text[at:found].rstrip()
            self._emit(before)
            self._begin(text[at + len(before) : found] + marker, marked=True)
        return found + len(marker)

    def _marker(self, text: str, at: int) -> tuple[int, str | None]:
        """Finds the next marker: its place, and which one it is; else the place where one may begin, and None."""
        begin, end = self._style.begin, self._style.end if self._inside else None
        found = text.find(begin, at) if begin else -1
        ended = text.find(end, at, found if found >= 0 else len(text)) if end else -1
        if ended >= 0:
            return ended, end
        if found >= 0:
            return found, begin
        return len(text) - max(partial_end(text[at:], marker) if marker else 0 for marker in (begin, end)), None

    def _begin(self, raw: str, marked: bool) -> None:
        """A call is to begin."""
        self._fresh = self._trim = self._array = self._inside = False
        self._raw, self._marked, self._step = [raw], marked, self._open

    def _behind_fence(self, text: str, at: int) -> int:
        """Returns where what a code fence begins with begins, or the same place where there is none; the end of the
        text where that does not say."""
        if not "```".startswith(text[at : at + 3]):
            return at
        fence = _FENCE.match(text, at)
        if fence is None or fence.end() == len(text):
            return len(text)
        self._fenced = True
        return fence.end()

    def _open(self, text: str, at: int) -> int:
        """Behind a marker, or a bracket: a call is to begin."""
        begin, at = at, _end(_WHITE, text, at)
        self._raw.append(text[begin:at])
        if at == len(text):
            return at
        start = self._behind_fence(text, at)
        if start == len(text):
            return self._hold(text, at)
        self._raw.append(text[at:start])
        at = start
        if text[at] == "{":
            self._call, self._step = CallReader(self._names, marked=self._marked), self._object
            return at
        if text[at] == "[" and not self._array:
            self._array = True
            self._raw.append("[")
            return at + 1
        if self._style.separator is None or self._array:
            return self._no_call(at)
        self._label, self._step = "", self._named
        return at

    def _named(self, text: str, at: int) -> int:
        label, style = self._label + text[at], self._style
        first = bisect_left(self._openings, label)
        if first == len(self._openings) or not self._openings[first].startswith(label):
            return self._no_call(at)
        if text[at] == "{" and self._label in self._names:
            return self._begin_arguments(self._label, at)
        self._label = label
        self._raw.append(text[at])
        for marker in (style.separator, style.given_id):
            name = label.removesuffix(marker or "")
            if name != label and name in self._names:
                if marker == style.separator:
                    return self._begin_arguments(name, at + 1)
                self._label, self._name, self._step = "", name, self._given_id
        return at + 1

    def _given_id(self, text: str, at: int) -> int:
        """Behind a name, in the id that the model gives its call. Ids are ours, so that none comes twice."""
        separator = self._style.separator
        assert separator is not None
        if len(self._label) == _MAX_ID + len(separator):
            return self._no_call(at)
        self._label += text[at]
        self._raw.append(text[at])
        return self._begin_arguments(self._name, at + 1) if self._label.endswith(separator) else at + 1

    def _begin_arguments(self, name: str, at: int) -> int:
        self._call, self._step = CallReader(self._names, name), self._object
        return at

    def _object(self, text: str, at: int) -> int:
        call = self._call
        assert call is not None
        for place in range(at, len(text)):
            try:
                call.push(text[place])
            except ValueError:
                self._raw.append(text[at:place])
                return self._no_call(place)
            if call.known and not self._announced:
                self._announce(call)
            if call.done:
                self._arguments()
                self._call, self._announced, self._raw, self._step = None, False, [], self._after
                self._inside = self._array or self._closes
                return place + 1
        if not self._announced:
            self._raw.append(text[at:])
        return len(text)

    @property
    def _closes(self) -> bool:
        """Returns whether an end marker belongs to what was opened."""
        return self._marked and self._style.end is not None

    def _after(self, text: str, at: int) -> int:
        """Behind a call: another one, or the end of the calls."""
        body = _end(_BETWEEN, text, at)
        begin, end = self._style.begin, self._style.end
        fence = "```" if self._fenced else None
        markers = [marker for marker in (begin, end, fence) if marker]
        if body == len(text) or any(
            len(text) - body < len(marker) and marker.startswith(text[body:]) for marker in markers
        ):
            return self._hold(text, at, _BETWEEN_CALLS)
        if fence and text.startswith(fence, body):
            self._fenced = False
            return body + len(fence)
        if end and text.startswith(end, body):
            self._inside = self._array = self._marked = False
            return body + len(end)
        if begin and text.startswith(begin, body):
            self._begin(begin, marked=True)
            return body + len(begin)
        if text[body] == "{" and (self._inside or self._starts):
            self._raw, self._step = [], self._open
            self._marked = self._marked and self._inside
            return body
        if text[body] == "]":
            self._array, self._inside = False, self._closes
        if text[body] in "]}":
            return body + 1
        self._array, self._trim, self._step = False, True, self._text
        return at

    def _skip(self, text: str, at: int) -> int:
        """Behind a call that broke: nothing up to a marker is text."""
        self._inside = self._style.end is not None
        found, marker = self._marker(text, at)
        if marker is None:
            return self._hold(text, found) if found < len(text) else len(text)
        self._step = self._after
        return found

    def _no_call(self, at: int) -> int:
        """Ends what was no call: it is text, and so is what comes from there on, but behind a call."""
        self._arguments()
        if self._announced or self._inside:
            self._step, self._array = self._skip, False
        else:
            self._trim = False
            self._emit("".join(self._raw))
            self._array, self._step = False, self._text
        self._call, self._announced, self._raw = None, False, []
        return at

    def _announce(self, call: CallReader) -> None:
        self._announced = True
        raw = "".join(self._raw)
        self._part(raw[: len(raw) - len(raw.lstrip())])
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
        held, end = "" if self._trim else "".join(self._held), self._style.end
        if self._only_calls and (self._step != self._text or not self._said):
            pass
        elif self._step == self._after:
            body = held.lstrip(_BETWEEN_CALLS)
            # A cut end marker is dropped with the whitespace before it: the call is complete.
            cut = (end and end.startswith(body)) or (self._fenced and "```".startswith(body))
            self._part(held[: len(held) - len(body)])
            self._emit("" if cut else body)
        elif self._step == self._text and self._inside and end and end.startswith(held.strip()):
            self._emit(held if held.isspace() else "")
        elif self._step != self._skip and not self._announced:
            self._emit("".join(self._raw) + held)
        self._held, self._raw = [], []


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Returns the end of what a pattern, which may match nothing, matches from a place on."""
    found = pattern.match(text, at)
    assert found is not None
    return found.end()
