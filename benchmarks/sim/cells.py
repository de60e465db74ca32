"""The simulated loads that a change of the policy is judged by. Each cell is a function that returns figures by name.

Figures: `none`, tokens per second over those without drafts; `best`, over those of the best fixed shape; `gap`,
the 99th percentile of gaps over that without drafts; `steps` until a change of load is followed; `us`, microseconds
of the host; `share` and `seconds` as the cell's name says; of a burst `first`, and `bound`, of which more is better.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from crowd import TIMES, gap_with_a_crowd, wave
from served import MIX, Burst, ClosedLoop, DraftModel, LongPrompts, OpenLoop, Waves
from worlds import MACHINES, TREE, WithKeys, World

from draftwing.config.trees import LOOKUP_ALONE, MAX_CONFIDENCE, PLAIN, TreeShape
from draftwing.core import Chunk, StepResult
from draftwing.sched.policy.cost import StepCost
from draftwing.sched.policy.shape_policy import StepContext, TreePolicy
from draftwing.spec.drafter import match_menu, tree_menu

Figures = dict[str, float]
CELLS: dict[str, Callable[[], Figures]] = {}
LIMIT = 1024  # queries of a step that count for the best shape
BASELINE = Path(__file__).with_name("baseline.json")
MORE_IS_BETTER = ("none", "best", "share", "bound")
NOISE = {"steps": 20.0, "most": 20.0, "us": 40.0, "record": 40.0}  # in their own units: less says nothing


def worse(name: str, figure: float, known: float) -> bool:
    """Returns whether a figure is worse than a known one by more than noise."""
    if name in MORE_IS_BETTER:
        return figure < 0.98 * known
    return figure > 1.1 * known + NOISE.get(name, 0.0)


def possible(world: World, batch: int) -> list[TreeShape]:
    return [shape for shape in world.menu if batch * shape.queries <= LIMIT or not shape.depth]


def against(world: World, hits: Sequence[float], rate: float) -> Figures:
    best = max(world.rate(shape, hits) for shape in possible(world, len(hits)))
    return {"none": rate / world.rate(PLAIN, hits), "best": rate / best}


# -- one load that stays ---------------------------------------------------------------------------------------------


def steady(machine: str, batch: int, hit: float) -> Figures:
    world = MACHINES[machine](tree_menu(TREE))
    policy, hits = TreePolicy(world.menu, world.cost()), [hit] * batch
    world.run(policy, hits, 60, 1)
    rate, _ = world.run(policy, hits, 1000 if batch < 64 else 400, 1)
    return against(world, hits, rate)


for machine in MACHINES:
    for batch in (1, 4, 16, 64):
        for hit in (0.05, 0.5, 0.95):
            CELLS[f"steady / {machine} / {batch} x {hit}"] = partial(steady, machine, batch, hit)


def hopeless() -> Figures:
    world = World(tree_menu(TREE), 4.0, 3.0, 20.0)
    rate, _ = world.run(TreePolicy(world.menu, world.cost()), [0.8] * 4, 10_000)
    return against(world, [0.8] * 4, rate)


def hopeless_everywhere() -> Figures:
    menu = (*tree_menu(TreeShape(7, 4, 16))[:-1], *tree_menu(TREE))
    world = World(menu, 4.0, 0.2, 4.0)
    policy, rows = TreePolicy(menu, world.cost((1, 2, 4, 8, 16, 32, 64))), (1, 2, 4, 8, 16, 32, 64)
    took = ideal = 0.0
    for turn in range(20):
        for batch in rows:
            hits = [0.8] * batch
            rate, _ = world.run(policy, hits, 100)
            if turn > 5:
                took, ideal = took + batch * 100 / rate, ideal + 100 * world.seconds(PLAIN, batch)
    return {"none": ideal / took}


CELLS["never pays / one load"] = hopeless
CELLS["never pays / loads of 1 to 64"] = hopeless_everywhere


# -- costs that are wrong --------------------------------------------------------------------------------------------


def busy(machine: str, hit: float, by: float) -> Figures:
    """The best option was measured while the machine was busy."""
    world, hits = MACHINES[machine](tree_menu(TREE)), [hit] * 8
    best = max(world.menu, key=lambda shape: world.rate(shape, hits))
    cost = world.cost((8,))
    cost.measured(best, 8, 0, by * world.seconds(best, 8))
    policy = TreePolicy(world.menu, cost)
    world.run(policy, hits, 2000)
    rate, _ = world.run(policy, hits, 300)
    return against(world, hits, rate)


def wrong_keys(context: int, by: float, tokens: int) -> Figures:
    """A start has measured steps of 1 and 4 requests without context, and of 1 with 1,024 tokens. The best shape of 4
    was measured once more on another day, with so much `context`: `by` times too slow. Now contexts have `tokens`."""
    world, hits = WithKeys(tree_menu(TREE), 2.0, 0.5, 0.6), [0.8] * 4
    cost, world.kv_tokens = world.cost((1, 4)), 1024
    for shape in world.menu:
        cost.measured(shape, 1, 1024, world.seconds(shape, 1))
    world.kv_tokens = tokens
    best = max(world.menu, key=lambda shape: world.rate(shape, hits))
    world.kv_tokens = context
    cost.measured(best, 4, context, by * world.seconds(best, 4))
    world.kv_tokens = tokens
    rate, _ = world.run(TreePolicy(world.menu, cost), hits, 600)
    return against(world, hits, rate)


def all_trees(by: float, which: str) -> Figures:
    world, hits = MACHINES["gpu"](tree_menu(TREE)), [0.8] * 4
    best, cost = max(world.menu, key=lambda shape: world.rate(shape, hits)), world.cost()
    for shape in (best,) if which == "the best" else world.menu[:-1]:
        for size in (1, 4, 16, 64):
            cost.measured(shape, size, 0, by * world.seconds(shape, size))
    policy = TreePolicy(world.menu, cost)
    world.run(policy, hits, round(6000 * by))
    rate, _ = world.run(policy, hits, 1000)
    return against(world, hits, rate)


def unmeasured() -> Figures:
    world, hits = MACHINES["gpu"](tree_menu(TREE)), [0.9] * 2
    cost = StepCost(world.menu, False)
    cost.measured(PLAIN, 1, 0, world.seconds(PLAIN, 1))
    policy = TreePolicy(world.menu, cost)
    world.run(policy, hits, 400)
    rate, _ = world.run(policy, hits, 200)
    return against(world, hits, rate)


class Slower(World):
    """A machine whose speed changes: from some step on all of it, or trees alone, take `by` times as long."""

    by = 1.0
    trees = 1.0

    def step(self, shape: TreeShape, hits: Sequence[float], noise: float = 0.1) -> StepResult:
        found = super().step(shape, hits, noise)
        return replace(found, seconds=found.seconds * self.by * (self.trees if shape.depth else 1.0))


def speed(by: float, trees: float, hit: float) -> Figures:
    """Whole or in part slower from one step on, after a long time; tokens per second over the best shape's."""
    menu = tree_menu(TREE)
    world, hits = Slower(menu, 4.0, 0.012, 0.25), [hit] * 8
    policy = TreePolicy(menu, world.cost())
    world.run(policy, hits, 500, 1)
    world.by, world.trees = by, trees
    world.run(policy, hits, 500, 1)
    _, chosen = world.run(policy, hits, 500, 1)

    def rate(shape: TreeShape) -> float:
        return world.rate(shape, hits) / (by * (trees if shape.depth else 1.0))

    got = len(chosen) / sum(1 / rate(shape) * world.tokens(shape, hits) for shape in chosen)
    got *= sum(world.tokens(shape, hits) for shape in chosen) / len(chosen)
    return {"none": got / rate(PLAIN), "best": got / max(map(rate, menu))}


def too_cheap(by: float) -> Figures:
    """All trees look cheap when sixteen rows come first, as a start on a busy machine may have measured them; how many
    of the first 100 steps draft, which brings nothing."""
    world, hits = MACHINES["small machine"](tree_menu(TREE)), [0.05] * 16
    cost = world.cost()
    for shape in world.menu[:-1]:
        cost.measured(shape, 16, 0, world.seconds(shape, 16) / by)
    _, chosen = world.run(TreePolicy(world.menu, cost), hits, 100, 1)
    return {"steps": sum(shape != PLAIN for shape in chosen)}


def unsteady(by: float, hit: float, trees: float = 1.0) -> Figures:
    """For 5 to 20 steps at a time everything takes `by` times as long, and as many steps it does not; trees cost the
    `trees` part of what was measured. Each step counts as on a steady machine. The mean of three draws, which differ by
    some hundredths."""
    menu, hits, found = tree_menu(TREE), [hit] * 4, list[float]()
    for seed in (5, 6, 7):
        world, rng = Slower(menu, 4.0, 0.25, 0.25), random.Random(seed)
        policy, tokens, seconds = TreePolicy(menu, world.cost()), 0.0, 0.0
        world.trees = trees
        for turn in range(120):
            world.by, steps = by if turn % 2 else 1.0, rng.randint(5, 20)
            _, chosen = world.run(policy, hits, steps, 1)
            tokens += sum(world.tokens(shape, hits) for shape in chosen)
            seconds += sum(world.seconds(shape, len(hits)) * (trees if shape.depth else 1.0) for shape in chosen)
        found.append(tokens / seconds / world.rate(PLAIN, hits))
    return {"none": statistics.mean(found)}


CELLS["busy when measured / none is best"] = partial(busy, "small machine", 0.05, 1.8)
CELLS["busy when measured / a tree is best"] = partial(busy, "gpu", 0.8, 1.4)
for by in (2.5, 5.0):
    for which in ("the best", "all trees"):
        CELLS[f"measured {by} x too slow / {which}"] = partial(all_trees, by, which)
for context in (200, 600):
    for tokens in (2000, 8000):
        name = f"key's price / {context} tokens 1.9 x too slow / {tokens}"
        CELLS[name] = partial(wrong_keys, context, 1.9, tokens)
for by in (2.0, 4.0):
    CELLS[f"measured {by} x too fast / 16 rows come first"] = partial(too_cheap, by)
for hit, trees in ((0.1, 1.0), (0.8, 1.0), (0.8, 0.5)):
    CELLS[f"stretches of 3 x slower / {hit}, trees {trees}"] = partial(unsteady, 3.0, hit, trees)
CELLS["not measured"] = unmeasured
CELLS["machine becomes 2 x slower"] = partial(speed, 2.0, 1.0, 0.8)
CELLS["machine becomes 2 x faster"] = partial(speed, 0.5, 1.0, 0.8)
CELLS["trees become 2.5 x slower"] = partial(speed, 1.0, 2.5, 0.8)
CELLS["trees become 2 x faster, text is bad"] = partial(speed, 1.0, 0.5, 0.3)


# -- a load that changes ---------------------------------------------------------------------------------------------


def settle(machine: str, before: Sequence[float], after: Sequence[float], lag: int, steps: int) -> int:
    """Returns the steps until most of ten choices in a row are within 3% of the best."""
    world = MACHINES[machine](tree_menu(TREE))
    policy = TreePolicy(world.menu, world.cost())
    world.run(policy, before, steps, lag)
    _, chosen = world.run(policy, after, 200, lag)
    best = max(world.rate(shape, after) for shape in possible(world, len(after)))
    good = [world.rate(shape, after) > 0.97 * best for shape in chosen]
    return next((i for i in range(len(good) - 10) if sum(good[i : i + 10]) >= 8), 200)


def change(machine: str, before: Sequence[float], after: Sequence[float]) -> Figures:
    took = sorted(settle(machine, before, after, 1, steps) for steps in (300, 317, 334, 351, 368))
    return {"steps": took[2], "most": took[-1]}


for machine in ("gpu", "small machine"):
    for batch in (1, 8):
        CELLS[f"text becomes good / {machine} / {batch}"] = partial(change, machine, [0.1] * batch, [0.95] * batch)
        CELLS[f"text becomes bad / {machine} / {batch}"] = partial(change, machine, [0.95] * batch, [0.1] * batch)
    CELLS[f"1 request, then 64 / {machine}"] = partial(change, machine, [0.8], [0.8] * 64)
    CELLS[f"64 requests, then 1 / {machine}"] = partial(change, machine, [0.8] * 64, [0.8])


# -- confidences that tell steps apart -------------------------------------------------------------------------------


def matches(hit: float, share: float, query: float) -> Figures:
    """Eight rows of a lookup: matches begin and end, results come a step late."""
    menu, rng, rows = match_menu(TreeShape(6, 1, 7)), random.Random(3), 8
    world = World(menu, 4.0, query, 0.0)
    policy = TreePolicy(menu, world.cost((8,)), True, 0)
    found = [False] * rows
    flying: deque[tuple[TreeShape, StepContext, StepResult]] = deque()
    tokens = seconds = plain = 0.0
    for number in range(2000):
        found = [rng.random() < (0.85 if match else 0.15 * share / (1 - share)) for match in found]
        now = StepContext([5 if match else 0 for match in found])
        shape, hits = policy.choose(now), [hit if match else 0.0 for match in found]
        flying.append((shape, now, world.step(shape, hits)))
        if number > 300:
            tokens, seconds = tokens + world.tokens(shape, hits), seconds + world.seconds(shape, rows)
            plain += world.seconds(PLAIN, rows) * world.tokens(shape, hits) / rows
        if len(flying) > 1:
            policy.record(*flying.popleft())
    return {"none": plain / seconds}


CELLS["lookup / good matches"] = partial(matches, 0.98, 0.5, 0.001)
CELLS["lookup / bad matches"] = partial(matches, 0.2, 0.5, 0.1)
CELLS["lookup / rare matches"] = partial(matches, 0.9, 0.1, 0.1)


def two_confidences() -> Figures:
    """One row whose matches are long and good, or short and bad, in turn."""
    menu = match_menu(TreeShape(11, 10, 12))
    world = World(menu, 4.0, 0.3, 0.0)
    policy = TreePolicy(menu, world.cost(), True, 0)
    tokens = seconds = ideal = plain = 0.0
    for turn in range(1000):
        confidence, hit = (20, 0.99) if turn % 2 else (3, 0.05)
        now = StepContext([confidence])
        shape = policy.choose(now)
        policy.record(shape, now, world.step(shape, [hit]))
        if turn > 300:
            tokens, seconds = tokens + world.tokens(shape, [hit]), seconds + world.seconds(shape, 1)
            best = max(menu, key=lambda one: world.rate(one, [hit]))
            ideal += world.seconds(best, 1) * world.tokens(shape, [hit]) / world.tokens(best, [hit])
            plain += world.seconds(PLAIN, 1) * world.tokens(shape, [hit])
    return {"none": plain / seconds, "best": ideal / seconds}


CELLS["lookup / two confidences in turn"] = two_confidences


# -- a drafter that has to catch up ----------------------------------------------------------------------------------


def interrupted(hurry: bool) -> Figures:
    """Behind each second step comes a prefill that leaves no time for drafts, and to begin anew takes a pass."""
    menu, hits, a_pass = (TreeShape(1, 1, 2), PLAIN), [0.7] * 16, 0.004
    world = MACHINES["gpu"](menu)
    policy, load = TreePolicy(menu, world.cost((16,))), StepContext([MAX_CONFIDENCE] * 16)
    tokens = seconds = 0.0
    before = PLAIN
    for number in range(1200):
        now = load._replace(latency_slack=0.0) if (hurry or number < 400) and number % 2 else load
        shape = policy.choose(now)
        late = a_pass if shape.depth and before == PLAIN else 0.0
        step = world.step(shape, hits)
        policy.record(shape, now, replace(step, seconds=step.seconds + late, catching_up=late))
        if number >= 400:
            tokens, seconds = tokens + world.tokens(shape, hits), seconds + step.seconds + late
        before = shape
    return {"none": tokens / seconds / world.rate(PLAIN, hits)}


def far_behind(rows: int, hit: float) -> Figures:
    menu, a_pass = (TreeShape(2, 1, 3), PLAIN), 0.02
    world = World(menu, 15.0, 0.02, 0.1)
    policy = TreePolicy(menu, world.cost((rows,)))
    seconds = tokens = rest = 0.0
    for _ in range(2000):
        load = StepContext([MAX_CONFIDENCE] * rows, backlog_passes=1 + int(-(-rest * rows // 8192)))
        shape = policy.choose(load)
        late = a_pass * (1 + -(-rest * rows // 8192)) if shape.depth and rest else 0.0
        rest = 0 if shape.depth else min(rest + 1, 512)
        step = world.step(shape, [hit] * rows)
        policy.record(shape, load, replace(step, seconds=step.seconds + late, catching_up=late))
        seconds, tokens = seconds + step.seconds + late, tokens + int(step.count.sum())
    return {"none": tokens / seconds / world.rate(PLAIN, [hit] * rows)}


CELLS["drafts are interrupted"] = partial(interrupted, True)
CELLS["drafts are no longer interrupted"] = partial(interrupted, False)
for rows in (1, 64):
    for hit in (0.02, 0.98):
        CELLS[f"drafter far behind / {rows} x {hit}"] = partial(far_behind, rows, hit)


# -- the scheduler with it -------------------------------------------------------------------------------------------


def open_loop(rate: float, mix: Sequence[int]) -> Figures:
    plain, drafted = OpenLoop(False, rate, mix), OpenLoop(True, rate, mix)
    plain.run()
    drafted.run()
    return {
        "gap": drafted.late() / plain.late(),
        "none": statistics.median(plain.paces) / statistics.median(drafted.paces),
    }


def closed_loop(clients: int, size: int) -> Figures:
    plain, drafted = ClosedLoop(False, clients, size), ClosedLoop(True, clients, size)
    plain.run()
    drafted.run()
    return {"gap": drafted.late() / plain.late(), "none": drafted.served / plain.served}


for rate, mix in ((12, MIX), (30, MIX), (45, MIX), (60, (100,))):
    CELLS[f"open loop / {rate} a second of {max(mix)}"] = partial(open_loop, rate, mix)
CELLS["prompts wait at every step / 16 x 4000"] = partial(closed_loop, 16, 4000)
CELLS["closed loop / 16 x 300"] = partial(closed_loop, 16, 300)


def beside(load: Callable[..., ClosedLoop | OpenLoop], **more: Any) -> Figures:
    """Parts of prompts in one forward with rows that decode, over plans that take turns."""
    turns, mixed = load(**more), load(**more, mixed=True)
    turns.run()
    mixed.run()
    if isinstance(turns, ClosedLoop) and isinstance(mixed, ClosedLoop):
        return {"gap": mixed.late() / turns.late(), "share": mixed.served / turns.served}
    paces = [statistics.median(one.paces) for one in (turns, mixed) if isinstance(one, OpenLoop)]
    return {"gap": mixed.late() / turns.late(), "share": paces[0] / paces[1]}


def burst(drafts: bool, clients: int, sizes: Sequence[int], count: int) -> Figures:
    """The same of requests that come as soon as fewer than `clients` run; `first`: the 99th percentile of times to the
    first token, `bound`: tokens per second over those of all prompts at once and the least steps of all clients."""
    turns, mixed = (Burst(drafts, clients, sizes, count, mixed=one) for one in (False, True))
    turns.run()
    mixed.run()
    first, before = (float(np.quantile(one.first(), 0.99)) for one in (mixed, turns))
    found = {"gap": mixed.late() / turns.late(), "share": mixed.rate() / turns.rate(), "first": first / before}
    return found if drafts else found | {"bound": mixed.rate() / mixed.bound()}


for drafts in (False, True):
    name = "with drafts" if drafts else "plain"
    for clients, size in ((8, 4000), (32, 2300), (64, 330)):
        CELLS[f"beside prompts / {name} {clients} x {size}"] = partial(
            beside, ClosedLoop, drafts=drafts, clients=clients, size=size, seconds=8.0
        )
    CELLS[f"beside prompts / {name} 30 a second"] = partial(beside, OpenLoop, drafts=drafts, rate=30, seconds=8.0)
    for clients, count, sizes in (
        (8, 16, (5621,)), (32, 96, (3216,)), (4, 8, (16_000,)), (64, 192, MIX), (128, 384, MIX),
    ):  # fmt: skip
        CELLS[f"burst / {name} {clients} x {max(sizes)}"] = partial(burst, drafts, clients, sizes, count)


def waves(clients: int, size: int) -> Figures:
    """The fourth of some waves with drafts, over that without."""
    plain, drafted = Waves(False, clients, size), Waves(True, clients, size)
    seconds = [[load.wave() for _ in range(4)][-1] for load in (plain, drafted)]
    return {"none": seconds[0] / seconds[1]}


for clients, size in ((16, 4000), (32, 2000)):
    CELLS[f"waves to a large model / {clients} x {size}"] = partial(waves, clients, size)


def draft_model(clients: int, size: int, hit: float) -> Figures:
    return {"none": DraftModel(True, clients, size, hit).rate() / DraftModel(False, clients, size, hit).rate()}


for clients, size, hit in ((128, 100, 1.25), (16, 4000, 1.25), (4, 100, 1.25), (4, 100, 0.05)):
    CELLS[f"draft model / {clients} x {size} / {hit}"] = partial(draft_model, clients, size, hit)


def crowd(name: str) -> Figures:
    speed, gap = wave(TIMES[name])
    return {"share": speed, "seconds": gap}


for name in TIMES:
    CELLS[f"crowd of 64, speed of all prompts first, longest gap / {name}"] = partial(crowd, name)
    CELLS[f"longest gap with another's crowd / {name}"] = lambda name=name: {"seconds": gap_with_a_crowd(TIMES[name])}


@cache
def long_prompts(small: int, heavy: int, noise: float = 0.1) -> LongPrompts:
    load = LongPrompts(small, heavy, noise)
    load.run(50.0)
    return load


def with_long_prompts(heavy: int) -> Figures:
    """Gaps over those with as many short requests in place of long prompts, and the median wait of short ones."""
    with_heavy, others = long_prompts(5, heavy), long_prompts(5 + heavy, 0)
    gap = float(np.quantile(with_heavy.small, 0.99) / np.quantile(others.small, 0.99))
    alone = LongPrompts.prefill([Chunk(0, 0, 6000, True)])
    return {
        "gap": gap,
        "seconds": statistics.median(with_heavy.first["small"]),
        "alone": min(with_heavy.first["heavy"]) / alone,
    }


for heavy in (1, 4):
    CELLS[f"with {heavy} long prompts on a CPU"] = partial(with_long_prompts, heavy)


# -- the host --------------------------------------------------------------------------------------------------------


def host(menu: Sequence[TreeShape], rows: int, varies: bool) -> Figures:
    """The least of ten runs of 100 steps, choice and record."""
    world, rng = World(menu, 4.0, 0.012, 0.25), random.Random(0)
    policy, hits = TreePolicy(menu, world.cost((1, 4, 16, 64)), varies, 0 if varies else MAX_CONFIDENCE), [0.6] * rows
    choose, record = [], []
    for _ in range(10):
        chosen, recorded = 0.0, 0.0
        for _ in range(100):
            now = StepContext([rng.randrange(12) if varies else MAX_CONFIDENCE for _ in range(rows)], 300 * rows)
            start = time.perf_counter()
            shape = policy.choose(now)
            chosen += time.perf_counter() - start
            step = world.step(shape, hits)
            start = time.perf_counter()
            policy.record(shape, now, step)
            recorded += time.perf_counter() - start
        choose.append(chosen)
        record.append(recorded)
    return {"us": 1e4 * min(choose), "record": 1e4 * min(record)}


PAIR = (*tree_menu(TREE)[:-1], *(shape._replace(proposer=LOOKUP_ALONE) for shape in match_menu(TREE)[:-1]), PLAIN)
CELLS["host / trees / 8"] = partial(host, tree_menu(TREE), 8, False)
CELLS["host / lookup / 8"] = partial(host, match_menu(TreeShape(11, 10, 12)), 8, True)
CELLS["host / pair / 8"] = partial(host, PAIR, 8, True)
CELLS["host / pair / 64"] = partial(host, PAIR, 64, True)
