"""Requests with the same beginning of their prompt have the same beginning of their text, in every dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftwing.serve.prompts import beginning


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}], "model": "m"}, "AB"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "B"}]}], "system": "A"}, "AB"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "B"}]}], "instructions": "A"}, "AB"),
        ({"prompt": "A"}, "A"), ({"prompt": ["A", "B"]}, "AB"), ({"prompt": [1, 22]}, "1 22 "),
        ({"text": "A", "cache_salt": "S"}, "SA"), ({"input_ids": [[1, 2], [3]]}, "1 2 3 "),
        ({"model": "m", "max_tokens": 3}, ""), (["A"], ""), (3, ""),
    ],
)  # fmt: skip
def test_texts(body: Any, text: str) -> None:
    assert beginning(json.dumps(body).encode()) == text


def test_bodies_that_are_cut() -> None:
    whole = json.dumps({"messages": [{"role": "user", "content": "é" * 100}]}, ensure_ascii=False).encode()
    assert beginning(whole[:101])[:40] == beginning(whole[:150])[:40] != ""
    assert beginning(b"") == ""


@pytest.mark.parametrize("depth", [2_000, 200_000])
def test_bodies_that_are_nested_too_deeply(depth: int) -> None:
    whole = b'{"prompt": ' + b"[" * depth + b'"A"' + b"]" * depth + b"}"
    assert beginning(whole) == whole.decode()
