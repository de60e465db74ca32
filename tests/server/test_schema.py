"""How much structure a body may have, before it is parsed."""

from __future__ import annotations

import contextlib
import json
import random

import pytest
from timed import least_seconds

from draftwing.errors import RequestError
from draftwing.server.openai.schema import Message, conversation
from draftwing.server.parsers.call import read_arguments
from draftwing.server.schema import MAX_IN_CALL, MAX_PARTS, check_parts

LONGEST = 2**19
CPP = 'std::map<int, std::vector<int>> a[{{1: 2}, {3: 4}}]; // "quoted" \\ and \\" and \\\\\n'
TEXTS = {
    "C++": CPP * 12_000,
    "JSON in a text": json.dumps({"a": [{"b": [1, 2, {"c": "d,e"}]}] * 20_000}),
    "CSV": "1,2,3,4,5,6,7,8\n" * 90_000,
    "brackets": "[{:" * 200_000,
    "a text that ends with a backslash": "[{:" * 100_000 + "\\",
    "backslashes": '\\"[{:' * 100_000,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_what_stands_in_texts_does_not_count(text: str) -> None:
    check_parts(json.dumps({"messages": [{"role": "user", "content": text}]}).encode(), MAX_PARTS, LONGEST)
    tools = {"tools": [{"a": [{}]}] * 100}
    check_parts(json.dumps({"prompt": ["a", text, "b:"], **tools}, indent=1).encode(), MAX_PARTS, LONGEST)


@pytest.mark.further(first=['"a"', '"\\""'])
@pytest.mark.parametrize("unit", ["[],", "{},", '{"a":1},', '"a",', '"[",[],', "[[]],"])
@pytest.mark.parametrize("first", ['"a"', '"\\""', '"\\\\"', '"[\\\\\\"]"'])
def test_what_stands_outside_does(unit: str, first: str) -> None:
    body = f'{{"text":{first},"metadata":[{unit * 700_000}1]}}'.encode()
    with pytest.raises(RequestError) as refused:
        check_parts(body, MAX_PARTS, LONGEST)
    assert refused.value.param == "body"


@pytest.mark.slow
def test_the_border_is_exact() -> None:
    for count, fits in ((MAX_PARTS - 3, True), (MAX_PARTS - 2, False)):
        body = f'{{"text":"[[[{{{{:","m":[{",".join(["[]"] * (count - 1))}]}}'.encode()
        assert json.loads(body)
        if fits:
            check_parts(body, MAX_PARTS, LONGEST)
        else:
            with pytest.raises(RequestError):
                check_parts(body, MAX_PARTS, LONGEST)


def checked(body: bytes) -> None:
    with contextlib.suppress(RequestError):
        check_parts(body, MAX_PARTS, LONGEST)


@pytest.mark.timing
def test_what_is_no_json_takes_little_time() -> None:
    generator = random.Random(5)
    size = 2**20
    bodies = [b'"' * size, b"\\" * size, b'\\"' * (size // 2), b"[" * size, b'"",' * (size // 3), b'"' + b"[" * size]
    bodies += [bytes(generator.choices(b'"\\[{:,', k=size)) for _ in range(2)]
    for body in bodies:
        assert least_seconds(lambda body=body: checked(body)) < 0.1  # type: ignore[misc]


def called(arguments: str) -> object:
    """What a template is given of the arguments of a call in the history."""
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    message = Message.model_validate({"role": "assistant", "tool_calls": [call]})
    (plain,) = conversation([Message(role="user", content="hi"), message])[1:]
    return plain["tool_calls"][0]["function"]["arguments"]


@pytest.mark.slow
@pytest.mark.further(cut=False)
@pytest.mark.further(before=["", '"b":"\\ud83d\\ude00",'])
@pytest.mark.parametrize("unit", ["[]", "{}", '{"":0}', '""', "null", "1", '"[",[]', "[[]]"])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("before", ["", '"b":"\\ud83d\\ude00",', '"b":"\\\\",'])
def test_arguments_of_a_call_are_bounded_too(unit: str, cut: bool, before: str) -> None:
    def arguments(count: int) -> str:
        return f'{{{before}"a":[{",".join([unit] * count)}' + "]}" * (not cut)

    with pytest.raises(RequestError) as refused:
        called(arguments(700_000))
    assert refused.value.param == "messages.1.tool_calls.0.function.arguments"
    assert called(arguments(5000)) == read_arguments(arguments(5000)) != {}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_what_stands_in_a_text_of_arguments_does_not_count(text: str) -> None:
    assert called(json.dumps({"input": text})) == {"input": text}


def test_the_border_of_arguments_is_exact() -> None:
    for count, fits in ((MAX_IN_CALL - 3, True), (MAX_IN_CALL - 2, False)):
        text = f'{{"a":[{",".join(["[]"] * count)}]}}'
        if fits:
            assert called(text) == json.loads(text)
        else:
            with pytest.raises(RequestError):
                called(text)
