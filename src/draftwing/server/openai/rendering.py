"""Bodies of responses, as OpenAI's clients and `/generate`'s expect them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from draftwing.requests.answer import Answer
from draftwing.requests.logprobs import meta_logprobs
from draftwing.server.generation import Generation
from draftwing.server.http import event
from draftwing.server.openai.logprobs import chat_logprobs, joined, prompt_logprobs, text_logprobs
from draftwing.server.openai.message_builder import Speaker, Speech
from draftwing.server.openai.schema import OpenAIBody
from draftwing.text.token_text import TokenTexts
from draftwing.text.tokenizer import Tokenizer

Kind = Literal["chat", "text"]
_OBJECTS = {"chat": ("chat.completion", "chat.completion.chunk"), "text": ("text_completion", "text_completion")}


def usage(prompt_tokens: int, answers: Sequence[Answer], speculates: bool = False) -> dict[str, Any]:
    """speculates: tell how many drafts were accepted and rejected; once all answers are finished."""
    completion_tokens = sum(len(answer.token_ids) for answer in answers)
    reasoning = sum(answer.reasoning_tokens for answer in answers)
    found: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
        "reasoning_tokens": reasoning,
    }
    if speculates:
        # What ends before it runs, by an abort, has no counts.
        accepted = sum(answer.meta.get("spec_num_correct_drafts", 0) for answer in answers)
        proposed = sum(answer.meta.get("spec_num_proposed_drafts", 0) for answer in answers)
        found["completion_tokens_details"] = {
            "reasoning_tokens": reasoning,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(proposed - accepted, 0),
        }
    elif reasoning:
        found["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return found


class Completion:
    """The response to `/v1/chat/completions` ("chat") or `/v1/completions` ("text"): one body, or events.

    speaker: makes what turns the text of an answer into a chat message; for "chat".
    """

    def __init__(
        self,
        kind: Kind,
        generation: Generation,
        model: str,
        tokenizer: Tokenizer,
        texts: TokenTexts,
        speaker: Speaker | None = None,
    ) -> None:
        self._kind, self._generation, self._model = kind, generation, model
        self._tokenizer, self._texts, self._speaker = tokenizer, texts, speaker

    def body(self) -> dict[str, Any]:
        """Of a finished generation."""
        return {
            **self._head(chunk=False),
            "choices": [self._choice(answer) for answer in self._generation.answers],
            "usage": self._usage(),
            "metadata": {"weight_version": "default"},
        }

    async def events(self, body: OpenAIBody) -> AsyncIterator[str]:
        """For each answer its role (chat), text as it comes and the finish reason; then usage."""
        head = self._head(chunk=True)

        def chunk(answer: Answer, content: dict[str, Any], logprobs: Any = None, ending: Any = None) -> str:
            end = ending or {"finish_reason": None, "matched_stop": None}
            data = {**head, "choices": [{"index": answer.index, **content, "logprobs": logprobs, **end}]}
            if body.continuous_usage:
                data["usage"] = usage(answer.prompt_tokens, [answer])
            elif body.include_usage:
                data["usage"] = None
            return event(data)

        speeches: dict[int, Speech] = {}
        begun: set[int] = set()
        async for answer, text in self._generation:
            final = answer.finish_reason is not None
            first = answer.index not in begun
            begun.add(answer.index)
            if self._kind == "text":
                shown, logprobs = self._text_piece(answer, text, first)
                if shown or logprobs is not None:
                    yield chunk(answer, {"text": shown}, logprobs)
                if final:
                    yield chunk(answer, {"text": ""}, ending=self._ending(answer))
                continue
            if first:
                speeches[answer.index] = self._speech(answer)
                yield chunk(answer, {"delta": {"role": "assistant", "content": "", "reasoning_content": None}})
            speech = speeches[answer.index]
            deltas, logprobs = speech.push(text, final), self._chat_piece(answer)
            if logprobs is not None and not deltas:
                deltas = [{"content": "", "reasoning_content": None}]
            for delta in deltas:
                yield chunk(answer, {"delta": delta}, logprobs)
                logprobs = None
            if final:
                yield chunk(answer, {"delta": {}}, ending=self._ending(answer, speech))
        if body.include_usage:
            yield event({**head, "choices": [], "usage": self._usage()})

    def _choice(self, answer: Answer) -> dict[str, Any]:
        if self._kind == "text":
            text, logprobs = self._text_piece(answer, answer.text, first=True)
            return {"index": answer.index, "text": text, "logprobs": logprobs, **self._ending(answer)}
        speech = self._speech(answer)
        speech.push(answer.text, True)
        logprobs = self._chat_piece(answer, empty=True)
        return {
            "index": answer.index, "message": speech.message(), "logprobs": logprobs, **self._ending(answer, speech)
        }  # fmt: skip

    def _speech(self, answer: Answer) -> Speech:
        assert self._speaker is not None, "a chat has a speaker"
        return self._speaker(answer)

    def _text_piece(self, answer: Answer, text: str, first: bool) -> tuple[str, dict[str, Any] | None]:
        """Text of an answer, and log probabilities of what it is made of, with the echoed prompt before the first."""
        prompt, gap = self._generation.prompts[answer.index], self._gap(answer)
        shown = prompt.echo + gap + text if first else text
        if answer.wanted is None:
            return shown, None
        tokens = answer.take_shown()
        logprobs = text_logprobs(answer, tokens, self._texts, len(prompt.echo + gap))
        if first and answer.wanted.start == 0 and answer.prompt_logprobs:
            skip = prompt.params.skip_special_tokens
            logprobs = joined(prompt_logprobs(answer, prompt.ids, self._tokenizer, self._texts, skip), logprobs)
        return shown, logprobs if logprobs["tokens"] or answer.finish_reason is not None else None

    def _gap(self, answer: Answer) -> str:
        """The space between an echoed prompt and its answer that some decoders drop at the beginning of a text."""
        if not self._generation.prompts[answer.index].echo or not answer.token_ids:
            return ""
        alone = self._tokenizer.decode(answer.token_ids[:1], skip_special_tokens=False)
        return " " if self._texts.text(answer.token_ids[0]) == " " + alone else ""

    def _chat_piece(self, answer: Answer, empty: bool = False) -> dict[str, Any] | None:
        """Log probabilities of what the newest text is made of. empty: also where that is nothing."""
        if answer.wanted is None:
            return None
        tokens = answer.take_shown()
        return chat_logprobs(answer, tokens, self._texts) if tokens or empty else None

    def _ending(self, answer: Answer, speech: Speech | None = None) -> dict[str, Any]:
        reason: str | None = answer.finish_reason["type"] if answer.finish_reason is not None else None
        if reason is not None and speech is not None:
            reason = speech.finish_reason(reason)
        return {"finish_reason": reason, "matched_stop": answer.matched_stop}

    def _usage(self) -> dict[str, Any]:
        generation = self._generation
        return usage(generation.prompt_tokens, generation.answers, generation.speculates)

    def _head(self, chunk: bool) -> dict[str, Any]:
        generation = self._generation
        return {
            "id": generation.job.id,
            "object": _OBJECTS[self._kind][chunk],
            "created": int(time.time()),
            "model": self._model,
            **generation.label,
            **generation.speculative,
        }


def generated(generation: Generation, answer: Answer, texts: TokenTexts | None) -> dict[str, Any]:
    """One answer of `/generate`, finished or as it is now. texts: None leaves texts out of log probabilities."""
    logprobs = meta_logprobs(answer, generation.prompts[answer.index].ids, texts)
    return {"text": answer.text, "output_ids": answer.token_ids, "meta_info": answer.meta_info() | logprobs}


async def generated_events(generation: Generation, batched: bool, texts: TokenTexts | None) -> AsyncIterator[str]:
    """The answers of `/generate` with the text so far; `index` tells those of a batch apart."""
    async for answer, text in generation:
        if text or answer.finish_reason is not None:
            yield event(generated(generation, answer, texts) | ({"index": answer.index} if batched else {}))


def model_card(name: str, created: int, context_length: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "draftwing",
        "root": name,
        "parent": None,
        "max_model_len": context_length,
    }
