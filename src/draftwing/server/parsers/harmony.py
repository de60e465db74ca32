"""Reads harmony, the format of gpt-oss: an answer is several messages, each with a channel and perhaps a recipient.

    <|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|>
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>

Analysis is reasoning, a message to one of the request's functions a call, and what is left is for the reader
(https://cookbook.openai.com/articles/openai-harmony). OpenAI's library for it reads tokens of one vocabulary, which it
takes from the net and checks; here it is text, as with all formats, so that a checkpoint's own tokenizer will do.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from draftwing.server.parsers.call import CallReader
from draftwing.server.parsers.message import MessageReader, MessageStyle, Part, Thought
from draftwing.server.parsers.reasoning import CHANNEL, END, MESSAGE, START
from draftwing.server.parsers.tools import CallPiece, new_call_id
from draftwing.text.detok import partial_end

if TYPE_CHECKING:
    from draftwing.text.tokenizer import Tokenizer

ENDS = (END, "<|call|>", "<|return|>", START)  # of a message's text; the next one may begin without an end
_END = re.compile("|".join(map(re.escape, ENDS)))
_NAMESPACE = "functions."
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_JOINT = "\n"  # between messages of a kind
MAX_HEADER = 1000  # characters of a header; a function's name has at most 64
_ROLE = "assistant"
_AFTER_ROLE = (CHANNEL, MESSAGE, "<|constrain|>", "to=")  # what goes on with a header, which says this first of all

Kind = Literal["thought", "text", "call"]


def _may_be_header(text: str) -> bool:
    """Returns whether a header begins as the text does, or may begin so once there is more of it. text: at most
    `MAX_HEADER` characters."""
    text = text.lstrip().removeprefix(START)
    if START.startswith(text) or _ROLE.startswith(text):
        return True
    text = text.removeprefix(_ROLE).lstrip()
    return any(part.startswith(text) or text.startswith(part) for part in _AFTER_ROLE)


class HarmonyReader(MessageReader):
    """Reads one answer, as `MessageReader` does.

    What does not begin as a header does, or goes on for longer than one, is text for the reader.
    Messages to what is no function of the request, such as tools that the model believes to have, are reasoning.
    `reasoning_tokens` counts the tokens of reasoning with the markers around it.
    """

    def __init__(self, style: MessageStyle, tokenizer: Tokenizer) -> None:
        super().__init__(style, tokenizer)
        self._kind: Kind | None = "text" if style.start == "closed" else None  # None: in a header
        self._rest = ""  # text that the next one may change
        self._begun: set[Kind] = set() if self._kind is None else {self._kind}
        self._thought: list[str] = []  # that was not given out
        self._call: CallReader | None = None
        self._named = False  # whether the call was given out
        self._count_calls = 0
        self._parts: list[Part] = []
        self._token_ids = tuple(map(tokenizer.backend.token_to_id, (MESSAGE, *ENDS)))
        self._seen = 0  # tokens that were counted, the header's that are open, and what the message is
        self._header: list[int] = []
        self._token_kind: Kind | None = self._kind

    def push(self, text: str, final: bool, ids: Sequence[int]) -> list[Part]:
        self._parts, text, at = [], self._rest + text, 0
        self._rest = ""
        while at < len(text):
            at = self._in_header(text, at) if self._kind is None else self._in_message(text, at, final)
        if final:
            self._end_message()
            if self._rest and not self._begun and "<|" not in self._rest:  # no harmony at all
                self._give(self._rest)
        self._count_tokens(ids)
        return self._given(self._parts, final)

    # Both take text from a place on, and return where what is left of it begins; what has to wait is in `_rest`.

    def _in_header(self, text: str, at: int) -> int:
        may_be, limit = _may_be_header(text[at : at + MAX_HEADER]), MAX_HEADER + len(MESSAGE)
        found = text.find(MESSAGE, at, at + limit) if may_be else -1
        if found < 0 and may_be and len(text) - at < limit:
            self._rest = text[at:]
            return len(text)
        if found < 0:
            self._begin_message("")
            return at
        self._begin_message(text[at:found])
        return found + len(MESSAGE)

    def _in_message(self, text: str, at: int, final: bool) -> int:
        end = _END.search(text, at)
        if end is not None:
            self._take(text[at : end.start()])
            self._end_message()
            self._kind = None
            return end.end()
        text = text[at:]
        sure = len(text) - (0 if final else max(partial_end(text, marker) for marker in ENDS))
        self._take(text[:sure])
        self._rest = text[sure:]
        return at + len(text)

    def _begin_message(self, header: str) -> None:
        self._kind = kind = self._kind_of(header)
        again, self._begun = kind in self._begun, self._begun | {kind}
        if kind == "call":
            self._call, self._named = CallReader(self._style.names, self._function(header)), False
        elif kind == "text" and again:
            self._give(_JOINT)
        elif kind == "thought":
            if not self._style.separate:
                self._give(f"{header.removeprefix(START)}{MESSAGE}")
            elif again:
                self._thought.append(_JOINT)

    def _kind_of(self, header: str) -> Kind:
        channel = _CHANNEL_NAME.search(header)
        if _RECIPIENT.search(header):
            return "thought" if self._function(header) is None else "call"
        return "thought" if channel is not None and channel[1] == "analysis" else "text"

    def _function(self, header: str) -> str | None:
        """Returns the function that a message calls; models leave out its namespace at times, and a tool that they know
        may be one of the request's."""
        recipient = _RECIPIENT.findall(header)[-1]
        names = (recipient, recipient.removeprefix(_NAMESPACE))
        return next((name for name in names if name in self._style.names), None)

    def _take(self, text: str) -> None:
        """The next text of the message."""
        if self._kind == "call":
            self._arguments(text)
        elif self._kind == "text" or not self._style.separate:
            self._give(text)
        else:
            self._thought.append(text)
            if self._style.stream_reasoning:
                self._give_thought()

    def _arguments(self, text: str) -> None:
        """Arguments are an object; where they stop being one, the call ends."""
        for char in text:
            if self._call is None or self._call.done:
                return
            try:
                self._call.push(char)
            except ValueError:
                self._end_call()
                return
        self._give_call()

    def _end_message(self) -> None:
        if self._kind == "call":
            self._end_call()
        elif self._kind == "thought" and not self._style.separate:
            self._give(END)
        elif self._kind == "thought":
            self._give_thought()

    def _end_call(self) -> None:
        if self._call is not None:
            if not self._call.known:  # the message is empty, or no object from its beginning
                for char in "{}":
                    self._call.push(char)
            self._give_call()
            self._count_calls += 1
        self._call = None

    def _give(self, text: str) -> None:
        if text:
            self._parts.append(text)

    def _give_thought(self) -> None:
        thought, self._thought = "".join(self._thought), []
        if thought:
            self._parts.append(Thought(thought))

    def _give_call(self) -> None:
        call, index = self._call, self._count_calls
        if call is None or (index and not self._style.parallel):
            return
        if not self._named:
            self._parts.append(CallPiece(index, "", new_call_id(), call.name))
            self._named = True
        text = call.take()
        if text:
            self._parts.append(CallPiece(index, text))

    def _count_tokens(self, ids: Sequence[int]) -> None:
        message, *ends = self._token_ids
        for token in ids[self._seen :]:
            if self._token_kind is None:
                if token in ends:  # what came was no header
                    self._header = []
                self._header.append(token)
                if token == message:
                    header = self._tokenizer.decode(self._header, skip_special_tokens=False)
                    self._token_kind = self._kind_of(header)
                    self.reasoning_tokens += len(self._header) if self._token_kind == "thought" else 0
                    self._header = []
            else:
                self.reasoning_tokens += self._token_kind == "thought"
                if token in ends:
                    self._token_kind = None
        self._seen = len(ids)


def harmony_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages as the chat template of gpt-oss wants them: reasoning is called `thinking`, a message makes one
    call, whose result follows it, and says nothing else."""
    out: list[dict[str, Any]] = []
    waiting: dict[str | None, deque[dict[str, Any]]] = {}  # messages of calls whose turn has not come, by their id
    for given in messages:
        message = dict(given)
        thinking = message.pop("reasoning_content", None)
        if message.get("role") == "tool":
            mine = waiting.get(message.get("tool_call_id"))
            if mine:
                out.append(mine.popleft())
        else:
            out += chain.from_iterable(waiting.values())
            waiting.clear()
        calls = message.get("tool_calls") or []
        if calls:
            why = [text for text in (thinking, message.get("content")) if text]
            more = {"thinking": _JOINT.join(why)} if why else {}
            first, *others = ({**message, "content": "", "tool_calls": [call]} for call in calls)
            out.append(first | more)
            for other in others:
                waiting.setdefault(other["tool_calls"][0].get("id"), deque()).append(other)
            continue
        out.append(message | ({"thinking": thinking} if thinking else {}))
    return [*out, *chain.from_iterable(waiting.values())]
