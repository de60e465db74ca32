"""The scripts in examples/, run on a small random checkpoint; custom_drafter.py: tests/spec/test_own_drafter.py."""

from __future__ import annotations

import builtins
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from fake_engine import FakeEngine
from scripted import serving
from tiny_checkpoint import write_checkpoint

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(autouse=True)
def small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of its own takes what memory is free."""
    monkeypatch.setattr("draftwing.engine.device._free_host_memory", lambda: 64 << 20)


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_offline_generation(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    offline = example("offline_generation")
    offline.main(model)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" -> ")[0] for line in lines] == [repr(prompt) for prompt in offline.PROMPTS]


def test_structured_output(smollm2_path: Path) -> None:
    """With the default model: a random one writes escapes and spaces until it is cut."""
    found = example("structured_output").main()
    assert [country["name"] for country in found] == ["Japan", "Kenya", "Peru"]
    assert all(set(country) == {"name", "continent", "islands"} for country in found)


def test_compare_speculation(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert example("compare_speculation").main(model)
    assert "tokens per second" in capsys.readouterr().out


def test_streaming_chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    questions = iter(["Hello?", "And then?", ""])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(questions))
    with serving(FakeEngine()) as url:
        example("streaming_chat").main(url)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "chatting with echo" and "user:Hello?" in out and "user:And then?" in out


def test_they_are_short() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert len(files) == 5
    for file in files:
        assert len(file.read_text(encoding="utf8").splitlines()) < 60, file
