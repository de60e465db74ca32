"""Which of a client's prompts are of one kind."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from draftwing.train.domains import BEGINNING, domains
from draftwing.train.judge import SMALL

TEMPLATE = [1, 9, 10, 11, 12]  # what a chat template begins with


def asked(system: list[int], count: int, seed: int, template: list[int] = TEMPLATE) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [[*template, *system, *draw.integers(100, 5000, size=12).tolist()] for _ in range(count)]


def counted(*groups: list[list[int]]) -> list[Counter[str]]:
    """The domains of each group of prompts, which one client sent."""
    keys = {f"{i} {n}": prompt for i, group in enumerate(groups) for n, prompt in enumerate(group)}
    found = domains(keys, dict.fromkeys(keys, "a"))
    return [Counter(found[f"{i} {n}"] for n in range(len(group))) for i, group in enumerate(groups)]


def test_system_prompts_make_domains_even_where_they_begin_alike() -> None:
    support, rust = [30, 31, 32, 33, 34, 35, 36, 37], [30, 31, 40, 41, 42, 43, 44, 45, 46, 47]
    assert counted(asked(support, 60, 1), asked(rust, 40, 2)) == [{"a, domain 1": 60}, {"a, domain 2": 40}]
    # Some that begin with something else; and some that come without a template.
    other = asked([90] * BEGINNING, 20, 3)
    found = counted(asked(support, 60, 1), asked(rust, 40, 2), other)
    assert found == [{"a, domain 1": 60}, {"a, domain 2": 40}, {"a, domain 3": 20}]
    odd = asked([], round(SMALL * 100) - 1, 4, [7])
    first, second, rest = counted(asked(support, 60, 1), asked(rust, 40, 2), odd)
    assert len(first) == len(second) == len(rest) == 1 and len({*first, *second, *rest}) == 3


def test_one_kind_of_prompt_is_one_domain() -> None:
    for system in ([30, 31, 32, 33, 34], []):
        assert counted(asked(system, 50, 4)) == [{"a, domain 1": 50}]
    questions = [asked([*TEMPLATE, first, second], 6, first) for first in (20, 21, 22) for second in (50, 51, 52)]
    assert set().union(*counted(*questions)) == {"a, domain 1"}, "whose first words are alike"
    assert counted([[*TEMPLATE, 5, 6]] * 20) == [{"a, domain 1": 20}]
    assert counted([[*TEMPLATE, 5, 6]] * 20 + [TEMPLATE] * 20) == [{"a, domain 1": 40}]


def turns(system: list[int], count: int, seed: int, end: list[int]) -> list[list[int]]:
    """The prompts of one conversation. end: of each of them, which is not there where the next one goes on."""
    draw, text, found = np.random.default_rng(seed), [*TEMPLATE, *system], []
    for _ in range(count):
        text = [*text, *draw.integers(100, 5000, size=20).tolist(), 7, 8]
        found.append([*text, *end])
    return found


@pytest.mark.parametrize("end", [[], [40, 41]])
def test_turns_of_a_conversation_are_one_kind(end: list[int]) -> None:
    support, rust = [30, 31, 32, 33, 34, 35, 36, 37], [30, 31, 40, 41, 42, 43, 44, 45, 46, 47]
    assert counted(turns(support, 40, 1, end)) == [{"a, domain 1": 40}]
    of_support = [turns(support, 20, seed, end) for seed in range(5)]
    assert set().union(*counted(*of_support)) == {"a, domain 1"}, "of one system prompt"
    both = counted(*of_support, *(turns(rust, 20, seed, end) for seed in range(5, 8)))
    assert both == [{"a, domain 1": 20}] * 5 + [{"a, domain 2": 20}] * 3
    assert counted([[1]], *of_support, [[]])[1:-1] == [{"a, domain 1": 20}] * 5, "nothing goes on from nothing"


def test_each_client_has_domains_of_its_own() -> None:
    prompts = asked([30] * BEGINNING, 4, 5)
    keys = {str(i): prompt for i, prompt in enumerate(prompts)}
    found = domains(keys, {"0": "a", "1": "a", "2": "b", "3": "b"})
    assert {name.partition(",")[0] for name in found.values()} == {"a", "b"}
    assert domains({}, {}) == {}
