"""What the Python API is asked: from prompts or conversations, parameters and options of a call to requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypedDict

from pydantic import TypeAdapter, ValidationError

from draftwing.errors import RequestError
from draftwing.images.fetch import Fetcher
from draftwing.images.given import picture_of
from draftwing.images.parts import content_of, pictures_of, shown
from draftwing.images.reader import Picture, Prompt, filled, placed
from draftwing.plain import plain
from draftwing.requests.images import RequestImage
from draftwing.requests.refusals import check_text, no_text, show
from draftwing.requests.request import GenerationRequest, logprob_params
from draftwing.requests.sampling_params import SamplingParams, unset
from draftwing.server.parsers.reasoning import TAIL, Reasoning, Start, start_of
from draftwing.text.detok import TokenTexts
from draftwing.text.tokenizer import encode_all

if TYPE_CHECKING:
    from draftwing.engine.admission import EngineInfo
    from draftwing.server.chat import Prompts
    from draftwing.server.parsers.grammars import Function, ToolChoice
    from draftwing.text.answer import Answer
    from draftwing.text.tokenizer import Tokenizer

Params = SamplingParams | Mapping[str, Any]
Message = Mapping[str, Any]
Placed = tuple[list[int], tuple[RequestImage, ...]]  # tokens of a prompt, and its images


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of `LLM.generate` and `LLM.chat` besides sampling, for all prompts; as in the server's APIs.

    priority: higher runs first.
    cache_salt: requests with different salts share no cache.
    return_logprob and the three fields after it: log probabilities in `meta_info`, as /generate has them.
    return_text_in_logprobs: adds the tokens' texts to them.
    return_hidden_states: `meta_info["hidden_states"]`, as /generate has it: what the last layer's norm gave for the
    prompt's tokens, [P][H], then for each token of the answer but the last one, [H].
    speculative: "off", or the largest draft: {"algorithm", "num_steps", "topk", "num_draft_tokens"}.
    prediction: a text that the answers are expected to resemble; drafts are copied from it.
    adapter: the name of the adapter (LoRA) that answers, of the option `lora_modules` or `LLM.load_adapter`; or a list
    with one or None for each prompt.
    receipt: `Completion.receipt` says how the answer was made, for `draftwing verify`.
    tools, tool_choice: functions that the answers to conversations may call, and which of them; as
    /v1/chat/completions has them. `Completion.message` has the calls.
    sampling_params: another name of the argument `params`.
    """

    priority: int
    cache_salt: str | None
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: Sequence[int] | None
    return_text_in_logprobs: bool
    return_hidden_states: bool
    speculative: str | Mapping[str, Any] | None
    prediction: str | None
    adapter: str | Sequence[str | None] | None
    receipt: bool | None
    sampling_params: Params | Sequence[Params] | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None


class Inputs:
    """Makes the requests of `LLM` and `AsyncLLM`, without a uid. All methods raise RequestError."""

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer) -> None:
        self._info, self._tokenizer = info, tokenizer
        self._reasoning = Reasoning(info.options, tokenizer)
        self._fetch = Fetcher(info.options.allow_image_urls)

    def token_texts(self, asked: RequestOptions) -> TokenTexts | None:
        """Returns texts of tokens, where a call asks for them in log probabilities."""
        return TokenTexts(self._tokenizer) if asked.get("return_text_in_logprobs") else None

    def of_prompts(
        self, prompts: Any, params: Params | Sequence[Params] | None, request_options: RequestOptions
    ) -> list[GenerationRequest]:
        """Makes requests of what `LLM.generate` takes."""
        if request_options.get("tools"):
            raise RequestError("tools are for conversations: use `chat`, or give a list of messages", "tools")
        ids: list[Placed] = [(one, ()) for one in self.token_ids(prompts)]
        return self._requests(ids, params, request_options)

    def token_ids(self, prompts: Any) -> list[list[int]]:
        """Returns the ids of one text or list of token ids, or of several."""
        prompts = plain(prompts)
        items: Sequence[Any] = [prompts] if _single(prompts) else prompts
        texts = [check_text(item, f"prompts[{i}]") for i, item in enumerate(items) if isinstance(item, str)]
        encoded = iter(encode_all(self._tokenizer, texts))
        return [_ids(next(encoded) if isinstance(item, str) else item, i) for i, item in enumerate(items)]

    def of_chats(
        self,
        conversations: Any,
        params: Params | Sequence[Params] | None,
        request_options: RequestOptions,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> list[GenerationRequest]:
        """Makes requests of what `LLM.chat` takes."""
        self._info.check_writes()
        if not isinstance(conversations, Sequence) or isinstance(conversations, str) or not conversations:
            raise RequestError(f"expected a conversation or a list of them; found {show(conversations)}", "messages")
        several: Sequence[Any] = [conversations] if isinstance(conversations[0], Mapping) else conversations
        if request_options.get("tools"):
            if continue_final_message:
                raise RequestError("tools and continue_final_message exclude each other here", "tools")
            return self._with_tools(several, params, request_options, chat_template_kwargs)
        tokenizer, extra = self._tokenizer, dict(chat_template_kwargs or {})
        render = tokenizer.render_continued if continue_final_message else tokenizer.render_chat
        every = list(map(read_messages, several))
        prompts = [
            filled(render(shown(messages), **extra), self._fetched(messages), self._info.images) for messages in every
        ]
        texts = [prompt.text for prompt in prompts]
        ids = [self._placed(prompt) for prompt in prompts]
        style, starts = self._reasoning.style, None
        if continue_final_message and style is not None:
            starts = [
                start_of(style, text, messages[-1]["content"]) for text, messages in zip(texts, every, strict=True)
            ]
        return self._requests(ids, params, request_options, starts)

    def _with_tools(
        self,
        several: Sequence[Any],
        params: Params | Sequence[Params] | None,
        request_options: RequestOptions,
        template: Mapping[str, Any] | None,
    ) -> list[GenerationRequest]:
        """Makes requests that offer tools, as /v1/chat/completions makes them."""
        from draftwing.server.chat import CALLED, Chat

        functions, choice = _tools(request_options)
        prompts, ids, read = self._prompts, [], []
        for conversation in several:
            chat = Chat(_called(read_messages(conversation)), functions, choice, template=dict(template or {}))
            prompt = prompts.filled(chat, CALLED, list(map(self._fetch, chat.pictures)))
            ids.append(self._placed(prompt))
            read.append((chat, prompts.message_style(chat, prompt.text)))
        requests = self._requests(ids, params, request_options, [style.start for _, style in read], True)
        made: list[GenerationRequest] = []
        for request, (chat, style) in zip(requests, read, strict=True):
            wanted, _ = prompts.constrained(chat, request.params, style, CALLED)
            shown = wanted.skip_special_tokens and not prompts.hidden(style)
            made.append(request._replace(params=wanted.replace(skip_special_tokens=shown)))
        return made

    def _fetched(self, messages: Sequence[Message]) -> list[Picture]:
        return list(map(self._fetch, pictures_of(messages)))

    def _placed(self, prompt: Prompt) -> Placed:
        return placed(self._tokenizer.encode(prompt.text, add_special_tokens=False), prompt, self._info.images)

    @cached_property
    def _prompts(self) -> Prompts:
        from draftwing.server.chat import Prompts  # after the engine: it imports what only servers need

        return Prompts(self._info.options, self._tokenizer, self._reasoning, self._info.images)

    def message(self, answer: Answer, request_options: RequestOptions) -> dict[str, Any] | None:
        """Returns a finished answer to a conversation with tools as the message that goes into its history, with
        `tool_calls` and `reasoning_content` where there are some; None for other answers."""
        if not request_options.get("tools"):
            return None
        from draftwing.server.chat import Chat
        from draftwing.server.openai.tools import whole_call

        functions, choice = _tools(request_options)
        tail = self._tokenizer.decode(answer.request.prompt_ids[-TAIL:], skip_special_tokens=False)
        style = self._prompts.message_style(Chat([], functions, choice), tail)
        style = replace(style, constrained=answer.request.params.grammar is not None)
        reader = self._prompts.reader(style)
        reader.push(answer.text, True, answer.token_ids)
        message: dict[str, Any] = {"role": "assistant", "content": reader.content or None}
        if reader.reasoning:
            message["reasoning_content"] = reader.reasoning
        if reader.calls:
            message["tool_calls"] = list(map(whole_call, reader.calls))
        return message

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
        elif _single(plain(prompt)):
            requests = self.of_prompts(prompt, params, request_options)
        else:
            raise RequestError(f"expected one prompt or one conversation; found {show(prompt)}", "prompt")
        (request,) = requests
        if request.params.n != 1:
            raise RequestError(f"n must be 1 here; found {request.params.n}", "n")
        return request

    def _requests(
        self,
        prompts: list[Placed],
        params: Params | Sequence[Params] | None,
        request_options: RequestOptions,
        starts: list[Start] | None = None,
        grammar_after: bool = False,
    ) -> list[GenerationRequest]:
        """starts: where answers begin; None: as the prompts' ends say.  grammar_after: see `Reasoning.bounded`."""
        named = request_options.get("sampling_params")
        if named is not None and params is not None:
            raise RequestError("sampling_params and params are one argument; give one of them", "sampling_params")
        params = named if params is None else params
        like = _request_of(self._tokenizer, plain(request_options), self._info.hidden_size)
        context, adapters = self._info.context_length, _adapters(request_options.get("adapter"), len(prompts))
        each = zip(prompts, self._spread(params, len(prompts)), adapters, strict=True)
        asked = [
            like._replace(
                prompt_ids=ids,
                images=images,
                params=wanted if given else wanted.fit(context - len(ids)),
                adapters=((adapter, 1.0),) if adapter else (),
            )
            for (ids, images), (wanted, given), adapter in each
        ]
        return [
            self._reasoning.bounded(one, starts[i] if starts else None, grammar_after) for i, one in enumerate(asked)
        ]

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
            params = SamplingParams.read(plain(params or {}))
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams or a dict of its fields; found {show(params)}", "params")
        given = {name: getattr(params, name) for name in params.model_fields_set}
        return params.replace(**unset(given, self._info.sampling)), "max_new_tokens" in given


_BYTES = bytes | bytearray | memoryview  # lists of numbers, too, and none of tokens


def _single(prompts: Any) -> bool:
    """Returns whether `prompts` is one prompt: a string or a list of token ids."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence) or isinstance(prompts, _BYTES):
        raise RequestError(
            f"prompts must be a string, token ids, or a list of either; found {show(prompts)}", "prompts"
        )
    return len(prompts) > 0 and isinstance(prompts[0], Integral)


def _ids(prompt: Any, index: int) -> list[int]:
    """Returns the ids of a prompt, checked."""
    name = f"prompts[{index}]"
    if (
        not isinstance(prompt, Sequence)
        or isinstance(prompt, _BYTES)
        or not all(issubclass(kind, Integral) and kind is not bool for kind in set(map(type, prompt)))
    ):
        raise RequestError(f"{name} must be a string or a list of token ids; found {show(prompt)}", name)
    if not prompt:
        raise RequestError(f"{name} must not be empty", name)
    return list(map(int, prompt))


def read_messages(conversation: Any) -> list[Message]:
    """Returns a checked conversation, with lists of text parts joined, and pictures read. What the template makes of it
    is its own matter."""
    if not isinstance(conversation, Sequence) or isinstance(conversation, str) or not conversation:
        raise RequestError(f"a conversation must be a list of messages; found {show(conversation)}", "messages")
    checked: list[Message] = []
    for i, message in enumerate(conversation):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"a message must be a dict with role and content; found {show(message)}", "messages")
        if isinstance(message.get("content"), list):
            message = {**message, "content": content_of(_said(message["content"], f"messages[{i}].content"))}
        for value in message.values():
            if isinstance(value, str):
                check_text(value, "messages")
        checked.append(message)
    return checked


def _called(messages: list[Message]) -> list[dict[str, Any]]:
    """Returns messages with the arguments of their calls as chat templates want them, and results with names."""
    from draftwing.server.conversation import template_call

    found: list[dict[str, Any]] = []
    names: dict[Any, str] = {}
    for i, message in enumerate(messages):
        made, calls = dict(message), message.get("tool_calls")
        if calls:
            try:
                made["tool_calls"] = [
                    template_call(one["id"], one["function"]["name"], one["function"].get("arguments"), "messages")
                    for one in calls
                ]
            except (AttributeError, KeyError, TypeError):
                form = "{'id': ..., 'type': 'function', 'function': {'name': ..., 'arguments': ...}}"
                where = f"messages[{i}].tool_calls"
                raise RequestError(f"{where} must be a list of {form}; found {show(calls)}", "messages") from None
            names |= {one["id"]: one["function"]["name"] for one in calls}
        name = names.get(made.get("tool_call_id"))
        if made["role"] == "tool" and name is not None:
            made.setdefault("name", name)
        made["content"] = made.get("content") or ""
        found.append(made)
    return found


def _adapters(asked: Any, count: int) -> list[str]:
    """Returns the name of each prompt's adapter, empty where it has none."""
    every = [asked] * count if asked is None or isinstance(asked, str) else asked
    if not isinstance(every, Sequence) or not all(one is None or isinstance(one, str) for one in every):
        raise RequestError(f"adapter must be a name, or one or None for each prompt; found {show(asked)}", "adapter")
    if len(every) != count:
        raise RequestError(f"adapter must be one or one per prompt; found {len(every)} for {count}", "adapter")
    return [check_text(one or "", "adapter") for one in every]


def _tools(asked: RequestOptions) -> tuple[list[Function], ToolChoice]:
    """Returns the functions of a call, and the choice among them. Raises RequestError, as over HTTP."""
    from draftwing.server.openai.tools import ChatTool, ChosenTool, offered

    tools, choice = asked.get("tools"), asked.get("tool_choice")
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise RequestError(f"tools must be a list; found {show(tools)}", "tools")
    if isinstance(choice, str) and choice not in ("auto", "none", "required"):
        raise RequestError(
            f"tool_choice must be 'auto', 'none', 'required' or a tool; found {show(choice)}", "tool_choice"
        )
    try:
        read = TypeAdapter(list[ChatTool]).validate_python(tools)
        chosen = ChosenTool.model_validate(choice) if isinstance(choice, Mapping) else choice
    except ValidationError as error:
        where = "tool_choice" if error.title == "ChosenTool" else "tools"
        first = error.errors()[0]
        found = ".".join(map(str, (where, *first["loc"])))
        raise RequestError(f"{found}: {first['msg']}; found {show(first['input'])}", where) from None
    return offered(read, chosen)


def _said(parts: list[Any], where: str) -> list[str | Picture]:
    """Returns what a content says and shows that is a list of parts, as over HTTP."""
    found: list[str | Picture] = []
    for i, part in enumerate(parts):
        kind, here = part.get("type") if isinstance(part, Mapping) else None, f"{where}[{i}]"
        if kind in ("image", "image_url"):
            found.append(_picture(part, here))
            continue
        if isinstance(kind, str) and kind != "text":
            raise no_text(kind, here, "messages")
        if kind is None or not isinstance(part.get("text"), str):
            raise RequestError(f"{here} must be {{'type': 'text', 'text': ...}}; found {show(part)}", "messages")
        found.append(part["text"])
    return found


def _picture(part: Mapping[str, Any], where: str) -> Picture:
    """Returns a picture: of an `image_url` as over HTTP, or an `image` in one of the forms that Python has."""
    given = part.get("image_url", part.get("image"))
    given = given.get("url") if isinstance(given, Mapping) else given
    return Picture(given, where) if "image_url" in part and isinstance(given, str) else picture_of(given, where)


def _request_of(tokenizer: Tokenizer, asked: RequestOptions, hidden_size: int) -> GenerationRequest:
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
    states, receipt = asked.get("return_hidden_states"), asked.get("receipt")
    for name, value in (("return_hidden_states", states), ("receipt", receipt)):
        if value is not None and not isinstance(value, bool):
            raise RequestError(f"{name} must be true or false; found {show(value)}", name)
    logprobs = logprob_params(
        asked.get("return_logprob"),
        asked.get("logprob_start_len"),
        asked.get("top_logprobs_num"),
        asked.get("token_ids_logprob"),
        hidden=hidden_size if states else 0,
    )
    prediction = tuple(tokenizer.encode(predicted, add_special_tokens=False)) if predicted else ()
    return GenerationRequest(
        "", [], SamplingParams(), priority, salt, logprobs, None, prediction, receipt=bool(receipt)
    )
