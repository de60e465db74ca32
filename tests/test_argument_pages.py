"""The tables of options in docs/ are what tools/argument_pages.py makes of the code."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import script

ROOT = Path(__file__).parent.parent
made = script(ROOT / "tools" / "argument_pages.py")


@pytest.mark.parametrize("name", made.PAGES)
def test_the_page_is_current(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf8")
    assert "made by tools/argument_pages.py" in page
    assert made.written(page) == page, "an option changed: run python tools/argument_pages.py"


def test_a_default_in_the_help_is_in_its_column() -> None:
    meta = {"help": "a | b (default: 2 (two), or --port) and so on", "aliases": ("other",), "choices": ("x",)}
    assert made.row("num_threads", None, meta) == (
        "| `--num-threads`, `--other` | 2 (two), or `--port` | a \\| b and so on. One of `x` |"
    )
