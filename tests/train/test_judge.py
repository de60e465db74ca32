"""Heads along texts against walks done by hand, and verdicts against what chance does."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from reference.exact_heads import exact_eagle2, exact_eagle3

from draftwing.engine.devices import pick_device
from draftwing.models.loader import load_model
from draftwing.train.capture import FeatureModel
from draftwing.train.heads import TargetHead, load_head
from draftwing.train.judge import (
    FEW,
    OTHERS,
    REST,
    Drafted,
    Judgement,
    Temperatures,
    compare,
    draft_along,
    judge,
    noise_of_text,
)
from draftwing.train.store import OnlineSource, Part, Tokens
from draftwing.train.ttt import unroll


def steps_by_hand(ids: list[int], begins: int, depth: int, successor: list[int]) -> int:
    """Of an engine whose drafts are successors. The first token of the answer comes with the prompt."""
    steps, newest = 0, begins
    while newest < len(ids) - 1:
        accepted = 0
        while accepted < depth and newest + 1 + accepted < len(ids):
            if ids[newest + 1 + accepted] != successor[ids[newest + accepted]]:
                break
            accepted += 1
        newest += accepted + 1
        steps += 1
    return steps


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_steps_are_those_of_a_walk_along_each_text(depth: int, tmp_path: Path) -> None:
    exact = exact_eagle3()
    assert exact.head is not None
    target = load_model(exact.target.write(tmp_path / "target"), torch.float32, "cpu")
    head = load_head(exact.head.write(tmp_path / "head"), target, "EAGLE3")
    draw, successor, texts, begins = np.random.default_rng(1), exact.successor.tolist(), [], {}
    for i in range(12):
        ids = [int(draw.choice(exact.starts))]
        while len(ids) < 10 + 5 * i:  # mostly what the head drafts
            ids.append(successor[ids[-1]] if draw.random() < 0.8 else int(draw.choice(exact.starts)))
        begins[str(i)] = 1 + i % 4
        mask = np.arange(len(ids)) >= begins[str(i)]
        texts.append(Tokens(np.array(ids, np.int32), mask, str(i)))
    features = FeatureModel(target, head.aux_layers, pick_device("cpu"))
    source = OnlineSource(features.meta("tiny", "EAGLE3"), texts, features.batch)
    found = draft_along(head, Part(source, range(12)), depth, 512)
    for text in texts:
        ids, begin = text.ids.tolist(), begins[text.key]
        assert found[text.key].tokens == len(ids) - begin - 1
        for d in range(depth):
            assert found[text.key].steps[d] == steps_by_hand(ids, begin, d + 1, successor), (text.key, d)


def test_a_head_in_float32_drafts_with_a_targets_lm_head_in_half_precision(tmp_path: Path) -> None:
    exact = exact_eagle2()
    assert exact.head is not None
    folders = [one.write(tmp_path / name) for one, name in ((exact.target, "target"), (exact.head, "head"))]
    target = load_model(folders[0], torch.bfloat16, "cpu")
    head = load_head(folders[1], target, "EAGLE")
    ids = [int(exact.starts[0])]
    while len(ids) < 24:
        ids.append(int(exact.successor[ids[-1]]) if len(ids) % 5 else int(exact.starts[len(ids)]))
    features = FeatureModel(target, head.aux_layers, pick_device("cpu"))
    text = Tokens(np.array(ids, np.int32), np.arange(24) >= 2, "0")
    source = OnlineSource(features.meta("tiny", "EAGLE"), [text], features.batch)
    found = draft_along(head, Part(source, [0]), 3, 64)["0"].steps.tolist()
    assert found == [steps_by_hand(ids, 2, depth, exact.successor.tolist()) for depth in (1, 2, 3)]


def test_along_a_text_that_was_drawn_drafts_have_its_noise(tmp_path: Path) -> None:
    exact, heat, depth = exact_eagle3(), 0.8, 3
    assert exact.head is not None
    target = load_model(exact.target.write(tmp_path / "target"), torch.float32, "cpu")
    head = load_head(exact.head.write(tmp_path / "head"), target, "EAGLE3")
    draw, texts = np.random.default_rng(2), []
    for i in range(4):
        ids = draw.integers(head.config.vocab_size, size=24 + i).astype(np.int32)
        texts.append(Tokens(ids, np.arange(len(ids)) >= 3 + i, str(i)))
    features = FeatureModel(target, head.aux_layers, pick_device("cpu"))
    source = OnlineSource(features.meta("tiny", "EAGLE3"), texts, features.batch)
    temperatures = Temperatures({"0": heat, "1": heat, "2": 0.0}, TargetHead(target))
    found = draft_along(head, Part(source, range(4)), depth, 64, temperatures)
    greedy = draft_along(head, Part(source, range(4)), depth, 64)
    assert any((found[key].steps != greedy[key].steps).any() for key in "01")
    for key in "23":
        assert (found[key].steps == greedy[key].steps).all()
    for key, sample in zip("01", source.read_many([0, 1]), strict=True):
        ids = sample.ids.long()
        at = sample.loss_mask[1:].nonzero().flatten()  # before each token of the answer
        count = torch.ones_like(at)
        seeds = count * temperatures.rows([key])[1][0]
        noise = torch.zeros(len(ids), head.vocab)
        scaled = temperatures.target(sample.final[at]) / heat
        drafted = torch.arange(head.config.vocab_size) if head.target_ids is None else head.target_ids
        noise[at] = noise_of_text(scaled[:, drafted], scaled.logsumexp(1), ids[at + 1], seeds, at, drafted)
        with torch.no_grad():
            states = unroll(head, ids[None], head.features(sample.aux_hidden.float()), depth)
            chains = [head.logits(hidden) for hidden in states]
        for deepest in range(1, depth + 1):
            steps, newest = 0, int(at[0]) + 1
            while newest < len(ids) - 1:
                accepted = 0
                while accepted < deepest and newest + 1 + accepted < len(ids):
                    sums = chains[accepted][newest - 1] + heat * noise[newest + accepted]
                    token = int(sums.argmax())
                    token = token if head.target_ids is None else int(head.target_ids[token])
                    if token != ids[newest + 1 + accepted]:
                        break
                    accepted += 1
                newest, steps = newest + accepted + 1, steps + 1
            assert found[key].steps[deepest - 1] == steps


def drafted(draw: np.random.Generator, count: int, length: float, spread: float = 0.2) -> dict[str, Drafted]:
    """Texts of 100 tokens with about this acceptance length."""
    lengths = np.maximum(length + spread * draw.standard_normal(count), 1.0)
    return {str(i): Drafted(100, np.array([round(100 / each)])) for i, each in enumerate(lengths)}


def test_the_error_is_that_of_drawing_other_texts() -> None:
    draw = np.random.default_rng(3)
    before, after = drafted(draw, 60, 2.0), drafted(draw, 60, 2.3)
    found = compare(before, after, [1.0])
    old, new = (np.array([one.steps[0] for one in each.values()]) for each in (before, after))
    assert found.gain == pytest.approx(old.sum() / new.sum())
    assert found.length_before == pytest.approx(6000 / old.sum()) and found.texts == 60
    assert found.length_after == pytest.approx(6000 / new.sum())
    again = draw.integers(60, size=(4000, 60))
    assert found.error == pytest.approx((old[again].sum(1) / new[again].sum(1)).std(), rel=0.1)


def test_each_head_drafts_as_deep_as_is_fastest_for_it() -> None:
    before = {"a": Drafted(90, np.array([60, 50]))}
    after = {"a": Drafted(90, np.array([55, 30]))}
    found = compare(before, after, [1.0, 1.25])  # 60, 62.5; 55, 37.5
    assert found.gain == pytest.approx(60 / 37.5) and found.error == 0
    assert (found.length_before, found.length_after) == pytest.approx((1.5, 3.0))


def test_a_candidate_is_taken_for_being_better_by_more_than_noise() -> None:
    draw = np.random.default_rng(4)
    clients, seconds = {str(i): "a" for i in range(80)}, [1.0]
    before = drafted(draw, 80, 2.0)
    assert judge(before, drafted(draw, 80, 2.4), clients, seconds).taken
    chance = [judge(drafted(draw, 80, 2.0), drafted(draw, 80, 2.0), clients, seconds).taken for _ in range(150)]
    assert sum(chance) < 0.05 * 150
    same = judge(before, before, clients, seconds)
    assert not same.taken and same.general is None and same.traffic.gain == 1


def refused(draw: np.random.Generator, count: int, gain: float) -> float:
    """Which share of candidates is refused for a client with so many texts, who gets so much more tokens per second.
    Texts differ as those of benchmarks do, by 0.07; everybody else gains."""
    before = {str(i): Drafted(400, draw.integers(100, 300, 1)) for i in range(100)}
    clients = {key: "b" if int(key) < count else "a" for key in before}
    found = 0
    for _ in range(100):
        gains = {key: 1.1 if clients[key] == "a" else gain * math.exp(0.07 * draw.normal()) for key in before}
        after = {key: Drafted(400, np.round(one.steps / gains[key]).astype(np.int64)) for key, one in before.items()}
        found += not judge(before, after, clients, [1.0]).taken
    return found / 100


@pytest.mark.slow
@pytest.mark.parametrize("count", [FEW, 20])
def test_few_texts_of_a_client_hide_no_loss_and_make_none_up(count: int) -> None:
    draw = np.random.default_rng(6)
    assert refused(draw, count, 0.9) > 0.95 and refused(draw, count, 0.94) > 0.75
    assert refused(draw, count, 1.0) < 0.25 and refused(draw, count, 1.05) < 0.03


@pytest.mark.parametrize("who", ["another client", "small clients", "general text"])
def test_a_candidate_that_harms_somebody_is_not_taken(who: str) -> None:
    draw = np.random.default_rng(5)
    before, after = drafted(draw, 100, 2.0), drafted(draw, 100, 3.0)
    harmed = {str(i) for i in range(100 - 2 * FEW, 100)}
    after |= {key: Drafted(100, np.array([math.ceil(1.2 * before[key].steps[0])])) for key in harmed}
    clients = {key: "b" if key in harmed else "a" for key in before if who != "general text" or key not in harmed}
    if who == "small clients":
        clients |= {key: f"b{int(key) % 4}" for key in harmed}
    found = judge(before, after, clients, [1.0])
    assert found.traffic.gain > 1.2 and not found.taken
    reasons = {"another client": "worse for b", "small clients": f"worse for {OTHERS}"}
    assert found.reason == reasons.get(who, "worse on general text")
    assert json.loads(json.dumps(found.report()))["reason"] == found.reason


def crowd(draw: np.random.Generator, gains: list[float], texts: list[int]) -> bool:
    """Whether a head is taken that gives each client so much; their texts differ by 0.07."""
    clients = {f"{client}-{i}": str(client) for client, count in enumerate(texts) for i in range(count)}
    before = {key: Drafted(400, draw.integers(100, 300, 1)) for key in clients}
    after = {}
    for key, client in clients.items():
        gain = gains[int(client)] * math.exp(0.07 * draw.normal())
        after[key] = Drafted(400, np.round(before[key].steps / gain).astype(np.int64))
    return judge(before, after, clients, [1.0]).taken


def test_one_of_many_clients_keeps_no_head_from_the_others() -> None:
    draw = np.random.default_rng(8)
    assert all(crowd(draw, [1.1] * 20 + [0.9], [FEW] * 21) for _ in range(10))
    # Unless the others are one that floods; and many that lose are not small together.
    assert not any(crowd(draw, [1.1, 0.9], [400, FEW]) for _ in range(10))
    assert not any(crowd(draw, [1.1, 0.85, 1.3], [400, 2 * FEW, 2 * FEW]) for _ in range(10))
    assert not any(crowd(draw, [1.2] + [0.95] * 20, [8 * FEW] + [FEW] * 20) for _ in range(10))


@pytest.mark.slow
def test_noise_of_several_clients_does_not_add_up() -> None:
    draw = np.random.default_rng(9)
    taken = [crowd(draw, [1.1] + [1.0] * 6, [60] + [2 * FEW] * 6) for _ in range(100)]
    assert sum(taken) > 75


def of_domains(draw: np.random.Generator, gains: list[float], texts: list[int], known: bool = True) -> Judgement:
    """Of one client whose domains gain so much; their texts differ by 0.07."""
    domains = {f"{domain}-{i}": f"a, domain {domain}" for domain, count in enumerate(texts) for i in range(count)}
    before = {key: Drafted(400, draw.integers(100, 300, 1)) for key in domains}
    after = {}
    for key, one in before.items():
        gain = gains[int(key.partition("-")[0])] * math.exp(0.07 * draw.normal())
        after[key] = Drafted(400, np.round(one.steps / gain).astype(np.int64))
    return judge(before, after, dict.fromkeys(domains, "a"), [1.0], domains if known else None)


def test_no_domain_of_a_client_is_harmed_for_its_sum() -> None:
    draw = np.random.default_rng(11)
    assert of_domains(draw, [1.2, 0.9], [80, 20], known=False).taken
    found = of_domains(draw, [1.2, 0.9], [80, 20])
    assert not found.taken and found.reason == "worse for a, domain 1" and found.traffic.gain > 1.1
    assert found.report()["domains"]["a, domain 0"]["texts"] == 80
    # Those that are small are judged together.
    small = of_domains(draw, [1.2, *[0.9] * 20], [80, *[1] * 20])
    assert small.reason == f"worse for a, {REST}"
    assert sum(of_domains(draw, [1.15, 1.0], [60, 20]).taken for _ in range(100)) > 80
    # One domain is no more than its client, and too few texts say nothing.
    assert not of_domains(draw, [1.2], [80]).domains
    assert not of_domains(draw, [1.2, 0.8], [80, FEW - 1]).domains


def test_what_heads_forget_one_after_the_other_adds_up() -> None:
    before = {f"{kind}{i}": Drafted(100, np.array([50])) for kind in "tg" for i in range(40)}
    clients = {key: "a" for key in before if key[0] == "t"}

    def judged(general: int, kept_before: float) -> Judgement:
        after = {key: Drafted(100, np.array([40 if key in clients else general])) for key in before}
        return judge(before, after, clients, [1.0], None, kept_before)

    assert judged(51, 1.0).taken and judged(51, 1.0).kept == pytest.approx(50 / 51)
    second = judged(51, 50 / 51)
    assert second.reason == "worse on general text" and second.report()["kept"] == pytest.approx((50 / 51) ** 2)
    assert judged(50, 50 / 51).taken
    assert judged(49, 0.9).taken and judged(50, 0.9).taken, "it may be as good as a parent that has lost too much"


DRAWS = 40_000


@pytest.mark.parametrize("temperature", [0.3, 0.8, 1.5])
def test_drafts_agree_with_a_text_as_often_as_with_the_noise_that_drew_it(temperature: float) -> None:
    draw = torch.Generator().manual_seed(2)
    target, drafter = (torch.randn(11, generator=draw, dtype=torch.float64) for _ in range(2))
    drafter = target + 0.7 * drafter
    ids = torch.tensor([0, 1, 2, 3, 5, 6, 8, 9, 10])  # that the drafter knows
    noise = -torch.rand(DRAWS, 11, generator=draw, dtype=torch.float64).log().neg().log()
    said = (target / temperature + noise).argmax(1)
    agree = (ids[(drafter[ids] / temperature + noise[:, ids]).argmax(1)] == said).double().mean()
    place, scaled = torch.arange(DRAWS), (target / temperature).expand(DRAWS, -1)
    told = noise_of_text(scaled, scaled.logsumexp(1), said, place % 7, place, torch.arange(11))
    assert torch.equal((scaled + told).argmax(1), said)
    some = noise_of_text(scaled[:, ids], scaled.logsumexp(1), said, place % 7, place, ids)
    torch.testing.assert_close(some, told[:, ids])
    found = (ids[(drafter[ids] / temperature + some).argmax(1)] == said).double().mean()
    assert float(found) == pytest.approx(float(agree), abs=5 * (0.5 / DRAWS) ** 0.5)
    alone = (ids[drafter[ids].argmax()] == said).double().mean()
    assert abs(alone - agree) > 0.05, "noise makes no difference here"
    # Over all texts it is noise as any other.
    assert float(told.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(told.std()) == pytest.approx(1.2825, abs=0.02)
