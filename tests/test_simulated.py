"""Runs of which something is not real: they work from configs alone, and every output says what is not."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, local
from starlette.testclient import TestClient
from tiny_checkpoint import VOCAB, write_tokenizer

from draftwing import LLM, CheckpointError, ConfigError
from draftwing.config.options import Options
from draftwing.config.sources import with_sources
from draftwing.engine.benchmark import Local, record_of, timed_run
from draftwing.engine.devices.cpu import CpuDevice
from draftwing.engine.stats import Reporter
from draftwing.server.app import create_app

CPU_DEFAULTS = CpuDevice().defaults

pytestmark = pytest.mark.slow

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "eos_token_id": 256,
}  # fmt: skip
GREEDY = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
SMALL = {"load_format": "dummy", "num_threads": 1, "max_total_tokens": 2048, "max_running_requests": 4, "device": "cpu"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    write_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of an EAGLE-3 head, and in it that of a draft model."""
    folder, small = tmp_path_factory.mktemp("head"), {**MODEL, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps({**small, "draft_vocab_size": 100}))
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(small))
    return str(folder)


def drafting(algorithm: str, head: str, steps: int = 4, topk: int = 1, nodes: int = 5) -> dict[str, Any]:
    return {
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": f"{head}/model" if algorithm == "STANDALONE" else head,
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": nodes,
    }


@pytest.mark.parametrize("algorithm", ["none", "NGRAM", "STANDALONE", "EAGLE3"])
def test_configs_alone_are_enough(model: str, head: str, algorithm: str, caplog: pytest.LogCaptureFixture) -> None:
    own = {} if algorithm in ("none", "NGRAM") else drafting(algorithm, head)
    with (
        caplog.at_level(logging.WARNING),
        LLM(model, **{**SMALL, "speculative_algorithm": algorithm, **own}) as llm,
    ):
        one, two = llm.generate(["Hello", "Other"], GREEDY)
        assert len(one.token_ids) == len(two.token_ids) == 60
        assert one.meta_info["simulated"] == two.meta_info["simulated"] == ["random weights"]
        record = record_of(target := Local(llm.engine), 1, *timed_run(target, [[1, 2, 3]], GREEDY, 1))
    assert record["simulated"] == ["random weights"]
    assert "SIMULATED: random weights" in caplog.text


def test_a_tokenizer_from_elsewhere(model: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    with pytest.raises(CheckpointError, match="--tokenizer-path"):
        LLM(str(tmp_path), **SMALL)
    with LLM(str(tmp_path), tokenizer_path=model, **SMALL) as llm:
        assert llm.generate("Hello", GREEDY)[0].token_ids


@pytest.mark.further(length=1)
@pytest.mark.further(algorithm="STANDALONE", length=5)
@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE3"])
@pytest.mark.parametrize("length", [1, 2.5, 5])
def test_simulated_accept_length(model: str, head: str, algorithm: str, length: float) -> None:
    fixed = {"simulate_accept_length": length, "speculative_fixed_shape": True}
    with LLM(model, **SMALL, **drafting(algorithm, head), **fixed) as llm:
        # Some 60 steps of each, whatever the length.
        answers = llm.generate(["Hello", "Other", "Third"], {**GREEDY, "max_new_tokens": int(60 * length)})
        llm.engine.parts.sched.kv.check_idle()
    metas = [answer.meta_info for answer in answers]
    assert all(meta["simulated"] == ["random weights", f"acceptance length {length:g}"] for meta in metas)
    steps = sum(meta["spec_verify_ct"] for meta in metas)
    found = 1 + sum(meta["spec_num_correct_drafts"] for meta in metas) / steps
    deviation = math.sqrt((length - 1) * (5 - length))  # at most: all drafts are accepted, or none
    assert abs(found - length) <= 0.05 + 3 * deviation / math.sqrt(steps)  # the last step of an answer may be cut


def test_every_response_says_so() -> None:
    engine = FakeEngine(Options(random_seed=1, load_format="dummy"))
    expected = ["random weights"]
    with TestClient(create_app(local(engine), engine.tokenizer)) as client:
        info = client.get("/server_info").json()
        assert info["simulated"] == expected and info["load_format"] == "dummy"
        assert client.get("/model_info").json()["load_format"] == "dummy"
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
        text: dict[str, Any] = {"prompt": "abc", "max_tokens": 3}
        for path, body in (("/v1/chat/completions", chat), ("/v1/completions", text)):
            assert client.post(path, json=body).json()["simulated"] == expected
            lines = client.post(path, json=body | {"stream": True}).text.splitlines()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert events and all(event["simulated"] == expected for event in events)
        prompt: dict[str, Any] = {"text": "abc", "sampling_params": {"max_new_tokens": 3}}
        assert client.post("/generate", json=prompt).json()["meta_info"]["simulated"] == expected
        lines = client.post("/generate", json=prompt | {"stream": True}).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert events and all(event["meta_info"]["simulated"] == expected for event in events)


def test_real_runs_say_nothing() -> None:
    engine = FakeEngine()
    with TestClient(create_app(local(engine), engine.tokenizer)) as client:
        assert "simulated" not in client.get("/server_info").json()
        body = {"prompt": "abc", "max_tokens": 3}
        assert "simulated" not in client.post("/v1/completions", json=body).json()


def test_the_log_lines_say_so(model: str, head: str, caplog: pytest.LogCaptureFixture) -> None:
    options = {**SMALL, **drafting("EAGLE3", head), "simulate_accept_length": 3}
    with caplog.at_level(logging.INFO, logger="draftwing"), LLM(model, **options) as llm:
        assert isinstance(llm.engine.reporter, Reporter)
        llm.generate("Hello", {**GREEDY, "max_new_tokens": 200})
    lines = [record.getMessage() for record in caplog.records if "tokens/s" in record.getMessage()]
    assert lines and all("(SIMULATED: random weights, acceptance length 3)" in line for line in lines)


def test_options_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="simulate_accept_length needs a speculative_algorithm"):
        Options(speculative_algorithm="none", simulate_accept_length=2.0).resolve()
    chain = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "x", "speculative_num_steps": 3}
    with pytest.raises(ConfigError, match=r"at most speculative_num_steps \+ 1, which is 4; found 4\.5"):
        Options(**chain, simulate_accept_length=4.5).resolve()
    assert Options(**chain, simulate_accept_length=4.0).resolve().label == {"simulated": ["acceptance length 4"]}
    eagle = Options(speculative_algorithm="EAGLE", simulate_accept_length=5.0).resolve()
    with pytest.raises(ConfigError, match="which is 4; found 5"):
        eagle.for_engine(CPU_DEFAULTS, "Qwen2ForCausalLM")
    assert eagle.for_engine(CPU_DEFAULTS, "LlamaForCausalLM").speculative_num_steps == 5
    with pytest.raises(ConfigError, match="simulate_accept_length"):
        Options(**chain, simulate_accept_length=0.5).resolve()
    with pytest.raises(ConfigError, match="load_format"):
        Options(load_format="pt").resolve()
    assert Options().resolve().label == {}


def test_the_environment_variable(caplog: pytest.LogCaptureFixture) -> None:
    name = "SGLANG_SIMULATE_ACC_LEN"
    with caplog.at_level(logging.WARNING):
        assert with_sources({}, {name: "3.5"})["simulate_accept_length"] == 3.5
    assert "read as --simulate-accept-length 3.5" in caplog.text
    assert not with_sources({}, {name: "-1"})
    assert with_sources({"simulate_accept_length": 2.0}, {name: "3"})["simulate_accept_length"] == 2.0
    with pytest.raises(ConfigError, match="expected a number, found 'many'"):
        with_sources({}, {name: "many"})
