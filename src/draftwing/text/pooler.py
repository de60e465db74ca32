"""Vectors of texts, and how well texts answer a query: requests without an answer, and what is read of their ends.

A score is the cosine of two vectors where the model's files say that it makes some. Any other model is asked whether
a document meets what a query wants, in the words of the rerankers that are language models; the score is the
probability of "yes" against "no" as the next token. A reranker that is an encoder has a head for it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from draftwing.errors import TOO_LONG, GenerationError, RequestError
from draftwing.requests.pooling import Pooling
from draftwing.requests.request import GenerationRequest, LogprobParams, SpecLimits
from draftwing.requests.sampling_params import SamplingParams
from draftwing.text.answer import Answer
from draftwing.text.tokenizer import Tokenizer

Vector = npt.NDArray[np.float32]
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_BEFORE = f"<|im_start|>system\n{_JUDGE}<|im_end|>\n<|im_start|>user\n"
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_DIGITS = 9  # that tell any two numbers in float32 apart
_EXACT_POWERS = 22  # of ten, that float64 has exactly
_TINY = 1e-45  # below all in float32 but 0
_NOTHING = SamplingParams(max_new_tokens=0, temperature=0.0)
_NO_DRAFTS = SpecLimits(0, 1, 1)


class Pooler:
    """Makes the requests for vectors and scores of one model, and reads their answers."""

    def __init__(self, tokenizer: Tokenizer, pooling: Pooling, hidden_size: int, context_length: int) -> None:
        self._tokenizer, self._pooling, self._hidden_size = tokenizer, pooling, hidden_size
        self._most = context_length - 1  # an engine wants room for a token, which nobody draws

    @property
    def judges(self) -> bool:
        """Returns whether scores are judgements, and not cosines."""
        return not self._pooling.stated

    # -- vectors ------------------------------------------------------------------------------------------------------

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raises RequestError where vectors cannot have so many numbers, or where there are none of this model."""
        if self._pooling.refused:
            raise RequestError(f"this model makes no embeddings here: {self._pooling.refused}", "model")
        if dimensions is not None and not 1 <= dimensions <= self._hidden_size:
            raise RequestError(
                f"dimensions must be from 1 to {self._hidden_size}, the model's hidden size; found {dimensions}",
                "dimensions",
            )

    def vector_requests(self, prompts: Iterable[Sequence[int]]) -> list[GenerationRequest]:
        """Returns a request for the vector of each prompt."""
        return [_request(ids, self._states) for ids in prompts]

    @property
    def _states(self) -> LogprobParams:
        """Returns what is asked of a prompt: the state of its last token, or of all."""
        start = -1 if self._pooling.kind == "last" else 0
        return LogprobParams(start=start, hidden=self._hidden_size, shown=False)

    def vector(self, answer: Answer, dimensions: int | None = None) -> Vector:
        """Returns the vector of a finished answer, [dimensions] or [H]. Raises GenerationError for one that was
        aborted, or is not finite."""
        _check(answer)
        assert answer.first is not None and answer.first.hidden is not None
        # A prompt's entry is what its token's log probability comes from: the state of the token before.
        states = [one.hidden for one in answer.prompt_logprobs if one is not None and one.hidden is not None]
        states.append(answer.first.hidden)
        vector = _finite(self._pooled(states)[:dimensions])
        if self._pooling.normalize:
            vector = vector / max(math.sqrt(float(vector @ vector)), 1e-12)
        return vector.astype(np.float32)

    def _pooled(self, states: Sequence[array[float]]) -> npt.NDArray[np.float64]:
        if self._pooling.kind == "mean":
            return np.asarray(states, np.float64).mean(0)
        return np.asarray(states[0 if self._pooling.kind == "cls" else -1], np.float64)

    # -- scores -------------------------------------------------------------------------------------------------------

    def judged(
        self,
        query: str,
        document: str,
        instruction: str | None,
        field: str,
        truncate: bool = False,
    ) -> GenerationRequest:
        """Returns the request that asks a model whether a document meets a query. Its parts are tokenized one by one,
        as the rerankers' own code does. truncate: leaves out the end of a document that is too long. Raises
        RequestError, naming `field`, for one that is too long otherwise."""
        if self._pooling.scores:
            ids, second = self._tokenizer.encode_pair(query, document)
            return _request(self.fit(ids, field, truncate, self.ending), self._states)._replace(second=second)
        ids = self._question(query, document, instruction, field, truncate)
        return _request(ids, LogprobParams(token_ids=self.answers()))

    def _question(self, query: str, document: str, instruction: str | None, field: str, truncate: bool) -> list[int]:
        asked = f"<Instruct>: {instruction or INSTRUCTION}\n\n<Query>: {query}\n<Document>: {document}"
        before, after = f"{_JUDGE}\n\n", "\nAnswer:"
        if len(self._encode("<|im_start|><|im_end|>")) == 2:
            before, after = _BEFORE, _AFTER
        elif self._tokenizer.chat_source is not None:
            messages = [{"role": "system", "content": _JUDGE}, {"role": "user", "content": asked}]
            text = self._tokenizer.render_chat(messages, add_generation_prompt=True, enable_thinking=False)
            return self.fit(self._encode(text), field, False)
        first, middle, last = map(self._encode, (before, asked, after))
        return [*first, *self.fit(middle, field, truncate, 0, self._most - len(first) - len(last)), *last]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def answers(self) -> tuple[int, int]:
        """Returns the ids of "yes" and "no". Raises RequestError where they are not tokens."""
        found = [self._encode(word) for word in ("yes", "no")]
        if any(len(ids) != 1 for ids in found):
            raise RequestError(
                'this model cannot rank texts: "yes" and "no" are not tokens of its vocabulary, and its files do not '
                "say that it makes embeddings (modules.json, pooling_type)",
                "model",
            )
        return found[0][0], found[1][0]

    def score(self, answer: Answer) -> float:
        """Returns the probability of "yes" against "no", 0 to 1, of a finished answer, or what the model's head says.
        Raises GenerationError."""
        _check(answer)
        assert answer.first is not None
        if self._pooling.scores:
            assert answer.first.hidden is not None
            logit = _finite(answer.first.hidden[0])
            return float(logit) if self._pooling.scores == "raw" else _sigmoid(logit)
        yes, no = answer.first.wanted
        return _sigmoid(yes - no)

    # -- lengths ------------------------------------------------------------------------------------------------------

    def fit(self, ids: list[int], field: str, truncate: bool, keep: int = 0, most: int | None = None) -> list[int]:
        """Returns the ids of a text that fit: all of them, or with `truncate` as many of the first as there is room
        for, and the last `keep`. most: tokens, None: as many as the context takes. Raises RequestError."""
        most = self._most if most is None else min(most, self._most)
        if len(ids) <= most:
            return ids
        if not truncate:
            raise RequestError(
                f"{field} is too long: expected at most {most} tokens, found {len(ids)}; {TOO_LONG} {self._most + 1}. "
                "Send less, or `truncate`: true, which leaves out its end",
                field,
                "context_length_exceeded",
            )
        keep = min(keep, most)
        return [*ids[: most - keep], *ids[len(ids) - keep :]]

    @property
    def ending(self) -> int:
        """Returns how many tokens the tokenizer puts behind a text by itself."""
        return self._tokenizer.ending


def decimals(vector: Vector) -> list[float]:
    """Returns its numbers for JSON, each with nine digits at most, from which a reader who makes float32 of them gets
    the same ones. All digits of float64 would take half as many bytes more."""
    exact = vector.astype(np.float64)
    places = _DIGITS - 1 - np.floor(np.log10(np.maximum(np.abs(exact), _TINY)))
    power = 10.0 ** np.clip(places, 0, _EXACT_POWERS)
    # Of a whole number and a power of ten that float64 has exactly, the quotient is the float64 nearest to the decimal.
    found: list[float] = np.where(places > _EXACT_POWERS, exact, np.rint(exact * power) / power).tolist()
    return found


def cosine(one: Vector, other: Vector) -> float:
    """Returns the cosine of the angle between two vectors, in float64."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    return float(a @ b / max(math.sqrt(float(a @ a) * float(b @ b)), 1e-24))


def _finite(found: Any) -> Any:
    if not np.isfinite(found).all():
        raise GenerationError("the model's hidden states are not finite (NaN or infinity): its weights are damaged")
    return found


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(min(-logit, 700.0)))


def _request(ids: Sequence[int], wanted: LogprobParams) -> GenerationRequest:
    return GenerationRequest("", list(ids), _NOTHING, logprobs=wanted, limits=_NO_DRAFTS, learn=False, slot=-1)


def _check(answer: Answer) -> None:
    reason = answer.finish_reason or {}
    if reason.get("type") == "abort" or answer.first is None:
        raise GenerationError(str(reason.get("message", "the request ended before its prompt was read")))
