"""The answers to one HTTP request while they grow. The same for all endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from draftwing.server.engine_client import AsyncEngine
from draftwing.text.answer import Answer


class Generation:
    """Answers that were asked for together.

    All of them are handed to the engine at once, so that the n answers to a prompt can share its prefill.
    Raises EngineDead when made. Iterate or `finish()`, and `close()` in any case.
    """

    def __init__(
        self, engine: AsyncEngine, answers: Sequence[Answer], id: str, prompt_tokens: int, told: bool = False
    ) -> None:
        """answers: as `prepare` makes them.  id: of the response.  prompt_tokens: of all prompts, each counted once.
        told: whether the response says how it was drafted."""
        self.answers, self.id, self.prompt_tokens = answers, id, prompt_tokens
        first = answers[0]
        self.speculates = engine.info.speculates or bool(first.request.prediction)
        self.label: dict[str, Any] = first.label | ({"speculative": first.speculative} if told else {})
        self._by_uid = {answer.request.uid: answer for answer in answers}
        requests = [answer.request for answer in answers]
        self._stream = engine.submit(requests)
        engine.observer.begin(id, requests, answers)

    async def __aiter__(self) -> AsyncIterator[tuple[Answer, str]]:
        """Each answer that made progress, with its new text (empty while a character or stop string is incomplete)."""
        async for output in self._stream:
            answer = self._by_uid[output.uid]
            yield answer, answer.push(output)

    async def finish(self) -> Sequence[Answer]:
        """All answers, once all are complete."""
        async for _ in self:
            pass
        return self.answers

    def close(self) -> None:
        self._stream.close()
