"""The Python API: the engine in the calling process and thread."""

from __future__ import annotations

import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from types import TracebackType
from typing import TYPE_CHECKING, Any

from draftwing import core
from draftwing.answer import Answer
from draftwing.config import Options
from draftwing.errors import RequestError
from draftwing.params import answers, as_params, check_text, fit_default, show

if TYPE_CHECKING:
    from draftwing.engine.engine import Engine

Params = core.SamplingParams | Mapping[str, Any]
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Completion:
    """One answer. `finish_reason` and `meta_info` are as in `/generate`'s response, token ids without the prompt's."""

    text: str
    token_ids: list[int]
    finish_reason: dict[str, Any]
    meta_info: dict[str, Any]


class LLM:
    """A model, loaded and ready. Options have the server's names (`speculative_algorithm="NGRAM"`, ...).

    Raises ConfigError for an option, CheckpointError for a model that cannot be served. Not thread-safe.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        named = options if model is None else {"model": model} | options
        resolved = Options.from_kwargs(**named).resolve()
        from draftwing.engine.engine import Engine  # after the options are checked: it imports torch

        self._begin(Engine(resolved))

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """Around an engine that is made already; `close` closes it."""
        llm = cls.__new__(cls)
        llm._begin(engine)
        return llm

    def _begin(self, engine: Engine) -> None:
        self.engine = engine
        self._draw = random.Random(engine.options.random_seed)
        self._closed = False

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        params: Params | Sequence[Params] | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[Completion]:
        """Completes prompts, each a text or a list of token ids; `params` is one for all or one per prompt.

        Returns `params.n` completions per prompt, prompt after prompt. Raises RequestError for a prompt that can
        never run; nothing is generated then.
        """
        items: Sequence[Any] = [prompts] if _single(prompts) else prompts
        ids = [self._encode(item, i) for i, item in enumerate(items)]
        return self._run(ids, _spread(params, len(ids)), priority, cache_salt)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | Sequence[Params] | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[Completion]:
        """Answers one conversation, a list of {"role", "content"}, or a list of them. Otherwise as `generate`."""
        if not isinstance(conversations, Sequence) or isinstance(conversations, str) or not conversations:
            raise RequestError(f"expected a conversation or a list of them; found {show(conversations)}", "messages")
        every: Sequence[Any] = [conversations] if isinstance(conversations[0], Mapping) else conversations
        ids = [self.engine.tokenizer.encode_chat(_messages(conversation)) for conversation in every]
        return self._run(ids, _spread(params, len(ids)), priority, cache_salt)

    def close(self) -> None:
        """Gives the model's memory back. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, prompt: Any, index: int) -> list[int]:
        name = f"prompts[{index}]"
        if isinstance(prompt, str):
            ids = self.engine.tokenizer.encode(check_text(prompt, name))
        elif isinstance(prompt, Sequence) and all(isinstance(t, Integral) and not isinstance(t, bool) for t in prompt):
            ids = [int(t) for t in prompt]
        else:
            raise RequestError(f"{name} must be a string or a list of token ids; found {show(prompt)}", name)
        if not ids:
            raise RequestError(f"{name} must not be empty", name)
        return ids

    def _run(
        self,
        prompts: list[list[int]],
        params: list[tuple[core.SamplingParams, bool]],
        priority: int,
        salt: str | None,
    ) -> list[Completion]:
        if salt is not None:
            if not isinstance(salt, str):
                raise RequestError(f"cache_salt must be a string; found {show(salt)}", "cache_salt")
            check_text(salt, "cache_salt")
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise RequestError(f"priority must be an integer; found {show(priority)}", "priority")
        if self._closed:
            raise RuntimeError("this LLM is closed")
        order: list[Answer] = []
        waiting: dict[str, Answer] = {}
        try:
            for prompt, (asked, given) in zip(prompts, params, strict=True):
                fitted = asked if given else fit_default(asked, self.engine.info.context_length - len(prompt))
                for one in answers(fitted, self._draw):
                    uid = uuid.uuid4().hex
                    answer = Answer(self.engine.tokenizer, one, len(order), uid, len(prompt))
                    self.engine.submit(core.GenRequest(uid, prompt, one, priority, salt))
                    order.append(answer)
                    waiting[uid] = answer
            while waiting:
                for output in self.engine.step():
                    answer = waiting[output.uid]
                    answer.push(output)
                    if output.finish_reason is not None:
                        del waiting[output.uid]
        finally:
            self._abort(waiting)
        return [_completion(answer) for answer in order]

    def _abort(self, waiting: Mapping[str, Answer]) -> None:
        """After an exception or Ctrl-C: leaves an engine with nothing to do, whose next outputs are new ones."""
        for uid in waiting:
            self.engine.abort(uid)
        while waiting and not self.engine.idle():
            self.engine.step()


def _single(prompts: Any) -> bool:
    """Whether `prompts` is one prompt: a string or a list of token ids."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts must be a string, token ids, or a list of either; found {show(prompts)}", "prompts"
        )
    return len(prompts) > 0 and isinstance(prompts[0], Integral)


def _messages(conversation: Any) -> list[Message]:
    """A checked conversation; what its template makes of it is the template's matter."""
    if not isinstance(conversation, Sequence) or isinstance(conversation, str) or not conversation:
        raise RequestError(f"a conversation must be a list of messages; found {show(conversation)}", "messages")
    for message in conversation:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"a message must be a dict with role and content; found {show(message)}", "messages")
        for value in message.values():
            if isinstance(value, str):
                check_text(value, "messages")
    return list(conversation)


def _spread(params: Params | Sequence[Params] | None, count: int) -> list[tuple[core.SamplingParams, bool]]:
    """Checked parameters of each prompt, and whether they say how long the answer may be."""
    if isinstance(params, Sequence):
        if len(params) != count:
            raise RequestError(f"params must be one or one per prompt; found {len(params)} for {count}", "params")
        return [_checked(one) for one in params]
    return [_checked(params)] * count


def _checked(params: Params | None) -> tuple[core.SamplingParams, bool]:
    given = params is not None and (not isinstance(params, Mapping) or "max_new_tokens" in params)
    return as_params(params), given


def _completion(answer: Answer) -> Completion:
    assert answer.finish_reason is not None
    return Completion(answer.text, answer.token_ids, answer.finish_reason, answer.meta_info())
