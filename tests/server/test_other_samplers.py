"""Samplers of other servers: values that ask for nothing are taken in every dialect, others refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

HI = [{"role": "user", "content": "a"}]
PLACES: list[tuple[str, dict[str, Any], str]] = [  # path, body, field that samplers are in
    ("/v1/chat/completions", {"messages": HI}, ""),
    ("/v1/completions", {"prompt": "a"}, ""),
    ("/v1/responses", {"input": "a"}, ""),
    ("/v1/messages", {"model": "m", "max_tokens": 5, "messages": HI}, ""),
    ("/generate", {"text": "a"}, "sampling_params"),
    ("/api/chat", {"model": "m", "stream": False, "messages": HI}, "options"),
]
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


def ask(client: TestClient, place: tuple[str, dict[str, Any], str], given: dict[str, Any]) -> Any:
    path, body, inside = place
    return client.post(path, json=body | ({inside: given} if inside else given))


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[0])
def test_what_asks_for_nothing_is_taken(client: TestClient, place: Any) -> None:
    every = {name: value for one in NEUTRAL for name, value in one.items()}
    for given in (every, NEUTRAL[-1]):
        response = ask(client, place, given)
        assert response.status_code == 200, response.text
    if place[2] != "sampling_params":  # where hints have no names but one
        response = ask(client, place, {"mirostat_eta": 2})  # which a sampler needs: named, but no fault
        assert response.headers["draftwing-ignored"] == f"{place[2]}.mirostat_eta".strip("."), response.text


def test_other_values_are_refused_with_what_there_is(client: TestClient) -> None:
    """Each by two of the dialects, in turn."""
    for i, (name, value, instead) in enumerate(OTHERS):
        for place in (PLACES[i % 6], PLACES[(i + 3) % 6]):
            response = ask(client, place, {name: value})
            assert response.status_code == 400, response.text
            assert f"{place[2]}.{name}".strip(".") in response.text and instead in response.text


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[0])
def test_repetitions_are_penalised_in_every_dialect(client: TestClient, engine: Any, place: Any) -> None:
    """As in llama.cpp, whose windows and breakers ask for nothing here."""
    given = {"dry_multiplier": 0.8, "dry_base": 2, "dry_allowed_length": 3, "dry_sequence_breakers": ["\n"]}
    response = ask(client, place, given)
    assert response.status_code == 200, response.text
    params = engine.requests[-1].params
    assert (params.dry_multiplier, params.dry_base, params.dry_allowed_length) == (0.8, 2.0, 3)
    for name, value in (("dry_multiplier", -1), ("dry_base", 0.5), ("dry_allowed_length", 32)):
        response = ask(client, place, {name: value})
        assert response.status_code == 400 and name in response.text and " from " in response.text


def test_repeat_penalty_is_repetition_penalty(client: TestClient, engine: Any) -> None:
    for place in PLACES[:2]:
        assert ask(client, place, {"repeat_penalty": 1.25}).status_code == 200
        assert engine.requests[-1].params.repetition_penalty == 1.25
        assert "repeat_penalty" in ask(client, place, {"repeat_penalty": -1}).json()["error"]["message"]
