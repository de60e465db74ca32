"""Going on from stored responses through OpenAI's own client: by response, by item, with and without streams."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from scripted import ScriptedEngine, keys_file, openai_client, serving

from draftwing.server.edge import limits

SCRIPTED = dict(reasoning="qwen3", tools="hermes")

TOOLS: list[Any] = [
    {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}, "strict": False}
]
CALL = '<think>\nhm\n</think>\n\nLet me see.<tool_call>\n{"name": "now", "arguments": {"zone": "é"}}\n</tool_call>'
KEYS = '[alice]\nkey = "sk-alice"\n[bob]\nkey = "sk-bob"\n'


@contextlib.contextmanager
def served(scripted: ScriptedEngine, **options: Any) -> Iterator[str]:
    shown = dataclasses.replace(scripted.info.options, **options)
    scripted.info = dataclasses.replace(scripted.info, options=shown)
    with serving(scripted) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai_client(url)


def ask(client: openai.OpenAI, stream: bool, **body: Any) -> Any:
    if not stream:
        return client.responses.create(model="m", **body)
    with client.responses.stream(model="m", **body) as events:
        return events.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_by_previous_response(client: openai.OpenAI, scripted: ScriptedEngine, stream: bool) -> None:
    scripted.script = CALL
    first = ask(client, stream, input="time?", instructions="Be brief.", tools=TOOLS)
    assert first.store is True and first.previous_response_id is None
    call = first.output[-1]
    scripted.script = "Noon."
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"}
    second = ask(client, stream, input=[result], previous_response_id=first.id, tools=TOOLS)
    expected = (
        f'<user>time?</user>\n<assistant>[hm]Let me see.<call {call.call_id}>now {{"zone": "é"}}</assistant>\n'
        f"<tool>12:00 by now for {call.call_id}</tool>\n"
    )
    assert scripted.prompt.split("</tools>\n")[1] == f"{expected}<assistant>"  # without the instructions
    assert second.previous_response_id == first.id
    third = ask(client, stream, input="thanks", instructions="Now long.", previous_response_id=second.id)
    said = f"<system>Now long.</system>\n{expected}<assistant>Noon.</assistant>\n<user>thanks</user>\n<assistant>"
    assert scripted.prompt == said
    # Its input is listed with all before it, the newest first.
    items = list(client.responses.input_items.list(third.id, limit=3))
    kinds = ["message", "message", "function_call_output", "function_call", "message", "reasoning", "message"]
    assert [item.type for item in items] == kinds and len({item.id for item in items}) == len(items)
    assert items[0].content[0].text == "thanks" and items[3].id == call.id and items[1].id == second.output[0].id
    forward = list(client.responses.input_items.list(third.id, order="asc"))
    assert forward == items[::-1]


@pytest.mark.parametrize(("stream", "typed"), [(False, True), (True, False)])
def test_a_tool_loop_by_references(client: openai.OpenAI, scripted: ScriptedEngine, stream: bool, typed: bool) -> None:
    scripted.script = CALL
    user = {"role": "user", "content": [{"type": "input_text", "text": "time?"}]}
    first = ask(client, stream, input=[user], tools=TOOLS)
    named: list[Any] = [{"id": item.id} | ({"type": "item_reference"} if typed else {}) for item in first.output]
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "12:00"}
    scripted.script = "Noon."
    second = ask(client, stream, input=[user, *named, result], tools=TOOLS)
    call = first.output[-1].call_id
    expected = (
        f'<user>time?</user>\n<assistant>[hm]Let me see.<call {call}>now {{"zone": "é"}}</assistant>\n<tool>12:00'
    )
    assert expected in scripted.prompt
    client.responses.delete(first.id)  # the second one has copies
    named.append({"type": "item_reference", "id": second.output[0].id})
    ask(client, stream, input=[user, *named[:-1], result, named[-1], {"role": "user", "content": "and?"}])
    assert expected in scripted.prompt and scripted.prompt.endswith(
        "<assistant>Noon.</assistant>\n<user>and?</user>\n<assistant>"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_stored_is_what_was_sent(
    client: openai.OpenAI, scripted: ScriptedEngine, url: str, stream: bool
) -> None:
    scripted.script = "Hello, wörld!"
    sent = ask(client, stream, input="hi", metadata={"a": "b"}, temperature=0.5)
    shown = sent.to_dict()
    shown["output"][0]["content"][0].pop("parsed", None)  # the client's own
    assert client.responses.retrieve(sent.id).to_dict() == shown
    (item,) = client.responses.input_items.list(sent.id).data
    assert (item.type, item.role, item.status) == ("message", "user", "completed")
    gone = httpx.delete(f"{url}/responses/{sent.id}")
    assert gone.json() == {"id": sent.id, "object": "response", "deleted": True}
    for look in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="is stored"):
            look(sent.id)
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, stream, input="x", previous_response_id=sent.id)
    assert (error.value.code, error.value.param) == ("previous_response_not_found", "previous_response_id")


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_kept_without_store(client: openai.OpenAI, scripted: ScriptedEngine, stream: bool) -> None:
    scripted.script = "Hello."
    sent = ask(client, stream, input="hi", store=False)
    assert sent.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(sent.id)
    with pytest.raises(openai.NotFoundError, match="store") as error:
        ask(client, stream, input=[{"type": "item_reference", "id": sent.output[0].id}])
    assert error.value.param == "input.0.id"


def test_a_server_that_keeps_nothing() -> None:
    with served(ScriptedEngine("Hello."), response_store_size=0) as url:
        sent = openai_client(url).responses.create(model="m", input="hi", store=True)
        assert sent.store is False
        with pytest.raises(openai.NotFoundError):
            openai_client(url).responses.retrieve(sent.id)


def test_keys_do_not_see_each_others(tmp_path: Path) -> None:
    with served(ScriptedEngine("Hello."), api_key_file=keys_file(tmp_path, KEYS)) as url:
        alice, bob = openai_client(url, "sk-alice"), openai_client(url, "sk-bob")
        sent = alice.responses.create(model="m", input="hi")
        for stranger in (
            lambda: bob.responses.retrieve(sent.id),
            lambda: bob.responses.delete(sent.id),
            lambda: bob.responses.input_items.list(sent.id),
            lambda: bob.responses.create(model="m", input=[{"type": "item_reference", "id": sent.output[0].id}]),
        ):
            with pytest.raises(openai.NotFoundError):
                stranger()
        with pytest.raises(openai.BadRequestError):
            bob.responses.create(model="m", input="x", previous_response_id=sent.id)
        assert alice.responses.create(model="m", input="x", previous_response_id=sent.id).output_text == "Hello."


def test_an_answer_that_was_cut_by_its_length_goes_on(client: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = "one two three"
    cut = client.responses.create(model="m", input="count", max_output_tokens=3)
    assert cut.status == "incomplete"
    client.responses.create(model="m", input="go on", previous_response_id=cut.id)
    assert scripted.prompt == "<user>count</user>\n<assistant>one</assistant>\n<user>go on</user>\n<assistant>"


def test_answers_that_do_not_finish_are_not_kept(client: openai.OpenAI, scripted: ScriptedEngine, url: str) -> None:
    scripted.script, scripted.pause = "x" * 1500, 0.02
    try:
        ids = []
        for leave in (True, False):
            with client.responses.create(model="m", input="hi", stream=True, extra_body={"rid": f"r{leave}"}) as stream:
                for i, event in enumerate(stream):
                    if event.type == "response.created":
                        ids.append(event.response.id)
                    if i == 8 and leave:
                        break
                    if i == 8:
                        httpx.post(f"{url}/abort_request", json={"rid": f"r{leave}"})
    finally:
        scripted.pause = 0.0005
    for id in ids:
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(id)


REFUSED: list[tuple[int, dict[str, Any], str]] = [
    (400, {"previous_response_id": "resp_no"}, "previous_response_id"),
    (404, {"input": [{"type": "item_reference", "id": "no"}]}, "input.0.id"),
    (404, {"input": [{"role": "user", "content": "x"}, {"id": "no"}]}, "input.1.id"),
    (400, {"input": [{"type": "item_reference"}]}, "input.0.id"),
    (400, {"input": [{"id": "no", "call_id": "c", "output": "x"}]}, "input.0.role"),
    (400, {"input": []}, "input"),
]


@pytest.mark.parametrize("status, body, param", REFUSED)
def test_refusals(url: str, status: int, body: dict[str, Any], param: str) -> None:
    response = httpx.post(f"{url}/v1/responses", json={"model": "m", "input": "x"} | body)
    assert (response.status_code, response.json()["param"]) == (status, param)


def test_an_item_is_named_once(client: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = "Hello."
    named: Any = {"type": "item_reference", "id": client.responses.create(model="m", input="hi").output[0].id}
    with pytest.raises(openai.BadRequestError, match="twice") as error:
        client.responses.create(model="m", input=[named, named])
    assert error.value.param == "input.1.id"


def test_queries_are_checked(client: openai.OpenAI, scripted: ScriptedEngine, url: str) -> None:
    scripted.script = "Hello."
    sent = client.responses.create(model="m", input="hi")
    path = f"{url}/v1/responses/{sent.id}"
    for query, name in (("limit=0", "limit"), ("limit=101", "limit"), ("order=up", "order"), ("after=no", "after")):
        response = httpx.get(f"{path}/input_items?{query}")
        assert (response.status_code, response.json()["param"]) == (400, name)
    assert httpx.get(f"{path}?stream=true").json()["param"] == "stream"


def test_a_conversation_is_no_longer_than_a_body_may_be() -> None:
    with served(ScriptedEngine("Hello."), max_body_size=2000) as url:
        client, instructions = openai_client(url), "x" * 500  # which are not of the conversation
        ids: list[str | None] = [None]
        with pytest.raises(openai.BadRequestError, match="--max-body-size") as error:
            for _ in range(7):
                sent = client.responses.create(
                    model="m", input="x" * 100, previous_response_id=ids[-1], instructions=instructions
                )
                ids.append(sent.id)
        assert error.value.code == "context_length_exceeded" and len(ids) == 6


def test_what_comes_from_the_store_counts_as_the_body_that_it_is_instead_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small request may stand for much: 64 of them hold no more than 64 large ones."""
    monkeypatch.setattr(limits, "SMALL", 10)
    monkeypatch.setattr(limits, "ALL_BODIES", 1)
    with served(ScriptedEngine("Hello."), max_body_size=1000) as url:
        client = openai_client(url)
        sent = client.responses.create(model="m", input="x" * 100)
        assert client.responses.create(model="m", input="y", previous_response_id=sent.id).output_text == "Hello."
        for ask in (
            lambda: client.responses.create(model="m", input="y" * 700, previous_response_id=sent.id),
            lambda: client.responses.create(
                model="m",
                input=[{"type": "item_reference", "id": sent.output[0].id}, {"role": "user", "content": "y" * 700}],
            ),
        ):
            with pytest.raises(openai.InternalServerError, match="together") as error:
                ask()
            assert error.value.status_code == 503
        assert client.responses.create(model="m", input="y" * 700).output_text == "Hello."
