"""A browser, a page that makes no error, a server around a stand-in engine, and Node.js for the scripts alone."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from browsing import PAUSE, WIDE, BusyEngine, Open, Run
from fake_engine import FakeEngine
from scripted import serving

import draftwing
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
def flawless() -> Callable[[Any], None]:
    """Asserts that axe's rules find nothing wrong with a page: names, contrasts, what the keyboard reaches."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")

    def check(page: Any) -> None:
        found = axe.Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing stands out to the side"

    return check


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


MAIN = """
import "./dom_stub.mjs";
import { readFileSync, writeFileSync } from "node:fs";
import { createInterface } from "node:readline";
globalThis.give = (value) => writeFileSync("out.json", JSON.stringify(value ?? null));
for await (const name of createInterface({ input: process.stdin })) {
  globalThis.data = JSON.parse(readFileSync("in.json", "utf8"));
  try {
    await import(`./${name}`);
    console.log("done");
  } catch (error) {
    console.log(JSON.stringify(error.stack));
  }
}
"""


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a script by Node.js with `data`, which may import the page's; returns what it hands to `give`. One process
    runs them all."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node.js is not installed")
    folder = tmp_path_factory.mktemp("scripts")
    shutil.copytree(Path(draftwing.__file__).parent / "server" / "ui" / "assets", folder, dirs_exist_ok=True)
    shutil.copy(Path(__file__).parent / "dom_stub.mjs", folder)
    (folder / "package.json").write_text('{"type": "module"}')

    (folder / "main.mjs").write_text(MAIN)
    process = subprocess.Popen([node, "main.mjs"], cwd=folder, stdin=-1, stdout=-1, stderr=-2, text=True)
    assert process.stdin is not None and process.stdout is not None
    count = itertools.count()

    def ran(script: str, data: Any) -> Any:
        one = folder / f"script{next(count)}.mjs"
        one.write_text(script, encoding="utf8")
        (folder / "in.json").write_text(json.dumps(data), encoding="utf8")
        print(one.name, file=process.stdin, flush=True)
        said = process.stdout.readline()
        assert said == "done\n", said
        return json.loads((folder / "out.json").read_text(encoding="utf8"))

    yield ran
    process.stdin.close()
    process.wait(30)
