"""The page's conversations in a real browser: what is kept, versions, several answers at once, files, and the list.

Needs `pip install draftwing[browser]` and Chromium: the system's, or `playwright install chromium`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browsing import NARROW, WIDE, Open, ask, wait_for_end
from fake_engine import FakeEngine
from scripted import wait_until

pytestmark = pytest.mark.slow

LONG = "A long story" + " that goes on" * 60
BEFORE = "draftwing-conversations"  # of localStorage, where they were kept before


def old(i: int) -> dict[str, Any]:
    answer = {"content": f"answer {i}", "reasoning": "", "drafts": True, "tokens": 3, "seconds": 0.1}
    messages = [
        {"role": "user", "content": f"question {i}"},
        {"role": "assistant", "content": f"answer {i}", "answers": [answer]},
    ]
    return {"id": f"old-{i}", "title": f"Conversation {i}", "system": "", "messages": messages}


def reopened(page: Any, kept: Any) -> None:
    """Reloads the page with what was kept before."""
    page.evaluate("([name, kept]) => localStorage.setItem(name, kept)", [BEFORE, json.dumps(kept)])
    page.reload()


def titles(page: Any) -> list[str]:
    found: list[str] = page.locator(".conversations .name").all_text_contents()
    return found


def menu(page: Any, label: str, item: str) -> None:
    page.get_by_role("button", name=label).click()
    page.get_by_role("button", name=item, exact=True).click()


def focused(page: Any) -> str:
    found: str = page.evaluate("document.activeElement.ariaLabel || document.activeElement.id")
    return found


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_all_are_kept_and_those_of_before_are_read(url: str, open_page: Open) -> None:
    page = open_page(url)
    reopened(page, [old(i) for i in range(150)])
    page.wait_for_selector(".message")
    assert titles(page) == [f"Conversation {i}" for i in range(150)]
    assert page.evaluate("(name) => localStorage.getItem(name)", BEFORE) is None
    page.keyboard.press("Alt+Shift+N")
    ask(page, "The newest")
    wait_for_end(page)
    page.reload()
    page.wait_for_selector(".message")
    assert titles(page) == ["The newest", *(f"Conversation {i}" for i in range(150))]
    page.get_by_role("button", name="Conversation 149", exact=True).click()
    assert page.locator(".assistant .text").text_content() == "answer 149"


def test_a_browser_without_room_says_so_and_deletes_nothing(url: str, open_page: Open) -> None:
    page = open_page(url)
    ask(page, "Kept")
    wait_for_end(page)
    page.evaluate("() => { IDBObjectStore.prototype.put = function () { this.transaction.abort(); }; }")
    page.locator("#new").click()
    ask(page, "Not kept")
    wait_for_end(page)
    assert "no room" in page.locator("#kept").text_content() and page.locator(".notice").count() == 1
    assert titles(page) == ["Not kept", "Kept"]
    page.reload()
    page.wait_for_selector(".message")
    assert titles(page) == ["Kept"]


def test_two_tabs(url: str, open_page: Open) -> None:
    """Each changes the same conversation and its own; nothing of the other's is overwritten."""
    page = open_page(url)
    ask(page, "Shared")
    wait_for_end(page)
    other = page.context.new_page()
    other.goto(url)
    other.wait_for_selector(".message")
    for tab, words in ((page, "of the first"), (other, "of the second")):
        tab.get_by_role("button", name="Ask again").click()
        wait_for_end(tab)
        tab.locator("#new").click()
        ask(tab, words)
        wait_for_end(tab)
        tab.locator(".conversations .open:has-text('Shared')").click()
    for tab in (page, other):
        tab.wait_for_selector("[aria-label$='of 3']")
        assert sorted(titles(tab)) == ["Shared", "of the first", "of the second"]
    other.get_by_label("Delete of the first").click()
    page.wait_for_selector(".conversations:not(:has-text('of the first'))")
    page.reload()
    page.wait_for_selector(".message")
    assert sorted(titles(page)) == ["Shared", "of the second"]


# -- versions ----------------------------------------------------------------------------------------------------------


def test_an_edited_question_is_another_version(url: str, open_page: Open, engine: FakeEngine) -> None:
    page = open_page(url)
    for words in ("First", "Second"):
        ask(page, words)
        wait_for_end(page)
    first = page.locator(".message.user").first
    first.get_by_role("button", name="Edit").click()
    page.keyboard.type(" and not sent")
    page.reload()
    page.wait_for_selector(".message")
    assert page.locator(".message.user").count() == 2, "nothing is changed before it is sent"
    first.get_by_role("button", name="Edit").click()
    page.keyboard.type(", changed")
    page.keyboard.press("Escape")
    assert page.locator(".said").all_text_contents() == ["First", "Second"]
    first.get_by_role("button", name="Edit").click()
    page.keyboard.press("End")
    page.keyboard.type(", changed")
    page.keyboard.press("Enter")
    wait_for_end(page)
    assert page.locator(".said").all_text_contents() == ["First, changed"]
    assert engine.tokenizer.decode(engine.requests[-1].prompt_ids).startswith("user:First, changed")
    page.reload()
    page.wait_for_selector(".message")
    first.get_by_label("Version before").click()
    assert page.locator(".said").all_text_contents() == ["First", "Second"]
    assert focused(page) == "Version after", "the one before was the last that way"
    page.keyboard.press("Enter")
    assert page.locator(".said").all_text_contents() == ["First, changed"]


def test_asking_again_keeps_the_answer(url: str, open_page: Open, engine: FakeEngine) -> None:
    page = open_page(url)
    ask(page, "Try")
    wait_for_end(page)
    page.get_by_role("button", name="Ask again").click()
    page.wait_for_selector("#send[data-stops]")
    wait_for_end(page)
    first, second = engine.requests
    assert first.prompt_ids == second.prompt_ids
    assert page.locator(".versions").get_attribute("aria-label") == "Version 2 of 2"
    menu_of = page.locator(".assistant")
    menu_of.get_by_role("button", name="Edit").click()
    page.locator(".edit textarea").fill("What I wanted it to say")
    page.keyboard.press("Control+Enter")
    assert page.locator(".versions").get_attribute("aria-label") == "Version 3 of 3"
    ask(page, "Go on")
    wait_for_end(page)
    assert "What I wanted it to say" in engine.tokenizer.decode(engine.requests[-1].prompt_ids)
    page.get_by_label("Version before").click()
    assert page.locator(".said").all_text_contents() == ["Try"]
    assert page.locator(".assistant .text").text_content() == "user:Try"


def test_a_stopped_answer_is_continued(url: str, open_page: Open, engine: FakeEngine) -> None:
    page = open_page(url)
    ask(page, LONG)
    page.wait_for_selector(".assistant .text:has-text('goes')")
    page.keyboard.press("Escape")
    wait_for_end(page)
    begun = page.locator(".assistant .text").text_content()
    page.get_by_role("button", name="Continue").click()
    page.wait_for_selector("#send[data-stops]")
    page.keyboard.press("Escape")
    wait_for_end(page)
    prompt = engine.tokenizer.decode(engine.requests[-1].prompt_ids)
    assert prompt.rstrip().endswith(f"assistant:{begun}".rstrip())
    assert page.locator(".assistant .text").text_content().startswith(begun)
    assert page.locator(".versions").get_attribute("aria-label") == "Version 2 of 2"


def killed(page: Any, url: str, pause: int, *, forgotten: bool = False) -> Any:
    """Kills the page in the middle of an answer, and opens it again. forgotten: the server keeps no answers."""
    ask(page, LONG)
    page.wait_for_selector(".assistant .text:has-text('goes')")
    page.wait_for_timeout(pause)
    again = page.context.new_page()
    if forgotten:
        again.route("**/ui/answers/**", lambda route: route.fulfill(status=404, json={"message": "gone"}))
    page.close(run_before_unload=False)
    again.goto(url)
    again.locator(".conversations .open").first.click()
    return again


@pytest.mark.parametrize("pause", [100, 1000], ids=lambda pause: f"{pause}ms")
def test_an_answer_goes_on_when_the_page_was_killed(url: str, open_page: Open, engine: FakeEngine, pause: int) -> None:
    again = killed(open_page(url), url, pause)
    again.wait_for_selector("#send[data-stops]")
    wait_for_end(again)
    assert again.locator(".assistant .text").text_content() == f"user:{LONG}", "the whole of it"
    assert not engine.aborted and len(engine.requests) == 1
    again.reload()
    again.wait_for_selector(".message")
    again.wait_for_timeout(300)
    assert again.locator(".assistant .text").text_content() == f"user:{LONG}" and len(engine.requests) == 1
    assert "stopped" not in again.locator(".figures").text_content()


def test_an_answer_goes_on_whose_page_was_killed_before_it_began(url: str, open_page: Open, engine: FakeEngine) -> None:
    """The second one of two, of which no event has come yet."""
    page = open_page(url)
    engine.pause = 1
    page.get_by_text("Side by side").click()
    ask(page, "Why?")
    wait_until(lambda: len(engine.requests) == 2)
    page.wait_for_timeout(300)
    again = page.context.new_page()
    page.close(run_before_unload=False)
    again.goto(url)
    again.wait_for_selector("#send[data-stops]")
    wait_for_end(again)
    assert again.locator(".assistant .text").all_text_contents() == ["user:Why?"] * 2 and not engine.aborted


def test_an_answer_that_goes_on_can_be_stopped(url: str, open_page: Open, engine: FakeEngine) -> None:
    again = killed(open_page(url), url, 100)
    again.wait_for_selector("#send[data-stops]")
    again.keyboard.press("Escape")
    wait_for_end(again)
    wait_until(lambda: len(engine.aborted) == 1)
    assert again.locator(".assistant .text").text_content() != f"user:{LONG}"


@pytest.mark.parametrize("pause", [500, 1500], ids=lambda pause: f"{pause}ms")
def test_what_the_server_does_not_keep_is_continued(url: str, open_page: Open, engine: FakeEngine, pause: int) -> None:
    again = killed(open_page(url, expected="404"), url, pause, forgotten=True)
    again.wait_for_selector(".answer-foot:visible")
    begun = again.locator(".assistant .text").text_content()
    assert begun and f"user:{LONG}".startswith(begun.rstrip())
    again.get_by_role("button", name="Continue").click()
    again.wait_for_selector("#send[data-stops]")
    again.keyboard.press("Escape")
    wait_for_end(again)
    assert again.locator(".assistant .text").text_content().startswith(begun)


# -- several answers at once -------------------------------------------------------------------------------------------


def test_answers_go_on_elsewhere(url: str, open_page: Open, engine: FakeEngine) -> None:
    page = open_page(url)
    ask(page, LONG)
    page.wait_for_selector("#send[data-stops]")
    page.locator("#new").click()
    ask(page, "Another " + LONG)
    page.wait_for_selector(".conversations li:nth-child(2) [data-state=running]")
    wait_until(lambda: len(engine.requests) == 2)
    assert page.locator("#send").text_content() == "Stop"
    page.keyboard.press("Escape")
    wait_for_end(page)
    page.wait_for_selector("[data-state=answered]", timeout=60_000)
    page.locator(".conversations .open:has([data-state=answered])").click()
    assert page.locator(".assistant .text").text_content() == f"user:{LONG}", "the whole of it"
    assert page.locator("[data-state]").count() == 0, "it has been seen"
    assert len(engine.aborted) == 1


def test_enter_while_an_answer_runs_says_why_not(url: str, open_page: Open, engine: FakeEngine) -> None:
    page = open_page(url)
    ask(page, LONG)
    page.wait_for_selector("#send[data-stops]")
    ask(page, "Too early")
    assert "Stop it" in page.locator("#refused").text_content()
    assert page.locator("#question").input_value() == "Too early" and len(engine.requests) == 1
    page.keyboard.press("Escape")
    wait_for_end(page)
    assert page.locator("#refused").text_content() == ""
    page.keyboard.press("Enter")
    wait_for_end(page)
    assert page.locator(".said").last.text_content() == "Too early"


def test_an_error_is_seen_from_elsewhere(url: str, open_page: Open) -> None:
    page = open_page(url, expected="Failed to load")
    for _ in range(4):
        ask(page, LONG)
        page.wait_for_selector("#send[data-stops]")
        page.keyboard.press("Escape")
        wait_for_end(page)
    page.route("**/v1/chat/completions", lambda route: page.wait_for_timeout(300) or route.abort())
    ask(page, "This fails")
    page.get_by_role("link", name="Engine").click()
    page.wait_for_selector(".notice:has-text('does not answer')")
    page.get_by_role("button", name="Show").click()
    page.wait_for_selector("#chat[data-shown]")
    error = page.locator(".message .error:visible")
    box, talk = error.bounding_box(), page.locator("#messages").bounding_box()
    assert talk["y"] <= box["y"] and box["y"] + box["height"] <= talk["y"] + talk["height"], "it is scrolled into view"
    assert page.locator(".notice").count() == 0
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Ask again").last.click()
    wait_for_end(page)
    assert page.locator(".message .error:visible").count() == 0 and page.locator(".versions").count() == 0


# -- the list ----------------------------------------------------------------------------------------------------------


def test_search_rename_delete_and_undo(url: str, open_page: Open) -> None:
    page = open_page(url)
    reopened(page, [old(i) for i in range(12)])
    page.wait_for_selector(".message")
    page.keyboard.press("Alt+Shift+F")
    assert focused(page) == "Search in conversations"
    page.keyboard.type("QUESTION 7")
    assert titles(page) == ["Conversation 7"] and page.locator(".snippet").text_content() == "question 7"
    page.get_by_label("Rename Conversation 7").click()
    page.fill("#asked-text", "Seven")
    page.keyboard.press("Enter")
    page.wait_for_selector(".name:has-text('Seven')")
    page.keyboard.press("Alt+Shift+F")
    page.keyboard.press("Escape")
    assert len(titles(page)) == 12
    page.get_by_label("Delete Seven").click()
    assert "Seven" not in titles(page) and focused(page) != "question"
    page.keyboard.press("Enter")
    page.wait_for_selector(".name:has-text('Seven')")
    menu(page, "More actions", "Delete all")
    page.get_by_role("button", name="Cancel").click()
    assert len(titles(page)) == 12
    menu(page, "More actions", "Delete all")
    page.get_by_role("button", name="Delete", exact=True).click()
    page.wait_for_selector(".welcome")
    page.get_by_role("button", name="Undo").click()
    page.wait_for_selector(".conversations li:nth-child(12)")
    page.reload()
    page.wait_for_selector(".message")
    assert len(titles(page)) == 12 and "Seven" in titles(page)


def test_files(url: str, open_page: Open, tmp_path: Path) -> None:
    page = open_page(url)
    ask(page, "To a file")
    wait_for_end(page)
    page.get_by_role("button", name="Ask again").click()
    wait_for_end(page)
    files = {}
    for label, item in (
        ("Actions for", "Export as JSON"),
        ("Actions for", "Export as Markdown"),
        ("More", "Export all as JSON"),
    ):
        with page.expect_download() as download:
            menu(page, f"{label} {'this conversation' if label != 'More' else 'actions'}", item)
        files[item] = tmp_path / download.value.suggested_filename
        download.value.save_as(files[item])
    assert [path.name for path in files.values()] == ["To-a-file.json", "To-a-file.md", "draftwing-conversations.json"]
    assert (
        files["Export as Markdown"].read_text()
        == "# To a file\n\n## User\n\nTo a file\n\n## Assistant\n\nuser:To a file\n"
    )
    page.get_by_label("Delete To a file").click()
    page.locator("input[type=file]").set_input_files(files["Export all as JSON"])
    page.wait_for_selector("[aria-label='Version 2 of 2']")
    assert titles(page) == ["To a file"]
    page.locator("input[type=file]").set_input_files(files["Export as JSON"])
    page.wait_for_selector(".notice:has-text('Imported')")
    assert titles(page) == ["To a file"] and page.locator("[aria-label='Version 2 of 2']").count() == 1
    page.locator("input[type=file]").set_input_files(files["Export as Markdown"])
    page.wait_for_selector(".notice:has-text('not JSON')")


def test_system_prompts_with_names(url: str, open_page: Open, engine: FakeEngine) -> None:
    page = open_page(url)
    page.locator("#settings-toggle").click()
    page.fill("#system", "Be brief.")
    page.get_by_role("button", name="Save as preset").click()
    page.fill("#asked-text", "Brief")
    page.keyboard.press("Enter")
    page.get_by_label("for new conversations").check()
    ask(page, "One")
    wait_for_end(page)
    page.fill("#system", "Be long.")
    assert page.locator("#preset").input_value() == ""
    page.locator("#new").click()
    assert page.locator("#system").input_value() == "Be brief." and page.locator("#preset").input_value() == "Brief"
    ask(page, "Two")
    wait_for_end(page)
    page.reload()
    page.wait_for_selector(".message")
    page.locator("#settings-toggle").click()
    assert page.locator("#system").input_value() == "Be brief."
    page.locator(".conversations .open:has-text('One')").click()
    assert page.locator("#system").input_value() == "Be long."
    page.locator("#preset").select_option("Brief")
    ask(page, "Three")
    wait_for_end(page)
    prompts = [engine.tokenizer.decode(request.prompt_ids) for request in engine.requests]
    assert all(prompt.startswith("system:Be brief.") for prompt in prompts)


# -- the keyboard and the narrow screen --------------------------------------------------------------------------------


def test_the_list_on_a_narrow_screen(url: str, open_page: Open) -> None:
    page = open_page(url, NARROW)
    ask(page, "With drafts, so that their tree is below")
    wait_for_end(page)
    page.wait_for_selector(".tree .accepted")
    page.locator("#list-toggle").click()
    page.locator("#new").click()
    assert page.locator("#list-toggle").is_visible(), "the list gives its place back"
    ask(page, "Another one")
    wait_for_end(page)
    page.locator("#list-toggle").click()
    assert titles(page) == ["Another one", "With drafts, so that their tree is below"]
    assert page.locator(".talk").is_hidden()
    page.keyboard.press("Escape")
    assert page.locator(".talk").is_visible() and focused(page) == "list-toggle"
    page.keyboard.press("Enter")
    page.locator(".conversations .open").last.click()
    assert page.locator(".said").text_content() == "With drafts, so that their tree is below"
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= NARROW["width"], "nothing stands out to the side"


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_shortcuts(url: str, open_page: Open, size: Any) -> None:
    page = open_page(url, size)
    for words in ("One", "Two"):
        page.keyboard.press("Alt+Shift+N")
        ask(page, words)
        wait_for_end(page)
    page.keyboard.press("Alt+Shift+ArrowDown")
    assert page.locator(".said").text_content() == "One"
    page.keyboard.press("Alt+Shift+ArrowDown")
    assert page.locator(".said").text_content() == "One", "it is the last"
    page.keyboard.press("Alt+Shift+ArrowUp")
    assert page.locator(".said").text_content() == "Two"
    page.keyboard.press("Control+/")
    assert page.locator("dialog[open] dt").count() >= 8
    page.keyboard.press("Alt+Shift+N")
    assert page.locator(".said").text_content() == "Two", "nothing happens behind a dialog"
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+Shift+F")
    page.keyboard.type("one")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "open"
    page.keyboard.press("Enter")
    assert page.locator(".said").text_content() == "One" and focused(page) == "question"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_axe_finds_nothing(url: str, open_page: Open, flawless: Callable[[Any], None], size: Any, scheme: str) -> None:
    """Versions, a form, the list with its states, menus, dialogs and notices."""
    page = open_page(url, size, color_scheme=scheme, reduced_motion="reduce", bypass_csp=True)
    ask(page, "A question")
    wait_for_end(page)
    page.get_by_role("button", name="Ask again").click()
    wait_for_end(page)
    flawless(page)
    page.locator(".message.user").get_by_role("button", name="Edit").click()
    flawless(page)
    page.keyboard.press("Escape")
    ask(page, LONG)
    page.keyboard.press("Alt+Shift+N")
    page.keyboard.press("Alt+Shift+F")
    flawless(page)
    page.keyboard.type("question")
    page.get_by_role("button", name="More actions").click()
    flawless(page)
    page.keyboard.press("Escape")
    page.get_by_label("Rename A question").click()
    flawless(page)
    page.keyboard.press("Escape")
    page.get_by_label("Delete A question").click()
    flawless(page)
    page.keyboard.press("Control+/")
    flawless(page)
