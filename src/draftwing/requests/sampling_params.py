"""How a request is sampled and where it stops: checked once, when `SamplingParams` is made, for all APIs.

`field_schemas` has what each field takes as a JSON schema; /openapi.json and errors say the same.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    InstanceOf,
    ValidationError,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import CoreSchema

from draftwing.plain import plain
from draftwing.requests.grammar_field import (
    GRAMMARS,
    Grammar,
    as_json,
    grammar_schemas,
    inlined,
    read_grammar,
    read_structured,
)
from draftwing.requests.refusals import UNKNOWN, Names, bounded, refusal, show
from draftwing.requests.stop_regex import Patterns

_TAILS = "use top_p, top_k and min_p"
_HEAT = "use temperature and min_p"
_REPEATS = "use dry_multiplier, repetition_penalty, frequency_penalty and presence_penalty"
_ORDER = "the order of samplers is fixed"
_TABLE: tuple[tuple[tuple[Any, ...], str, str], ...] = (
    ((1,), _TAILS, "typical_p typical tfs_z tfs"),
    ((0,), _TAILS, "top_a epsilon_cutoff eta_cutoff"),
    ((0, -1), _TAILS, "top_n_sigma nsigma"),
    ((0,), _HEAT, "dynatemp_range smoothing_factor xtc_probability mirostat mirostat_mode"),
    ((False,), _HEAT, "dynamic_temperature"),
    ((0, -1), _HEAT, "adaptive_target"),
    ((0,), _REPEATS, "no_repeat_ngram_size penalty_alpha"),
    ((1,), _REPEATS, "encoder_repetition_penalty"),
    (([], ""), _ORDER, "samplers sampler_priority sampler_order"),
    ((False,), _ORDER, "temperature_last"),
    ((True,), "use temperature: 0", "do_sample"),
    ((0,), "use logprobs and top_logprobs", "n_probs top_n_tokens"),
    ((1,), "leave it out", "guidance_scale"),
    (("",), "leave it out", "negative_prompt"),
    ((False,), "use ignore_eos", "ban_eos_token"),
    ((1,), "use n", "best_of"),
)
NEUTRAL_SAMPLERS: Final = {name: values for values, _, names in _TABLE for name in names.split()}
INSTEAD: Final = {name: instead for _, instead, names in _TABLE for name in names.split()}
# Of these samplers: they ask for nothing without them. DRY looks at the whole answer, without breakers.
SAMPLER_HINTS: Final = (
    "adaptive_decay dry_penalty_last_n dry_sequence_breakers dynatemp_exponent dynatemp_high dynatemp_low min_keep "
    "mirostat_eta mirostat_tau smoothing_curve xtc_threshold"
)


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Returns whether a value is null, or one of those that ask for nothing."""
    # 0 == False in Python but not for a user: only numbers are equal across types.
    return value is None or any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral)


def not_built(name: str) -> str:
    """Returns what to say of a field that is not built."""
    return f"is not supported by this version; {INSTEAD.get(name, 'leave it out')}"


MAX_ANSWERS: Final = 128
MAX_STOPS: Final = 64
MAX_BIASES: Final = 1024  # distinct token ids
MAX_BAD_WORDS: Final = 128  # token sequences
MAX_BAD_WORD_TOKENS: Final = 16  # of one sequence
MAX_BAD_WORD: Final = 512  # characters
EDITING: Final = ("repetition_penalty", "dry_multiplier")  # defaults of models that change logits
MAX_REPEAT: Final = 32  # tokens of a repetition that count
GREEDY_BELOW: Final = 1e-6  # a temperature that no float32 logit difference survives
_INT32: Final = 2**31 - 1


class LogitsProcessorSpec(NamedTuple):
    """A logits processor of the server by its name, and what it is called with, as JSON."""

    name: str
    params: str


# -- types of fields; a ValueError's text follows the field's name ----------------------------------------------------


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _compiled(value: Any, check: Callable[[Any], tuple[str, ...]]) -> tuple[str, ...]:
    if isinstance(value, Patterns):
        return value
    patterns = check(value)
    return Patterns.of(patterns) if patterns else patterns


def _pairs(value: Any) -> Any:
    """{token id: bias} as pairs; JSON's keys are strings."""
    if isinstance(value, Mapping) and len(value) > MAX_BIASES:  # before a million pairs are made of them
        raise ValueError(f"takes at most {MAX_BIASES} entries; found {len(value)}")
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


def _or_one(schema: dict[str, Any]) -> None:
    """Documents that a text may stand for a list of one."""
    several = {key: schema.pop(key) for key in ("type", "items", "maxItems")}
    schema["anyOf"] = [several["items"], several]


TokenId = Annotated[int, Field(ge=0, le=_INT32)]
TokenIds = Annotated[tuple[TokenId, ...], BeforeValidator(_listed)]
Budget = Annotated[int, Field(ge=-1, le=_INT32), AfterValidator(lambda value: None if value < 0 else value)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_listed)]
Words = Annotated[tuple[Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD)], ...], BeforeValidator(_listed)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[
    tuple[tuple[TokenId, Bias], ...],
    BeforeValidator(_pairs),
    Field(max_length=MAX_BIASES),
    AfterValidator(_distinct),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_BIASES,
        }
    ),
]


class SamplingParams(BaseModel):
    """How to sample and when to stop: `SamplingParams(temperature=0, max_new_tokens=64)`.

    Names and ranges are those of `/generate`'s `sampling_params`. Of fields that are not set, or None, the model's own
    defaults hold where it has some (`model_fields_set` has which were set), else those below; None as
    `max_new_tokens` is no limit. The constructor also takes:

    - `seed`, `max_tokens` and `min_tokens`, other names of `sampling_seed`, `max_new_tokens` and `min_new_tokens`;
    - one grammar: `json_schema`, `regex`, `ebnf`, `structural_tag`, `response_format`, or vLLM's `structured_outputs`,
      which older versions of it call `guided_decoding`;
    - `custom_logit_processor` and `custom_params`, the name and the parameters of a logits processor.

    Raises RequestError for a field that is unknown, mistyped, out of range, or not supported.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    max_new_tokens: Annotated[int, Field(ge=0, le=_INT32)] | None = Field(
        128,
        description="maximum tokens of the answer; null runs to the context limit, 0 computes the prompt alone",
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
    stop: Texts = Field((), max_length=MAX_STOPS, description="texts that end the answer", json_schema_extra=_or_one)
    stop_token_ids: TokenIds = Field((), max_length=MAX_STOPS, description="token ids that end the answer")
    min_new_tokens: int = Field(0, ge=0, le=_INT32, description="no token id ends the answer before this many tokens")
    thinking_budget: Budget | None = Field(
        None, description="maximum tokens of reasoning, which the model's own marker then ends; -1 is no limit"
    )
    ignore_eos: bool = Field(False, description="go on past the model's end-of-text token")
    n: int = Field(1, ge=1, le=MAX_ANSWERS, description="answers per prompt")
    skip_special_tokens: bool = Field(True, description="leave special tokens out of the text")
    spaces_between_special_tokens: bool = Field(True, description="accepted; special tokens are decoded as they are")
    no_stop_trim: bool = Field(False, description="keep what matched a stop in the text")
    frequency_penalty: Penalty = Field(0.0, description="lowers a token's logit for each time it is in the answer")
    presence_penalty: Penalty = Field(0.0, description="lowers a token's logit if it is in the answer")
    repetition_penalty: float = Field(
        1.0, ge=0.01, le=2, description="above 1: makes tokens of prompt and answer less likely"
    )
    dry_multiplier: float = Field(
        0.0, ge=0, le=10, description="above 0: makes tokens less likely by which the answer goes on repeating itself"
    )
    dry_base: float = Field(1.75, ge=1, le=4, description="by how much more with each further token that was repeated")
    dry_allowed_length: int = Field(2, ge=1, le=MAX_REPEAT - 1, description="tokens that may repeat before that")
    logit_bias: Biases = Field((), description=f"added to the logits of these token ids; at most {MAX_BIASES}")
    allowed_token_ids: TokenIds = Field((), min_length=1, description="only these token ids may be generated")
    bad_words: Words = Field(
        (), max_length=MAX_BAD_WORDS, description="texts that must not be generated", json_schema_extra=_or_one
    )
    stop_regex: Annotated[Texts, WrapValidator(_compiled)] = Field(
        (),
        max_length=MAX_STOPS,
        description="regular expressions; a match ends the answer",
        json_schema_extra=_or_one,
    )
    grammar: InstanceOf[Grammar] | None = None  # made of the field that was given
    logits_processor: InstanceOf[LogitsProcessorSpec] | None = None

    def __init__(self, /, **fields: Any) -> None:
        self._read(plain(fields), Names({}, ""), {})

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return bounded(handler(source))

    @classmethod
    def read(
        cls, fields: Mapping[str, Any], names: Mapping[str, str] | None = None, where: str = "",
        defaults: Mapping[str, Any] | None = None,
    ) -> Self:  # fmt: skip
        """Makes them from the fields of a request. Raises RequestError as the constructor does, in the caller's words.

        names: field -> the name by which the user knows it; where: a prefix of that name; defaults: see `unset`."""
        params = cls.__new__(cls)
        params._read(fields, Names(names or {}, where), defaults or {})
        return params

    def __repr_args__(self) -> Any:
        return ((name, value) for name, value in super().__repr_args__() if name in self.model_fields_set)

    def __str__(self) -> str:
        return repr(self)

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with other values, which are not checked."""
        return self.model_copy(update=changes)

    def _read(self, fields: Mapping[str, Any], names: Names, defaults: Mapping[str, Any]) -> None:
        given = {name: value for name, value in fields.items() if value is not None and value != ()}
        if not all(isinstance(name, str) for name in given):
            raise names.error(show(next(name for name in given if not isinstance(name, str))), UNKNOWN)
        if any(fields.get(name, 0) is None for name in ("max_new_tokens", "max_tokens")):
            given.setdefault("max_new_tokens", None)
        _translate(given, names)
        given |= unset(given, defaults)
        if len(given) > len(type(self).model_fields):  # so many that a list of them would take long
            raise names.error(next(name for name in given if name not in type(self).model_fields), UNKNOWN)
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise refusal(error, names, field_schemas()) from None
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
        """Returns whether logits are changed by something that the device knows: penalties, biases, bans."""
        return self.penalised or bool(self.allowed_token_ids or self.bad_words)

    @property
    def penalised(self) -> bool:
        """Returns whether there are penalties or biases."""
        added = self.frequency_penalty or self.presence_penalty or self.dry_multiplier
        return bool(added or self.repetition_penalty != 1.0 or self.logit_bias)

    @property
    def guided(self) -> bool:
        """Returns whether what may come next is decided on the host, from the tokens so far."""
        return self.grammar is not None or self.logits_processor is not None

    @property
    def filtered(self) -> bool:
        """Returns whether top-k, top-p or min-p removes any token."""
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


def unset(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a model's defaults say of fields that a request did not set.

    A request that sets temperature 0 asks for the likeliest token, as `do_sample: false` does: no default changes which
    that is."""
    asked = given.get("temperature")
    greedy = isinstance(asked, (int, float)) and asked < GREEDY_BELOW
    left = {name: value for name, value in defaults.items() if name not in given}
    return {name: value for name, value in left.items() if not (greedy and name in EDITING)}


def answer_seed(seed: int, index: int) -> int:
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# -- fields that become others ----------------------------------------------------------------------------------------


NOT_BUILT: Final = ("beam_width",)
_NEUTRAL: Final = dict.fromkeys(NOT_BUILT, (1,)) | NEUTRAL_SAMPLERS
OTHER_NAMES: Final = {"seed": "sampling_seed", "max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
_ELSEWHERE: Final = dict.fromkeys(  # of vLLM's, what is asked for beside the sampling
    ("logprobs", "prompt_logprobs"),
    "is asked for beside these fields: return_logprob=True, top_logprobs_num, and logprob_start_len=0 for the prompt's",
)
HINTS: Final = ("stream_interval",)  # how many events a stream has is left to the server; 1 asks for nothing


def _translate(given: dict[str, Any], names: Names) -> None:
    """Turns fields with other names into those of `SamplingParams`."""
    for name, neutral in _NEUTRAL.items():
        if not is_neutral(given.pop(name, None), neutral):
            raise names.error(name, not_built(name))
    for name, said in _ELSEWHERE.items():
        if name in given:
            raise names.error(name, said)
    for name in (*HINTS, *SAMPLER_HINTS.split()):
        given.pop(name, None)
    for other, name in OTHER_NAMES.items():
        if other in given:
            if given.get(name) is not None:
                raise names.error(other, f"and {name} are one parameter; give one of them")
            given[name] = given.pop(other)
            names.names[name] = names.names.get(other, other)
    also = dict[str, str]()  # fields by the kinds of grammar that they are
    for field in ("structured_outputs", "guided_decoding"):
        made = read_structured(field, given.pop(field), names) if field in given else None
        if made is not None:
            if made[0] in given:
                raise names.error(field, f"and {names.where}{also.get(made[0], made[0])} cannot be given together")
            given[made[0]], also[made[0]] = made[1], field
    found = [name for name in (*GRAMMARS, "grammar") if name in given]
    if len(found) > 1:
        raise names.error(found[1], f"and {names[found[0]]} cannot be given together")
    if found and found[0] != "grammar":
        given["grammar"] = read_grammar(found[0], given.pop(found[0]), names)
    name, params = given.pop("custom_logit_processor", None), given.pop("custom_params", None)
    if name is None and isinstance(params, Mapping) and set(params) == {"thinking_budget"}:  # as SGLang has it
        if "thinking_budget" not in given:
            given["thinking_budget"] = params["thinking_budget"]
            names.names["thinking_budget"] = f"{names.names.get('custom_params', 'custom_params')}.thinking_budget"
        params = None
    if name is not None:
        if not isinstance(name, str) or not name:
            raise names.error("custom_logit_processor", f"must be a name given at start; found {show(name)}")
        given["logits_processor"] = LogitsProcessorSpec(name, as_json("custom_params", params or {}, (Mapping,), names))
    elif params:
        raise names.error("custom_params", "is for a custom_logit_processor; name one")


@functools.cache
def field_schemas() -> dict[str, dict[str, Any]]:
    """Returns the JSON schema of every field that `SamplingParams` can be made with."""
    schemas: dict[str, dict[str, Any]] = inlined(SamplingParams.model_json_schema())["properties"]
    del schemas["grammar"], schemas["logits_processor"]
    processor = {"custom_logit_processor": {"type": "string"}, "custom_params": {"type": "object"}}
    others = {other: schemas[name] for other, name in OTHER_NAMES.items()}
    every = {**schemas, **others, **grammar_schemas(), **processor}
    return {name: {key: one for key, one in schema.items() if key != "title"} for name, schema in every.items()}
