"""What the load tests of benchmarks/ choose and compute; a tiny engine runs each of them once."""

from __future__ import annotations

import argparse
import importlib
import itertools
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from tiny_checkpoint import write_checkpoint

from draftwing.core import PLAIN, TreeShape
from draftwing.engine.engine import Engine

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MODULES = (
    "agent_edits",
    "load_change",
    "load_runs",
    "load_texts",
    "never_slower",
    "off_is_free",
    "open_loop",
    "svg_plot",
)


@pytest.fixture(scope="module")
def modules() -> dict[str, ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return {name: importlib.import_module(name) for name in MODULES}


@pytest.fixture(scope="module")
def engines(modules: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """Without drafts, and with NGRAM."""
    folder = write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
    args = argparse.Namespace(model=str(folder), draft=[], options=["num_threads=1", "max_total_tokens=4000"])
    made = [modules["load_runs"].make_engine(args, drafter, random_seed=0) for drafter in ("none", "NGRAM")]
    yield made
    for engine in made:
        engine.close()


def test_no_such_drafter(modules: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    args = argparse.Namespace(model="smollm2", draft=[], options=[])
    assert modules["load_runs"].make_engine(args, "GUESS") is None
    assert "GUESS" in capsys.readouterr().out


def test_draft_model_of_a_pair(modules: dict[str, ModuleType]) -> None:
    args = argparse.Namespace(model="m", draft=["EAGLE3=head", "STANDALONE=small"], options=["num_threads=2"])
    found = modules["load_runs"].given_options(args, "EAGLE3+NGRAM")
    assert (found["speculative_draft_model_path"], found["num_threads"]) == ("head", 2)
    assert "speculative_draft_model_path" not in modules["load_runs"].given_options(args, "NGRAM")


def test_cover(modules: dict[str, ModuleType]) -> None:
    """Each pair of values that any cell has occurs."""
    grid = modules["never_slower"]
    every = itertools.product(
        grid.REQUESTS, grid.PROMPTS, grid.TEMPERATURES, grid.TEXTS, grid.DRAFTERS
    )  # fmt: skip
    cells = [cell for cell in map(grid.Cell._make, every) if cell.requests * cell.prompt <= 300_000]
    chosen = grid.cover(cells, 60)
    assert len(chosen) == len(set(chosen)) == 60
    for i, j in itertools.combinations(range(5), 2):
        assert {(cell[i], cell[j]) for cell in chosen} == {(cell[i], cell[j]) for cell in cells}
    assert grid.cover(cells, 60) == chosen


def test_work(modules: dict[str, ModuleType]) -> None:
    grid = modules["never_slower"]
    costs = grid.Costs(prompt=1e-4, step={1: 0.005, 128: 0.01})
    cell = grid.Cell(1, 100, 0.0, "chat", "NGRAM")
    assert costs.work(cell, 2.6) == (4, 128, False)
    assert costs.work(cell._replace(requests=128, prompt=10), 1.5) == (512, 96, False)
    assert costs.work(cell._replace(prompt=4000), 5.0) == (8, 128, True)
    assert costs.work(cell._replace(prompt=3000), 5.0) == (5, 128, False)


def test_error(modules: dict[str, ModuleType]) -> None:
    grid = modules["never_slower"]
    assert grid.error([1.0, 1.02, 0.98]) == pytest.approx(0.02 / 3**0.5)
    assert grid.error([1.0]) is None


def test_summary(modules: dict[str, ModuleType]) -> None:
    grid = modules["never_slower"]
    cell = grid.Cell(4, 100, 0.0, "chat", "NGRAM")._asdict()
    rest = {"none": 100.0, "drafts": 97.0, "accept_length": 1.5, "shapes": {"0-1-1": 3, "2-1-3": 1}}
    records = [{**cell, **rest, "ratio": ratio, "error": 0.004} for ratio in (1.5, 0.97, 1.0)]
    found = grid.summary(records)
    assert found["all"] == found["NGRAM"] == {"cells": 3, "below": 1, "worst": 0.97, "median": 1.0}
    assert "| 0.970 | 0.004 | 1.50 | 0-1-1 75%, 2-1-3 25% |" in grid.table(records).splitlines()[2]
    assert grid.summary([]) == {}


def test_texts(modules: dict[str, ModuleType], engines: list[Engine]) -> None:
    texts = modules["load_texts"].Texts(engines[0].tokenizer, 300)
    for kind, length in itertools.product(texts.kinds, (100, 700)):
        prompts = texts.prompts(kind, length, 3)
        assert len({tuple(prompt) for prompt in prompts}) == 3
        assert prompts[1:] == texts.prompts(kind, length, 2, 1)
        if kind in ("copy", "random"):
            assert {len(prompt) for prompt in prompts} == {length}
        assert all(0 <= token < 256 for prompt in prompts for token in prompt)
    (copy,) = texts.prompts("copy", 400, 1)
    assert copy[:300] == copy[100:]


@pytest.mark.parametrize("fixed", [False, True])
def test_cell(fixed: bool, modules: dict[str, ModuleType], engines: list[Engine]) -> None:
    grid, (none, ngram) = modules["never_slower"], engines
    texts = modules["load_texts"].Texts(none.tokenizer, 300)
    costs = grid.measure_costs(none, texts, (1, 2))
    cell = grid.Cell(2, 50, 0.7, "copy", "NGRAM")
    assert grid.possible(cell, none, costs)
    assert not grid.possible(cell._replace(requests=128), none, costs)
    assert not grid.possible(cell._replace(prompt=1000), none, costs)
    args = grid.parsed(["--seconds", "0.01", "--tokens", "8", *(["--fixed"] if fixed else [])])
    record = grid.run_cell(cell, none, ngram, texts, costs, args)
    assert record["same"] == record["prompts"]
    assert record["ratio"] == pytest.approx(record["drafts"] / record["none"])
    assert ("of_best_fixed" in record) == fixed
    if fixed:
        assert len(record["fixed"]) >= 2


def test_drive_in_time(modules: dict[str, ModuleType], engines: list[Engine]) -> None:
    """Answers are those of a closed run, and no request is taken before it comes."""
    runs, loop = modules["load_runs"], modules["open_loop"]
    texts = modules["load_texts"].Texts(engines[0].tokenizer, 300)
    jobs = loop.arrivals(texts, 50.0, 0.1, 6)
    assert len(jobs) == 5
    assert [job.at for job in jobs] == sorted(job.at for job in jobs)
    answers, seconds, _ = runs.drive(engines[0], jobs)
    closed, _, (while_full, written) = runs.drive(engines[0], jobs, 1)
    assert [one.tokens for one in answers] == [one.tokens for one in closed]
    # From the end of the first to the beginning of the last: three answers, one after the other.
    assert written == sum(len(one.tokens) for one in closed[1:-1])
    assert while_full == pytest.approx(closed[-2].end - closed[0].end, rel=0.1)
    assert all(one.came == job.at <= one.first <= one.end <= seconds for one, job in zip(answers, jobs, strict=True))


def test_times(modules: dict[str, ModuleType]) -> None:
    answered = modules["load_runs"].Answered(0, came=1.0)
    for tokens, now in (([5], 1.5), ([6, 7], 1.6), ([8], 2.1)):
        answered.seen(tokens, now)
    found = modules["open_loop"].times([answered], 2.0)
    expected = {"requests": 1, "tokens_per_s": 2.0, "ttft_p50": 500.0, "tpot_p50": 200.0, "gap_p50": 500.0}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    slower = {**found, "tpot_p99": 211.0}
    assert "**211.00**" in modules["open_loop"].table({"12": {"none": found, "NGRAM": slower}})


class Words:
    """A tokenizer whose tokens are words: what is asked of a chat, in its order."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.ids.setdefault(word, len(self.ids)) for word in re.findall(r"\w+|\W", text)]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return [token for one in messages for token in self.encode(f"<{one['role']}>{one['content']}\n")]

    def decode(self, ids: Sequence[int]) -> str:
        words = list(self.ids)
        return "".join(words[token] for token in ids)


def test_sessions(modules: dict[str, ModuleType]) -> None:
    """An edit is asked for with what follows in the next prompt, and has the new name where the file had the old one;
    what is asked besides is forgotten."""
    edits, words, tokens = modules["agent_edits"], Words(), 6
    text = "\n".join(f"word_{name} = word_{name}" for name in "abcdefgh") + "\n"
    asked = [f"question {number}" for number in range(3 * edits.PARTS)]
    turns = edits.session(text, asked, 3, tokens, words, random.Random(0))
    kinds = [kind for kind in edits.KINDS for _ in range(edits.PARTS)]
    assert [turn.kind for turn in turns] == kinds * 3
    prompts = [words.decode(turn.prompt) for turn in turns]
    for number, (turn, prompt) in enumerate(zip(turns, prompts, strict=True)):
        turn_of, place = divmod(number, len(kinds))
        if turn.kind == "written":
            assert prompt.endswith(f"question {edits.PARTS * turn_of + place}\n")
            assert prompt.count("question") == 1
            continue
        old, new = re.findall(r"`(\w+)` renamed to `(\w+)`", prompt)[-1]
        assert new == f"{old}_{edits.GIVEN + turn_of + 2}" and "question" not in prompt
        asking, shown = prompt.rsplit("```python\n", 1)
        assert len(words.encode(shown)) == edits.SHOWN + place % edits.PARTS * tokens
        if turn_of < 2:
            whole = prompts[number + len(kinds)].removeprefix(f"{asking}```python\n").split("```")[0]
            assert whole.startswith(shown) and whole.count(new) == 2


def test_agent_run(modules: dict[str, ModuleType], engines: list[Engine]) -> None:
    edits, engine = modules["agent_edits"], engines[1]
    prompt = engine.tokenizer.encode("def f(a):\n  return a\n")
    found = edits.run(engine, [[edits.Turn(kind, prompt) for kind in edits.KINDS]], 0.7, 12)
    for kind in edits.KINDS:
        assert found[kind]["accept_length"] >= 1 and found[kind]["tokens_per_s"] > 0
        assert 0 <= found[kind]["copied"] <= 1 and 0 <= found[kind]["repeated"] < 1
    assert edits.known([1, 2, 3, 4, 5], [2, 3, 4, 9], 2) == (pytest.approx(2 / 3), 0)
    assert edits.known([1], [7, 8, 7, 8], 2) == (0, pytest.approx(1 / 3))


def test_mixtures(modules: dict[str, ModuleType]) -> None:
    """A quarter written at 100 a second and the rest at 300 is 200 a second."""
    edits = modules["agent_edits"]

    def rates(written: float, edited: float) -> dict[str, dict[str, float]]:
        return {"written": {"tokens_per_s": written}, "edited": {"tokens_per_s": edited}}

    assert edits.mixed(rates(100, 300), 0.25) == pytest.approx(200)
    lines = edits.mixtures({"A": rates(100, 300), "B": rates(200, 100), "A+B": rates(200, 300)}).splitlines()
    assert lines[2].split("|")[2:4] == [" 300 ", " 200 "]
    assert lines[-1].split("|")[2] == " 1.00x " and lines[-1].split("|")[-2] == " 1.00x "
    assert lines[-1].split("|")[3] == f" {(1 / (0.25 / 200 + 0.75 / 300)) / 200:.2f}x "


def test_followed(modules: dict[str, ModuleType]) -> None:
    change = modules["load_change"]
    window = change.WINDOW
    assert change.followed([1.0] * window) == 0
    assert change.followed([0.0] * 30 + [1.0] * 40) == 29
    assert change.followed([0.0] * 100) is None
    assert change.followed([1.0] * (window - 1)) is None


def test_load_change(modules: dict[str, ModuleType], engines: list[Engine]) -> None:
    change, engine = modules["load_change"], engines[1]
    phases = [change.Phase(1, "code", 25), change.Phase(3, "chat", 25)]
    load = change.Load(engine, modules["load_texts"].Texts(engine.tokenizer, 300), 40, 12, 0.0)
    chosen: list[Any] = []
    for phase in phases:
        with modules["load_runs"].watched(engine) as seen:
            load.run(phase, seen)
        chosen.append([step for step in seen if change.full(step, phase)])
    rates = change.pinned_rates(engine, load, phases, chosen)
    load.stop()
    assert engine.idle()
    rows = change.report(phases, chosen, rates)
    assert [row["phase"] for row in rows] == ["1 x code", "3 x chat"]
    picture = ElementTree.fromstring(change.plot(phases, chosen, rows))
    assert "3 x chat" in "".join(picture.itertext())


def test_a_shape_that_was_not_pinned_has_no_share(modules: dict[str, ModuleType]) -> None:
    change, step = modules["load_change"], modules["load_runs"].Step
    seen, rare = TreeShape(3, 1, 4), TreeShape(1, 1, 2)
    steps = [step(0.0, "tree", 1, rare if i == 25 else seen, 2, 0.01) for i in range(60)]
    phase, rates = change.Phase(1, "code", 60), {modules["load_runs"].name_of(seen): 200.0}
    (row,) = change.report([phase], [steps], [rates])
    assert (row["of_best"], row["followed_after"], row["ok"]) == (1.0, 0, True)
    assert change.report([phase], [[step(0.0, "tree", 1, rare, 2, 0.01)]], [rates])[0]["of_best"] is None


def test_a_drafter_held_at_plain_decoding(modules: dict[str, ModuleType], engines: list[Engine]) -> None:
    off, runs = modules["off_is_free"], modules["load_runs"]
    plain, other = (SimpleNamespace(engine=engine, flush_cache=engine.flush_cache) for engine in engines)
    jobs = [runs.Job([5, 6, 7, 5, 6, 7, 5], runs.sampling(0.0, 12, 0))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(off, "generate", lambda llm, *_: lambda: runs.drive(llm.engine, jobs, 1))
        found = off.ratios(plain, other, [], 12, 2, time.perf_counter)
    assert len(found) == 2 and min(found) > 0


def test_steps_of_other_shapes_are_found(modules: dict[str, ModuleType]) -> None:
    runs = modules["load_runs"]
    shape, other = TreeShape(3, 1, 4), TreeShape(1, 1, 2)
    steps = [runs.Step(0.0, kind, 1, one, 1, 0.01) for kind, one in
             (("tree", shape), ("tree", PLAIN), ("prefill", other))]  # fmt: skip
    runs.check_pinned(steps, shape)
    with pytest.raises(AssertionError, match="1-1-2 ran"):
        runs.check_pinned([*steps, steps[0]._replace(shape=other)], shape)


def test_costs_where_requests_never_ran_together(
    modules: dict[str, ModuleType], engines: list[Engine], capsys: pytest.CaptureFixture[str]
) -> None:
    grid, texts = modules["never_slower"], modules["load_texts"].Texts(engines[0].tokenizer, 300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "jobs_of", lambda prompts, temperature, tokens: modules["load_runs"].jobs_of(prompts, 0, 1))
        costs = grid.measure_costs(engines[0], texts, (2,))
    assert not costs.step and "only 0 were" in capsys.readouterr().out
    assert not grid.possible(grid.Cell(2, 50, 0.0, "copy", "NGRAM"), engines[0], costs)


def test_pinned(modules: dict[str, ModuleType], engines: list[Engine]) -> None:
    runs, engine = modules["load_runs"], engines[1]
    policy = engine.parts.sched.choice.policy
    jobs = [runs.Job([5, 6, 7, 5, 6, 7, 5], runs.sampling(0.0, 12, 0))]
    for shape in (policy.menu[0], PLAIN):
        with runs.pinned(engine, shape), runs.watched(engine) as steps:
            runs.drive(engine, jobs, 1)
        assert {step.shape for step in steps if step.kind == "tree"} <= {shape, PLAIN}
        assert shape in {step.shape for step in steps if step.kind == "tree"}
    assert engine.parts.sched.choice.policy is policy
    assert runs.name_of(TreeShape(3, 2, 6)) == "3-2-6"
