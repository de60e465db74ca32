"""How well documents answer a query: /v1/rerank as Jina, Cohere, vLLM and llama.cpp have it, and vLLM's /score."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field

from draftwing.errors import RequestError
from draftwing.requests.request import GenerationRequest
from draftwing.server.embeddings import Pooled, PooledBody, ask_vectors, pooler_of, usage
from draftwing.server.endpoints import read_generation, respond, schema, unless_disconnected
from draftwing.server.schema import MAX_PROMPTS, Body
from draftwing.server.service import Generation, Service
from draftwing.text.pooler import Pooler, cosine

_INLINE_CHARACTERS = 4096  # of all prompts of a request; fewer are tokenized at once
Pair = tuple[int, int]  # of a text of `first` and a text of `second`


class DocumentBody(Body):
    text: str


class PairsBody(PooledBody):
    """instruction: what makes a document right for a query, for models that judge."""

    instruction: str | None = None


class RerankRequest(PairsBody):
    """Body of /v1/rerank. Without `top_n` all documents are in the response, the best first."""

    source = "documents"
    id_prefix = "rerank-"

    query: str
    documents: list[str | DocumentBody]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None


class ScoreRequest(PairsBody):
    """Body of /score: a text and one or several others, or as many on both sides."""

    source = "text_2"
    id_prefix = "score-"

    text_1: str | list[str]
    text_2: str | list[str]


Scores = Callable[[Generation], list[float]]


async def ask_scores(
    service: Service, body: PairsBody, queries: Sequence[str], documents: Sequence[str]
) -> tuple[Generation, Scores]:
    """Asks how well documents answer queries, one of which may be for all. Returns the requests, and what reads the
    scores of finished ones. Raises as `Service.submit`."""
    pooler, count = pooler_of(service), len(documents)
    if count > MAX_PROMPTS:
        raise RequestError(f"{body.source} takes at most {MAX_PROMPTS} texts; found {count}", body.source)
    if not pooler.judges:
        generation = await ask_vectors(service, body, [*queries, *documents])
        return generation, partial(_cosines, pooler, len(queries))
    service.check_room(count)
    every = list(queries) * count if len(queries) == 1 else list(queries)
    size = sum(map(len, every)) + sum(map(len, documents))
    if size > service.max_body_size:
        raise RequestError(
            f"{body.source}: the query is read with each document: expected at most {service.max_body_size} characters "
            f"of all these, found {size}",
            body.source,
        )

    def requests(gone: Callable[[], bool]) -> list[GenerationRequest]:
        made = []
        for i, (query, document) in enumerate(zip(every, documents, strict=True)):
            if gone():
                break
            field = f"{body.source}.{i}"
            made.append(pooler.judged(query, document, body.instruction, field, body.truncate is True))
        return made

    asked = requests(lambda: False) if size <= _INLINE_CHARACTERS else await service.pools.run(size, requests)
    generation = await service.submit(asked, body)
    return generation, lambda done: [pooler.score(answer) for answer in done.answers]


def _cosines(pooler: Pooler, queries: int, generation: Generation) -> list[float]:
    every = [pooler.vector(answer) for answer in generation.answers]
    first, second = every[:queries], every[queries:]
    first = first * len(second) if queries == 1 else first
    return [cosine(one, other) for one, other in zip(first, second, strict=True)]


def add_rerank_routes(app: FastAPI, service: Service) -> None:
    @app.post("/rerank", include_in_schema=False)
    @app.post("/v2/rerank", include_in_schema=False)
    @app.post("/reranking", include_in_schema=False)
    @app.post("/v1/reranking", include_in_schema=False)
    @app.post("/v1/rerank", openapi_extra=schema(RerankRequest))
    async def rerank(request: Request) -> Response:
        async with read_generation(request, RerankRequest) as body:
            texts = [one if isinstance(one, str) else one.text for one in body.documents]
            _check_texts("query", [body.query])
            _check_texts("documents", texts)
            asked = ask_scores(service, body, [body.query], texts)
            generation, scores = await unless_disconnected(request, asked)

        def made(generation: Generation) -> dict[str, Any]:
            found = scores(generation)
            best = sorted(range(len(found)), key=lambda i: -found[i])[: body.top_n]  # equal ones in their order
            results: list[dict[str, Any]] = [{"index": i, "relevance_score": found[i]} for i in best]
            if body.return_documents is not False:
                results = [one | {"document": {"text": texts[one["index"]]}} for one in results]
            about = {"id": generation.id, "model": service.name_for(body.model), "usage": usage(generation)}
            return {"object": "list", "results": results, **about}

        return await respond(request, Pooled(generation, made), False, sum(map(len, texts)))

    @app.post("/score", include_in_schema=False)
    @app.post("/v1/score", openapi_extra=schema(ScoreRequest))
    async def score(request: Request) -> Response:
        async with read_generation(request, ScoreRequest) as body:
            first, second = ([side] if isinstance(side, str) else side for side in (body.text_1, body.text_2))
            _check_texts("text_1", first)
            _check_texts("text_2", second)
            if len(first) != 1 and len(first) != len(second):
                raise RequestError(
                    f"text_1 must be one text, or as many as text_2 has, {len(second)}; found {len(first)}", "text_1"
                )
            generation, scores = await unless_disconnected(request, ask_scores(service, body, first, second))

        def made(generation: Generation) -> dict[str, Any]:
            data = [{"object": "score", "index": i, "score": one} for i, one in enumerate(scores(generation))]
            about = {"id": generation.id, "created": int(time.time()), "model": service.name_for(body.model)}
            return {"object": "list", "data": data, **about, "usage": usage(generation)}

        return await respond(request, Pooled(generation, made), False)


def _check_texts(field: str, texts: Sequence[str]) -> None:
    """Raises RequestError for no texts, and for empty ones."""
    if not texts or not all(texts):
        raise RequestError(f"{field} must not be empty", field)
