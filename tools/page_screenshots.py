"""Takes the screenshots of docs/page.md: `python tools/page_screenshots.py`, with Chromium and draftwing[browser].

Starts a server with the default model, which drafts in each step, or looks at the one at --url, and asks it
questions. Writes page.png, page_narrow.png and page_engine.png.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftwing.utils import launch_server_cmd, terminate_process, wait_for_server

QUESTIONS = ("List 3 countries and their capitals.", "Write a Python function that adds two numbers.")
LONG_QUESTION = "Write a long story about a ship that crosses the ocean."
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
LIMIT = 180_000  # milliseconds that an answer may take


@contextmanager
def served(url: str | None) -> Iterator[str]:
    """The address of a server: of the one at `url`, or of a new one."""
    if url is not None:
        yield url
        return
    process, port = launch_server_cmd("python -m draftwing.launch_server --model smollm2 --speculative-fixed-shape")
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for_server(url, timeout=300, process=process)
        yield url
    finally:
        terminate_process(process)


def settle(page: Any) -> None:
    """Waits until the answer has ended and is drawn."""
    page.wait_for_selector("#send:not([data-stops])", timeout=LIMIT)
    page.wait_for_selector(".answer-foot:visible")
    page.wait_for_timeout(600)  # colours and the last tree


def ask(page: Any) -> None:
    """Asks the questions, with greedy decoding, and shows a tree of the last answer."""
    page.locator("#settings-toggle").click()
    page.locator("#set-temperature").fill("0")
    page.locator("#set-max_tokens").fill("160")
    page.locator("#settings-toggle").click()
    for question in QUESTIONS:
        page.fill("#question", question)
        page.keyboard.press("Enter")
        page.wait_for_selector("#send[data-stops]")
        settle(page)
    page.get_by_label("Step with the most accepted drafts").click()
    page.wait_for_timeout(600)


def take(browser: Any, url: str, out: Path) -> None:
    """Writes the three files."""
    for size, name in ((WIDE, "page.png"), (NARROW, "page_narrow.png")):
        page = browser.new_context(viewport=size, color_scheme="light").new_page()
        page.goto(url)
        page.wait_for_selector(".welcome")
        ask(page)
        page.screenshot(path=out / name)
        if size is WIDE:
            page.locator("#settings-toggle").click()
            page.locator("#set-max_tokens").fill("1024")
            page.fill("#question", LONG_QUESTION)
            page.keyboard.press("Enter")
            page.get_by_role("link", name="Engine").click()
            page.wait_for_selector(".card")
            page.wait_for_timeout(3000)  # some snapshots, while the answer is written
            page.screenshot(path=out / "page_engine.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="address of a server; without it one is started")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder for the files")
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with served(args.url) as url, sync_playwright() as player:
        browser = player.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        take(browser, url, args.out)
        browser.close()


if __name__ == "__main__":
    main()
