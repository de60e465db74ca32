"""Which cases of crossing parameters `make test` runs."""

from __future__ import annotations

import importlib.util
import random
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="module")
def conftest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("conftest_of_tests", Path(__file__).with_name("conftest.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases(sizes: tuple[int, ...], rng: random.Random) -> list[Any]:
    """Of a grid of parameters a, b, ..., of which some are left out."""
    every = [values for values in product(*(range(size) for size in sizes)) if rng.random() < 0.8]
    return [
        SimpleNamespace(params=dict(zip("abcd", values, strict=False)), _idlist=[*map(str, values)]) for values in every
    ]


@pytest.mark.parametrize("each", [(), ("a",), ("b",)])
@pytest.mark.parametrize("sizes", [(2, 2), (3, 4, 2), (1, 5), (4, 3, 3, 2)])
def test_each_value_is_in_a_case(conftest: ModuleType, sizes: tuple[int, ...], each: tuple[str, ...]) -> None:
    rng = random.Random(str(sizes))
    for _ in range(5):
        every = cases(sizes, rng)
        few = conftest.cover(every, each)
        for one in every:
            for name, value in one.params.items():
                alike = [other for other in few if all(other.params[key] == one.params[key] for key in (name, *each))]
                assert alike, (name, value, few)
        assert len({id(one) for one in few}) == len(few) <= len(every)
        if not each and len(every) > 2 * sum(sizes):
            assert len(few) < len(every) / 2


def test_tests_that_may_skip_keep_all_cases(conftest: ModuleType) -> None:
    def runs() -> None: ...

    def skips() -> None:
        pytest.skip("some cases")

    def made(test: Any, **fixtures: Any) -> Any:
        found = {name: [SimpleNamespace(func=function)] for name, function in fixtures.items()}
        return SimpleNamespace(function=test, _arg2fixturedefs=found)

    assert not conftest.may_skip(made(runs, case=runs)) and not conftest.may_skip(made(runs, ops=skips))
    assert conftest.may_skip(made(skips)) and conftest.may_skip(made(runs, case=skips))
