"""What the page's scripts compute, without a browser: run by Node.js around a stand-in for the document."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from browsing import Run

DOCUMENT = """# Title

A paragraph with **bold**, *slanted*, ~~struck~~ and `code`, [a link](https://example.com/a) and https://example.com/b.
Its second line, with $x^2$ and \\(y\\).

```python
def f(x):  # text with ` and ```
    return x

    x = "```"
```

| a | b |
|:--|--:|
| 1 | 2 |

- one
- two
  1. inner

      indented

- [x] done

> quoted
> lines

$$
\\frac{a}{b}
$$

Setext
======

[the name]: https://example.com/c

[^1]: A note, see [the name].

~~~
tildes
~~~

Last, with [the name] and [^1].
"""
PIECES = [
    *"*_`~$|>#-+[]()!<&\\\n ",
    "\n\n",
    "```",
    "~~~",
    "- ",
    "1. ",
    "    ",
    "> ",
    "| a |\n|---|\n",
    "word",
    "$$",
    "\\[",
    "\\]",
    "[a]: b",
]


# -- settings ---------------------------------------------------------------------------------------------------------


def test_numbers_of_any_precision_are_sent_and_others_are_refused(run: Run) -> None:
    right = {"temperature": "0.65", "top_p": ".92", "min_p": "0.02", "repetition_penalty": "1.02", "top_k": "-1"}
    wrong = {"temperature": "0,5", "top_p": "0", "min_p": "1.1", "seed": "1.5", "max_tokens": "0", "top_k": "many"}
    script = """
    const { read, requestFields } = await import("./sampling.js");
    const problems = Object.entries(data.wrong).map(([name, typed]) => [name, Boolean(read(name, typed).problem)]);
    const [sent, rest] = [data.right, data.wrong].map((one) => requestFields(one));
    give({ sent, rest, problems: Object.fromEntries(problems) });"""
    found = run(script, {"right": right, "wrong": wrong})
    assert found["sent"] == {name: float(value) for name, value in right.items()}
    assert found["problems"] == dict.fromkeys(wrong, True) and found["rest"] == {}


def test_fields_that_are_texts(run: Run) -> None:
    settings = {
        "stop": "END\n\\n\\n", "schema": '{"type": "object"}', "reasoning_effort": "low", "logprobs": "on",
        "extra": '{"logit_bias": {"5": -100}, "temperature": 0.1}', "temperature": "1", "mode": "both",
    }  # fmt: skip
    script = 'const { requestFields } = await import("./sampling.js"); give(requestFields(data));'
    schema = {"name": "answer", "strict": True, "schema": {"type": "object"}}
    assert run(script, settings) == {
        "stop": ["END", "\n\n"], "response_format": {"type": "json_schema", "json_schema": schema},
        "reasoning_effort": "low", "logprobs": True, "top_logprobs": 5, "logit_bias": {"5": -100}, "temperature": 0.1,
    }  # fmt: skip
    wrong = {"extra": '{"messages": []}', "schema": "[1]"}
    script = 'const { read } = await import("./sampling.js"); give(Object.entries(data).map((one) => read(...one)));'
    assert all("problem" in one for one in run(script, wrong))


def test_mistakes_in_json_are_found_where_they_are(run: Run) -> None:
    """Against Python's reader: which texts are right, and for some mistakes the place."""
    chance = random.Random(3)
    valid = '{"a": [1, -2.5e3, true, null, "x\\u00e9\\n"], "b": {"c": {}, "d": []}}'
    texts = [valid, ""]
    for _ in range(400):
        at = chance.randrange(len(valid))
        texts.append(valid[:at] + chance.choice(["", *'{}[]",:1e-x \n']) + valid[at + 1 :])
    script = 'const { jsonProblem } = await import("./sampling.js"); give(data.map(jsonProblem));'
    problems = run(script, texts)
    for text, problem in zip(texts, problems, strict=True):
        try:
            json.loads(text)
            right = True
        except json.JSONDecodeError:
            right = False
        assert (problem is None) == right, (text, problem)
    placed = ['{"a" 1}', "[1, 2", '{"a":\n  {"b": }}', '{"a": 1} x', "[1,\n\n?]"]
    for text, problem in zip(placed, run(script, placed), strict=True):
        with pytest.raises(json.JSONDecodeError) as raised:
            json.loads(text)
        assert problem.startswith(f"line {raised.value.lineno}, column {raised.value.colno}:"), (text, problem)


# -- markdown ---------------------------------------------------------------------------------------------------------

STREAM = """
const { MarkdownView, blocks } = await import("./markdown.js");
const view = (parts) => {
  const before = document.made;
  const root = document.createElement("div"), shown = new MarkdownView(root);
  let text = "";
  for (const part of parts) shown.show(text += part);
  return { tree: root.toJSON(), made: document.made - before };
};
"""


@pytest.mark.slow
def test_a_text_that_grows_becomes_what_it_is_at_once(run: Run) -> None:
    chance = random.Random(5)
    texts = [DOCUMENT, DOCUMENT.replace("\n", "\r\n")]
    texts += ["".join(chance.choices(PIECES, k=chance.randrange(5, 60))) for _ in range(300)]
    cut = []
    for text in texts:
        places = sorted(chance.sample(range(1, len(text)), k=min(len(text) - 1, 12)))
        cut.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
    script = (
        STREAM
        + """
    give(data.map((parts) => {
      const text = parts.join(""), read = blocks(text.replace(/\\r\\n?/g, "\\n"));
      return [view([text]).tree, view(parts).tree, read.reduce((sum, { raw }) => sum + raw.length, 0)];
    }));"""
    )
    for parts, (at_once, grown, raw) in zip(cut, run(script, cut), strict=True):
        text = "".join(parts)
        assert raw == len(text.replace("\r\n", "\n")), repr(text)
        if "[a]:" not in text:  # what a name stands for may come after its use
            assert grown == at_once, parts


@pytest.mark.slow
def test_a_long_text_that_grows_is_not_made_again_and_again(run: Run) -> None:
    """Hundreds of lines in 75 parts: elements that were made, against those of the text at once."""
    table = "| a | b |\n|---|---|\n" + "| 1 | `2` |\n" * 600
    code = "```python\n" + "x = 1  # a line\n" * 600 + "```\n"
    texts = [DOCUMENT * 15, code, "- an *item*\n" * 600, table]
    parts = [[text[i : i + len(text) // 75] for i in range(0, len(text), len(text) // 75)] for text in texts]
    found = run(STREAM + "give(data.map((parts) => [view([parts.join('')]).made, view(parts).made]));", parts)
    for at_once, grown in found:
        assert grown < 12 * at_once, "each block is made again as long as it is one of the last two"


HOSTILE = [
    "<img src=x onerror=alert(1)><script>alert(2)</script>",
    "[a](javascript:alert(1)) [b](JaVaScRiPt:x) [c](data:text/html,x) [x](//evil.example)",
    "[a]\n\n[a]: javascript:alert(1)",
    "<javascript:alert(1)> <a href='javascript:x'>y</a>",
    "![x](https://evil.example/a.png)",
    "```<img onerror=x>\n<script>\n```",
    "| <svg/onload=x> |\n|---|\n| <iframe src=x> |",
    "[^<b>]: <b>\n\n[^<b>]",
    "&lt;script&gt; &#60;b&#62; &#x3c;i&#x3e;",
    "$\\href{javascript:x}{y}$",
    "<!-- x --> <style>*{}</style> <math><mi>",
]


def test_nothing_of_an_answer_becomes_markup(run: Run) -> None:
    allowed = {
        "a", "blockquote", "br", "button", "code", "del", "div", "em", "h3", "h4", "h5", "h6", "hr", "input", "li",
        "ol", "p", "pre", "span", "strong", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul",
    }  # fmt: skip
    harmless = {
        "class", "tabindex", "role", "aria-label", "href", "target", "rel", "type", "disabled", "checked", "scope",
        "start",
    }  # fmt: skip
    script = """
    const { markdown } = await import("./markdown.js");
    give(data.map((text) => markdown(text).map((one) => one.toJSON())));"""

    def check(node: Any) -> None:
        if isinstance(node, str):
            return
        tag, attributes, children = node
        assert tag in allowed and set(attributes) <= harmless, node
        assert tag != "a" or attributes["href"].startswith(("https://", "http://", "mailto:"))
        for child in children:
            check(child)

    for text, found in zip([*HOSTILE, DOCUMENT], run(script, [*HOSTILE, DOCUMENT]), strict=True):
        assert found or not text
        for node in found:
            check(node)


# Lines that made patterns try the third and the fourth power of their length.
SLOW = {
    "a divider": "'|a|\\n|' + ' '.repeat(n) + '-'.repeat(n) + ' '.repeat(n) + 'x'",
    "a heading": "'#' + ' '.repeat(5 * n) + '\\rx'",
    "emphasis": "'**_a '.repeat(20 * n)",
    "spaces": "'|a|\\n|' + ' '.repeat(300 * n) + '-' + ' '.repeat(300 * n) + 'x'",
}


@pytest.mark.timing
@pytest.mark.parametrize("text", SLOW.values(), ids=SLOW)
def test_an_answer_is_drawn_in_linear_time(run: Run, text: str) -> None:
    """The shortest of several times for texts of one and of two lengths, however fast the machine is."""
    script = f"""
    const {{ markdown }} = await import("./markdown.js");
    const once = (n) => {{
      const text = {text}, from = performance.now();
      for (let i = 0; i < 20; i += 1) markdown(text);
      return performance.now() - from;
    }};
    give([30, 60].map((n) => Math.min(...Array.from({{ length: 5 }}, () => once(n)))));"""
    short, long = run(script, None)
    assert long < 4 * short + 1, (short, long)


def test_long_cells_and_items_are_taken_as_they_are(run: Run) -> None:
    cell = "**long**" + "x" * 10000
    lines = f"| a | b |\n  :-: |---\n| **short** | {cell} |\n\n- **short**\n- {cell}\n\n# C# #\n\n| a |\n| : |"
    script = 'const { markdown } = await import("./markdown.js"); give(markdown(data).map((one) => one.toJSON()));'
    found = json.dumps(run(script, lines))
    assert found.count('["strong", {}, ["short"]]') == 2 and found.count(f'["{cell}"]') == 2
    assert '["h3", {}, ["C#"]]' in found and found.count('["table"') == 1


def test_what_is_a_formula_and_what_is_not(run: Run) -> None:
    are = {"$x$": "x", "$$a\nb$$": "a\nb", "\\(x\\)": "x", "\\[x\\]": "x", "$a_{1} \\$ b$ c": "a_{1} \\$ b"}
    are_not = ["$5 and $10", "$ x$", "$x $", "$$", "\\(x", "$a\n\nb$", "$$a\n\nb$$", "$1$2", "x$"]
    script = (
        'const { takeFormula } = await import("./math.js"); give(data.map((text) => takeFormula(text)?.tex ?? null));'
    )
    assert run(script, [*are, *are_not]) == [*are.values(), *[None] * len(are_not)]


# -- files ------------------------------------------------------------------------------------------------------------


def test_files_of_a_question_are_found_again_in_it(run: Run) -> None:
    files = [
        {"name": "a.py", "text": "x = 1\n"},
        {"name": "notes with `ticks`.md", "text": "```\n````\ncode\n````\n```\n\nFile: b\n"},
        {"name": "no ending", "text": "\n\nlast\n"},
    ]
    script = """
    const { withFiles, splitFiles } = await import("./attachments.js");
    give(data.map(([words, files]) => splitFiles(withFiles(words, files))));"""
    asked = [["Look at\n\nFile: nothing", files], ["", files[:1]], ["no files", []], ["File: x\n```\nopen", []]]
    assert run(script, asked) == [{"words": words, "files": given} for words, given in asked]


def test_pictures_go_before_the_words_of_a_question(run: Run) -> None:
    script = """
    const { contentOf } = await import("./pictures.js");
    give(data.map(contentOf));"""
    url = "data:image/png;base64,AA=="
    picture = {"type": "image_url", "image_url": {"url": url}}
    text = {"type": "text", "text": "a"}
    asked = [
        {"content": "a"}, {"content": "a", "images": []}, {"content": "a", "images": [{"name": "x", "url": url}]},
        {"content": "", "images": [{"url": url}] * 2}, {"content": "a", "images": [{"url": "https://example.com"}, 5]},
        {"content": "a", "images": "odd"},
    ]  # fmt: skip
    assert run(script, asked) == ["a", "a", [picture, text], [picture] * 2, "a", "a"]


def test_a_trace_in_a_file_is_the_trace(run: Run) -> None:
    node = {"parent": None, "id": 5, "text": " b", "by": "lookup", "survival": 0.5, "verified": True, "accepted": True}
    tokens = [{"id": 5, "text": " b"}, {"id": 0, "text": "<e>", "special": True}]
    steps = [
        {"step": 0, "seconds": 0.1, "requests": 1, "tokens": [{"id": 1, "text": "a"}], "nodes": []},
        {"step": 1, "seconds": 0.01, "requests": 1, "tokens": tokens, "nodes": [node]},
        {"step": 4, "seconds": 0.01, "requests": 1, "tokens": tokens[:1], "nodes": []},
    ]
    script = """
    const { Trace, readTrace, traceFile } = await import("./trace.js");
    const trace = new Trace(true);
    trace.add(data.steps);
    const file = traceFile(trace, { version: "9", model: "m", algorithm: "NGRAM" });
    const again = readTrace(traceFile(readTrace(file), { model: "another" }));
    const refusal = (text) => { try { readTrace(text); return ""; } catch (error) { return error.message; } };
    give({ file: JSON.parse(file), again, perStep: again.perStep, refused: data.wrong.map(refusal) });"""
    head = {"format": "draftwing-trace", "version": 1}
    orphan = {**steps[1], "nodes": [{**node, "parent": 0}]}
    bad = [{}, {**head, "version": 2}, {**head, "steps": []}, {**head, "steps": [steps[0], orphan]}]
    found = run(script, {"steps": steps, "wrong": ["nonsense", *map(json.dumps, bad)]})
    assert found["file"]["steps"] == found["again"]["steps"] == steps
    assert (found["file"]["draftwing"], found["file"]["model"], found["again"]["source"]["model"]) == ("9", "m", "m")
    assert (found["again"]["forwards"], found["again"]["tokens"], found["again"]["lost"]) == (2, 3, 2)
    assert found["perStep"] == 1.5 and all(found["refused"]) and "Entry 1" in found["refused"][-1]


def test_images_of_a_prompt_are_spans(run: Run) -> None:
    """Each with its picture, where it is known which that is."""
    script = """
    const { readTrace } = await import("./trace.js");
    const { spans } = await import("./pictures.js");
    const shown = (name) => ({ name, url: `data:image/png;${name}` });
    const whole = (images, pictures) => spans(images, pictures.map(shown));
    const fits = data.map((images) => {
      const step = { step: 0, seconds: 0.1, requests: 1, tokens: [{ id: 1, text: "a" }], nodes: [], images };
      const file = { format: "draftwing-trace", version: 1, drafts: true, steps: [step] };
      try { return readTrace(JSON.stringify(file)).steps[0].images; } catch { return "none"; }
    });
    give([whole([300, 64], ["a", "b"]), whole([1200], []), whole([64, 64, 64], ["a"]), whole([], []), fits]);"""
    both, alone, tiles, none, fits = run(script, [[300], None, [0], ["<b>"], 3])
    words = [["small", {}, [f"image, {count} tokens"]] for count in ("300", "64")]
    for (_, _, (image, text)), name, expected in zip(both, "ab", words, strict=True):
        assert image[:2] == ["img", {"src": f"data:image/png;{name}", "alt": name, "title": name}] and text == expected
    assert alone == [["small", {}, ["image, 1,200 tokens"]]] and none == []
    assert tiles[0][2][0][0] == "img" and tiles[1] == ["small", {}, ["3 images or tiles, 192 tokens"]]
    assert fits == [[300], "none", "none", "none", "none"]


def test_figures_of_an_answer(run: Run) -> None:
    script = """
    const { figures } = await import("./answers.js");
    const { tokensOf } = await import("./context.js");
    give([figures(data), tokensOf([{ answers: [data] }, { content: "" }]), tokensOf([{ content: "" }])]);"""
    answer = {
        "drafts": True, "tokens": 101, "seconds": 2, "perStep": 2.5, "promptTokens": 40, "cachedTokens": 30,
        "firstSeconds": 0.25, "finish": "length",
    }  # fmt: skip
    words, used, nothing = run(script, answer)
    for part in (
        "101 tokens",
        "50 tokens/s",
        "2.50 per step",
        "prompt 40 (30 cached)",
        "first token after 0.25 s",
        "cut off",
    ):
        assert part in words
    assert used == 141 and nothing is None


KEPT = """
const { run, newAnswer, resumed } = await import("./answers.js");
const { choose } = await import("./api.js");
globalThis.sessionStorage = { getItem: () => null };
const wait = globalThis.setTimeout;
globalThis.setTimeout = (what, time) => wait(what, time / 100);
const asked = [], bytes = (text) => new TextEncoder().encode(text);
const replies = [...data.replies];
globalThis.fetch = async (path, { method = "GET", headers, signal }) => {
  if (signal?.aborted) throw Object.assign(new Error(), { name: "AbortError" });
  asked.push([method, path, headers["x-draftwing-keep"] ?? null]);
  if (method === "DELETE") return { ok: true, status: 200 };
  const reply = replies.shift();
  if (reply === null) throw new TypeError("no connection");
  if (typeof reply === "number") return { ok: false, status: reply, json: async () => ({ message: "it is gone" }) };
  const pieces = [...reply];
  const read = async () => {
    if (pieces[0] === "stop") { control.abort(); throw Object.assign(new Error(), { name: "AbortError" }); }
    return pieces.length ? { value: bytes(pieces.shift()), done: false } : { done: true };
  };
  return { ok: true, status: 200, body: { getReader: () => ({ read }) } };
};
const control = new AbortController();
const kept = { id: "an-id-of-the-answer", model: data.model ?? null };
const answer = Object.assign(newAnswer(true, false), { kept }, data.before);
const settle = data.before ? resumed(answer) : () => {};
if (data.model) choose("another");
if (data.stopped) wait(() => control.abort(), data.stopped);
await run(answer, data.body, control.signal, () => {});
settle();
choose(null);
globalThis.setTimeout = wait;
give({ asked, ...answer, kept: answer.kept?.id ?? null });
"""


def said(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}, 'finish_reason': None}]})}\n\n"


END = 'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


def test_an_answer_whose_connection_breaks_off_is_followed(run: Run) -> None:
    first, second, third = said("a"), said("b"), said("c")
    replies = [[first, second + third[:9]], None, [third, END]]
    found = run(KEPT, {"body": {"messages": []}, "replies": replies})
    assert (found["content"], found["finish"], found["kept"]) == ("abc", "stop", None) and "error" not in found
    assert found["asked"] == [
        ["POST", "./v1/chat/completions", "an-id-of-the-answer"],
        ["GET", "./ui/answers/an-id-of-the-answer?after=2", None],
        ["GET", "./ui/answers/an-id-of-the-answer?after=2", None],
    ]


def test_an_answer_of_a_page_that_was_closed_is_read_from_its_begin(run: Run) -> None:
    found = run(KEPT, {"body": None, "replies": [[said("a") + said("b"), END]]})
    assert found["content"] == "ab" and found["asked"] == [["GET", "./ui/answers/an-id-of-the-answer?after=0", None]]


def test_what_the_server_has_no_longer_and_who_stops(run: Run) -> None:
    gone = run(KEPT, {"body": {"messages": []}, "replies": [[said("a")], 404]})
    assert gone["content"] == "a" and gone["error"] == "The connection to the server broke off."
    lost = run(KEPT, {"body": {"messages": []}, "replies": [None] * 4})
    assert lost["error"] == "The server does not answer. Is it still running?" and len(lost["asked"]) == 4
    assert (gone["kept"], lost["kept"]) == (None, "an-id-of-the-answer"), (
        "it is asked for when the page is opened again"
    )
    stopped = run(KEPT, {"body": {"messages": []}, "replies": [[said("a"), "stop"]]})
    assert (stopped["content"], stopped["finish"]) == ("a", "stopped") and "error" not in stopped
    assert stopped["asked"][-1] == ["DELETE", "./ui/answers/an-id-of-the-answer", None]


def test_a_connection_that_breaks_off_again_and_again(run: Run) -> None:
    """As long as something comes in between: only what is lost four times in a row is given up."""
    replies = [[said(letter)] for letter in "abcdefghi"] + [[END]]
    found = run(KEPT, {"body": {"messages": []}, "replies": replies})
    assert (found["content"], found["finish"]) == ("abcdefghi", "stop") and "error" not in found


def test_an_error_of_the_answer_is_shown_when_the_connection_broke_off_before(run: Run) -> None:
    error = f"data: {json.dumps({'error': {'message': 'the engine stopped'}})}\n\n"
    found = run(KEPT, {"body": {"messages": []}, "replies": [[said("a")], [error]]})
    assert (found["content"], found["error"], found["kept"]) == ("a", "The engine stopped", None)


def test_who_stops_while_the_connection_is_lost_does_not_wait(run: Run) -> None:
    script = KEPT.replace("wait(what, time / 100)", "0")  # no time is ever over
    found = run(script, {"body": {"messages": []}, "replies": [[said("a")]], "stopped": 50})
    assert found["finish"] == "stopped" and found["asked"][-1][0] == "DELETE"


def test_an_answer_is_asked_of_its_own_model(run: Run) -> None:
    """Where the page was opened again with another one."""
    before = {"content": "a", "reasoning": "", "finish": "stopped"}
    found = run(KEPT, {"body": None, "replies": [[said("a"), "stop"]], "before": before, "model": "first"})
    path = "./ui/answers/an-id-of-the-answer"
    assert [one[:2] for one in found["asked"]] == [
        ["GET", f"{path}?after=0&model=first"],
        ["DELETE", f"{path}?model=first"],
    ]


@pytest.mark.parametrize(
    ("replies", "text", "error", "kept"),
    [
        ([404], "abc", None, False),
        ([None] * 4, "abc", None, True),
        ([[said("ab")], [], [], []], "abc", None, True),
        ([[said("abcde")], 404], "abcde", "The connection to the server broke off.", False),
    ],
)
def test_no_text_of_an_answer_is_lost_when_it_is_followed(
    run: Run, replies: list[Any], text: str, error: str | None, kept: bool
) -> None:
    """What is longer stays: what the page had, or what the server had of an answer that did not end."""
    before = {"content": "abc", "reasoning": "", "finish": "stopped"}
    found = run(KEPT, {"body": None, "replies": replies, "before": before})
    assert (found["content"], found.get("error"), found["kept"] is not None) == (text, error, kept)
    assert found["running"] is False and found.get("finish") == (None if error else "stopped")


def test_a_line_over_hours_with_marks(run: Run) -> None:
    script = """
    const { timeline } = await import("./charts.js");
    const points = [[100, 2], [160, 2], [400, 4]];
    give([timeline(points, [[250, "head 2"], [40, "too old"]], "words"), timeline([[1, 2]], [], "")]);"""
    (tag, attributes, children), none = run(script, None)
    assert tag == "svg" and attributes["aria-label"] == "words"
    area, line, *marks = children
    assert line[1]["d"] == "M0.00 21.00 L20.00 21.00 L100.00 3.00" and area[1]["class"] == "area"
    ((_, mark, title),) = marks
    assert mark["d"] == "M50.00 0 V40" and title == [["title", {}, ["head 2"]]]
    assert none[0] == "p"


# -- several models ----------------------------------------------------------------------------------------------------

MODELS = [
    {"name": "org/a:Q4", "state": "loaded", "failure": None, "requests": 1, "waiting": 0, "memory": 5e8, "files": 4e8},
    {"name": "b", "state": "unloaded", "failure": "no room", "requests": 0, "waiting": 2, "memory": 0, "files": 2e9},
]
# A page with a document and a server: `asked` is what the server was asked, `reply` what it answers.
PAGE = """
const elements = {}, listeners = {}, links = ["chat", "engine", "models"].map((view) => document.createElement("a"));
["chat", "engine", "models"].forEach((view, at) => { links[at].dataset.view = view; });
document.getElementById = (id) => (elements[id] ??= document.createElement("div"));
document.querySelector = () => null;
document.querySelectorAll = () => links;
document.addEventListener = globalThis.addEventListener = (kind, what) => { listeners[kind] = what; };
globalThis.location = { search: data.search, hash: "" };
globalThis.sessionStorage = { getItem: () => null };
const asked = [];
globalThis.fetch = async (path, { method = "GET", body }) => {
  asked.push([method, path, body ?? null]);
  const said = data.replies[path.split("?")[0]];
  return said ? { ok: true, status: 200, json: async () => structuredClone(said) }
    : { ok: false, status: 503, json: async () => ({ error: "it does not fit" }) };
};
const all = (one, tag) => [one, ...(one.children ?? [])].flatMap((child) => (
  child !== one ? all(child, tag) : child.tag === tag ? [child] : []));
const settle = async () => { for (let i = 0; i < 50; i++) await new Promise((resolve) => setImmediate(resolve)); };
"""


def test_models_of_a_server_that_has_several(run: Run) -> None:
    script = f"""{PAGE}
    await import("./main.js?several");
    await settle();
    const before = asked.length;
    const buttons = all(elements.models, "button");
    await buttons[1].on.click();
    await buttons[0].on.click();
    document.hidden = true;
    listeners.visibilitychange();
    give({{
      shown: links.map((one) => [one.dataset.view, !one.hidden, "data-shown" in elements[one.dataset.view].attributes]),
      names: all(elements.models, "a").map((one) => [one.textContent, one.attributes.href]),
      buttons: buttons.map((one) => one.textContent), text: elements.models.textContent,
      acts: asked.slice(before).filter(([method]) => method === "POST"), first: asked[0],
    }});"""
    memory = {"budget": 1e9, "free": 5e9}
    replies = {"./ui/info": {"version": "1", "models": MODELS, "memory": memory}, "./models/load": {"success": True}}
    found = run(script, {"search": "", "replies": replies})
    assert found["first"] == ["GET", "./ui/info", None]
    assert found["shown"] == [["chat", False, False], ["engine", False, False], ["models", True, True]]
    assert found["names"] == [["org/a:Q4", "?model=org%2Fa%3AQ4#chat"], ["b", "?model=b#chat"]]
    assert found["buttons"] == ["Unload", "Load"]
    assert found["acts"] == [
        ["POST", "./models/load", '{"model":"b"}'], ["POST", "./models/unload", '{"model":"org/a:Q4"}'],
    ]  # fmt: skip
    for words in ("0.50 GB of 1.00 GB", "not loaded: no room", "0 + 2 waiting", "It does not fit"):
        assert words in found["text"], words


def test_a_model_that_is_chosen_is_loaded_and_asked(run: Run) -> None:
    script = f"""{PAGE}
    await import("./main.js?chosen");
    await settle();
    document.hidden = true;
    listeners.visibilitychange();
    const {{ choose }} = await import("./api.js");
    choose(null);
    const chosen = all(elements.models, "a").map((one) => one.attributes["aria-current"] ?? null);
    give({{ asked, text: elements.models.textContent, chosen }});"""
    replies = {"./ui/info": {"version": "1", "models": MODELS, "memory": {"budget": None, "free": 5e9}}}
    found = run(script, {"search": "?model=b", "replies": replies})
    assert found["asked"][:2] == [
        ["GET", "./ui/info", None], ["POST", "./api/generate?model=b", '{"model":"b","stream":false}'],
    ]  # fmt: skip
    assert "It does not fit" in found["text"] and found["chosen"] == [None, "true"]
