"""Log probabilities of /v1/responses: of the tokens of output_text, and of no marker, reasoning or call."""

from __future__ import annotations

import itertools
from typing import Any

import fake_engine
import openai
import pytest
from scripted import ScriptedEngine

from draftwing.core import TokenLogprobs

SCRIPTED = dict(reasoning="qwen3", tools="qwen25")
LOGPROBS: list[Any] = ["message.output_text.logprobs"]
CALL = '<tool_call>\n{"name": "now", "arguments": {"a": "the"}}\n</tool_call>'
TOOLS: list[Any] = [{"type": "function", "name": "now", "parameters": None, "strict": None}]


def text(entries: Any) -> str:
    return bytes(byte for entry in entries for byte in entry.bytes).decode()


BOTH = {"include": LOGPROBS, "top_logprobs": 2}
CALLED = "<think>\nthe\n</think>\n\nthe " + CALL + " tool_call the"
CASES: list[tuple[str, list[str], dict[str, Any]]] = [
    ("é😀 one two", ["é😀 one two"], {"include": LOGPROBS}), ("é😀 one two", ["é😀 one two"], {"top_logprobs": 2}),
    ("<think>\nsay the think\n</think>\n\nthe end of think", ["the end of think"], BOTH),
    ("k\n" + CALL, ["k"], BOTH), (CALLED, ["the", " tool_call the"], BOTH), (CALL, [], BOTH),
    ("<think>\nnever closed", [], BOTH), ("", [""], BOTH),
]  # fmt: skip


OTHERS = [pytest.param(*CASES[i], marks=pytest.mark.slow) for i in (2, 3, 5, 6, 7)]


@pytest.mark.parametrize(("script", "said", "more"), [*CASES[:2], CASES[4], *OTHERS])
def test_entries_are_those_of_the_text(
    api: openai.OpenAI, scripted: ScriptedEngine, script: str, said: list[str], more: dict[str, Any]
) -> None:
    scripted.script = script
    body: dict[str, Any] = {"model": "m", "input": "hi", "tools": TOOLS, **more}
    whole = api.responses.create(**body)
    parts = [item.content[0] for item in whole.output if item.type == "message"]
    assert [part.text for part in parts] == said
    assert [text(part.logprobs) for part in parts] == said
    assert whole.top_logprobs == more.get("top_logprobs", 0)
    for part in parts:
        for entry in part.logprobs:
            assert len(entry.top_logprobs) == more.get("top_logprobs", 0)
    events = list(api.responses.create(**body, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    streamed = [entry for event in deltas for entry in event.logprobs]
    joined = [entry for part in parts for entry in part.logprobs]
    assert [(entry.token, entry.logprob) for entry in streamed] == [(entry.token, entry.logprob) for entry in joined]
    ended = [event.logprobs for event in events if event.type == "response.output_text.done"]
    assert [len(one) for one in ended] == [len(part.logprobs) for part in parts]
    begun = [event.part for event in events if event.type == "response.content_part.added"]
    assert all(not getattr(part, "logprobs", None) for part in begun)


SPLIT = "<think>\nnow\n</think>\n\nnow"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "places"),
    [
        (SPLIT + CALL, [[len(SPLIT) - 3 + i for i in range(3)]]),
        ("tool" + CALL, [[0, 1, 2, 3]]),
        ("hello " + CALL + "bye", [[0, 1, 2, 3, 4], [len("hello " + CALL) + i for i in range(3)]]),
        ("a a" + CALL + " a " + CALL + "a", [[0, 1, 2], [len("a a" + CALL) + 1], [len("a a" + CALL + " a " + CALL)]]),
    ],
    ids=["marker", "tool", "blank", "repeated"],
)
def test_entries_are_of_the_right_place(
    api: openai.OpenAI, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, script: str,
    places: list[list[int]], stream: bool,
) -> None:  # fmt: skip
    """Where the same text is elsewhere, too: in reasoning, in a marker, in a call. A log probability is the place."""
    count = itertools.count()
    monkeypatch.setattr(fake_engine, "logprob", lambda token, wanted: TokenLogprobs.of(float(next(count))))
    scripted.script = script
    body: dict[str, Any] = {"model": "m", "input": "hi", "tools": TOOLS, "include": LOGPROBS}
    asked: Any = api.responses.create(**body, stream=stream)
    whole = list(asked)[-1].response if stream else asked
    found = [[entry.logprob for entry in item.content[0].logprobs] for item in whole.output if item.type == "message"]
    blanks = [[place for place in one if script[int(place)] != " "] for one in found]
    expected = [[place for place in one if script[place] != " "] for one in places]
    assert blanks == expected


def test_without_being_asked_for_there_are_none(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = "one"
    whole = api.responses.create(model="m", input="hi", top_logprobs=0)
    assert whole.output[0].content[0].logprobs == [] and scripted.requests[-1].logprobs is None


@pytest.mark.parametrize("top", [-1, 21, "x"])
def test_how_many_there_may_be(api: openai.OpenAI, top: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        api.responses.create(model="m", input="hi", top_logprobs=top, include=LOGPROBS)


def test_they_are_kept_with_the_response(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = "abc"
    made = api.responses.create(model="m", input="hi", include=LOGPROBS, top_logprobs=1)
    assert api.responses.retrieve(made.id).output == made.output
    assert api.responses.create(model="m", input="go on", previous_response_id=made.id).status == "completed"
