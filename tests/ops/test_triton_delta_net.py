"""Gated delta nets in Triton: what `test_delta_net.py` does not ask of every device."""

from __future__ import annotations

import pytest
import torch
from delta_steps import ACCEPTED, NODES, PARENTS, ROWS, SLOTS, DeltaSteps, check_dead_nodes
from torch import Tensor

from draftwing.kv.pool import DeltaSpec
from draftwing.ops.attention import Batch, ChunkSpan, DeltaInputs, Ragged
from draftwing.ops.torch.ops import TorchOps

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
TritonOps = pytest.importorskip("draftwing.ops.triton.ops").TritonOps
delta_net = pytest.importorskip("draftwing.ops.triton.delta_net")

GPU = torch.cuda.is_available()  # else small sizes: Triton's interpreter takes long
pytestmark = pytest.mark.usefixtures("mended_interpreter")
SPECS = {  # sizes of heads that are no powers of two, and more taps, among them
    "grouped": DeltaSpec(2, 6, 16, 80, 4),
    "tiled": DeltaSpec(3, 6, 24, 48, 3, tiled=True),
    "wide": DeltaSpec(1, 2, 128, 128 if GPU else 32, 4),
}
LARGE = [DeltaSpec(16, heads, 128, 128, 4) for heads in (16, 32, 48)] if GPU else [DeltaSpec(1, 2, 32, 16, 4)]


@pytest.fixture(params=list(SPECS))
def spec(request: pytest.FixtureRequest) -> DeltaSpec:
    return SPECS[request.param]


def steps_of(ops: TorchOps, spec: DeltaSpec, dtype: torch.dtype, lazy: bool = False) -> DeltaSteps:
    generator = torch.Generator().manual_seed(3)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(ops.device)

    return DeltaSteps(ops, spec, dtype, make, lazy)


@pytest.mark.further(spec="wide", dtype=[torch.float32, torch.float16])
@pytest.mark.further(spec=["grouped", "tiled"])  # as tests/ops/test_delta_net.py has them
@pytest.mark.further(spec="wide", lazy=False)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lazy", [False, True])
def test_as_in_torch(spec: DeltaSpec, dtype: torch.dtype, lazy: bool, device: torch.device) -> None:
    """All of it, states and records."""
    wide = 1e-4 if dtype == torch.float32 else 2e-2 if GPU else 6e-2  # the interpreter cuts where a GPU rounds
    found = list(steps_of(TritonOps(device), spec, dtype, lazy).all())
    expected = list(steps_of(TorchOps(torch.device("cpu")), spec, dtype, lazy).all())
    states, dummy = len(found) - 9, SLOTS + 1  # nobody reads the dummy's
    for i, (x, y) in enumerate(zip(found, expected, strict=True)):
        x, y = (x[:dummy], y[:dummy]) if i in (states, states + 1) else (x, y)
        x, y = (x[:ROWS], y[:ROWS]) if i > states + 1 else (x, y)
        torch.testing.assert_close(x.cpu(), y, rtol=wide, atol=wide)


def test_softplus_of_decays_that_are_all_but_one(device: torch.device) -> None:
    """As exactly as a GPU's exp, also where it is small."""
    x = torch.linspace(-30, 30, 256, device=device)
    out = torch.empty_like(x)
    _softplus_kernel[(1,)](out, x, SIZE=256)
    expected = torch.log1p(x.double().exp())
    torch.testing.assert_close(out.double(), expected, rtol=5e-6, atol=0)


@triton.jit
def _softplus_kernel(out, x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    tl.store(out + at, delta_net._softplus(tl.load(x + at)))


def test_dead_nodes_give_zeros(spec: DeltaSpec, device: torch.device) -> None:
    check_dead_nodes(steps_of(TritonOps(device), spec, torch.bfloat16))


@pytest.mark.parametrize("spec", LARGE)
def test_bits_are_those_of_one_chunk(spec: DeltaSpec, device: torch.device) -> None:
    """In whichever chunks, trees, chains and parts of trees a token is, alone or with other rows, accepted at once or
    run again; whether plain steps write states or not."""
    count = 400 if GPU else 16
    alone = TritonOps(device)
    inputs = steps_of(alone, spec, torch.bfloat16).inputs(count)
    whole = Texts(alone, spec, inputs).chunk(count)
    assert torch.isfinite(whole).all()
    for pieces in ("one by one", "chunks", "trees", "chains", "parts of trees", "lazy"):
        texts = Texts(alone, spec, inputs, pieces == "lazy")
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
        self.steps.table = 1 + torch.arange(ROWS * longest).view(ROWS, longest)
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
        batch, inputs = steps.trees(parents), steps.inputs(ROWS * nodes)
        for depth, node in enumerate(accepted):
            for part, text in zip(inputs, self.inputs, strict=True):
                part[nodes + node] = text[self.at + depth]
        which = torch.arange(ROWS * nodes)
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


@pytest.mark.skipif(not GPU, reason="needs CUDA")
@pytest.mark.parametrize("large", [False, True])
def test_a_step_in_a_cuda_graph(spec: DeltaSpec, large: bool, device: torch.device) -> None:
    """It reads its inputs, page tables, lengths, and which states and records are whose, when it is replayed."""
    spec = LARGE[0] if large else spec
    captured, plain = (steps_of(TritonOps(device), spec, torch.bfloat16) for _ in range(2))
    for some in (captured, plain):
        some.run(some.chunks((5, 9)), some.inputs(14))
        some.kv_len += torch.tensor([5, 9])
        some.advance(some.kv_len - 1)
        some.table = some.table.to(device)
    batch, inputs = captured.moved(captured.trees(PARENTS)), captured.inputs(ROWS * len(PARENTS))
    rows, keep = torch.arange(ROWS, device=device), [part.clone() for part in kept(captured)]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        captured.run(batch, inputs)  # compiles
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = captured.run(batch, inputs)
        captured.ops.advance_states(captured.states, rows, batch.prefix_len)
    for part, before in zip(kept(captured), keep, strict=True):
        part.copy_(before)
    for accepted in ([0, 2, 5], [0], [0, 1, 4], [0, 2, 5, 6]):
        own, its = plain.moved(plain.trees(PARENTS)), plain.inputs(ROWS * len(PARENTS))
        for name in ("prefix_len", "write_slots"):
            getattr(batch, name).copy_(getattr(own, name))
        for mine, theirs in zip(inputs, its, strict=True):
            mine.copy_(theirs)
        graph.replay()
        assert torch.equal(out, plain.run(own, its))
        plain.commit(len(PARENTS), accepted)
        captured.table.copy_(plain.table)
    assert all(torch.equal(*both) for both in zip(kept(captured), kept(plain), strict=True))


def kept(steps: DeltaSteps) -> list[Tensor]:
    states = steps.states
    return [*states.layers[0][1:], states.read, states.write, states.page, states.length, states.node_slots]
