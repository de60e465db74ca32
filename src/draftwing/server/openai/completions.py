"""/v1/chat/completions, /v1/completions and /v1/models: answers as bodies and events, how they were made in the words
of the peers whose benchmark clients read them, and the endpoints; without /v1, too, as llama.cpp has them."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from draftwing.config.trees import SOURCES
from draftwing.core import TracedStep
from draftwing.requests.images import RequestImage
from draftwing.server.anthropic import model_card as anthropic_card
from draftwing.server.chat import Chats
from draftwing.server.endpoints import counted, read_body, read_generation, respond, schema, unless_disconnected
from draftwing.server.http import dialect, encode, event, json_response, spoken_path
from draftwing.server.openai.logprobs import chat_logprobs, echo_logprobs, joined, prompt_logprobs, text_logprobs
from draftwing.server.openai.responses.endpoints import add_responses_routes
from draftwing.server.openai.schema import ChatRequest, CompletionRequest, OpenAIBody
from draftwing.server.openai.tools import call_deltas, whole_call
from draftwing.server.parsers.message import MessageReader, Thought
from draftwing.server.service import Generation, Service
from draftwing.server.telemetry.observer import AnswerRecord
from draftwing.text.answer import Answer
from draftwing.text.detok import TokenNames, TokenTexts
from draftwing.version import __version__


def timings_and_metrics(answer: Answer, record: AnswerRecord, speculates: bool) -> dict[str, Any]:
    """Returns `timings` as llama.cpp has it, and `metrics.speculative_decoding` as vLLM has it. Without the first for
    an answer that ended before its first token, and without the second where nothing was verified."""
    found: dict[str, Any] = {}
    if record.first is not None:
        found["timings"] = _timings(answer, record, speculates)
    if speculates and (drafted := _drafted(answer.meta)) is not None:
        found["metrics"] = {"speculative_decoding": drafted}
    return found


def durations(answer: Answer, record: AnswerRecord) -> tuple[float, float]:
    """Returns seconds of a finished answer that its prompt took, and from its first token to the last: what the engine
    took before the first one, but for waiting, is the prompt's. Zeros where there is none."""
    if record.first is None or record.ended is None:
        return 0.0, 0.0
    decode, meta = record.ended - record.first, answer.meta
    return max(meta.get("e2e_latency", 0.0) - meta.get("queue_time", 0.0) - decode, 0.0), decode


def _timings(answer: Answer, record: AnswerRecord, speculates: bool) -> dict[str, Any]:
    meta, (prefill, decode) = answer.meta, durations(answer, record)
    cached = meta.get("cached_tokens", 0)
    found = {"cache_n": cached}
    found |= _rates("prompt", len(answer.request.prompt_ids) - cached, prefill)
    found |= _rates("predicted", len(answer.token_ids), decode)
    if speculates:
        found["draft_n"] = meta.get("spec_num_proposed_drafts", 0)
        found["draft_n_accepted"] = meta.get("spec_num_correct_drafts", 0)
    return found


def _rates(name: str, tokens: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": 1e3 * seconds,
        f"{name}_per_token_ms": 1e3 * seconds / tokens if tokens else 0.0,
        f"{name}_per_second": tokens / seconds if seconds else 0.0,
    }


def _drafted(meta: dict[str, Any]) -> dict[str, Any] | None:
    histogram: list[int] = meta.get("spec_correct_drafts_histogram", [])
    steps = sum(histogram)
    if not steps:
        return None
    accepted, proposed = meta["spec_num_correct_drafts"], meta["spec_num_proposed_drafts"]
    return {
        "mean_acceptance_length": 1 + accepted / steps,
        "draft_acceptance_rate": accepted / proposed if proposed else 0.0,
        "acceptance_histogram": histogram,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": proposed,
        "num_spec_steps": steps,
        "num_spec_tokens": None,  # drafts of a step: no fixed number
    }


def usage(
    prompt_tokens: int, answers: Sequence[Answer], speculates: bool = False, ended: bool = True
) -> dict[str, Any]:
    """Returns `usage`. speculates: report how many drafts were accepted, rejected; once all answers are finished.
    ended: whether they are: before, it is not known what of their prompts was cached."""
    completion_tokens = sum(len(answer.token_ids) for answer in answers)
    reasoning = sum(answer.reasoning_tokens for answer in answers)
    found: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens(answers)} if ended else None,
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


def cached_tokens(answers: Sequence[Answer]) -> int:
    """Returns prompt tokens of finished answers that were in the cache before the first answer to each prompt."""
    least: dict[int, int] = {}  # by the list that the answers to a prompt share
    for answer in answers:
        prompt, cached = id(answer.request.prompt_ids), answer.meta.get("cached_tokens", 0)
        least[prompt] = min(least.get(prompt, cached), cached)
    return sum(least.values())


@functools.cache
def _fingerprint(architecture: str, dtype: str, device: str) -> str:
    """Returns a name of what computes answers: the same name and seed give the same text."""
    made = "\n".join((__version__, architecture, dtype, device))
    return f"fp_{hashlib.blake2b(made.encode(), digest_size=5).hexdigest()}"


class Completion:
    """The response to /v1/completions: one body, or events.

    `ChatCompletion` has an own shape of choices; all else is the same.
    """

    objects = ("text_completion", "text_completion")  # of the body, of an event

    def __init__(self, generation: Generation, service: Service, body: OpenAIBody, echo: bool = False) -> None:
        """echo: answers begin with their prompt."""
        self.generation, self._asked, self._echo = generation, body, echo
        self._echoed: dict[int, str] = {}  # prompts by index of the answer
        self._sent: dict[int, int] = {}  # how many token ids events had, by index of the answer
        wanted = body.answer_logprobs()
        self._top = None if wanted is None else wanted.top  # best tokens that an answer shows, if any
        self._model = service.name_for(body.model)
        self._tokenizer, self._texts = service.tokenizer, service.texts
        # Of tokens in log probabilities.
        self._names = TokenNames(service.tokenizer) if body.return_tokens_as_token_ids else service.texts
        info = service.engine.info
        self._fingerprint = _fingerprint(info.architecture, info.dtype, info.device)

    def body(self) -> dict[str, Any]:
        return {
            **self._head(chunk=False),
            "choices": [
                {"index": answer.index, **self._whole(answer), **self._ending(answer), **self._ids(answer)}
                for answer in self.generation.answers
            ],
            "usage": self._usage(),
            "metadata": {"weight_version": "default"},
            **self._prompt_ids(),
            **self._measured(),
        }

    async def events(self) -> AsyncIterator[str]:
        """Yields, for each answer, its role (chat), text as it comes and the finish reason; then usage."""
        head, sent = self._head(chunk=True), dict[int, int]()  # entries, by answer
        async for answer, text in self.generation:
            first = answer.index not in sent
            size = len(answer.request.prompt_ids) if first else -sent[answer.index]
            size += answer.entries + len(text)
            for news in await self.generation.render(size, partial(self._news, head, answer, text, first)):
                yield news
            sent[answer.index] = answer.entries
        if self._asked.include_usage:
            yield event({**head, "choices": [], "usage": self._usage(), **self._measured()})

    def _news(self, head: dict[str, Any], answer: Answer, text: str, first: bool, large: bool) -> list[str]:
        """Returns events of an answer that made progress."""
        contents: list[dict[str, Any]] = []
        if steps := answer.take_trace():
            trace = [_traced_step(step, self._texts, answer.request.images) for step in steps]
            contents.append({**self._nothing(), "speculative_trace": trace})
        contents += self._pieces(answer, text, first)
        events = [self._chunk(head, answer, content, None, large) for content in contents]
        if answer.finish_reason is not None:
            events.append(self._chunk(head, answer, self._nothing(), self._ending(answer), large))
        return events

    def _chunk(
        self, head: dict[str, Any], answer: Answer, content: dict[str, Any], ending: dict[str, Any] | None, large: bool
    ) -> str:
        asked, end = self._asked, ending or {"finish_reason": None, "matched_stop": None}
        ids = self._new_ids(answer)
        top = self._prompt_ids() if "prompt_token_ids" in ids else {}
        data = {**head, "choices": [{"index": answer.index, "logprobs": None, **content, **end, **ids}], **top}
        if asked.continuous_usage:
            told = [] if "role" in content.get("delta", ()) else [answer]  # the role is before all tokens
            ended = bool(told) and answer.finish_reason is not None
            data["usage"] = usage(len(answer.request.prompt_ids), told, ended=ended)
        elif asked.include_usage:
            data["usage"] = None
        if ending is not None and not asked.include_usage:
            data |= self._measured()
        return event(data, large)

    # -- the shape of a choice ------------------------------------------------------------------------------------

    def _whole(self, answer: Answer) -> dict[str, Any]:
        """Returns a finished answer."""
        text, logprobs = self._shown(answer, answer.text, first=True)
        return {"text": text, "logprobs": logprobs, **self._of_prompt(answer)}

    def _pieces(self, answer: Answer, text: str, first: bool) -> list[dict[str, Any]]:
        """Returns what events have of the next piece of text."""
        shown, logprobs = self._shown(answer, text, first)
        return [{"text": shown, "logprobs": logprobs}] if shown or logprobs is not None else []

    def _nothing(self) -> dict[str, Any]:
        """Returns what the last event of an answer has besides its ending."""
        return {"text": ""}

    def _ending(self, answer: Answer) -> dict[str, Any]:
        reason = answer.finish_reason["type"] if answer.finish_reason is not None else None
        return {"finish_reason": reason, "matched_stop": answer.matched_stop, **answer.receipt_field}

    def _shown(self, answer: Answer, text: str, first: bool) -> tuple[str, dict[str, Any] | None]:
        """Returns text of an answer, and log probabilities of what it is made of, with the echoed prompt before the
        first."""
        before, request = self._before(answer), answer.request
        shown = before + text if first else text
        if self._top is None:
            return shown, None
        tokens = answer.take_shown()
        logprobs = text_logprobs(answer, tokens, self._names, self._top, len(before))
        if first and self._echo and answer.prompt_logprobs:
            ids, hidden = request.prompt_ids, self._hidden(request.prompt_ids)
            echoed = echo_logprobs(answer, ids, hidden, self._tokenizer, self._names, self._top)
            logprobs = joined(echoed, logprobs)
        return shown, logprobs if logprobs["tokens"] or answer.finish_reason is not None else None

    def _before(self, answer: Answer) -> str:
        """Returns the echoed prompt, with the space after it that some decoders drop at the beginning of a text."""
        if not self._echo:
            return ""
        if answer.index not in self._echoed:
            ids, first = answer.request.prompt_ids, answer.token_ids[:1]
            echo = self._tokenizer.decode(ids[self._hidden(ids) :], skip_special_tokens=False)
            if echo and first:
                alone = self._tokenizer.decode(first, skip_special_tokens=False)
                echo += " " if self._texts.text(first[0]) == " " + alone else ""
            self._echoed[answer.index] = echo
        return self._echoed[answer.index]

    def _hidden(self, prompt: Sequence[int]) -> int:
        """Returns how many tokens of a prompt an echo leaves out: what the tokenizer has put before a text."""
        bos = self._tokenizer.bos_id
        begins = bos is not None and self._asked.adds_special_tokens and prompt[:1] == [bos]
        return int(begins and self._tokenizer.encode("")[:1] == [bos])

    def _ids(self, answer: Answer) -> dict[str, Any]:
        """Returns the token ids of prompt and answer, where they were asked for; those of a stop that is not shown
        included."""
        if not self._asked.return_token_ids:
            return {}
        return {"prompt_token_ids": answer.request.prompt_ids, "token_ids": answer.token_ids}

    def _of_prompt(self, answer: Answer) -> dict[str, Any]:
        """Returns the log probabilities of the prompt, where they were asked for."""
        top = self._asked.prompt_logprobs
        return {} if top is None else {"prompt_logprobs": prompt_logprobs(answer, self._texts, top)}

    def _prompt_ids(self) -> dict[str, Any]:
        """Returns what was asked of the prompt, where all answers have one: vLLM's clients look for it here."""
        return {}

    def _new_ids(self, answer: Answer) -> dict[str, Any]:
        """Returns the token ids for an event: the prompt's with the first one, and the answer's since the event
        before."""
        if not self._asked.return_token_ids:
            return {}
        sent = self._sent.get(answer.index)
        self._sent[answer.index] = len(answer.token_ids)
        first = {"prompt_token_ids": answer.request.prompt_ids} if sent is None else {}
        return {**first, "token_ids": answer.token_ids[sent or 0 :]}

    # -- what is around choices -----------------------------------------------------------------------------------

    def _usage(self) -> dict[str, Any]:
        generation = self.generation
        return usage(generation.prompt_tokens, generation.answers, generation.speculates)

    def _measured(self) -> dict[str, Any]:
        """Tells how a single answer was made, as llama.cpp and vLLM do in the body or the last event."""
        generation, answer = self.generation, self.generation.answers[0]
        if len(generation.answers) > 1:
            return {}
        return timings_and_metrics(answer, generation.records[0], generation.speculates)

    def _head(self, chunk: bool) -> dict[str, Any]:
        tier = {"service_tier": "default"} if self._asked.service_tier is not None else {}
        return {
            "id": self.generation.id,
            "object": self.objects[chunk],
            "created": int(time.time()),
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            **tier,
            **self.generation.label,
        }


class ChatCompletion(Completion):
    """The response to /v1/chat/completions."""

    objects = ("chat.completion", "chat.completion.chunk")

    def __init__(
        self, generation: Generation, service: Service, body: ChatRequest, reader: Callable[[], MessageReader]
    ) -> None:
        """reader: makes one for each answer."""
        super().__init__(generation, service, body)
        self._readers = {answer.index: reader() for answer in generation.answers}
        self._shows_reasoning = body.shows_reasoning

    def _whole(self, answer: Answer) -> dict[str, Any]:
        self._deltas(answer, answer.text)
        return {"message": self._message(answer), "logprobs": self._logprobs(answer, empty=True)}

    def _pieces(self, answer: Answer, text: str, first: bool) -> list[dict[str, Any]]:
        deltas, logprobs = self._deltas(answer, text), self._logprobs(answer)
        empty = {"content": None if self._readers[answer.index].only_calls else "", "reasoning_content": None}
        if logprobs is not None and not deltas:
            deltas = [empty]
        pieces: list[dict[str, Any]] = [{"delta": delta} for delta in deltas]
        if logprobs is not None:
            pieces[0]["logprobs"] = logprobs
        role = {"delta": {"role": "assistant", **empty}}
        return [role, *pieces] if first else pieces

    def _prompt_ids(self) -> dict[str, Any]:
        first = self.generation.answers[0]
        ids = {"prompt_token_ids": first.request.prompt_ids} if self._asked.return_token_ids else {}
        return ids | self._of_prompt(first)

    def _nothing(self) -> dict[str, Any]:
        return {"delta": {}}

    def _ending(self, answer: Answer) -> dict[str, Any]:
        ending = super()._ending(answer)
        if ending["finish_reason"] == "stop" and self._readers[answer.index].calls_end(answer.matched_stop):
            ending["finish_reason"] = "tool_calls"
        return ending

    def _deltas(self, answer: Answer, text: str) -> list[dict[str, Any]]:
        """Makes the deltas of the message from the next piece of text."""
        reader, deltas = self._readers[answer.index], list[dict[str, Any]]()
        for part in reader.push(text, answer.finish_reason is not None, answer.token_ids):
            if isinstance(part, Thought):
                deltas += [{"reasoning_content": part.text}] if self._shows_reasoning else []
            elif isinstance(part, str):
                deltas.append({"content": part, "reasoning_content": None})
            else:
                deltas += [{"tool_calls": [call]} for call in call_deltas(part)]
        answer.reasoning_tokens = reader.reasoning_tokens
        return deltas

    def _message(self, answer: Answer) -> dict[str, Any]:
        """Returns the whole message of an answer that was read to its end."""
        reader = self._readers[answer.index]
        # An answer that is all reasoning or calls has no content; an empty one has an empty content.
        content = reader.content if reader.content or not (reader.calls or reader.reasoning) else None
        message: dict[str, Any] = {"role": "assistant", "content": content}
        message["reasoning_content"] = (reader.reasoning or None) if self._shows_reasoning else None
        if reader.calls:
            message["tool_calls"] = list(map(whole_call, reader.calls))
        return message

    def _logprobs(self, answer: Answer, empty: bool = False) -> dict[str, Any] | None:
        """Returns log probabilities of what the newest text is made of. empty: also where that is nothing."""
        if self._top is None:
            return None
        tokens = answer.take_shown()
        return chat_logprobs(answer, tokens, self._names, self._top) if tokens or empty else None


def _traced_step(step: TracedStep, texts: TokenTexts, images: Sequence[RequestImage]) -> dict[str, Any]:
    """One entry of `speculative_trace`; docs/page.md describes it. images: of the prompt."""
    return {
        "step": step.number,
        "seconds": round(step.seconds, 6),
        "requests": step.requests,
        "tokens": [_token(token, texts) for token in step.tokens],
        "nodes": [
            {
                "parent": node.parent,
                **_token(node.token, texts),
                "by": SOURCES[node.source],
                "survival": round(node.survival, 4),
                "verified": node.verified,
                "accepted": node.accepted,
            }
            for node in step.nodes
        ],
        **({"images": [image.tokens for image in images]} if images and step.number == 0 else {}),
    }


def _token(token: int, texts: TokenTexts) -> dict[str, Any]:
    found = {"id": token, "text": texts.text(token)}
    return {**found, "special": True} if texts.special(token) else found


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


def add_openai_routes(app: FastAPI, service: Service, chats: Chats) -> None:
    _add_completions(app, service, chats)
    add_responses_routes(app, service, chats)
    _add_models(app, service)


def _add_completions(app: FastAPI, service: Service, chats: Chats) -> None:
    @app.post("/chat/completions", include_in_schema=False)
    @app.post("/v1/chat/completions", openapi_extra=schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        async with read_generation(request, ChatRequest) as body:
            generation, style = await unless_disconnected(request, chats.ask(body, len(await request.body())))
            completion = ChatCompletion(generation, service, body, lambda: chats.reader(style))
        return await respond(request, completion, body.stream)

    @app.post("/chat/completions/input_tokens", include_in_schema=False)
    @app.post("/v1/chat/completions/input_tokens", openapi_extra=schema(ChatRequest))
    async def input_tokens(request: Request) -> Response:
        """Counts the tokens of the prompt, as llama.cpp does; nothing is generated."""
        body = await read_body(request, ChatRequest)
        size = len(await request.body())
        return await counted(request, chats, body, "messages", size, object="response.input_tokens")

    @app.post("/completions", include_in_schema=False)
    @app.post("/v1/completions", openapi_extra=schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        async with read_generation(request, CompletionRequest) as body:
            asked = service.complete(body, body.prompt, body.add_special_tokens is not False)
            generation = await unless_disconnected(request, asked)
        return await respond(request, Completion(generation, service, body, bool(body.echo)), body.stream)


def _add_models(app: FastAPI, service: Service) -> None:
    def card(name: str, anthropic: bool = False) -> dict[str, Any]:
        make, adapter = anthropic_card if anthropic else model_card, service.engine.adapters.get(name)
        made = make(name, int(service.started), service.engine.info.context_length)
        of_adapter = {} if anthropic or adapter is None else {"root": adapter.path, "parent": service.model}
        return made | of_adapter

    @app.get("/models", include_in_schema=False)
    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        """Returns the names that are served; to Anthropic's clients, which send `anthropic-version`, in their shape."""
        if _anthropic(request):
            cards = [card(name, True) for name in (*service.names, *service.engine.adapters)]
            return {"data": cards, "has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
        return {"object": "list", "data": [card(name) for name in (*service.names, *service.engine.adapters)]}

    @app.get("/models/{name:path}", include_in_schema=False)
    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        if name not in service.names and name not in service.engine.adapters:
            raise service.no_model(name)
        return json_response(encode(card(name, _anthropic(request))))


def _anthropic(request: Request) -> bool:
    return dialect(spoken_path(request)) == "anthropic"
