"""Simulates the engine's bookkeeping with a toy model, to check its rules before and apart from tensors.

What it shows: row-indexed device state, an overlapped loop (lag 0 or 1), tree steps of changing shape, commit by
page-table permutation, a radix tree keyed by token windows, optimistic admission, preemption and exact resume keep
every token and every slot right. The device is a queue of closures that run as late as possible, so it sees only what
a plan carries; attention is a lookup through the page table that checks token and position of every entry, and the
drafter's KV entry of position p is the window of tokens p .. p + lookahead. Each finished request is compared with
plain decoding; after every commit each slot must have exactly one owner.

Run: python tools/bookkeeping_sim.py [configurations]     (pure Python and numpy, under a minute)
Exit status 1 on a mismatch, or if a subject (preemption, stale results, prefix hits, ...) was not exercised.
Columns of the table: menu of shapes / lag. `--break RULE` switches one of RULES off: the run must then fail.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

VOCAB, EOS, ROWS, CONTEXT = 12, 0, 6, 48
RULES = {
    "admission": "a result is dropped unless its admission number is the row's",
    "window": "radix keys cover the drafter's lookahead",
    "match-cap": "a match leaves at least one token to prefill",
    "permute": "the device permutes the page-table row",
    "mirror": "the host mirrors the permutation",
    "insert-kv": "only positions below the committed length enter the tree",
    "swap": "a duplicate of a tree slot is given up for the tree's slot",
    "pending": "the swap reaches the device's table with the next plan",
    "order": "release inserts before it unlocks",
    "table": "a page-table row is longer than the context",
}
_rng = np.random.default_rng(0)
TARGET, DRIFT = _rng.normal(size=(4096, VOCAB)) * 1.5, _rng.normal(size=(4096, VOCAB)) * 0.8
NOISE = _rng.gumbel(size=(4096, VOCAB))
TARGET[:, EOS] -= 2.0  # so that some requests live to the end of the context


class Shape(NamedTuple):
    depth: int
    topk: int
    nodes: int

    @property
    def span(self) -> int:
        return max(self.nodes, 1 + self.topk * max(self.depth - 1, 0))


PLAIN = Shape(0, 1, 1)
CHAINS = [Shape(3, 1, 4), PLAIN, Shape(5, 1, 6)]
TREES = [Shape(3, 3, 8), Shape(4, 4, 16), Shape(2, 2, 4), PLAIN, Shape(1, 4, 5)]
MENUS = {"none": [PLAIN], "chain": CHAINS, "tree": TREES, "mixed": CHAINS + TREES}


@dataclass
class Config:
    menu: str
    lag: int
    lookahead: int
    temperature: float
    pool: int
    broken: str = ""

    @property
    def table(self) -> int:
        """Entries of a page-table row: a tree step may start past the last token while a step is in flight."""
        if self.broken == "table":
            return CONTEXT
        return CONTEXT + max(s.depth + 1 for s in MENUS[self.menu]) + max(s.span for s in MENUS[self.menu])


def draw(context: list[int], seed: int, temperature: float, draft: bool = False) -> np.ndarray:
    """Logits plus keyed noise: the position is the key, so every way to reach a context gives the same token."""
    at = zlib.crc32(bytes(context)) % 4096
    z: np.ndarray = TARGET[at] + draft * DRIFT[at] + temperature * NOISE[(seed * 1009 + len(context)) % 4096]
    return z


class Req:
    """What is left of a request when it holds no row."""

    def __init__(self, uid: int, prompt: list[int], max_new: int, seed: int, stop: tuple[int, int]) -> None:
        self.uid, self.seed, self.stop, self.prompt_len = uid, seed, stop, len(prompt)
        self.limit = min(len(prompt) + max_new, CONTEXT)
        self.tokens, self.done, self.aborted = list(prompt), False, False

    def append(self, token: int) -> bool:
        """Whether this token ends the request."""
        self.tokens.append(token)
        stopped = len(self.tokens) > self.prompt_len + 1 and tuple(self.tokens[-2:]) == self.stop
        self.done = token == EOS or stopped or len(self.tokens) == self.limit
        return self.done


class Seat:
    """One admission of a request to a row: dies at release, so nothing of it can leak into the next admission."""

    def __init__(self, number: int, row: int, req: Req, path: list[Node], root: Node) -> None:
        self.number, self.row, self.req, self.node = number, row, req, path[-1] if path else root
        self.slots, self.owned = [n.slot for n in path], [False] * len(path)
        self.kv = self.sent = self.bound = len(path)  # exact and committed | prefill launched | upper bound
        self.inflight, self.decoding, self.admitted = 0, False, False
        self.pending: list[tuple[int, list[int]]] = []  # table writes that the next plan must carry


class Chunk(NamedTuple):
    start: int
    end: int
    final: bool


class Admit(NamedTuple):
    row: int
    tokens: list[int]
    slots: list[int]
    seed: int


@dataclass(frozen=True)
class Plan:
    rows: list[int]
    numbers: list[int]  # admission number of each row
    uids: list[int]  # for the statistics only
    shape: Shape | None  # None: prefill
    chunks: list[Chunk]
    admits: list[Admit]
    writes: list[tuple[int, int, list[int]]]  # (row, first position, slots), applied after admits
    results: list[tuple[list[int], list[int]]] = field(default_factory=list)  # per row: tokens, order


class Device:
    def __init__(self, cfg: Config, seen: Counter[str]) -> None:
        self.cfg, self.seen, self.queue = cfg, seen, list[Callable[[], None]]()
        self.table = np.full((ROWS, cfg.table), -1)
        self.kv_len, self.seed = [0] * ROWS, [0] * ROWS
        self.tokens: list[list[int]] = [[] for _ in range(ROWS)]  # history up to and with the last token
        self.kv: dict[int, tuple[int, int]] = {}
        self.draft_kv: dict[int, tuple[int, ...]] = {}
        self.reach = 0  # most tokens that a row's history held

    def launch(self, plan: Plan) -> None:
        self.queue.append(lambda: self.upload(plan))
        self.queue.append(lambda: self.tree(plan) if plan.shape else self.prefill(plan))

    def wait(self, plan: Plan) -> None:
        while len(plan.results) < len(plan.rows):
            self.queue.pop(0)()

    def upload(self, plan: Plan) -> None:
        for a in plan.admits:
            self.table[a.row] = -1
            self.table[a.row, : len(a.slots)] = a.slots
            self.kv_len[a.row], self.tokens[a.row], self.seed[a.row] = len(a.slots), list(a.tokens), a.seed
        for row, first, slots in plan.writes:
            self.table[row, first : first + len(slots)] = slots

    def slot(self, row: int, position: int) -> int:
        slot = int(self.table[row, position])
        assert slot >= 0, "read or write past coverage"
        return slot

    def read(self, row: int, n: int) -> None:
        """What attention of target (and drafter) would see at positions [0, n)."""
        for p in range(n):
            assert self.kv[self.slot(row, p)] == (self.tokens[row][p], p), "target KV"

    def observe(self, row: int, start: int, end: int, known: int) -> None:
        """Drafter KV of [start, end), and of earlier positions whose window reached past the `known` tokens."""
        k = self.cfg.lookahead
        for p in range(max(0, min(start, known - k)), end):
            window = tuple(self.tokens[row][p : p + 1 + k])
            if p < start:  # complete windows may be shared by now
                old = self.draft_kv[self.slot(row, p)]
                assert len(old) < len(window) and old == window[: len(old)], "re-cover of a complete window"
            self.draft_kv[self.slot(row, p)] = window

    def prefill(self, plan: Plan) -> None:
        for row, chunk in zip(plan.rows, plan.chunks, strict=True):
            assert self.kv_len[row] == chunk.start < chunk.end, "a chunk without a token has no logits"
            known = len(self.tokens[row])
            for p in range(chunk.start, chunk.end):
                self.kv[self.slot(row, p)] = (self.tokens[row][p], p)
            self.kv_len[row] = chunk.end
            self.read(row, chunk.end)
            new: list[int] = []
            if chunk.final:
                new = [int(draw(self.tokens[row], self.seed[row], self.cfg.temperature).argmax())]
                self.tokens[row] += new
            self.observe(row, chunk.start, chunk.end, known)
            plan.results.append((new, []))

    def propose(self, row: int, shape: Shape) -> tuple[list[int], list[int], list[bool]]:
        n, history, k = self.kv_len[row], self.tokens[row], self.cfg.lookahead
        for p in range(n):
            assert self.draft_kv[self.slot(row, p)] == tuple(history[p : p + 1 + k]), "drafter KV window"
        nodes: list[tuple[int, int, float, list[int]]] = [(history[-1], 0, 0.0, history)]
        frontier = [0]
        for d in range(shape.depth):
            grown = []
            for f in frontier:
                z = draw(nodes[f][3], self.seed[row], self.cfg.temperature, draft=True)
                z = z - np.log(np.exp(z).sum())  # renormalised, so that scores fall along a path
                best = [int(t) for t in z.argsort()[::-1][: shape.topk]]
                grown += [(t, f, nodes[f][2] + z[t], [*nodes[f][3], t]) for t in best]
            grown.sort(key=lambda g: -g[2])
            frontier = list(range(len(nodes), len(nodes) + shape.topk))
            nodes += grown
            if d < shape.depth - 1:
                for j in range(shape.topk):  # growth scratch, overwritten by `observe` where accepted
                    self.draft_kv[self.slot(row, n + (k == 0) + d * shape.topk + j)] = (-1,)
        keep = [0, *sorted(sorted(range(1, len(nodes)), key=lambda i: (-nodes[i][2], i))[: shape.nodes - 1])]
        if zlib.crc32(bytes(history)) % 5 == 0:  # a row with fewer drafts: the rest of its nodes are dead
            keep = keep[: 1 + len(keep) // 2]
        rank = {old: i for i, old in enumerate(keep)}
        dead = shape.nodes - len(keep)
        tokens, parent = [nodes[i][0] for i in keep] + [1] * dead, [rank[nodes[i][1]] for i in keep] + [0] * dead
        return tokens, parent, [True] * len(keep) + [False] * dead

    def tree(self, plan: Plan) -> None:
        assert plan.shape is not None
        for row in plan.rows:
            tokens, parent, alive = self.propose(row, plan.shape)
            n, m = self.kv_len[row], plan.shape.nodes
            self.read(row, n)
            path: list[list[int]] = []
            for i in range(m):
                path.append((path[parent[i]] if i else []) + [i])
                position = n + len(path[i]) - 1  # of the token; its table entry is in node order
                self.kv[self.slot(row, n + i)] = (tokens[i], position)
            text = [self.tokens[row][:n] + [tokens[j] for j in path[i]] for i in range(m)]
            target = [int(draw(t, self.seed[row], self.cfg.temperature).argmax()) for t in text]
            ok = [True] * m
            for i in range(1, m):
                ok[i] = alive[i] and ok[parent[i]] and tokens[i] == target[parent[i]]
            leaf = max((i for i in range(m) if ok[i]), key=lambda i: len(path[i]))
            taken = path[leaf]
            order = taken + [i for i in range(m) if i not in taken]
            if self.cfg.broken != "permute":
                self.table[row, n : n + m] = self.table[row, n : n + m][order]  # the whole commit of the KV
            new = [tokens[i] for i in taken[1:]] + [target[leaf]]
            self.kv_len[row] = n + len(taken)
            self.tokens[row] += new
            self.observe(row, n, n + len(taken), n + 1)
            self.reach = max(self.reach, len(self.tokens[row]))
            self.seen["permuted"] += order != sorted(order)
            plan.results.append((new, order))


class Node:
    def __init__(self, slot: int, parent: Node | None, key: tuple[int, ...]) -> None:
        self.slot, self.parent, self.key = slot, parent, key
        self.children: dict[tuple[int, ...], Node] = {}
        self.refs = self.used = 0


class Radix:
    """Prefix tree of slots, one token per node; a node's key is the window that its drafter KV depends on."""

    def __init__(self, width: int) -> None:
        self.root, self.width, self.clock, self.size, self.locked = Node(-1, None, ()), width, 0, 0, 0

    def match(self, tokens: list[int], cap: int) -> list[Node]:
        return self.insert(tokens, min(cap, len(tokens) - self.width + 1), None, None)

    def insert(self, tokens: list[int], n: int, slots: list[int] | None, owned: list[bool] | None) -> list[Node]:
        """Nodes of positions [0, n), as far as they exist; with `slots`, missing ones are made from owned slots."""
        node, path = self.root, []
        self.clock += 1
        for p in range(n):
            key = tuple(tokens[p : p + self.width])
            if key not in node.children:
                if slots is None or owned is None:
                    break
                assert owned[p], "a slot of the tree is missing from the tree"
                node.children[key] = Node(slots[p], node, key)
                owned[p] = False
                self.size += 1
            node = node.children[key]
            node.used = self.clock
            path.append(node)
        return path

    def lock(self, node: Node, by: int) -> None:
        while node.parent is not None:
            self.locked -= node.refs > 0
            node.refs += by
            self.locked += node.refs > 0
            assert node.refs >= 0
            node = node.parent

    def nodes(self) -> list[Node]:
        out, stack = [], [self.root]
        while stack:
            stack += (node := stack.pop()).children.values()
            out.append(node)
        return out[1:]

    def evict(self, k: int) -> list[int]:
        out: list[int] = []
        while len(out) < k:
            leaf = min((n for n in self.nodes() if not n.children and n.refs == 0), key=lambda n: n.used)
            assert leaf.parent is not None
            del leaf.parent.children[leaf.key]
            out.append(leaf.slot)
            self.size -= 1
        return out


class Scheduler:
    def __init__(self, cfg: Config, rng: random.Random, seen: Counter[str]) -> None:
        self.cfg, self.rng, self.seen = cfg, rng, seen
        self.tree, self.free, self.rows = (
            Radix(1 if cfg.broken == "window" else 1 + cfg.lookahead),
            list(range(cfg.pool)),
            list(range(ROWS)),
        )
        self.waiting: list[Req] = []
        self.running: list[Seat] = []
        self.by_row: list[Seat | None] = [None] * ROWS
        self.number = 0

    def spare(self) -> int:
        return len(self.free) + self.tree.size - self.tree.locked

    def cover(self, seat: Seat, upto: int) -> bool:
        """Slots for positions [0, upto); retracts the youngest requests for them, at last `seat` itself."""
        need = upto - len(seat.slots)
        assert upto <= self.cfg.table, "page-table row too short"
        while need > self.spare():
            victim = max(self.running, key=lambda s: s.req.uid)
            self.seen["pool exhausted"] += 1
            self.retract(victim)
            if victim is seat:
                assert self.running, "the pool cannot hold one request"
                return False
        if need > 0:
            self.free += self.tree.evict(max(0, need - len(self.free)))
            new, self.free = self.free[:need], self.free[need:]
            seat.pending.append((len(seat.slots), new))
            seat.slots += new
            seat.owned += [True] * need
        return True

    def admit(self) -> Seat | None:
        """The first waiting request, if it fits without retracting anybody; later growth is not reserved."""
        req = self.waiting[0]
        path = self.tree.match(req.tokens, len(req.tokens) - (self.cfg.broken != "match-cap"))
        seat = Seat(self.number, self.rows[-1], req, path, self.tree.root)
        self.tree.lock(seat.node, 1)  # before counting: what it matched is no longer evictable
        if len(req.tokens) + 1 - len(path) > self.spare() and self.running:
            self.tree.lock(seat.node, -1)
            return None
        self.seen["prefix hits"] += len(path) > 0
        self.seen["resumed"] += len(req.tokens) > req.prompt_len
        self.number += 1
        self.waiting.pop(0)
        self.rows.pop()
        self.running.append(seat)
        self.by_row[seat.row] = seat
        return seat

    def plan(self) -> Plan | None:
        decode = [s for s in self.running if s.decoding and len(s.req.tokens) + s.inflight < s.req.limit]
        wanted = self.waiting or any(not s.decoding for s in self.running)
        shape: Shape | None = None
        seats, chunks = [], dict[Seat, Chunk]()
        if wanted and (not decode or self.rng.random() < 0.6):
            chunks = self.plan_prefill()
            seats = list(chunks)
        if not seats:
            shape, seats = self.plan_tree(decode)
        seats = [s for s in seats if self.by_row[s.row] is s]  # retracted while this plan was made
        # Uploads are collected last and from living seats only, so a released seat cannot write its former row.
        admits, writes = [], []
        for s in self.running:
            if not s.admitted:
                cached = s.kv
                admits.append(Admit(s.row, list(s.req.tokens), s.slots[:cached], s.req.seed))
            writes += [(s.row, first, slots) for first, slots in s.pending]
            if seats:
                s.admitted, s.pending = True, []
        if not seats:
            return None
        for s in seats:
            s.inflight += 1
        rows, numbers, uids = [s.row for s in seats], [s.number for s in seats], [s.req.uid for s in seats]
        return Plan(rows, numbers, uids, shape, [chunks[s] for s in seats] if shape is None else [], admits, writes)

    def plan_prefill(self) -> dict[Seat, Chunk]:
        budget, chunks = self.rng.randint(1, 30), dict[Seat, Chunk]()
        queue = sorted((s for s in self.running if not s.decoding), key=lambda s: s.req.uid)
        while budget > 0:
            seat = queue.pop(0) if queue else self.admit() if self.waiting and self.rows else None
            if seat is None:
                break
            if self.by_row[seat.row] is not seat:
                continue
            start, total = seat.sent, len(seat.req.tokens)
            end = min(start + min(budget, self.rng.randint(1, 12)), total)
            if self.cover(seat, end):
                seat.sent = seat.bound = end
                seat.decoding = end == total  # decodable before its first token is known here
                chunks[seat] = Chunk(start, end, end == total)
                budget -= end - start
        self.seen["multi-chunk plans"] += len(chunks) > 1
        return chunks

    def plan_tree(self, seats: list[Seat]) -> tuple[Shape, list[Seat]]:
        seats = [s for s in seats if self.by_row[s.row] is s]
        shape = self.rng.choice(MENUS[self.cfg.menu])
        weak = [s for s in seats if sum(s.req.tokens[-2:]) % 3 == 0]  # stands for "no n-gram match"
        if len(weak) == len(seats) or (weak and self.rng.random() < 0.2):
            shape, seats = PLAIN, weak
        for s in sorted(seats, key=lambda s: s.req.uid):  # oldest first: a victim is never already covered
            if self.by_row[s.row] is s and self.cover(s, s.bound + shape.span):
                s.bound += shape.depth + 1
        return shape, seats

    def commit(self, plan: Plan) -> None:
        for i, (row, number) in enumerate(zip(plan.rows, plan.numbers, strict=True)):
            seat, (new, order) = self.by_row[row], plan.results[i]
            if seat is None or (seat.number != number and self.cfg.broken != "admission"):
                self.seen["stale results"] += 1
                self.seen["stale, row reused"] += seat is not None
                self.seen["stale, same request"] += any(s.req.uid == plan.uids[i] for s in self.running)
                continue
            seat.inflight -= 1
            if plan.shape is None:
                seat.kv = plan.chunks[i].end
            else:
                at, m = seat.kv, plan.shape.nodes
                assert all(seat.owned[at : at + m]), "a step permuted slots of the tree"
                if self.cfg.broken != "mirror":
                    seat.slots[at : at + m] = [seat.slots[at + j] for j in order]
                seat.bound -= plan.shape.depth + 1 - len(new)
                seat.kv += len(new)
            for j, token in enumerate(new):
                if seat.req.append(token):
                    self.seen["cut inside a path"] += j + 1 < len(new)
                    self.seen["ended at context"] += len(seat.req.tokens) == CONTEXT
                    break
            if seat.req.done:
                self.release(seat)
            elif plan.shape is None:
                self.share(seat)

    def final(self, seat: Seat) -> int:
        """Positions whose target and drafter KV no launched step will change any more, and whose key is known."""
        if self.cfg.broken == "insert-kv":
            return min(seat.bound, len(seat.slots), len(seat.req.tokens) - self.cfg.lookahead)
        return min(seat.kv, len(seat.req.tokens) - self.tree.width + 1)

    def share(self, seat: Seat) -> None:
        """Puts a committed chunk into the tree and swaps duplicates for the tree's slots."""
        path = self.tree.insert(seat.req.tokens, self.final(seat), seat.slots, seat.owned)
        for p, node in enumerate(path if self.cfg.broken != "swap" else ()):
            if seat.owned[p]:  # somebody else was first; the step in flight may read ours until it is rewritten
                self.free.append(seat.slots[p])
                seat.slots[p], seat.owned[p] = node.slot, False
                if self.cfg.broken != "pending":
                    seat.pending.append((p, [node.slot]))
                self.seen["swapped slots"] += 1
        old, seat.node = seat.node, path[-1] if path else self.tree.root
        self.tree.lock(seat.node, 1)
        self.tree.lock(old, -1)

    def release(self, seat: Seat) -> None:
        """The only place that frees. Steps of the seat that are in flight write slots whose reuse comes later."""
        if self.cfg.broken != "order":
            self.tree.insert(seat.req.tokens, self.final(seat), seat.slots, seat.owned)
        self.tree.lock(seat.node, -1)
        if self.cfg.broken == "order":  # frees, lets somebody allocate, inserts: too late
            self.tree.evict(min(3, self.tree.size - self.tree.locked))
            self.tree.insert(seat.req.tokens, self.final(seat), seat.slots, seat.owned)
        self.free += [s for s, own in zip(seat.slots, seat.owned, strict=True) if own]
        self.rows.append(seat.row)
        self.running.remove(seat)
        self.by_row[seat.row] = None

    def retract(self, seat: Seat) -> None:
        self.seen["preemptions"] += 1
        self.seen["preempted in flight"] += seat.inflight > 0
        self.seen["preempted in prefill"] += not seat.decoding
        self.release(seat)
        self.waiting = sorted([*self.waiting, seat.req], key=lambda r: r.uid)

    def check(self) -> None:
        owners = self.free + [n.slot for n in self.tree.nodes()]
        owners += [x for s in self.running for x, own in zip(s.slots, s.owned, strict=True) if own]
        assert len(owners) == len(set(owners)) == self.cfg.pool, "a slot with no owner or with two"


def reference(req: Req, temperature: float) -> list[int]:
    ref = Req(0, req.tokens[: req.prompt_len], req.limit - req.prompt_len, req.seed, req.stop)
    while not ref.append(int(draw(ref.tokens, ref.seed, temperature).argmax())):
        pass
    return ref.tokens


def arrivals(rng: random.Random, count: int) -> Callable[[list[Req]], Req]:
    prefixes = [[rng.randint(1, VOCAB - 1) for _ in range(16)] for _ in range(3)]

    def make(past: list[Req]) -> Req:
        prompt = rng.choice(prefixes)[: rng.randint(2, 16)] + [
            rng.randint(1, VOCAB - 1) for _ in range(rng.randint(0, 3))
        ]
        turns = [r.tokens for r in past if r.done and len(r.tokens) < CONTEXT - 6]
        if turns and rng.random() < 0.4:
            prompt = [*rng.choice(turns), rng.randint(1, VOCAB - 1)]
        max_new = CONTEXT if rng.random() < 0.3 else rng.randint(1, 24)
        stop = (rng.randint(1, VOCAB - 1), rng.randint(1, VOCAB - 1))
        return Req(len(past), prompt, max_new, rng.randint(0, 9), stop)

    return make


def disturb(sched: Scheduler, rng: random.Random) -> None:
    """Aborts, and preemptions at any time instead of only when the pool is empty."""
    if sched.running and rng.random() < 0.005:
        seat = rng.choice(sched.running)
        seat.req.aborted = True
        sched.release(seat)
    if sched.running and rng.random() < 0.02:
        sched.retract(rng.choice(sched.running))


def simulate(seed: int, cfg: Config, seen: Counter[str], requests: int = 16) -> None:
    """One configuration; raises AssertionError (or KeyError, IndexError from the toy device) on a mismatch."""
    rng = random.Random(seed)
    sched, device = Scheduler(cfg, rng, seen), Device(cfg, seen)
    make, every, prev = arrivals(rng, requests), list[Req](), None
    steps = 0
    while len(every) < requests or sched.waiting or sched.running or prev:
        steps += 1
        assert steps < 5000, "no progress"
        while len(every) < requests and rng.random() < 0.5:
            every.append(make(every))
            sched.waiting.append(every[-1])
        disturb(sched, rng)
        cur = sched.plan()
        if cur:
            device.launch(cur)
        disturb(sched, rng)  # with two steps in flight
        for done in [prev] if cfg.lag else [cur]:
            if done:
                device.wait(done)
                sched.commit(done)
                seen["tokens"] += sum(len(new) for new, _ in done.results)
                seen["row steps"] += len(done.rows) * (done.shape is not None)
        prev = cur if cfg.lag else None
        sched.check()
    assert len(sched.free) + sched.tree.size == cfg.pool and sched.tree.locked == 0, "slots or locks left over"
    assert device.reach <= cfg.table, "token history too short"
    for req in every:
        if not req.aborted:
            assert req.tokens == reference(req, cfg.temperature), "tokens differ from plain decoding"
            seen["requests"] += 1


MUST = (
    *("preemptions", "pool exhausted", "preempted in flight", "preempted in prefill", "resumed", "stale results"),
    *("stale, row reused", "stale, same request", "prefix hits", "permuted", "cut inside a path", "ended at context"),
    *("multi-chunk plans", "swapped slots"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configurations", nargs="?", type=int, default=400)
    parser.add_argument("--break", dest="broken", choices=list(RULES), default="")
    args = parser.parse_args()
    total, failures, table, began = Counter[str](), Counter[str](), dict[tuple[str, int], Counter[str]](), time.time()
    for seed in range(args.configurations):
        rng = random.Random(seed)
        menu, lag = list(MENUS)[seed % 4], seed // 4 % 2
        cfg = Config(menu, lag, seed // 8 % 3, rng.choice([0.0, 1.0]), 0, args.broken)
        cfg.pool = Config(menu, lag, 0, 0.0, 0).table + rng.choice([0, 0, 20, 60, 120])
        seen = table.setdefault((menu, lag), Counter())
        try:
            simulate(seed, cfg, seen)
        except (AssertionError, KeyError, IndexError, ValueError) as error:
            seen["failed"] += 1
            failures[f"{type(error).__name__}: {error}"] += 1
    print(" " * 28 + " ".join(f"{menu + '/' + str(lag):>9}" for menu, lag in table))
    for what in ("requests", "failed", "row steps", "tokens", *MUST):
        print(f"{what:28}" + " ".join(f"{seen[what]:9}" for seen in table.values()))
    for seen in table.values():
        total += seen
    for message, times in failures.most_common():
        print(f"FAILED {times} times: {message}")
    idle = [m for m in MUST if not total[m]]
    print(
        f"{args.configurations} configurations, {time.time() - began:.0f} s", f"NOT EXERCISED: {idle}" if idle else ""
    )
    return 1 if failures or idle else 0


if __name__ == "__main__":
    sys.exit(main())
