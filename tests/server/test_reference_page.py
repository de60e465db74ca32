"""Responses have the fields of those that are printed on SGLang's page on speculative decoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from fake_engine import CONTEXT, FakeEngine
from starlette.testclient import TestClient

MODEL_INFO = {
    "model_path", "served_model_name", "tokenizer_path", "is_generation", "preferred_sampling_params",
    "weight_version", "load_format", "reasoning_parser", "tool_call_parser", "disaggregation_mode",
    "has_image_understanding", "has_audio_understanding", "model_type", "architectures",
}  # fmt: skip


def test_model_info_by_both_names(client: TestClient) -> None:
    info = client.get("/model_info").json()
    assert set(info) == MODEL_INFO and info == client.get("/get_model_info").json()
    assert info["served_model_name"] == "echo"
    assert (info["model_type"], info["architectures"]) == ("llama", ["LlamaForCausalLM"])


def test_server_info_by_both_names(client: TestClient, engine: FakeEngine) -> None:
    info = client.get("/server_info").json()
    assert info.keys() == client.get("/get_server_info").json().keys()
    wanted = {"launch_command", "max_total_num_tokens", "startup_time", "internal_states", "version", "dtype",
              "speculative_algorithm", "speculative_num_steps", "mem_fraction_static", "random_seed"}  # fmt: skip
    assert wanted <= info.keys() and info["random_seed"] == 7 and info["dtype"] == "float32"
    assert info["port"] == 30000 and info["weight_bytes"] == {"Q8_0": 34}
    assert info["context_length"] == CONTEXT and info["max_total_num_tokens"] == 4 * CONTEXT
    assert info["floor"] == {"memory_gb_s": 17e-6, "read_ms": 2.0, "plain_step_ms": 8.0, "share": 0.25}
    (state,) = info["internal_states"]
    assert info["speculative"]["explain"]["summary"] == "nothing is drafted"
    assert state["avg_spec_accept_length"] == 1.5 and state["memory_usage"]["token_capacity"] == 4 * CONTEXT


def test_tokenize_and_back(client: TestClient) -> None:
    for prefix in ("", "/v1"):
        one = client.post(f"{prefix}/tokenize", json={"model": "m", "prompt": "héllo"}).json()
        assert set(one) == {"tokens", "count", "max_model_len", "token_strs"} and one["token_strs"] is None
        assert one["count"] == len(one["tokens"]) == 6
        assert client.post(f"{prefix}/detokenize", json={"tokens": one["tokens"]}).json()["text"] == "héllo"
        many = client.post(f"{prefix}/tokenize", json={"prompt": ["a", "bc", ""]}).json()
        assert many["count"] == [1, 2, 0]
        assert client.post(f"{prefix}/detokenize", json={"tokens": many["tokens"]}).json()["text"] == ["a", "bc", ""]
    ended = [*one["tokens"], 256]
    assert client.post("/detokenize", json={"tokens": ended}).json()["text"] == "héllo"
    shown = client.post("/detokenize", json={"tokens": ended, "skip_special_tokens": False})
    assert shown.json()["text"] == "héllo<eos>"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/detokenize", {"tokens": [257]}, "tokens"), ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [[1], 2]}, "tokens"), ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/tokenize", {"prompt": 3}, "prompt"), ("/tokenize", {"prompt": []}, "prompt"), ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ["a"] * 1025}, "prompt"), ("/tokenize", {"prompt": "a", "bogus": 1}, "bogus"),
    ],
)  # fmt: skip
def test_bad_tokenize_bodies(client: TestClient, path: str, body: Mapping[str, Any], field: str) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 400 and field in answer.json()["error"]["message"]


def test_flush_cache_waits_when_asked(client: TestClient) -> None:
    assert client.post("/flush_cache?timeout=1").text.startswith("Cache flushed")
    for bad in ("-1", "x", "nan"):
        answer = client.post(f"/flush_cache?timeout={bad}")
        assert answer.status_code == 400 and "timeout" in answer.json()["error"]["message"]
