"""A plan out of the requests that it is for, and who gets how much of a prefill."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

import numpy as np

from draftwing.config.trees import TreeShape
from draftwing.core import NOBODY, Admission, Chunk, DraftChunk, DraftExtend, IntArray, Plan, PromptPart
from draftwing.sched.policy.prefill_budget import PrefillBudget
from draftwing.sched.req import Req

TRIES = 6  # halvings after which `_limited` has found a budget: 1/64 of it is left
TICK = 1e-9  # seconds: shares of time are whole numbers of them, as those of tokens are of tokens


def make_plan(
    step: int,
    kind: Literal["prefill", "tree"],
    shape: TreeShape,
    reqs: Sequence[Req],
    max_kv_len: int,
    chunks: Sequence[Chunk],
    admits: Sequence[Admission],
    new_slots: Mapping[int, Sequence[tuple[int, IntArray]]],
    catch_up: DraftExtend | None,
    shown: tuple[DraftChunk, ...],
    states: IntArray,
) -> Plan:
    """Makes a plan. chunks: one for each request, none for a tree; new_slots: by row."""
    # Only the last chunk of a prompt draws a token; the others need no sampling.
    drawing = [i for i in range(len(reqs)) if not chunks or chunks[i].final]
    asking = [i for i in drawing if reqs[i].special]
    noisy = [i for i in drawing if reqs[i].params.temperature > 0]

    def where(test: Callable[[Req], bool]) -> IntArray:
        return _indices([i for i in asking if test(reqs[i])])

    special: dict[str, Any] = {}
    if asking:  # few plans
        special = dict(
            edited=where(lambda r: r.edited),
            guided=where(lambda r: r.guided),
            limited=where(lambda r: r.limited and shape.depth > 0),  # nothing is limited where nothing is drafted
            predicted=where(lambda r: bool(r.request.prediction)),
            thinking=where(lambda r: r.request.thinking is not None),
            logprobs=tuple((i, params) for i in asking if (params := reqs[i].request.logprobs) is not None),
        )
        special["pooled"] = bool(chunks) and all(reqs[i].request.pooled and not reqs[i].edited for i in drawing)
        wanted = [name for name, rows in special.items() if name != "pooled" and len(rows)]
        special["penalised"] = wanted == ["edited"] and all(reqs[i].penalised for i in special["edited"])
    return Plan(
        step=step,
        kind=kind,
        rows=np.asarray([req.row for req in reqs], np.int64),
        admission=np.asarray([req.admission for req in reqs], np.int64),
        shape=shape,
        max_kv_len=max_kv_len,
        admits=tuple(admits),
        new_slots=tuple((row, start, slots) for row, parts in new_slots.items() for start, slots in parts),
        chunks=tuple(chunks),
        catch_up=catch_up,
        shown=shown,
        states=states,
        noisy=_indices(noisy),
        filtered=_indices([i for i in noisy if reqs[i].params.filtered]),
        banning=_indices([i for i in drawing if _below_min(reqs[i])]),
        traced=_indices([i for i in drawing if reqs[i].request.traced]),
        adapted=any(req.adapter for req in reqs),
        prompt_parts=tuple(part for i, chunk in enumerate(chunks) if (part := _prompt_part(i, chunk, reqs[i]))),
        **special,
    )


def divided(
    most: int,
    todo: Sequence[Req],
    prefills: PrefillBudget,
    ready: Sequence[Req],
    spared: float | None = None,
    sizes: Sequence[int] = (),
) -> list[tuple[Req, int]]:
    """Returns who gets how many tokens of a prefill; those who get none are left out. most: tokens of all. todo: by
    rank. ready: those who decode, and wait for it.  spared: as of `PrefillBudget.max_seconds`.
    sizes: tokens that it is padded to, ascending; of more it is not.

    Higher priorities first. Within one, clients get equal shares; what one does not need is the others'. Half of a
    client's share is for its first request, so that all come to an end. The other half goes to those with the least
    to do, so that a short prompt does not wait for long ones. Shares are of time, as far as `prefills` knows it: tokens
    of long contexts take longer. However many prompts a client sends, the others' steps are not further apart.
    """
    budget, costs = most, dict.fromkeys(todo, 1)
    if prefills.token_seconds(0):
        costs = {req: max(round(prefills.token_seconds(req.sent) / TICK), 1) for req in todo}
        alike = len({(req.request.client, req.request.priority) for req in (*ready, *todo)}) == 1
        longest = prefills.max_seconds([req.unsent * costs[req] * TICK for req in todo], len(ready), alike, spared)
        budget = round(longest / TICK)
    given = _divided(budget, todo, costs)
    if sum(given.values()) > most:
        given = _limited(most, budget, todo, costs)
    _even_out(given, prefills, sizes)
    return [(req, length) for req, length in given.items() if length]


def _limited(most: int, budget: int, todo: Sequence[Req], costs: Mapping[Req, int]) -> dict[Req, int]:
    """Returns `_divided` of as large a part of the budget as gives about `most` tokens, and no more."""
    enough, budget = most * min(costs.values()), min(budget, most * max(costs.values()))
    given, near = _divided(enough, todo, costs), budget >> TRIES
    while budget - enough > near:
        more = _divided(middle := (enough + budget) // 2, todo, costs)
        if sum(more.values()) <= most:
            enough, given = middle, more
        else:
            budget = middle
    excess = sum(given.values()) - most  # shares are rounded up
    for req in reversed(todo):
        less = min(max(excess, 0), given[req])
        given[req] -= less
        excess -= less
    return given


def _divided(budget: int, todo: Sequence[Req], costs: Mapping[Req, int]) -> dict[Req, int]:
    """Returns the tokens of each prompt of a prefill that takes so many `TICK`s."""
    given = dict.fromkeys(todo, 0)
    for _, equals in groupby(todo, lambda req: req.request.priority):
        clients: dict[str, list[Req]] = {}
        for req in equals:
            clients.setdefault(req.request.client, []).append(req)
        for share, reqs in _shares(budget, list(clients.values()), costs):
            budget -= share
            first = reqs[0]
            given[first] = min(-(-share // (2 * costs[first])), first.unsent)
            share -= given[first] * costs[first]
            for req in sorted(reqs, key=lambda req: ((req.unsent - given[req]) * costs[req], req.rank)):
                more = min(max(share // costs[req], 0), req.unsent - given[req])
                given[req] += more
                share -= more * costs[req]
    return given


def _even_out(given: dict[Req, int], prefills: PrefillBudget, sizes: Sequence[int]) -> None:
    """Takes from prompts that go on later what a prefill would be padded for, where that makes more tokens a second and
    no less is left than for another one."""
    total, token = sum(given.values()), prefills.token_seconds(0)
    at = bisect_left(sizes, total)
    if at in (0, len(sizes)) or not token:
        return
    below, above = sizes[at - 1 : at + 1]
    parts, excess = {req: length for req, length in given.items() if length < req.unsent}, total - below
    left = sum(req.unsent for req in given) - total
    worse = below * (prefills.start + above * token) <= total * (prefills.start + below * token)
    if worse or left < below or sum(parts.values()) < excess:
        return
    for req in sorted(parts, key=lambda req: -parts[req]):
        given[req] -= (less := min(excess, given[req]))
        excess -= less


def whole_prompts(given: list[tuple[Req, int]], most: int) -> list[tuple[Req, int]]:
    """Returns who gets a prefill whose chunks are whole prompts, in the same order, as far as there is room. most:
    tokens of all; the first prompt may have more."""
    out: list[tuple[Req, int]] = []
    for req, _ in given:
        if req.unsent <= most or not out:
            out.append((req, req.unsent))
            most -= req.unsent
    return out


def with_whole_images(given: list[tuple[Req, int]], most: int, alone: bool) -> list[tuple[Req, int]]:
    """Returns who gets how many tokens of a prefill in which no chunk ends within an image whose tokens see each other.
    Whoever comes to one gets all of it, before others, who get what is left. most: tokens of all.  alone: whether one
    image may have more, with nothing beside it."""
    if not any(image.mutual for req, _ in given for image in req.request.images):
        return given
    ends = [(req, length, _before_image(req, length)) for req, length in given]
    out: list[tuple[Req, int]] = []
    for req, length, whole in sorted(ends, key=lambda one: one[2] <= one[1]):
        size = whole if whole > length else _before_image(req, min(whole, most))
        if size and (size <= most or (alone and not out)):
            out.append((req, size))
            most = max(most - size, 0)
    return out


def _before_image(req: Req, length: int) -> int:
    """Returns a chunk's length, or less up to an image within which it would end; all of one with which it begins."""
    end = req.sent + length
    for image in req.request.images:
        if image.mutual and image.start < end < image.end:
            return (image.start if image.start > req.sent else image.end) - req.sent
    return length


def fair_decode_batch(
    ready: list[Req], running: Iterable[Req], seconds: Callable[[int, int], float | None]
) -> list[Req]:
    """Returns who takes part in a step. Of a priority a client's rows take no more of it than an equal share of its
    time: where k clients of that priority or a higher one run, their rows make it longer for the others by 1 / (k - 1)
    at most. Of a client with more the first by rank take part; the others keep their rows and wait. One row of each
    client always does.

    running: all who run.  seconds: what a step takes of so many rows with so many tokens in their KV; None where that
    is not known.
    """
    everybody = {(req.request.client, req.request.priority) for req in running}
    if len(ready) < 3 or len({client for client, _ in everybody}) < 2:
        return ready
    each = sum(req.kv for req in ready) / len(ready)
    first: set[Req] = set()
    for priority in sorted({req.request.priority for req in ready}, reverse=True):
        lines: dict[str, list[Req]] = {}
        for req in ready:
            if req.request.priority == priority:
                lines.setdefault(req.request.client, []).append(req)
        others = {req.request.client for req in first} - lines.keys()
        clients = len({client for client, its in everybody if its >= priority})
        level = max(map(len, lines.values()))
        if clients > 1 and (len(lines) > 1 or others):
            level = _level([len(line) for line in lines.values()], len(first), clients, each, seconds)
        first.update(req for line in lines.values() for req in sorted(line, key=lambda req: req.rank)[:level])
    return ready if len(first) == len(ready) else [req for req in ready if req in first]


def _level(
    counts: Sequence[int], before: int, clients: int, each: float, seconds: Callable[[int, int], float | None]
) -> int:
    """Returns how many rows of a client take part, of clients that have `counts`; in a step with `before` others and
    `each` tokens in the KV of a row."""

    def fits(level: int) -> bool:
        rows = before + sum(min(count, level) for count in counts)
        whole, without = (seconds(few, round(each * few)) for few in (rows, rows - level))
        return whole is None or without is None or clients * (whole - without) <= whole * (1 + 1e-9)

    most = max(counts)
    if fits(most):
        return most
    low, high = 1, most  # one always takes part; `high` is too many
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _shares(budget: int, clients: Sequence[Sequence[Req]], costs: Mapping[Req, int]) -> list[tuple[int, Sequence[Req]]]:
    """Equal shares for clients, or what they need where that is less."""
    needs = sorted((sum(req.unsent * costs[req] for req in reqs), i) for i, reqs in enumerate(clients))
    shares = []
    for served, (need, i) in enumerate(needs):
        share = min(need, -(-budget // (len(needs) - served)))
        budget -= share
        shares.append((share, clients[i]))
    return shares


def _indices(found: list[int]) -> IntArray:
    return np.asarray(found, np.int64) if found else NOBODY


def _below_min(req: Req) -> bool:
    least = req.params.min_new_tokens
    return least > 0 and req.completion_tokens < least


def _prompt_part(index: int, chunk: Chunk, req: Req) -> PromptPart | None:
    """Returns what of a chunk tells log probabilities that are still wanted: those of the tokens after its queries."""
    wanted, params = req.next_prompt_logprob, req.request.logprobs
    if wanted is None or params is None:
        return None
    # Chunks are planned before the result of the chunk before them is known.
    begin = max(wanted - 1, chunk.start)
    end = min(chunk.start + chunk.length, req.prompt_len - 1)
    return PromptPart(index, begin - chunk.start, end - begin, params) if end > begin else None
