"""`speculative_trace`: a request's own stream tells what was drafted for it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from fake_engine import EOS, FakeEngine, drafting_options
from scripted import events
from starlette.testclient import TestClient
from test_parameters import CHAT, COMPLETION, base

ENGINE = functools.partial(FakeEngine, drafting_options(3, 2, 6))


def steps_of(client: TestClient, path: str, **fields: Any) -> tuple[str, list[dict[str, Any]]]:
    """The text of a stream's answer, and the steps in it."""
    response = client.post(path, json=base(path, "Hello, tree") | {"stream": True, **fields})
    assert response.status_code == 200, response.text
    text, steps = "", []
    for event in events(response.text):
        (choice,) = event["choices"]
        text += choice.get("delta", choice).get("content" if path == CHAT else "text") or ""
        steps += choice.get("speculative_trace", [])
    return text, steps


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_steps_tell_the_tree(client: TestClient, path: str) -> None:
    text, steps = steps_of(client, path, speculative_trace=True, max_tokens=9)
    assert text and "".join(token["text"] for step in steps for token in step["tokens"]) == text
    assert [step["step"] for step in steps] == [0, 1, 2]
    first, second = steps[0], steps[1]
    assert first["nodes"] == [] and set(first) == {"step", "seconds", "requests", "tokens", "nodes"}
    good, wrong, deeper, _ = second["nodes"]
    assert (good["parent"], deeper["parent"], good["by"], wrong["by"]) == (None, 0, "model", "lookup")
    assert (good["text"], good["accepted"], wrong["accepted"]) == (second["tokens"][0]["text"], True, False)
    assert 0 <= wrong["survival"] <= 1 and wrong["verified"]


def test_special_tokens_are_named(client: TestClient) -> None:
    _, steps = steps_of(client, CHAT, speculative_trace=True, max_tokens=400)
    tokens = [token for step in steps for token in step["tokens"]]
    assert tokens[-1] == {"id": EOS, "text": "<eos>", "special": True}
    assert not any("special" in token for token in tokens[:-1])


def test_the_text_does_not_depend_on_it(client: TestClient) -> None:
    text, steps = steps_of(client, CHAT)
    assert not steps and text == steps_of(client, CHAT, speculative_trace=True)[0]
    assert steps_of(client, CHAT, speculative_trace=False)[1] == []


def test_drafts_off(client: TestClient) -> None:
    _, steps = steps_of(client, CHAT, speculative_trace=True, speculative="off")
    assert steps and not any(step["nodes"] for step in steps)


def test_only_in_streams(client: TestClient, engine: FakeEngine) -> None:
    response = client.post(CHAT, json=base(CHAT) | {"speculative_trace": True})
    assert response.status_code == 400 and response.json()["param"] == "speculative_trace"
    assert not engine.requests and not engine.traced
