"""How a request is sampled and where it stops: checked once, when `SamplingParams` is made, for all APIs.

`field_schemas` has what each field takes as a JSON schema; /openapi.json and errors say the same.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)

from draftwing.errors import RequestError
from draftwing.requests.stop_regex import compile_stop

MAX_ANSWERS: Final = 128
MAX_STOPS: Final = 64
MAX_BIASES: Final = 1024  # distinct token ids
MAX_BAD_WORDS: Final = 128  # token sequences
MAX_BAD_WORD_TOKENS: Final = 16  # of one sequence
GREEDY_BELOW: Final = 1e-6  # a temperature that no float32 logit difference survives
_INT32: Final = 2**31 - 1
_UNKNOWN: Final = "is not a sampling parameter"


class Grammar(NamedTuple):
    """What an answer must be: `text` in the language that `kind` names, a JSON document where that is JSON."""

    kind: Literal["json_schema", "json_object", "regex", "ebnf", "structural_tag"]
    text: str


class LogitsProcessorSpec(NamedTuple):
    """A logits processor of the server by its name, and what it is called with, as JSON."""

    name: str
    params: str


def show(value: Any, limit: int = 80) -> str:
    """A value for an error message: bounded, and safe for integers too long to print and for lone surrogates."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__} too large to print"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def check_text(text: str, param: str) -> str:
    """Refuses lone surrogates, which no tokenizer and no UTF-8 response can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{param} must be valid Unicode; found a lone surrogate", param) from None
    return text


# -- types of fields; a ValueError's text follows the field's name ----------------------------------------------------


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _compiled(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in patterns:
        try:
            compile_stop(pattern)
        except ValueError as error:
            raise ValueError(f"{show(pattern)} {error}") from None
    return patterns


def _pairs(value: Any) -> Any:
    """{token id: bias} as pairs; JSON's keys are strings."""
    pairs = value.items() if isinstance(value, Mapping) else value
    if not isinstance(value, (Mapping, tuple)) or not all(isinstance(p, tuple) and len(p) == 2 for p in pairs):
        raise ValueError(f"must map token ids to numbers; found {show(value)}")
    whole = lambda key: isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 11  # noqa: E731
    return tuple((int(key) if whole(key) else key, bias) for key, bias in pairs)


def _distinct(pairs: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    for (token, _), (following, _) in zip(found := sorted(pairs), found[1:], strict=False):
        if token == following:
            raise ValueError(f"names token {token} twice")
    return tuple(found)


TokenId = Annotated[int, Field(ge=0, le=_INT32)]
TokenIds = Annotated[tuple[TokenId, ...], BeforeValidator(_listed)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Texts = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    BeforeValidator(_listed),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string", "minLength": 1}}]}),
]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[
    tuple[tuple[TokenId, Bias], ...],
    BeforeValidator(_pairs),
    Field(max_length=MAX_BIASES),
    AfterValidator(_distinct),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]


class SamplingParams(BaseModel):
    """How to sample and when to stop: `SamplingParams(temperature=0, max_new_tokens=64)`.

    Names and ranges are those of `/generate`'s `sampling_params`. None stands for a field's default, except for
    `max_new_tokens`. The constructor also takes:

    - `seed`, another name of `sampling_seed`;
    - one grammar: `json_schema`, `regex`, `ebnf`, `structural_tag` or `response_format`;
    - `custom_logit_processor` and `custom_params`, the name and the parameters of a logits processor.

    Raises RequestError for a field that is unknown, mistyped, out of range, or not supported.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    max_new_tokens: Annotated[int, Field(ge=1, le=_INT32)] | None = Field(
        128, description="most tokens of the answer; null runs to the context limit"
    )
    temperature: Annotated[float, AfterValidator(lambda value: 0.0 if value < GREEDY_BELOW else value)] = Field(
        1.0, ge=0, le=100, description="0 takes the likeliest token"
    )
    top_p: float = Field(1.0, gt=0, le=1, description="keep the likeliest tokens that together have this probability")
    top_k: Annotated[int, AfterValidator(lambda value: value or -1)] = Field(
        -1, ge=-1, le=_INT32, description="keep this many of the likeliest tokens; 0 and -1 keep all"
    )
    min_p: float = Field(0.0, ge=0, le=1, description="keep tokens at least this likely, relative to the likeliest")
    sampling_seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = Field(
        None, description="the same seed gives the same answer"
    )
    stop: Texts = Field((), max_length=MAX_STOPS, description="texts that end the answer")
    stop_token_ids: TokenIds = Field((), max_length=MAX_STOPS, description="token ids that end the answer")
    min_new_tokens: int = Field(0, ge=0, le=_INT32, description="no token id ends the answer before this many tokens")
    ignore_eos: bool = Field(False, description="go on past the model's end-of-text token")
    n: int = Field(1, ge=1, le=MAX_ANSWERS, description="answers per prompt")
    skip_special_tokens: bool = Field(True, description="leave special tokens out of the text")
    spaces_between_special_tokens: bool = Field(True, description="put spaces between special tokens that are shown")
    no_stop_trim: bool = Field(False, description="keep what matched a stop in the text")
    frequency_penalty: Penalty = Field(0.0, description="lowers a token's logit for each time it is in the answer")
    presence_penalty: Penalty = Field(0.0, description="lowers a token's logit if it is in the answer")
    repetition_penalty: float = Field(
        1.0, gt=0, le=2, description="above 1: makes tokens of prompt and answer less likely"
    )
    logit_bias: Biases = Field((), description=f"added to the logits of these token ids; at most {MAX_BIASES}")
    allowed_token_ids: TokenIds = Field((), min_length=1, description="only these token ids may be generated")
    bad_words: Texts = Field((), max_length=MAX_BAD_WORDS, description="texts that must not be generated")
    stop_regex: Annotated[Texts, AfterValidator(_compiled)] = Field(
        (), max_length=MAX_STOPS, description="regular expressions; a match ends the answer"
    )
    grammar: InstanceOf[Grammar] | None = None  # made of the field that was given
    logits_processor: InstanceOf[LogitsProcessorSpec] | None = None

    def __init__(self, /, **fields: Any) -> None:
        self._read(fields, _Names({}, ""))

    @classmethod
    def read(cls, fields: Mapping[str, Any], names: Mapping[str, str] | None = None, where: str = "") -> Self:
        """Makes them from the fields of a request. Raises RequestError as the constructor does, in the caller's words.

        names: field -> the name by which the user knows it; where: a prefix of that name."""
        params = cls.__new__(cls)
        params._read(fields, _Names(names or {}, where))
        return params

    def replace(self, **changes: Any) -> Self:
        """A copy with other values, which are not checked."""
        return self.model_copy(update=changes)

    def _read(self, fields: Mapping[str, Any], names: _Names) -> None:
        given = {name: value for name, value in fields.items() if value is not None and value != ()}
        if not all(isinstance(name, str) for name in given):
            raise names.error(show(next(name for name in given if not isinstance(name, str))), _UNKNOWN)
        if fields.get("max_new_tokens", 0) is None:
            given["max_new_tokens"] = None
        _translate(given, names)
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise _refusal(error, names) from None
        longest = self.max_new_tokens
        if longest is not None and self.min_new_tokens > longest:
            limit = names.names.get("max_new_tokens", "max_new_tokens")
            raise names.error(
                "min_new_tokens", f"must be at most {limit}; found {self.min_new_tokens} and {longest}"
            )  # fmt: skip
        if self.grammar is not None and (self.min_new_tokens or self.ignore_eos):
            name = "ignore_eos" if self.ignore_eos else "min_new_tokens"
            raise names.error(name, "cannot be given with a grammar, which decides where the answer may end")

    @property
    def edited(self) -> bool:
        """Whether logits are changed by something that the device knows: penalties, biases, bans."""
        return bool(
            self.frequency_penalty
            or self.presence_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.allowed_token_ids
            or self.bad_words
        )

    @property
    def guided(self) -> bool:
        """Whether what may come next is decided on the host, from the tokens so far."""
        return self.grammar is not None or self.logits_processor is not None

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p removes any token."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    def answers(self, draw: random.Random) -> list[Self]:
        """Parameters with n = 1 and a seed for each of the n answers.

        Answer 0 keeps the seed, answer i has a 63-bit hash of (seed, i). Without a seed, `draw` gives one.
        """
        seed = draw.getrandbits(63) if self.sampling_seed is None else self.sampling_seed
        return [self.replace(n=1, sampling_seed=answer_seed(seed, i)) for i in range(self.n)]

    def fit(self, room: int) -> Self:
        """Cuts the length, which the request did not ask for, to the room that the context leaves."""
        longest = self.max_new_tokens
        return self if longest is None or longest <= room else self.replace(max_new_tokens=max(room, 1))


def answer_seed(seed: int, index: int) -> int:
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# -- fields that become others ----------------------------------------------------------------------------------------


class _Format(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Free(_Format):
    type: Literal["text", "json_object"]


class _Schema(_Format):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class _SchemaFormat(_Format):
    type: Literal["json_schema"]
    json_schema: _Schema


class _TagFormat(_Format):
    type: Literal["structural_tag"]
    structures: Any = None
    triggers: Any = None
    format: Any = None


_FORMAT: TypeAdapter[Any] = TypeAdapter(Annotated[_Free | _SchemaFormat | _TagFormat, Field(discriminator="type")])
GRAMMARS: Final = ("json_schema", "regex", "ebnf", "structural_tag", "response_format")  # one may be given
NOT_BUILT: Final = ("beam_width", "stream_interval")  # 1 asks for nothing


class _Names:
    """How the caller's API calls the fields."""

    def __init__(self, names: Mapping[str, str], where: str) -> None:
        self.names, self.where = dict(names), where

    def error(self, field: str, message: str) -> RequestError:
        name = self[field]
        return RequestError(f"{name} {message}", name)

    def __getitem__(self, field: str) -> str:
        return self.where + self.names.get(field, field)


def _translate(given: dict[str, Any], names: _Names) -> None:
    """Turns fields with other names into those of `SamplingParams`."""
    for name in NOT_BUILT:
        value = given.pop(name, 1)
        if value != 1 or isinstance(value, bool):
            raise names.error(name, "is not supported by this version; leave it out")
    seed = given.pop("seed", None)
    if seed is not None:
        if "sampling_seed" in given:
            raise names.error("seed", "and sampling_seed are one parameter; give one of them")
        given["sampling_seed"] = seed
        names.names["sampling_seed"] = names.names.get("seed", "seed")
    found = [name for name in (*GRAMMARS, "grammar") if name in given]
    if len(found) > 1:
        raise names.error(found[1], f"and {names[found[0]]} cannot be given together")
    if found and found[0] != "grammar":
        given["grammar"] = _grammar(found[0], given.pop(found[0]), names)
    name, params = given.pop("custom_logit_processor", None), given.pop("custom_params", None)
    if name is not None:
        if not isinstance(name, str) or not name:
            raise names.error("custom_logit_processor", f"must be a name given at start; found {show(name)}")
        given["logits_processor"] = LogitsProcessorSpec(name, _json("custom_params", params or {}, (Mapping,), names))
    elif params:
        raise names.error("custom_params", "is for a custom_logit_processor; name one")


def _grammar(kind: Any, value: Any, names: _Names) -> Grammar | None:
    """The grammar that the field `kind` holds."""
    if kind == "response_format":
        try:
            made = _FORMAT.validate_python(value)
        except ValidationError as error:
            raise _format_refusal(error, value, names) from None
        if isinstance(made, _Free):
            return None if made.type == "text" else Grammar("json_object", "")
        if isinstance(made, _SchemaFormat):
            return Grammar("json_schema", _json(kind, made.json_schema.schema_, (Mapping, bool), names))
        return Grammar("structural_tag", _json(kind, value, (Mapping,), names))
    if kind in ("json_schema", "structural_tag") and not isinstance(value, str):
        value = _json(kind, value, (Mapping, bool) if kind == "json_schema" else (Mapping,), names)
    if not isinstance(value, str) or not value:
        raise names.error(kind, f"must be a text that is not empty; found {show(value)}")
    return Grammar(kind, check_text(value, names[kind]))


def _json(field: str, value: Any, kinds: tuple[type, ...], names: _Names) -> str:
    if isinstance(value, kinds):
        try:
            return json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            pass
    raise names.error(field, f"must be a JSON object; found {show(value)}")


# -- errors -----------------------------------------------------------------------------------------------------------


def _refusal(error: ValidationError, names: _Names) -> RequestError:
    """The first of pydantic's errors in our words: what was expected, what was found."""
    first = error.errors(include_url=False)[0]
    field, context = str(first["loc"][0]), first.get("ctx", {})
    match first["type"]:
        case "extra_forbidden" | "is_instance_of":
            return names.error(field if field.isprintable() else show(field), _UNKNOWN)
        case "value_error":
            return names.error(field, str(context["error"]))
        case "too_long":
            return names.error(field, f"takes at most {context['max_length']} entries; found {len(first['input'])}")
        case "too_short":
            return names.error(field, "must hold at least one entry, or be left out")
        case "string_too_short":
            return names.error(field, "must not hold an empty string")
        case "string_unicode":
            return names.error(field, "must be valid Unicode; found a lone surrogate")
    return names.error(field, f"must be {_expected(field_schemas()[field])}; found {show(first['input'])}")


def _format_refusal(error: ValidationError, value: Any, names: _Names) -> RequestError:
    first = error.errors(include_url=False, include_input=False)[0]
    path = first["loc"][1:]  # after the kind of format
    if not path:
        kinds = "text, json_object, json_schema, structural_tag"
        return names.error("response_format", f"must have a type, one of {kinds}; found {show(value)}")
    inner = [
        str(part)[:80] for part in path if part not in ("dict[str,any]", "bool")
    ]  # not what a union calls its parts
    name = ".".join([names["response_format"], *inner])
    known = first["type"] != "extra_forbidden"
    return RequestError(f"{name}: {first['msg']}" if known else f"{name!r} is not a known field", name)


def _expected(schema: Mapping[str, Any], one: bool = True) -> str:
    """What a JSON schema takes, in words; one: of one such value, else of several."""
    if "anyOf" in schema:
        return " or ".join(_expected(kind, one) for kind in schema["anyOf"] if kind["type"] != "null")
    kind = schema["type"]
    if kind == "boolean":
        return "true or false"
    if kind == "array":
        return f"a list of {_expected(schema['items'], False)}"
    if kind == "object":
        return f"an object of {_expected(schema['additionalProperties'], False)} by token id"
    text = {"integer": "an integer", "number": "a number", "string": "a string"}[kind]
    text = text if one else text.split()[1] + "s"
    low, above, high = (schema.get(name) for name in ("minimum", "exclusiveMinimum", "maximum"))
    if high is None:
        return text
    return f"{text} from {low} to {high}" if above is None else f"{text} above {above} and at most {high}"


def inlined(schema: Any, definitions: Mapping[str, Any] | None = None) -> Any:
    """A JSON schema without references to `definitions`, which are its own "$defs" by default."""
    if isinstance(schema, list):
        return [inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    definitions = schema.get("$defs", {}) if definitions is None else definitions
    if "$ref" in schema:
        return inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: inlined(one, definitions) for key, one in schema.items() if key not in ("$defs", "discriminator")}


@functools.cache
def field_schemas() -> dict[str, dict[str, Any]]:
    """The JSON schema of every field that `SamplingParams` can be made with."""
    schemas: dict[str, dict[str, Any]] = inlined(SamplingParams.model_json_schema())["properties"]
    del schemas["grammar"], schemas["logits_processor"]
    text, anything = {"type": "string"}, {"type": "object"}
    grammars: dict[str, dict[str, Any]] = {
        "json_schema": {"anyOf": [text, anything, {"type": "boolean"}]},
        "regex": text,
        "ebnf": text,
        "structural_tag": {"anyOf": [text, anything]},
        "response_format": inlined(_FORMAT.json_schema()),
    }
    processor = {"custom_logit_processor": text, "custom_params": anything}
    every = {**schemas, "seed": schemas["sampling_seed"], **grammars, **processor}
    return {name: {key: one for key, one in schema.items() if key != "title"} for name, schema in every.items()}
