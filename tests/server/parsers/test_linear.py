"""What a client sends, and has a model write, is read in time that grows as the text does, in one piece or in many.

Characters are counted that are copied or searched, not seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_engine import byte_tokenizer

from draftwing.server.conversation import Conversation
from draftwing.server.parsers.call import InputReader
from draftwing.server.parsers.harmony import HarmonyReader, harmony_messages
from draftwing.server.parsers.message import MessageStyle
from draftwing.server.parsers.reasoning import REASONING_STYLES, ReasoningParser
from draftwing.server.parsers.tools import TOOL_STYLES, ToolParser

CALL = '{"name":"f","arguments":{"a":1}}'
MESSAGE = "<|channel|>%s<|message|>a<|end|><|start|>assistant"
CASES: dict[str, tuple[str, Callable[[int], str]]] = {
    "whitespace behind a marker": ("hermes", lambda n: "<tool_call>" + " " * n),
    "and another one": ("mistral", lambda n: "[TOOL_CALLS]" + "\n" * n),
    "in an array": ("json", lambda n: "[" + " " * n + "x"),
    "before and between texts": ("hermes", lambda n: (" " * 40 + "x") * (n // 40)),
    "markers": ("hermes", lambda n: "<tool_call>x" * n),
    "braces": ("hermes", lambda n: "<tool_call>{" * n),
    "names": ("mistral", lambda n: "[TOOL_CALLS]ff" * n),
    "an array of calls": ("json", lambda n: "[" + f"{CALL}, " * n),
    "calls": ("hermes", lambda n: f"<tool_call>{CALL}</tool_call>\n" * n),
    "calls without an end": ("hermes", lambda n: f"<tool_call>{CALL}x" * n),
    "ends without calls": ("hermes", lambda n: f"<tool_call>{CALL}x" + "</tool_call>" * n),
    "brackets too many": ("hermes", lambda n: f"<tool_call>{CALL}" + "} ]" * n),
    "commas behind a call": ("hermes", lambda n: f"<tool_call>{CALL}" + ", ;" * n),
    "a call that broke": ("hermes", lambda n: '<tool_call>{"name":"f","arguments":{"a":x' + " </tool_" * n),
    "calls that break": ("mistral", lambda n: '[TOOL_CALLS]f[ARGS]{"a":x' * n),
    "ids": ("mistral", lambda n: ("[TOOL_CALLS]f[CALL_ID]" + "a" * 40) * n),
    "a fence": ("llama3", lambda n: " " * n + "```json" + "\n" * n),
    "blanks behind a comma": ("hermes", lambda n: '<tool_call>{"name":"f","arguments":{"a":1,' + " " * n),
    "arguments": ("llama3", lambda n: '{"name": "f", "parameters": {"a": "' + "b" * n),
    "whitespace in reasoning": ("reasoning", lambda n: "<think>a" + " \n" * n + "b</think>c"),
    "and before it": ("reasoning", lambda n: "\n" * n + "<think>a"),
    "empty messages": ("harmony", lambda n: "<|message|><|end|>" * n),
    "ends": ("harmony", lambda n: "<|call|>" * n),
    "thoughts": ("harmony", lambda n: MESSAGE % "analysis" * n),
    "texts": ("harmony", lambda n: MESSAGE % "final" * n),
    "blanks before an input": ("custom", lambda n: '{"input"' + " " * n + ': "' + "a" * n),
    "and before its object": ("custom", lambda n: "\n \t" * n + '{"input": "a\\nb"}'),
    "escapes of an input": ("custom", lambda n: '{"input": "' + '\\ud83d\\ude00\\"' * n),
    "calls of functions": ("harmony", lambda n: MESSAGE % "commentary to=functions.f" * n),
}


class Counted(str):
    """A text that counts what is done with it and with what is made of it."""

    work = 0

    @classmethod
    def _made(cls, text: str) -> Counted:
        cls.work += len(text)
        return cls(text)

    def __getitem__(self, index: Any) -> Counted:
        return self._made(super().__getitem__(index))

    def __add__(self, other: str) -> Counted:
        return self._made(super().__add__(other))

    def __radd__(self, other: str) -> Counted:
        return self._made(str.__add__(other, self))

    def lstrip(self, chars: str | None = None, /) -> Counted:
        return self._made(super().lstrip(chars))

    def rstrip(self, chars: str | None = None, /) -> Counted:
        return self._made(super().rstrip(chars))

    def find(self, sub: str, start: Any = 0, end: Any = None, /) -> int:
        found = super().find(sub, start, end)
        Counted.work += (found if found >= 0 else min(len(self), len(self) if end is None else end)) - start
        return found


def work(kind: str, text: str, size: int) -> int:
    """Characters that were copied or searched while the text came in pieces of a size, 0: as one."""
    reader: Any
    if kind == "harmony":
        reader = HarmonyReader(MessageStyle(start="free", names=("f",), harmony=True), byte_tokenizer())
        push = lambda piece, final: reader.push(piece, final, [])  # noqa: E731
    elif kind == "custom":
        inputs = InputReader()
        push = lambda piece, final: inputs.push(piece)  # noqa: E731
    elif kind == "reasoning":
        push = ReasoningParser(REASONING_STYLES["qwen3"], "free").push
    else:
        reader = ToolParser(TOOL_STYLES[kind], ("f", "ff"))
        push = reader.push
    pieces = [text[i : i + size] for i in range(0, len(text), size)] if size else [text]
    Counted.work = 0
    for i, piece in enumerate(pieces):
        push(Counted(piece), i == len(pieces) - 1)
    return Counted.work


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 7])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.covering
def test_the_work_grows_as_the_text_does(case: str, size: int) -> None:
    kind, text = CASES[case]
    once, twice = (work(kind, text(n), size) for n in (400, 800))
    assert once > 0 and twice <= 2.2 * once + 2000, f"{once} characters, then {twice}"


@pytest.mark.parametrize("add", [Conversation.answer, Conversation.think])
def test_the_pieces_of_what_the_assistant_said_are_joined_once(add: Callable[[Conversation, str], None]) -> None:
    found = Conversation()
    Counted.work = 0
    for _ in range(100):
        add(found, Counted("ab"))
    (message,) = found.done()
    assert "ab" * 100 in message.values()
    assert Counted.work <= 200, f"{Counted.work} characters were copied one piece after another"


class Id(str):
    """A call's id that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Id.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("turns", [1, 20])
def test_results_find_their_calls_at_once(order: int, turns: int) -> None:
    count, given, expected = 400, list[dict[str, Any]](), list[str]()
    for turn in range(turns):
        names = [f"{turn}.{i}" for i in range(count // turns)]
        calls = [{"id": Id(name), "function": {"name": name, "arguments": {}}} for name in names]
        given.append({"role": "assistant", "tool_calls": calls})
        given += [{"role": "tool", "tool_call_id": Id(name), "content": name} for name in names[::order]]
        # The first call is written before anything has a result.
        rest = [name for name in names[::order] if name != names[0]]
        reported = {name: [f"call {name}", name] for name in rest} | {names[0]: [names[0]]}
        expected += [f"call {names[0]}", *(text for name in names[::order] for text in reported[name])]
    Id.compared = 0
    found = harmony_messages(given)
    assert Id.compared <= 4 * count
    said = [f"call {one['tool_calls'][0]['id']}" if "tool_calls" in one else one["content"] for one in found]
    assert said == expected
