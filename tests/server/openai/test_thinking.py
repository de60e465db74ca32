"""How chat completions are asked whether to reason, by each API's own field."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from scripted import ScriptedEngine, events

SCRIPTED = dict(reasoning="qwen3")
HI = [{"role": "user", "content": "hi"}]
OFF = "<think>\n\n</think>\n\n"
DISABLED: list[dict[str, Any]] = [
    {"enable_thinking": False}, {"thinking": {"type": "disabled"}}, {"reasoning": {"enabled": False}},
    {"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}},
    {"thinking": {"type": "disabled", "clear_thinking": True}}, {"enable_thinking": False, "thinking_budget": 9},
    {"enable_thinking": True, "reasoning_effort": "none"},
]  # fmt: skip
ENABLED: list[dict[str, Any]] = [
    {"enable_thinking": True}, {"thinking": {"type": "enabled"}}, {"thinking": {"type": "auto"}},
    {"thinking": {"type": "adaptive"}}, {"enable_thinking": None, "thinking": None}, {"reasoning": {"enabled": True}},
]  # fmt: skip


def ask(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json={"messages": HI, **body})


@pytest.mark.parametrize("body", DISABLED, ids=json.dumps)
def test_reasoning_is_switched_off(url: str, scripted: ScriptedEngine, body: dict[str, Any]) -> None:
    scripted.script = "Fine."
    response = ask(url, **body)
    assert response.status_code == 200, response.text
    assert scripted.prompt.endswith(f"<assistant>{OFF}")
    assert response.json()["choices"][0]["message"]["content"] == "Fine."


@pytest.mark.parametrize("body", ENABLED, ids=json.dumps)
def test_reasoning_is_left_on(url: str, scripted: ScriptedEngine, body: dict[str, Any]) -> None:
    scripted.script = "<think>T</think>Fine."
    response = ask(url, **body)
    assert response.status_code == 200 and "draftwing-ignored" not in response.headers, response.text
    assert scripted.prompt.endswith("<assistant>")
    assert response.json()["choices"][0]["message"]["reasoning_content"] == "T"


@pytest.mark.parametrize("body", [
    {"thinking": {"type": "enabled", "budget_tokens": 7}}, {"enable_thinking": True, "thinking_budget": 7},
    {"reasoning": {"max_tokens": 7}},
], ids=json.dumps)  # fmt: skip
def test_budgets(url: str, scripted: ScriptedEngine, body: dict[str, Any]) -> None:
    assert ask(url, **body).status_code == 200
    thinking = scripted.requests[-1].thinking
    assert thinking is not None and thinking.tokens == 7


@pytest.mark.parametrize(("body", "param"), [
    ({"enable_thinking": "no"}, "enable_thinking"), ({"thinking": {"type": "off"}}, "thinking.type"),
    ({"thinking": {}}, "thinking.type"), ({"thinking": {"type": "enabled", "budget": 1}}, "thinking.budget"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
], ids=json.dumps)  # fmt: skip
def test_wrong_values_are_refused_by_name(url: str, body: dict[str, Any], param: str) -> None:
    response = ask(url, **body)
    assert response.status_code == 400 and response.json()["param"] == param, response.text


@pytest.mark.parametrize("body", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}], ids=json.dumps)
def test_reasoning_can_be_left_out(url: str, scripted: ScriptedEngine, body: dict[str, Any]) -> None:
    scripted.script = "<think>T</think>Fine."
    whole = ask(url, **body).json()
    assert whole["choices"][0]["message"]["content"] == "Fine." and whole["usage"]["reasoning_tokens"] > 0
    assert whole["choices"][0]["message"]["reasoning_content"] is None
    deltas = [chunk["choices"][0]["delta"] for chunk in events(ask(url, **body, stream=True).text)]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Fine."
    assert not any(delta.get("reasoning_content") for delta in deltas)


def test_what_computes_has_one_name(url: str) -> None:
    bodies = [ask(url).json(), *events(ask(url, stream=True).text)]
    bodies.append(httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).json())
    (name,) = {body["system_fingerprint"] for body in bodies}
    assert name.startswith("fp_")
