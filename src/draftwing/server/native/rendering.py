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
    """The response to /generate: one answer, or a list of several. Events have the answer so far, and log probabilities
    of the prompt in an answer's first and last one: they do not change, and may be thousands of times an event's text.
    """

    def __init__(self, generation: Generation, batched: bool, texts: TokenTexts | None) -> None:
        """texts: None leaves texts out of log probabilities."""
        self.generation, self._texts = generation, texts
        self._many = batched or len(generation.answers) > 1

    def body(self) -> Any:
        every = [self._now(answer) for answer in self.generation.answers]
        return every if self._many else every[0]

    async def events(self) -> AsyncIterator[str]:
        begun: set[int] = set()  # indices of answers
        async for answer, text in self.generation:
            if text or answer.finish_reason is not None:
                of_prompt = answer.index not in begun or answer.finish_reason is not None
                begun.add(answer.index)
                size = answer.entries if of_prompt else answer.entries - answer.prompt_entries
                yield await self.generation.render(size, partial(self._event, answer, of_prompt))

    def _event(self, answer: Answer, of_prompt: bool, large: bool) -> str:
        return event(self._now(answer, of_prompt) | ({"index": answer.index} if self._many else {}), large)

    def _now(self, answer: Answer, of_prompt: bool = True) -> dict[str, Any]:
        told = answer.meta_info(self._texts, of_prompt)
        return {"text": answer.text, "output_ids": answer.token_ids, "meta_info": told}
