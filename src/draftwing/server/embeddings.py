"""Vectors of texts: /v1/embeddings as OpenAI has it, and Ollama's /api/embed and /api/embeddings. A text is a request
whose prompt is run, beside those that generate, and which has no answer."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field

from draftwing.errors import RequestError
from draftwing.server.endpoints import read_generation, respond, schema, unless_disconnected
from draftwing.server.http import encode, json_response
from draftwing.server.ollama_bodies import ModelOptions
from draftwing.server.openai.completions import cached_tokens
from draftwing.server.schema import GenerationBody, Hint, Name, NotBuilt, TokenIds, split_prompts
from draftwing.server.service import Generation, Service
from draftwing.text.pooler import Pooler, Vector, decimals

MAX_CHOSEN = 1 << 24  # dimensions that a body may name; the model's are fewer
Dimensions = Annotated[int, Field(ge=1, le=MAX_CHOSEN)]


class PooledBody(GenerationBody):
    """Body of a request whose prompts have no answers. truncate: leaves out the end of a text that is too long."""

    stream: NotBuilt = None
    speculative: NotBuilt = None
    dry_multiplier: Hint = None
    dry_base: Hint = None
    dry_allowed_length: Hint = None

    model: Name | None = None
    user: Hint = None
    truncate: bool | None = None

    @property
    def length(self) -> str | None:
        return "truncate"  # there is no length to choose

    def renamed(self, error: RequestError) -> RequestError:
        # Of vectors that are made of the states of all tokens.
        if error.param == "return_hidden_states":
            return RequestError(
                f"{self.source} has too many tokens for one request: this model's vectors are made of the hidden "
                "states of all of them, which are sent to the server; send fewer or shorter texts at once",
                self.source,
            )
        return super().renamed(error)


class EmbeddingRequest(PooledBody):
    """Body of /v1/embeddings."""

    source = "input"
    id_prefix = "embd-"

    input: str | TokenIds | list[str] | list[TokenIds]
    dimensions: Dimensions | None = None
    encoding_format: Literal["float", "base64"] | None = None


class OllamaBody(PooledBody):
    """What both endpoints of Ollama share."""

    options: ModelOptions | None = None
    keep_alive: Hint = None  # the model stays loaded
    dimensions: Dimensions | None = None

    @property
    def texts(self) -> list[str]:
        raise NotImplementedError

    def made(self, model: str, vectors: list[list[float]], durations: dict[str, int]) -> dict[str, Any]:
        """Returns the response."""
        raise NotImplementedError


class OllamaEmbedRequest(OllamaBody):
    """Body of /api/embed. Texts that are too long lose their end, unless `truncate` is false."""

    source = "input"

    input: str | list[str] | None = None

    @property
    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input or []

    def made(self, model: str, vectors: list[list[float]], durations: dict[str, int]) -> dict[str, Any]:
        return {"model": model, "embeddings": vectors, **durations}


class OllamaEmbeddingsRequest(OllamaBody):
    """Body of /api/embeddings, which was before /api/embed: one text."""

    source = "prompt"

    prompt: str | None = None

    @property
    def texts(self) -> list[str]:
        return [self.prompt or ""]

    def made(self, model: str, vectors: list[list[float]], durations: dict[str, int]) -> dict[str, Any]:
        return {"embedding": vectors[0] if vectors else []}


class Pooled:
    """The response to requests without answers: what `make` makes of them, once all are finished."""

    def __init__(self, generation: Generation, make: Callable[[Generation], Any]) -> None:
        self.generation, self._make = generation, make

    def body(self) -> Any:
        return self._make(self.generation)

    def events(self) -> AsyncIterator[str]:
        raise AssertionError("there is no stream of these")


def pooler_of(service: Service) -> Pooler:
    """Returns what makes vectors and scores with the service's model."""
    info = service.engine.info
    return Pooler(service.tokenizer, info.pooling, info.hidden_size, info.context_length)


async def ask_vectors(
    service: Service, body: PooledBody, prompts: Sequence[str] | Sequence[list[int]], dimensions: int | None = None
) -> Generation:
    """Asks for the vectors of texts or token ids, which came in the body's `source`. Raises as `Service.submit`."""
    pooler, truncate, field = pooler_of(service), body.truncate is True, body.source
    pooler.check_dimensions(dimensions)
    service.check_room(len(prompts))
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
    if texts:
        ids = await service.tokenize(texts, field, max_tokens=service.countable if truncate else None)
    if not all(ids):
        raise RequestError(f"{field} must have at least one token; found a text that has none", field)
    keep = pooler.ending if texts else 0
    names = [field] if len(ids) == 1 else [f"{field}.{i}" for i in range(len(ids))]
    ids = [pooler.fit(one, name, truncate, keep) for one, name in zip(ids, names, strict=True)]
    return await service.submit(pooler.vector_requests(ids), body)


def usage(generation: Generation) -> dict[str, Any]:
    """Returns `usage` of finished requests without answers."""
    tokens, cached = generation.prompt_tokens, cached_tokens(generation.answers)
    return {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}


def _shown(vector: Vector, form: str | None) -> Any:
    """A list, or its float32 in base64, the lowest byte first, as OpenAI has it."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii") if form == "base64" else decimals(vector)


def add_embedding_routes(app: FastAPI, service: Service) -> None:
    pooler = pooler_of(service)

    @app.post("/embeddings", include_in_schema=False)
    @app.post("/v1/embeddings", openapi_extra=schema(EmbeddingRequest))
    async def embeddings(request: Request) -> Response:
        async with read_generation(request, EmbeddingRequest) as body:
            prompts, _ = split_prompts("input", body.input)
            asked = ask_vectors(service, body, prompts, body.dimensions)
            generation = await unless_disconnected(request, asked)

        def made(generation: Generation) -> dict[str, Any]:
            every = (pooler.vector(answer, body.dimensions) for answer in generation.answers)
            data = [
                {"object": "embedding", "index": i, "embedding": _shown(vector, body.encoding_format)}
                for i, vector in enumerate(every)
            ]
            about = {"id": generation.id, "model": service.name_for(body.model), "usage": usage(generation)}
            return {"object": "list", "data": data, **about}

        return await respond(request, Pooled(generation, made), False, _numbers(service, len(prompts)))

    @app.post("/api/embed", openapi_extra=schema(OllamaEmbedRequest))
    async def embed(request: Request) -> Response:
        return await ollama(request, OllamaEmbedRequest)

    @app.post("/api/embeddings", openapi_extra=schema(OllamaEmbeddingsRequest))
    async def embed_one(request: Request) -> Response:
        return await ollama(request, OllamaEmbeddingsRequest)

    async def ollama(request: Request, kind: type[OllamaBody]) -> Response:
        async with read_generation(request, kind) as body:
            texts, name = body.texts, service.name_for(body.model)
            if not any(texts):  # so clients ask for a model to be loaded
                return json_response(encode(body.made(name, [], {})))
            split_prompts(body.source, texts)
            body.truncate = body.truncate is not False  # as Ollama does
            generation = await unless_disconnected(request, ask_vectors(service, body, texts, body.dimensions))

        def made(generation: Generation) -> dict[str, Any]:
            every = [decimals(pooler.vector(answer, body.dimensions)) for answer in generation.answers]
            return body.made(name, every, _durations(generation))

        return await respond(request, Pooled(generation, made), False, _numbers(service, len(texts)))


def _numbers(service: Service, texts: int) -> int:
    """Returns how many numbers the vectors of so many texts have at most."""
    return texts * service.engine.info.hidden_size


def _durations(generation: Generation) -> dict[str, int]:
    """Nanoseconds, as Ollama counts."""
    ended = max(record.ended or record.arrived for record in generation.records)
    whole = ended - min(record.arrived for record in generation.records)
    return {
        "total_duration": max(round(1e9 * whole), 1),
        "load_duration": 0,
        "prompt_eval_count": generation.prompt_tokens,
    }
