"""Engines under load in this process: how they are made, driven and watched. For the scripts next to it."""

from __future__ import annotations

import gc
import json
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch

from draftwing.config.options import Options
from draftwing.config.trees import PLAIN, TreeShape
from draftwing.engine.engine import Engine
from draftwing.errors import ConfigError
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.policy.shape_policy import FixedShape

TOP_P = {0.7: 0.95}  # by temperature; 1 elsewhere


class Job(NamedTuple):
    """A request and when it comes, in seconds after the start."""

    prompt: list[int]
    params: SamplingParams
    at: float = 0.0


@dataclass
class Answered:
    """One answered request. Times are seconds after the start; `gaps` lie between its outputs."""

    number: int
    came: float
    first: float = 0.0
    end: float = 0.0
    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)

    def seen(self, tokens: list[int], now: float) -> None:
        if not self.tokens:
            self.first = now
        else:
            self.gaps.append(now - self.end)
        self.end = now
        self.tokens += tokens


class Step(NamedTuple):
    """A step that an engine took."""

    at: float  # monotonic seconds of its result
    kind: str  # prefill or tree
    rows: int
    shape: TreeShape
    tokens: int  # committed
    seconds: float
    mixed: bool  # whether parts of prompts were in its forward


def listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Reads values with commas between them."""
    return lambda text: [kind(part) for part in text.split(",")]


def add_arguments(parser: Any) -> None:
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--draft", action="append", default=[], metavar="DRAFTER=PATH", help="the draft model of a drafter"
    )
    parser.add_argument("options", nargs="*", metavar="option=value", help="of all engines")


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """Returns options of an engine from name=value, whose values are JSON or texts."""
    given: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            given[name] = json.loads(value)
        except json.JSONDecodeError:
            given[name] = value
    return given


def given_options(args: Any, drafter: str) -> dict[str, Any]:
    """Options of the engine that drafts so. A pair of drafters uses the draft model of one of its parts."""
    given: dict[str, Any] = {"model": args.model, "speculative_algorithm": drafter, "log_level": "warning"}
    given |= options_of(args.options)
    drafts = dict(pair.split("=", 1) for pair in args.draft)
    for name in (drafter, *drafter.split("+")):
        if name in drafts:
            given["speculative_draft_model_path"] = drafts[name]
            break
    return given


def make_engine(args: Any, drafter: str, **more: Any) -> Engine | None:
    """An engine, or None where there is no such drafter, which one line says."""
    try:
        engine = Engine(Options.from_kwargs(**given_options(args, drafter), **more))
    except ConfigError as error:
        print(f"{drafter}: {error}", flush=True)
        return None
    gc.collect()
    gc.freeze()  # as in the engine's own process: else a step waits 0.1 s now and then
    return engine


def let_go(engine: Engine) -> None:
    """Frees what an engine holds of the device's memory."""
    engine.close()
    gc.unfreeze()  # what is frozen is never freed, and parts of an engine know each other
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def sampling(temperature: float, tokens: int, seed: int, may_end: bool = False) -> SamplingParams:
    """Of an answer of exactly so many tokens, or of fewer where it may end before."""
    return SamplingParams(
        temperature=temperature, top_p=TOP_P.get(temperature, 1.0), max_new_tokens=tokens,
        ignore_eos=not may_end, sampling_seed=seed,
    )  # fmt: skip


def jobs_of(
    prompts: Sequence[list[int]], temperature: float, tokens: int, spread: float = 0.0, seed: int = 0
) -> list[Job]:
    """tokens: of an answer, more or less by a random share up to `spread`."""
    rng = random.Random(f"{len(prompts)} {seed}")
    sizes = [max(1, round(tokens * (1 + spread * rng.uniform(-1, 1)))) for _ in prompts]
    return [
        Job(prompt, sampling(temperature, size, index))
        for index, (prompt, size) in enumerate(zip(prompts, sizes, strict=True))
    ]


class Driven(NamedTuple):
    """full: seconds from when as many requests had ended as run at a time to when the last one began, in which as many
    ran as may and began and ended one by one, and the tokens that were written in them. Before, all prompts of the
    first are prefilled at once; whoever writes faster has done less of that by the time that the first of them ends."""

    answers: list[Answered]  # in the order of the jobs
    seconds: float
    full: tuple[float, int]


def drive(engine: Engine, jobs: Sequence[Job], at_once: int | None = None) -> Driven:
    """at_once: most requests that run at a time; without it each comes at its time."""
    steps = driving(engine, jobs, at_once)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast(Driven, end.value)


def driving(engine: Engine, jobs: Sequence[Job], at_once: int | None = None) -> Generator[None, None, Driven]:
    """As `drive`, step by step, so that engines can take turns."""
    waiting, running, done = deque(enumerate(jobs)), dict[str, Answered](), list[Answered]()
    start, written = time.monotonic(), 0
    marks: list[tuple[float, int]] = []  # when the first wave had ended, when the last began
    while waiting or running:
        now = time.monotonic() - start
        while waiting and (waiting[0][1].at <= now if at_once is None else len(running) < at_once):
            number, job = waiting.popleft()
            uid = uuid.uuid4().hex
            engine.submit(GenerationRequest(uid, job.prompt, job.params))
            running[uid] = Answered(number, job.at if at_once is None else now)
        if len(marks) == 1 and not waiting:
            marks.append((now, written))
        if not running:
            time.sleep(max(0.0, waiting[0][1].at - now))
            continue
        outputs = engine.step()
        now = time.monotonic() - start
        for output in outputs:
            answer = running[output.uid]
            answer.seen(output.token_ids, now)
            written += len(output.token_ids)
            if output.finish_reason is not None:
                answer.meta = output.meta
                done.append(running.pop(output.uid))
        if len(done) >= (at_once or 1) and not marks:
            marks.append((now, written))
        yield
    seconds = time.monotonic() - start
    while not engine.idle():  # a step that was launched before the last result was known
        engine.step()
    full = (seconds, written)
    if len(marks) == 2 and marks[1][1] > marks[0][1]:
        full = marks[1][0] - marks[0][0], marks[1][1] - marks[0][1]
    return Driven(sorted(done, key=lambda answer: answer.number), seconds, full)


@contextmanager
def watched(engine: Engine) -> Iterator[list[Step]]:
    """Steps of the engine, as they come."""
    loop: Any = engine._loop
    before: Callable[..., None] = loop._watch
    steps: list[Step] = []

    def watch(plan: Any, result: Any) -> None:
        before(plan, result)
        count = int(result.count.sum())
        mixed = plan.mixed_prefill is not None
        steps.append(Step(time.monotonic(), plan.kind, len(plan.rows), plan.shape, count, result.seconds, mixed))

    loop._watch = watch
    try:
        yield steps
    finally:
        loop._watch = before


@contextmanager
def pinned(engine: Engine, shape: TreeShape) -> Iterator[None]:
    """One shape of the engine's menu is taken wherever anything can be drafted, and nothing is learnt."""
    with engine.parts.sched.choice.replaced(FixedShape(shape)):
        yield


def check_pinned(steps: Sequence[Step], shape: TreeShape) -> None:
    """Raises AssertionError if a step drafted anything else."""
    others = {step.shape for step in steps if step.kind == "tree"} - {shape, PLAIN}
    assert not others, f"{name_of(shape)} was pinned, but {', '.join(map(name_of, others))} ran"


def fixed_shapes(engine: Engine) -> list[TreeShape]:
    """Shapes of the menu that verify all nodes that are drafted by all drafters: what a user can pin."""
    menu = engine.parts.sched.choice.policy.menu
    return [shape for shape in menu if not shape.verified and not shape.proposer]


def name_of(shape: TreeShape) -> str:
    return "-".join(str(part) for part in shape.tree) + "".join(f"/{part}" for part in shape[3:] if part)


def quantile(values: Sequence[float], share: float) -> float:
    """0 for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def machine() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}"
