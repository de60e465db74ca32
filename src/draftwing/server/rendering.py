"""What the renderings of all dialects share: how a response is sent, and how an answer becomes a list of blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from draftwing.server.generation import Generation
from draftwing.server.http import EventStream, unless_disconnected
from draftwing.server.parsers.message import MessageReader, Part, Thought
from draftwing.server.parsers.tools import CallPiece
from draftwing.text.answer import Answer

Event = tuple[str, dict[str, Any]]  # its name and data


class Rendering(Protocol):
    """A generation as the response of a dialect."""

    generation: Generation

    def body(self) -> Any:
        """Of a finished generation."""

    def events(self) -> AsyncIterator[str]:
        """Server-sent events while it runs."""


async def respond(request: Request, rendering: Rendering, stream: bool | None) -> Response:
    """Sends the response as events or at once; the generation is aborted when the client goes away."""
    generation = rendering.generation
    if stream:
        return EventStream(request.url.path, rendering.events(), generation.close)
    try:
        await unless_disconnected(request, generation.finish())
    finally:
        generation.close()
    return JSONResponse(rendering.body())


class Blocks(ABC):
    """An answer as a list of blocks, each of reasoning, of text or of one call, and the events by which they grow.

    A subclass says how its dialect writes them: `make` a block that a part begins, and the events when the last of
    `blocks` `began`, when it `grew` by a part, which it adds to the block, and when it `ended`.
    """

    def __init__(self, reader: MessageReader) -> None:
        self.reader = reader
        self.blocks: list[dict[str, Any]] = []
        self._open: type | None = None  # kind of part that the last block is made of

    def push(self, text: str, answer: Answer) -> list[Event]:
        """Events of the next piece of text."""
        events: list[Event] = []
        final = answer.finish_reason is not None
        for part in self.reader.push(text, final, answer.token_ids):
            if type(part) is not self._open or (isinstance(part, CallPiece) and part.name is not None):
                events += [*self._end(), *self._begin(part)]
            events += self.grew(part)
        return [*events, *self._end(answer)] if final else events

    def _begin(self, part: Part) -> list[Event]:
        self._open = type(part)
        self.blocks.append(self.make(part))
        return self.began()

    def _end(self, answer: Answer | None = None) -> list[Event]:
        return self.ended(answer) if self._open is not None else []

    @property
    def last(self) -> int:
        return len(self.blocks) - 1

    @abstractmethod
    def make(self, part: Part) -> dict[str, Any]: ...

    @abstractmethod
    def began(self) -> list[Event]: ...

    @abstractmethod
    def grew(self, part: Part) -> list[Event]: ...

    @abstractmethod
    def ended(self, answer: Answer | None) -> list[Event]:
        """answer: None where another block follows."""


def text_of(part: Part) -> str:
    """What a part adds to its block: reasoning, text or arguments."""
    return part.text if isinstance(part, Thought) else part if isinstance(part, str) else part.arguments
