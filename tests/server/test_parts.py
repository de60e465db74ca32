"""How much structure a body may have, before it is parsed."""

from __future__ import annotations

import contextlib
import json
import random

import pytest
from timed import least_seconds

from draftwing.errors import RequestError
from draftwing.server.http import _MOST_PARTS, _check_parts

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
@pytest.mark.parametrize("beside", [{}, {"tools": [{"a": [{}]}] * 100}], ids=["alone", "with tools"])
def test_what_stands_in_texts_does_not_count(text: str, beside: dict[str, object]) -> None:
    _check_parts(json.dumps({"messages": [{"role": "user", "content": text}], **beside}).encode(), LONGEST)
    _check_parts(json.dumps({"prompt": ["a", text, "b:"], **beside}, indent=1).encode(), LONGEST)


@pytest.mark.parametrize("unit", ["[],", "{},", '{"a":1},', '"a",', '"[",[],', "[[]],"])
@pytest.mark.parametrize("first", ['"a"', '"\\""', '"\\\\"', '"[\\\\\\"]"'])
def test_what_stands_outside_does(unit: str, first: str) -> None:
    body = f'{{"text":{first},"metadata":[{unit * 700_000}1]}}'.encode()
    with pytest.raises(RequestError) as refused:
        _check_parts(body, LONGEST)
    assert refused.value.param == "body"


def test_a_long_list_beside_a_text_is_one() -> None:
    ids = ",".join(["1"] * (LONGEST + 2))
    for text in ("a", '\\"', "]" * 100):
        with pytest.raises(RequestError):
            _check_parts(f'{{"text":"{text}","ids":[{ids}]}}'.encode(), LONGEST)


def test_the_border_is_exact() -> None:
    for count, fits in ((_MOST_PARTS - 3, True), (_MOST_PARTS - 2, False)):
        body = f'{{"text":"[[[{{{{:","m":[{",".join(["[]"] * (count - 1))}]}}'.encode()
        assert json.loads(body)
        if fits:
            _check_parts(body, LONGEST)
        else:
            with pytest.raises(RequestError):
                _check_parts(body, LONGEST)


def checked(body: bytes) -> None:
    with contextlib.suppress(RequestError):
        _check_parts(body, LONGEST)


@pytest.mark.timing
def test_what_is_no_json_takes_little_time() -> None:
    generator = random.Random(5)
    size = 2**22
    bodies = [b'"' * size, b"\\" * size, b'\\"' * (size // 2), b"[" * size, b'"",' * (size // 3), b'"' + b"[" * size]
    bodies += [bytes(generator.choices(b'"\\[{:,', k=size)) for _ in range(2)]
    for body in bodies:
        assert least_seconds(lambda body=body: checked(body)) < 0.3  # type: ignore[misc]
