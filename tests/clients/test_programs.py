"""tools/clients, without any of the programs: the page tells what the record has, and the checks find what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
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
