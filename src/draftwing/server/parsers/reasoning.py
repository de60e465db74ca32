"""Takes reasoning and answer apart while the text grows: models write `<think>why</think>answer`. Makes of a thinking
budget what the engine needs of it: the model's markers, and where the answer begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from draftwing.config.option_fields import HARMONY_PARSERS
from draftwing.errors import RequestError
from draftwing.requests.request import MAX_MARKER, GenerationRequest, ThinkingBudget
from draftwing.text.detok import partial_end

if TYPE_CHECKING:
    from draftwing.config.options import Options
    from draftwing.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ReasoningStyle:
    """begin, end: the markers.  always: the model reasons without being asked, whether or not it writes `begin`."""

    begin: str = "<think>"
    end: str = "</think>"
    always: bool = False


_THINK, _ALWAYS = ReasoningStyle(), ReasoningStyle(always=True)
REASONING_STYLES = {
    "deepseek-r1": _ALWAYS,
    "deepseek_r1": _ALWAYS,
    "deepseek-v3": _THINK,
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "interns1": _THINK,
    "kimi": ReasoningStyle("◁think▷", "◁/think▷"),
    "kimi_k2": _THINK,
    "mimo": _THINK,
    "mistral": ReasoningStyle("[THINK]", "[/THINK]"),
    "qwen3": _THINK,
    "qwen3-thinking": _ALWAYS,
    "step3": _ALWAYS,
}

# Where an answer begins: inside of a block, after one, or where the model may open one.
Start = Literal["open", "closed", "free"]


def start_of(style: ReasoningStyle, prompt: str, continued: str | None = None) -> Start:
    """Tells where the answer to a rendered `prompt` begins: templates open the block, or close an empty one.

    continued: the text of the assistant's message that the answer goes on with, if it does.
    """
    if continued is not None:
        begin, end = continued.rfind(style.begin), continued.rfind(style.end)
        if begin != end:  # not both missing
            return "open" if begin > end else "closed"
        if continued.strip():
            return "closed"
    tail = prompt.rstrip()
    if tail.endswith(style.end):
        return "closed"
    return "open" if style.always or tail.endswith(style.begin) else "free"


class ReasoningParser:
    """Splits one answer.

    A block is at the start of the answer or nowhere, and ends with the first end marker. Markers belong to neither
    part, nor does the whitespace at both ends of the reasoning and before the content that follows. An answer without
    a block is content as it is, a block without an end is all reasoning.
    """

    def __init__(self, style: ReasoningStyle, start: Start) -> None:
        self._style = style
        self._may_begin = start != "closed"
        self._inside = start == "open"  # also when no marker was written
        self._trim = self._inside  # whether whitespace that comes next is dropped
        self._held: list[str] = []
        self._blank = False  # it is whitespace, to which more may come
        self.opened = self._inside
        self.closed = start == "closed"

    def push(self, delta: str, final: bool = False) -> tuple[str, str]:
        """Returns the (reasoning, content) that became certain: only what may be a marker, and whitespace before it,
        waits."""
        if self._blank and delta.isspace() and not final:
            self._held.append(delta)
            return "", ""
        text, self._held, self._blank = "".join(self._held) + delta, [], False
        if self._may_begin:
            body = text.lstrip()
            begin = self._style.begin
            if body.startswith(begin):
                text, self._may_begin = body[len(begin) :], False
                self._inside = self._trim = self.opened = True
            elif begin.startswith(body) and not final:
                self._hold(text)
                return "", ""
            else:
                self._may_begin = False
        return self._reasoning(text, final) if self._inside else ("", self._content(text))

    def _reasoning(self, text: str, final: bool) -> tuple[str, str]:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        end = self._style.end
        at = text.find(end)
        if at >= 0:
            self._inside, self._trim, self.closed = False, True, True
            return text[:at].rstrip(), self._content(text[at + len(end) :])
        if final:
            return text.rstrip(), ""
        sure = text[: len(text) - partial_end(text, end)].rstrip()
        self._hold(text[len(sure) :])
        return sure, ""

    def _hold(self, text: str) -> None:
        self._held, self._blank = [text], text.isspace()

    def _content(self, text: str) -> str:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text


def count_reasoning(parser: ReasoningParser, style: ReasoningStyle, ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """Returns reasoning tokens of an answer whose text `parser` has taken: its first tokens, up to the one that
    completes the end marker, that one included. All of them while the block is open, none without a block."""
    if not parser.opened:
        return 0
    if not parser.closed:
        return len(ids)
    marker = tokenizer.backend.token_to_id(style.end)
    if marker is not None and marker in ids:
        return ids.index(marker) + 1
    low, high = 1, len(ids)  # the marker is text of several tokens: the shortest beginning of the answer that has it
    while low < high:
        middle = (low + high) // 2
        if style.end in tokenizer.decode(ids[:middle], skip_special_tokens=False):
            high = middle
        else:
            low = middle + 1
    return low


START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"


def is_harmony(template: str | None) -> bool:
    """Returns whether a chat template writes harmony."""
    return template is not None and all(marker in template for marker in (START, CHANNEL, MESSAGE))


def writes_harmony(reasoning: str | None, tools: str | None, template: str | None) -> bool:
    """Returns whether a model writes harmony. reasoning, tools: the parsers that are named; without any the chat
    template says it."""
    return is_harmony(template) if reasoning is tools is None else bool({reasoning, tools} & {*HARMONY_PARSERS})


TAIL = 64  # tokens of a prompt that are looked at
_ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"


class Reasoning:
    """How the model reasons. style: its markers; None where they are not known, or where it writes harmony."""

    def __init__(self, options: Options, tokenizer: Tokenizer) -> None:
        named = options.reasoning_parser
        self.harmony = writes_harmony(named, options.tool_call_parser, tokenizer.chat_source)
        self.style = None if self.harmony or named is None else REASONING_STYLES[named]
        self._tokenizer = tokenizer

    @property
    def known(self) -> bool:
        return self.harmony or self.style is not None

    def bounded(
        self, request: GenerationRequest, start: Start | None = None, grammar_after: bool = False
    ) -> GenerationRequest:
        """Returns the request with what its `thinking_budget` asks for. Without a known style it is left to be refused.

        start: where the answer begins; None: as the prompt's end says.  grammar_after: a grammar is of what comes
        after reasoning, too; else it leaves no place for any, and RequestError is raised.
        """
        params = request.params
        if params.thinking_budget is None or not self.known:
            return request
        if start is None:
            start = self._start(self._tokenizer.decode(request.prompt_ids[-TAIL:], skip_special_tokens=False))
        if params.grammar is not None and start != "closed" and not grammar_after:
            raise RequestError(
                "thinking_budget and a grammar, which is of the whole answer here, exclude each other; ask the server "
                "for a chat completion",
                "thinking_budget",
            )
        if start == "closed" and not self.harmony:
            return request._replace(params=params.replace(thinking_budget=None))
        begin, end = self._markers
        if start == "open" and not self.harmony:
            begin = ()
        return request._replace(
            thinking=ThinkingBudget(params.thinking_budget, begin, end, start == "open", again=self.harmony)
        )

    def _start(self, tail: str) -> Start:
        if self.style is not None:
            return start_of(self.style, tail)
        message = tail.rpartition(START)[2]
        if MESSAGE not in message or END in message:
            return "free"
        return "open" if _ANALYSIS in message else "closed"

    @cached_property
    def _markers(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns token ids of the markers of a block's beginning and end."""
        begin, end = (_ANALYSIS, END) if self.style is None else (self.style.begin, self.style.end)
        found = []
        for marker in (begin, end):
            ids = tuple(self._tokenizer.encode(marker, add_special_tokens=False))
            if not 0 < len(ids) <= MAX_MARKER:
                raise RequestError(
                    f"thinking_budget is for markers of at most {MAX_MARKER} tokens; {marker!r} has {len(ids)}",
                    "thinking_budget",
                )
            found.append(ids)
        return found[0], found[1]
