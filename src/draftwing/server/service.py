"""What the endpoints work on: the engine, the tokenizer, and the names that requests use."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from typing import Any

from draftwing.core import SamplingParams
from draftwing.errors import RequestError
from draftwing.server.bridge import AsyncEngine
from draftwing.server.generation import Generation, Job
from draftwing.server.protocol import ChatRequest, GenerateRequest, OpenAIBody, split_prompts
from draftwing.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
_RESERVED_TEMPLATE_KEYS = frozenset({"messages", "tools", "add_generation_prompt", "conversation", "self"})
_MAX_LOGGED_MODELS = 100
_INLINE_CHARACTERS = 4096  # of all texts of a request; fewer are tokenized at once: a thread costs more than it frees


class Service:
    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.options = engine.info.options
        self.model = engine.info.model_name
        self.started = time.time()
        self._draw = random.Random(self.options.random_seed)
        self._strangers: set[str] = set()

    async def encode(self, field: str, value: str | list[Any]) -> tuple[list[list[int]], bool]:
        """Prompts as token ids from any of the forms, and whether they came as a batch."""
        prompts, batched = split_prompts(field, value)
        # Prompts are all texts or all token ids.
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        ids = await self.tokenize(texts) if texts else [prompt for prompt in prompts if isinstance(prompt, list)]
        if not all(ids):
            raise RequestError(f"{field} gives no tokens", field)
        return ids, batched

    async def tokenize(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        if sum(map(len, texts)) <= _INLINE_CHARACTERS:
            return [self.tokenizer.encode(text, add_special_tokens) for text in texts]
        # In a thread, and as a batch, which leaves the interpreter to the event loop: else every stream would wait.
        return await asyncio.to_thread(self.tokenizer.encode_many, texts, add_special_tokens)

    async def encode_chat(self, body: ChatRequest) -> list[int]:
        conversation = body.conversation()
        extra = body.chat_template_kwargs or {}
        taken = _RESERVED_TEMPLATE_KEYS & extra.keys()
        if taken:
            raise RequestError(f"chat_template_kwargs must not hold {min(taken)!r}", "chat_template_kwargs")
        # Rendering is quick, and a template of the server's own; the text is tokenized as any other.
        text = self.tokenizer.render_chat(conversation, **extra)
        (ids,) = await self.tokenize([text], add_special_tokens=False)
        return ids

    def submit(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        body: OpenAIBody | GenerateRequest,
        names: list[str] | None = None,
    ) -> Generation:
        job_id = body.rid if isinstance(body.rid, str) else uuid.uuid4().hex
        job = Job(prompts, params, names or [job_id] * len(prompts), body.priority or 0, body.cache_salt, job_id)
        return Generation(self.engine, self.tokenizer, job, self._draw)

    def name_for(self, asked: str | None) -> str:
        """The model name of a response: what was asked for, since every name is served by the one model there is."""
        if asked is None:
            return self.model
        if asked != self.model and asked not in self._strangers and len(self._strangers) < _MAX_LOGGED_MODELS:
            self._strangers.add(asked)
            logger.info("a request asks for model %.200r; it is served by %r", asked, self.model)
        return asked
