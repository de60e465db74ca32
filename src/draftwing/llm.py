"""The Python API: `LLM` runs the engine in the calling process and thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from draftwing.config.options import Options
from draftwing.engine.session import Session
from draftwing.errors import RequestError
from draftwing.requests.refusals import check_text, show
from draftwing.requests.request import GenerationRequest, logprob_params
from draftwing.requests.sampling_params import SamplingParams
from draftwing.server.parsers.budgets import Reasoning
from draftwing.server.parsers.reasoning import Start, start_of
from draftwing.text.answer import Answer
from draftwing.text.continuation import render_continued
from draftwing.text.token_text import TokenTexts

if TYPE_CHECKING:
    from draftwing.engine.engine import Engine

Params = SamplingParams | Mapping[str, Any]
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Completion:
    """One answer: its text, its token ids without the prompt's, why it ended, and numbers such as
    `meta_info["spec_accept_length"]`. `finish_reason` and `meta_info` are those of `/generate`'s response."""

    text: str
    token_ids: list[int]
    finish_reason: dict[str, Any]
    meta_info: dict[str, Any]


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of `LLM.generate` and `LLM.chat` besides sampling, for all prompts; as in the server's APIs.

    priority: higher runs first.
    cache_salt: requests with different salts share no cache.
    return_logprob and the three fields after it: log probabilities in `meta_info`, as /generate has them.
    return_text_in_logprobs: adds the tokens' texts to them.
    speculative: "off", or the largest draft: {"algorithm", "num_steps", "topk", "num_draft_tokens"}.
    prediction: a text that the answers are expected to resemble; drafts are copied from it.
    """

    priority: int
    cache_salt: str | None
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: Sequence[int] | None
    return_text_in_logprobs: bool
    speculative: str | Mapping[str, Any] | None
    prediction: str | None


class LLM:
    """Loads a model and generates text: `LLM("smollm2", speculative_algorithm="NGRAM")`.

    Options have the server's names; `draftwing serve --help` lists them. None means that an option is not given. Then
    `smollm2` uses its bundled draft head, aliases with a published head use that one, and other models run without
    speculation. `speculative_algorithm="none"` turns it off; a class derived from `Drafter` is an algorithm of your
    own.

    Close it, or use it in a `with` statement, to free the model's memory. Not thread-safe. Raises ConfigError for an
    option that cannot work, CheckpointError for a model that cannot be served.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        named = options if model is None else {"model": model} | options
        resolved = Options.from_kwargs(**named).resolve()
        from draftwing.engine.engine import Engine  # after the options are checked: it imports torch

        self._begin(Engine(resolved))

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """Wraps an engine that exists already; `close` closes it."""
        llm = cls.__new__(cls)
        llm._begin(engine)
        return llm

    def _begin(self, engine: Engine) -> None:
        self.engine = engine
        self._session = Session(engine)
        self._reasoning = Reasoning(engine.info.options, engine.tokenizer)
        self._closed = False

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        params: Params | Sequence[Params] | None = None,
        **wishes: Unpack[RequestOptions],
    ) -> list[Completion]:
        """Completes prompts and returns `params.n` completions per prompt, prompt after prompt.

        prompts: one or several, each a text or a list of token ids.
        params: `SamplingParams` or a dict of its fields, one for all prompts or one per prompt. Fields that are not set
        are the model's defaults (`engine.info.defaults`), as over HTTP.
        wishes: see `RequestOptions`.

        Raises RequestError for a prompt that can never run; nothing is generated then.
        """
        items: Sequence[Any] = [prompts] if _single(prompts) else prompts
        ids = [self._encode(item, i) for i, item in enumerate(items)]
        return self._run(ids, self._spread(params, len(ids)), wishes)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | Sequence[Params] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **wishes: Unpack[RequestOptions],
    ) -> list[Completion]:
        """Answers conversations with the model's chat template. Otherwise as `generate`.

        conversations: one, a list of {"role": ..., "content": ...}, or a list of them.
        chat_template_kwargs: further variables of the chat template.
        continue_final_message: the answers continue the last messages, which must be the assistant's.
        """
        if not isinstance(conversations, Sequence) or isinstance(conversations, str) or not conversations:
            raise RequestError(f"expected a conversation or a list of them; found {show(conversations)}", "messages")
        every: Sequence[Any] = [conversations] if isinstance(conversations[0], Mapping) else conversations
        tokenizer, extra = self.engine.tokenizer, dict(chat_template_kwargs or {})
        render = tokenizer.render_chat
        texts = [
            render_continued(tokenizer, messages, **extra) if continue_final_message else render(messages, **extra)
            for messages in map(_messages, every)
        ]
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        style, starts = self._reasoning.style, None
        if continue_final_message and style is not None:
            starts = [
                start_of(style, text, messages[-1]["content"]) for text, messages in zip(texts, every, strict=True)
            ]
        return self._run(ids, self._spread(params, len(ids)), wishes, starts)

    def close(self) -> None:
        """Frees the model's memory. Safe to call twice."""
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
        elif isinstance(prompt, Sequence) and all(
            issubclass(kind, Integral) and kind is not bool for kind in set(map(type, prompt))
        ):
            ids = list(map(int, prompt))
        else:
            raise RequestError(f"{name} must be a string or a list of token ids; found {show(prompt)}", name)
        if not ids:
            raise RequestError(f"{name} must not be empty", name)
        return ids

    def _run(
        self,
        prompts: list[list[int]],
        params: list[tuple[SamplingParams, bool]],
        wishes: RequestOptions,
        starts: list[Start] | None = None,
    ) -> list[Completion]:
        """starts: where answers begin; None: as the prompts' ends tell."""
        if self._closed:
            raise RuntimeError("this LLM is closed")
        like, context = _checked_wishes(self.engine, wishes), self.engine.info.context_length
        asked = [
            like._replace(prompt_ids=ids, params=wanted if given else wanted.fit(context - len(ids)))
            for ids, (wanted, given) in zip(prompts, params, strict=True)
        ]
        asked = [self._reasoning.bounded(one, starts[i] if starts else None) for i, one in enumerate(asked)]
        answers = self._session.prepare(asked, wishes.get("speculative"))
        for _ in self._session.stream(answers):
            pass
        texts = TokenTexts(self.engine.tokenizer) if wishes.get("return_text_in_logprobs") else None
        return [_completion(answer, texts) for answer in answers]

    def _spread(self, params: Params | Sequence[Params] | None, count: int) -> list[tuple[SamplingParams, bool]]:
        """Checked parameters of each prompt, and whether they say how long the answer may be."""
        if not isinstance(params, Sequence):
            return [self._checked(params)] * count
        if len(params) != count:
            raise RequestError(f"params must be one or one per prompt; found {len(params)} for {count}", "params")
        return [self._checked(one) for one in params]

    def _checked(self, params: Params | None) -> tuple[SamplingParams, bool]:
        """Fields that were not set, in an object or a mapping, are the model's defaults."""
        if params is None or isinstance(params, Mapping):
            params = SamplingParams.read(params or {})
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams or a dict of its fields; found {show(params)}", "params")
        given = params.model_fields_set
        others = {name: value for name, value in self.engine.info.sampling.items() if name not in given}
        return params.replace(**others), "max_new_tokens" in given


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


def _checked_wishes(engine: Engine, wishes: RequestOptions) -> GenerationRequest:
    """A request with all that is asked beside sampling, but for drafts. Raises RequestError."""
    unknown = next((name for name in wishes if name not in RequestOptions.__annotations__), None)
    if unknown is not None:
        raise TypeError(f"unexpected keyword argument {unknown!r}")
    priority, salt, predicted = wishes.get("priority", 0), wishes.get("cache_salt"), wishes.get("prediction")
    for name, text in (("cache_salt", salt), ("prediction", predicted)):
        if text is not None:
            if not isinstance(text, str):
                raise RequestError(f"{name} must be a string; found {show(text)}", name)
            check_text(text, name)
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise RequestError(f"priority must be an integer; found {show(priority)}", "priority")
    logprobs = logprob_params(
        wishes.get("return_logprob"),
        wishes.get("logprob_start_len"),
        wishes.get("top_logprobs_num"),
        wishes.get("token_ids_logprob"),
    )
    prediction = tuple(engine.tokenizer.encode(predicted, add_special_tokens=False)) if predicted else ()
    return GenerationRequest("", [], SamplingParams(), priority, salt, logprobs, None, prediction)


def _completion(answer: Answer, texts: TokenTexts | None) -> Completion:
    assert answer.finish_reason is not None
    return Completion(answer.text, answer.token_ids, answer.finish_reason, answer.meta_info(texts))
