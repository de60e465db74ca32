"""What every chat API has in common: from messages and tools to a prompt and its answers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from draftwing.errors import RequestError
from draftwing.grammar.limits import MAX_CHARS
from draftwing.images.parts import pictures_of, shown
from draftwing.images.processing import ImageProcessor
from draftwing.images.reader import Picture, Prompt, check_pictures, filled, placed
from draftwing.requests.grammar_field import Grammar
from draftwing.requests.images import RequestImage
from draftwing.requests.refusals import check_text, show
from draftwing.requests.request import MAX_OPENAI_LOGPROBS, GenerationRequest, LogprobParams
from draftwing.requests.sampling_params import SamplingParams
from draftwing.server.parsers.grammars import Function, ToolChoice, after_reasoning, grammar_for, harmony_grammar
from draftwing.server.parsers.harmony import HarmonyReader, harmony_messages
from draftwing.server.parsers.message import MessageReader, MessageStyle
from draftwing.server.parsers.reasoning import Start, start_of
from draftwing.server.parsers.tools import TOOL_STYLES, style_of
from draftwing.server.schema import GenerationBody
from draftwing.server.service import Generation, Service
from draftwing.server.worker_pools import MAX_SHORT_SIZE

if TYPE_CHECKING:
    from draftwing.config.options import Options
    from draftwing.server.parsers.reasoning import Reasoning
    from draftwing.text.tokenizer import Tokenizer

MAX_TOOLS = 512  # of one request
MAX_NAME = 256  # characters
# Values in what a template is given: it is copied to another process, which holds all others up.
MAX_VALUES = 16_384  # in further variables
MAX_TEMPLATE_VALUES = 65_536  # in the definitions of all tools, enumerations included; in all messages
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "conversation", "self"})
AUTO = ToolChoice()
_NO_CALLS = ToolChoice("none")
_HARMONY_EFFORTS = {"minimal": "low", "xhigh": "high"}  # it knows low, medium and high
CALLED = {name: name for name in ("tools", "tool_choice", "thinking")}  # as most dialects call them
_REASONS = ("minimal", "low", "high", "xhigh")  # efforts that are not what a model does by itself
_DEFINITION = 10  # characters of a text are tokenized while one of a grammar is read
_PROBE = "QprobeZ"  # plain letters, which no filter of a template changes


@dataclass(frozen=True)
class Chat:
    """A conversation, and how it goes on, whatever the API.

    messages: as chat templates want them.  template: further variables of the template.  continued: the answer goes on
    with the last message.  prompted: the template begins the answer.  thinking: True and False ask the template
    whether to reason, None leaves it to it.  effort: how much to reason, for templates that ask.  reasons: some is
    asked for, if the template can switch it on.  ignored: fields of the request that have no effect, besides its hints:
    tools that a server would run, say.
    """

    messages: list[dict[str, Any]]
    functions: Sequence[Function] = ()
    choice: ToolChoice = AUTO
    parallel: bool = True
    template: Mapping[str, Any] = field(default_factory=dict)
    continued: bool = False
    prompted: bool = True
    thinking: bool | None = None
    effort: str | None = None
    reasons: bool = False
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    ignored: tuple[str, ...] = ()

    @cached_property
    def pictures(self) -> list[Picture]:
        return pictures_of(self.messages)

    @property
    def offers(self) -> bool:
        """Returns whether the model sees functions."""
        return bool(self.functions) and self.choice.mode != "none"


class ChatBody(GenerationBody):
    """Body of a request that holds a conversation."""

    def chat(self) -> Chat:
        """Returns the conversation. Raises RequestError for what it cannot be."""
        raise NotImplementedError

    @property
    def definitions(self) -> int:
        """Returns characters of the grammars of its tools, which `chat` reads."""
        return 0


class ChatLogprobs(ChatBody):
    """Body that asks for the log probabilities of an answer, and of how many others at each position."""

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_OPENAI_LOGPROBS)] | None = None

    def wanted_logprobs(self) -> LogprobParams | None:
        if self.logprobs:
            return LogprobParams(self.top_logprobs or 0)
        if self.top_logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        return None


class Prompts:
    """From conversations to prompts, and how the answers are read. The parsers are those that the engine was started
    with."""

    def __init__(
        self, options: Options, tokenizer: Tokenizer, reasoning: Reasoning, images: ImageProcessor | None = None
    ) -> None:
        """images: how pictures are prepared, None: the model reads none."""
        self._images = images
        self._tokenizer, self._reasoning = tokenizer, reasoning
        self.harmony, self.reasoning = reasoning.harmony, reasoning.style
        named = TOOL_STYLES.get(options.tool_call_parser or "")
        self.tools = None if self.harmony else named or style_of(tokenizer.chat_source)

    def reader(self, style: MessageStyle) -> MessageReader:
        """Reads one answer."""
        return (HarmonyReader if style.harmony else MessageReader)(style, self._tokenizer)

    def filled(self, chat: Chat, names: Mapping[str, str], pictures: Sequence[Picture]) -> Prompt:
        """Returns the prompt with its pictures; blocks as `render`, and while they are decoded."""
        return filled(self.render(chat, names), pictures, self._images)

    def placed(self, ids: list[int], prompt: Prompt) -> tuple[list[int], tuple[RequestImage, ...]]:
        """Returns the tokens of a prompt with all of those of its images, and these."""
        return placed(ids, prompt, self._images)

    def render(self, chat: Chat, names: Mapping[str, str]) -> str:
        """Returns the prompt's text, in which nothing stands for pictures yet; blocks while a template runs. names: of
        the dialect's fields, for errors."""
        taken = _RESERVED & chat.template.keys()
        if taken:
            raise RequestError(f"chat_template_kwargs must not hold {min(taken)!r}", "chat_template_kwargs")
        _check_values(chat.template, MAX_VALUES, "chat_template_kwargs", "chat_template_kwargs and documents")
        variables = dict(chat.template)
        asked = chat.reasons or chat.effort in _REASONS
        thinking = True if asked and chat.thinking is None else chat.thinking
        if thinking is not None:  # as the templates of the families name it
            variables = {"enable_thinking": thinking, "thinking": thinking} | variables
        if chat.effort is not None:
            effort = _HARMONY_EFFORTS.get(chat.effort, chat.effort) if self.harmony else chat.effort
            variables = {"reasoning_effort": effort} | variables
        tokenizer = self._tokenizer
        if chat.offers:
            name, about = names["tools"], f"{names['tools']}: the model's chat template"
            if not self._takes_tools:
                how = "start the server with --chat-template FILE, a template of it that does"
                raise RequestError(f"{about} knows no tools; {how}", name)
            if not self.calls_tools:
                how = "start the server with --tool-call-parser"
                raise RequestError(f"{about} does not tell how it writes calls; {how}", name)
            variables["tools"] = [template_tool(function, self.harmony) for function in chat.functions]
            _check_values(variables["tools"], MAX_TEMPLATE_VALUES, name, f"all {name}")
        _check_values(chat.messages, MAX_TEMPLATE_VALUES, "messages", "all messages")
        messages: Sequence[Mapping[str, Any]] = harmony_messages(chat.messages) if self.harmony else chat.messages
        if chat.pictures:
            check_pictures(chat.pictures, self._images)
            messages = shown(messages)
        if chat.continued:
            return tokenizer.render_continued(messages, **variables)
        return tokenizer.render_chat(messages, add_generation_prompt=chat.prompted, **variables)

    @property
    def knows_effort(self) -> bool:
        """Returns whether the chat template can use how much to reason, or whether to."""
        source = self._tokenizer.chat_template or ""
        return "reasoning_effort" in source or "thinking" in source

    @property
    def calls_tools(self) -> bool:
        """Returns whether requests may offer functions."""
        return self._takes_tools and (self.harmony or self.tools is not None)

    @cached_property
    def _takes_tools(self) -> bool:
        """Returns whether the chat template shows tools to the model."""
        tools = [template_tool(Function(_PROBE), self.harmony)]
        try:
            return _PROBE in self._tokenizer.render_chat([{"role": "user", "content": "a"}], tools=tools)
        except RequestError:
            return False

    def _with_budget(
        self, chat: Chat, body: ChatBody, params: SamplingParams, style: MessageStyle
    ) -> tuple[SamplingParams, list[str]]:
        """Parameters with the budget of reasoning, and the fields that a model without reasoning does not hear.

        What is not to reason, and would all the same, is ended at once."""
        known, silent = self._reasoning.known, style.start == "closed"
        ignored: list[str] = []
        if chat.thinking and silent and not chat.continued:
            ignored.append(body.thinking_field)
        if chat.thinking is False and known and not chat.continued:
            params = params.replace(thinking_budget=0)
        elif params.thinking_budget is not None and not known and body.hints_at_budget:
            params = params.replace(thinking_budget=None)
            ignored += [] if ignored else [body.budget_field]
        return params, ignored

    def message_style(self, chat: Chat, text: str) -> MessageStyle:
        functions = chat.functions if chat.offers else ()
        style = MessageStyle(
            names=tuple(function.name for function in functions),
            customs=frozenset(function.name for function in functions if function.custom),
            parallel=chat.parallel,
            separate=chat.separate_reasoning,
            stream_reasoning=chat.stream_reasoning,
            only_calls=chat.offers and chat.choice.mode in ("required", "named"),
        )
        if self.harmony:
            start: Start = "closed" if chat.continued else "free"
            return dataclasses.replace(style, harmony=True, start=start)
        if self.reasoning is not None:
            continued = chat.messages[-1]["content"] if chat.continued else None
            start = start_of(self.reasoning, text, continued)
            style = dataclasses.replace(style, reasoning=self.reasoning, start=start)
        return dataclasses.replace(style, tools=self.tools) if chat.offers else style

    def constrained(
        self, chat: Chat, params: SamplingParams, style: MessageStyle, names: Mapping[str, str]
    ) -> tuple[SamplingParams, bool]:
        """Parameters with the grammar of the whole answer, and whether it is not the request's own."""
        own = grammar = params.grammar
        if style.harmony:
            if style.start == "free":
                grammar = harmony_grammar(chat.functions, chat.choice if chat.offers else _NO_CALLS, own)
            elif chat.choice.mode in ("required", "named"):
                name = names["tool_choice"]
                raise RequestError(f"{name}: no call can be forced where an answer goes on with a text", name)
        elif chat.offers:
            assert self.tools is not None
            grammar = grammar_for(chat.functions, chat.choice, self.tools, chat.parallel, own)
        if grammar is not None and style.reasoning is not None:
            grammar = after_reasoning(grammar, style.reasoning, style.start)
        if grammar == own:
            return params, False
        if grammar is not None and own is not None:
            grammar = grammar._replace(whitespace=own.whitespace)
        if params.min_new_tokens or params.ignore_eos:
            name = "ignore_eos" if params.ignore_eos else "min_tokens"
            raise RequestError(
                f"{name} cannot be given with {names['tool_choice']} or strict {names['tools']}: a grammar decides "
                "where the answer may end",
                name,
            )
        return params.replace(grammar=grammar), True

    def hidden(self, style: MessageStyle) -> bool:
        """Returns whether a marker is a special token, which is not shown unless it is asked for."""
        if style.harmony:
            return True
        markers: list[str | None] = []
        if style.reasoning is not None:
            markers += [style.reasoning.begin, style.reasoning.end]
        if style.tools is not None:
            markers += style.tools.markers
        tokenizer = self._tokenizer
        return any(m is not None and tokenizer.backend.token_to_id(m) in tokenizer.special_ids for m in markers)


class Chats(Prompts):
    """Asks the engine."""

    def __init__(self, service: Service) -> None:
        super().__init__(service.options, service.tokenizer, service.reasoning, service.engine.info.images)
        self._service = service

    async def ask(self, body: ChatBody, size: int) -> tuple[Generation, MessageStyle]:
        """Returns the answers to a conversation, and how they are read. Raises RequestError or EngineDead.

        size: bytes that it is read from.
        """
        service, grammars = self._service, body.definitions
        service.engine.info.check_writes()
        if grammars > MAX_CHARS:
            raise RequestError(f"the grammars of all tools may have {MAX_CHARS} characters; found {grammars}", "tools")
        chat = await self._read(body.chat, max(size, _DEFINITION * grammars))
        params = await service.sampling(body, partial(body.sampling, service.engine.info.defaults))
        service.check_room(params.n)
        logprobs = body.wanted_logprobs()
        called = CALLED | dict(body.names) | {"thinking": body.thinking_field}
        prompt = await self._filled(chat, called, size)
        style = self.message_style(chat, prompt.text)
        params, without_effect = self._with_budget(chat, body, params, style)
        if params.grammar is not None:
            await service.check_grammars([(params, body.grammar_field)])
        field = called["tools"] if chat.offers else body.grammar_field
        params, added = self.constrained(chat, params, style, called)
        if added:
            try:
                await service.check_grammars([(params, field)])
            except RequestError:
                await self._check_schemas(chat, params)
                raise
        style = dataclasses.replace(style, constrained=params.grammar is not None)
        if self.hidden(style):
            params = params.replace(skip_special_tokens=False)
        (ids,) = await service.tokenize([prompt.text], body.source, add_special_tokens=False)
        ids, images = await self._placed(ids, prompt)
        ignored = (*chat.ignored, *without_effect)
        asks = chat.effort in _REASONS or (chat.reasons and not service.reasoning.known)
        if asks and not self.knows_effort:
            ignored = (*ignored, called.get("effort", called["thinking"]))
        try:
            asked = GenerationRequest("", ids, params, logprobs=logprobs, images=images)
            asked = service.reasoning.bounded(asked, style.start, grammar_after=True)
        except RequestError as error:
            raise body.renamed(error) from None
        return await service.submit([asked], body, ignored), style

    async def _read(self, read: Callable[[], Chat], size: int) -> Chat:
        """Returns the conversation; in a thread where it is large: arguments of calls and grammars are texts to be
        parsed."""
        return read() if size <= MAX_SHORT_SIZE else await self._service.pools.run(size, lambda gone: read())

    async def ids(self, read: Callable[[], Chat], field: str, size: int) -> tuple[list[int], tuple[str, ...]]:
        """Returns the prompt's tokens, and `Chat.ignored`. Raises RequestError; read: makes the conversation.  field:
        of the body, that holds the messages.  size: as of `ask`."""
        prompt, ignored = await self._prompt(read, size)
        (ids,) = await self._service.tokenize([prompt.text], field, add_special_tokens=False)
        return (await self._placed(ids, prompt))[0], ignored

    async def text(self, read: Callable[[], Chat], size: int) -> tuple[str, tuple[str, ...]]:
        """Returns the prompt's text, and `Chat.ignored`, as `ids`."""
        prompt, ignored = await self._prompt(read, size)
        return prompt.text, ignored

    async def _prompt(self, read: Callable[[], Chat], size: int) -> tuple[Prompt, tuple[str, ...]]:
        chat = await self._read(read, size)
        return await self._filled(chat, CALLED, size), chat.ignored

    async def _filled(self, chat: Chat, names: Mapping[str, str], size: int) -> Prompt:
        if chat.pictures:
            pictures = await self._service.fetched(chat.pictures)
            return await self._service.pools.see(lambda: self.filled(chat, names, pictures))
        return await self._service.pools.run(size, lambda gone: self.filled(chat, names, []))

    async def _placed(self, ids: list[int], prompt: Prompt) -> tuple[list[int], tuple[RequestImage, ...]]:
        """Does as `placed`; in a thread where there are pictures, whose pixels it reads."""
        if not prompt.pictures:
            return ids, ()
        return await self._service.pools.run(0, lambda gone: self.placed(ids, prompt))

    async def _check_schemas(self, chat: Chat, params: SamplingParams) -> None:
        """Raises RequestError for the first function that a call of it is held to, and cannot be."""
        for function in chat.functions:
            if function.strict or chat.choice.mode == "required" or chat.choice.name == function.name:
                grammar = Grammar("json_schema", json.dumps(function.schema))
                await self._service.check_grammars([(params.replace(grammar=grammar), function.field)])


def template_tool(function: Function, described: bool = False) -> dict[str, Any]:
    """Returns a function as chat templates want it. described: it has a description in any case, as gpt-oss's asks
    for."""
    inner: dict[str, Any] = {"name": function.name}
    if described or function.description is not None:
        inner["description"] = function.description or ""
    inner["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": inner}


def checked_functions(functions: Sequence[tuple[Function, str]], schema: str = "parameters") -> list[Function]:
    """Raises RequestError for functions that cannot be offered. Each comes with the field that holds it; schema: what
    the dialect calls the schema of its parameters."""
    if len(functions) > MAX_TOOLS:
        raise RequestError(f"tools takes at most {MAX_TOOLS} functions; found {len(functions)}", "tools")
    seen: set[str] = set()
    for function, where in functions:
        name = f"{where}.name"
        check_text(function.name, name)
        if not 0 < len(function.name) <= MAX_NAME:
            raise RequestError(f"{name} must have 1 to {MAX_NAME} characters; found {show(function.name)}", name)
        if function.name in seen:
            raise RequestError(f"{name}: there are two functions {show(function.name)}", name)
        seen.add(function.name)
        if function.schema["type"] != "object":
            raise RequestError(f"{where}.{schema} must be the schema of an object", f"{where}.{schema}")
    return [dataclasses.replace(function, field=f"{where}.{schema}") for function, where in functions]


def checked_choice(choice: ToolChoice, functions: Sequence[Function], param: str = "tool_choice") -> ToolChoice:
    """Raises RequestError for a choice that cannot be made."""
    if choice.mode in ("required", "named") and not functions:
        raise RequestError(f"{param} needs tools", param)
    if choice.mode == "named" and choice.name not in {function.name for function in functions}:
        raise RequestError(f"{param}: there is no function {show(choice.name)}", param)
    return choice


def _check_values(data: Any, limit: int, field: str, called: str) -> None:
    if _values(data, limit) > limit:
        raise RequestError(f"{called} may have {limit} values together; found more", field)


def _values(data: Any, limit: int) -> int:
    """Counts the values in lists and mappings, and stops where they are more than `limit`."""
    found, rest = 0, [data]
    while rest:
        part = rest.pop()
        inner = part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else ()
        found += len(inner)
        if found > limit:
            break
        rest += inner
    return found
