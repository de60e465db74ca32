"""docs/fields.md lists every field that has no effect and every field that is refused, in each dialect."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from test_pages import table_rows, text_of

from draftwing.requests import sampling_params
from draftwing.server.anthropic_bodies import MessagesRequest
from draftwing.server.generate import GenerateRequest
from draftwing.server.openai.responses.schema import ResponsesRequest
from draftwing.server.openai.schema import ChatRequest, CompletionRequest
from draftwing.server.schema import HINT, NotBuilt

PAGE = Path(__file__).parent.parent / "docs" / "fields.md"
DIALECTS: dict[str, type[BaseModel]] = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "messages": MessagesRequest,
    "responses": ResponsesRequest,
    "generate": GenerateRequest,
}
Listed = set[tuple[str, str]]  # dialects and fields


def models_in(kind: Any) -> Iterator[type[BaseModel]]:
    """Those that a type is made of, whatever is around them."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for part in get_args(kind):
        yield from models_in(part)


def marked(model: type[BaseModel], hints: bool, where: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        path = where + (field.alias or name)
        if (HINT in field.metadata) if hints else field.metadata == list(NotBuilt.__metadata__):
            yield path
        for inner in models_in(field.annotation):
            yield from marked(inner, hints, f"{path}.")


def of_code(hints: bool) -> Listed:
    found = {(dialect, path) for dialect, model in DIALECTS.items() for path in marked(model, hints)}
    names = sampling_params.HINTS if hints else sampling_params.NOT_BUILT
    return found | {("generate", f"sampling_params.{name}") for name in names}


def of_page(title: str) -> Listed:
    section = text_of(PAGE).split(f"## {title}\n")[1].split("\n## ")[0]
    found: list[tuple[str, str]] = []
    for fields, dialects, *_ in table_rows(section)[2:]:
        names = DIALECTS if dialects == "all" else [one.strip() for one in dialects.split(",")]
        assert set(names) <= set(DIALECTS), dialects
        found += [(dialect, name.strip("` ")) for dialect in names for name in fields.split(",")]
    assert len(found) == len(set(found)), "a field is listed twice"
    return set(found)


@pytest.mark.parametrize(("title", "hints"), [("Accepted without effect", True), ("Refused", False)])
def test_the_page_lists_the_fields_of_the_models(title: str, hints: bool) -> None:
    code, page = of_code(hints), of_page(title)
    assert len(code) > 50
    assert code == page, f"not on the page: {sorted(code - page)}; on the page alone: {sorted(page - code)}"
