"""Gated delta nets in C: what `test_delta_net.py` does not ask of every device."""

from __future__ import annotations

import pytest
import torch
from delta_steps import PARENTS, ROWS, DeltaSteps, check_dead_nodes
from torch import Tensor

from draftwing.kv.pool import DeltaSpec
from draftwing.ops.attention import Batch, DeltaInputs
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.cpu.ops import CpuOps
from draftwing.ops.cpu.tape import Recording, record
from draftwing.ops.torch.ops import TorchOps

pytestmark = [
    pytest.mark.skipif(load_extension() is None, reason="the C extension was not built"),
    pytest.mark.usefixtures("same_threads"),
]
CPU = torch.device("cpu")
SPECS = {
    "grouped": DeltaSpec(2, 6, 16, 80, 4),
    "tiled": DeltaSpec(3, 6, 32, 48, 3, tiled=True),
    "even": DeltaSpec(4, 4, 128, 128, 4),
}


@pytest.fixture(params=list(SPECS))
def spec(request: pytest.FixtureRequest) -> DeltaSpec:
    return SPECS[request.param]


def steps_of(ops: TorchOps, spec: DeltaSpec, dtype: torch.dtype = torch.bfloat16) -> DeltaSteps:
    generator = torch.Generator().manual_seed(3)
    return DeltaSteps(ops, spec, dtype, lambda *shape: torch.randn(shape, generator=generator).to(dtype))


@pytest.mark.parametrize("threads", [2, 5])  # more than key heads, too
def test_threads_do_not_change_bits(spec: DeltaSpec, threads: int) -> None:
    torch.set_num_threads(1)
    expected = list(steps_of(CpuOps(CPU), spec).all())
    torch.set_num_threads(threads)
    found = list(steps_of(CpuOps(CPU), spec).all())
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_in_torch(spec: DeltaSpec, dtype: torch.dtype) -> None:
    """All of it, states and records."""
    wide = 1e-4 if dtype == torch.float32 else 2e-2
    # What is fresh nobody reads where no states are lazy.
    found, expected = (list(steps_of(ops(CPU), spec, dtype).all())[:-1] for ops in (CpuOps, TorchOps))
    states, dummy = len(found) - 8, 6  # nobody reads the dummy's
    for i, (x, y) in enumerate(zip(found, expected, strict=True)):
        x, y = (x[:dummy], y[:dummy]) if i in (states, states + 1) else (x, y)
        x, y = (x[:ROWS], y[:ROWS]) if i > states + 1 else (x, y)
        torch.testing.assert_close(x, y, rtol=wide, atol=wide)


def test_a_recorded_step_reads_what_is_there_then(spec: DeltaSpec) -> None:
    """Its inputs, page tables, lengths, and which states and records are whose."""
    recorded, plain = (steps_of(CpuOps(CPU), spec) for _ in range(2))
    for some in (recorded, plain):
        some.run(some.chunks((5, 9)), some.inputs(14))
        some.kv_len += torch.tensor([5, 9])
        some.ops.advance_states(some.states, torch.arange(ROWS), some.kv_len - 1)
    batch, inputs = recorded.trees(PARENTS), recorded.inputs(ROWS * len(PARENTS))
    rows = torch.arange(ROWS)

    def step() -> Tensor:
        out = recorded.run(batch, inputs)
        recorded.ops.advance_states(recorded.states, rows, batch.prefix_len)
        return out

    recording = None
    for accepted in ([0, 2, 5], [0], [0, 1, 4], [0, 2, 5, 6]):
        own, its = plain.trees(PARENTS), plain.inputs(ROWS * len(PARENTS))
        put(batch, own), put(inputs, its)
        if recording is None:
            recording, out = record(step)
            assert isinstance(recording, Recording)
        else:
            recording.replay()
        assert torch.equal(out, plain.run(own, its))
        plain.commit(len(PARENTS), accepted)
        recorded.table.copy_(plain.table)
    assert all(
        torch.equal(*both) for both in zip(recorded.states.layers[0][1:], plain.states.layers[0][1:], strict=True)
    )


def put(to: Batch | DeltaInputs, what: Batch | DeltaInputs) -> None:
    """Where a recording looks for it."""
    for name in ("prefix_len", "write_slots") if isinstance(to, Batch) else DeltaInputs._fields:
        getattr(to, name).copy_(getattr(what, name))


def test_dead_nodes_give_zeros(spec: DeltaSpec) -> None:
    check_dead_nodes(steps_of(CpuOps(CPU), spec))
