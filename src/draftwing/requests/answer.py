"""One answer in the making: tokens come in from the engine, text goes out. Shared by the server and `LLM`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from draftwing.core import LogprobParams, Output, SamplingParams, TokenLogprobs
from draftwing.text.detok import IncrementalDetokenizer

if TYPE_CHECKING:
    from draftwing.text.tokenizer import Tokenizer


class Answer:
    """What is known of one answer. `index` is its place among the answers that were asked for together.

    text: what can be shown so far.  token_ids: all tokens so far, those of a stop that is not shown included.
    logprobs: of each of `token_ids`, where they were asked for.  prompt_logprobs: of the prompt's tokens from
    `LogprobParams.start` on.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        index: int,
        uid: str,
        prompt_tokens: int,
        label: Mapping[str, Any] | None = None,
        wanted: LogprobParams | None = None,
        speculative: Mapping[str, Any] | None = None,
    ) -> None:
        """label: `Options.label` of the engine.  wanted: the log probabilities that were asked for.
        speculative: how it is drafted, for `meta_info`."""
        self.index, self.uid, self.prompt_tokens = index, uid, prompt_tokens
        self.text = ""
        self.token_ids: list[int] = []
        self.finish_reason: dict[str, Any] | None = None
        self.meta: dict[str, Any] = {}
        self.label = dict(label or {})
        self.wanted, self.speculative = wanted, speculative
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.reasoning_tokens = 0
        self._shown = 0  # tokens whose text was given out
        self._show_stop = params.no_stop_trim
        self._detok = IncrementalDetokenizer(
            tokenizer,
            params.skip_special_tokens,
            params.spaces_between_special_tokens,
            params.stop,
            params.no_stop_trim,
            params.stop_regex,
            track=wanted is not None,
        )

    def push(self, output: Output) -> str:
        """Takes news of this answer and returns the text that can be shown since the last call."""
        assert self.finish_reason is None, f"news of {self.uid} after its end"
        self.token_ids += output.token_ids
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
        self.text += delta
        return delta

    def take_shown(self) -> range:
        """Indices of the tokens that the text shown since the last call is made of: one that is not a whole character
        comes with the rest of it, one that is cut by a stop counts. For answers with log probabilities."""
        starts = self.starts
        begin, end = self._shown, self._shown
        if self.finish_reason is not None and self._detok.stopped is None:
            end = len(starts)  # without the token of a matched stop id, unless it is shown
        else:
            while end < len(starts) and starts[end] < len(self.text):
                end += 1
        self._shown = end
        return range(begin, end)

    @property
    def starts(self) -> list[int]:
        """Where the text of each token begins, in characters; of the tokens that text was made of."""
        assert self._detok.starts is not None, "no log probabilities were asked for"
        return self._detok.starts

    @property
    def matched_stop(self) -> int | str | None:
        return (self.finish_reason or {}).get("matched")

    def meta_info(self) -> dict[str, Any]:
        """As in `/generate`'s response; what the engine counts (`spec_*` and others) is there once it is finished."""
        info = {
            "id": self.uid,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "weight_version": "default",
            "completion_tokens": len(self.token_ids),
            "reasoning_tokens": self.reasoning_tokens,
        }
        drafted = {"speculative": dict(self.speculative)} if self.speculative is not None else {}
        return info | self.label | self.meta | drafted
