"""Schemas in requests of every API: which one is named where it cannot be built, and what is no fault."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from scripted import ScriptedEngine, client_of
from starlette.testclient import TestClient

GOOD = {"type": "object", "properties": {"city": {"type": "string"}}, "additionalProperties": False}
# What is wrong, where in the schema, and a word of the reason.
BAD = [
    ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "properties.a", "uniqueItems"),
    ({"properties": {"a": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"items": {"type": "strin"}}}},
     "$defs.X.items", "strin"),
    ({"properties": {f"p{i}": {"type": "null"} for i in range(12)} | {"q": {"anyOf": [{"pattern": "(?=a)"}, False]}}},
     "properties.q.anyOf.0", "look-around"),
    ({"properties": {"w": {"additionalProperties": {"format": "uri-reference"}}}},
     "properties.w.additionalProperties", "uri-reference"),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "", "no value"),
]  # fmt: skip
INSIDE = ("llguidance", "%json", "s0:", "start:", "x-guidance", "Unimplemented", "parse error")
DIALECTS = {"/v1/chat/completions": "tools.{}.function.parameters", "/v1/responses": "tools.{}.parameters",
            "/v1/messages": "tools.{}.input_schema"}  # fmt: skip
HI = [{"role": "user", "content": "hi"}]
SLOW_STYLES = [pytest.param(one, marks=pytest.mark.slow) for one in ("mistral", "llama3")]
FURTHER = pytest.mark.further(style=["mistral", "llama3"], path=["/v1/responses", "/v1/messages"])


@pytest.fixture(scope="module", params=["hermes", *SLOW_STYLES])
def style(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(style: str) -> ScriptedEngine:
    return ScriptedEngine("hi", tools=style)


@pytest.fixture(scope="module")
def client(engine: ScriptedEngine) -> Iterator[TestClient]:
    with client_of(engine) as client:
        yield client


def body_of(path: str, tools: list[tuple[Any, bool]], choice: str = "auto") -> dict[str, Any]:
    """tools: schemas, and whether they are strict."""
    if path == "/v1/messages":
        named = [{"name": f"f{i}", "input_schema": one, "strict": strict} for i, (one, strict) in enumerate(tools)]
        more = {"tool_choice": {"type": "any" if choice == "required" else choice}}
        return {"model": "m", "max_tokens": 9, "messages": HI, "tools": named} | more
    functions = [{"name": f"f{i}", "parameters": one, "strict": strict} for i, (one, strict) in enumerate(tools)]
    if path == "/v1/responses":
        listed = [{"type": "function", **one} for one in functions]
        return {"model": "m", "input": "hi", "tools": listed, "tool_choice": choice}
    return {"model": "m", "messages": HI, "tool_choice": choice,
            "tools": [{"type": "function", "function": one} for one in functions]}  # fmt: skip


def refusal_of(response: Any) -> tuple[str, str | None]:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["message"], error.get("param")


@pytest.mark.slow
@FURTHER
@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.covering
def test_the_strict_tool_that_is_wrong_is_named(client: TestClient, style: str, path: str, choice: str) -> None:
    # Where calls are alternatives of one schema, one that nothing fulfils is simply none of them.
    for place, (schema, where, word) in zip((7, 0, 3, 1, 2), BAD if style == "hermes" else BAD[:4], strict=False):
        tools: list[Any] = [({"type": "object", "properties": {"k": {"const": i}}}, True) for i in range(9)]
        tools[place] = ({"type": "object", **schema}, True)
        message, param = refusal_of(client.post(path, json=body_of(path, tools, choice)))
        name = DIALECTS[path].format(place)
        assert message.startswith(f"{name}: ") and where in message and word in message
        assert not any(word in message for word in INSIDE), message
        assert param in (name, None) and (param is not None or path == "/v1/messages")


@FURTHER
@pytest.mark.parametrize("path", DIALECTS)
def test_a_schema_is_held_or_refused_where_a_call_is_held_to_it(
    client: TestClient, engine: ScriptedEngine, path: str
) -> None:
    bad = [({"type": "object", **schema}, False) for schema, _, _ in BAD[:4]]
    plain = client.post(path, json=body_of(path, [*bad, (GOOD, False)]))
    assert plain.status_code == 200 and engine.requests[-1].params.grammar is None
    assert "draftwing-ignored" not in plain.headers
    mixed = client.post(path, json=body_of(path, [*bad, (GOOD, True)]))
    assert mixed.status_code == 200 and "city" in engine.requests[-1].params.grammar.text
    for place in (0, 2):
        (_, where, word), one = BAD[place], bad[place]
        tools = [(GOOD, False), (GOOD, True), (GOOD, False), (GOOD, False)]
        tools[place] = one
        message, _ = refusal_of(client.post(path, json=body_of(path, tools, "required")))
        assert message.startswith(DIALECTS[path].format(place)) and where in message and word in message
        body = body_of(path, tools)
        for named in (place, (place + 1) % 4):
            body["tool_choice"] = CHOSEN[path](f"f{named}")
            response = client.post(path, json=body)
            assert response.status_code == (400 if named == place else 200), response.text


CHOSEN: dict[str, Any] = {
    "/v1/chat/completions": lambda name: {"type": "function", "function": {"name": name}},
    "/v1/responses": lambda name: {"type": "function", "name": name},
    "/v1/messages": lambda name: {"type": "tool", "name": name},
}


@FURTHER
@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("name", ["Größe", "a%b"])
def test_arguments_are_held_to_definitions_of_any_name(
    client: TestClient, engine: ScriptedEngine, path: str, name: str
) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{name}"}}, "$defs": {name: {"enum": ["x1"]}}}
    for choice, strict in (("required", False), ("auto", True)):
        response = client.post(path, json=body_of(path, [(schema, strict)], choice))
        assert response.status_code == 200 and "draftwing-ignored" not in response.headers, response.text
        assert "x1" in engine.requests[-1].params.grammar.text


@FURTHER
@pytest.mark.parametrize("path", DIALECTS)
def test_keywords_that_ask_for_nothing_are_no_fault_of_a_tool(client: TestClient, path: str) -> None:
    schema: Any = {
        "type": "object", "properties": {"a": {"type": "array", "uniqueItems": False, "contains": {}}},
        "propertyNames": {"type": "string"}, "unevaluatedProperties": True, "dependentRequired": {},
    }  # fmt: skip
    for choice in ("auto", "required"):
        response = client.post(path, json=body_of(path, [(GOOD, True), (schema, True)], choice))
        assert response.status_code == 200, response.text


FORMATS: list[tuple[str, Any, str]] = [
    ("/v1/chat/completions", lambda schema: {"response_format": {"type": "json_schema", "json_schema": {
        "name": "n", "schema": schema}}}, "response_format.json_schema.schema"),
    ("/v1/chat/completions", lambda schema: {"response_format": {"type": "json_object", "schema": schema}},
     "response_format.schema"),
    ("/v1/completions", lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
     "response_format.json_schema.schema"),
    ("/v1/responses", lambda schema: {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}},
     "text.format.schema"),
    ("/v1/messages", lambda schema: {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
     "output_config.format.schema"),
    ("/v1/messages", lambda schema: {"output_format": {"type": "json_schema", "schema": schema}},
     "output_format.schema"),
    ("/generate", lambda schema: {"sampling_params": {"response_format": {"type": "json_schema", "json_schema": {
        "schema": schema}}}}, "sampling_params.response_format.json_schema.schema"),
    ("/generate", lambda schema: {"sampling_params": {"json_schema": schema}}, "sampling_params.json_schema"),
    ("/v1/chat/completions", lambda schema: {"json_schema": schema}, "json_schema"),
    ("/v1/chat/completions", lambda schema: {"structured_outputs": {"json": schema}}, "structured_outputs.json"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.further(style=["mistral", "llama3"])  # it has no tools
@pytest.mark.parametrize(("path", "fields", "name"), FORMATS, ids=[name for _, _, name in FORMATS])
def test_the_field_of_a_schema_is_named(client: TestClient, path: str, fields: Any, name: str) -> None:
    prompt = {"/v1/completions": {"prompt": "hi"}, "/generate": {"text": "hi"}}.get(path, body_of(path, []))
    for tools in ("tools", "tool_choice"):
        prompt.pop(tools, None)
    for schema, where, word in BAD:
        response = client.post(path, json={**prompt, **fields(schema)})
        message, param = refusal_of(response)
        assert message.startswith(f"{name}: ") and where in message and word in message
        assert not any(word in message for word in INSIDE), message
        assert param in (name, None)
    for good in (GOOD, {"$ref": "#/$defs/List[Größe]", "$defs": {"List[Größe]": GOOD}}):
        assert client.post(path, json={**prompt, **fields(good)}).status_code == 200
