"""tools/clients, without any of the programs: the page tells what the record has, and the checks find what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from scripted import wait_until

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "clients"
MODULES = ("page", "programs", "run", "scene", "terminal")


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


@pytest.mark.exhaustive
@pytest.mark.slow
def test_it_finds_its_modules_outside_of_a_test_run() -> None:
    """pytest's own path has folders that `python tools/clients/run.py` has not."""
    done = subprocess.run([sys.executable, "-c", "import scene"], cwd=TOOL, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


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


def test_a_picture_that_does_not_arrive_is_found(tool: dict[str, ModuleType]) -> None:
    viewer, shown = tool["scene"].Viewer(), SimpleNamespace(digest=b"", pixels=np.zeros((48, 64, 3), np.uint8))
    assert "shown: 0" in viewer.faults()[0]
    viewer.requests.append(SimpleNamespace(images=(shown,)))
    assert "another picture" in viewer.faults()[0]


def test_a_picture_that_is_not_pasted_is_found(tool: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    run, viewer = tool["run"], tool["scene"].Viewer()
    programs, _ = tool["programs"].load()
    monkeypatch.setattr(run.time, "sleep", lambda seconds: None)
    for name in "LOOP_SECONDS", "KEY_SECONDS":
        monkeypatch.setattr(run, name, 0)
    show, shown = SimpleNamespace(text=""), SimpleNamespace(press=lambda key: None, type=lambda text: None)
    shown.screen = lambda: show.text

    def wrong() -> list[str]:
        return run.pasted(programs["claude-code"], viewer, shown)

    assert wrong() == ["it shows no prompt"]
    show.text = "❯ "
    assert wrong() == ["it took no picture from the clipboard"]
    show.text += f"[Image #1] {viewer.answer}"
    assert wrong() == ["turn 2: it does not show the answer"]
    show.text += viewer.answer
    assert wrong()[-1] == "the second turn was without the picture"
    pixels = np.asarray(tool["scene"].Image.open(tool["scene"].io.BytesIO(tool["scene"].PICTURE)))
    viewer.requests += [SimpleNamespace(images=(SimpleNamespace(digest=b"", pixels=pixels),))] * 2
    assert wrong() == []


def test_a_terminal_shows_what_is_typed_and_has_a_clipboard(tool: dict[str, ModuleType], tmp_path: Path) -> None:
    terminal = tool["terminal"]
    if lacks := terminal.missing():
        pytest.skip(f"not installed: {', '.join(lacks)}")
    script = "read line; echo =$line=; xclip -o -selection clipboard -t image/png; sleep 60"
    with terminal.clipboard(b"a picture") as display:
        environ = {**os.environ, "TMUX_TMPDIR": str(tmp_path), "DISPLAY": display}
        subprocess.run(terminal.inside(["sh", "-c", script]), env=environ, check=True)
        shown = terminal.Terminal(tmp_path)
        try:
            shown.type("some words")
            shown.press("Enter")
            wait_until(lambda: "=some words=" in shown.screen() and "a picture" in shown.screen())
        finally:
            subprocess.run(["tmux", "kill-server"], env=environ, check=False)
