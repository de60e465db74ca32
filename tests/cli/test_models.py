"""pull, list, show and rm: with a hub on this machine, a tiny model in it, and empty caches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_hub
import pytest
import tiny_gguf
from fake_hub import REPO, FakeHub
from tiny_checkpoint import write_checkpoint

from draftwing.cli.main import main
from draftwing.config import aliases
from draftwing.config.aliases import DEFAULT_MODEL, HubModel
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
