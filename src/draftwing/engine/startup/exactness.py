"""Tries out whether what the target makes of a token depends on what else is in the step: how a library sums is its own
affair, and follows from CPU, version and sizes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from draftwing.core import NOBODY, PLAIN, Admission, Chunk, IntArray, Plan, TreeShape
from draftwing.engine.executor import Executor
from draftwing.engine.startup.measure_costs import filled
from draftwing.ops.types import Draft
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams

TOKENS = 130  # of the text: more than one stretch of the attention in torch
ROWS = 3  # that run together
TREE = 5  # nodes that are verified together
CUTS = (0, 1, 4, 37)  # where parts of a prompt begin, beside the text's own beginning


@torch.inference_mode()
def keeps_bits(executor: Executor) -> bool:
    """Returns whether a text's hidden states and logits have the same bits in one prompt, in parts of it, with other
    rows, as plain steps and as nodes of trees. Of several ranks all do it at the same time. Leaves no trace."""
    table, model = executor.table, executor.model
    slots = executor.attn.pool.slots
    rows = min(ROWS, table.rows, max(slots // (4 * TREE), 1))
    most = TREE
    if table.states is not None:
        rows, most = min(rows, table.states.slots // 2), min(TREE, table.states.nodes)
    count = max(min(TOKENS, table.length - TREE - 1, slots // rows - TREE), 1)
    text = np.random.default_rng(0).integers(model.config.vocab_size, size=count).tolist()
    with filled(executor, rows, 0, count + TREE):
        expected = _prompts(executor, text, [(0, count)], 1)
        logits = model.logits(expected)
        same = all(torch.equal(model.logits(expected[i : i + 1])[0], logits[i]) for i in range(0, count, 7))
        for start in (cut for cut in CUTS if cut < count):
            parts = [(at, min(at + 17 + start, count)) for at in range(start, count, 17 + start)]
            found = _prompts(executor, text, [(0, start)] * (start > 0) + parts, 1)
            same = same and torch.equal(found, expected)
        together = _prompts(executor, text, [(0, count)], rows)
        same = same and all(torch.equal(part, expected) for part in together.split(count))
        for at in range(1, count - TREE, 11):
            for size, nodes in ((1, 1), (rows, 1), (1, most), (rows, most)):
                if table.states is not None:
                    _prompts(executor, text, [(0, at)], size)  # a step goes on from a state of all tokens before it
                found = _step(executor, text, at, size, nodes)
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


def _step(executor: Executor, text: list[int], at: int, rows: int, nodes: int) -> Tensor:
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
