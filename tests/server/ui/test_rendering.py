"""What the page shows in a real browser: settings, markdown, formulas, code, files, traces, probabilities, themes.

Needs what `test_browser.py` needs.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsing import NARROW, WIDE, Open, ask, wait_for_end
from fake_engine import FakeEngine
from image_models import encoded, picture
from PIL import Image
from scripted import ScriptedEngine, serving
from seeing import Seeing

pytestmark = pytest.mark.slow

RICH = r"""# Title

| left | right | middle |
|:-----|------:|:------:|
| a<br>b | $x^2$ | `c` |

- [x] done
- [ ] to do

~~struck~~ https://example.com/auto and a note[^1], $5 and $10.

\[ \frac{a}{b} \]

```python
def f(x):
    return "text"  # comment
```

```nonsense
<b>
```

[^1]: The note.
"""


@pytest.fixture
def rich() -> Iterator[tuple[ScriptedEngine, str]]:
    engine = ScriptedEngine(RICH)
    with serving(engine) as url:
        yield engine, url


def test_markdown_formulas_and_code(rich: tuple[ScriptedEngine, str], open_page: Open) -> None:
    page = open_page(rich[1])
    ask(page, "Show all, **bold**\n\n- one")
    wait_for_end(page)
    text = page.locator(".assistant .text")
    page.wait_for_selector(".assistant mfrac")
    aligned = [cell.evaluate("(one) => getComputedStyle(one).textAlign") for cell in text.locator("td").all()]
    assert aligned == ["left", "right", "center"] and text.locator("td br").count() == 1
    assert text.locator("td math msup").count() == 1, "a formula in a cell"
    assert [box.is_checked() for box in text.locator("li input").all()] == [True, False]
    assert text.locator("del").text_content() == "struck" and text.locator("sup").all_text_contents() == ["1", "1"]
    assert text.locator("a").get_attribute("href") == "https://example.com/auto"
    assert "$5 and $10" in text.text_content()
    page.wait_for_selector(".assistant .hl-keyword")
    code = text.locator("pre")
    assert code.nth(0).text_content() == 'def f(x):\n    return "text"  # comment'
    assert [code.locator(f".hl-{kind}").text_content() for kind in ("string", "comment")] == ['"text"', "# comment"]
    assert code.nth(1).text_content() == "<b>"
    said = page.locator(".user .said")
    assert said.locator("strong").text_content() == "bold" and said.locator("li").count() == 1


def test_a_formula_that_is_none_stays_as_it_was_written(open_page: Open) -> None:
    written = r"$\frac{a$ and $\href{javascript:alert(1)}{x}$ and $y$"
    with serving(ScriptedEngine(written)) as url:
        page = open_page(url)
        ask(page, "Formulas")
        wait_for_end(page)
        page.wait_for_selector(".math math")
        assert page.locator(".math.raw").first.text_content() == r"$\frac{a$"
        assert page.locator(".assistant .text a, .assistant .text [href]").count() == 0


def test_what_comes_does_not_change_what_is_there(open_page: Open) -> None:
    """An element of the beginning is the same one when the answer has ended, as long as it is not drawn anew."""
    engine = ScriptedEngine("# First\n\nSecond\n\n" + "- item\n" * 60 + "\n```python\n" + "x = 1\n" * 60 + "```\n")
    engine.pause = 0.02  # slower than it is drawn on a busy machine
    with serving(engine) as url:
        page = open_page(url)
        ask(page, "Much")
        page.wait_for_selector(".text li:nth-child(9)")
        page.evaluate("document.querySelector('.text h3').kept = document.querySelector('.text li').kept = true")
        page.wait_for_selector(".text .code")
        assert page.locator("#send").text_content() == "Stop"
        assert page.evaluate("document.querySelector('.text h3').kept && document.querySelector('.text li').kept")
        wait_for_end(page)
        assert page.locator(".text pre").text_content() == "\n".join(["x = 1"] * 60)


def test_settings_of_any_precision_reach_the_engine_and_wrong_ones_are_marked(
    url: str, open_page: Open, engine: FakeEngine
) -> None:
    page = open_page(url)
    page.locator("#settings-toggle").click()
    assert page.get_by_label("Temperature").get_attribute("placeholder") == "1", "the server's default"
    page.get_by_label("Temperature").fill("0,65")
    assert page.locator("#wrong-temperature").is_visible()
    page.locator("#settings-toggle").click()
    ask(page, "Not yet")
    assert page.locator(".message").count() == 0 and page.locator("#question").input_value() == "Not yet"
    assert page.evaluate("document.activeElement.id") == "set-temperature", "it is shown what is wrong"
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("0.65")
    assert page.locator("#wrong-temperature").is_hidden()
    page.get_by_label("Top-p").fill("0.92")
    page.get_by_label("Presence penalty").fill("0.35")
    page.get_by_label("Maximum tokens").fill("5")
    page.locator(".further summary").click()
    page.get_by_label("Stop strings").fill("never\\nthis")
    page.get_by_label("JSON schema").fill('{"type":\n]')
    assert "line 2, column 1" in page.locator("#wrong-schema").text_content()
    page.get_by_label("JSON schema").fill("")
    page.get_by_label("Request fields as JSON").fill('{"frequency_penalty": 0.25}')
    page.reload()
    page.wait_for_selector(".welcome")
    ask(page, "Now")
    wait_for_end(page)
    params = engine.requests[-1].params
    assert (params.temperature, params.top_p, params.presence_penalty, params.frequency_penalty) == (
        0.65,
        0.92,
        0.35,
        0.25,
    )
    assert params.stop == ("never\nthis",) and params.max_new_tokens == 5
    page.locator("#settings-toggle").click()
    page.get_by_role("button", name="Precise").click()
    assert page.get_by_label("Temperature").input_value() == "0" and page.get_by_label("Top-p").input_value() == ""
    page.get_by_role("button", name="Reset to the server").click()
    ask(page, "By itself")
    wait_for_end(page)
    params = engine.requests[-1].params
    assert (params.temperature, params.top_p, params.presence_penalty, params.stop) == (1, 1, 0, ())


def test_probabilities_by_pointer_and_keyboard(url: str, open_page: Open) -> None:
    page = open_page(url)
    page.locator("#settings-toggle").click()
    page.get_by_label("Token probabilities").check()
    page.locator("#settings-toggle").click()
    ask(page, "Chances")
    wait_for_end(page)
    toggle = page.get_by_role("button", name="Probabilities")
    toggle.click()
    assert page.locator(".assistant .text").is_hidden() and toggle.get_attribute("aria-pressed") == "true"
    tokens = page.locator(".odds")
    assert "".join(tokens.locator("span").all_text_contents()).startswith("user:Chances")
    page.keyboard.press("Tab")
    while page.evaluate("document.activeElement.className") != "odds":
        page.keyboard.press("Shift+Tab")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator(".odds-about caption").text_content().startswith("Token 3 of ")
    assert tokens.locator("[aria-selected=true]").text_content() == "e"
    shares = page.locator(".odds-about tr")
    assert shares.count() >= 5 and shares.locator("td:first-of-type").first.text_content().endswith("%")
    tokens.locator("span").nth(5).hover()
    assert page.locator(".odds-about caption").text_content().startswith("Token 6 of ")
    toggle.click()
    assert page.locator(".assistant .text").is_visible() and page.locator(".odds").count() == 0
    page.reload()
    page.wait_for_selector(".message")
    assert page.get_by_role("button", name="Probabilities").count() == 0, "they are not kept"


def test_files_go_along_with_a_question(url: str, open_page: Open, engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("A `note`\n```\ncode\n```\n")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (tmp_path / "large.txt").write_text("x" * 300_000)
    page = open_page(url)
    page.on("filechooser", lambda _: None)  # the browser asks us from now on

    def attach(*names: str) -> None:
        with page.expect_file_chooser() as chooser:
            page.get_by_label("Attach text files").click()
        chooser.value.set_files([tmp_path / name for name in names])

    attach("notes.md")
    page.wait_for_selector(".chips .chip summary:has-text('notes.md')")
    attach("image.png")
    page.wait_for_selector(".composer .error:has-text('image.png')")
    attach("large.txt")
    page.wait_for_selector(".composer .error:has-text('256 KiB')")
    page.evaluate("""() => {
      const data = new DataTransfer();
      data.items.add(new File(["dropped\\n"], "dropped.txt"));
      document.querySelector(".talk").dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true }));
      const pasted = new DataTransfer();
      pasted.items.add(new File(["pasted\\n"], "pasted.txt"));
      document.querySelector("#question").dispatchEvent(new ClipboardEvent("paste", { clipboardData: pasted }));
    }""")
    page.wait_for_selector(".chips .chip:has-text('pasted.txt')")
    page.get_by_label("Remove dropped.txt").click()
    ask(page, "What is in them?")
    wait_for_end(page)
    asked = engine.tokenizer.decode(engine.requests[-1].prompt_ids)
    for part in ("What is in them?", "File: notes.md\n````md\nA `note`\n```\ncode\n```\n````", "File: pasted.txt"):
        assert part in asked
    assert "dropped" not in asked and page.locator(".composer .chip").count() == 0
    said = page.locator(".user .said")
    assert said.locator("> p").text_content() == "What is in them?"
    assert said.locator(".chip summary").all_text_contents() == ["notes.md4 lines", "pasted.txt1 line"]


# Puts a picture on the clipboard, as another program does; the keyboard pastes it.
COPY = """async (bytes) => {
  const blob = new Blob([new Uint8Array(bytes)], { type: "image/png" });
  await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
}"""
DROP = """([bytes, words]) => {
  const data = new DataTransfer();
  data.items.add(new File([new Uint8Array(bytes)], "dropped.jpg", { type: "image/jpeg" }));
  data.items.add(new File([words], "dropped.txt", { type: "text/plain" }));
  for (const kind of ["dragover", "drop"])
    document.querySelector(".talk").dispatchEvent(new DragEvent(kind, { dataTransfer: data, bubbles: true }));
}"""


def test_pictures_are_attached_pasted_and_dropped(open_page: Open, tmp_path: Path) -> None:
    """The engine sees their pixels, in the order in which they came; they stay with the question and are shown."""
    shown = [picture(40, 24, seed) for seed in range(4)]
    for i, one in enumerate(shown[:2]):
        (tmp_path / f"file{i}.png").write_bytes(encoded(one))
    (tmp_path / "broken.png").write_bytes(encoded(shown[0])[:60])
    jpeg = encoded(shown[3], "JPEG", quality=95)
    engine = Seeing()
    with serving(engine) as url:
        page = open_page(url, permissions=["clipboard-read", "clipboard-write"], expected="400 (Bad Request)")
        page.on("filechooser", lambda _: None)  # the browser asks us from now on

        def attach(*names: str) -> None:
            with page.expect_file_chooser() as chooser:
                page.get_by_label("Attach text files and pictures").click()
            chooser.value.set_files([tmp_path / name for name in names])

        chips = page.locator(".composer .thumbnail img")
        attach("file0.png", "file1.png")
        page.wait_for_selector(".composer .chip-row:nth-child(2)")
        page.evaluate(COPY, list(encoded(shown[2])))
        page.locator("#question").focus()
        page.keyboard.press("ControlOrMeta+v")
        page.wait_for_selector(".composer .chip-row:nth-child(3)")
        page.evaluate(DROP, [list(jpeg), "written\n"])
        page.wait_for_selector(".chips .chip:has-text('dropped.txt')")
        page.get_by_label("Remove file0.png").click()
        assert [one.get_attribute("alt") for one in chips.all()] == ["file1.png", "image.png", "dropped.jpg"]
        ask(page, "What is in them?")
        wait_for_end(page)
        expected = [np.asarray(shown[1]), np.asarray(shown[2]), np.asarray(Image.open(io.BytesIO(jpeg)))]

        def check() -> None:
            request = engine.requests[-1]
            for image, pixels in zip(request.images, expected, strict=True):
                assert np.array_equal(image.pixels, pixels)
            asked = engine.tokenizer.decode(request.prompt_ids)
            assert "What is in them?" in asked and "File: dropped.txt" in asked and "written" in asked

        check()
        said = page.locator(".user .said .thumbnail img")
        sizes = "(all) => all.map((one) => [one.naturalWidth, one.naturalHeight])"
        assert chips.count() == 0 and said.evaluate_all(sizes) == [[40, 24]] * 3
        page.reload()
        page.wait_for_selector(".message")
        assert said.evaluate_all(sizes) == [[40, 24]] * 3, "they are kept"
        ask(page, "And now?")
        wait_for_end(page)
        check()
        attach("broken.png")
        page.wait_for_selector(".composer .chip-row")
        ask(page, "And this?")
        page.wait_for_selector(".message .error:visible")
        assert len(engine.requests) == 2
        ask(page, "Without it?")
        wait_for_end(page)
        check()


def test_a_trace_is_saved_and_opened_without_an_answer(
    url: str, open_page: Open, tmp_path: Path, engine: FakeEngine
) -> None:
    page = open_page(url)
    ask(page, "Step by step")
    wait_for_end(page)
    slider = page.locator("input[type=range]")
    last = slider.get_attribute("max")
    assert slider.input_value() == last, "it stays at the newest step"
    special = page.locator(".tokens .special")
    assert special.all_text_contents() == ["<eos>"] and page.locator(".tree g.special").count() == 1
    page.get_by_label("Step with the most accepted drafts").click()
    shown = page.locator(".says").text_content()
    assert shown == "4 drafted, 2 accepted: one forward pass, 3 tokens."
    with page.expect_download() as download:
        page.get_by_role("button", name="Save").click()
    saved = tmp_path / "trace.json"
    download.value.save_as(saved)
    assert json.loads(saved.read_text())["model"] == "echo"
    other = open_page(url)
    other.on("filechooser", lambda _: None)

    def load(path: Path) -> None:
        with other.expect_file_chooser() as chooser:
            other.get_by_role("button", name="Open").click()
        chooser.value.set_files([path])

    wrong = tmp_path / "wrong.json"
    wrong.write_text("[]")
    load(wrong)
    other.wait_for_selector(".drafts .error:visible")
    load(saved)
    other.wait_for_selector(".tree g.accepted")
    assert other.locator(".drafts .error").is_hidden() and "trace.json: echo" in other.locator(".source").text_content()
    assert other.locator("input[type=range]").get_attribute("max") == last
    assert other.locator(".message").count() == 0 and len(engine.requests) == 1


def test_the_model_and_the_theme(url: str, open_page: Open) -> None:
    page = open_page(url, color_scheme="light")
    assert page.locator("#facts").text_content() == "echo · Q8_0, CPU · drafts by EAGLE3+NGRAM"
    page.locator("#facts").click()
    facts = dict(zip(*[page.locator(f"#model-facts {tag}").all_text_contents() for tag in ("dt", "dd")], strict=True))
    assert facts["Context"] == "2,000 tokens" and facts["Largest draft tree"] == "depth 3, top-k 2, 6 tokens"
    page.keyboard.press("Escape")

    def background() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    light = background()
    page.get_by_label("Theme").select_option("dark")
    dark = background()
    assert dark != light
    page.reload()
    page.wait_for_selector(".welcome")
    assert background() == dark and page.get_by_label("Theme").input_value() == "dark"
    page.get_by_label("Theme").select_option("")
    assert background() == light


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_the_keyboard_reaches_everything(url: str, open_page: Open, size: Any) -> None:
    page = open_page(url, size)
    page.on("filechooser", lambda _: None)  # the browser asks us from now on

    def tab_to(name: str) -> None:
        for _ in range(80):
            page.keyboard.press("Tab")
            found, visible = page.evaluate("""() => {
              const { activeElement: one } = document;
              const style = getComputedStyle(one), name = one.ariaLabel ?? (one.labels?.[0] ?? one).textContent.trim();
              return [name, style.outlineStyle !== "none" || one === document.body || one.id === "question"];
            }""")
            assert visible, f"no outline: {found}"
            if found.startswith(name):
                return
        raise AssertionError(f"{name} is not reached by Tab")

    tab_to("Settings")
    page.keyboard.press("Enter")
    tab_to("Temperature")
    page.keyboard.type("0.3")
    tab_to("Token probabilities")
    page.keyboard.press("Space")
    tab_to("Settings")
    page.keyboard.press("Enter")
    tab_to("Your question")
    page.keyboard.type("By keys")
    page.keyboard.press("Enter")
    wait_for_end(page)
    tab_to("Probabilities")
    page.keyboard.press("Enter")
    tab_to("Tokens with their probabilities")
    page.keyboard.press("End")
    assert page.locator(".odds [aria-selected=true]").get_attribute("data-at") != "0"
    tab_to("Attach text files")
    with page.expect_file_chooser():
        page.keyboard.press("Enter")
    tab_to("Step with the most accepted drafts")
    page.keyboard.press("Enter")
    page.wait_for_selector(".tree g.accepted")
    tab_to("Theme")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_axe_finds_nothing_in_what_is_shown(
    rich: tuple[ScriptedEngine, str], open_page: Open, flawless: Callable[[Any], None], size: Any, scheme: str
) -> None:
    page = open_page(rich[1], size, color_scheme=scheme, reduced_motion="reduce", bypass_csp=True)
    page.locator("#settings-toggle").click()
    page.get_by_label("Token probabilities").check()
    page.locator(".further summary").click()
    page.get_by_label("JSON schema").fill("{")
    page.get_by_label("Min-p").fill("2")
    flawless(page)
    page.get_by_label("JSON schema").fill("")
    page.get_by_label("Min-p").fill("")
    page.locator("#settings-toggle").click()
    ask(page, "All of it\n\nFile: a.txt\n```txt\ntext\n```")
    wait_for_end(page)
    page.wait_for_selector(".hl-keyword")
    page.locator(".user .chip summary").click()
    flawless(page)
    page.get_by_role("button", name="Probabilities").click()
    page.locator(".odds").focus()
    flawless(page)
    page.locator("#facts").click()
    flawless(page)
