"""Reads an answer as a message: reasoning, text and tool calls, in the order in which they come."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from draftwing.server.parsers.call import InputReader
from draftwing.server.parsers.reasoning import ReasoningParser, ReasoningStyle, Start, count_reasoning
from draftwing.server.parsers.tools import CallPiece, ToolParser, ToolStyle

if TYPE_CHECKING:
    from draftwing.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Thought:
    """Reasoning."""

    text: str


Part = Thought | str | CallPiece


@dataclass
class Call:
    """A tool call; `arguments` is JSON, cut where the answer is, or the input of a custom tool."""

    id: str
    name: str
    arguments: str
    custom: bool = False


@dataclass(frozen=True)
class MessageStyle:
    """Says how the answers to one request are read; without styles everything is text.

    start: where answers begin.  names: of the functions that may be called.  customs: of custom tools
    among them.  parallel: whether calls after the first
    are given out.  constrained: a grammar holds the answer, which knows calls by their marker.  separate: False leaves
    reasoning in the text, with its markers.  stream_reasoning: False gives it out at once, when it is complete.
    harmony: messages in channels, which `HarmonyReader` reads; `start` is "closed" where an answer goes on with a text.
    only_calls: nothing but calls can follow the reasoning.
    """

    reasoning: ReasoningStyle | None = None
    start: Start = "closed"
    tools: ToolStyle | None = None
    names: tuple[str, ...] = ()
    customs: frozenset[str] = frozenset()
    parallel: bool = True
    constrained: bool = False
    separate: bool = True
    stream_reasoning: bool = True
    harmony: bool = False
    only_calls: bool = False


class MessageReader:
    """Reads one answer.

    reasoning, content, calls: what was given out so far.  reasoning_tokens: as of `count_reasoning`.
    """

    def __init__(self, style: MessageStyle, tokenizer: Tokenizer) -> None:
        self._kept: tuple[list[str], list[str]] = [], []  # pieces of reasoning and content
        self.calls: list[Call] = []
        self.reasoning_tokens = 0
        self._style, self._tokenizer = style, tokenizer
        self._thoughts = None if style.reasoning is None else ReasoningParser(style.reasoning, style.start)
        self._tools = None
        if style.tools is not None:
            only_calls = style.only_calls and style.constrained
            self._tools = ToolParser(style.tools, style.names, style.parallel, style.constrained, only_calls)
        self._held = ""  # reasoning that is not streamed
        self._written: list[str] = []  # arguments of the newest call, also where it is of a custom tool
        self._input: InputReader | None = None  # of that, where it is of a custom tool
        self._counted = False

    @property
    def only_calls(self) -> bool:
        return self._style.only_calls

    @property
    def reasoning(self) -> str:
        return "".join(self._kept[0])

    @property
    def content(self) -> str:
        return "".join(self._kept[1])

    def calls_end(self, stop: int | str | None) -> bool:
        """Returns whether the answer ends with calls that are to be made. A stop string that cuts the arguments of the
        newest one makes it none: what is there of them would be taken for all that the model wanted.

        stop: what ended the answer, as `Answer.matched_stop`.
        """
        return bool(self.calls) and (not isinstance(stop, str) or _is_json("".join(self._written)))

    def push(self, text: str, final: bool, ids: Sequence[int]) -> list[Part]:
        """Takes the next piece of text; returns what became certain. ids: all tokens of the answer so far."""
        thought, content = ("", text) if self._thoughts is None else self._thoughts.push(text, final)
        self._count(ids)
        if not self._style.separate:
            thought, content = "", text
        elif not self._style.stream_reasoning and self._thoughts is not None:
            self._held += thought
            whole = final or self._thoughts.closed
            thought, self._held = (self._held, "") if whole else ("", self._held)
        parts: list[Part] = [Thought(thought)] if thought else []
        if self._tools is not None:
            parts += self._tools.push(content, final)
        elif content:
            parts.append(content)
        return self._given(parts, final)

    def _count(self, ids: Sequence[int]) -> None:
        if self._thoughts is not None and not self._counted:
            assert self._style.reasoning is not None
            self.reasoning_tokens = count_reasoning(self._thoughts, self._style.reasoning, ids, self._tokenizer)
            self._counted = self._thoughts.closed

    def _given(self, parts: Iterable[Part], final: bool) -> list[Part]:
        """Joins texts, and reasoning, that follow each other, and keeps what is given out."""
        found: list[Part] = []
        for kind, group in groupby(self._with_inputs(parts, final), type):
            texts: list[str] = []
            for part in group:
                if not isinstance(part, CallPiece):
                    texts.append(part if isinstance(part, str) else part.text)
                    continue
                found.append(part)
                if part.name is None:
                    self.calls[-1].arguments += part.arguments
                else:
                    assert part.id is not None
                    self.calls.append(Call(part.id, part.name, part.arguments, part.custom))
            if texts:
                text = "".join(texts)
                found.append(text if kind is str else Thought(text))
                self._kept[kind is str].append(text)
        return found

    def _with_inputs(self, parts: Iterable[Part], final: bool) -> Iterator[Part]:
        """Yields the parts, with inputs in place of the arguments of custom tools."""
        for part in parts:
            if not isinstance(part, CallPiece) or part.name is not None:
                yield from self._end_input()
            if isinstance(part, CallPiece):
                if part.name is not None:
                    self._written = []
                self._written.append(part.arguments)
                if part.name in self._style.customs:
                    self._input = InputReader()
                if self._input is not None:
                    part = replace(part, arguments=self._input.push(part.arguments), custom=True)
            yield part
        if final:
            yield from self._end_input()

    def _end_input(self) -> Iterator[CallPiece]:
        if self._input is None:
            return
        rest, self._input = self._input.finish(), None
        if rest:
            yield CallPiece(len(self.calls) - 1, rest, custom=True)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
