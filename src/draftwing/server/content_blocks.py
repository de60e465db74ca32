"""How an answer becomes a list of blocks, in the dialects that have such."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from draftwing.server.parsers.message import MessageReader, Part, Thought
from draftwing.server.parsers.tools import CallPiece
from draftwing.server.service import Generation
from draftwing.text.answer import Answer

Event = tuple[str, dict[str, Any]]  # its name and data


class ContentBlocks(ABC):
    """An answer as a list of blocks, each of reasoning, of text or of one call, and the events by which they grow.

    A subclass says how its dialect writes them: `make` a block that a part begins, and the events when the last of
    `blocks` `began`, when it `grew` by a part, which it adds to the block, and when it `ended`.
    """

    def __init__(self, reader: MessageReader) -> None:
        self.reader = reader
        self.blocks: list[dict[str, Any]] = []
        self._open: type | None = None  # kind of part that the last block is made of

    def push(self, text: str, answer: Answer) -> list[Event]:
        """Returns events of the next piece of text."""
        final, pieces = answer.finish_reason is not None, self.pieces(text)
        events = [
            event
            for left, piece in zip(range(len(pieces) - 1, -1, -1), pieces, strict=True)
            for event in self._piece(piece, answer, final and not left)
        ]
        return [*events, *self._end(answer)] if final else events

    def _piece(self, text: str, answer: Answer, final: bool) -> list[Event]:
        events: list[Event] = []
        parts = self.reader.push(text, final, answer.token_ids)
        self.take_parts(parts)
        for part in parts:
            if type(part) is not self._open or (isinstance(part, CallPiece) and part.name is not None):
                events += [*self._end(), *self._begin(part)]
            events += self.grew(part)
        return events

    async def read(self, generation: Generation, text: str, answer: Answer) -> list[Event]:
        """Calls `push`, in a thread where the text is long: a client that reads late gets much of it at once."""
        return await generation.render(len(text), lambda _: self.push(text, answer))

    def _begin(self, part: Part) -> list[Event]:
        self._open = type(part)
        self.blocks.append(self.make(part))
        return self.began()

    def _end(self, answer: Answer | None = None) -> list[Event]:
        return self.ended(answer) if self._open is not None else []

    @property
    def last(self) -> int:
        return len(self.blocks) - 1

    def pieces(self, text: str) -> list[str]:
        """Returns text as it is to be read, one piece after the other."""
        return [text]

    def take_parts(self, parts: Sequence[Part]) -> None:  # noqa: B027 (most need not know)
        """Hears of all parts that came together, before the first one is added."""

    @abstractmethod
    def make(self, part: Part) -> dict[str, Any]: ...

    @abstractmethod
    def began(self) -> list[Event]: ...

    @abstractmethod
    def grew(self, part: Part) -> list[Event]: ...

    @abstractmethod
    def ended(self, answer: Answer | None) -> list[Event]:
        """Returns the events of a block's end. answer: None where another block follows."""


def why_aborted(answer: Answer) -> str:
    """Returns in words that an answer was aborted, and why where that is known."""
    return f"the request was aborted: {(answer.finish_reason or {}).get('message', '')}".rstrip(": ")


def text_of(part: Part) -> str:
    """Returns what a part adds to its block: reasoning, text or arguments."""
    return part.text if isinstance(part, Thought) else part if isinstance(part, str) else part.arguments
