"""Answers as /generate tells them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from draftwing.server.http import event
from draftwing.server.service import Generation
from draftwing.text.answer import Answer
from draftwing.text.token_text import TokenTexts


class Generated:
    """The response to /generate: one answer, or a list of several; events have the text so far."""

    def __init__(self, generation: Generation, batched: bool, texts: TokenTexts | None) -> None:
        """texts: None leaves texts out of log probabilities."""
        self.generation, self._texts = generation, texts
        self._many = batched or len(generation.answers) > 1

    def body(self) -> Any:
        every = [self._now(answer) for answer in self.generation.answers]
        return every if self._many else every[0]

    async def events(self) -> AsyncIterator[str]:
        async for answer, text in self.generation:
            if text or answer.finish_reason is not None:
                yield await self.generation.render(answer.entries, partial(self._event, answer))

    def _event(self, answer: Answer, large: bool) -> str:
        return event(self._now(answer) | ({"index": answer.index} if self._many else {}), large)

    def _now(self, answer: Answer) -> dict[str, Any]:
        return {"text": answer.text, "output_ids": answer.token_ids, "meta_info": answer.meta_info(self._texts)}
