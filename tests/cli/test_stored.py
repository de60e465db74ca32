"""pull, list, show and rm: with a hub on this machine, a tiny model in it, and empty caches; heads and traffic: what is
in the folder of --learn, shown and deleted."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_hub
import pytest
import tiny_gguf
from fake_engine import FakeEngine
from fake_hub import REPO, FakeHub
from scripted import serving
from tiny_checkpoint import write_checkpoint

from draftwing.cli.main import main
from draftwing.config import aliases
from draftwing.config.aliases import DEFAULT_MODEL, HubModel
from draftwing.config.options import Options
from draftwing.engine.lookup_memory import LookupMemory
from draftwing.kv.prefix_index import Entry, owner_of
from draftwing.kv.prefix_store import PrefixStore
from draftwing.learn.history import HeadHistory
from draftwing.learn.traffic import Exchange, TrafficStore
from draftwing.models.hub import default_model_file

HEAD = {"config.json": json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}).encode(), "model.safetensors": b"x"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "ours"))
    folder = tmp_path / "tiny"
    write_checkpoint(folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    with fake_hub.running(files) as server:
        fake_hub.connect(monkeypatch, server.url, tmp_path / "cache")
        yield server


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command that works prints."""
    capsys.readouterr()
    assert main(argv) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert main(argv) == 2
    return capsys.readouterr().err


@pytest.mark.slow
def test_a_model_from_pull_to_rm(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "draftwing pull org/tiny" in refused(capsys, "show", REPO)
    path = Path(run(capsys, "pull", REPO).strip())
    assert (path / "config.json").is_file() and path.is_relative_to(tmp_path / "cache")
    facts: dict[str, Any] = json.loads(run(capsys, "show", REPO, "--json"))
    assert facts["unserved"] is None and facts["architecture"] == "Qwen2ForCausalLM" and facts["drafter"] == "none"
    assert facts["sampling_defaults"] == {"temperature": 0.5} and facts["size"] > 10_000 and facts["parameters"] > 1000
    assert run(capsys, "show", REPO).startswith("model ")
    (listed,) = json.loads(run(capsys, "list", "--json"))
    assert listed["model"] == REPO and listed["context_length"] == facts["context_length"]
    assert REPO in run(capsys, "ls") and DEFAULT_MODEL in run(capsys, "ls")
    assert "deleted org/tiny" in run(capsys, "rm", REPO)
    assert not path.exists() and json.loads(run(capsys, "list", "--json")) == []
    assert "in no cache" in refused(capsys, "rm", REPO)


def test_an_alias_brings_its_head(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = {"eagle3": HubModel(REPO, fake_hub.COMMIT)}
    mine = aliases.Alias(HubModel(REPO), "1K", "MIT", heads=heads)
    monkeypatch.setitem(aliases.ALIASES, "mine", mine)  # type: ignore[arg-type]
    path = run(capsys, "pull", "mine").strip()
    facts = json.loads(run(capsys, "show", "mine", "--json"))
    assert facts["path"] == path and facts["licence"] == "MIT"
    assert (facts["drafter"], facts["draft_model"]) == ("EAGLE3", REPO)
    (listed,) = json.loads(run(capsys, "list", "--json"))
    assert listed["model"] == "mine"
    run(capsys, "rm", "mine")


def test_what_is_not_served_is_listed_with_the_reason(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.files = HEAD
    run(capsys, "pull", REPO)
    (listed,) = json.loads(run(capsys, "list", "--json"))
    assert listed["unserved"] == "a draft head" and "drafter" not in listed
    assert "a draft head" in run(capsys, "list") and "no: a draft head" in run(capsys, "show", REPO)


def test_files_of_ones_own(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tiny_gguf.write(tmp_path / "a.gguf", "llama")
    facts = json.loads(run(capsys, "show", str(file), "--json"))
    assert facts["format"] == "GGUF F32" and facts["context_length"] == 128
    for own in (file, tmp_path / "tiny"):
        assert "delete it yourself" in refused(capsys, "rm", str(own)) and own.exists()


def test_the_default_model_can_be_deleted(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    file = default_model_file()
    file.parent.mkdir(parents=True)
    tiny_gguf.write(file, "llama")
    assert [one["model"] for one in json.loads(run(capsys, "list", "--json"))] == [DEFAULT_MODEL]
    assert DEFAULT_MODEL in run(capsys, "rm", DEFAULT_MODEL) and not file.parent.exists()
    assert "in no cache" in refused(capsys, "rm", DEFAULT_MODEL)


def test_a_model_fetched_at_a_commit_is_shown_by_its_name(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "pull", REPO, "--revision", fake_hub.COMMIT)
    assert REPO in run(capsys, "list")
    assert REPO in run(capsys, "show", REPO)


@pytest.mark.slow
def test_quantisations_of_a_repository(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = tiny_gguf.write(tmp_path / "a.gguf", "llama").read_bytes()
    hub.files = {"m-Q8_0.gguf": content, "m-F16.gguf": content + b"x", "mmproj-F16.gguf": b"p"}
    first, second = (Path(run(capsys, "pull", name).strip()) for name in (REPO, f"{REPO}:F16"))
    assert (first.name, second.name) == ("m-Q8_0.gguf", "m-F16.gguf")
    listed = json.loads(run(capsys, "list", "--json"))
    assert [(one["model"], one["unserved"]) for one in listed] == [(f"{REPO}:F16", None), (f"{REPO}:Q8_0", None)]
    assert json.loads(run(capsys, "show", f"{REPO}:Q8_0", "--json"))["path"] == str(first)
    assert json.loads(run(capsys, "show", REPO, "--json"))["path"] == str(first)
    run(capsys, "rm", f"{REPO}:Q8_0")
    assert not first.exists() and second.exists()
    assert [one["model"] for one in json.loads(run(capsys, "list", "--json"))] == [f"{REPO}:F16"]
    run(capsys, "rm", REPO)
    assert json.loads(run(capsys, "list", "--json")) == []


@pytest.fixture
def learnt(tmp_path: Path) -> Path:
    """A folder with exchanges of two clients and two heads."""
    store = TrafficStore(tmp_path / "learnt")
    for i, client in enumerate(("alice", "alice", "")):
        store.add(Exchange(time.time(), client, None, [i], [i] * 5, 0.0))
    store.close()
    head = tmp_path / "head"
    head.mkdir()
    (head / "model.safetensors").write_bytes(b"weights")
    history = HeadHistory(tmp_path / "learnt" / "heads")
    history.add(head, {"algorithm": "EAGLE3", "data": {"clients": {"alice": 2, "anonymous": 1}}})
    history.add(head, {"algorithm": "EAGLE3", "parent": 1})
    return tmp_path / "learnt"


def test_heads_are_listed_chosen_and_deleted(learnt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--learn", str(learnt))
    run(capsys, "heads", "use", "2", *options)
    lines = [line.split() for line in run(capsys, "heads", "list", *options).splitlines()[1:]]
    assert [line[:3] for line in lines] == [["1", "-", "EAGLE3"], ["*", "2", "1"]] and lines[0][-1] == "3"
    listed = json.loads(run(capsys, "heads", "ls", "--json", *options))
    assert [(one["number"], one["served"]) for one in listed] == [(1, False), (2, True)]
    assert json.loads(run(capsys, "heads", "show", "2", "--json", *options)) == listed[1]
    assert listed[1]["sha256"] in run(capsys, "heads", "show", "2", *options)
    assert "served" in refused(capsys, "heads", "rm", "2", *options)
    assert "no head 3" in refused(capsys, "heads", "use", "3", *options)
    run(capsys, "heads", "use", "none", *options)
    assert HeadHistory(learnt / "heads").current() is None
    for number in "12":
        run(capsys, "heads", "rm", number, *options)
    assert "no heads" in run(capsys, "heads", "list", *options)
    assert "no folder" in refused(capsys, "heads", "list", "--learn", str(learnt / "other"))


def test_traffic_is_listed_and_deleted(learnt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, file = ("--learn", str(learnt)), tmp_path / "memory"
    memory = LookupMemory(file, "v")
    for client in ("alice", "", "anonymous"):  # a key's name
        memory.add(client, None, [1, 2, 3], 1)
    memory.close()
    listed = json.loads(run(capsys, "traffic", "list", "--json", *options))
    assert [(one["client"], one["exchanges"], one["tokens"]) for one in listed] == [
        ("alice", 2, 10), ("anonymous", 1, 5),
    ]  # fmt: skip
    assert run(capsys, "traffic", "ls", *options).splitlines()[1].split()[:3] == ["alice", "2", "10"]
    said = run(capsys, "traffic", "rm", "alice", *options, "--speculative-memory", str(file))
    assert said.startswith("deleted 2 exchanges and 1 answers") and "heads 1 " in said
    run(capsys, "traffic", "rm", "anonymous", "--speculative-memory", str(file))
    assert LookupMemory(file, "v").answers() == []
    assert [one.client for one in TrafficStore(learnt).read()] == ["anonymous"]
    run(capsys, "traffic", "rm", "anonymous", *options)
    assert "nothing" in run(capsys, "traffic", "list", *options)
    assert "alice" in run(capsys, "heads", "list", *options)


def test_cached_prefixes_are_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for client in ("alice", "", "bob"):
        store = PrefixStore(tmp_path, bytes(16), 10**6)
        store.write(Entry(client.encode().ljust(16), bytes(16), owner_of(client), 64), b"keys")
    assert run(capsys, "traffic", "rm", "alice", "--prefix-cache-dir", str(tmp_path)).startswith("deleted 1 blocks")
    run(capsys, "traffic", "rm", "anonymous", "--prefix-cache-dir", str(tmp_path))
    store = PrefixStore(tmp_path, bytes(16), 10**6)
    assert len(store) == 1 and b"bob".ljust(16) in store


def test_a_running_server_deletes(learnt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(Options(random_seed=7, learn=str(learnt), api_key="all", admin_api_key="boss"))
    with serving(engine) as url:
        assert "another process" in refused(capsys, "traffic", "rm", "alice", "--learn", str(learnt))
        assert "operators" in refused(capsys, "traffic", "rm", "alice", "--url", url, "--api-key", "all")
        said = run(capsys, "traffic", "rm", "alice", "--url", url, "--api-key", "boss")
        assert said.startswith("deleted 2 exchanges and 2 answers") and engine.forgotten == ["alice"]
    assert "--url" in refused(capsys, "traffic", "rm", "alice")
