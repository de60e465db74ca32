"""The page in a real browser, around a stand-in engine that repeats the prompt, and around the default model.

Needs `pip install draftwing[browser]` and Chromium: the system's, or `playwright install chromium`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import NARROW, WIDE, Open, ask, wait_for_end
from fake_engine import FakeEngine
from scripted import ScriptedEngine, launched, serving

from draftwing.server.ui.routes import Snapshots

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_a_message_and_its_tree(url: str, open_page: Open, size: Any) -> None:
    page = open_page(url, size)
    ask(page, "Hello, **tree**" + " that grows and grows" * 20)
    page.wait_for_selector(".tree .accepted", timeout=20000)
    assert page.locator("#send").text_content() == "Stop", "the tree grows while the answer runs"
    early = int(page.locator("input[type=range]").get_attribute("max"))
    wait_for_end(page)
    assert int(page.locator("input[type=range]").get_attribute("max")) > early
    assert page.locator(".assistant .text strong").text_content() == "tree"
    page.get_by_label("Step with the most accepted drafts").click()
    assert page.locator(".says").text_content() == "4 drafted, 2 accepted: one forward pass, 3 tokens."
    assert page.locator(".tree g.accepted").count() == 2 and page.locator(".tree g.own").count() == 1
    assert page.locator(".tree g.by-lookup").count() == 2
    assert page.locator(".numbers dd").first.text_content().strip() != "0.00"
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= size["width"], "nothing stands out to the side"


def test_step_through_an_answer(url: str, open_page: Open) -> None:
    page = open_page(url)
    ask(page, "Step by step")
    wait_for_end(page)
    slider = page.locator("input[type=range]")
    last = int(slider.get_attribute("max"))
    slider.focus()
    page.keyboard.press("End")
    assert slider.input_value() == str(last)
    page.get_by_label("Step back").click()
    assert slider.input_value() == str(last - 1)
    said = page.locator(".tokens .now").all_text_contents()
    assert len(said) == 3 and "".join(said) in "".join(page.locator(".tokens span").all_text_contents())
    page.locator(".tokens span").first.click()
    assert (
        slider.input_value() == "0"
        and page.locator(".counter, .drafts-head .note").text_content() == "after the prompt"
    )
    page.get_by_label("Play the steps").click()
    page.wait_for_selector(".drafts-head .note:has-text('step 2 of')", timeout=20000)
    page.get_by_label("Pause").click()


def test_an_answer_and_its_code_are_copied(url: str, open_page: Open) -> None:
    page = open_page(url, permissions=["clipboard-read", "clipboard-write"])
    ask(page, "Say *this*:\n```c\nint x;\n```\n")
    wait_for_end(page)
    copied = []
    for button in page.locator(".assistant").get_by_role("button", name="Copy").all():
        button.click()
        page.wait_for_function(
            "(before) => navigator.clipboard.readText().then((now) => now !== before)", arg="".join(copied[-1:])
        )
        copied.append(page.evaluate("navigator.clipboard.readText()"))
    code, answer = copied
    assert code.strip() == "int x;" and answer.startswith("user:Say *this*:\n```c\nint x;\n```")


def test_side_by_side(url: str, open_page: Open, engine: FakeEngine) -> None:
    page = open_page(url)
    page.get_by_label("Side by side").check()
    ask(page, "Twice the same")
    wait_for_end(page)
    page.wait_for_selector(".verdict b")
    assert page.locator(".verdict").text_content().startswith("The same text")
    assert page.locator(".answer-head").all_text_contents() == ["With drafts", "Without drafts"]
    with_drafts, without = engine.requests
    assert with_drafts.traced and with_drafts.limits is None and without.limits is not None
    assert with_drafts.params.sampling_seed == without.params.sampling_seed


def test_nothing_is_asked_again_while_answers_are_waited_for(url: str, open_page: Open, engine: FakeEngine) -> None:
    page = open_page(url)
    page.get_by_label("Side by side").check()
    ask(page, "Twice, and not more" + " and more" * 20)
    page.wait_for_selector("#send[data-stops]")
    feet = page.locator(".answer-foot")
    assert [foot.is_visible() for foot in feet.all()] == [False, False]
    page.evaluate("document.querySelectorAll('.answer-foot button').forEach((one) => one.click())")
    wait_for_end(page)
    assert len(engine.requests) == 2
    page.get_by_role("button", name="Ask again").click()
    page.wait_for_selector("#send[data-stops]")
    page.keyboard.press("Escape")
    wait_for_end(page)
    assert page.locator(".figures").all_text_contents()[1].endswith("stopped"), "the second one did not begin"


def test_a_question_without_an_answer_is_not_asked_again(url: str, open_page: Open, engine: FakeEngine) -> None:
    page = open_page(url, expected="400")
    ask(page, "bad")
    page.wait_for_selector(".message .error:visible")
    ask(page, "good")
    wait_for_end(page)
    prompt = engine.tokenizer.decode(engine.requests[-1].prompt_ids)
    assert "user:good" in prompt and "bad" not in prompt


def test_the_engine_while_it_does_not_answer_and_when_it_stopped(
    open_page: Open, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Snapshots.take
    shown: dict[str, Any] = {}
    monkeypatch.setattr(Snapshots, "take", lambda self: changed(take(self)))

    async def changed(taken: Any) -> Any:
        return (await taken) | shown

    def explains(**more: Any) -> dict[str, Any]:
        return {"engine": "up", "age": 0.0, "explain": {"requests": 1, "summary": "so", "options": [], **more}}

    with serving(engine) as url:
        shown |= explains()
        page = open_page(url)
        page.get_by_role("link", name="Engine").click()
        page.wait_for_selector(".card:has-text('Nothing runs. Once something does')")
        option = {"option": "chains of 2", "price_ms": None, "chosen": True}
        shown |= explains(options=[option], summary="chains of 2 are drafted, whatever they cost")
        page.wait_for_selector(".card:has-text('Costs are not compared')")
        assert page.locator("#engine > p").is_hidden() and page.get_by_label("Options").count() == 0
        shown |= {"engine": "busy", "age": 7.2}
        page.wait_for_selector("#engine > p:has-text('does not answer. These are its numbers of 7 s ago.')")
        shown |= {"engine": "down", "age": 9.1}
        page.wait_for_selector("#engine > p:has-text('has stopped, and another one is being started')")
        page.get_by_role("link", name="Chat").click()  # nobody looks while the server ends


def test_a_server_with_a_key(open_page: Open) -> None:
    engine = ScriptedEngine("fine", api_key="right")
    with serving(engine) as url:
        page = open_page(url, ready="#key-dialog[open]", expected="401")
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-error:visible")
        page.fill("#key", "right")
        page.keyboard.press("Enter")
        page.wait_for_selector(".welcome")
        ask(page, "Well?")
        wait_for_end(page)
        assert page.locator(".assistant .text").text_content() == "fine"
        stored = page.evaluate("JSON.stringify([{...localStorage}, document.cookie])")
        assert "right" not in stored, "the key is kept in the tab alone"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_axe_finds_nothing(url: str, open_page: Open, flawless: Callable[[Any], None], size: Any, scheme: str) -> None:
    """Names, contrasts, what the keyboard reaches: axe's rules, in each view."""
    # axe is a script of another's, which the page itself would not let in.
    page = open_page(url, size, color_scheme=scheme, reduced_motion="reduce", bypass_csp=True)
    flawless(page)
    page.locator("#settings-toggle").click()
    ask(page, "A `word`, [a link](https://example.com/), and more")
    wait_for_end(page)
    flawless(page)
    page.get_by_role("link", name="Engine").click()
    page.wait_for_selector(".card tr[data-chosen]")
    flawless(page)


HOSTILE = (
    "<img src=x onerror=alert(1)><script>alert(2)</script> [a](javascript:alert(3)) **<b>x</b>** "
    "`<i>` [ok](https://example.com/a)\n\n| a |\n|---|\n| <u>c</u> |\n\n```html\n<script>alert(4)</script>\n```\n"
)


def test_what_a_model_writes_stays_text(open_page: Open) -> None:
    engine = ScriptedEngine(HOSTILE)
    with serving(engine) as url:
        page = open_page(url)
        page.on("dialog", lambda dialog: pytest.fail("a script of the answer ran"))
        ask(page, "Attack")
        wait_for_end(page)
        answer = page.locator(".assistant .text")
        assert answer.locator("img, script, b, i, u").count() == 0
        assert [link.get_attribute("href") for link in answer.locator("a").all()] == ["https://example.com/a"]
        assert answer.locator("a").get_attribute("rel") == "noopener noreferrer"
        assert "<script>alert(2)</script>" in answer.text_content() and answer.locator("table td").count() == 1
        assert "<script>alert(4)</script>" in answer.locator("pre").text_content()


@pytest.fixture(scope="module")
def real(browser: Any, smollm2_path: Path) -> Iterator[str]:
    """The default model, with trees of two drafters."""
    tree = "--speculative-num-steps 4 --speculative-eagle-topk 3 --speculative-num-draft-tokens 10"
    command = f"--model smollm2 --speculative-algorithm EAGLE3+SUFFIX {tree} --speculative-fixed-shape"
    with launched(command, 120) as (_, url):
        yield url


def test_the_default_model(real: str, open_page: Open) -> None:
    page = open_page(real)
    page.locator("#settings-toggle").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Maximum tokens").fill("60")
    page.locator("#settings-toggle").click()
    page.get_by_label("Side by side").check()
    ask(page, "List 3 countries and their capitals.")
    wait_for_end(page, 180)
    assert page.locator(".verdict").text_content().startswith("The same text in ")
    page.get_by_label("Step with the most accepted drafts").click()
    assert page.locator(".tree g.accepted").count() > 0 and page.locator(".tree g.rejected").count() > 0
    page.get_by_role("link", name="Engine").click()
    page.wait_for_selector(".card")
    assert page.locator(".depths b").count() >= 4 and page.locator(".state").text_content() == "running"
    page.get_by_role("link", name="Chat").click()
    page.get_by_label("Drafts on").check()
    ask(page, "Which of them is the largest?")
    wait_for_end(page, 180)
    assert page.locator(".message.assistant").count() == 3
