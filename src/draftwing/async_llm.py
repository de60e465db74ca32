"""The Python API for asyncio: `AsyncLLM` runs the engine in a process of its own, as the server does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, aclosing, closing
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np

from draftwing.config.options import Options
from draftwing.engine.session import prepare
from draftwing.llm import Completion, Piece, described, vector_requests
from draftwing.llm_inputs import Inputs, Message, Params, RequestOptions
from draftwing.requests.refusals import check_level
from draftwing.text.pooler import Pooler

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from draftwing.server.engine_client import AsyncEngine
    from draftwing.text.tokenizer import Tokenizer


class AsyncLLM:
    """Loads a model and generates text: `async with AsyncLLM("smollm2") as llm`. Options are those of `LLM`.

    Requests that are made at the same time run in one batch. The engine belongs to the event loop that entered the
    `async with` block, and every method is called on it. A drafter of your own must be in a module that can be
    imported. Raises ConfigError for an option that cannot work; entering raises ConfigError, CheckpointError or
    EngineDead.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        named = options if model is None else {"model": model} | options
        quiet = {"log_level": "warning"}  # of the engine's process; as `LLM`, which shows no lines of its own accord
        self._options = Options.from_kwargs(**(quiet | named)).resolve()
        self._opened = ExitStack()
        self._running = False

    async def __aenter__(self) -> Self:
        from draftwing.server.run import opened

        if self._running:
            raise RuntimeError("this AsyncLLM is running already")
        opening = asyncio.ensure_future(asyncio.to_thread(self._opened.enter_context, opened(self._options)))
        try:
            self._begin(*await asyncio.shield(opening))
        except BaseException:
            await asyncio.wait([opening])  # nothing ends the thread, and the process must not be left behind
            self._opened.close()
            raise
        return self

    def _begin(self, engine: AsyncEngine, tokenizer: Tokenizer) -> None:
        from draftwing.server.service import Service

        self._engine, self._service = engine, Service(engine, tokenizer)
        self._inputs = Inputs(engine.info, tokenizer)
        self._draw = random.Random(engine.info.options.random_seed)
        engine.start()
        self._running = True

    @property
    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer of the model that runs. Raises RuntimeError where none does."""
        self._check_running()
        return self._service.tokenizer

    def _check_running(self) -> None:
        if not self._running:
            raise RuntimeError("this AsyncLLM is not running: use it inside of an `async with` block")

    def get_tokenizer(self) -> Tokenizer:
        """Returns `tokenizer`; the name that vLLM has for it."""
        return self.tokenizer

    def __repr__(self) -> str:
        return described(self, self._options) + ("" if self._running else " (not running)")

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the engine's process; requests that still run fail with EngineDead. Safe to call twice."""
        if self._running:
            self._running = False
            try:
                await self._engine.stop()
            finally:
                self._opened.close()

    async def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        params: Params | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **request_options: Unpack[RequestOptions],
    ) -> Completion:
        """Returns one answer; arguments as `stream`. To cancel the task aborts the request."""
        async with aclosing(
            self.stream(prompt, params, chat_template_kwargs=chat_template_kwargs, **request_options)
        ) as pieces:
            async for piece in pieces:
                if piece.completion is not None:
                    return piece.completion
        raise AssertionError("the last piece has the completion")

    async def sleep(self, level: int = 1) -> None:
        """Does as `LLM.sleep`, once requests that run have ended; one that comes meanwhile waits and wakes it up.

        Raises EngineDead when the engine is gone, and as `LLM.sleep`."""
        check_level(level)
        self._check_running()
        await self._engine.sleep()

    async def wake_up(self) -> None:
        """Does as `LLM.wake_up`. Raises EngineDead when the engine is gone."""
        self._check_running()
        await self._engine.wake_up()

    async def embed(
        self,
        texts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        dimensions: int | None = None,
        *,
        truncate: bool = False,
    ) -> NDArray[np.float32]:
        """Returns a vector for each text or list of token ids; arguments and result as `LLM.embed`. To cancel the task
        aborts the requests.

        Raises RequestError for what can never run, EngineDead when the engine is gone, GenerationError for hidden
        states that are not finite.
        """
        from draftwing.server.service import Generation

        tokenizer, info = self.tokenizer, self._engine.info
        pooler = Pooler(tokenizer, info.pooling, info.hidden_size, info.context_length)
        asked = await asyncio.to_thread(vector_requests, pooler, self._inputs, texts, dimensions, truncate)
        answers = list(prepare(info, tokenizer, asked, None, self._draw))
        tokens = sum(len(one.prompt_ids) for one in asked)
        generation = Generation(self._engine, self._service.pools, answers, answers[0].request.uid, tokens)
        with closing(generation):
            await generation.finish()
        return np.stack([pooler.vector(answer, dimensions) for answer in answers])

    async def stream(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        params: Params | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **request_options: Unpack[RequestOptions],
    ) -> AsyncGenerator[Piece, None]:
        """Yields one answer in pieces, as `LLM.stream`. To close the iterator or cancel its task aborts the request.

        Raises RequestError before anything is generated, EngineDead when the engine is gone,
        GenerationError when it fails at this request.
        """
        from draftwing.server.service import Generation

        tokenizer, service = self.tokenizer, self._service
        # In a thread: chat templates and long prompts take a while.
        request = await asyncio.to_thread(self._inputs.of_one, prompt, params, request_options, chat_template_kwargs)
        await service.check_grammars([(request.params, None)])
        (answer,) = prepare(self._engine.info, tokenizer, [request], request_options.get("speculative"), self._draw)
        seen = 0
        generation = Generation(self._engine, service.pools, [answer], answer.request.uid, len(request.prompt_ids))
        with closing(generation):
            async for _, text in generation:
                ended = answer.finish_reason is not None
                done = Completion.of(answer, self._inputs, request_options) if ended else None
                yield Piece(text, answer.token_ids[seen:], done)
                seen = len(answer.token_ids)
