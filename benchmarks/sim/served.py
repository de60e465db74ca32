"""Engines that are made up of the scheduler, the policy and one step in flight, on machines whose times were measured.

Each class plays one kind of load and keeps what requests felt: gaps between tokens, times to the first one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
from worlds import H100, H200, Large

from draftwing.config.trees import MAX_CONFIDENCE, PLAIN, TreeShape
from draftwing.core import MARK_ONE, MARK_SURVIVAL, NO_DEFERRAL, Chunk, DraftDeferral, Plan, StepResult
from draftwing.engine.graphs import Key
from draftwing.engine.prefill_graphs import AT_ONCE, MIXED_NODES, MIXED_QUERIES, MIXED_ROWS, takes
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.policy.shape_policy import FixedShape, TreePolicy
from draftwing.sched.req import Req
from draftwing.sched.scheduler import Scheduler, SchedulerConfig
from draftwing.spec.drafter import tree_menu

MIX = (60, 600, 200, 250, 500)  # tokens of prompts


def request(uid: str, prompt: list[int], tokens: int, client: str = "") -> Req:
    asked = GenerationRequest(uid, prompt, SamplingParams(max_new_tokens=tokens), client=client)
    return Req(asked, 0, len(prompt) + tokens, frozenset())


class Served:
    """An engine with one step in flight. A subclass says what steps take and what comes of their outputs."""

    sched: Scheduler

    def __init__(self) -> None:
        self.now = 0.0
        self.todo: list[tuple[float, Req]] = []  # requests to come, with their times
        self.gaps: list[float] = []
        self.last: dict[str, float] = {}
        self.began: dict[str, float] = {}

    def step(self, plan: Plan) -> tuple[StepResult, float]:
        """Returns a step's result, and the seconds in which the host launches it. Of one with parts of prompts in its
        forward: the seconds of both; those of the other count for nothing."""
        raise NotImplementedError

    def output(self, output: Any) -> None:
        """Sees each output after its gap has been noted."""

    def run(self, until: float = float("inf")) -> None:
        """Runs until nothing is left to do, or until then."""
        flying: tuple[list[tuple[Plan, StepResult]], float] | None = None
        free = self.now  # when the device will have nothing to do
        self.todo.sort(key=lambda one: -one[0])
        while (self.todo or not self.sched.idle or flying) and self.now < until:
            while self.todo and self.todo[-1][0] <= self.now:
                self.sched.submit(self.todo.pop()[1])
            plan, before = self.sched.plan(), flying
            flying = None
            if plan is not None:
                (result, launch), *others = map(self.step, plan.parts)
                begin, self.now = max(free, self.now), self.now + launch
                free = max(begin + result.seconds, self.now)
                results = replace(result, seconds=free - begin), *(replace(one, seconds=0.0) for one, _ in others)
                flying = list(zip(plan.parts, results, strict=True)), free
            if before is not None:
                self.now = max(self.now, before[1])
                for done in before[0]:
                    self.sched.commit(*done)
                for output in self.sched.take_outputs():
                    if output.uid in self.last:
                        self.gaps.append(self.now - self.last[output.uid])
                    self.began.setdefault(output.uid, self.now)
                    self.last[output.uid] = self.now
                    self.output(output)
            elif plan is None:
                self.now = self.todo[-1][0] if self.todo else until

    def late(self) -> float:
        """Returns the 99th percentile of gaps, in seconds."""
        return float(np.quantile(self.gaps, 0.99))


# -- an 8B model with a head, on an H200 -----------------------------------------------------------------------------


class OnH200(Served):
    """Drafts survive by `hit` to the power of their depth."""

    TREE, HIT = TreeShape(4, 4, 16), 0.8

    def __init__(self, drafts: bool, world: Callable[[Any], H200] = H200, mixed: bool = False) -> None:
        """mixed: whether parts of prompts and rows that decode share a forward."""
        super().__init__()
        menu = tree_menu(self.TREE) if drafts else (PLAIN,)
        self.world = world(menu)
        policy = TreePolicy(menu, self.world.cost((1, 4, 16, 64, 128))) if drafts else FixedShape(PLAIN)
        if isinstance(policy, FixedShape) and mixed:
            policy.cost = self.world.cost()
        spans = {shape: shape.nodes for shape in menu}
        config = SchedulerConfig(
            200_000, 128, max(spans.values()), 8192, initial_confidence=MAX_CONFIDENCE,
            mixes=mixed_nodes if mixed else None, prefill_sizes=self.world.sizes,
            mixed_sizes=tuple(size for size in self.world.sizes if size >= MIXED_QUERIES), at_once=AT_ONCE,
        )  # fmt: skip
        self.sched = Scheduler(config, policy, spans)

    def step(self, plan: Plan) -> tuple[StepResult, float]:
        rows, shape = len(plan.rows), plan.shape
        order = np.tile(np.arange(shape.nodes), (rows, 1))
        if plan.kind == "tree":
            found = self.world.step(shape, [self.HIT] * rows)
            done = replace(found, tokens=np.ones((rows, shape.max_commit), np.int64), order=order)
            kv_tokens = sum(req.kv for row in plan.rows.tolist() if (req := self.sched.kv.by_row.get(row)) is not None)
            if plan.mixed_prefill is not None:
                tokens = sum(chunk.length for chunk in plan.mixed_prefill.chunks)
                seconds, launch = self.world.prefill(tokens, mixed_nodes(shape, rows))
                seconds += self.world.drafting(shape, rows) + self.world.attention(kv_tokens, plan.mixed_prefill.chunks)
                return replace(done, seconds=seconds), launch
            return replace(done, seconds=done.seconds + self.world.attention(kv_tokens, ())), 1e-3 * self.world.REPLAY
        final = np.asarray([int(chunk.final) for chunk in plan.chunks])
        took, launch = self.world.prefill(sum(chunk.length for chunk in plan.chunks))
        took += self.world.attention(0, plan.chunks)
        confidence = np.full(rows, MAX_CONFIDENCE)
        return StepResult(np.ones((rows, 1), np.int64), final, order, marks(rows, shape), confidence, took), launch


def mixed_nodes(shape: TreeShape, rows: int) -> int:
    size = next((size for size in MIXED_ROWS if size >= rows), MIXED_NODES + 1)
    return size * shape.queries if takes(Key(shape, size)) else 0


def marks(rows: int, shape: TreeShape) -> np.ndarray:
    return np.zeros((rows, shape.nodes), np.int64) + (MARK_ONE << MARK_SURVIVAL)


class OpenLoop(OnH200):
    """Requests that come at random, `rate` a second, for `seconds`; answers of so many `tokens`."""

    def __init__(
        self, drafts: bool, rate: float, mix: Sequence[int] = MIX, tokens: int = 128, seconds: float = 4.0,
        mixed: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(drafts, mixed=mixed)
        rng, at = random.Random(1), 0.0
        for number in range(round(rate * seconds)):
            prompt = [10_000 * (number + 1) + i for i in range(mix[number % len(mix)])]
            self.todo.append((at, request(str(number), prompt, tokens)))
            at += rng.expovariate(rate)
        self.paces: list[float] = []  # seconds of a token, of each answer

    def output(self, output: Any) -> None:
        if output.finish_reason is not None:
            tokens = output.meta["completion_tokens"]
            self.paces.append((self.now - self.began[output.uid]) / (tokens - 1))


class ClosedLoop(OnH200):
    """So many clients, each with a request at a time: a prompt of `size` tokens, an answer of half as many as `tokens`
    to half as many again. They begin one after the other. Prompts are seen in few passes."""

    def __init__(
        self, drafts: bool, clients: int, size: int, tokens: int = 112, seconds: float = 4.0, mixed: bool = False
    ) -> None:
        super().__init__(drafts, FewPasses, mixed)
        self.rng, self.size, self.tokens, self.until, self.number = random.Random(1), size, tokens, seconds, 0
        self.served = 0
        for client in range(clients):
            self.ask(0.05 * client)

    def ask(self, at: float) -> None:
        self.number += 1
        length = round(self.tokens * self.rng.uniform(0.5, 1.5))
        self.todo.append((at, request(str(self.number), [10_000 * self.number + i for i in range(self.size)], length)))
        self.todo.sort(key=lambda one: -one[0])

    def output(self, output: Any) -> None:
        if self.now < self.until:
            self.served += len(output.token_ids)
            if output.finish_reason is not None:
                self.ask(self.now)


class Burst(OnH200):
    """`count` requests that come as soon as fewer than `clients` run, all with answers of as many tokens, after one
    short request; contexts are long. Times are seconds."""

    def __init__(
        self, drafts: bool, clients: int, sizes: Sequence[int], count: int, tokens: int = 128, mixed: bool = False
    ) -> None:
        """sizes: tokens of prompts, which take turns."""
        super().__init__(drafts, H100, mixed)
        self.clients, self.sizes, self.left, self.tokens = clients, sizes, 0, tokens
        self.asked: dict[str, float] = {}
        self.paces: list[float] = []  # of a token, of each answer
        self.ask(200)
        self.run()
        for kept in (self.gaps, self.paces, self.last, self.began, self.asked):
            kept.clear()
        self.begun, self.left = self.now, count
        for _ in range(clients):
            self.ask()

    def ask(self, size: int = 0) -> None:
        number = self.left
        self.left -= size == 0
        prompt = [100_000 * (number + 1) + i for i in range(size or self.sizes[number % len(self.sizes)])]
        self.todo.append((self.now, request(str(number), prompt, self.tokens)))
        self.asked[str(number)] = self.now

    def output(self, output: Any) -> None:
        if output.finish_reason is not None:
            tokens = output.meta["completion_tokens"]
            self.paces.append((self.now - self.began[output.uid]) / (tokens - 1))
            if self.left > 0:
                self.ask()

    def first(self) -> list[float]:
        """Returns times to the first token, ascending."""
        return sorted(at - self.asked[uid] for uid, at in self.began.items())

    def rate(self) -> float:
        """Returns tokens per second."""
        return len(self.paces) * self.tokens / (self.now - self.begun)

    def bound(self) -> float:
        """Returns tokens per second where all prompts are prefilled at the best rate, one behind the other, and all
        clients decode meanwhile or afterwards, in plain steps that share nothing with prompts."""
        count, clients = len(self.paces), self.clients
        sizes = [self.sizes[number % len(self.sizes)] for number in range(count)]
        keys = [Chunk(0, 0, size, True) for size in sizes]
        prompts = 1e-3 * self.world.SLOPE * sum(sizes) + self.world.attention(0, keys)
        context = round(sum(sizes) / count + self.tokens / 2)
        step = self.world.seconds(PLAIN, clients) + self.world.attention(clients * context, ())
        return count * self.tokens / (prompts + count / clients * self.tokens * step)


class Waves(OnH200):
    """Requests that all come at once, when those before have been answered, to a large model whose start has measured
    prefills. Chains of seven, of which two and a half drafts are right."""

    TREE, HIT = TreeShape(7, 1, 8), 0.96

    def __init__(self, drafts: bool, clients: int, size: int, tokens: int = 128) -> None:
        super().__init__(drafts, Large, mixed=True)
        self.clients, self.size, self.tokens, self.waves = clients, size, tokens, 0
        for queries in self.world.sizes:
            if queries >= MIXED_QUERIES:
                self.sched._prefills.record([Chunk(0, 0, queries, True)], self.world.forward(queries))

    def wave(self) -> float:
        """Returns the seconds of one more wave."""
        began, self.waves = self.now, self.waves + 1
        for client in range(self.clients):
            first = 10_000 * (client + 1 + 1000 * self.waves)
            prompt = list(range(first, first + self.size))
            self.todo.append((began, request(f"{self.waves}, {client}", prompt, self.tokens)))
        self.run()
        return self.now - began


class FewPasses(H200):
    HEAD = (0.0, 1.0)


# -- long prompts on a CPU, plain ------------------------------------------------------------------------------------


class LongPrompts(Served):
    """`small` clients with short prompts and `heavy` ones with prompts of 6,000 tokens, each with a request at a time,
    on two cores: a prompt's token takes a tenth of a step, and five times as long where it attends to 4,000 others.
    Times vary by up to `noise`."""

    STEP, ROW, TOKEN, KEY = 0.006, 0.002, 0.85e-3, 0.92e-6  # seconds

    def __init__(self, small: int, heavy: int, noise: float, seed: int = 0) -> None:
        super().__init__()
        config = SchedulerConfig(200_000, 32, 1, 2048, radix=False)
        self.sched = Scheduler(config, FixedShape(PLAIN), {PLAIN: 1})
        self.noise, self.rng, self.numbers = noise, random.Random(seed), count()
        self.asked: dict[str, float] = {}
        self.small: list[float] = []  # gaps
        self.first: dict[str, list[float]] = {"small": [], "heavy": []}
        for kind in ["small"] * small + ["heavy"] * heavy:
            self.ask(kind)

    def ask(self, kind: str) -> None:
        size, tokens = (self.rng.randrange(12, 20), self.rng.randrange(40, 56)) if kind == "small" else (6000, 16)
        uid = f"{kind} {next(self.numbers)}"
        self.asked[uid] = self.now
        self.sched.submit(request(uid, [0] * size, tokens))

    def step(self, plan: Plan) -> tuple[StepResult, float]:
        rows = len(plan.rows)
        final = np.asarray([int(chunk.final) for chunk in plan.chunks] or [1] * rows)
        took = self.prefill(plan.chunks) if plan.chunks else self.STEP + self.ROW * rows
        took *= 1 + self.noise * self.rng.random() ** 3
        zeros = np.zeros((rows, 1), np.int64)
        return StepResult(zeros + 1, final, zeros, zeros, zeros[:, 0], took), 0.0

    @classmethod
    def prefill(cls, chunks: Sequence[Chunk]) -> float:
        return cls.STEP + sum(one.length * (cls.TOKEN + cls.KEY * (one.start + one.length / 2)) for one in chunks)

    def run(self, until: float = float("inf")) -> None:
        flying: tuple[Plan, StepResult] | None = None
        while self.now < until:
            plan, before = self.sched.plan(), flying
            flying = None if plan is None else (plan, self.step(plan)[0])
            if before is not None:
                self.now += before[1].seconds
                self.sched.commit(*before)
                for output in self.sched.take_outputs():
                    self.took(output)

    def took(self, output: Any) -> None:
        kind = output.uid.split()[0]
        if output.uid not in self.last:
            self.first[kind].append(self.now - self.asked[output.uid])
        elif kind == "small":
            self.small.append(self.now - self.last[output.uid])
        self.last[output.uid] = self.now
        if output.finish_reason is not None:
            self.ask(kind)


# -- a draft model of 30 layers, on an H200 --------------------------------------------------------------------------


class WithDraftModel(H200):
    """An 8B model, and one of 30 layers that drafts: its passes over text are launched for longer than the device
    computes, those that grow drafts are in graphs. Milliseconds."""

    ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048)
    TARGET = (4.01, 4.08, 4.34, 5.07, 5.75, 7.9, 13.0, 22.0, 40.0)
    HEAD = (0.0, 1.0)
    PASS, LEVEL = 15.0, 1.4

    def seconds(self, shape: TreeShape, batch: int) -> float:
        grown = self.LEVEL * (shape.depth + 1) if shape.depth else 0.0
        return 1e-3 * (float(np.interp(batch * shape.queries, self.ROWS, self.TARGET)) + grown)


class DraftModel(Served):
    """So many clients, each with a request at a time: a prompt of `size` tokens, answered by 48 to 144. Drafts survive
    by `hit` to the power of their depth."""

    TREE, CONFIDENCE = TreeShape(3, 1, 4), 16

    def __init__(self, drafts: bool, clients: int, size: int, hit: float) -> None:
        super().__init__()
        self.clients, self.size, self.hit = clients, size, hit
        menu = tree_menu(self.TREE) if drafts else (PLAIN,)
        self.world = WithDraftModel(menu)
        cost = self.world.cost((1, 2, 4, 8, 16, 32, 64, 128))
        config = SchedulerConfig(
            330_000, 128, self.TREE.nodes, 8192, initial_confidence=self.CONFIDENCE if drafts else 0,
            skips_extend=frozenset([PLAIN] if drafts else []),
            deferral=DraftDeferral(32_768, 8192, True) if drafts else NO_DEFERRAL,
        )  # fmt: skip
        policy = TreePolicy(menu, cost, True, self.CONFIDENCE) if drafts else FixedShape(PLAIN)
        self.sched = Scheduler(config, policy, {shape: shape.nodes for shape in menu})
        self.rng, self.number, self.left = random.Random(1), 0, max(8 * clients, 200)
        self.ended = self.written = 0
        self.full: list[tuple[float, int]] = []  # when as many had ended as run at a time, and when the last began
        for _ in range(clients):
            self.ask()

    def ask(self) -> None:
        self.number, self.left = self.number + 1, self.left - 1
        length = round(96 * self.rng.uniform(0.5, 1.5))
        self.todo.append(
            (self.now, request(str(self.number), [10_000 * self.number + i for i in range(self.size)], length))
        )
        if not self.left:
            self.full.append((self.now, self.written))

    def output(self, output: Any) -> None:
        self.written += len(output.token_ids)
        if output.finish_reason is not None:
            self.ended += 1
            if self.ended == self.clients:
                self.full.append((self.now, self.written))
            if self.left:
                self.ask()

    def step(self, plan: Plan) -> tuple[StepResult, float]:
        rows, shape = len(plan.rows), plan.shape
        passes = 0 if plan.catch_up is None else plan.catch_up.passes
        passes += -(-sum(part.length for part in plan.shown) // 8192)
        late, order = 1e-3 * self.world.PASS * passes, np.tile(np.arange(shape.nodes), (rows, 1))
        confidence = np.full(rows, self.CONFIDENCE)
        if plan.kind == "tree":
            reqs = [self.sched.kv.by_row[row] for row in plan.rows.tolist()]
            found = self.world.step(shape, [0.02 if req.skipped else self.hit for req in reqs])
            took, launch = found.seconds, 1e-3 * self.world.REPLAY
        else:
            final = np.asarray([int(chunk.final) for chunk in plan.chunks])
            found = StepResult(order, final, order, marks(rows, PLAIN), confidence)
            took, launch = self.world.prefill(sum(chunk.length for chunk in plan.chunks))
            if len(self.world.menu) > 1 and any(chunk.kept is None for chunk in plan.chunks):
                took, launch = took + 1e-3 * self.world.PASS, launch + 1e-3 * self.world.PASS
        tokens = np.ones((rows, shape.max_commit), np.int64)
        done = replace(
            found, tokens=tokens, order=order, confidence=confidence, seconds=took + late, catching_up=late
        )  # fmt: skip
        return done, launch + late

    def rate(self) -> float:
        """Runs it, and returns tokens per second while all clients have a request, after the first wave."""
        self.run()
        (begun, before), (ended, written) = self.full
        return (written - before) / (ended - begun)
