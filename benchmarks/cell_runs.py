"""Runs of one combination of load, text and drafter: its prompts, and the speed that comes of them."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from load_runs import Answered, Job, Step, drive, driving, jobs_of, name_of, watched
from load_texts import Texts

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.engine.engine import Engine
from draftwing.engine.startup.measure_costs import delays, since

WAVES = 4  # requests for each that runs
# Prompt tokens of all requests in a run that is not timed: prompts are as long as the cell's up to it.
SETTLING = 32_000
TURN = 8  # steps that an engine makes before the next one does; the first of them follows none of its own
OWN = 100  # tokens of a prompt behind what all have in common


class Cell(NamedTuple):
    requests: int
    prompt: int
    temperature: float
    text: str
    drafter: str


class Run(NamedTuple):
    """Of so many requests at a time."""

    rate: float  # tokens per second
    answers: list[Answered]
    report: dict[str, Any]


class Prompts(NamedTuple):
    """Of cells. cached: they begin alike, and are computed before a run."""

    texts: Texts
    cached: bool

    def of(self, cell: Cell, length: int, count: int, start: int) -> list[list[int]]:
        """`count` of about `length` tokens, others for another `start`."""
        if not self.cached:
            return self.texts.prompts(cell.text, length, count, start)
        prompts = self.texts.prompts(cell.text, min(length, OWN), count, start)
        if length > OWN:
            (begin,) = self.texts.prompts(cell.text, length, 1, 100_000)
            prompts = [begin[: length - len(end)] + end for end in prompts]
        return prompts

    def compute(self, engine: Engine, prompts: Sequence[list[int]]) -> None:
        """Leaves them in the cache. Who comes with the first does not find what they have in common."""
        for some in (prompts[:1], prompts[1:]):
            drive(engine, jobs_of(some, 0.0, 1), max(len(some), 1))

    def settle(self, cell: Cell, each: Engine, tokens: int) -> float:
        """A run that is not timed for the cell, of prompts like its own; tokens per second all the same."""
        length = cell.prompt if self.cached else min(cell.prompt, max(100, SETTLING // cell.requests))
        prompts = self.of(cell, length, cell.requests, 5000)
        if self.cached:
            self.compute(each, prompts)
        return self.timed(each, jobs_of(prompts, cell.temperature, tokens), cell.requests).rate

    def timed(self, engine: Any, jobs: Sequence[Any], requests: int) -> Run:
        """Tokens per second while all requests ran, after a flush where nothing is to be cached, the answers, and how
        often each shape ran, with the tokens of a row and step, and the share of the time in which a thread waited for
        a processor. Requests end one by one and are replaced, as on a server: where all end together their prompts are
        prefilled together, and where nobody comes after them the slowest decides."""
        assert self.cached or engine.flush_cache()
        before = delays()
        with watched(engine) as steps:
            answers, whole, (seconds, written) = drive(engine, jobs, requests)
        found = {**report(steps), "waited": max(since(before)) / whole}
        return Run(written / seconds, answers, found)


class Turns(NamedTuple):
    """An engine's part of a run that several take turns in."""

    answers: list[Answered]
    steps: list[list[Step]]  # of each turn


def in_turn(engines: Sequence[Engine], jobs: Sequence[Job], requests: int) -> list[Turns]:
    """All do the same, some steps each, so that what slows down the machine for seconds slows down all alike."""
    driven = [driving(engine, jobs, requests) for engine in engines]
    found = [Turns([], []) for _ in engines]
    running = set(range(len(engines)))
    while running:
        for one in sorted(running):
            with watched(engines[one]) as steps:
                try:
                    for _ in range(TURN):
                        next(driven[one])
                except StopIteration as end:
                    found[one].answers.extend(end.value.answers)
                    running.remove(one)
            found[one].steps.append(steps)
    return found


def report(steps: Iterable[Step]) -> dict[str, Any]:
    """How often each shape ran, and the tokens of a row and step."""
    trees = [step for step in steps if step.kind == "tree"]
    shapes = Counter(name_of(step.shape) for step in trees)
    rows = sum(step.rows for step in trees)
    length = sum(step.tokens for step in trees) / rows if rows else 1.0
    return {"shapes": dict(shapes.most_common()), "accept_length": length}


class Typical(NamedTuple):
    rate: float  # tokens per second
    plain: float | None  # seconds of a plain step


def typical(runs: Sequence[Sequence[Step]], requests: int) -> Typical:
    """Of steps of all requests that nothing is between, neither a prefill nor another engine's turn, each counted with
    the median time of its shape: what stops a busy machine for a while does not count."""
    times, tokens = defaultdict[TreeShape, list[float]](list), 0
    for before, step in itertools.chain.from_iterable(itertools.pairwise(steps) for steps in runs):
        if before.kind == step.kind == "tree" and before.rows == step.rows == requests:
            times[step.shape].append(step.at - before.at)
            tokens += step.tokens
    middle = {shape: statistics.median(each) for shape, each in times.items()}
    return Typical(tokens / sum(len(each) * middle[shape] for shape, each in times.items()), middle.get(PLAIN))
