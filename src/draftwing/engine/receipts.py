"""Receipts: JSON that says how an answer was made, with which anybody can have it made again.

A `Receipt` holds the request as token ids with its parameters and seed, the answer's token ids, and what else a text
depends on: a `Provenance`, whose files are given by their digests. An answer that was asked for one passes through here
at its end: request and tokens of the `Answer`, the provenance of `EngineInfo`, digests of `Digests` -> `make_receipt`.
Back again: a file -> `read_receipt` -> `check_files` -> an engine of `options_for` -> `receipt_replay.replay`.

No torch is imported before a receipt is checked: the server makes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftwing.config.options import Options
from draftwing.engine.provenance import TEXT_OPTIONS, Provenance, digests_of, model_files, sha256_of
from draftwing.errors import GenerationError, ReceiptError, RequestError
from draftwing.requests.grammar_field import Grammar, GrammarKind
from draftwing.requests.refusals import show
from draftwing.requests.request import MAX_MARKER, GenerationRequest, ThinkingBudget
from draftwing.requests.sampling_params import SamplingParams
from draftwing.version import __version__

if TYPE_CHECKING:
    from draftwing.engine.admission import EngineInfo

COMPLETE: Final = ("stop", "length")  # reasons of answers that have a receipt
_BEFORE: Final = "enable_deterministic_inference"  # in place of `fast_numerics`, in receipts of before these
_ALWAYS: Final = ("max_new_tokens", "temperature")  # parameters that a receipt has though they be the default

Count = Annotated[int, Field(ge=0, lt=2**31)]
TokenId = Count


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class AskedGrammar(_Part):
    """`Grammar` of the request."""

    kind: GrammarKind
    text: str
    whitespace: str | None


class AskedProcessor(_Part):
    """`LogitsProcessorSpec` of the request."""

    name: str
    params: str


class AskedSampling(_Part, extra="allow"):
    """Fields of `SamplingParams` that are not the default; the seed as a text, for JavaScript would round it."""

    sampling_seed: Annotated[str, Field(pattern=r"^-?[0-9]{1,19}$")]
    grammar: AskedGrammar | None = None
    logits_processor: AskedProcessor | None = None


class AskedThinking(_Part):
    """`ThinkingBudget` of the request."""

    tokens: Count
    begin: Annotated[list[TokenId], Field(max_length=MAX_MARKER)]
    end: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_MARKER)]
    open: bool
    again: bool


class Asked(_Part):
    prompt_ids: list[TokenId]
    sampling: AskedSampling
    thinking: AskedThinking | None = None


class Answered(_Part):
    token_ids: list[TokenId]
    finish_reason: Literal["stop", "length"]


class Receipt(_Part):
    """One answer. digest: SHA-256 of all other fields, see `digest_of`."""

    version: Annotated[int, Field(ge=1, le=1)] = 1  # true is no number, as it would be of a Literal
    draftwing: str
    model: str
    revision: str | None = None
    device: str
    digests: dict[str, str]
    options: dict[str, str | int | bool | None]
    request: Asked
    answer: Answered
    digest: str


def digest_of(fields: Mapping[str, Any]) -> str:
    """Returns the digest of a receipt's fields, `digest` itself left out: of their JSON with sorted names, without
    blanks and in ASCII."""
    held = {name: value for name, value in fields.items() if name != "digest"}
    return sha256_of(json.dumps(held, sort_keys=True, separators=(",", ":")))


# -- making one -------------------------------------------------------------------------------------------------------


class Complete(Protocol):
    """An answer that is complete, to a request that an engine has let in, with its seed."""

    @property
    def request(self) -> GenerationRequest: ...

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def finish_reason(self) -> dict[str, Any] | None: ...


def make_receipt(info: EngineInfo, digests: Mapping[str, str], answer: Complete) -> dict[str, Any]:
    """Returns the receipt of an answer as JSON has it."""
    provenance, request = info.provenance, answer.request
    assert provenance is not None and answer.finish_reason is not None
    thinking = request.thinking
    fields = {
        "version": 1,
        "draftwing": __version__,
        "model": info.options.model,
        "revision": info.options.revision,
        "device": provenance.device,
        "digests": dict(digests),
        "options": dict(provenance.options),
        "request": {
            "prompt_ids": request.prompt_ids,
            "sampling": _sampling(request),
            "thinking": None if thinking is None else _plain(thinking._asdict()),
        },
        "answer": {"token_ids": answer.token_ids, "finish_reason": answer.finish_reason["type"]},
    }
    return {**fields, "digest": digest_of(fields)}


def _sampling(request: GenerationRequest) -> dict[str, Any]:
    params, terms = request.params, request.terms
    assert terms is not None and params.n == 1 and params.sampling_seed is not None, "`prepare` has seen to that"
    found: dict[str, Any] = {}
    for name, field in SamplingParams.model_fields.items():
        value = getattr(params, name)
        if value != field.default or name in _ALWAYS:
            found[name] = value
    if params.max_new_tokens is None:  # the context of who checks it may be another one
        found["max_new_tokens"] = terms.new_tokens
    found["sampling_seed"] = str(params.sampling_seed)
    found |= {name: getattr(params, name)._asdict() for name in ("grammar", "logits_processor") if name in found}
    if params.logit_bias:
        found["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    plain: dict[str, Any] = _plain(found)
    return plain


def _plain(value: Any) -> Any:
    """Returns a value as JSON of any language gives it back: no tuples, and whole numbers without a point."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


# -- checking one -----------------------------------------------------------------------------------------------------


def read_receipt(text: str | bytes) -> Receipt:
    """Raises ReceiptError for what is no receipt, and for one whose fields are not those that its digest was made
    of."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReceiptError(f"expected a receipt in JSON, found something else: {error}") from None
    if isinstance(fields, dict) and ("choices" in fields or "meta_info" in fields or "output" in fields):
        raise ReceiptError("expected a receipt, found a whole response: pass its field `receipt` alone")
    try:
        receipt = Receipt.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the receipt"
        raise ReceiptError(f"{where}: {first['msg']}; found {show(first['input'])}") from None
    found = digest_of(fields)
    if found != receipt.digest:
        raise ReceiptError(
            f"the receipt was changed after it was made: its digest is {show(receipt.digest)}, that of its fields is "
            f"{found}"
        )
    if _BEFORE in receipt.options:
        exact = receipt.options.pop(_BEFORE)
        receipt.options["fast_numerics"] = receipt.device.startswith("cuda") and not exact
    unknown = next((name for name in receipt.options if name not in TEXT_OPTIONS), None)
    if unknown is not None:
        raise ReceiptError(f"options.{unknown} is not an option that a receipt has; known: {', '.join(TEXT_OPTIONS)}")
    return receipt


def request_of(receipt: Receipt) -> GenerationRequest:
    """Returns what was asked, to be asked again. Raises ReceiptError for parameters that no request can have."""
    sampling, thinking = receipt.request.sampling, receipt.request.thinking
    fields: dict[str, Any] = {**(sampling.model_extra or {}), "sampling_seed": int(sampling.sampling_seed)}
    try:
        if sampling.grammar is not None:
            fields["grammar"] = Grammar(**sampling.grammar.model_dump())
        if (processor := sampling.logits_processor) is not None:
            fields["custom_logit_processor"] = processor.name
            fields["custom_params"] = json.loads(processor.params)
        params = SamplingParams.read(fields)
        if params.n != 1:
            raise RequestError(f"n must be 1; found {params.n}")
    except (RequestError, ValueError, TypeError, RecursionError) as error:
        raise ReceiptError(f"request.sampling: {error}") from None
    budget = None
    if thinking is not None:
        markers = {"begin": tuple(thinking.begin), "end": tuple(thinking.end)}
        budget = ThinkingBudget(**{**thinking.model_dump(), **markers})
    return GenerationRequest("", receipt.request.prompt_ids, params, thinking=budget)


def options_for(receipt: Receipt, given: Mapping[str, Any]) -> Options:
    """Returns options of an engine that can check a receipt: its own, and none that draft. given: others, which
    count."""
    own = {name: value for name, value in receipt.options.items() if value is not None}
    alone = {"speculative_algorithm": "none", "max_running_requests": 1, "log_level": "error"}
    model = {"model": receipt.model, "revision": receipt.revision} if "model" not in given else {}
    return Options.from_kwargs(**{**alone, **own, **model, **given}).resolve()


def check_files(receipt: Receipt, options: Options) -> Path:
    """Reads all files of the model and returns its path. Raises ReceiptError where they are not those that the answer
    was made with, naming the parts that differ, and CheckpointError where there are none."""
    from draftwing.models.hub import resolve_model

    path = resolve_model(options.model, options.revision)
    try:
        found = digests_of(Provenance("", (), model_files(options, path), None), remembered=False)
    except GenerationError as error:
        raise ReceiptError(f"the model cannot be compared with the receipt: {error}") from None
    wanted = {part: digest for part, digest in receipt.digests.items() if part != "chat_template"}
    different = sorted(part for part in {*found, *wanted} if found.get(part) != wanted.get(part))
    if different:
        option = "--tokenizer-path" if different == ["tokenizer"] else "--model"
        raise ReceiptError(
            f"{options.model} is not the model that the receipt is of: the digest of {' and '.join(different)} "
            f"differs; name the right one with {option}"
        )
    return path


def warnings_of(receipt: Receipt, info: EngineInfo) -> list[str]:
    """Returns what is another than it was, and may be why a text differs."""
    provenance = info.provenance
    if provenance is None:
        raise ReceiptError("an engine whose weights or drafts are made up cannot check a receipt")
    found = [f"the receipt is of draftwing {receipt.draftwing}, this is {__version__}"] * (
        receipt.draftwing != __version__
    )
    if receipt.device != provenance.device:
        found.append(f"the receipt is of device {receipt.device}, this is {provenance.device}: bits may differ")
    for name, value in provenance.options:
        if name not in receipt.options or receipt.options[name] != value:
            was = receipt.options.get(name)
            found.append(f"--{name.replace('_', '-')} was {was!r} and is {value!r}")
    if receipt.digests.get("chat_template") != provenance.template:
        found.append("the chat template differs, which changes no text of a prompt that is given as token ids")
    return found


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Returns the first index at which two answers differ, None where they are the same."""
    pairs = zip(one, other, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    return None if index == max(len(one), len(other)) else index
