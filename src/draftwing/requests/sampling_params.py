"""From what a user wrote to `SamplingParams`: the one place where sampling fields are checked, for all APIs.

What is not built is refused by name as soon as it asks for something; values that ask for nothing are accepted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
from collections.abc import Mapping
from typing import Any

from draftwing import core
from draftwing.errors import RequestError
from draftwing.text.stop_regex import compile_stop

MAX_ANSWERS = 128
MAX_STOPS = 64
# Fields of which one may be given.
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag", "response_format")
_FORMATS = {
    "text": {"type"},
    "json_object": {"type"},
    "json_schema": {"type", "json_schema"},
    "structural_tag": {"type", "structures", "triggers", "format"},
}
_SCHEMA_KEYS = {"name", "description", "schema", "strict"}
GREEDY_BELOW = 1e-6  # a temperature that no float32 logit difference survives
_INT32 = 2**31 - 1

# Fields that ask for something which is not built, each with the values that ask for nothing. None never asks.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "beam_width": (1,),
    "stream_interval": (1,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": ("none", "medium"),
    "verbosity": ("medium",),
    "lora_path": (),
    "session_params": ({},),
    "session_id": (),
    "input_embeds": (),
    "image_data": ([],),
    "audio_data": ([],),
    "video_data": ([],),
    "return_hidden_states": (False,),
    "return_entropy": (False,),
    "return_prompt_token_ids": (False,),
    "return_token_ids": (False,),
    "return_meta_info": (False,),
    "return_cached_tokens_details": (False,),
    "return_spec_tokens_details": (False,),
    "extra_key": ("",),
}

# Fields of `/generate`'s sampling_params that are refused, as above.
SAMPLING_NOT_BUILT = ("beam_width", "stream_interval")


# Names of fields that become others of `core.SamplingParams`.
_OTHER_NAMES = ("seed", *GRAMMARS, "custom_logit_processor", "custom_params")


def refuse_not_built(fields: Mapping[str, Any], where: str = "") -> None:
    """Raises RequestError for a field that asks for what is not built. `where` is a prefix for its name."""
    for name, value in fields.items():
        if value is None or name not in NOT_BUILT:
            continue
        # 0 == False in Python but not for a user: only numbers are equal across types.
        neutral = any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in NOT_BUILT[name])
        if not neutral:
            raise RequestError(f"{where}{name} is not supported by this version; leave it out", param=where + name)


def sampling_params(
    fields: Mapping[str, Any], names: Mapping[str, str] | None = None, where: str = ""
) -> core.SamplingParams:
    """Checked parameters from fields named as in `/generate`'s `sampling_params`.

    None stands for the default, but for `max_new_tokens`, where it means up to the context limit.

    names: field -> the name by which the user knows it, for errors; where: a prefix of that name.
    Raises RequestError, with `param` set, for an unknown, mistyped or out-of-range field.
    """
    return _Checker(names or {}, where).build(fields)


class SamplingParams(core.SamplingParams):
    """How to sample and when to stop; fields are named as in `/generate`'s `sampling_params`.

    `stop` is a string or several, `seed` another name of `sampling_seed`, `max_new_tokens=None` runs to the context
    limit. Raises RequestError for a field that is unknown, mistyped, out of range, or not supported yet.
    """

    def __init__(self, **fields: Any) -> None:
        checked = sampling_params(fields)
        super().__init__(**_fields(checked))


def as_params(value: core.SamplingParams | Mapping[str, Any] | None) -> core.SamplingParams:
    """Checked parameters from an object or a mapping of fields; None gives the defaults."""
    if value is None:
        return core.SamplingParams()
    if isinstance(value, Mapping):
        return sampling_params(value)
    if not isinstance(value, core.SamplingParams):
        raise RequestError(f"params must be SamplingParams or a dict of its fields; found {show(value)}", "params")
    return sampling_params(_fields(value))


def _fields(params: core.SamplingParams) -> dict[str, Any]:
    return {f.name: getattr(params, f.name) for f in dataclasses.fields(core.SamplingParams)}


def answers(params: core.SamplingParams, draw: random.Random) -> list[core.SamplingParams]:
    """One `SamplingParams` with n = 1 and a seed for each of the n answers.

    Answer 0 keeps the seed, answer i has a 63-bit hash of (seed, i). Without a seed, `draw` gives one.
    """
    seed = draw.getrandbits(63) if params.sampling_seed is None else params.sampling_seed
    return [dataclasses.replace(params, n=1, sampling_seed=answer_seed(seed, i)) for i in range(params.n)]


def answer_seed(seed: int, index: int) -> int:
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def fit_default(params: core.SamplingParams, room: int) -> core.SamplingParams:
    """Parameters whose length is a default, not a wish: it is cut to the room that the context leaves."""
    longest = params.max_new_tokens
    if longest is None or longest <= room:
        return params
    return dataclasses.replace(params, max_new_tokens=max(room, 1))


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


class _Checker:
    """Checks one field at a time; errors name the field as the user wrote it."""

    def __init__(self, names: Mapping[str, str], where: str) -> None:
        self.names, self.where = dict(names), where

    def build(self, fields: Mapping[str, Any]) -> core.SamplingParams:
        known = {f.name for f in dataclasses.fields(core.SamplingParams)} | set(_OTHER_NAMES) | set(SAMPLING_NOT_BUILT)
        made = {"grammar": core.Grammar, "logit_processor": core.Processor}  # here, of fields with other names
        for name, value in fields.items():
            if name not in known or (name in made and value is not None and not isinstance(value, made[name])):
                raise self._error(show(name) if not isinstance(name, str) else name, "is not a sampling parameter")
        refuse_not_built({name: fields[name] for name in SAMPLING_NOT_BUILT if name in fields}, self.where)
        given = {name: value for name, value in fields.items() if value is not None and name not in SAMPLING_NOT_BUILT}
        seed = given.pop("seed", None)
        if seed is not None:
            if "sampling_seed" in given:
                raise self._error("seed", "and sampling_seed are one parameter; give one of them")
            given["sampling_seed"] = seed
            self.names["sampling_seed"] = self.names.get("seed", "seed")
        self._one_grammar(given)
        self._processor(given)
        checked = {name: self._field(name, value) for name, value in given.items()}
        if fields.get("max_new_tokens", 0) is None:
            checked["max_new_tokens"] = None
        params = core.SamplingParams(**checked)
        longest = params.max_new_tokens
        if longest is not None and params.min_new_tokens > longest:
            limit = self.names.get("max_new_tokens", "max_new_tokens")
            raise self._error("min_new_tokens", f"must be at most {limit}; found {params.min_new_tokens} and {longest}")
        if params.grammar is not None and (params.min_new_tokens or params.ignore_eos):
            name = "ignore_eos" if params.ignore_eos else "min_new_tokens"
            raise self._error(name, "cannot be given with a grammar, which decides where the answer may end")
        return params

    def _field(self, name: str, value: Any) -> Any:
        match name:
            case "temperature":
                number = self._number(name, value, 0.0, 100.0)
                return 0.0 if number < GREEDY_BELOW else number
            case "top_p":
                number = self._number(name, value, 0.0, 1.0)
                if number == 0:
                    raise self._error(name, "must be above 0 and at most 1; found 0")
                return number
            case "min_p":
                return self._number(name, value, 0.0, 1.0)
            case "top_k":
                return self._integer(name, value, -1, _INT32) or -1  # 0 and -1 both keep every token
            case "max_new_tokens":
                return self._integer(name, value, 1, _INT32)
            case "min_new_tokens":
                return self._integer(name, value, 0, _INT32)
            case "n":
                return self._integer(name, value, 1, MAX_ANSWERS)
            case "sampling_seed":
                return self._integer(name, value, -(2**63), 2**63 - 1)
            case "frequency_penalty" | "presence_penalty":
                return self._number(name, value, -2.0, 2.0)
            case "repetition_penalty":
                number = self._number(name, value, 0.0, 2.0)
                if number == 0:
                    raise self._error(name, "must be above 0 and at most 2; found 0")
                return number
            case "logit_bias":
                return self._biases(value)
            case "stop" | "bad_words":
                return self._texts(name, value)
            case "stop_regex":
                return self._patterns(self._texts(name, value))
            case "stop_token_ids":
                return self._ids(name, value, MAX_STOPS)
            case "allowed_token_ids":
                if value == []:
                    raise self._error(name, "must hold at least one id, or be left out")
                return self._ids(name, value, None)
            case "grammar" | "logit_processor":
                return value  # made here, of checked parts
            case _:
                if not isinstance(value, bool):
                    raise self._error(name, f"must be true or false; found {show(value)}")
                return value

    def _number(self, name: str, value: Any, low: float, high: float) -> float:
        # Integers are compared before the conversion: a huge one does not fit a float.
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
        if not ok or not math.isfinite(value):
            raise self._error(name, f"must be a number from {low:g} to {high:g}; found {show(value)}")
        return float(value)

    def _integer(self, name: str, value: Any, low: int, high: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self._error(name, f"must be an integer from {low} to {high}; found {show(value)}")
        return value

    def _texts(self, name: str, value: Any) -> tuple[str, ...]:
        texts = (value,) if isinstance(value, str) else value
        if not isinstance(texts, (list, tuple)) or not all(isinstance(s, str) for s in texts):
            raise self._error(name, f"must be a string or a list of strings; found {show(value)}")
        most = core.MOST_BAD_WORDS if name == "bad_words" else MAX_STOPS
        if len(texts) > most:
            raise self._error(name, f"takes at most {most} strings; found {len(texts)}")
        if not all(texts):
            raise self._error(name, "must not hold an empty string")
        for text in texts:
            check_text(text, self._name(name))
        return tuple(texts)

    def _patterns(self, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                compile_stop(pattern)
            except ValueError as error:
                raise self._error("stop_regex", f"{show(pattern)} {error}") from None
        return patterns

    def _ids(self, name: str, value: Any, most: int | None) -> tuple[int, ...]:
        if not isinstance(value, (list, tuple)):
            raise self._error(name, f"must be a list of token ids; found {show(value)}")
        if most is not None and len(value) > most:
            raise self._error(name, f"takes at most {most} ids; found {len(value)}")
        return tuple(self._integer(name, token, 0, _INT32) for token in value)

    def _biases(self, value: Any) -> tuple[tuple[int, float], ...]:
        """From {token id: bias}, ids as JSON's strings or integers, or from pairs."""
        pairs = value.items() if isinstance(value, Mapping) else value
        if not isinstance(value, (Mapping, tuple)) or not all(isinstance(p, tuple) and len(p) == 2 for p in pairs):
            raise self._error("logit_bias", f"must map token ids to numbers; found {show(value)}")
        if len(value) > core.MOST_BIASES:
            raise self._error("logit_bias", f"takes at most {core.MOST_BIASES} tokens; found {len(value)}")
        biases: dict[int, float] = {}
        for key, bias in pairs:
            token = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 11 else key
            token = self._integer("logit_bias", token, 0, _INT32)
            if token in biases:
                raise self._error("logit_bias", f"names token {token} twice")
            biases[token] = self._number("logit_bias", bias, -100.0, 100.0)
        return tuple(sorted(biases.items()))

    def _one_grammar(self, given: dict[str, Any]) -> None:
        """Turns the grammar that is given, if any, into the field `grammar`."""
        found = [name for name in (*GRAMMARS, "grammar") if name in given]
        if len(found) > 1:
            raise self._error(found[1], f"and {self._name(found[0])} cannot be given together")
        if not found or found[0] == "grammar":
            return
        kind, value = found[0], given.pop(found[0])
        if kind == "response_format":
            made = self._response_format(value)
            if made is not None:
                given["grammar"] = made
            return
        text = value
        if kind in ("json_schema", "structural_tag") and not isinstance(value, str):
            text = self._json(kind, value, (Mapping, bool) if kind == "json_schema" else (Mapping,))
        if not isinstance(text, str) or not text:
            raise self._error(kind, f"must be a text that is not empty; found {show(value)}")
        check_text(text, self._name(kind))
        given["grammar"] = core.Grammar(kind, text)  # type: ignore[arg-type]

    def _response_format(self, value: Any) -> core.Grammar | None:
        """OpenAI's field: {"type": "json_schema", "json_schema": {"name", "schema", "strict"}} and others."""
        kind = value.get("type") if isinstance(value, Mapping) else None
        if not isinstance(kind, str) or kind not in _FORMATS:
            raise self._error("response_format", f"must have a type, one of {', '.join(_FORMATS)}; found {show(value)}")
        self._only(value, _FORMATS[kind], "response_format")
        if kind == "text":
            return None
        if kind == "json_object":
            return core.Grammar("json_object", "")
        if kind == "structural_tag":
            return core.Grammar("structural_tag", self._json("response_format", value, (Mapping,)))
        inner = value.get("json_schema")
        if not isinstance(inner, Mapping) or inner.get("schema") is None:
            raise self._error("response_format", f"must have json_schema.schema; found {show(value)}")
        self._only(inner, _SCHEMA_KEYS, "response_format.json_schema")
        if not isinstance(inner.get("strict"), bool | None):
            raise self._error("response_format", f"json_schema.strict must be a boolean; found {show(inner['strict'])}")
        return core.Grammar("json_schema", self._json("response_format", inner["schema"], (Mapping, bool)))

    def _only(self, value: Mapping[Any, Any], known: set[str], name: str) -> None:
        other = next((key for key in value if key not in known), None)
        if other is not None:
            full = f"{self.where}{name}.{str(other)[:80]}"
            raise RequestError(f"{full!r} is not a known field", full)

    def _processor(self, given: dict[str, Any]) -> None:
        """Turns `custom_logit_processor` and `custom_params` into the field `logit_processor`."""
        name, params = given.pop("custom_logit_processor", None), given.pop("custom_params", None)
        if name is None:
            if params:
                raise self._error("custom_params", "is for a custom_logit_processor; name one")
            return
        if not isinstance(name, str) or not name:
            raise self._error("custom_logit_processor", f"must be a name given at start; found {show(name)}")
        given["logit_processor"] = core.Processor(name, self._json("custom_params", params or {}, (Mapping,)))

    def _json(self, name: str, value: Any, kinds: tuple[type, ...]) -> str:
        if isinstance(value, kinds):
            try:
                return json.dumps(value, allow_nan=False)
            except (TypeError, ValueError, RecursionError):
                pass
        raise self._error(name, f"must be a JSON object; found {show(value)}")

    def _name(self, field: str) -> str:
        return self.where + self.names.get(field, field)

    def _error(self, field: str, message: str) -> RequestError:
        return RequestError(f"{self._name(field)} {message}", self._name(field))
