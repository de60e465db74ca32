"""Thinking budgets: from a number of tokens to what the engine needs of it, the model's markers and where the answer
begins."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from draftwing.config.choices import HARMONY_PARSERS
from draftwing.errors import RequestError
from draftwing.requests.request import MAX_MARKER, GenerationRequest, ThinkingBudget
from draftwing.server.parsers.harmony import CHANNEL, END, MESSAGE, START, is_harmony
from draftwing.server.parsers.reasoning import REASONING_STYLES, Start, start_of

if TYPE_CHECKING:
    from draftwing.config.options import Options
    from draftwing.text.tokenizer import Tokenizer

TAIL = 64  # tokens of a prompt that are looked at
_ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"


class Reasoning:
    """How the model reasons. style: its markers; None where they are not known, or where it writes harmony."""

    def __init__(self, options: Options, tokenizer: Tokenizer) -> None:
        named = options.reasoning_parser, options.tool_call_parser
        source = tokenizer.chat_source
        self.harmony = is_harmony(source) if named == (None, None) else bool({*named} & {*HARMONY_PARSERS})
        self.style = None if self.harmony or named[0] is None else REASONING_STYLES[named[0]]
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
