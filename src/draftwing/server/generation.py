"""What an HTTP request asks for, submitted as one, and its answers while they grow. The same for all endpoints."""

from __future__ import annotations

import random
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftwing.core import GenRequest, LogprobParams, SamplingParams
from draftwing.errors import RequestError
from draftwing.requests import sampling_params as sampling
from draftwing.requests.answer import Answer
from draftwing.requests.options import Speculation
from draftwing.server.engine_client import AsyncEngine
from draftwing.text.bad_words import bad_word_ids
from draftwing.text.tokenizer import Tokenizer

MAX_ANSWERS = 2048  # prompts times n


@dataclass(frozen=True)
class Prompt:
    """One prompt and what is asked for it. name: the id by which the client may abort it. echo: text that its answers
    begin with."""

    ids: list[int]
    params: SamplingParams  # with n
    name: str = ""
    logprobs: LogprobParams | None = None
    echo: str = ""


@dataclass(frozen=True)
class Job:
    """Prompts that were asked together.

    speculation: as `requests.options.speculation` gives it; it is told where `asked` for or where there are drafts.
    prediction: token ids of the text that the answers are expected to resemble.
    """

    prompts: list[Prompt]
    priority: int = 0
    cache_salt: str | None = None
    speculation: Speculation | None = None
    asked: bool = False  # whether the request has a wish for its speculation
    prediction: tuple[int, ...] = ()
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class Generation:
    """The answers to a job, n for each prompt, prompt after prompt; `prompts[answer.index]` is an answer's.

    All of them are handed to the engine at once, so that the n answers to a prompt can share its prefill.
    Raises RequestError or EngineDead when made. Iterate or `finish()`, and `close()` in any case.
    """

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer, job: Job, draw: random.Random) -> None:
        self.job = job
        self.answers: list[Answer] = []
        self.prompts: list[Prompt] = []
        self.speculates = engine.info.speculates or bool(job.prediction)
        self._by_uid: dict[str, Answer] = {}
        count = sum(prompt.params.n for prompt in job.prompts)
        if count > MAX_ANSWERS:
            raise RequestError(f"one request takes at most {MAX_ANSWERS} answers; found {count}", "n")
        speculation = job.speculation or Speculation(None, {})
        used = speculation.used if job.asked or self.speculates else None
        requests, names = [], []
        for prompt in job.prompts:
            bad_word_ids(tokenizer, prompt.params.bad_words)  # refuses
            for one in sampling.answers(prompt.params, draw):
                uid = uuid.uuid4().hex
                requests.append(
                    GenRequest(
                        uid, prompt.ids, one, job.priority, job.cache_salt, prompt.logprobs, speculation.limits,
                        job.prediction,
                    )
                )  # fmt: skip
                names.append(prompt.name or job.id)
                answer = Answer(
                    tokenizer, one, len(self.answers), names[-1], len(prompt.ids), engine.info.options.label,
                    prompt.logprobs, used,
                )  # fmt: skip
                self.answers.append(answer)
                self.prompts.append(prompt)
                self._by_uid[uid] = answer
        self._stream = engine.submit(requests, names)
        engine.observer.begin(job.id, requests, self.answers)

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
    def label(self) -> dict[str, Any]:
        return self.answers[0].label if self.answers else {}

    @property
    def speculative(self) -> dict[str, Any]:
        """What an OpenAI response says of drafts, where the request asked for something."""
        return {"speculative": self.job.speculation.used} if self.job.asked and self.job.speculation else {}

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.job.prompts)

    @property
    def completion_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)
