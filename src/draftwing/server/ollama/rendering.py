"""An answer as Ollama's JSON, whole or line by line."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

from draftwing.server.http import line
from draftwing.server.openai.logprobs import chat_logprobs
from draftwing.server.openai.timings import durations
from draftwing.server.parsers.call import read_arguments
from draftwing.server.parsers.message import MessageReader, Thought
from draftwing.server.service import Generation
from draftwing.text.answer import Answer
from draftwing.text.token_text import TokenTexts

Content = Callable[..., dict[str, Any]]  # makes what a line of the endpoint holds


def head(model: str) -> dict[str, Any]:
    """Returns what each line begins with."""
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


def chat_content(text: str = "", **more: Any) -> dict[str, Any]:
    """Returns what a line of /api/chat holds."""
    return {"message": {"role": "assistant", "content": text, **more}}


def text_content(text: str = "", **more: Any) -> dict[str, Any]:
    """Returns what a line of /api/generate holds."""
    return {"response": text, **more}


class OllamaAnswer:
    """The response to /api/chat or /api/generate. Calls are given out when they are complete."""

    def __init__(
        self, generation: Generation, reader: MessageReader, model: str, texts: TokenTexts, content: Content
    ) -> None:
        self.generation, self._reader, self._model, self._texts = generation, reader, model, texts
        self._content = content
        self._answer: Answer = generation.answers[0]
        self._given = 0  # calls

    def body(self) -> dict[str, Any]:
        """Returns the whole answer as one object."""
        answer, reader = self._answer, self._reader
        reader.push(answer.text, True, answer.token_ids)
        more: dict[str, Any] = {"thinking": reader.reasoning} if reader.reasoning else {}
        calls = self._calls(True)
        more |= {"tool_calls": calls} if calls else {}
        return {**head(self._model), **self._content(reader.content, **more), **self._logprobs(), **self._ending()}

    async def events(self) -> AsyncIterator[str]:
        """Yields lines with what is new, then one that says how it ended."""
        read = 0  # of `Answer.entries`
        async for answer, text in self.generation:
            size, read = len(text) + answer.entries - read, answer.entries
            for one in await self.generation.render(size, partial(self._news, answer, text)):
                yield one
        yield line({**head(self._model), **self._content(), **self._ending()})

    def _news(self, answer: Answer, text: str, large: bool) -> list[str]:
        final = answer.finish_reason is not None
        contents: list[dict[str, Any]] = []
        for part in self._reader.push(text, final, answer.token_ids):
            # A call grows until something else comes.
            contents += self._new_calls(isinstance(part, Thought | str))
            if isinstance(part, Thought):
                contents.append(self._content(thinking=part.text))
            elif isinstance(part, str):
                contents.append(self._content(part))
        contents += self._new_calls(final)
        logprobs = self._logprobs()
        if logprobs and not contents:
            contents.append(self._content())
        lines = [{**head(self._model), **content, "done": False} for content in contents]
        if lines:
            lines[0] |= logprobs
        return [line(one, large) for one in lines]

    def _new_calls(self, complete: bool) -> list[dict[str, Any]]:
        """Returns a line's content with the calls that were not given out yet, if any. complete: the newest one is,
        too."""
        calls = self._calls(complete)
        return [self._content(tool_calls=calls)] if calls else []

    def _calls(self, complete: bool) -> list[dict[str, Any]]:
        calls = self._reader.calls
        end = len(calls) if complete else max(len(calls) - 1, self._given)
        found = []
        for index in range(self._given, end):
            call = calls[index]
            arguments = {"input": call.arguments} if call.custom else read_arguments(call.arguments) or {}
            found.append({"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}})
        self._given = end
        return found

    def _logprobs(self) -> dict[str, Any]:
        if self._answer.wanted is None:
            return {}
        tokens = self._answer.take_shown()
        return {"logprobs": chat_logprobs(self._answer, tokens, self._texts)["content"]} if tokens else {}

    def _ending(self) -> dict[str, Any]:
        """Tells how the answer ended, and times in nanoseconds; what it waited is in `total_duration` alone."""
        record = self.generation.records[0]
        prompt, answer = durations(self._answer, record)
        whole = max((record.ended or record.arrived) - record.arrived, prompt + answer)
        reason = (self._answer.finish_reason or {}).get("type", "stop")
        return {
            "done": True,
            "done_reason": reason,
            "total_duration": _nanoseconds(whole),
            "load_duration": 0,
            "prompt_eval_count": self.generation.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(prompt),
            "eval_count": len(self._answer.token_ids),
            "eval_duration": _nanoseconds(answer),
        }


def _nanoseconds(seconds: float) -> int:
    return max(round(1e9 * seconds), 1)  # clients divide by them
