"""tools/clients, without any of the programs: the page tells what the record has, and the checks find what is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "clients"
MODULES = ("page", "programs", "run", "scene")


@pytest.fixture(scope="module")
def tool() -> Iterator[dict[str, ModuleType]]:
    """Its modules, whose names are too common to stay importable."""
    sys.path.insert(0, str(TOOL))
    try:
        yield {name: __import__(name) for name in MODULES}
    finally:
        sys.path.remove(str(TOOL))
        for name in MODULES:
            sys.modules.pop(name, None)


def test_page_and_record_agree(tool: dict[str, ModuleType]) -> None:
    page, (programs, _) = tool["page"], tool["programs"].load()
    text = page.PAGE.read_text()
    assert page.written(text, programs, json.loads(page.RECORD.read_text())) == text


def test_every_program_has_what_it_needs(tool: dict[str, ModuleType]) -> None:
    programs, _ = tool["programs"].load()
    for program in programs.values():
        assert bool(program.command) != bool(program.script) and bool(program.npm) != bool(program.pypi)
        assert all(tool["programs"].split(package)[1][0].isdigit() for package in program.packages), program.name
        assert len(tool["run"].script_of(program)) == 2


@pytest.mark.parametrize(
    ("package", "parts"),
    [
        ("openai@6.49.0", ("openai", "6.49.0")),
        ("@ai-sdk/openai@3.0.141", ("@ai-sdk/openai", "3.0.141")),
        ("pydantic-ai-slim[openai,anthropic]==2.68.0", ("pydantic-ai-slim[openai,anthropic]", "2.68.0")),
    ],
)
def test_split(tool: dict[str, ModuleType], package: str, parts: tuple[str, str]) -> None:
    assert tool["programs"].split(package) == parts


LIBRARY = """
import json, os, sys, urllib.request
wrong, kind = {wrong!r}, sys.argv[1]
messages = [dict(role="user", content=os.environ["PROMPT"])]
tools = [dict(type="function", function=dict(name="read_file", parameters=dict(type="object")))]
for turn in range(3):
    body = dict(model="m", messages=messages, tools=tools, stream=wrong != "whole")
    if wrong == "refused":
        body["temperature"] = -1
    request = urllib.request.Request(os.environ["BASE_URL"] + "/v1/chat/completions", json.dumps(body).encode(),
        {{"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["API_KEY"]}})
    try:
        answer = urllib.request.urlopen(request)
    except OSError:
        sys.exit(0)
    if kind == "cancel" and wrong != "reads on":
        answer.read(3000)
        sys.exit(0)
    text = answer.read().decode()
    if wrong == "whole":
        content = json.loads(text)["choices"][0]["message"]["content"] or ""
    else:
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {{")]
        content = "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])
    if turn < 2:
        said = open(("one.txt", "two.txt")[turn]).read() if wrong != "forgets" else "nothing"
        call = dict(id="c%d" % turn, type="function", function=dict(name="read_file", arguments="{{}}"))
        messages += [dict(role="assistant", content=content, tool_calls=[call]),
                     dict(role="tool", tool_call_id=call["id"], content=said)]
    elif wrong != "silent":
        print(content)
"""


@pytest.mark.parametrize(
    ("wrong", "loop", "cancel"),
    [
        ("", "", ""),
        ("whole", "no answer was streamed", "no answer was streamed"),
        ("forgets", "turns of the loop: [0]", ""),
        ("silent", "it did not print the answer", ""),
        ("refused", "/v1/chat/completions: 400: temperature", "did not begin"),
        ("reads on", "", "the engine still writes"),
    ],
)
def test_checks(
    tool: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: str, loop: str, cancel: str
) -> None:
    """A library that does all that it should, and ones that do not, are told apart."""
    run = tool["run"]
    monkeypatch.setattr(run, "STOP_SECONDS", 1)
    monkeypatch.setattr(run, "HERE", tmp_path)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "library.py").write_text(LIBRARY.format(wrong=wrong))
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "bin").symlink_to(Path(sys.executable).parent)
    program: Any = tool["programs"].Program(
        "library", "A library", "chat", "library", pypi=["x==1"], script="library.py"
    )
    for kind, expected in (("loop", loop), ("cancel", cancel)):
        found, _, log = run.play(program, tmp_path, kind)
        assert any(expected in one for one in found) if expected else not found, (kind, found, log)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (None, "not run"),
        ({"wrong": {"install": "npm ERR"}}, "does not install here"),
        ({"wrong": {}}, "1.2.3: works (Node.js 24, 2026-11-25)"),
        ({"wrong": {}, "cut": True}, "1.2.3: works, its answer without end was cut off (Node.js 24, 2026-11-25)"),
        ({"wrong": {}, "useless": True}, "1.2.3: is answered; it cannot read it (Node.js 24, 2026-11-25)"),
        ({"wrong": {"loop": "exit\n1"}, "useless": True}, "1.2.3: **fails**: loop: exit 1 (Node.js 24, 2026-11-25)"),
    ],
)
def test_cells(tool: dict[str, ModuleType], told: dict[str, Any] | None, expected: str) -> None:
    """What did not run, or not well, is never told as what works."""
    program = tool["programs"].Program("library", "A library", "chat", "library", form="it cannot read it")
    run = {"date": "2026-11-25", "versions": {"x": "1.2.3"}, "node": "24.21.0"}
    assert tool["page"].cell(program, None if told is None else {**run, **told}) == expected
