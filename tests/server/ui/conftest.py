"""A browser, a page that makes no error, and a server around a stand-in engine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from browsing import PAUSE, WIDE, BusyEngine, Open
from fake_engine import FakeEngine
from scripted import serving

from draftwing.config.options import Options


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install draftwing[browser]"
    )
    names = ("chromium", "chromium-browser", "google-chrome")
    system = next(filter(None, map(shutil.which, names)), None)
    with playwright.sync_playwright() as player:
        if system is None and not Path(player.chromium.executable_path).exists():
            pytest.skip("Chromium is not installed: apt install chromium, or playwright install chromium")
        # Without a sandbox of its own, which containers do not allow: it sees this test's server alone.
        browser = player.chromium.launch(executable_path=system, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens a page; at the end there must have been no error in it, and no request to anybody else."""
    problems: list[str] = []

    def opened(url: str, size: Any = WIDE, ready: str = ".welcome", expected: str = "", **how: Any) -> Any:
        """expected: a piece of the console errors that are right."""
        page = stack.enter_context(browser.new_context(viewport=size, **how)).new_page()
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("request", lambda one: None if one.url.startswith(url) else problems.append(f"asked for {one.url}"))

        def heard(message: Any) -> None:
            if message.type in ("error", "warning") and not (expected and expected in message.text):
                problems.append(f"{message.type}: {message.text}")

        page.on("console", heard)
        page.goto(url)
        page.wait_for_selector(ready)
        return page

    with ExitStack() as stack:
        yield opened
    assert not problems


@pytest.fixture
def engine() -> FakeEngine:
    shape: dict[str, Any] = dict(
        speculative_algorithm="EAGLE3+NGRAM",
        speculative_draft_model_path="a head",
        speculative_num_steps=3,
        speculative_eagle_topk=2,
        speculative_num_draft_tokens=6,
    )
    return BusyEngine(Options(random_seed=7, **shape), pause=PAUSE)


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    with serving(engine) as url:
        yield url
