"""pull and bench: against a live server, and in this process with a tiny model."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import write_checkpoint

from draftwing import LLM
from draftwing.cli.answerers import Remote, Usage
from draftwing.cli.bench import PROMPTS, load_prompts
from draftwing.cli.client import Client, ServerError
from draftwing.cli.main import main
from draftwing.cli.sweep import Grid, flags, points
from draftwing.config.options import Options
from draftwing.engine.benchmark import Local, record_of, timed_run
from draftwing.errors import ConfigError


def test_bench_of_a_server(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('"abc"\n{"prompt": "de"}\n\n{"turns": ["f", "g"]}\n')
    argv = ["bench", "--url", url, "--api-key", "key", "--prompts", str(prompts), "--concurrency", "1,4"]
    assert main([*argv, "--num-prompts", "6", "--max-tokens", "5", "--output", str(output)]) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    rates = [float(line.split()[2]) for line in capsys.readouterr().out.splitlines() if "output tokens/s" in line]
    assert rates == pytest.approx([r["throughput"] for r in records], abs=0.06), "the table's"
    assert [r["concurrency"] for r in records] == [1, 4]
    for record in records:
        # Each question is rendered as "user:abc\n", and every answer is cut to five tokens.
        assert (record["requests"], record["completion_tokens"]) == (6, 30)
        assert record["prompt_tokens"] == 2 * (9 + 8 + 7)
        assert record["throughput"] == pytest.approx(30 / record["seconds"], rel=0.01)
        assert 0 < record["ttft_ms"]["p50"] <= record["ttft_ms"]["p99"] and record["accept_length"] == 1.0
        assert record["latency_ms"]["mean"] >= record["ttft_ms"]["mean"]


@pytest.mark.slow
def test_bench_in_process(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "--model", model, "--speculative-algorithm", "NGRAM", "--max-total-tokens", "4000"]
    argv += ["--num-prompts", "3", "--max-tokens", "20", "--ignore-eos", "--concurrency", "2", "--json"]
    assert main(argv) == 0
    (record,) = map(json.loads, capsys.readouterr().out.splitlines())
    plain = record["without_drafts"]
    assert record["rounds"] == 2 and record["drafter"] == "NGRAM"
    for one in (record, plain):
        assert (one["requests"], one["completion_tokens"]) == (6, 120)
    assert record["accept_length"] >= plain["accept_length"] == 1.0 and plain["accept_rate"] == 0
    assert record["speedup"] == pytest.approx(record["throughput"] / plain["throughput"], rel=1e-3)
    assert set(record["step_ms"]) == {"draft", "verify", "commit", "host"}
    assert all(value > 0 for value in record["step_ms"].values())


def test_the_floor_of_a_step(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(model, max_total_tokens=2000, max_running_requests=4) as llm:
        monkeypatch.setattr(llm.engine.parts.executor.device, "read_rate", lambda: 1e6)
        params = {"max_new_tokens": 30, "ignore_eos": True}
        record = record_of(target := Local(llm.engine), 1, *timed_run(target, [[1, 2, 3]], params, 1))
    assert record["floor_ms"] == pytest.approx(sum(record["weight_bytes"].values()) / 1e3)
    step = record["tbt_ms"]["p50"] * record["accept_length"]
    assert record["share_of_floor"] == pytest.approx(record["floor_ms"] / step)


@pytest.mark.slow
def test_stages_that_are_replayed_are_timed(tmp_path: Path) -> None:
    """On a CPU, stages are recorded and then replayed, without a call of what they are made of."""
    target = write_checkpoint(tmp_path / "target", 0, 4, hidden=128, heads=4, size=32, vocab=320)
    head = tmp_path / "head"
    head.mkdir()
    config = json.loads((target / "config.json").read_text()) | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "draft_vocab_size": 256, "tie_word_embeddings": False,
    }  # fmt: skip
    (head / "config.json").write_text(json.dumps(config))
    options = dict(
        speculative_algorithm="EAGLE3", speculative_draft_model_path=str(head), speculative_num_steps=3,
        speculative_eagle_topk=1, speculative_num_draft_tokens=4, load_format="dummy", dtype="bfloat16",
        speculative_fixed_shape=True,
    )  # fmt: skip
    with LLM(str(target), max_total_tokens=2000, max_running_requests=1, **options) as llm:
        bench, params = Local(llm.engine), {"max_new_tokens": 100, "ignore_eos": True, "temperature": 0}
        timed_run(bench, [[1, 2, 3]], params, 1)
        replays = llm.engine.stats()["graph_replays"]
        if not replays:
            pytest.skip("this CPU has no kernels for few rows, and nothing is recorded")
        stages = record_of(bench, 1, *timed_run(bench, [[4, 5, 6]], params, 1))["step_ms"]
        assert llm.engine.stats()["graph_replays"] > replays + 50
    # Two forwards of a layer and three of lm_head, against four layers and lm_head: some 25 % of the stages.
    assert 0.02 < stages["draft"] / (stages["draft"] + stages["verify"] + stages["commit"]) < 0.9


@pytest.mark.slow
def test_sweep(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "--sweep", "--model", model, "--speculative-algorithm", "NGRAM", "--max-total-tokens", "4000",
            "--concurrency", "1,2", "--steps", "2", "--topk", "1,2", "--draft-tokens", "3,4",
            "--num-prompts", "2", "--max-tokens", "8", "--json"]  # fmt: skip
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]
    best_one, best_two, *chosen = lines[len(records) :]
    assert [r.pop("fixed") for r in records[-4:]] == [True, True, False, False]
    shapes = [(r["batch_size"], r["steps"], r["topk"], r["num_draft_tokens"]) for r in records]
    fixed = [(0, 1, 1), (2, 1, 3), (2, 2, 3), (2, 2, 4)]
    assert [(r["point"], r["points"]) for r in records] == [(i + 1, len(records)) for i in range(len(records))]
    assert shapes == [(batch, *shape) for shape in (*fixed, (11, 10, 12)) for batch in (1, 2)]
    records = records[:-2]
    assert best_one.startswith("best for 1 request at once: ") and best_two.startswith("best for 2 requests")
    fastest = max((r for r in records if r["batch_size"] == 2), key=lambda r: r["throughput"])
    assert ("--speculative-algorithm none" in best_two) == (fastest["steps"] == 0)
    starts = [i for i, line in enumerate(chosen) if line.startswith("chosen by the engine at ")]
    assert len(starts) == 2 and "of the best fixed throughput" in chosen[0]
    table = chosen[starts[1] + 2 :]
    assert "ms a step" in table[0] and len([line for line in table[1:] if line.startswith("  > ")]) == 1
    assert table[-1].split()[:2] in (["no", "drafts"], [">", "no"]) and table[-1].split()[-1] != "-"


def test_points_leave_out_what_cannot_be() -> None:
    options = {"model": "x", "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "d"}
    grid = Grid(steps=[1, 3], topk=[1, 2], draft_tokens=[2, 4, 12], batch=[1])
    first, *rest = points(options, grid)
    assert first.speculative_algorithm == "none"
    # (1, 2): nodes 2 to 3. (3, 2): 4 to 11.
    assert [point.speculative_shape.tree for point in rest] == [(1, 1, 2), (1, 2, 2), (3, 1, 4), (3, 2, 4)]
    assert flags(rest[-1]) == (
        "--speculative-algorithm STANDALONE --speculative-draft-model-path d --speculative-num-steps 3 "
        "--speculative-eagle-topk 2 --speculative-num-draft-tokens 4"
    )
    more = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": "my head",
        "speculative_token_map": "freq.pt",  # EAGLE-3 does not read it
        "speculative_aux_layer_ids": "output",
    }
    first, rest_of_all = itertools.islice(points(options | more, Grid([3], [2], [4], [1])), 2)
    # nothing of speculation is left
    assert first == Options(model="x", random_seed=first.random_seed, speculative_algorithm="none")
    assert flags(first) == "--speculative-algorithm none"
    assert flags(rest_of_all) == (
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path 'my head' "
        "--speculative-aux-layer-ids output --speculative-num-steps 3 --speculative-eagle-topk 2 "
        "--speculative-num-draft-tokens 4"
    )
    with pytest.raises(ConfigError, match="needs --speculative-algorithm"):
        list(points({"model": "x"}, grid))


@contextlib.contextmanager
def answering(body: bytes | Callable[[str], bytes]) -> Iterator[tuple[str, list[tuple[str, str, Any]]]]:
    """The address of a server that answers all requests with this body, or what is made of the method; and what it was
    asked: method, path, body."""
    heard: list[tuple[str, str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.rfile.read(int(self.headers.get("content-length", 0)))
            heard.append((self.command, self.path, json.loads(asked) if asked else None))
            content = body if isinstance(body, bytes) else body(self.command)
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *words: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", heard
        finally:
            server.shutdown()
            thread.join()


def test_client_errors(url: str) -> None:
    with pytest.raises(ServerError, match="API key"):
        Client(url).get("/v1/models")
    client = Client(url.removeprefix("http://"), "key")
    assert client.get("/v1/models")["data"][0]["id"] == "echo"
    with pytest.raises(ServerError, match="temperature"):
        client.post("/v1/completions", {"prompt": "a", "temperature": -1})
    with pytest.raises(ServerError, match="text"):
        list(client.stream("/generate", {}))


NO_ANSWERS = [
    b"<html>Welcome</html>", b"", b"\xff\xfe", b"5", b"[]", b"{}", b'{"data": null}', b'{"data": []}', b'{"data": [5]}',
    b'{"data": {"id": "m"}}', b'{"tokens": [1], "data": [{"id": "m"}]}',
]  # fmt: skip


@pytest.mark.parametrize("body", NO_ANSWERS)
def test_another_program_at_the_address_is_told_in_a_sentence(
    body: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    monkeypatch.setattr(logging.getLogger("uvicorn"), "handlers", [])  # which the commands change
    with answering(body) as (url, _):
        for command in (
            ["chat", "hi", "--url", url],
            ["bench", "--url", url, "--num-prompts", "1", "--concurrency", "1"],
            ["traffic", "rm", "x", "--url", url],
        ):
            assert main(command) == 2, command
            error = capsys.readouterr().err
            assert error.startswith("draftwing: error: ") and error.count("\n") == 1, error


MODELS = b"""{"context_length": 7, "data": [{"id": "a b", "aliases": null}, {}, 5, {"id": "c/d", "aliases": ["e"]}]}

data: {"choices": []}

data: [DONE]
"""


@pytest.mark.parametrize(("model", "asked"), [(None, "a b"), ("c/d", "c/d"), ("e", "e")])
def test_one_of_several_models_may_be_named(model: str | None, asked: str) -> None:
    with answering(lambda method: MODELS.split(b"\n\n", 1)[method == "POST"]) as (url, heard):
        remote = Remote(Client(url), model)
        assert remote.info["served_model_name"] == asked and remote.info["context_length"] == 7
        assert list(remote.answer([{"role": "user", "content": "hi"}], {}, Usage())) == []
        for wrong in ("f", "A b"):
            with pytest.raises(ServerError, match=f"no model '{wrong}'; it has a b, c/d, e"):
                Remote(Client(url), wrong)
    paths = [(method, path) for method, path, _ in heard]
    quoted = {"a b": "a%20b", "c/d": "c%2Fd", "e": "e"}[asked]
    assert paths[:3] == [
        ("GET", "/v1/models"), ("GET", f"/server_info?model={quoted}"), ("POST", "/v1/chat/completions")
    ]  # fmt: skip
    assert heard[2][2]["model"] == asked


def test_prompts_are_repeated_to_the_number_that_is_asked_for(tmp_path: Path) -> None:
    assert load_prompts(None, 10) == [*PROMPTS, *PROMPTS[:2]]
    file = tmp_path / "p"
    file.write_text('"one"\n{"prompt": "two"}\n', "utf-8-sig")
    assert load_prompts(str(file), 3) == ["one", "two", "one"]
    for bad in ("", "{", "5", '{"turns": []}'):
        file.write_text(bad)
        with pytest.raises(ConfigError, match="--prompts"):
            load_prompts(str(file), 1)
