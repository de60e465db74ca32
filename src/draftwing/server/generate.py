"""/generate, as SGLang has it: the body, the response, the endpoint."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Annotated, Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import WithJsonSchema

from draftwing.errors import RequestError
from draftwing.images.processing import Piece
from draftwing.images.reader import Picture, Prompt, filled, pasted, placed
from draftwing.requests.grammar_field import schema_place
from draftwing.requests.images import RequestImage
from draftwing.requests.refusals import check_text
from draftwing.requests.request import GenerationRequest, LogprobParams, logprob_params
from draftwing.requests.sampling_params import HINTS, Budget, SamplingParams, field_schemas
from draftwing.requests.stop_regex import MAX_TOGETHER, parts
from draftwing.server.endpoints import read_generation, respond, schema, unless_disconnected
from draftwing.server.http import event
from draftwing.server.schema import (
    AdapterName,
    GenerationBody,
    Name,
    TokenIds,
    asks_for_nothing,
    characters,
    split_prompts,
)
from draftwing.server.service import Generation, Service
from draftwing.text.answer import Answer
from draftwing.text.detok import TokenTexts

_Sampling = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "properties": field_schemas(), "additionalProperties": False}),
]


class GenerateRequest(
    GenerationBody,
    hints="conversation_id custom_labels data_parallel_rank images_config log_metrics mm_processor_kwargs "
    "routing_key use_audio_in_video video_config",
    not_built="input_embeds audio_data video_data return_prompt_token_ids "
    "return_entropy session_params session_id background bootstrap_host bootstrap_port "
    "bootstrap_room modalities no_logs require_reasoning return_bytes return_flat_raw_output_top_logprobs "
    "return_flat_raw_top_logprobs return_routed_experts return_sampling_mask routed_experts_start_len "
    "watermark extra_key",
):
    """Body of /generate: one of `text` and `input_ids`, single or batched."""

    text: str | list[str] | None = None
    input_ids: TokenIds | list[TokenIds] | None = None
    sampling_params: _Sampling | list[_Sampling] | None = None
    rid: Name | list[Name] | None = None  # type: ignore[assignment]

    # One for all prompts, or a list of one for each.
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int] | list[list[int] | None] | None = None
    return_text_in_logprobs: bool | None = None
    return_hidden_states: bool | list[bool] | None = None
    custom_logit_processor: str | list[str | None] | None = None
    receipt: bool | None = None
    lora_path: AdapterName | list[AdapterName | None] | None = None
    # Pictures of a prompt in base64 or as data:, for each place in it; of a batch those of each prompt.
    image_data: str | list[str | list[str] | None] | None = None
    max_thinking_tokens: Budget | None = None  # another name of `thinking_budget`, of all prompts

    def each_sampling(self, prompts: int, defaults: Mapping[str, Any]) -> list[tuple[SamplingParams, bool]]:
        """Returns checked parameters of each of the prompts, and whether they say how long the answer may be. Raises
        RequestError. defaults: of the model, for what is not given."""
        processors = self._each("custom_logit_processor", prompts)
        given = self.sampling_params or {}
        if not isinstance(given, list):
            if len(set(processors)) < 2:
                return [self._checked(given, "sampling_params.", processors[0], defaults)] * prompts
            given = [given] * prompts
        if len(given) != prompts:
            raise RequestError(
                f"sampling_params must hold one entry per prompt; found {len(given)} for {prompts}", "sampling_params"
            )
        found, size = [], 0
        compiled: dict[str, tuple[str, ...]] = {}  # expressions, by how they were given: compiled once
        for i, (fields, name) in enumerate(zip(given, processors, strict=True)):
            asked = repr(fields.get("stop_regex"))
            known = {"stop_regex": compiled[asked]} if asked in compiled else {}
            found.append(self._checked(fields | known, f"sampling_params.{i}.", name, defaults))
            if not known:
                compiled[asked] = found[-1][0].stop_regex
                size += sum(map(parts, compiled[asked]))
            if size > MAX_TOGETHER:
                where = f"sampling_params.{i}.stop_regex"
                raise RequestError(
                    f"{where} has {size} parts with those before it, at most {MAX_TOGETHER} are allowed", where
                )
        return found

    @property
    def ignored(self) -> tuple[str, ...]:
        found = [name for name in HINTS if not all(asks_for_nothing(name, one.get(name)) for one in self._fields)]
        return (*super().ignored, *(f"sampling_params.{name}" for name in found))

    @property
    def expressions(self) -> int:
        return sum(characters(fields.get("stop_regex")) for fields in self._fields)

    @property
    def _fields(self) -> list[dict[str, Any]]:
        """`sampling_params` as a list."""
        return self.sampling_params if isinstance(self.sampling_params, list) else [self.sampling_params or {}]

    def _checked(
        self, fields: dict[str, Any], where: str, processor: str | None, defaults: Mapping[str, Any]
    ) -> tuple[SamplingParams, bool]:
        if processor is not None:
            if fields.get("custom_logit_processor") is not None:
                raise RequestError(f"{where}custom_logit_processor is given twice", "custom_logit_processor")
            fields = fields | {"custom_logit_processor": processor}
        known = {name: value for name, value in fields.items() if value is not None or name == "max_new_tokens"}
        known.setdefault("thinking_budget", self.max_thinking_tokens)
        params = SamplingParams.read(known, where=where, defaults=defaults)
        return params, "max_new_tokens" in fields

    def each_logprobs(self, prompts: int, hidden_size: int) -> list[LogprobParams | None]:
        """Returns the log probabilities that are asked for each of the prompts. Raises RequestError."""
        columns = [self._each(name, prompts) for name in ("return_logprob", "logprob_start_len", "top_logprobs_num")]
        ids = self.token_ids_logprob
        nested = ids is not None and any(not isinstance(one, int) for one in ids)
        columns.append(self._each("token_ids_logprob", prompts) if nested else [ids] * prompts)
        states = self._each("return_hidden_states", prompts)
        return [
            logprob_params(*values, hidden=hidden_size if state else 0)
            for state, values in zip(states, zip(*columns, strict=True), strict=True)
        ]

    def _each(self, name: str, prompts: int) -> list[Any]:
        value = getattr(self, name)
        if not isinstance(value, list):
            return [value] * prompts
        if len(value) != prompts:
            raise RequestError(f"{name} must hold one entry per prompt; found {len(value)} for {prompts}", name)
        return value

    def pictures(self, prompts: int, batched: bool) -> list[list[Picture]]:
        """Returns the pictures of each prompt. Raises RequestError."""
        given: Any = self.image_data
        if self.text is None:
            raise RequestError("image_data needs text, with a place for each picture", "image_data")
        if isinstance(given, str):  # as SGLang reads it: one for each prompt
            return [[pasted(given, "image_data")]] * prompts
        if not batched and all(isinstance(one, str) for one in given):
            given = [given]
        if len(given) != prompts:
            raise RequestError(
                f"image_data must hold pictures for each prompt; found {len(given)} for {prompts}", "image_data"
            )
        every = [enumerate([one] if isinstance(one, str) else one or []) for one in given]
        return [[pasted(one, f"image_data.{i}.{j}") for j, one in some] for i, some in enumerate(every)]

    def renamed(self, error: RequestError) -> RequestError:
        # In the engine's words, but for the field that has another name here.
        if self.max_thinking_tokens is None or any("thinking_budget" in fields for fields in self._fields):
            return error
        ours, name = "thinking_budget", "max_thinking_tokens"
        return RequestError(str(error).replace(ours, name), name if error.param == ours else error.param, error.code)

    @property
    def length(self) -> str | None:
        return "max_new_tokens"  # each prompt has its own

    def prompt(self) -> tuple[str, Any]:
        """Returns name and value of the field that holds the prompts."""
        if (self.text is None) == (self.input_ids is None):
            raise RequestError("give exactly one of text and input_ids", "text")
        return ("text", self.text) if self.text is not None else ("input_ids", self.input_ids)


REPEATED: Final = 2048  # log probabilities that every event repeats; all answers of a request have equal parts of it
GROWTH: Final = 1.25  # where there are more, they are in an event once they are so many times those sent before


class _Sent:
    """What events have had of an answer's log probabilities. They may be thousands of times an event's text: if each
    event repeated them all, the bytes of a stream would grow as the square of its answer."""

    def __init__(self, answers: int) -> None:
        """answers: of the request."""
        self._few = REPEATED // answers
        self.prompt = False
        self._answer = 0

    def next(self, answer: Answer) -> tuple[bool, bool]:
        """Returns whether the next event has those of the prompt, and those of the answer."""
        ended, held = answer.finish_reason is not None, answer.logprob_entries
        of_prompt = ended or not self.prompt
        of_answer = ended or held <= self._few or held >= GROWTH * self._answer
        self.prompt = True
        if of_answer:
            self._answer = held
        return of_prompt, of_answer


class Generated:
    """The response to /generate: one answer, or a list of several. Events have the answer so far, log probabilities of
    the prompt in an answer's first and last one, and those of the answer, where they are many, in some (`_Sent`). In
    others the lists are left out: an empty one would be a new start to a client that takes what is behind its own."""

    def __init__(self, generation: Generation, batched: bool, texts: TokenTexts | None) -> None:
        """texts: None leaves texts out of log probabilities."""
        self.generation, self._texts = generation, texts
        self._many = batched or len(generation.answers) > 1

    def body(self) -> Any:
        made = dict[Any, Any]()
        every = [self._now(answer, made=made) for answer in self.generation.answers]
        return every if self._many else every[0]

    async def events(self) -> AsyncIterator[str]:
        answers = self.generation.answers
        sent = {answer.index: _Sent(len(answers)) for answer in answers}
        async for answer, text in self.generation:
            if text or answer.finish_reason is not None:
                of_prompt, of_answer = sent[answer.index].next(answer)
                size = answer.entries - (0 if of_prompt else answer.prompt_entries)
                size -= 0 if of_answer else answer.logprob_entries
                yield await self.generation.render(size, partial(self._event, answer, of_prompt, of_answer))

    def _event(self, answer: Answer, of_prompt: bool, of_answer: bool, large: bool) -> str:
        now = self._now(answer, of_prompt, of_answer)
        return event(now | ({"index": answer.index} if self._many else {}), large)

    def _now(
        self, answer: Answer, of_prompt: bool = True, of_answer: bool = True, made: dict[Any, Any] | None = None
    ) -> dict[str, Any]:
        meta = answer.meta_info(self._texts, of_prompt, of_answer, made)
        return {"text": answer.text, "output_ids": answer.token_ids, "meta_info": meta}


def add_generate(app: FastAPI, service: Service) -> None:
    @app.put("/generate", include_in_schema=False)
    @app.post("/generate", openapi_extra=schema(GenerateRequest))
    async def generate(request: Request) -> Response:
        async with read_generation(request, GenerateRequest) as body:
            generation, batched = await unless_disconnected(request, _asked(service, body))
            texts = service.texts if body.return_text_in_logprobs else None
        return await respond(request, Generated(generation, batched, texts), body.stream)


async def _asked(service: Service, body: GenerateRequest) -> tuple[Generation, bool]:
    """Returns the answers to all prompts, and whether these came as a batch. Raises as `Service.submit`."""
    info, count = service.engine.info, len(split_prompts(*body.prompt())[0])
    names = _names(body.rid, count)
    asked = await service.sampling(body, partial(body.each_sampling, count, info.sampling))
    service.check_room(sum(params.n for params, _ in asked))
    every, batched = await service.encode(*body.prompt())
    images: list[tuple[RequestImage, ...]] = [()] * len(every)
    if body.image_data:
        every, images = await _with_images(service, body, len(every), batched)
    await service.check_grammars([(one, _grammar_field(one, body)) for one, _ in asked])
    wanted = body.each_logprobs(len(every), info.hidden_size)
    requests = [
        GenerationRequest(
            "",
            ids,
            one if given else one.fit(info.context_length - len(ids)),
            name=name,
            logprobs=logprobs,
            images=shown,
        )
        for ids, (one, given), name, logprobs, shown in zip(every, asked, names, wanted, images, strict=True)
    ]
    return await service.submit(requests, body), batched


async def _with_images(
    service: Service, body: GenerateRequest, count: int, batched: bool
) -> tuple[list[list[int]], list[tuple[RequestImage, ...]]]:
    """Returns tokens and images of each prompt. Raises RequestError."""
    processor = service.engine.info.images
    given = body.pictures(count, batched)
    once = {picture.data: picture for some in reversed(given) for picture in reversed(some)}  # the first ones
    fetched = dict(zip(once, await service.fetched([*once.values()]), strict=True))
    pictures = [[fetched[picture.data]._replace(where=picture.where) for picture in some] for some in given]
    texts = [body.text] if isinstance(body.text, str) else body.text or []

    def fill() -> list[Prompt]:
        known: dict[bytes | str, list[Piece]] = {}
        return [filled(text, some, processor, known) for text, some in zip(texts, pictures, strict=True)]

    prompts = await service.pools.see(fill)
    ids = await service.tokenize([prompt.text for prompt in prompts], "text")

    def place(gone: Callable[[], bool]) -> list[tuple[list[int], tuple[RequestImage, ...]]]:
        return [placed(one, prompt, processor) for one, prompt in zip(ids, prompts, strict=True)]

    made = await service.pools.run(0, place)
    return [one for one, _ in made], [images for _, images in made]


def _names(rid: str | list[str] | None, prompts: int) -> list[str]:
    """Returns the id of each prompt: distinct ones unless the client chose one for all, which is the job's."""
    if isinstance(rid, list) and len(rid) != prompts:
        raise RequestError(f"rid must hold one id per prompt; found {len(rid)} for {prompts}", "rid")
    if isinstance(rid, list):
        return [check_text(name, "rid") for name in rid]
    return [""] * prompts if isinstance(rid, str) else [uuid.uuid4().hex for _ in range(prompts)]


def _grammar_field(params: SamplingParams, body: GenerateRequest) -> str | None:
    given = body.sampling_params
    for field in ("structured_outputs", "guided_decoding"):
        if isinstance(given, dict) and given.get(field) is not None and params.grammar is not None:
            return f"sampling_params.{field}"
    if isinstance(given, dict) and given.get("response_format") is not None:
        return f"sampling_params.response_format{schema_place(given['response_format'])}"
    kind = params.grammar.kind if params.grammar is not None else None
    return kind and f"sampling_params.{'response_format' if kind == 'json_object' else kind}"
