"""Bodies of Ollama's API, and the conversation that they hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict

from draftwing.errors import RequestError
from draftwing.images.reader import Picture, pasted
from draftwing.requests.sampling_params import NEUTRAL_SAMPLERS, SAMPLER_HINTS, SamplingParams
from draftwing.server.chat import Chat, ChatLogprobs, checked_functions
from draftwing.server.conversation import Conversation
from draftwing.server.openai.tools import ChatTool
from draftwing.server.schema import Body, Hint, Name

# Fields of `options`, and what each is called in `SamplingParams`.
_ALIKE = (
    "temperature top_k top_p min_p presence_penalty frequency_penalty dry_multiplier dry_base dry_allowed_length stop"
)
SAMPLED = {
    "seed": "sampling_seed",
    "num_predict": "max_new_tokens",
    "repeat_penalty": "repetition_penalty",
    **{name: name for name in _ALIKE.split()},
}
Role = Annotated[
    Literal["system", "user", "assistant", "tool"],
    BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value),
]


Whole = Annotated[
    Any, BeforeValidator(lambda value: int(value) if isinstance(value, float) and abs(value) < 2**63 else value)
]  # Go's clients send floats for integers: Ollama cuts them


class ModelOptions(
    Body,
    hints="draft_num_predict f16_kv logits_all low_vram main_gpu num_batch num_ctx num_gpu num_keep num_thread "
    "numa penalize_newline use_mlock use_mmap vocab_only " + SAMPLER_HINTS,
    not_built=" ".join(NEUTRAL_SAMPLERS),
    untyped="temperature top_p min_p repeat_penalty presence_penalty frequency_penalty dry_multiplier dry_base stop",
):
    """How to sample, and how to load a model, which this server did when it started.

    Hints are of that, of the memory and the threads that it has, or of samplers that are not there.
    """

    model_config = ConfigDict(extra="allow")
    unknown_are_hints: ClassVar[bool] = True  # as Ollama does, which logs them

    seed: Whole = None
    num_predict: Whole = None
    top_k: Whole = None
    dry_allowed_length: Whole = None
    repeat_last_n: Hint = None  # penalties look at the whole prompt and answer


class CalledFunction(Body, bookkeeping="index description"):
    name: str
    arguments: Any = None


class ToolCall(Body, bookkeeping="type"):
    """A call that an answer made, as it comes back in the conversation."""

    id: str | None = None
    function: CalledFunction


class OllamaMessage(Body):
    role: Role
    content: str | None = None
    images: list[str] | None = None  # base64
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None  # as `tool_name`, of older clients


class OllamaBody(ChatLogprobs, hints="shift"):
    """What both endpoints share. Responses are streams unless `stream` is false."""

    names: ClassVar = {
        **{ours: f"options.{name}" for name, ours in SAMPLED.items()},
        "min_new_tokens": "options.num_predict",
        "response_format": "format",
        "thinking": "think",
        "top_logprobs_num": "top_logprobs",
    }

    model: Name
    options: ModelOptions | None = None
    format: Literal["json", ""] | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    keep_alive: Hint = None  # the model stays loaded
    truncate: Hint = None  # a prompt that is too long is refused

    @property
    def length(self) -> str | None:
        return None if self._num_predict is None else "options.num_predict"

    @property
    def _num_predict(self) -> Any:
        """Returns the length that the client chose; 0 and less leave it to the context."""
        asked = (self.options or ModelOptions()).num_predict
        return None if isinstance(asked, int) and not isinstance(asked, bool) and asked <= 0 else asked

    @property
    def grammar_field(self) -> str | None:
        return "format"  # it is the schema itself

    def sampling(self, defaults: Mapping[str, Any], **fields: Any) -> SamplingParams:
        given = self.options or ModelOptions()
        fields |= {ours: getattr(given, name) for name, ours in SAMPLED.items() if getattr(given, name) is not None}
        if isinstance(given.seed, int) and given.seed < 0:
            del fields["sampling_seed"]
        if given.num_predict is not None:
            fields["max_new_tokens"] = self._num_predict
        if isinstance(self.format, dict):
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": self.format}}
        elif self.format:
            fields["response_format"] = {"type": "json_object"}
        return super().sampling(defaults, **fields)

    def _chat(self, messages: list[dict[str, Any]], **more: Any) -> Chat:
        effort = "xhigh" if self.think == "max" else self.think if isinstance(self.think, str) else None
        return Chat(messages, thinking=self.think if isinstance(self.think, bool) else None, effort=effort, **more)


class OllamaChatRequest(OllamaBody):
    """Body of /api/chat. Without options.num_predict an answer runs to the model's default length, or to the context
    limit; 0 and less are no limit."""

    source = "messages"

    messages: list[OllamaMessage] | None = None
    tools: list[ChatTool] | None = None

    @property
    def definitions(self) -> int:
        return sum(tool.definition for tool in self.tools or ())

    def chat(self) -> Chat:
        functions = checked_functions([tool.plain(f"tools.{i}") for i, tool in enumerate(self.tools or [])])
        return self._chat(_conversation(self.messages or []), functions=functions)


class OllamaGenerateRequest(OllamaBody, not_built="context suffix template"):
    """Body of /api/generate: a prompt that is put into the chat template, or with `raw` the whole prompt."""

    source = "prompt"

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None  # base64

    def chat(self) -> Chat:
        found = Conversation(self.system)
        found.say("user", [*_pasted(self.images, "images"), self.prompt or ""])
        return self._chat(found.done())


@dataclass(eq=False)
class _Call:
    id: str
    name: str
    answered: bool = False


class _Calls:
    """Calls of the conversation so far, and which of them have a result."""

    def __init__(self) -> None:
        self._every: deque[_Call] = deque()  # but those that were answered and have been looked at
        self._named: dict[str, deque[_Call]] = {}
        self._by_id: dict[str, _Call] = {}  # the newest one that has it

    def add(self, call: _Call) -> None:
        self._every.append(call)
        self._named.setdefault(call.name, deque()).append(call)
        self._by_id[call.id] = call

    def answered(self, message: OllamaMessage) -> str | None:
        """Returns the id of the call that a message has the result of: by its id, else the first one without a result,
        of that name if there is any."""
        if message.tool_call_id is not None:
            call = self._by_id.get(message.tool_call_id)
        else:
            named = self._named.get(message.tool_name or message.name or "", deque())
            call = _first(named) or _first(self._every)
        if call is None:
            return message.tool_call_id
        call.answered = True
        return call.id


def _first(calls: deque[_Call]) -> _Call | None:
    while calls and calls[0].answered:
        calls.popleft()
    return calls[0] if calls else None


def _conversation(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    found, calls, count = Conversation(), _Calls(), 0
    for i, message in enumerate(messages):
        where, text = f"messages.{i}", message.content or ""
        if message.tool_calls and message.role != "assistant":
            raise RequestError(f"{where}.tool_calls is for messages of the role 'assistant'", f"{where}.tool_calls")
        if message.images and message.role == "assistant":
            raise RequestError(f"{where}.images is for messages of others than the assistant", f"{where}.images")
        if message.role == "assistant":
            found.answer(text, begin=True)
            if message.thinking:
                found.think(message.thinking)
            for j, given in enumerate(message.tool_calls or []):
                # Clients need not give ids; some templates want nine letters and digits.
                call = _Call(given.id or f"call{count % 100_000:05}", given.function.name)
                count += 1
                calls.add(call)
                found.call(call.id, call.name, given.function.arguments, f"{where}.tool_calls.{j}.function.arguments")
        elif message.role == "tool":
            call_id = calls.answered(message)
            said = _said(message, where)
            found.result(call_id, said, f"{where}.{'tool_call_id' if message.tool_call_id else 'role'}", "tool call")
        else:
            found.say(message.role, _said(message, where))
    return found.done()


def _said(message: OllamaMessage, where: str) -> list[str | Picture]:
    """Returns what a message shows, and then what it says."""
    return [*_pasted(message.images, f"{where}.images"), message.content or ""]


def _pasted(images: list[str] | None, where: str) -> list[Picture]:
    return [pasted(image, f"{where}.{i}") for i, image in enumerate(images or [])]
