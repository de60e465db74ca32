"""One answer in the making: tokens come in from the engine, text goes out. Shared by the server and `LLM`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from draftwing.core import Output, TokenLogprobs, TracedStep
from draftwing.requests.request import GenerationRequest
from draftwing.requests.stop_regex import Searches
from draftwing.text.detok import IncrementalDetokenizer

if TYPE_CHECKING:
    from draftwing.text.detok import TokenTexts
    from draftwing.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # what stands for minus infinity, which JSON does not have


def finite(value: float) -> float:
    return max(value, MIN_LOGPROB)


def _without_tokens(output: Output) -> Output:
    """The engine gives at least one token; a request for none has asked for its prompt's log probabilities."""
    reason = output.finish_reason
    if reason is not None and reason["type"] != "abort":
        reason = {"type": "length", "length": 0}
    meta = {**output.meta, "completion_tokens": 0} if reason is not None else output.meta
    return dataclasses.replace(output, token_ids=[], logprobs=[], finish_reason=reason, meta=meta)


class Answer:
    """What is known of one answer. `index` is its place among the answers that were asked for together.

    text: what can be shown so far.  token_ids: all tokens so far, those of a stop that is not shown included.
    logprobs: of each of `token_ids`, where they were asked for.  prompt_logprobs: of the prompt's tokens from
    `LogprobParams.start` on.  receipt: where it was asked for, once the answer is complete.
    """

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        index: int = 0,
        label: Mapping[str, Any] | None = None,
        speculative: Mapping[str, Any] | None = None,
        searches: Searches | None = None,
    ) -> None:
        """label: `Options.label` of the engine.  speculative: how it is drafted, for `meta_info`.  searches: of all
        answers that were asked for together; None: it shares nothing."""
        self.request, self.index = request, index
        self.text = ""
        self.token_ids: list[int] = []
        self.finish_reason: dict[str, Any] | None = None
        self.meta: dict[str, Any] = {}
        self.receipt: dict[str, Any] | None = None
        self.label, self.speculative = dict(label or {}), speculative
        self.wanted = request.logprobs
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        # Of the answer's first token, and the hidden state of the prompt's last one, where they were asked for.
        self.first: TokenLogprobs | None = None
        self.reasoning_tokens = 0
        self._trace: list[TracedStep] = []  # that were not taken yet
        self._shown = 0  # tokens whose text was given out
        params = request.params
        self._show_stop = params.no_stop_trim
        self._detok = IncrementalDetokenizer(
            tokenizer,
            params.skip_special_tokens,
            params.stop,
            params.no_stop_trim,
            (searches or Searches()).scanner(params.stop_regex, request.together),
            track=self.wanted is not None,
        )

    def push(self, output: Output) -> str:
        """Takes news of this answer and returns the text that can be shown since the last call."""
        assert self.finish_reason is None, f"news of {self.request.uid} after its end"
        if self.first is None and output.logprobs:
            self.first = output.logprobs[0]
        if self.request.params.max_new_tokens == 0:
            output = _without_tokens(output)
        self.token_ids += output.token_ids
        self._trace += output.trace
        if self.wanted is not None:
            assert len(output.logprobs) == len(output.token_ids), "a token without its log probability"
            self.logprobs += output.logprobs
            self.prompt_logprobs += output.prompt_logprobs
        shown, reason = output.token_ids, output.finish_reason
        matched = None
        if reason is not None:
            self.finish_reason, self.meta = reason, output.meta
            matched = reason.get("matched") if reason["type"] == "stop" else None
            # A matched stop id is part of the tokens but not of the text.
            if isinstance(matched, int) and not self._show_stop:
                assert shown and shown[-1] == matched, "a stop token ends the tokens it stops"
                shown = shown[:-1]
        delta = self._detok.push(shown, reason is not None)
        if reason is not None and self._detok.failed and self._detok.stopped is None:
            delta += self._detok.end_at(matched if isinstance(matched, str) else None)
        if reason is not None and self._detok.expression is not None and isinstance(matched, str):
            self.finish_reason = {**reason, "matched": self._detok.expression}
        self.text += delta
        return delta

    def take_shown(self) -> range:
        """Returns indices of the tokens that the text shown since the last call is made of: one that is not a whole
        character comes with the rest of it, one that is cut by a stop counts. For answers with log probabilities."""
        starts = self.starts
        begin, end = self._shown, self._shown
        if self.finish_reason is not None and self._detok.stopped is None:
            end = len(starts)  # without the token of a matched stop id, unless it is shown
        else:
            while end < len(starts) and starts[end] < len(self.text):
                end += 1
        self._shown = end
        return range(begin, end)

    def take_trace(self) -> list[TracedStep]:
        """Returns steps since the last call, for an answer whose request is traced."""
        steps, self._trace = self._trace, []
        return steps

    @property
    def starts(self) -> list[int]:
        """Returns where the text of each token begins, in characters; of the tokens that text was made of."""
        assert self._detok.starts is not None, "no log probabilities were asked for"
        return self._detok.starts

    @property
    def entries(self) -> int:
        """Returns how much a response has of it so far: token ids, and log probabilities with those of other tokens."""
        receipt = 0 if self.receipt is None else len(self.request.prompt_ids) + len(self.token_ids)
        return self._width * len(self.token_ids) + self.prompt_entries + receipt

    @property
    def prompt_entries(self) -> int:
        """Returns those of `entries` that are of the prompt."""
        return self._width * len(self.prompt_logprobs)

    @property
    def logprob_entries(self) -> int:
        """Returns those of `entries` that are log probabilities of the answer."""
        return (self._width - 1) * len(self.logprobs)

    @property
    def _width(self) -> int:
        return 1 if self.wanted is None else 1 + self.wanted.width

    @property
    def receipt_field(self) -> dict[str, Any]:
        """Returns the field of a response that has the receipt, where there is one."""
        return {} if self.receipt is None else {"receipt": self.receipt}

    @property
    def wants_receipt(self) -> bool:
        """Returns whether it is complete, and a receipt was asked for."""
        return self.request.receipt and (self.finish_reason or {}).get("type") in ("stop", "length")

    @property
    def matched_stop(self) -> int | str | None:
        return (self.finish_reason or {}).get("matched")

    def meta_info(
        self,
        texts: TokenTexts | None = None,
        of_prompt: bool = True,
        of_answer: bool = True,
        made: dict[Any, Any] | None = None,
    ) -> dict[str, Any]:
        """Returns `meta_info` of a response to `/generate`; what the engine counts (`spec_*` and others) is there
        once the answer is finished.

        texts: None leaves texts out of log probabilities.  of_prompt, of_answer: False leaves out the lists of the
        prompt or of the answer: an empty one would say that there are none.  made: of answers that are reported
        together: lists of their prompts, which those with one list `prompt_logprobs` share.
        """
        info = {
            "id": self.request.name or self.request.uid,
            "finish_reason": self.finish_reason,
            "prompt_tokens": len(self.request.prompt_ids),
            "weight_version": "default",
            "completion_tokens": len(self.token_ids),
            "reasoning_tokens": self.reasoning_tokens,
        }
        drafted = {"speculative": dict(self.speculative)} if self.speculative is not None else {}
        made = {} if made is None else made
        listed = self._meta_logprobs(texts, of_prompt, of_answer, made)
        return info | self.label | self.meta | drafted | listed | self.receipt_field

    def _meta_logprobs(
        self, texts: TokenTexts | None, of_prompt: bool, of_answer: bool, made: dict[Any, Any]
    ) -> dict[str, Any]:
        wanted = self.wanted
        if wanted is None:
            return {}
        found: dict[str, Any] = {}
        if wanted.shown:
            first = wanted.first_shown
            if of_prompt or first < 0:
                # Nothing is known of the prompt before the first token has come.
                known = self.prompt_logprobs[first - wanted.start :] if first >= 0 else []
                prompt = self.request.prompt_ids[first : first + len(known)]
                found |= self._once(made, "logprobs", self._lists, "input", prompt, known, texts)
            if of_answer:
                found |= self._lists("output", self.token_ids, self.logprobs, texts)
            found["output_token_logprobs_length"] = len(self.logprobs)
        if wanted.hidden and of_prompt and of_answer and self.first is not None and self.first.hidden:  # None: aborted
            # As SGLang: those of the prompt's tokens, and of each of the answer's but the last.
            states = [*self._once(made, "states", _states, self.prompt_logprobs), self.first.hidden.tolist()]
            found["hidden_states"] = [states, *_states(self.logprobs[1:])]
        return found

    def _once(self, made: dict[Any, Any], kind: str, make: Callable[..., Any], *args: Any) -> Any:
        """Returns what `make` gives of the prompt, or gave for another answer to it."""
        key = kind, id(self.prompt_logprobs)
        if key not in made:
            made[key] = make(*args)
        return made[key]

    def _lists(
        self, side: str, tokens: list[int], entries: Sequence[TokenLogprobs | None], texts: TokenTexts | None
    ) -> dict[str, Any]:
        """An entry is [log probability, token id, text or None]; that of the prompt's first token has None."""
        wanted = self.wanted
        assert wanted is not None

        def entry(value: float | None, token: int) -> list[Any]:
            return [None if value is None else finite(value), token, None if texts is None else texts.text(token)]

        found: dict[str, Any] = {}
        known = list(zip(tokens, entries, strict=True))
        found[f"{side}_token_logprobs"] = [entry(one and one.value, token) for token, one in known]
        if wanted.top:
            found[f"{side}_top_logprobs"] = [one and [entry(*best) for best in one.top] for _, one in known]
        if wanted.token_ids:
            found[f"{side}_token_ids_logprobs"] = [
                one and [entry(*pair) for pair in zip(one.wanted, wanted.token_ids, strict=True)] for _, one in known
            ]
        return found


def _states(entries: Sequence[TokenLogprobs | None]) -> list[list[float]]:
    """Returns the hidden states that are there."""
    return [one.hidden.tolist() for one in entries if one is not None and one.hidden]
