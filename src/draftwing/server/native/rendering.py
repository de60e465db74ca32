"""Answers as /generate reports them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Final

from draftwing.server.http import event
from draftwing.server.service import Generation
from draftwing.text.answer import Answer
from draftwing.text.token_text import TokenTexts

REPEATED: Final = 2048  # log probabilities that every event repeats; all answers of a request have equal parts of it
GROWTH: Final = 1.25  # where there are more, they are in an event once they are so many times those sent before


class _Sent:
    """What events have had of an answer's log probabilities. They may be thousands of times an event's text: if each
    event repeated them all, the bytes of a stream would grow as the square of its answer."""

    def __init__(self, answers: int) -> None:
        """answers: of the request."""
        self._few = REPEATED // answers
        self.prompt = False
        self._answer = 0

    def next(self, answer: Answer) -> tuple[bool, bool]:
        """Returns whether the next event has those of the prompt, and those of the answer."""
        ended, held = answer.finish_reason is not None, answer.logprob_entries
        of_prompt = ended or not self.prompt
        of_answer = ended or held <= self._few or held >= GROWTH * self._answer
        self.prompt = True
        if of_answer:
            self._answer = held
        return of_prompt, of_answer


class Generated:
    """The response to /generate: one answer, or a list of several. Events have the answer so far, log probabilities of
    the prompt in an answer's first and last one, and those of the answer, where they are many, in some (`_Sent`). In
    others the lists are left out: an empty one would be a new start to a client that takes what is behind its own."""

    def __init__(self, generation: Generation, batched: bool, texts: TokenTexts | None) -> None:
        """texts: None leaves texts out of log probabilities."""
        self.generation, self._texts = generation, texts
        self._many = batched or len(generation.answers) > 1

    def body(self) -> Any:
        made = dict[Any, Any]()
        every = [self._now(answer, made=made) for answer in self.generation.answers]
        return every if self._many else every[0]

    async def events(self) -> AsyncIterator[str]:
        answers = self.generation.answers
        sent = {answer.index: _Sent(len(answers)) for answer in answers}
        async for answer, text in self.generation:
            if text or answer.finish_reason is not None:
                of_prompt, of_answer = sent[answer.index].next(answer)
                size = answer.entries - (0 if of_prompt else answer.prompt_entries)
                size -= 0 if of_answer else answer.logprob_entries
                yield await self.generation.render(size, partial(self._event, answer, of_prompt, of_answer))

    def _event(self, answer: Answer, of_prompt: bool, of_answer: bool, large: bool) -> str:
        now = self._now(answer, of_prompt, of_answer)
        return event(now | ({"index": answer.index} if self._many else {}), large)

    def _now(
        self, answer: Answer, of_prompt: bool = True, of_answer: bool = True, made: dict[Any, Any] | None = None
    ) -> dict[str, Any]:
        meta = answer.meta_info(self._texts, of_prompt, of_answer, made)
        return {"text": answer.text, "output_ids": answer.token_ids, "meta_info": meta}
