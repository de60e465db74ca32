"""What runs before the first request. Graphs are captured, or steps run that make what is made once; what steps cost on
this machine is measured; and where it is asked for, it is tried out whether what the target makes of a token depends on
what else is in the step: how a library sums is its own affair, and follows from CPU, version and sizes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.core import NOBODY, NOT_FINITE, Admission, Chunk, IntArray, Plan
from draftwing.engine.draft_kv_backlog import ROOM
from draftwing.engine.executor import Executor
from draftwing.engine.graphs import Key
from draftwing.engine.startup.measure_costs import (
    GRAPH_SECONDS,
    experts_at_random,
    filled,
    measure_graphs,
    measure_steps,
    timed_step,
)
from draftwing.errors import CheckpointError
from draftwing.ops.attention.batch import Mutual
from draftwing.ops.types import Draft
from draftwing.ops.upload import even, evens
from draftwing.requests.request import GenerationRequest, LogprobParams, ThinkingBudget
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.policy.cost import StepCost
from draftwing.sched.results import NOT_FINITE_MESSAGE

log = logging.getLogger("draftwing")

SECONDS = 0.6  # no step begins later; a large model is not kept from its first request
# The same of the first ones of each shape, counted from the prompt's end, where no earlier start knows what they cost:
# without them a large model's first answers are drafted by guesses. A 4B in Q4_K takes one second on two cores.
FIRST_SECONDS = 2.5
PROMPT = 32  # tokens
COUNTS = (1, 2, 4, 8, 16)  # of prompts at once: kernels are compiled for one, for a multiple of 16 and for others, and
# loaded for about so many rows that draw
SHORT = 1024  # tokens of prompts up to which a GPU has hardly more to do than the host
GREEDY = SamplingParams(temperature=0.0)
ASKING = SamplingParams(
    temperature=1.0, top_p=0.9, frequency_penalty=0.1, repetition_penalty=1.1, logit_bias=((1, -1.0),)
)
BUDGET = ThinkingBudget(0, (1,), (2,), True)
STEPS = 2  # of each shape: one makes constants, one is recorded (`RecordedStages`)
TRIED_TOKENS = 130  # of the text: more than one stretch of the attention in torch
TRIED_ROWS = 3  # that run together
TRIED_NODES = 5  # nodes that are verified together
TRIED_CUTS = (0, 1, 4, 37)  # where parts of a prompt begin, beside the text's own beginning


def warm_up(executor: Executor, menu: Sequence[TreeShape], cost: StepCost | None) -> None:
    """Runs a short prompt, then steps of one row of each shape of the menu, as a first request would. Leaves
    no trace: the prompt is in the pool's dummy slot and in a row that its next request writes anew, the steps are of
    the row table's dummy. Raises CheckpointError where the logits are not finite. cost: to measure, None where they
    are known."""
    started = time.monotonic()
    try_prompt(executor)
    tokens = min(PROMPT, executor.table.length // 2)
    menu = executor.common_shapes(menu)
    until = started + SECONDS if cost is None else time.monotonic() + FIRST_SECONDS
    met = set[TreeShape]()
    with experts_at_random(executor):
        for shape in STEPS * menu[::-1]:  # plain steps first: with these others can be guessed
            if time.monotonic() > until:
                break
            seconds = _run(executor, _step(executor.table.rows, shape, tokens))
            if cost is not None and shape in met:
                cost.measured(shape, 1, 0, seconds)  # better than nothing, where there is no time for more
            met.add(shape)
        if cost is not None:
            measure_steps(executor, cost, started + SECONDS)
    executor.run_on_all_ranks(Executor.flush)
    log.debug("steps before the first request: %.2f s", time.monotonic() - started)


def _run(executor: Executor, plan: Plan) -> float:
    """-> seconds as of `Timed`"""
    result, run = timed_step(executor, plan)
    if (result.tokens >= NOT_FINITE).any():
        raise CheckpointError(f"found in the first steps: {NOT_FINITE_MESSAGE}")
    return run.seconds


def try_prompt(executor: Executor) -> None:
    """Runs a short prompt and leaves no trace. Raises CheckpointError where the model's logits are not finite."""
    executor.run_on_all_ranks(_clear_dummy)
    _run(executor, _prompt(min(PROMPT, executor.table.length // 2)))
    executor.run_on_all_ranks(Executor.flush)


def try_prompts(executor: Executor, menu: Sequence[TreeShape], lengths: Sequence[int] = ()) -> None:
    """Runs prompts, one and several at once, drawn in every way, longer ones of these lengths, and of one row that asks
    for all there is with every shape of the menu. A GPU loads a kernel when it first runs with such arguments, which
    takes 15 ms of a step; one that has to be compiled takes a second, and a disk with room."""
    tokens = min(PROMPT, executor.table.length // 2)
    executor.run_on_all_ranks(Executor.keep_calibration)
    executor.run_on_all_ranks(_clear_dummy)
    for count in COUNTS:
        if count <= executor.table.rows:
            _run(executor, _prompt(tokens, count))
            _run(executor, _prompt(tokens, count, SamplingParams(temperature=1.0, top_p=0.9)))
    _run(executor, _asking(_prompt(tokens, 1, ASKING)))
    for length in lengths:
        _run(executor, _prompt(length))
    if executor.target.mixes(PLAIN, 1) and executor.prefills.sizes:
        for params in (GREEDY, SamplingParams(temperature=1.0, top_p=0.9)):
            _run(executor, _mixed(_step(executor.table.rows, PLAIN, tokens), _prompt(tokens, 1, params)))
    for shape in menu:
        _run(executor, _prompt(tokens))  # else the row would be longer than the step's bound
        executor.run_on_all_ranks(_constrain, shape)
        _run(executor, _asking(_step(0, shape, tokens)))
    if executor.model.config.tower is not None and executor.model.config.tower.mutual:
        executor.run_on_all_ranks(try_length, tokens, executor.model.config.tower.mutual)
    executor.run_on_all_ranks(Executor.restore_calibration)
    executor.run_on_all_ranks(Executor.flush)


def lengths_to_try(executor: Executor, max_tokens: int) -> tuple[list[int], list[int]]:
    """Returns tokens of prompts, `max_tokens` at most, whose kernels are not loaded yet: those that take no time, for
    `try_prompts`, and longer ones for `try_length`, in the order in which it should run them: powers of two first."""
    max_tokens = min(max_tokens, executor.table.length - ROOM)
    drafter, prefills = executor.drafter, executor.prefills
    has_kv = drafter is not None and len(drafter.kv_layers) > 0
    # The target's kernels are those of its graphs.
    known = PROMPT if has_kv else max(prefills.sizes, default=PROMPT)
    lengths = [min(length, max_tokens) for length in evens(even(max_tokens)) if length > known]
    long = sorted((n for n in lengths if n > SHORT), key=lambda n: (n & (n - 1) != 0, n))
    return [n for n in lengths if n <= SHORT], long


def try_length(executor: Executor, tokens: int, mutual: Mutual = "") -> None:
    """Runs the target's forward over a prompt of so many tokens, in the dummy row. Leaves no trace, so it may run
    whenever nothing else does. mutual: as of `Executor.states`."""
    _clear_dummy(executor)
    row, chunk = np.full(1, executor.table.rows), Chunk(executor.table.rows, 0, tokens, True)
    executor.states(Plan(0, "prefill", row, row, PLAIN, tokens, chunks=(chunk,)), mutual=mutual)


def _clear_dummy(executor: Executor) -> None:
    """Rows without requests, as those of the prompts here, continue the dummy's state of recurrent layers."""
    if executor.table.states is not None:
        with torch.inference_mode():
            executor.table.states.clear_dummy()


def _asking(plan: Plan) -> Plan:
    """Returns the plan of row 0, which asks for what few requests do (`engine.request_features`)."""
    admits = tuple(
        admit._replace(request=admit.request._replace(prediction=tuple(admit.tokens), thinking=BUDGET), edited=True)
        for admit in plan.admits
    )
    at = np.arange(1)
    return replace(
        plan, admits=admits, noisy=at, filtered=at, edited=at, predicted=at if plan.shape.depth else NOBODY,
        thinking=at, logprobs=((0, LogprobParams(top=1)),),
    )  # fmt: skip


def _constrain(executor: Executor, shape: TreeShape) -> None:
    """Constrains as for a row with a grammar that allows everything, before a step of this shape."""
    drafter, table = executor.drafter, executor.table
    if drafter is not None and drafter.kv_layers and shape.depth and not drafter.skips_extend(shape):
        row = table.steps[:1]
        banned = torch.zeros(1, executor.model.config.vocab_size, dtype=torch.bool, device=row.device)
        with torch.inference_mode():
            drafter.constrain(table, row, banned, row)


def _prompt(tokens: int, count: int = 1, params: SamplingParams = GREEDY) -> Plan:
    """Plans prompts of the first rows, whose page table has nothing but the dummy slot."""
    rows, request = np.arange(count), GenerationRequest("", [1] * tokens, params)
    admits = tuple(Admission(row, request.prompt_ids, NOBODY, request, seed=0) for row in range(count))
    chunks = tuple(Chunk(row, 0, tokens, True) for row in range(count))
    noisy = rows if params.temperature else NOBODY
    return Plan(
        0, "prefill", rows, rows, PLAIN, tokens, admits, (), chunks, noisy=noisy,
        filtered=noisy if params.filtered else NOBODY,
    )  # fmt: skip


def _step(row: int, shape: TreeShape, bound: int, count: int = 1) -> Plan:
    """Plans a step of one row, or of so many times the dummy. bound: of its tokens, as that of a short text, though the
    dummy has none."""
    rows = np.full(count, row)
    return Plan(0, "tree", rows, rows, shape, bound)


def _mixed(tree: Plan, prompts: Plan) -> Plan:
    """Plans both in one forward, drawn as the prompts are."""
    filtered = np.arange(len(tree.rows) if len(prompts.filtered) else 0)
    mixed = replace(prompts, admits=(), mixed=True)
    return replace(tree, admits=prompts.admits, noisy=filtered, filtered=filtered, mixed=True, mixed_prefill=mixed)


def capture_some(executor: Executor, menu: Sequence[TreeShape], compiled: bool = False) -> list[Key]:
    """Captures the graphs of some batch sizes and leaves the others to `Captures.capture_next`; all of them of several
    ranks, and of compiled forwards, which may be compiled anew for another size: requests would wait for that. Returns
    of which."""
    some = executor.model.ranks.size == 1 and not compiled
    return executor.run_on_all_ranks(_capture, executor.common_shapes(menu), some)


def _capture(executor: Executor, menu: Sequence[TreeShape], some: bool) -> list[Key]:
    return executor.captures.capture(menu, some)


def capture(
    executor: Executor,
    menu: Sequence[TreeShape],
    costs: StepCost | None,
    known: StepCost | None = None,
    compiled: bool = False,
) -> None:
    """Captures graphs as `capture_some`, and measures them. costs: to measure, None where they need not be.  known: as
    `measure_graphs` has it."""
    start, free = time.monotonic(), executor.device.free_memory()
    with experts_at_random(executor):
        captured = capture_some(executor, menu, compiled)
        if executor.model.ranks.size == 1 and not compiled:
            executor.prefills.drop_slow()
        took, bytes_taken = time.monotonic() - start, free - executor.device.free_memory()
        log.info("captured %d CUDA graphs in %.1f s, %.2f GB", len(executor.captures), took, bytes_taken / 1e9)
        log.debug("%d captures are left for when there is time", executor.captures.later)
        if costs is not None:
            start = time.monotonic()
            measure_graphs(executor, costs, captured, start + GRAPH_SECONDS, known)
            log.debug("start: %.2f s to measure what steps cost", time.monotonic() - start)
            executor.run_on_all_ranks(Executor.flush)


@torch.inference_mode()
def keeps_bits(executor: Executor) -> bool:
    """Returns whether a text's hidden states and logits have the same bits in one prompt, in parts of it, with other
    rows, as plain steps and as nodes of trees. Of several ranks all do it at the same time. Leaves no trace."""
    table, model = executor.table, executor.model
    slots = executor.attn.pool.slots
    rows = min(TRIED_ROWS, table.rows, max(slots // (4 * TRIED_NODES), 1))
    most = TRIED_NODES
    if table.states is not None:
        rows, most = min(rows, table.states.slots // 2), min(TRIED_NODES, table.states.nodes)
    count = max(min(TRIED_TOKENS, table.length - TRIED_NODES - 1, slots // rows - TRIED_NODES), 1)
    text = np.random.default_rng(0).integers(model.config.vocab_size, size=count).tolist()
    with filled(executor, rows, 0, count + TRIED_NODES):
        expected = _prompts(executor, text, [(0, count)], 1)
        logits = model.logits(expected)
        same = all(torch.equal(model.logits(expected[i : i + 1])[0], logits[i]) for i in range(0, count, 7))
        for start in (cut for cut in TRIED_CUTS if cut < count):
            parts = [(at, min(at + 17 + start, count)) for at in range(start, count, 17 + start)]
            found = _prompts(executor, text, [(0, start)] * (start > 0) + parts, 1)
            same = same and torch.equal(found, expected)
        together = _prompts(executor, text, [(0, count)], rows)
        same = same and all(torch.equal(part, expected) for part in together.split(count))
        for at in range(1, count - TRIED_NODES, 11):
            for size, nodes in ((1, 1), (rows, 1), (1, most), (rows, most)):
                if table.states is not None:
                    _prompts(executor, text, [(0, at)], size)  # a step goes on from a state of all tokens before it
                found = _nodes_of(executor, text, at, size, nodes)
                same = same and torch.equal(found, expected[at : at + nodes].repeat(size, 1))
    return same


def _prompts(executor: Executor, text: list[int], parts: list[tuple[int, int]], rows: int) -> Tensor:
    """Returns the hidden states of the text, in parts one after the other, each of so many rows together: [rows * T,
    H]."""
    found: list[Tensor] = []
    request, every = GenerationRequest("", text, SamplingParams(temperature=0.0)), np.arange(rows)
    for begin, end in parts:
        admits = tuple(Admission(row, text, NOBODY, request, seed=0) for row in range(rows)) if not begin else ()
        chunks = tuple(Chunk(row, begin, end - begin, end == len(text)) for row in range(rows))
        states = NOBODY if executor.table.states is None else _states(rows, len(found), begin)
        plan = Plan(0, "prefill", every, every, PLAIN, end, admits, chunks=chunks, states=states)
        found.append(executor.states(plan).clone())
    if executor.table.states is not None:
        executor.table.states.set(torch.from_numpy(_states(rows, len(found), parts[-1][1])).to(found[0].device))
    return torch.cat(found)


def _states(rows: int, number: int, length: int) -> IntArray:
    """`Plan.states` before part `number` of prompts that have `length` tokens so far: what a part writes the next one
    reads, as after a commit."""
    two = 1 + 2 * np.arange(rows)
    own = two + number % 2, two + 1 - number % 2
    read = own[1] if number else np.zeros_like(two)
    return np.stack((np.arange(rows), read, own[0], np.full(rows, length)), 1)


def _nodes_of(executor: Executor, text: list[int], at: int, rows: int, nodes: int) -> Tensor:
    """Returns the hidden states of tokens from `at` on, as chains of so many nodes of so many rows: [rows * nodes,
    H]."""
    table, every = executor.table, np.arange(rows)
    table.kv_len[:rows], table.last[:rows] = at, text[at]
    draft = None
    if nodes > 1:
        tokens = torch.tensor(text[at : at + nodes], device=table.last.device).expand(rows, -1).contiguous()
        parent = torch.arange(-1, nodes - 1, device=table.last.device).clamp(min=0).expand(rows, -1).contiguous()
        draft = Draft(tokens, parent, torch.ones_like(tokens, dtype=torch.bool))
    shape = TreeShape(nodes - 1, 1, nodes) if nodes > 1 else PLAIN
    return executor.states(Plan(0, "tree", every, every, shape, at), draft).clone()
