"""What the bodies of all dialects share: types of fields, and how they become `SamplingParams`.

Sampling fields are declared by `sampled` and checked by `SamplingParams`, which gives /openapi.json their bounds.
There is one rule for the others. A `Hint` asks for more than can be given, and the answer is a right one without it:
it is accepted, and `ignored_fields` names it unless its value asks for nothing. A field of type `NotBuilt` would change
what an answer means: it is refused by name unless its value asks for nothing. Unknown fields are refused.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, PydanticCustomError

from draftwing.errors import RequestError
from draftwing.requests.grammar_field import GRAMMARS, schema_place
from draftwing.requests.refusals import bounded
from draftwing.requests.request import LogprobParams
from draftwing.requests.sampling_params import (
    NEUTRAL_SAMPLERS,
    SAMPLER_HINTS,
    SamplingParams,
    field_schemas,
    is_neutral,
    not_built,
)

MAX_PROMPTS = 1024  # of one request
MAX_ENTRIES = 16_384  # of a list or an object in a body, where it has no limit of its own
_EMPTY: tuple[Any, ...] = ([], {}, False)
# Values that ask for nothing, of hints and of fields that are not built; others have none but null.
_NEUTRAL: tuple[tuple[tuple[Any, ...], str], ...] = (
    (
        (False,),
        "add_special_tokens async_ background disable_additional_properties disable_fallback echo "
        "include_obfuscation no_logs require_reasoning return_bytes return_cached_tokens_details "
        "return_entropy return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs return_hidden_states "
        "return_meta_info return_progress return_prompt_token_ids return_routed_experts return_sampling_mask "
        "return_spec_tokens_details return_token_offsets return_weight_versions "
        "timings_per_token use_audio_in_video use_beam_search verbose",
    ),
    (
        _EMPTY,
        "container defer_loading diagnostics inference_geo input_examples mcp_servers metadata output_schema store",
    ),
    (([],), "audio_data functions image_data images logits_processors video_data"),
    ((0,), "data_parallel_rank routed_experts_prompt_start routed_experts_start_len"),
    (({},), "custom_labels mm_processor_kwargs session_params vllm_xargs"),
    (("",), "extra_key suffix system template"),
    ((True,), "cache_prompt log_metrics"),
    ((1.0, 1), "length_penalty"),
    (([], ["direct"]), "allowed_callers"),
    (([], "auto"), "context"),
    ((*_EMPTY, {"edits": []}), "context_management"),
    ((*_EMPTY, "summarized"), "display"),
    (("none", "auto", []), "function_call"),
    ((["text"],), "modalities"),
    (("standard",), "mode"),
    (("auto", "default", "standard_only"), "service_tier"),
    ((*_EMPTY, "standard"), "speed"),
    ((1,), "stream_interval"),
    (("left", "right"), "truncation_side"),
    (("disabled",), "truncation"),
    (("medium",), "verbosity"),
)
NEUTRAL = {name: values for values, names in _NEUTRAL for name in names.split()} | NEUTRAL_SAMPLERS


def asks_for_nothing(name: str, value: Any) -> bool:
    """Returns whether a value of a field that has no effect, or is not built, is as good as none."""
    return is_neutral(value, NEUTRAL.get(name, ()))


def _refused(value: Any, info: ValidationInfo) -> Any:
    name = info.field_name or ""
    if asks_for_nothing(name, value):
        return value
    raise PydanticCustomError("not_built", not_built(name))


NotBuilt = Annotated[Any, AfterValidator(_refused)]
HINT = object()  # in the metadata of a field that is one and has a type of its own
Hint = Annotated[Any, HINT]
Bookkeeping = Any  # of an earlier answer, as it comes back in a history; asks for nothing
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]  # of reasoning, as OpenAI has them
EffortTokens = Annotated[int, Field(ge=0, lt=10**9)] | Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Name = Annotated[str, Field(max_length=1024)]  # chosen by the client, repeated in each event of a stream
AdapterName = Annotated[str, Field(min_length=1, max_length=1024)]
Priority = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
TokenIds = Annotated[list[int], Field(max_length=4_000_000)]


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_TEXT, _COUNT = {"type": "string"}, {"type": "integer", "minimum": 1}
_DRAFTS = _object([], algorithm=_TEXT, num_steps=_COUNT | {"minimum": 0}, topk=_COUNT, num_draft_tokens=_COUNT)
_PARTS = {"type": "array", "items": _object(["type", "text"], type={"const": "text"}, text=_TEXT)}
_CONTENT = _object(["type", "content"], type={"const": "content"}, content={"anyOf": [_TEXT, _PARTS]})
# Their insides are checked in `requests.request`, which names what is wrong with them.
Speculative = Annotated[str | dict[str, Any], WithJsonSchema({"anyOf": [{"const": "off"}, _DRAFTS]})]
Prediction = Annotated[dict[str, Any], WithJsonSchema(_CONTENT)]


class _Sampled:
    """Marks a field that becomes `name` of `SamplingParams`, and documents it as that."""

    def __init__(self, name: str, required: bool) -> None:
        self.name, self.required = name, required

    def __call__(self, schema: dict[str, Any]) -> None:
        described = {key: value for key, value in field_schemas()[self.name].items() if key != "default"}
        about = {"description": described.pop("description")} if "description" in described else {}
        if self.name == "max_new_tokens":
            about = {"description": "most tokens of the answer"}  # what null is, every dialect says for itself
        kinds = [dict(kind) for kind in described.get("anyOf", [described]) if kind != {"type": "null"}]
        if self.name == "max_new_tokens":
            kinds[0]["minimum"] = 1  # 0 is for what has `echo`
        kinds += [] if self.required else [{"type": "null"}]
        schema.update({"anyOf": kinds} if len(kinds) > 1 else kinds[0], **about)


def sampled(name: str, required: bool = False) -> Any:
    """Returns a field that `SamplingParams` takes as `name` and checks."""
    extra = _Sampled(name, required)
    return Field(json_schema_extra=extra) if required else Field(default=None, json_schema_extra=extra)


class Body(BaseModel):
    """An object of a request's JSON. Fields that a class has no more to say of are words of its head."""

    # Fields whose names Python or pydantic have for something else end with a `_`, which clients do not send.
    unknown_are_hints: ClassVar[bool] = False  # fields that a class does not have, where its config allows them

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=(),
        alias_generator=lambda name: name.removesuffix("_"),
    )  # fmt: skip

    def __init_subclass__(
        cls,
        *,
        hints: str = "",
        not_built: str = "",
        bookkeeping: str = "",
        untyped: str = "",
        sampling: str = "",
        **config: Any,
    ) -> None:
        """Adds fields whose names are given, with a blank between two.

        hints, not_built, bookkeeping: of `Hint`, `NotBuilt` and `Bookkeeping`.  untyped: of any type, which the class
        checks itself.  sampling: `sampled` under their own names.  config: pydantic's.
        """
        super().__init_subclass__(**config)
        added = {
            **dict.fromkeys(hints.split(), Hint),
            **dict.fromkeys(not_built.split(), NotBuilt),
            **dict.fromkeys(f"{bookkeeping} {untyped} {sampling}".split(), Any),
        }
        # Before pydantic collects the fields, which it does by these.
        cls.__annotations__ = inspect.get_annotations(cls) | added
        for name in added:
            setattr(cls, name, sampled(name) if name in sampling.split() else None)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return bounded(handler(source), MAX_ENTRIES)


@functools.cache
def hints_of(model: type[BaseModel]) -> frozenset[str]:
    """Returns names of the fields of a model that are hints."""
    return frozenset(name for name, field in model.model_fields.items() if any(one is HINT for one in field.metadata))


def ignored_fields(body: BaseModel) -> tuple[str, ...]:
    """Names the hints of a body that ask for something, once each, the outer ones first. Places in lists are left
    out: `messages.content.cache_control`."""
    found: list[str] = []
    level: list[tuple[str, Any]] = [("", body)]
    while level:
        below: list[tuple[str, Any]] = []
        named: set[str] = set()
        for where, value in level:
            if type(value) is list:
                below += [(where, one) for one in value if type(one) not in _PLAIN]
                continue
            model: type[BaseModel] = type(value)
            hints = hints_of(model)
            if getattr(model, "unknown_are_hints", False):
                named |= {f"{where}{name}" for name in value.model_extra or ()}
            for name in value.model_fields_set & model.model_fields.keys():
                one = getattr(value, name)
                if name in hints:
                    if not asks_for_nothing(name, one):
                        named.add(f"{where}{model.model_fields[name].alias}")
                elif type(one) not in _PLAIN:
                    below.append((f"{where}{model.model_fields[name].alias}.", one))
        found += sorted(named.difference(found))
        level = below
    return tuple(found)


_PLAIN = frozenset({str, int, float, bool, dict, type(None)})  # types of values that hold no fields of a body


def split_effort(effort: str | int | None) -> tuple[str | None, int | None]:
    """Splits an `Effort` from `EffortTokens`: how much to reason in a word, or in tokens."""
    if effort is None or (isinstance(effort, str) and not effort.isdecimal()):
        return effort, None
    return None, int(effort)


def characters(value: Any) -> int:
    """Counts the characters of a text, or of the texts in a list; 0 for anything else."""
    if isinstance(value, list):
        return sum(map(characters, value))
    return len(value) if isinstance(value, str) else 0


class AdapterScale(Body):
    """An entry of llama.cpp's field `lora`: an adapter by its number in /lora-adapters."""

    id: Annotated[int, Field(ge=0)]
    scale: Annotated[float, Field(ge=-1e4, le=1e4)]


class GenerationBody(
    Body,
    hints=SAMPLER_HINTS,
    not_built=" ".join(NEUTRAL_SAMPLERS),
    sampling="dry_multiplier dry_base dry_allowed_length",
):
    """Body of a request for answers, in any dialect.

    source: name of the field that holds the prompt.  id_prefix: how ids of responses begin.  names: the dialect's words
    in errors, where no field of it is `sampled` under the engine's name.
    """

    source: ClassVar[str]
    id_prefix: ClassVar[str] = ""
    names: ClassVar[Mapping[str, str]] = {}

    stream: bool | None = None
    rid: Name | None = None
    speculative: Speculative | None = None
    priority: Priority | None = None
    cache_salt: str | None = None
    learn: bool | None = None
    lora: Annotated[list[AdapterScale], Field(max_length=64)] | None = None

    @functools.cached_property
    def ignored(self) -> tuple[str, ...]:
        """Returns `ignored_fields`; found once, where the body is read, for it may be large."""
        return ignored_fields(self)

    @functools.cached_property
    def place(self) -> ExitStack:
        """Returns the request's place among what waits; closed when the answers have places of their own."""
        return ExitStack()

    @classmethod
    @functools.cache
    def _sampled(cls) -> dict[str, str]:
        """Fields for `SamplingParams` and their names there. Of two for one name the later one counts."""
        extras = {name: field.json_schema_extra for name, field in cls.model_fields.items()}
        return {name: extra.name for name, extra in extras.items() if isinstance(extra, _Sampled)}

    @property
    def asked_id(self) -> str | None:
        """Returns the id that the client gave its request."""
        return self.rid

    def sampling(
        self, defaults: Mapping[str, Any], *, called: Mapping[str, str] | None = None, **fields: Any
    ) -> SamplingParams:
        """Returns checked parameters. Raises RequestError.

        defaults: of the model, for what is not given; without a length among them the context is the limit.
        fields: others that the body asks for by fields of its own.
        called: what those are called in the body, where no class says it.
        """
        given, names = dict(fields), {**self.names, **(called or {})}
        for name, ours in self._sampled().items():
            value = getattr(self, name)
            if value is not None:
                given[ours] = value
            if value is not None or ours not in names:
                names[ours] = name
        params = SamplingParams.read(given, names, defaults={"max_new_tokens": None, **defaults})
        if params.max_new_tokens == 0 and not getattr(self, "echo", False):  # which reports the prompt alone
            name = self.length or "max_new_tokens"
            raise RequestError(f"{name} must be at least 1; found 0", name)
        return params

    def adapters(self, prompts: int) -> list[str | None]:
        """Returns the adapter of each of the prompts that its own field names, SGLang's. Raises RequestError."""
        asked = getattr(self, "lora_path", None)
        every = asked if isinstance(asked, list) else [asked] * prompts
        if len(every) != prompts:
            raise RequestError(
                f"lora_path must hold one name per prompt; found {len(every)} for {prompts}", "lora_path"
            )
        return every

    @property
    def expressions(self) -> int:
        """Returns characters of the expressions that are compiled when sampling fields are checked."""
        return characters(getattr(self, "stop_regex", None))

    @property
    def length(self) -> str | None:
        """Returns name of the field by which the client limits the length; None where it leaves that to us."""
        return self._given("max_new_tokens")

    @property
    def budget_field(self) -> str:
        """Returns name of the field that bounds reasoning."""
        return self._bound or self.names.get("thinking_budget", self.thinking_field)

    @property
    def hints_at_budget(self) -> bool:
        """Returns whether that is a field that asks for reasoning: a model that has none gives a right answer."""
        return self._bound is None

    @property
    def _bound(self) -> str | None:
        """Returns name of a field that bounds reasoning and does nothing else."""
        params = getattr(self, "custom_params", None)
        there = isinstance(params, Mapping) and "thinking_budget" in params
        return self._given("thinking_budget") or ("custom_params" if there else None)

    @property
    def thinking_field(self) -> str:
        """Returns name of the field that says whether to reason, and how much."""
        return self.names.get("thinking", "thinking")

    def _given(self, ours: str) -> str | None:
        """Returns name of the given field that counts for a parameter; None where it is left to us."""
        given = [name for name, one in self._sampled().items() if one == ours and getattr(self, name) is not None]
        return given[-1] if given else None

    @property
    def grammar_field(self) -> str | None:
        """Returns name of the field that holds a grammar, or its schema."""
        given = next((name for name in GRAMMARS if getattr(self, name, None) is not None), None)
        if given == "response_format":
            return given + schema_place(getattr(self, given))
        other = self.names.get("response_format")
        return given or (other and f"{other}.schema")

    def wanted_logprobs(self) -> LogprobParams | None:
        """Returns the log probabilities that are asked for. Raises RequestError."""
        return None

    @property
    def learnable(self) -> bool:
        """Returns whether the request may be kept: neither `learn` nor OpenAI's `store` is false."""
        return self.learn is not False and getattr(self, "store", None) is not False

    @property
    def wants_receipt(self) -> bool:
        """Returns whether the answers are to come with receipts; the bodies of some dialects ask for them."""
        return getattr(self, "receipt", None) is True

    @property
    def slot(self) -> int | None:
        """Returns the slot that is to hold the text afterwards; None: it does not say."""
        asked: int | None = getattr(self, "id_slot", None)
        return None if asked == -1 else asked

    @property
    def predicted(self) -> str:
        """Returns the text that the answer is expected to resemble. Raises RequestError."""
        return ""

    @property
    def traced(self) -> bool:
        """Returns whether the response reports what was drafted."""
        return False

    def renamed(self, error: RequestError) -> RequestError:
        """Returns an error of the engine, which names fields as /generate does, with the names of this dialect."""
        ours = {ours: name for name, ours in self._sampled().items()} | dict(self.names)
        engines = ("min_new_tokens", "top_logprobs_num", "token_ids_logprob", "response_format")
        names: dict[str, str] = {name: ours[name] for name in engines if name in ours}
        names["thinking_budget"] = self.budget_field
        names |= {"max_new_tokens": self.length or self.source, "input_ids": self.source, "prompt": self.source}
        param = names.get(error.param or "", error.param)
        found = re.compile("|".join(re.escape(name) for name in names if name != "prompt"))
        message = found.sub(lambda match: names[match[0]], str(error))
        return RequestError(message if param is None or param in message else f"{param}: {message}", param, error.code)


def split_prompts(field: str, value: str | list[Any]) -> tuple[list[str] | list[list[int]], bool]:
    """Returns (prompts, batched) from a string, a list of strings, token ids, or lists of token ids."""
    single = isinstance(value, str) or (len(value) > 0 and isinstance(value[0], int))
    prompts = [value] if single else value
    if not prompts or not all(prompts):
        raise RequestError(f"{field} must not be empty", field)
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"{field} takes at most {MAX_PROMPTS} prompts; found {len(prompts)}", field)
    return prompts, not single  # type: ignore[return-value]


MAX_PARTS = 131_072  # lists, objects and fields of a body
MAX_IN_CALL = 16_384  # of the arguments of a call, which stand in a text of the body
_AT_ONCE = 1 << 20  # bytes in which is counted: a fifth of a millisecond
_QUOTED = re.compile(rb'"[^"]*"?')


def check_parts(text: bytes, max_parts: int, longest: int, field: str | None = None) -> None:
    """Raises RequestError for JSON that would take long to parse. What stands in texts does not count.

    max_parts: lists, objects and fields.  longest: entries of a list.  field: that it is in; None: it is the body.
    """
    if _parts(text) <= max_parts and _count(text, b",") <= longest:
        return
    called, field = field or "the body", field or "body"
    # Where it is no JSON, it is another text that is left out; there the parser stops.
    text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    texts = text.count(b'"') // 2
    if texts > 2 * max_parts:
        raise RequestError(f"{called} has {texts} texts, names of fields included; it may have {2 * max_parts}", field)
    text = _QUOTED.sub(b"", text)
    parts = _parts(text)
    if parts > max_parts:
        raise RequestError(f"{called} has {parts} lists, objects and fields; it may have {max_parts}", field)
    if text.count(b",") > longest:
        found = max(part.count(b",") for part in text.split(b"]"))
        if found > longest:
            raise RequestError(f"{called} has a list of {found + 1} entries; it may have {longest + 1}", field)


def _parts(text: bytes) -> int:
    return sum(_count(text, char) for char in (b"[", b"{", b":"))


def _count(text: bytes, char: bytes) -> int:
    """Counts in pieces, between which other threads run."""
    return sum(text.count(char, at, at + _AT_ONCE) for at in range(0, len(text), _AT_ONCE))
