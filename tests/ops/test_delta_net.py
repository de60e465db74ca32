"""Gated delta nets against a loop over tokens in float64, which knows nothing of states, trees and chunks; and a
token's bits are the same in whichever of them it is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftwing.kv.pool import DeltaSpec, KVPool, KVSpec
from draftwing.kv.row_states import RowStates
from draftwing.ops.attention import Batch, ChunkSpan, DeltaInputs, DeltaWeights, Ragged
from draftwing.ops.torch.ops import TorchOps

pytestmark = [
    pytest.mark.further(ops="triton", spec=["as many heads", "tiled", "two taps"]),
    pytest.mark.further(ops="torch", spec=["as many heads", "two taps"]),
    pytest.mark.further(ops="torch", spec="tiled", kind=["root", "chain", "whole chain", "rejected", "bush"]),
    pytest.mark.further(ops="triton", kind=["root", "chain", "whole chain", "rejected", "bush"]),
]
SPECS = {
    "as many heads": DeltaSpec(2, 2, 16, 16, 4),
    "grouped": DeltaSpec(2, 6, 16, 32, 4),
    "tiled": DeltaSpec(2, 6, 32, 16, 4, tiled=True),
    "two taps": DeltaSpec(1, 2, 16, 16, 2),
}
ROWS, NODES, TOKENS, LAYER = 3, 8, 40, 1
# Parents of nodes, and the path that is accepted.
TREES: dict[str, tuple[list[int], list[int]]] = {
    "root": ([0], [0]),
    "chain": ([0, 0, 1, 2], [0, 1, 2]),
    "whole chain": ([0, 0, 1, 2], [0, 1, 2, 3]),
    "rejected": ([0, 0, 1, 2], [0]),
    "tree": ([0, 0, 0, 0, 1, 2, 2, 5], [0, 2, 5, 7]),
    "bush": ([0, 0, 0, 1, 1], [0, 2]),
}


def plain(spec: DeltaSpec, inputs: DeltaInputs, weights: DeltaWeights) -> Tensor:
    """[T, value_heads * value_dim] float64: the layer over a whole text, token by token."""
    qkv, z, b, a = (part.double() for part in inputs)
    conv, decay, bias, norm = (part.double() for part in weights[:4])
    count, wide, taps = len(qkv), spec.key_heads * spec.key_dim, spec.conv_width
    padded = torch.cat((qkv.new_zeros(taps - 1, qkv.shape[1]), qkv))
    u = torch.stack([padded[j : j + count] * conv[:, j] for j in range(taps)]).sum(0)
    c = u * u.sigmoid()  # [T, channels]
    heads = torch.arange(spec.value_heads, device=qkv.device)
    theirs = heads % spec.key_heads if spec.tiled else heads // (spec.value_heads // spec.key_heads)
    q, k = (part.view(count, -1, spec.key_dim)[:, theirs] for part in c[:, : 2 * wide].split(wide, 1))  # [T, H, dk]
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    v = c[:, 2 * wide :].view(count, -1, spec.value_dim)  # [T, H, dv]
    fade, beta = (decay * torch.log1p((a + bias).exp())).exp(), b.sigmoid()  # [T, H]
    state = qkv.new_zeros(spec.value_heads, spec.key_dim, spec.value_dim)
    out = []
    for t in range(count):
        state = state * fade[t, :, None, None]
        seen = (state * k[t, :, :, None]).sum(1)  # [H, dv]: what the key finds
        state = state + k[t, :, :, None] * (beta[t, :, None] * (v[t] - seen))[:, None]
        out.append((state * q[t, :, :, None]).sum(1) * spec.key_dim**-0.5)
    o, gate = torch.stack(out), z.view(count, -1, spec.value_dim)
    o = o / (o.square().mean(-1, keepdim=True) + weights.eps).sqrt() * norm
    return (o * gate * gate.sigmoid()).flatten(1)


class Bench:
    """Rows with texts, of which `kv_len` tokens are in the KV, as a scheduler and an executor would have them."""

    def __init__(self, ops: TorchOps, spec: DeltaSpec, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.ops, self.spec, self.dtype, self.device = ops, spec, dtype, ops.device
        self.random = torch.Generator().manual_seed(seed)
        heads = spec.value_heads
        self.weights = DeltaWeights(
            self.made(spec.channels, spec.conv_width) / 2, -self.made(heads).exp(), self.made(heads),
            1 + self.made(spec.value_dim) / 8, 1e-6,
        )  # fmt: skip
        self.pool = KVPool([KVSpec(1, 16), spec], (ROWS + 1) * 2 * TOKENS, dtype, self.device)
        self.states = RowStates({LAYER: spec}, 2 * ROWS + 4, ROWS, NODES, dtype, self.device)
        self.pool.states = self.states
        entries = [[row, 0, 2 * row + 1, 0] for row in range(ROWS)]
        self.states.set(torch.tensor(entries, device=self.device))
        slots = torch.randperm((ROWS + 1) * 2 * TOKENS, generator=self.random)[: ROWS * 2 * TOKENS] + 1
        self.table = torch.zeros(ROWS + 1, 2 * TOKENS, dtype=torch.int64)
        self.table[:ROWS] = slots.view(ROWS, -1)
        self.kv_len = [0] * ROWS
        self.first = [True] * ROWS  # whether the row reads the state of an empty text, which is not to be written
        self.text = [self.inputs(TOKENS) for _ in range(ROWS)]

    def made(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random).to(self.device)

    def inputs(self, count: int) -> DeltaInputs:
        spec = self.spec
        sizes = spec.channels, spec.value_heads * spec.value_dim, spec.value_heads, spec.value_heads
        return DeltaInputs(*(self.made(count, size).to(self.dtype) for size in sizes))

    def expected(self, row: int, count: int) -> Tensor:
        return plain(self.spec, taken(self.text[row], slice(0, count)), self.weights)

    def run(self, batch: Batch, inputs: DeltaInputs) -> Tensor:
        attend = self.ops.attention(self.pool).bind(self.moved(batch), 0)
        return attend.delta(LAYER, inputs, self.weights)

    def moved(self, batch: Batch) -> Batch:
        def move(value: Any) -> Any:
            return value.to(self.device) if isinstance(value, Tensor) else value

        ragged = None if batch.ragged is None else Ragged(*map(move, batch.ragged))
        return Batch(*map(move, batch))._replace(ragged=ragged)

    def prefill(self, lengths: dict[int, int], saves: dict[int, tuple[tuple[int, int], ...]] | None = None) -> Tensor:
        """The next tokens of some rows, in one batch -> [M, ...]"""
        spans, offset, positions, slots, parts = [], 0, [], [], []
        for i, (row, length) in enumerate(lengths.items()):
            at = self.kv_len[row]
            spans.append(ChunkSpan(i, offset, at, length, False, (saves or {}).get(row, ())))
            offset += length
            positions += range(at, at + length)
            slots.append(self.table[row, at : at + length])
            parts.append(taken(self.text[row], slice(at, at + length)))
        rows = torch.tensor([*lengths])
        ids, at = torch.zeros(offset, dtype=torch.int64), torch.tensor(positions)
        batch = Batch(
            rows, ids, at, torch.cat(slots), self.table, torch.tensor([self.kv_len[row] for row in lengths]),
            chunks=tuple(spans), bound=TOKENS,
        )  # fmt: skip
        out = self.run(batch, joined(parts))
        for row, length in lengths.items():
            self.kv_len[row] += length
        self.advance([*lengths], [self.kv_len[row] for row in lengths])
        return out

    def step(
        self, trees: dict[int, tuple[list[int], list[int]]], ragged: bool = False, numbers: tuple[int, ...] = ()
    ) -> None:
        """A step of trees of the same number of nodes, or of any numbers (`ragged`); compares every node with the loop,
        and commits. numbers: of the nodes, where some between them are not verified."""
        number = torch.tensor(numbers or range(NODES))
        nodes = max(len(parents) for parents, _ in trees.values())
        assert ragged or all(len(parents) == nodes for parents, _ in trees.values())
        paths, parts, prefix, slots, starts = [], [], [], [], [0]
        for row, (parents, accepted) in trees.items():
            at = self.kv_len[row]
            drafts = self.inputs(len(parents))
            for depth, node in enumerate(accepted):  # these are the text's
                for part, text in zip(drafts, self.text[row], strict=True):
                    part[node] = text[at + depth]
            parts.append(drafts)
            paths.append([path_to(parents, node) for node in range(len(parents))])
            prefix.append(at)
            slots.append(self.table[row, at + number[: len(parents)]])
            starts.append(starts[-1] + len(parents))
        depth = max(len(path) for its in paths for path in its)
        padded = [number[torch.tensor([path + [0] * (depth - len(path)) for path in its])] for its in paths]
        lengths = [torch.tensor([len(path) for path in its]) for its in paths]
        rows, inputs = torch.tensor([*trees]), joined(parts)
        count = starts[-1]
        ids = torch.zeros(count, dtype=torch.int64)
        if ragged:
            each = torch.tensor([len(its) for its in paths])
            batch = Batch(
                rows.repeat_interleave(each), ids, ids, torch.cat(slots), self.table,
                torch.tensor(prefix).repeat_interleave(each), torch.cat(padded)[:, None], torch.cat(lengths)[:, None],
                window=NODES, bound=2 * TOKENS,
                ragged=Ragged(rows, torch.tensor(prefix), torch.tensor(starts), NODES, 2),
            )  # fmt: skip
        else:
            batch = Batch(
                rows, ids, ids, torch.cat(slots), self.table, torch.tensor(prefix), torch.stack(padded),
                torch.stack(lengths), window=nodes, bound=2 * TOKENS,
            )  # fmt: skip
        found = self.run(batch, inputs).split([len(its) for its in paths])
        for row, its, drafts, got in zip(trees, paths, parts, found, strict=True):
            before = taken(self.text[row], slice(0, self.kv_len[row]))
            for node, path in enumerate(its):
                whole = joined([before, taken(drafts, torch.tensor(path))])
                self.close(got[node], plain(self.spec, whole, self.weights)[-1])
        after = []
        for row, (_, accepted) in trees.items():
            its, at = number[accepted].tolist(), self.kv_len[row]
            order = its + [node for node in range(NODES) if node not in its]
            self.table[row, at : at + NODES] = self.table[row, at : at + NODES][order]
            after.append(at + 1)
            self.kv_len[row] = at + len(accepted)
        self.advance([*trees], after)

    def advance(self, rows: list[int], lengths: list[int]) -> None:
        self.ops.advance_states(
            self.states, torch.tensor(rows, device=self.device), torch.tensor(lengths, device=self.device) - 1
        )
        for row in rows:
            if self.first[row]:  # else the state of an empty text would be written
                self.first[row] = False
                self.states.set(torch.tensor([[row, -1, 2 * row + 2, -1]], device=self.device))

    def close(self, found: Tensor, expected: Tensor) -> None:
        wide = 1e-4 if self.dtype == torch.float32 else 3e-2
        torch.testing.assert_close(found.double(), expected, rtol=wide, atol=wide)


def taken(inputs: DeltaInputs, which: Any) -> DeltaInputs:
    return DeltaInputs(*(part[which] for part in inputs))


def joined(parts: list[DeltaInputs]) -> DeltaInputs:
    return DeltaInputs(*map(torch.cat, zip(*parts, strict=True)))


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while path[0]:
        path.insert(0, parents[path[0]])
    return path


@pytest.fixture(params=list(SPECS))
def spec(request: pytest.FixtureRequest) -> DeltaSpec:
    return SPECS[request.param]


@pytest.fixture
def bench(ops: TorchOps, spec: DeltaSpec) -> Bench:
    return Bench(ops, spec)


@pytest.mark.slow
@pytest.mark.further(ops="triton")  # test_triton_delta_net.py has chunks and parts of trees, too
def test_chunks_of_any_cut(bench: Bench) -> None:
    found: list[list[Tensor]] = [[] for _ in range(ROWS)]
    for lengths in ({0: 1, 1: 7}, {1: 2, 2: 16}, {0: 5, 2: 1}, {0: 10, 1: 7, 2: 3}):
        parts = bench.prefill(lengths).split([*lengths.values()])
        for row, part in zip(lengths, parts, strict=True):
            found[row].append(part)
    whole = Bench(bench.ops, bench.spec)
    at_once = whole.prefill({0: 16, 1: 16, 2: 20}).split((16, 16, 20))
    for row in range(ROWS):
        bench.close(torch.cat(found[row]), bench.expected(row, bench.kv_len[row]))
        assert torch.equal(torch.cat(found[row]), at_once[row])


def test_a_half_type(ops: TorchOps) -> None:
    bench = Bench(ops, SPECS["grouped"], torch.bfloat16)
    bench.close(bench.prefill({1: 12}), bench.expected(1, 12))
    bench.step({1: TREES["tree"]})
    bench.step({1: TREES["root"]})


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(TREES))
def test_trees_and_what_of_them_is_accepted(bench: Bench, kind: str) -> None:
    bench.prefill({0: 3, 1: 5})
    for _ in range(3):  # the second replays what the first has accepted
        bench.step({0: TREES[kind], 1: TREES[kind]})
    bench.step({0: TREES["root"]})
    bench.step({0: TREES["tree"], 1: TREES["tree"]})
    bench.step({0: TREES["root"], 1: TREES["root"]})


@pytest.mark.slow
@pytest.mark.further(ops="triton")
def test_ragged_batches(bench: Bench) -> None:
    bench.prefill({0: 3, 1: 1, 2: 6})
    bench.step({0: TREES["tree"], 1: TREES["root"], 2: TREES["chain"]}, ragged=True)
    bench.step({2: TREES["bush"], 0: TREES["chain"]}, ragged=True)
    bench.step({0: TREES["tree"], 1: TREES["tree"], 2: TREES["tree"]})
    bench.step({1: TREES["root"], 2: TREES["whole chain"]}, ragged=True)


def test_dead_nodes_write_nothing(bench: Bench) -> None:
    """They are their own path (`derive`), as the root is."""
    bench.prefill({0: 4})
    again = Bench(bench.ops, bench.spec)
    again.prefill({0: 4})
    at, one = bench.kv_len[0], torch.tensor([0])
    draft = joined([taken(bench.text[0], slice(at, at + 1)), bench.inputs(2)])
    path, zeros = torch.tensor([[[0, 0], [1, 1], [2, 2]]]), torch.zeros(3, dtype=torch.int64)
    batch = Batch(
        one, zeros, zeros, bench.table[0, at : at + 3], bench.table, torch.tensor([at]), path,
        torch.ones(1, 3, dtype=torch.int64), window=3, bound=TOKENS,
    )  # fmt: skip
    bench.run(batch, draft)
    for some in (bench, again):
        if some is again:
            some.step({0: TREES["root"]})
        else:
            some.kv_len[0] += 1
            some.advance([0], [some.kv_len[0]])
    read = [some.states.layers[LAYER].state[some.states.read[0]] for some in (bench, again)]
    assert torch.equal(*read)


def test_saves_in_the_middle_of_chunks(bench: Bench) -> None:
    """Who goes on from one has the bits of who computed all of it."""
    first, second = 2 * ROWS + 1, 2 * ROWS + 2
    whole = bench.prefill({0: 12}, {0: ((4, first), (9, second))})
    for slot, length in ((first, 4), (second, 9)):
        bench.text[1], bench.kv_len[1], bench.first[1] = bench.text[0], length, True
        bench.states.set(torch.tensor([[1, slot, 3, length]], device=bench.device))
        assert torch.equal(bench.prefill({1: 12 - length}), whole[length:])
    bench.step({1: TREES["chain"]})


@pytest.mark.slow
@pytest.mark.further(ops="triton")  # of which a test of its own has all of these
def test_bits_are_those_of_plain_steps(bench: Bench) -> None:
    """Of trees and of chunks."""
    plain, drafted = bench, Bench(bench.ops, bench.spec)
    expected = Bench(bench.ops, bench.spec).prefill({0: 22})
    plain.prefill({0: 3, 1: 3})
    drafted.prefill({0: 3})
    for kind in ("tree", "chain", "bush", "root", "whole chain"):
        drafted.step({0: TREES[kind]})
    for _ in range(drafted.kv_len[0] - 3):
        plain.step({0: TREES["root"], 1: TREES["root"]})
    rest = 22 - plain.kv_len[0]
    assert rest > 3
    # A chunk cannot replay: one more plain step makes a state of all tokens.
    for some in (plain, drafted):
        some.step({0: TREES["root"]})
        assert int(some.states.length[0]) == some.kv_len[0]
    found = [some.prefill({0: rest - 1}) for some in (plain, drafted)]
    assert torch.equal(found[0], expected[-len(found[0]) :]) and torch.equal(*found)


def test_an_older_record_of_the_same_slot_is_not_found(bench: Bench) -> None:
    """Of a node that is not verified now, and comes before the one that is."""
    bench.prefill({0: 3})
    bench.step({0: TREES["tree"]})
    older = int(bench.states.node_slots[0, 1, 4])
    assert older > 0
    bench.step({0: TREES["root"]})
    entries = bench.table[0, bench.kv_len[0] :]  # in another order, as of a row that was another's
    others = entries[entries != older]
    bench.table[0, bench.kv_len[0] :] = torch.cat((others[:5], torch.tensor([older]), others[5:]))
    bench.step({0: ([0, 0, 1], [0, 1, 2])}, ragged=True, numbers=(0, 3, 5))
    bench.step({0: TREES["root"]})
