"""What a CPU says of itself."""

from __future__ import annotations

import pytest
import torch

from draftwing.engine.devices.cpu import CpuDevice
from draftwing.sampling.logprobs import path_logprobs


def test_read_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes over the seconds of the fastest read; 0 where they find no room."""
    cpu = CpuDevice()
    cpu.read_bytes = 4000
    monkeypatch.setattr(cpu, "timed", lambda fn, times: [0.5, 0.25, 0.4])
    assert cpu.read_rate() == 16_000
    cpu.read_bytes = 1 << 60
    assert cpu.read_rate() == 0


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is installed, and of it what is free now; not the same number."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    cpu = CpuDevice()
    assert cpu.total_memory() == pytest.approx(kilobytes["MemTotal"] * 1024, rel=0.01)
    assert 0 < cpu.free_memory() < cpu.total_memory()
    monkeypatch.setattr(CpuDevice, "free_memory", lambda device: 64 << 20)
    assert cpu.total_memory() > 64 << 20, "what is installed does not depend on what is free"


@pytest.mark.parametrize(("active", "within"), [(4, 4), (3, 3), (1, 1)])
def test_torch_runs_in_as_many_threads_as_kernels(active: int, within: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it computes does not depend on them, and afterwards it has all again, whatever happened."""
    cpu, before = CpuDevice(), torch.get_num_threads()
    logits = torch.randn(1, 2, 200_000, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([[3, 199_999]])
    monkeypatch.setattr(CpuDevice, "active_threads", active / 4)
    try:
        torch.set_num_threads(4)
        expected = path_logprobs(logits, tokens, 5)
        with pytest.raises(ZeroDivisionError), cpu.torch_in_active_threads():
            assert torch.get_num_threads() == within
            assert torch.equal(path_logprobs(logits, tokens, 5), expected)
            raise ZeroDivisionError
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_nothing_is_copied_up_and_what_goes_down_is_a_copy() -> None:
    cpu = CpuDevice()
    tensor = torch.arange(6).view(2, 3)
    assert cpu.upload(tensor.flatten().numpy()).data_ptr() == tensor.data_ptr()
    download = cpu.download(tensor)
    tensor.mul_(2)
    later = cpu.download(tensor)  # as of a recorded step, which leaves its results in the same tensor
    tensor.zero_()
    assert download.wait().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert later.wait().tolist() == [[0, 2, 4], [6, 8, 10]]


@pytest.mark.parametrize("native", [True, False])
def test_it_computes_in_bfloat16_where_it_multiplies_these(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwing.engine.devices.cpu.has_native_bfloat16", lambda: native)
    assert CpuDevice().default_dtype(torch.float16) == (torch.bfloat16 if native else torch.float32)
