"""Gated delta nets against a loop over tokens in float64, which knows nothing of states, trees and chunks; and a
token's bits are the same in whichever of them it is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import delta_steps
import pytest
import torch
from delta_steps import ACCEPTED, PARENTS, DeltaSteps
from torch import Tensor

from draftwing.kv.pool import DeltaSpec, KVPool, KVSpec, RowStates
from draftwing.ops.attention.batch import Batch, ChunkSpan, DeltaInputs, DeltaWeights, Ragged
from draftwing.ops.cpu.ops import CpuOps
from draftwing.ops.cpu.tape import Recording, record
from draftwing.ops.table import TorchOps

SPECS = {
    "as many heads": DeltaSpec(2, 2, 16, 16, 4),
    "grouped": DeltaSpec(2, 6, 16, 32, 4, corrects=2),
    "tiled": DeltaSpec(2, 6, 32, 16, 4, tiled=True),
    "two taps": DeltaSpec(1, 2, 16, 16, 2),
    "mamba": DeltaSpec(2, 6, 32, 16, 4, corrects=0),
    "as many heads, without the correction": DeltaSpec(2, 2, 32, 32, 2, corrects=0),
    "by channel": DeltaSpec(2, 2, 32, 32, 4, by_channel=True),
    "by channel, grouped": DeltaSpec(2, 4, 16, 80, 3, tiled=True, by_channel=True),
    "floor": DeltaSpec(2, 2, 32, 32, 4, by_channel=True, floor=-3.0),
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
    conv_bias, skip = (0 if part is None else part.double() for part in (weights.conv_bias, weights.skip))
    count, wide, taps = len(qkv), spec.key_heads * spec.key_dim, spec.conv_width
    padded = torch.cat((qkv.new_zeros(taps - 1, qkv.shape[1]), qkv))
    u = torch.stack([padded[j : j + count] * conv[:, j] for j in range(taps)]).sum(0) + conv_bias
    c = u * u.sigmoid()  # [T, channels]
    heads = torch.arange(spec.value_heads, device=qkv.device)
    theirs = heads % spec.key_heads if spec.tiled else heads // (spec.value_heads // spec.key_heads)
    q, k = (part.view(count, -1, spec.key_dim)[:, theirs] for part in c[:, : 2 * wide].split(wide, 1))  # [T, H, dk]
    if spec.corrects:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q = q * spec.key_dim**-0.5
    v = c[:, 2 * wide :].view(count, -1, spec.value_dim)  # [T, H, dv]
    dt = torch.log1p((a + bias).exp()).view(count, spec.value_heads, -1)  # [T, H, 1 or dk]
    log = decay[:, None] * dt
    if spec.floor:
        log = spec.floor / (1 + (decay[:, None] * (a + bias).view_as(dt)).exp())
    fade, beta = log.exp(), spec.corrects * b.sigmoid() if spec.corrects else dt[:, :, 0]
    state = qkv.new_zeros(spec.value_heads, spec.key_dim, spec.value_dim)
    out = []
    for t in range(count):
        state = state * fade[t, :, :, None]
        seen = (state * k[t, :, :, None]).sum(1) * bool(spec.corrects)  # [H, dv]: what the key finds
        state = state + k[t, :, :, None] * (beta[t, :, None] * (v[t] - seen))[:, None]
        out.append((state * q[t, :, :, None]).sum(1))
    o, gate = torch.stack(out), z.sigmoid().view(count, -1, spec.value_dim)
    gate = gate if spec.by_channel else gate * z.view_as(gate)
    if not spec.corrects:
        o = o + torch.as_tensor(skip).view(-1, 1) * v  # which goes past the state
        if not norm.numel():
            return (o * gate).flatten(1)
        o, gate, norm = (x.reshape(-1, spec.key_heads, norm.numel() // spec.key_heads) for x in (o, gate, norm))
    first = weights.gates_first and not spec.corrects
    o = o * gate if first else o
    o = o / (o.square().mean(-1, keepdim=True) + weights.eps).sqrt() * norm
    return (o if first else o * gate).flatten(1)


class Bench:
    """Rows with texts, of which `kv_len` tokens are in the KV, as a scheduler and an executor would have them."""

    def __init__(self, ops: TorchOps, spec: DeltaSpec, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.ops, self.spec, self.dtype, self.device = ops, spec, dtype, ops.device
        self.random = torch.Generator().manual_seed(seed)
        heads = spec.value_heads
        self.weights = DeltaWeights(
            self.made(spec.channels, spec.conv_width) / 2, -self.made(heads).exp(), self.made(spec.decays),
            1 + self.made(spec.value_dim) / 8, 1e-6,
        )  # fmt: skip
        if not spec.corrects:
            self.weights = self.weights._replace(
                norm=1 + self.made(heads * spec.value_dim) / 8, conv_bias=self.made(spec.channels),
                skip=self.made(heads),
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
        sizes = spec.channels, spec.value_heads * spec.value_dim, spec.value_heads, spec.decays
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


def few_specs(test: Callable[..., None]) -> Callable[..., None]:
    """Slow implementations have some of the cases."""
    few = dict(triton=["as many heads", "tiled", "two taps"], torch=["as many heads", "two taps", "mamba"])
    for ops, specs in few.items():
        test = pytest.mark.further(ops=ops, spec=specs)(test)
        test = pytest.mark.further(ops=ops, kind=[kind for kind in TREES if kind != "tree"])(test)
    return test


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


@few_specs
@pytest.mark.slow
@pytest.mark.further(ops="triton")  # test_bits_are_those_of_one_chunk has chunks and parts of trees, too
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


@few_specs
@pytest.mark.slower(ops="torch")
def test_a_half_type(ops: TorchOps) -> None:
    bench = Bench(ops, SPECS["grouped"], torch.bfloat16)
    bench.close(bench.prefill({1: 12}), bench.expected(1, 12))
    bench.step({1: TREES["tree"]})
    bench.step({1: TREES["root"]})


@few_specs
@pytest.mark.slow
@pytest.mark.further(ops="triton", spec=["mamba", "by channel", "by channel, grouped"])  # as test_as_in_torch has them
@pytest.mark.parametrize("kind", list(TREES))
@pytest.mark.covering("ops")
def test_trees_and_what_of_them_is_accepted(bench: Bench, kind: str) -> None:
    bench.prefill({0: 3, 1: 5})
    for _ in range(2):  # the second replays what the first has accepted
        bench.step({0: TREES[kind], 1: TREES[kind]})
    bench.step({0: TREES["root"]})
    bench.step({0: TREES["tree"], 1: TREES["tree"]})
    bench.step({0: TREES["root"], 1: TREES["root"]})


@few_specs
@pytest.mark.slow
@pytest.mark.further(ops="triton")
def test_ragged_batches(bench: Bench) -> None:
    bench.prefill({0: 3, 1: 1, 2: 6})
    bench.step({0: TREES["tree"], 1: TREES["root"], 2: TREES["chain"]}, ragged=True)
    bench.step({2: TREES["bush"], 0: TREES["chain"]}, ragged=True)
    bench.step({0: TREES["tree"], 1: TREES["tree"], 2: TREES["tree"]})
    bench.step({1: TREES["root"], 2: TREES["whole chain"]}, ragged=True)


@few_specs
@pytest.mark.further(ops="triton", spec=[name for name in SPECS if name != "floor"])
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


@few_specs
@pytest.mark.further(ops="triton", spec=[name for name in SPECS if name != "by channel, grouped"])
def test_saves_in_the_middle_of_chunks(bench: Bench) -> None:
    """Who goes on from one has the bits of who computed all of it."""
    first, second = 2 * ROWS + 1, 2 * ROWS + 2
    whole = bench.prefill({0: 12}, {0: ((4, first), (9, second))})
    for slot, length in ((first, 4), (second, 9)):
        bench.text[1], bench.kv_len[1], bench.first[1] = bench.text[0], length, True
        bench.states.set(torch.tensor([[1, slot, 3, length]], device=bench.device))
        assert torch.equal(bench.prefill({1: 12 - length}), whole[length:])
    bench.step({1: TREES["chain"]})


@few_specs
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


@few_specs
@pytest.mark.further(ops="triton", spec=[name for name in SPECS if name != "grouped"])
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


# -- steps of a server ------------------------------------------------------------------------------------------------

GPU = torch.cuda.is_available()  # else small sizes: Triton's interpreter takes long
DEVICE_SPECS = {  # sizes of heads that are no powers of two, and fewer taps, among them
    "grouped": DeltaSpec(2, 6, 16, 80, 4),
    "tiled": DeltaSpec(3, 6, 48, 48, 3, tiled=True),
    "wide": DeltaSpec(1, 2, 128, 128 if GPU else 32, 4),
    "even": DeltaSpec(2, 2, 128, 128, 4, corrects=2),
    "mamba": DeltaSpec(2, 6, 48, 80, 3, corrects=0),
    "by channel": DeltaSpec(3, 6, 48, 80, 3, tiled=True, by_channel=True),
}
of_devices = pytest.mark.parametrize("name", DEVICE_SPECS)


def steps_of(ops: TorchOps, spec: DeltaSpec, dtype: torch.dtype = torch.bfloat16, lazy: bool = False) -> DeltaSteps:
    generator = torch.Generator().manual_seed(3)
    return DeltaSteps(
        ops, spec, dtype, lambda *size: torch.randn(size, generator=generator).to(dtype).to(ops.device), lazy
    )


@pytest.mark.parametrize("norm", ["behind gates", "before gates", "none"])
def test_norms_of_state_space_layers(ops: TorchOps, norm: str) -> None:
    """And without a bias of the convolution."""
    bench = Bench(ops, SPECS["mamba"])
    weights = bench.weights._replace(conv_bias=None, gates_first=norm == "behind gates")
    bench.weights = weights._replace(norm=weights.norm[:0]) if norm == "none" else weights
    bench.close(bench.prefill({1: 12}), bench.expected(1, 12))
    bench.step({1: TREES["tree"]})


@pytest.mark.slow
@pytest.mark.further(ops="triton", name=["grouped", "tiled", "even", "wide"])  # as the tests above have them
@pytest.mark.further(ops="triton", dtype=[torch.float32, torch.float16])
@pytest.mark.further(ops="triton", lazy=False)
@pytest.mark.further(ops="cpu", name="wide")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lazy", [False, True])
@of_devices
def test_as_in_torch(ops: TorchOps, name: str, dtype: torch.dtype, lazy: bool) -> None:
    """All of it, states and records."""
    if ops.name == "torch" or (ops.name == "cpu" and (lazy or dtype == torch.float16)):
        pytest.skip("what is compared with, or what has no kernel")
    cuts = ops.name == "triton" and not GPU  # where a GPU rounds
    wide, spec = 1e-4 if dtype == torch.float32 else 6e-2 if cuts else 2e-2, DEVICE_SPECS[name]
    prompts = delta_steps.SHORT if cuts else delta_steps.PROMPTS
    found = list(steps_of(ops, spec, dtype, lazy).all(prompts))
    expected = list(steps_of(TorchOps(torch.device("cpu")), spec, dtype, lazy).all(prompts))
    if ops.name == "cpu":  # what is fresh nobody reads where no states are lazy
        found, expected = found[:-1], expected[:-1]
    states, dummy = len(found) - 9 + (ops.name == "cpu"), delta_steps.SLOTS + (ops.name == "triton")
    for i, (x, y) in enumerate(zip(found, expected, strict=True)):
        if i >= states:  # nobody reads the dummy's
            count = dummy if i < states + 2 else delta_steps.ROWS
            x, y = x[:count], y[:count]
        torch.testing.assert_close(x.cpu(), y, rtol=wide, atol=wide)


@pytest.mark.further(ops="triton", name=["tiled", "wide", "even", "grouped", "mamba"])
@of_devices
def test_dead_nodes_give_zeros(ops: TorchOps, name: str) -> None:
    """Nodes without a path change nothing of the others."""
    if ops.name == "torch":
        pytest.skip("which computes what nobody reads")
    steps = steps_of(ops, DEVICE_SPECS[name])
    tree, inputs = steps.trees([0, 0, 0]), steps.inputs(delta_steps.ROWS * 3)
    path = torch.tensor([[[0, 0], [0, 1], [2, 2]]] * delta_steps.ROWS)
    dead = tree._replace(path=path, path_len=torch.tensor([[1, 2, 1]] * delta_steps.ROWS))
    found, expected = (steps.run(some, inputs).view(delta_steps.ROWS, 3, -1) for some in (dead, tree))
    assert torch.equal(found[:, :2], expected[:, :2]) and not found[:, 2].any()


@pytest.mark.usefixtures("same_threads")
@pytest.mark.slower(name=["grouped", "wide", "even"])
@pytest.mark.parametrize("threads", [2, 5])  # more than key heads, too
@of_devices
def test_threads_do_not_change_bits(cpu_ops: CpuOps, name: str, threads: int) -> None:
    torch.set_num_threads(1)
    expected = list(steps_of(cpu_ops, DEVICE_SPECS[name]).all())
    torch.set_num_threads(threads)
    found = list(steps_of(cpu_ops, DEVICE_SPECS[name]).all())
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@of_devices
def test_a_replayed_step_reads_what_is_there_then(ops: TorchOps, name: str) -> None:
    """In a recording, or a graph on a GPU: its inputs, page tables, lengths, and which states and records are whose."""
    if ops.name == "torch" or (ops.name == "triton" and not GPU):
        pytest.skip("nothing is replayed there")
    noted, plain = (steps_of(ops, DEVICE_SPECS[name]) for _ in range(2))
    for some in (noted, plain):
        some.run(some.chunks((5, 9)), some.inputs(14))
        some.kv_len += torch.tensor([5, 9])
        some.advance(some.kv_len - 1)
        some.table = some.table.to(ops.device)
    batch, inputs = noted.moved(noted.trees(PARENTS)), noted.inputs(delta_steps.ROWS * len(PARENTS))
    rows = torch.arange(delta_steps.ROWS, device=ops.device)

    def step() -> Tensor:
        out = noted.run(batch, inputs)
        noted.ops.advance_states(noted.states, rows, batch.prefix_len)
        return out

    keep = [part.clone() for part in kept(noted)]
    replay, out = replayed(step, batch, inputs)
    for part, before in zip(kept(noted), keep, strict=True):
        part.copy_(before)
    for accepted in ([0, 2, 5], [0], [0, 1, 4], [0, 2, 5, 6]):
        own, its = plain.moved(plain.trees(PARENTS)), plain.inputs(delta_steps.ROWS * len(PARENTS))
        for field in ("prefix_len", "write_slots"):
            getattr(batch, field).copy_(getattr(own, field))
        for mine, theirs in zip(inputs, its, strict=True):
            mine.copy_(theirs)
        replay()
        assert torch.equal(out, plain.run(own, its))
        plain.commit(len(PARENTS), accepted)
        noted.table.copy_(plain.table)
    assert all(torch.equal(*both) for both in zip(kept(noted), kept(plain), strict=True))


def replayed(step: Callable[[], Tensor], batch: Batch, inputs: DeltaInputs) -> tuple[Callable[[], object], Tensor]:
    if batch.rows.device.type == "cpu":
        recording, out = record(step)
        assert isinstance(recording, Recording)
        return recording.replay, out
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        step()  # compiles
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = step()
    return graph.replay, out


def kept(steps: DeltaSteps) -> list[Tensor]:
    states = steps.states
    return [*states.layers[0][1:], states.read, states.write, states.page, states.length, states.node_slots]


# -- Triton -----------------------------------------------------------------------------------------------------------

LARGE = [DeltaSpec(1, 2, 32, 16, 4), DeltaSpec(1, 2, 32, 16, 4, corrects=0)]
if GPU:
    LARGE = [DeltaSpec(16, heads, 128, 128, 4) for heads in (16, 32, 48)]
    LARGE += [DeltaSpec(8, 64, 128, 64, 4, corrects=0), DeltaSpec(1, 24, 256, 128, 4, corrects=0)]


def test_softplus_of_decays_that_are_all_but_one(triton_ops: TorchOps) -> None:
    """As exactly as a GPU's exp, also where it is small."""
    from triton_kernels import softplus

    x = torch.linspace(-30, 30, 256, device=triton_ops.device)
    torch.testing.assert_close(softplus(x).double(), torch.log1p(x.double().exp()), rtol=5e-6, atol=0)


@pytest.mark.further(spec=LARGE[1:])  # whose kernels are those of the others, but for a term
@pytest.mark.parametrize("spec", LARGE)
def test_bits_are_those_of_one_chunk(spec: DeltaSpec, triton_ops: TorchOps) -> None:
    """In whichever chunks, trees, chains and parts of trees a token is, alone or with other rows, accepted at once or
    run again; whether plain steps write states or not."""
    count = 400 if GPU else 16
    inputs = steps_of(triton_ops, spec).inputs(count)
    whole = Texts(triton_ops, spec, inputs).chunk(count)
    assert torch.isfinite(whole).all()
    more = ("one by one", "chains") if GPU else ()  # of which plain steps of "lazy" and trees have the same
    for pieces in ("chunks", "trees", "parts of trees", "lazy", *more):
        texts = Texts(triton_ops, spec, inputs, pieces == "lazy")
        found = [texts.chunk(3)]
        while texts.at < count - NODES:
            if pieces == "chunks":
                found.append(texts.chunk(min(1 + texts.at % 23, count - texts.at)))
            elif pieces == "one by one" or (pieces == "lazy" and texts.at % 9 < 6):
                found.append(texts.tree([0], [0]))
            elif pieces == "chains":
                accepted = [0, 1, 2, 3][: 1 + texts.at % 4]
                found.append(texts.tree([0, 0, 1, 2], accepted))
            else:
                accepted = ACCEPTED[: 1 + texts.at % len(ACCEPTED)]
                found.append(texts.tree(PARENTS, accepted, ragged=pieces == "parts of trees"))
        assert torch.equal(torch.cat(found), whole[: texts.at]), pieces


class Texts:
    """One text, whose tokens are row 1's in trees, and those of row 0 are others; each call runs the next."""

    def __init__(self, ops: TorchOps, spec: DeltaSpec, inputs: DeltaInputs, lazy: bool = False) -> None:
        self.steps, self.inputs, self.at = steps_of(ops, spec, torch.bfloat16, lazy), inputs, 0
        longest = 2 * len(inputs.qkv) + 2 * NODES
        self.steps.table = 1 + torch.arange(delta_steps.ROWS * longest).view(delta_steps.ROWS, longest)
        self.random = torch.Generator().manual_seed(1)

    def chunk(self, length: int) -> Tensor:
        at, steps = torch.arange(self.at, self.at + length), self.steps
        row, start = torch.tensor([1]), torch.tensor([self.at])
        batch = Batch(row, at, at, steps.table[1, at], steps.table, start, chunks=(ChunkSpan(0, 0, self.at, length),))
        out = steps.run(batch, DeltaInputs(*(part[self.at : self.at + length] for part in self.inputs)))
        self.at += length
        steps.ops.advance_states(steps.states, row.to(steps.device), torch.tensor([self.at - 1], device=steps.device))
        return out

    def tree(self, parents: list[int], accepted: list[int], ragged: bool = False) -> Tensor:
        """-> of the accepted"""
        steps, nodes = self.steps, len(parents)
        steps.kv_len = torch.tensor([0, self.at])
        batch, inputs = steps.trees(parents), steps.inputs(delta_steps.ROWS * nodes)
        for depth, node in enumerate(accepted):
            for part, text in zip(inputs, self.inputs, strict=True):
                part[nodes + node] = text[self.at + depth]
        which = torch.arange(delta_steps.ROWS * nodes)
        if ragged:  # all of row 1's, and the root of row 0
            which = torch.tensor([0, *range(nodes, 2 * nodes)])
            assert batch.path is not None and batch.path_len is not None
            trees = batch.rows.to(steps.device), batch.prefix_len.to(steps.device)
            batch = batch._replace(
                rows=which // nodes, prefix_len=batch.prefix_len[which // nodes], write_slots=batch.write_slots[which],
                path=batch.path.flatten(0, 1)[which, None], path_len=batch.path_len.flatten()[which, None],
                ragged=Ragged(*trees, torch.tensor([0, 1, 1 + nodes], device=steps.device), nodes, 4),
            )  # fmt: skip
        out = steps.run(batch, DeltaInputs(*(part[which.to(steps.device)] for part in inputs)))
        rows = torch.tensor([1], device=steps.device)
        steps.ops.advance_states(steps.states, rows, torch.tensor([self.at], device=steps.device), nodes)
        here = steps.table[1, self.at :][:nodes]
        here.copy_(here[accepted + [node for node in range(nodes) if node not in accepted]])
        self.at += len(accepted)
        return out[torch.tensor(accepted, device=steps.device) + (1 if ragged else nodes)]
