"""heads and traffic: what is in the folder of --learn, shown and deleted."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from cli.test_models import refused, run
from fake_engine import FakeEngine
from scripted import serving

from draftwing.config.options import Options
from draftwing.engine.lookup_memory import LookupMemory
from draftwing.learn.history import HeadHistory
from draftwing.learn.traffic import Exchange, TrafficStore


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
        ("alice", 2, 10),
        ("anonymous", 1, 5),
    ]
    assert run(capsys, "traffic", "ls", *options).splitlines()[1].split()[:3] == ["alice", "2", "10"]
    said = run(capsys, "traffic", "rm", "alice", *options, "--speculative-memory", str(file))
    assert said.startswith("deleted 2 exchanges and 1 answers") and "heads 1 " in said
    run(capsys, "traffic", "rm", "anonymous", "--speculative-memory", str(file))
    assert LookupMemory(file, "v").answers() == []
    assert [one.client for one in TrafficStore(learnt).read()] == ["anonymous"]
    run(capsys, "traffic", "rm", "anonymous", *options)
    assert "nothing" in run(capsys, "traffic", "list", *options)
    assert "alice" in run(capsys, "heads", "list", *options)


def test_a_running_server_deletes(learnt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(Options(random_seed=7, learn=str(learnt), api_key="all", admin_api_key="boss"))
    with serving(engine) as url:
        assert "another process" in refused(capsys, "traffic", "rm", "alice", "--learn", str(learnt))
        assert "operators" in refused(capsys, "traffic", "rm", "alice", "--url", url, "--api-key", "all")
        said = run(capsys, "traffic", "rm", "alice", "--url", url, "--api-key", "boss")
        assert said.startswith("deleted 2 exchanges and 2 answers") and engine.forgotten == ["alice"]
    assert "--url" in refused(capsys, "traffic", "rm", "alice")
