"""Recorded calls do again what they did, on what has been written meanwhile."""

from __future__ import annotations

import pytest
import torch

from draftwing.ops import make_ops
from draftwing.ops.cpu.tape import Notable, Recording, record

OPS = make_ops(torch.device("cpu"))


@pytest.fixture(autouse=True, params=[False, True], ids=["", "inference"])
def mode(request):
    """The engine runs in inference mode, where torch splits its operations later."""
    with torch.inference_mode(request.param):
        yield


needs_kernels = pytest.mark.skipif(OPS.name != "cpu", reason="the C kernels were not built")


def test_calls_are_noted_only_while_somebody_records() -> None:
    made = []

    class Module:
        version = 3

        @staticmethod
        def add(*numbers: int) -> int:
            made.append(numbers)
            return sum(numbers)

    module = Notable(Module)
    assert module.version == 3 and module.add(1, 2) == 3
    recording, out = record(lambda: module.add(3, 4))
    assert out == 7 and isinstance(recording, Recording)
    module.add(5)
    recording.replay()
    assert made == [(1, 2), (3, 4), (5,), (3, 4)]


@needs_kernels
def test_a_replay_reads_and_writes_the_same_places() -> None:
    source, index, order = torch.arange(12.0).view(4, 3), torch.tensor([1, 3]), torch.tensor([1, 0])
    # Nobody but the recording holds what the first call makes.
    recording, out = record(lambda: OPS.take_rows(OPS.take_rows(source, index), order))
    assert isinstance(recording, Recording) and torch.equal(out, source[[3, 1]])
    others = [torch.full((2, 3), -1.0) for _ in range(64)]  # which may be where it was
    source.mul_(10)
    index.copy_(torch.tensor([0, 2]))
    recording.replay()
    assert torch.equal(out, source[[2, 0]]) and all((other == -1).all() for other in others)


@needs_kernels
@pytest.mark.parametrize("held", [3, 1])
def test_threads_that_stay_for_all_calls_give_the_same(held: int) -> None:
    """GEMMs that are shared, with the weight of the next one fetched meanwhile, and some too small for that."""
    generator, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    torch.set_num_threads(3)
    OPS.workers.hold(held)
    try:
        weights = [
            torch.randn(size, generator=generator) for size in [(512, 1024), (1024, 512), (32, 1024), (1024, 32)] * 3
        ]
        gemms = [OPS.block_gemm([OPS.quantize(weight, "Q8_0")], torch.float32) for weight in weights]
        norms = [torch.ones(gemm.outputs) for gemm in gemms]
        x = torch.randn(2, 1024, generator=generator)

        def work() -> torch.Tensor:
            y = x
            for gemm, norm in zip(gemms, norms, strict=True):
                y = OPS.rms_norm(gemm.linear(y, None), norm, 1e-6)
            return y

        recording, out = record(work, OPS.replay_calls)
        assert isinstance(recording, Recording)
        for _ in range(6):
            x.copy_(torch.randn(2, 1024, generator=generator))
            expected = work()
            out.zero_()
            recording.replay()
            assert torch.equal(out, expected)
    finally:
        torch.set_num_threads(before)
        OPS.workers.hold(None)


@needs_kernels
def test_what_a_call_raises_ends_a_replay() -> None:
    x, index = torch.ones(4, 64), torch.arange(4)
    made: list[object] = []
    raw = Notable(type("Module", (), {"fail": staticmethod(lambda: 1 / len(made))}))
    made.append(x)
    recording, _ = record(lambda: [(OPS.take_rows(x, index), raw.fail()) for _ in range(9)], OPS.replay_calls)
    assert isinstance(recording, Recording)
    recording.replay()
    made.clear()
    with pytest.raises(ZeroDivisionError):
        recording.replay()


@needs_kernels
def test_what_torch_computes_is_not_recorded() -> None:
    x = torch.ones(2, 3)
    recording, out = record(lambda: OPS.take_rows(x, torch.zeros(1, dtype=torch.int64)))
    assert isinstance(recording, str) and torch.equal(out, x[:1])
    computing = (
        lambda: x + 1, lambda: x.t().contiguous(), lambda: x.t().reshape(-1), lambda: x.t().flatten(),
        lambda: x.to(torch.bfloat16), lambda: x[:, :2].contiguous(), lambda: x.clone(),
    )  # fmt: skip
    for function in computing:
        assert isinstance(record(function)[0], str)
    looking = (
        lambda: x.view(3, 2)[1:].unsqueeze(0), lambda: x.contiguous(), lambda: x.reshape(-1), lambda: x.unbind(1),
        lambda: x.t().split(2), lambda: x.to(torch.float32),
    )  # fmt: skip
    for function in looking:
        assert isinstance(record(function)[0], Recording)
