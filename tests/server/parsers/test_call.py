"""Arguments of calls that come as a text, whoever wrote it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from draftwing.server.parsers.call import CallReader, read_arguments


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", {}),
        (" \n", {}),
        ("null", {}),
        (" null ", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": "\\ud83d"}', {"a": "\ufffd"}),
        ('{"\\udc00": ["x\\ud83dy", "\\ud83d\\ude00"]}', {"\ufffd": ["x\ufffdy", "😀"]}),
        ('{"a": "\\ude00\\ud83d"}', {"a": "\ufffd\ufffd"}),
        ('{"a": "\\\\ud83d"}', {"a": "\\ud83d"}),
        ('{"a": NaN, "b": [-Infinity, 1e999, 1e5]}', {"a": None, "b": [None, None, 1e5]}),
        ('{"a": %s}' % ("9" * 5000), {"a": None}),
        ('{"a": %s}' % ("9" * 400), {"a": int("9" * 400)}),
        ('{"a": 1, "a": 2}', {"a": 2}),
        ('{"a": "x\ny"}', {"a": "x\ny"}),
        ('{"a": 1, "b": "Par', {"a": 1}),
        ('{"a": NaN, "b": [1, 1e999', {"a": None, "b": [1, None]}),
        ("[1]", None),
        ('"a"', None),
        ("7", None),
        ("x", None),
        ('{"a": 1, x', None),
        ('{"a": "\\ud83d", "b": "', None),
        ("[" * 100_000, None),
        ('{"a":' * 100_000, None),
    ],
)  # fmt: skip
def test_read_arguments(text: str, value: Any) -> None:
    assert read_arguments(text) == value
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()


def test_what_the_reader_gives_out_is_what_the_model_meant() -> None:
    """Arguments of calls, read character by character, are those that a reader of JSON finds in the text."""
    draw = random.Random(5)
    texts = [
        '"a"', '"\\ud83d"', '"\\ud83d\\ude00"', '"\u2028"', '"\\udc00x"', "NaN", "1e999", "1", "-0.5", "[]", "{}",
        "null",
    ]  # fmt: skip
    for _ in range(300):
        members = ", ".join(f'"k{i}": {draw.choice(texts)}' for i in range(draw.randrange(4)))
        arguments = f"{{{members}}}"
        shown = arguments if draw.random() < 0.5 else json.dumps(arguments, ensure_ascii=draw.random() < 0.5)
        reader = CallReader(["f"])
        for char in f'{{"thought": [{{"name": 1}}], "name": "f", "id": 7, "arguments": {shown}, "more": {{}}}}':
            reader.push(char)
        assert reader.done and reader.name == "f"
        given = reader.take()
        assert json.loads(given, parse_constant=pytest.fail) == read_arguments(arguments) == read_arguments(given)
