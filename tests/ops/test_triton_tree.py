"""Tree kernels against the torch functions on the CPU: bitwise, and nothing written that is not the row's own."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from draftwing.engine.device import Device
from draftwing.engine.row_table import SlotTable
from draftwing.ops.torch import tree as reference
from draftwing.ops.triton import tree as kernels
from draftwing.spec.drafter import Draft

CPU = torch.device("cpu")
SHAPES = [(1, 0), (2, 1), (2, 3), (4, 3), (7, 2), (8, 7), (17, 5), (32, 5), (33, 16), (64, 8)]


def random_draft(rng: random.Random, batch: int, nodes: int, depth_max: int, kind: str) -> tuple[Draft, Tensor]:
    """Trees with dead nodes, chains, or lone roots among dead nodes; and what the target says at each node."""
    parents, lives, tokens, targets = [], [], [], []
    for _ in range(batch):
        parent, depth, alive, token = [0], [0], [True], [rng.randrange(9)]
        children: set[tuple[int, int]] = set()
        while len(parent) < nodes:
            p = len(parent) - 1 if kind == "chain" else rng.randrange(len(parent))
            name = rng.randrange(9 if len(parent) < 40 else 10**6)
            live = alive[p] and rng.random() < {"tree": 0.85, "chain": 0.95, "root": 0.0}[kind]
            if live and (depth[p] >= depth_max or (p, name) in children):
                if kind == "chain" or depth_max == 0:
                    live = False
                else:
                    continue
            if live:
                children.add((p, name))
            parent.append(p)
            alive.append(live)
            depth.append(depth[p] + 1 if live else 0)
            token.append(name)
        target = [rng.randrange(9) for _ in range(nodes)]
        for i in range(1, nodes):
            if rng.random() < 0.7:
                target[parent[i]] = token[i]
        parents.append(parent)
        lives.append(alive)
        tokens.append(token)
        targets.append(target)
    draft = Draft(torch.tensor(tokens), torch.tensor(parents), torch.tensor(lives))
    return draft, torch.tensor(targets)


def drafts(seed: int, batch: int, nodes: int, depth_max: int) -> list[tuple[Draft, Tensor]]:
    rng = random.Random(seed)
    return [random_draft(rng, batch, nodes, depth_max, kind) for kind in ("tree", "tree", "chain", "root")]


def on(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    return [x.to(device) for x in tensors]


def same(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    assert torch.equal(got.cpu(), expected)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs start as garbage."""

    def poison(self: Tensor, *shape: int, device: str | None = None) -> Tensor:
        return torch.full(shape, -77, dtype=self.dtype, device=device or self.device)

    monkeypatch.setattr(Tensor, "new_empty", poison)


@pytest.mark.parametrize("nodes, depth_max", SHAPES)
def test_derive_and_accept(nodes: int, depth_max: int, device: torch.device) -> None:
    for draft, target in drafts(nodes, 3, nodes, depth_max):
        expected = reference.derive(draft.parent, draft.alive, depth_max)
        tree = kernels.derive(*on(device, draft.parent, draft.alive), depth_max)
        for name in ("depth", "path", "path_len"):
            same(getattr(tree, name), getattr(expected, name))
        answer = reference.accept(*draft, expected, target)
        result = kernels.accept(*on(device, *draft, target), depth_max)
        for got, want in zip(result, answer, strict=True):
            same(got, want)


class World:
    """A slot table with garbage everywhere, twice: for the kernels and, on the CPU, for the reference."""

    def __init__(self, seed: int, rows: int, length: int, device: torch.device) -> None:
        g = torch.Generator().manual_seed(seed)
        self.slots = SlotTable(rows, length, Device(CPU))
        self.slots.table[:] = torch.randperm((rows + 1) * length, generator=g).view(rows + 1, length)
        self.slots.tokens[:] = torch.randint(0, 9, (rows + 1, length), generator=g)
        self.slots.kv_len[:rows] = torch.randint(0, length - 70, (rows,), generator=g)
        at = self.slots.kv_len[:, None]
        self.slots.last[:] = self.slots.tokens.gather(1, at).squeeze(1)
        self.slots.table[rows], self.slots.tokens[rows], self.slots.last[rows] = 0, 0, 0
        self.state = {name: getattr(self.slots, name).clone().to(device) for name in ("table", "kv_len", "last")}
        self.state["text"] = self.slots.tokens.clone().to(device)

    def check(self, rows: int) -> None:
        for name, got in self.state.items():
            expected = getattr(self.slots, {"text": "tokens"}.get(name, name))
            assert torch.equal(got[:rows].cpu(), expected[:rows]), name
            assert not got[rows].any(), f"{name} of the dummy row"


def advance(slots: SlotTable, rows: list[int], accepted: reference.Accepted) -> None:
    """Commits, row by row; rows past the last real one are left out."""
    for b, row in enumerate(rows):
        if row == slots.rows:
            continue
        at, count = int(slots.kv_len[row]), int(accepted.count[b])
        order, committed = accepted.order[b], accepted.committed[b]
        slots.table[row, at : at + len(order)] = slots.table[row, at : at + len(order)][order]
        slots.tokens[row, at + 1 : at + 1 + len(committed)] = committed
        slots.kv_len[row] = at + count
        slots.last[row] = committed[count - 1]


@pytest.mark.parametrize("nodes, depth_max", SHAPES)
def test_target_inputs(nodes: int, depth_max: int, device: torch.device) -> None:
    world = World(nodes, 5, 150, device)
    rows = torch.tensor([4, 0, 2, 5, 5])
    draft, _ = random_draft(random.Random(nodes), 5, nodes, depth_max, "tree")
    expected = reference.derive(draft.parent, draft.alive, depth_max)
    kv_len = world.slots.kv_len[rows]
    slots = world.slots.table[rows].gather(1, kv_len[:, None] + torch.arange(nodes))
    wanted = (kv_len[:, None] + expected.depth).flatten(), slots.flatten(), kv_len
    state = world.state
    parent, alive, rows = on(device, draft.parent, draft.alive, rows)
    tree, inputs = kernels.target_inputs(parent, alive, rows, state["table"], state["kv_len"], depth_max)
    for name in ("depth", "path", "path_len"):
        same(getattr(tree, name), getattr(expected, name))
    for answer, want in zip(inputs, wanted, strict=True):
        same(answer, want)


def test_plain_inputs(device: torch.device) -> None:
    world = World(3, 40, 90, device)
    rows = torch.tensor([*range(39, 2, -1), 40, 40])
    state = world.state
    got = kernels.plain_inputs(rows.to(device), state["table"], state["kv_len"], state["last"])
    kv_len = world.slots.kv_len[rows]
    for answer, want in zip(got, (world.slots.last[rows], kv_len, world.slots.table[rows, kv_len]), strict=True):
        same(answer, want)


@pytest.mark.parametrize("tail", [None, 0, 1])
@pytest.mark.parametrize("nodes, depth_max", SHAPES)
def test_accept_and_advance(nodes: int, depth_max: int, tail: int | None, device: torch.device) -> None:
    commit = depth_max + 1
    for seed, (draft, target) in enumerate(drafts(7 * nodes, 4, nodes, depth_max)):
        world = World(seed, 6, 200, device)
        rows = torch.tensor([4, 0, 6, 6])  # the last two pad
        root = world.slots.last[rows]
        draft.tokens[:, 0] = root
        before = world.slots.kv_len[rows]
        tree = reference.derive(draft.parent, draft.alive, depth_max)
        accepted = reference.accept(*draft, tree, target)
        advance(world.slots, rows.tolist(), accepted)
        state = world.state
        settled = kernels.accept_and_advance(
            *on(device, *draft, tree.depth, target, rows), state["table"], state["text"], state["kv_len"],
            state["last"], depth_max, hint=seed, tail=tail,
        )  # fmt: skip
        world.check(6)
        head = torch.stack((torch.full_like(accepted.count, seed), accepted.count), 1)
        same(settled.packed, torch.cat((head, accepted.committed, accepted.order, tree.depth), 1))
        same(settled.committed, accepted.committed)
        same(settled.count, accepted.count)
        same(settled.kv_len, before + accepted.count)
        assert (settled.path is None) == (tail is None)
        if settled.path is None:
            continue
        size = commit + tail
        at = before[:, None] + torch.arange(size)
        ids = world.slots.tokens[rows].gather(1, at)
        ids[:, :1], ids[:, 1:] = root[:, None], accepted.committed[:, : size - 1]
        write_slots = world.slots.table[rows].gather(1, at)
        path = kernels.Path(*(x.cpu() for x in settled.path))
        for answer, want in zip(path, (ids, at, write_slots), strict=False):
            assert torch.equal(answer.view(4, size)[:2], want[:2])
        for answer in (path.ids, path.write_slots):
            assert not answer.view(4, size)[2:].any()  # the dummy row's tokens, the pool's dummy slot
        width = min(commit, nodes)
        first = torch.arange(4)[:, None] * nodes
        assert torch.equal(path.nodes.view(4, commit)[:, :width], accepted.order[:, :width] + first)
        same(path.newest, torch.arange(4) * size + accepted.count - (1 - tail))


def test_row_that_ends_at_the_last_entry(device: torch.device) -> None:
    """The chain of the accepted path may look past the table's end: garbage, but nothing is written elsewhere."""
    world = World(1, 2, 100, device)
    for store in (world.slots.kv_len, world.state["kv_len"]):
        store[0] = 96
    draft, target = random_draft(random.Random(1), 1, 4, 3, "chain")
    state, table = world.state, world.slots.table.clone()
    depth = reference.derive(draft.parent, draft.alive, 3).depth
    kernels.accept_and_advance(
        *on(device, *draft, depth, target, torch.tensor([0])), state["table"], state["text"], state["kv_len"],
        state["last"], 3, tail=1,
    )  # fmt: skip
    assert torch.equal(state["table"].cpu()[1:], table[1:])
    assert torch.equal(state["table"].cpu()[0].sort().values, table[0].sort().values)
    assert torch.equal(state["text"].cpu()[1:], world.slots.tokens[1:])
