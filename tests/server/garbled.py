"""Answers and histories as no model and no client should write them, made up from what they do write."""

from __future__ import annotations

import json
import random
from typing import Any

NAMES = ("f", "ff", "get_weather")
TEXTS = ("é", "😀", "\u2028", "\x85", "a b", "\n", "\\", '"', "<", "", "x" * 30)
# What is no character, no number or no JSON, as it stands in JSON.
VALUES = (
    *(
        '"\\ud83d"', '"\\udc00\\ud83d"', '"\\ud83d\\ude00"', '"\\u12"', '"\\d"', '"a\nb"', '"', "'x'", "NaN",
        "-Infinity",
    ),
    *(
        "1e999", "9" * 400, "1-2", "-", "01", "True", "None", "tru", "null", "{}", "[]", "[1,]", '{"a":1,}', "1",
        "-0.5e3",
    ),
    *('"\u2028"', '"</tool_call>"', '"[TOOL_CALLS]"', '"<|end|>"', "[" * 200, '{"a":' * 140, "", " "),
)  # fmt: skip
MARKERS = (
    *(
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "```json\n", "```",
        "```py\n",
    ),
    *(
        "<think>", "</think>", "[THINK]", "[/THINK]", "◁think▷", "◁/think▷", "{", "}", "[", "]", ", ", "; ", "\n",
        " ", "<", "[",
    ),
    *("<|start|>assistant", "<|channel|>analysis", "<|channel|>commentary to=", "functions.f", "<|constrain|>json"),
    *(
        "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|channel|>final", " to=f ", "browser.search",
        '"name": "f"',
    ),
)  # fmt: skip


KEYS = ('"a"', '"b"', '"name"', '"\\ud800"', '""')
CALLED = (*NAMES, *NAMES, "no", "\\ud800")
EXTRA = ('"thought": "hm"', '"id": 1', '"type": "function"', '"arguments": {}', '"x": [{"name": "f"}]', '"name": "f"')
HEADERS = ("to=functions.f <|constrain|>json", "to=f", "to=get_weather code", "to=functions.no json", "")


def value(draw: random.Random, depth: int = 0) -> str:
    kind = draw.randrange(6) if depth < 3 else 0
    if kind == 1:
        return "[" + ", ".join(value(draw, depth + 1) for _ in range(draw.randrange(3))) + "]"
    if kind == 2:
        return members(draw, depth + 1)
    return json.dumps(draw.choice(TEXTS)) if kind == 3 else draw.choice(VALUES)


def members(draw: random.Random, depth: int = 0) -> str:
    return "{" + ", ".join(f"{draw.choice(KEYS)}: {value(draw, depth)}" for _ in range(draw.randrange(4))) + "}"


def arguments(draw: random.Random) -> str:
    """Of a call, as a text: an object, or nearly."""
    text = value(draw) if draw.random() < 0.1 else members(draw)
    return text[: draw.randrange(len(text) + 1)] if draw.random() < 0.2 else text


def call(draw: random.Random) -> str:
    given, name = arguments(draw), draw.choice(CALLED)
    shown = json.dumps(given, ensure_ascii=draw.random() < 0.5) if draw.random() < 0.2 else given
    parts = [f'"name": "{name}"', f'"{draw.choice(["arguments", "parameters"])}": {shown}']
    parts += draw.sample(EXTRA, draw.choice((0, 0, 0, 1, 2)))
    draw.shuffle(parts)
    text = "{" + ", ".join(parts) + draw.choice(("}", "}", "}", "}}", ",}", ""))
    channel, header = draw.choice(("commentary", "analysis")), draw.choice(HEADERS)
    forms = (
        text, f"[{text}]", f"<|python_tag|>{text}", f"<tool_call>\n{text}\n</tool_call>", f"<tool_call>{text}",
        f"[TOOL_CALLS]{name}[ARGS]{given}", f"[TOOL_CALLS]{name}[CALL_ID]a1[ARGS]{given}",
        f"[TOOL_CALLS][{text}, {text}]",
        *[f"<|start|>assistant<|channel|>{channel} {header}<|message|>{given}<|call|>"] * 2,
    )  # fmt: skip
    return draw.choice(forms)


def answer(draw: random.Random) -> str:
    """Calls, markers and text in any order, with some characters missing or too many."""
    kinds = (call, call, lambda draw: draw.choice(MARKERS), lambda draw: draw.choice(TEXTS))
    text = "".join(draw.choice(kinds)(draw) for _ in range(draw.randrange(1, 6)))
    for _ in range(draw.choice((0, 0, 1, 3))):
        at = draw.randrange(len(text) + 1)
        text = text[:at] + draw.choice((*MARKERS, *VALUES, "")) + text[at + draw.randrange(3) :]
    return text


def pieces(draw: random.Random, text: str) -> list[str]:
    """A text in parts of any size."""
    cuts = sorted(draw.randrange(len(text) + 1) for _ in range(draw.choice((0, 3, 10, len(text)))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def sent(draw: random.Random) -> Any:
    """Arguments of a call as a client sends them back."""
    return draw.choice((arguments(draw), arguments(draw), arguments(draw), None, "", "null", '"null"', {"a": [1]}, {}))
