"""What of traffic is learnt: who weighs how much, what is left out, what is kept to judge by."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from draftwing.learn.traffic import Exchange
from draftwing.train.heads import TargetHead
from draftwing.train.judge import SMALL
from draftwing.train.store import Sample
from draftwing.train.traffic import (
    BEGINNING,
    CLIENT_SHARE,
    LATER,
    LEAST_LIKELY,
    choose_traffic,
    domains,
    log_probabilities,
)

DRAW = np.random.default_rng(2)


def exchange(at: float, client: str = "a", answer: list[int] | None = None, prompt: int = 8) -> Exchange:
    ids = DRAW.integers(1000, size=prompt + 50).tolist()
    return Exchange(at, client, None, ids[:prompt], ids[prompt:] if answer is None else answer, 0.0)


def test_the_newest_are_kept_to_judge_by() -> None:
    every = [exchange(at) for at in range(50)]
    found = choose_traffic(every, 512)
    assert [len(one.ids) for one in found.learnt] == [58] * 40 and len(found.later) == 50 * LATER
    for one, tokens in zip(every, [*found.learnt, *found.later], strict=True):
        assert tokens.ids.tolist() == [*one.prompt, *one.answer]
        assert tokens.ids[tokens.loss_mask].tolist() == one.answer
    assert set(found.clients.values()) == {"a"} and found.tokens == {"a": 40 * 50}


def test_a_flood_at_the_end_hides_nobody() -> None:
    at = iter(range(1000))
    early = [exchange(next(at), client) for client in ["many"] * 60 + ["few"] * 9 + ["single"]]
    flood = [exchange(next(at), "flood") for _ in range(200)]
    found = choose_traffic([*early, *flood], 512)
    later = [found.clients[tokens.key] for tokens in found.later]
    assert {client: later.count(client) for client in later} == {"many": 12, "few": 1, "single": 1, "flood": 40}
    newest = [[*one.prompt, *one.answer] for one in early[48:60]]
    assert [tokens.ids.tolist() for tokens in found.later][:12] == newest


def test_a_client_is_learnt_from_no_more_than_its_share() -> None:
    every = [exchange(at, "much" if at % 10 else "few") for at in range(200)]
    found = choose_traffic(every, 512, later=0.0)
    assert found.tokens["few"] == 20 * 50
    assert found.tokens["much"] <= CLIENT_SHARE / (1 - CLIENT_SHARE) * found.tokens["few"]
    kept = [tokens for tokens in found.learnt if found.clients[tokens.key] == "much"]
    newest = [[*one.prompt, *one.answer] for one in every if one.client == "much"][-len(kept) :]
    assert [tokens.ids.tolist() for tokens in kept] == newest


def test_what_repeats_itself_or_is_too_long_is_left_out() -> None:
    loop, list_of_lines = [7, 8, 9, 10] * 20, [n for i in range(20) for n in (5, 6, 100 + i, 200 + i)]
    every = [exchange(0, answer=loop), exchange(1, answer=list_of_lines), exchange(2, prompt=600), exchange(3)]
    found = choose_traffic([*every, exchange(4, answer=[3] * 20)], 512, later=0.0)  # the last one is short
    assert len(found.learnt) == 3
    assert dict(found.skipped) == {"repeats itself": 1, "longer than 512 tokens": 1}


def test_the_same_exchange_counts_once() -> None:
    one = exchange(0)
    again = Exchange(5.0, "a", "salt", one.prompt, one.answer, 0.0)
    assert len(choose_traffic([one, exchange(1), again], 512, later=0.0).learnt) == 2


@pytest.mark.parametrize("likely", [True, False])
def test_answers_that_the_target_would_not_give_are_found(likely: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, hidden = torch.randn(200, 16, generator=generator), 4 * torch.randn(30, 16, generator=generator)
    logits = hidden.double() @ weight.double().t()
    ids = torch.cat((torch.zeros(1), logits[:-1].argmax(-1) if likely else logits[:-1].argmin(-1))).int()
    mask = torch.arange(30) >= 10
    target = TargetHead(SimpleNamespace(lm_head=SimpleNamespace(dense_weight=lambda: weight)))  # type: ignore[arg-type]

    class One:
        """A source of one sample."""

        def __len__(self) -> int:
            return 1

        def read_many(self, numbers: list[int]) -> list[Sample]:
            return [Sample(ids, mask, hidden, hidden, "key") for _ in numbers]

    ((key, mean),) = log_probabilities(One(), target)  # type: ignore[arg-type]
    expected = logits.log_softmax(-1)[torch.arange(9, 29), ids[10:].long()].mean()
    assert key == "key" and mean == pytest.approx(float(expected), abs=1e-4)
    assert (mean > LEAST_LIKELY) == likely


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
