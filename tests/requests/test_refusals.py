"""What refusals show of a wrong value."""

from __future__ import annotations

from typing import Any

import pytest

from draftwing.requests.refusals import show


class Number(float):
    """Counts how often one is printed."""

    printed = 0

    def __repr__(self) -> str:
        Number.printed += 1
        return super().__repr__()


@pytest.mark.parametrize(
    "value",
    [
        [Number(1)] * 10_000, {str(i): Number(1) for i in range(10_000)}, [[[Number(1)] * 50] * 50] * 50,
        {"a": {"b": {"c": [Number(1)] * 1000}}},
    ],
    ids=["list", "object", "lists", "objects"],
)  # fmt: skip
def test_what_is_shown_of_a_large_value_is_all_that_is_printed(value: Any) -> None:
    Number.printed = 0
    assert len(show(value)) <= 80
    assert Number.printed <= 512


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a" * 76, repr("a" * 76)), ("a" * 10_000, "'" + "a" * 76 + "..."),
        ({"b": 1, "a": [None, True]}, "{'b': 1, 'a': [None, True]}"),
        ([0.5] * 9, "[0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, ...]"), ({}, "{}"), ("\ud800", "'\\ud800'"),
    ],
)  # fmt: skip
def test_what_is_shown(value: Any, text: str) -> None:
    assert show(value) == text


def test_an_integer_of_thousands_of_digits_is_not_printed() -> None:
    assert show(10**5000) == "a int too large to print"
