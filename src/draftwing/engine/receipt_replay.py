"""A receipt's request run again, without drafts, and what differs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from draftwing.core import Output
from draftwing.engine.engine import Engine
from draftwing.engine.receipts import COMPLETE, Receipt, first_difference, request_of
from draftwing.engine.session import Session
from draftwing.errors import ReceiptError, RequestError
from draftwing.requests.request import GenerationRequest, LogprobParams, SpecLimits
from draftwing.requests.sampling_params import SamplingParams


class Replay(NamedTuple):
    """What became of a request that was run again.

    at: index of the first token that differs; None: all are the same.  expected, found: that token in the receipt and
    now, None where one of them had ended.  gap: log probability of `expected` less that of `found`, of the model's own
    distribution before it is edited; None where one of them had ended.  reasons: why they ended, then and now."""

    at: int | None
    expected: int | None
    found: int | None
    gap: float | None
    reasons: tuple[str, str]

    @property
    def same(self) -> bool:
        return self.at is None and self.reasons[0] == self.reasons[1]


def replay(receipt: Receipt, engine: Engine) -> Replay:
    """Runs a receipt's request again without drafts. Raises ReceiptError where this engine cannot."""
    request, expected = request_of(receipt), receipt.answer.token_ids
    found, reason = _run(engine, request)
    reasons = receipt.answer.finish_reason, reason
    index = first_difference(expected, found)
    if index is None:
        return Replay(None, None, None, None, reasons)
    was, now = (tokens[index] if index < len(tokens) else None for tokens in (expected, found))
    gap = None if was is None or now is None else _gap(engine, request, expected[:index], was, now)
    return Replay(index, was, now, gap, reasons)


def _run(engine: Engine, request: GenerationRequest) -> tuple[list[int], str]:
    tokens: list[int] = []
    for output in _outputs(engine, request):
        tokens += output.token_ids
        reason = output.finish_reason
    assert reason is not None, "a request ends"
    if reason["type"] not in COMPLETE:
        raise ReceiptError(f"the request could not be run again: {reason.get('message', reason['type'])}")
    if request.params.max_new_tokens == 0:  # the prompt alone: its answer is empty
        return [], "length"
    return tokens, str(reason["type"])


def _gap(engine: Engine, request: GenerationRequest, before: Sequence[int], was: int, now: int) -> float | None:
    """Returns by how much more likely `was` is than `now`, behind the prompt and the answer before."""
    if not all(0 <= token < engine.info.vocab_size for token in (was, now, *before)):
        return None
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True, sampling_seed=0)
    prompt = [*request.prompt_ids, *before]
    asked = GenerationRequest("", prompt, params, logprobs=LogprobParams(token_ids=(was, now)))
    for output in _outputs(engine, asked):
        if output.logprobs:
            first, second = output.logprobs[0].wanted
            return first - second
    return None


def _outputs(engine: Engine, request: GenerationRequest) -> Iterable[Output]:
    drafts = SpecLimits(0, 1, 1) if engine.info.speculates else None
    try:
        yield from Session(engine).run([request._replace(uid=os.urandom(16).hex(), limits=drafts)])
    except RequestError as error:
        raise ReceiptError(f"the request cannot be run again: {error}") from None
