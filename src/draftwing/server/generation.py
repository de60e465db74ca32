"""What an HTTP request asks for, submitted as one, and its answers while they grow. The same for all endpoints."""

from __future__ import annotations

import random
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from draftwing import params as sampling
from draftwing.answer import Answer
from draftwing.core import GenRequest, SamplingParams
from draftwing.errors import RequestError
from draftwing.server.bridge import AsyncEngine
from draftwing.text.tokenizer import Tokenizer

MAX_ANSWERS = 2048  # prompts times n


@dataclass(frozen=True)
class Job:
    """Prompts as token ids, and for each of them the parameters (with n) and the id that the client may abort."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    names: list[str]
    priority: int = 0
    cache_salt: str | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class Generation:
    """The answers to a job, n for each prompt, prompt after prompt.

    Raises RequestError or EngineDead when made. Iterate or `finish()`, and `close()` in any case.
    """

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer, job: Job, draw: random.Random) -> None:
        self.job = job
        self.answers: list[Answer] = []
        self._by_uid: dict[str, Answer] = {}
        count = sum(params.n for params in job.params)
        if count > MAX_ANSWERS:
            raise RequestError(f"one request takes at most {MAX_ANSWERS} answers; found {count}", "n")
        requests, names = [], []
        for prompt, params, name in zip(job.prompts, job.params, job.names, strict=True):
            for one in sampling.answers(params, draw):
                uid = uuid.uuid4().hex
                requests.append(GenRequest(uid, prompt, one, job.priority, job.cache_salt))
                names.append(name)
                answer = Answer(tokenizer, one, len(self.answers), name, len(prompt))
                self.answers.append(answer)
                self._by_uid[uid] = answer
        self._stream = engine.submit(requests, names)

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

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.job.prompts)

    @property
    def completion_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)
