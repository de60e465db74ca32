"""One answer in the making: tokens come in from the engine, text goes out. Shared by the server and `LLM`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from draftwing.core import Output, SamplingParams
from draftwing.text.detok import IncrementalDetokenizer

if TYPE_CHECKING:
    from draftwing.text.tokenizer import Tokenizer


class Answer:
    """What is known of one answer. `index` is its place among the answers that were asked for together."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, index: int, uid: str, prompt_tokens: int) -> None:
        self.index, self.uid, self.prompt_tokens = index, uid, prompt_tokens
        self.text = ""
        self.token_ids: list[int] = []
        self.finish_reason: dict[str, Any] | None = None
        self.meta: dict[str, Any] = {}
        self._show_stop = params.no_stop_trim
        self._detok = IncrementalDetokenizer(
            tokenizer,
            params.skip_special_tokens,
            params.spaces_between_special_tokens,
            params.stop,
            params.no_stop_trim,
        )

    def push(self, output: Output) -> str:
        """Takes news of this answer and returns the text that can be shown since the last call."""
        assert self.finish_reason is None, f"news of {self.uid} after its end"
        self.token_ids += output.token_ids
        shown, reason = output.token_ids, output.finish_reason
        if reason is not None:
            self.finish_reason, self.meta = reason, output.meta
            # A matched stop id is part of the tokens but not of the text.
            if reason["type"] == "stop" and isinstance(reason.get("matched"), int) and not self._show_stop:
                assert shown and shown[-1] == reason["matched"], "a stop token ends the tokens it stops"
                shown = shown[:-1]
        delta = self._detok.push(shown, reason is not None)
        self.text += delta
        return delta

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
            "reasoning_tokens": 0,
        }
        return info | self.meta
