"""From what a user wrote to `SamplingParams`: the one place where sampling fields are checked, for all APIs.

What is not built is refused by name as soon as it asks for something; values that ask for nothing are accepted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
from collections.abc import Mapping
from typing import Any

from draftwing import core
from draftwing.errors import RequestError

MAX_ANSWERS = 128
MAX_STOPS = 64
GREEDY_BELOW = 1e-6  # a temperature that no float32 logit difference survives
_INT32 = 2**31 - 1

# Fields that ask for something which is not built, each with the values that ask for nothing. None never asks.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "response_format": ({"type": "text"},),
    "stop_regex": ([],),
    "beam_width": (1,),
    "best_of": (1,),
    "custom_params": ({},),
    "custom_logit_processor": (),
    "stream_interval": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "continue_final_message": (False,),
    "lora_path": (),
    "session_params": ({},),
    "session_id": (),
    "input_embeds": (),
    "image_data": ([],),
    "audio_data": ([],),
    "video_data": ([],),
    "return_logprob": (False,),
    "logprob_start_len": (-1, 0),
    "top_logprobs_num": (0,),
    "token_ids_logprob": ([],),
    "return_text_in_logprobs": (False, True),
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
SAMPLING_NOT_BUILT = (
    "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "json_schema", "regex", "ebnf",
    "structural_tag", "stop_regex", "beam_width", "custom_params", "stream_interval",
)  # fmt: skip


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
        known = {f.name for f in dataclasses.fields(core.SamplingParams)} | {"seed", *SAMPLING_NOT_BUILT}
        for name in fields:
            if name not in known:
                raise self._error(name, "is not a sampling parameter")
        refuse_not_built({name: fields[name] for name in SAMPLING_NOT_BUILT if name in fields}, self.where)
        given = {name: value for name, value in fields.items() if value is not None and name not in SAMPLING_NOT_BUILT}
        seed = given.pop("seed", None)
        if seed is not None:
            if "sampling_seed" in given:
                raise self._error("seed", "and sampling_seed are one parameter; give one of them")
            given["sampling_seed"] = seed
            self.names["sampling_seed"] = self.names.get("seed", "seed")
        checked = {name: self._field(name, value) for name, value in given.items()}
        if fields.get("max_new_tokens", 0) is None:
            checked["max_new_tokens"] = None
        params = core.SamplingParams(**checked)
        longest = params.max_new_tokens
        if longest is not None and params.min_new_tokens > longest:
            limit = self.names.get("max_new_tokens", "max_new_tokens")
            raise self._error("min_new_tokens", f"must be at most {limit}; found {params.min_new_tokens} and {longest}")
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
            case "stop":
                return self._stops(value)
            case "stop_token_ids":
                return self._stop_ids(value)
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

    def _stops(self, value: Any) -> tuple[str, ...]:
        stops = (value,) if isinstance(value, str) else value
        if not isinstance(stops, (list, tuple)) or not all(isinstance(s, str) for s in stops):
            raise self._error("stop", f"must be a string or a list of strings; found {show(value)}")
        if len(stops) > MAX_STOPS:
            raise self._error("stop", f"takes at most {MAX_STOPS} strings; found {len(stops)}")
        if not all(stops):
            raise self._error("stop", "must not hold an empty string")
        for text in stops:
            check_text(text, self._name("stop"))
        return tuple(stops)

    def _stop_ids(self, value: Any) -> tuple[int, ...]:
        if not isinstance(value, (list, tuple)):
            raise self._error("stop_token_ids", f"must be a list of token ids; found {show(value)}")
        if len(value) > MAX_STOPS:
            raise self._error("stop_token_ids", f"takes at most {MAX_STOPS} ids; found {len(value)}")
        return tuple(self._integer("stop_token_ids", token, 0, _INT32) for token in value)

    def _name(self, field: str) -> str:
        return self.where + self.names.get(field, field)

    def _error(self, field: str, message: str) -> RequestError:
        return RequestError(f"{self._name(field)} {message}", self._name(field))
