"""Samplers of other servers: values that ask for nothing are taken in every dialect, others refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

HI = [{"role": "user", "content": "a"}]
PLACES: dict[str, tuple[str, dict[str, Any], str]] = {  # path, body, field that samplers are in
    "chat": ("/v1/chat/completions", {"messages": HI}, ""),
    "completions": ("/v1/completions", {"prompt": "a"}, ""),
    "responses": ("/v1/responses", {"input": "a"}, ""),
    "messages": ("/v1/messages", {"model": "m", "max_tokens": 5, "messages": HI}, ""),
    "generate": ("/generate", {"text": "a"}, "sampling_params"),
    "ollama": ("/api/chat", {"model": "m", "stream": False, "messages": HI}, "options"),
}
NEUTRAL = [
    {"typical_p": 1, "tfs_z": 1, "top_a": 0, "mirostat": 0, "dry_multiplier": 0, "xtc_probability": 0},  # llama.cpp
    {"dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "samplers": [], "n_probs": 0, "top_n_sigma": -1},
    {"xtc_threshold": 0.1, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1, "mirostat_tau": 5.0},
    {"tfs": 1, "typical": 1, "sampler_order": [], "smoothing_factor": 0},  # KoboldCpp
    {"do_sample": True, "no_repeat_ngram_size": 0, "guidance_scale": 1, "negative_prompt": "", "penalty_alpha": 0,
     "epsilon_cutoff": 0, "eta_cutoff": 0, "temperature_last": False, "dynamic_temperature": False,
     "sampler_priority": [], "encoder_repetition_penalty": 1, "mirostat_mode": 0, "ban_eos_token": False},  # its kin
    {"top_n_tokens": 0, "best_of": 1, "typical_p": None, "mirostat": None},  # TGI
]  # fmt: skip
OTHERS = [
    ("typical_p", 0.9, "top_p"), ("typical_p", True, "top_p"), ("tfs_z", 0.5, "min_p"), ("top_a", 0.2, "top_k"),
    ("mirostat", 2, "temperature"), ("mirostat", False, "temperature"), ("no_repeat_ngram_size", 3, "dry_multiplier"),
    ("xtc_probability", 0.5, "min_p"), ("dynatemp_range", 1, "temperature"), ("samplers", ["top_k"], "order"),
    ("do_sample", False, "temperature: 0"), ("n_probs", 3, "top_logprobs"), ("guidance_scale", 1.5, "leave it out"),
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("given", NEUTRAL, ids=lambda value: json.dumps(value)[:30])
def test_what_asks_for_nothing_is_taken(client: TestClient, place: str, given: dict[str, Any]) -> None:
    path, body, inside = PLACES[place]
    response = client.post(path, json=body | ({inside: given} if inside else given))
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("place", PLACES)
def test_what_a_sampler_needs_is_named_but_no_fault(client: TestClient, place: str) -> None:
    path, body, inside = PLACES[place]
    if inside == "sampling_params":
        return  # where hints have no names but one
    response = client.post(path, json=body | ({inside: {"mirostat_eta": 2}} if inside else {"mirostat_eta": 2}))
    name = f"{inside}.mirostat_eta" if inside else "mirostat_eta"
    assert response.headers["draftwing-ignored"] == name, response.text


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("name", "value", "instead"), OTHERS, ids=lambda value: json.dumps(value))
def test_other_values_are_refused_with_what_there_is(
    client: TestClient, place: str, name: str, value: Any, instead: str
) -> None:
    path, body, inside = PLACES[place]
    response = client.post(path, json=body | ({inside: {name: value}} if inside else {name: value}))
    assert response.status_code == 400, response.text
    message = json.dumps(response.json())
    assert (f"{inside}.{name}" if inside else name) in message and instead in message, message


@pytest.mark.parametrize("place", PLACES)
def test_repetitions_are_penalised_in_every_dialect(client: TestClient, engine: Any, place: str) -> None:
    """As in llama.cpp, whose windows and breakers ask for nothing here."""
    path, body, inside = PLACES[place]
    given = {"dry_multiplier": 0.8, "dry_base": 2, "dry_allowed_length": 3, "dry_sequence_breakers": ["\n"]}
    response = client.post(path, json=body | ({inside: given} if inside else given))
    assert response.status_code == 200, response.text
    params = engine.requests[-1].params
    assert (params.dry_multiplier, params.dry_base, params.dry_allowed_length) == (0.8, 2.0, 3)
    for name, value in (("dry_multiplier", -1), ("dry_base", 0.5), ("dry_allowed_length", 32)):
        response = client.post(path, json=body | ({inside: {name: value}} if inside else {name: value}))
        assert response.status_code == 400 and name in response.text and " from " in response.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_repeat_penalty_is_repetition_penalty(client: TestClient, engine: Any, path: str) -> None:
    body = {"messages": HI} if "chat" in path else {"prompt": "a"}
    assert client.post(path, json=body | {"repeat_penalty": 1.25}).status_code == 200
    assert engine.requests[-1].params.repetition_penalty == 1.25
    assert "repeat_penalty" in client.post(path, json=body | {"repeat_penalty": -1}).json()["error"]["message"]
