"""What the Python API is asked: from prompts or conversations, parameters and options of a call to requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypedDict

from draftwing.errors import RequestError
from draftwing.requests.refusals import check_text, no_text, show
from draftwing.requests.request import GenerationRequest, logprob_params
from draftwing.requests.sampling_params import SamplingParams, unset
from draftwing.server.parsers.budgets import Reasoning
from draftwing.server.parsers.reasoning import Start, start_of

if TYPE_CHECKING:
    from draftwing.engine.admission import EngineInfo
    from draftwing.text.tokenizer import Tokenizer

Params = SamplingParams | Mapping[str, Any]
Message = Mapping[str, Any]


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


class Inputs:
    """Makes the requests of `LLM` and `AsyncLLM`, without a uid. All methods raise RequestError."""

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer) -> None:
        self._info, self._tokenizer = info, tokenizer
        self._reasoning = Reasoning(info.options, tokenizer)

    def of_prompts(
        self, prompts: Any, params: Params | Sequence[Params] | None, request_options: RequestOptions
    ) -> list[GenerationRequest]:
        """Makes requests of what `LLM.generate` takes."""
        items: Sequence[Any] = [prompts] if _single(prompts) else prompts
        ids = [self._encode(item, i) for i, item in enumerate(items)]
        return self._requests(ids, params, request_options)

    def of_chats(
        self,
        conversations: Any,
        params: Params | Sequence[Params] | None,
        request_options: RequestOptions,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> list[GenerationRequest]:
        """Makes requests of what `LLM.chat` takes."""
        if not isinstance(conversations, Sequence) or isinstance(conversations, str) or not conversations:
            raise RequestError(f"expected a conversation or a list of them; found {show(conversations)}", "messages")
        several: Sequence[Any] = [conversations] if isinstance(conversations[0], Mapping) else conversations
        tokenizer, extra = self._tokenizer, dict(chat_template_kwargs or {})
        render = tokenizer.render_continued if continue_final_message else tokenizer.render_chat
        every = list(map(_messages, several))
        texts = [render(messages, **extra) for messages in every]
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        style, starts = self._reasoning.style, None
        if continue_final_message and style is not None:
            starts = [
                start_of(style, text, messages[-1]["content"]) for text, messages in zip(texts, every, strict=True)
            ]
        return self._requests(ids, params, request_options, starts)

    def of_one(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        params: Params | None,
        request_options: RequestOptions,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> GenerationRequest:
        """Returns the request of a text, of token ids or of one conversation, for one answer."""
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            requests = self.of_chats(prompt, params, request_options, chat_template_kwargs)
        elif _single(prompt):
            requests = self.of_prompts(prompt, params, request_options)
        else:
            raise RequestError(f"expected one prompt or one conversation; found {show(prompt)}", "prompt")
        (request,) = requests
        if request.params.n != 1:
            raise RequestError(f"n must be 1 here; found {request.params.n}", "n")
        return request

    def _encode(self, prompt: Any, index: int) -> list[int]:
        name = f"prompts[{index}]"
        if isinstance(prompt, str):
            ids = self._tokenizer.encode(check_text(prompt, name))
        elif isinstance(prompt, Sequence) and all(
            issubclass(kind, Integral) and kind is not bool for kind in set(map(type, prompt))
        ):
            ids = list(map(int, prompt))
        else:
            raise RequestError(f"{name} must be a string or a list of token ids; found {show(prompt)}", name)
        if not ids:
            raise RequestError(f"{name} must not be empty", name)
        return ids

    def _requests(
        self,
        prompts: list[list[int]],
        params: Params | Sequence[Params] | None,
        request_options: RequestOptions,
        starts: list[Start] | None = None,
    ) -> list[GenerationRequest]:
        """starts: where answers begin; None: as the prompts' ends say."""
        like, context = _request_of(self._tokenizer, request_options), self._info.context_length
        asked = [
            like._replace(prompt_ids=ids, params=wanted if given else wanted.fit(context - len(ids)))
            for ids, (wanted, given) in zip(prompts, self._spread(params, len(prompts)), strict=True)
        ]
        return [self._reasoning.bounded(one, starts[i] if starts else None) for i, one in enumerate(asked)]

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
        given = {name: getattr(params, name) for name in params.model_fields_set}
        return params.replace(**unset(given, self._info.sampling)), "max_new_tokens" in given


def _single(prompts: Any) -> bool:
    """Returns whether `prompts` is one prompt: a string or a list of token ids."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts must be a string, token ids, or a list of either; found {show(prompts)}", "prompts"
        )
    return len(prompts) > 0 and isinstance(prompts[0], Integral)


def _messages(conversation: Any) -> list[Message]:
    """Returns a checked conversation, with lists of text parts joined. What the template makes of it is its own
    matter."""
    if not isinstance(conversation, Sequence) or isinstance(conversation, str) or not conversation:
        raise RequestError(f"a conversation must be a list of messages; found {show(conversation)}", "messages")
    checked: list[Message] = []
    for i, message in enumerate(conversation):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"a message must be a dict with role and content; found {show(message)}", "messages")
        if isinstance(message.get("content"), list):
            message = {**message, "content": _text(message["content"], f"messages[{i}].content")}
        for value in message.values():
            if isinstance(value, str):
                check_text(value, "messages")
        checked.append(message)
    return checked


def _text(parts: list[Any], where: str) -> str:
    """Returns the text of a content that is a list of text parts, as over HTTP."""
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind != "text":
            raise no_text(kind, f"{where}[{i}]", "messages")
        if kind is None or not isinstance(part.get("text"), str):
            raise RequestError(f"{where}[{i}] must be {{'type': 'text', 'text': ...}}; found {show(part)}", "messages")
    return "".join(part["text"] for part in parts)


def _request_of(tokenizer: Tokenizer, asked: RequestOptions) -> GenerationRequest:
    """Returns a request with all that is asked besides sampling, but for drafts. Raises RequestError."""
    unknown = next((name for name in asked if name not in RequestOptions.__annotations__), None)
    if unknown is not None:
        raise TypeError(f"unexpected keyword argument {unknown!r}")
    priority, salt, predicted = asked.get("priority", 0), asked.get("cache_salt"), asked.get("prediction")
    for name, text in (("cache_salt", salt), ("prediction", predicted)):
        if text is not None:
            if not isinstance(text, str):
                raise RequestError(f"{name} must be a string; found {show(text)}", name)
            check_text(text, name)
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise RequestError(f"priority must be an integer; found {show(priority)}", "priority")
    logprobs = logprob_params(
        asked.get("return_logprob"),
        asked.get("logprob_start_len"),
        asked.get("top_logprobs_num"),
        asked.get("token_ids_logprob"),
    )
    prediction = tuple(tokenizer.encode(predicted, add_special_tokens=False)) if predicted else ()
    return GenerationRequest("", [], SamplingParams(), priority, salt, logprobs, None, prediction)
