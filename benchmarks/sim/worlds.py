"""Machines and texts that are made up, on which expected tokens per second are known."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import ClassVar

import numpy as np

from draftwing.config.trees import MAX_CONFIDENCE, TreeShape
from draftwing.core import MARK_ONE, MARK_SURVIVAL, MARK_VERIFIED, Chunk, StepResult
from draftwing.engine.prefill_graphs import MIXED_QUERIES, SIZES, slow_sizes
from draftwing.engine.startup.measure_costs import CONTEXTS
from draftwing.sched.policy.cost import StepCost
from draftwing.sched.policy.shape_policy import StepContext, TreePolicy

TREE = TreeShape(5, 4, 16)


class World:
    """A machine on which a step costs (base + per query + per level), and requests whose drafts survive by `hit`
    to the power of their depth, spread over a tree of `topk` nodes a level."""

    kv_tokens = 0  # of a batch, which cost nothing

    def __init__(self, menu: Sequence[TreeShape], base: float, query: float, level: float, seed: int = 0) -> None:
        self.menu, self.base, self.query, self.level = menu, base, query, level
        self.rng = random.Random(seed)

    def seconds(self, shape: TreeShape, batch: int) -> float:
        return 1e-3 * (self.base + self.query * batch * shape.queries + self.level * shape.depth)

    def cost(self, sizes: Sequence[int] = (1, 4, 16, 64)) -> StepCost:
        """Returns what the policy knows at the start: every shape measured at these batch sizes."""
        cost = StepCost(self.menu, False)
        for shape in self.menu:
            for size in sizes:
                cost.measured(shape, size, 0, self.seconds(shape, size))
        return cost

    def step(self, shape: TreeShape, hits: Sequence[float], noise: float = 0.1) -> StepResult:
        trees, drafts = [survivals(shape, hit) for hit in hits], best_drafts(shape, tuple(hits))
        spare = len(hits) * (shape.queries - 1)
        least = drafts[min(spare, len(drafts)) - 1] if spare and drafts else 2.0
        mark, count = np.zeros((len(hits), shape.nodes), np.int64), []
        for b, tree in enumerate(trees):
            accepted = 1
            for n, (survival, depth) in enumerate(tree):
                verified = depth > 0 and survival >= least
                claimed = min(1.0, survival * (1 + noise * (self.rng.random() - 0.5)))
                mark[b, n] = depth + verified * MARK_VERIFIED + (int(claimed * MARK_ONE) << MARK_SURVIVAL)
                accepted += verified and self.rng.random() < survival
            count.append(min(accepted, shape.depth + 1))
        seconds = self.seconds(shape, len(hits)) * self.rng.uniform(0.97, 1.05)
        zeros = np.zeros((len(hits), shape.nodes), np.int64)
        return StepResult(zeros, np.asarray(count), zeros, mark, np.full(len(hits), MAX_CONFIDENCE), seconds)

    def tokens(self, shape: TreeShape, hits: Sequence[float]) -> float:
        """Expected."""
        return len(hits) + sum(best_drafts(shape, tuple(hits))[: len(hits) * (shape.queries - 1)])

    def rate(self, shape: TreeShape, hits: Sequence[float]) -> float:
        return self.tokens(shape, hits) / self.seconds(shape, len(hits))

    def run(self, policy: TreePolicy, hits: Sequence[float], steps: int, lag: int = 0) -> tuple[float, list[TreeShape]]:
        """lag: steps that are chosen before a step's result comes  -> tokens per second, and what was chosen"""
        load, tokens, seconds, chosen = StepContext([MAX_CONFIDENCE] * len(hits), self.kv_tokens), 0.0, 0.0, []
        flying: deque[tuple[TreeShape, StepResult]] = deque()
        for _ in range(steps):
            shape = policy.choose(load)
            flying.append((shape, self.step(shape, hits)))
            if len(flying) > lag:
                ended, result = flying.popleft()
                policy.record(ended, load, result)
            tokens, seconds = tokens + self.tokens(shape, hits), seconds + self.seconds(shape, len(hits))
            chosen.append(shape)
        for ended, result in flying:
            policy.record(ended, load, result)
        return tokens / seconds, chosen


class WithKeys(World):
    """A step costs `KEY` more for each token of the batch's contexts, and a tenth of that for each further query."""

    KEY = 3e-4  # milliseconds

    def seconds(self, shape: TreeShape, batch: int) -> float:
        return super().seconds(shape, batch) + 1e-3 * self.KEY * self.kv_tokens * (1 + 0.1 * (shape.queries - 1))


@cache
def survivals(shape: TreeShape, hit: float) -> tuple[tuple[float, int], ...]:
    """Survival and depth of the nodes of a tree, the root first: at each level the best child takes most of it."""
    nodes = [(1.0, 0)]
    share = [0.75, 0.15, 0.07, 0.03][: shape.topk]
    for node in nodes:
        if node[1] < shape.depth and len(nodes) < 200:
            nodes += [(node[0] * hit * s, node[1] + 1) for s in share]
    best = sorted(nodes[1:], key=lambda n: -n[0])[: shape.nodes - 1]
    return (nodes[0], *best, *[(0.0, 0)] * (shape.nodes - 1 - len(best)))


@cache
def best_drafts(shape: TreeShape, hits: tuple[float, ...]) -> list[float]:
    """Survivals of all nodes of a batch but the roots, the highest first."""
    return sorted((survival for hit in hits for survival, _ in survivals(shape, hit)[1:]), reverse=True)


class H200(World):
    """An 8B model with an EAGLE-3 head: milliseconds that were measured, with contexts of a few hundred tokens."""

    ROWS = (1, 16, 64, 128, 256, 512, 1024, 2048)  # of the target
    TARGET = (4.05, 4.35, 5.1, 5.8, 7.9, 13.0, 22.0, 40.0)
    DRAFT: ClassVar = {
        0: (0.0, 0.0),
        1: (0.02, 0.0),
        2: (0.22, 0.0045),
        3: (0.45, 0.01),
        4: (0.7, 0.018),
    }  # and for each row

    def __init__(self, menu: Sequence[TreeShape], seed: int = 0) -> None:
        super().__init__(menu, 0.0, 0.0, 0.0, seed)
        slow = slow_sizes({size: self.forward(size) for size in SIZES if size >= MIXED_QUERIES})
        self.sizes = tuple(size for size in SIZES if size not in slow)  # of graphs of prompts

    def seconds(self, shape: TreeShape, batch: int) -> float:
        rows = batch * shape.queries
        at = min(max(bisect_left(self.ROWS, rows), 1), len(self.ROWS) - 1)
        (low, high), (less, more) = self.ROWS[at - 1 : at + 1], self.TARGET[at - 1 : at + 1]
        return 1e-3 * (less + (more - less) * (rows - low) / (high - low)) + self.drafting(shape, batch)

    def drafting(self, shape: TreeShape, batch: int) -> float:
        fixed, each = self.DRAFT[min(shape.depth, 4)]
        extend = 0.25 + 0.0035 * batch if shape.depth else 0.0
        return 1e-3 * (fixed + each * batch + extend)

    PROMPT = (0, 32, 128, 256, 512, 775, 1022, 1493)  # tokens of a prefill
    PREFILL = (4.9, 4.95, 5.7, 7.35, 11.0, 15.97, 19.74, 28.5)
    SLOPE = (PREFILL[-1] - PREFILL[-2]) / (PROMPT[-1] - PROMPT[-2])  # for each token more
    HEAD = (0.3, 1.04)  # and with the head's
    LAUNCH, REPLAY = 17.0, 0.5  # milliseconds of the host: of a prefill, of one that was captured

    def prefill(self, tokens: int, nodes: int = 0) -> tuple[float, float]:
        """nodes: of trees in the same forward -> seconds of the device, and of the host before it can look at anything
        else"""
        queries, least = tokens + nodes, MIXED_QUERIES if nodes else 0
        captured = queries <= self.sizes[-1]
        queries = next(size for size in self.sizes if size >= max(queries, least)) if captured else queries
        more, times = self.HEAD if len(self.menu) > 1 else (0.0, 1.0)
        return 1e-3 * more + times * self.forward(queries), 1e-3 * (self.REPLAY if captured else self.LAUNCH)

    def forward(self, queries: int) -> float:
        """Returns seconds of a forward of the target over prompts."""
        took = np.interp(queries, self.PROMPT, self.PREFILL) + self.SLOPE * max(queries - self.PROMPT[-1], 0)
        return 1e-3 * float(took)

    def attention(self, kv_tokens: int, chunks: Sequence[Chunk]) -> float:
        """Returns seconds beyond those of short contexts: of a step's rows, and of prompts."""
        return 0.0


class H100(H200):
    """The same of an H100, as its steps and forwards were measured one by one, where keys cost time."""

    TARGET = (5.5, 5.8, 6.4, 7.1, 9.0, 12.5, 20.5, 39.0)
    PROMPT = (0, 32, 128, 256, 384, 512, 640, 768, 896, 1024, 2048)
    PREFILL = (5.6, 5.7, 6.4, 7.8, 9.0, 10.5, 13.0, 15.3, 20.0, 19.5, 38.5)
    SLOPE = 0.0188
    HEAD = (0.0, 1.0)
    KEY, PROMPT_KEY = 47.7e-9, 0.9e-9  # seconds, of a row, and of a token of a prompt
    FILLS = 64  # tokens of prompts that fill the device: fewer attend to their keys in the time of as many

    def attention(self, kv_tokens: int, chunks: Sequence[Chunk]) -> float:
        keys = sum(length * (start + length / 2) for _, start, length, *_ in chunks)
        tokens = sum(length for _, _, length, *_ in chunks)
        return self.KEY * kv_tokens + self.PROMPT_KEY * keys * max(self.FILLS / max(tokens, 1), 1.0)

    def cost(self, sizes: Sequence[int] = (1, 8, 32, 128)) -> StepCost:
        """As a start measures it, with contexts, too."""
        cost = super().cost(sizes)
        for shape in self.menu:
            for size in sizes:
                for context in CONTEXTS:
                    kv_tokens = size * context
                    cost.measured(shape, size, kv_tokens, self.seconds(shape, size) + self.attention(kv_tokens, ()))
        return cost


class Large(H200):
    """A hybrid of 27B in FP8 with a DFlash2 head of five layers, as it was measured: forwards of a few hundred tokens
    take a half of what a thousand do."""

    ROWS = (1, 16, 32, 64, 128, 256, 512, 1024)
    TARGET = (7.95, 9.1, 9.8, 10.9, 13.7, 20.0, 38.0, 75.0)
    PROMPT = (0, 32, 128, 256, 384, 512, 1024, 2048, 4096)
    PREFILL = (14.0, 15.0, 21.0, 36.0, 44.0, 50.0, 86.0, 160.0, 315.0)
    SLOPE = 0.075
    HEAD = (0.3, 1.02)

    def drafting(self, shape: TreeShape, batch: int) -> float:
        return 1e-3 * (1.7 + 0.112 * batch) if shape.depth else 0.0


MACHINES = {
    "gpu": lambda menu: World(menu, 4.0, 0.012, 0.25),
    "small machine": lambda menu: World(menu, 2.0, 0.5, 0.6),
    "drafts cost nothing": lambda menu: World(menu, 4.0, 0.02, 0.0),
}
