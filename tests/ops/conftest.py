"""Triton kernels run on the GPU where there is one and in Triton's interpreter elsewhere (tests/shared_fixtures.py)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from draftwing.layers.linear import Linear
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.cpu.ops import CpuOps
from draftwing.ops.gemm import onednn
from draftwing.ops.gemm.cpu import PackedGemm, has_gemm

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["*test_triton*.py", "test_peer_sums.py"]


@pytest.fixture
def same_threads() -> Iterator[None]:
    """The test may change how many threads torch has."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def cpu_ops() -> CpuOps:
    """The operations in C alone."""
    if load_extension() is None:
        pytest.skip("the C extension was not built, or is not wanted")
    return CpuOps(torch.device("cpu"))


@pytest.fixture(scope="session")
def in_bfloat16() -> None:
    if not has_gemm() or not onednn.takes(torch.empty(0, dtype=torch.bfloat16)):
        pytest.skip("the C kernels were not built, or this CPU has no AVX-512 BF16")


@pytest.fixture(scope="session")
def known_layout(in_bfloat16: None, cpu_ops: CpuOps) -> None:
    """oneDNN lays out weights and sums on this CPU as the kernel does: with AMX, say, it may not. On which CPUs it must
    is in cpu/test_extension.py."""
    linear = Linear(64, 64, False, torch.bfloat16, cpu_ops.device)
    linear.weight.data.copy_(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)))
    linear.pack(cpu_ops)
    if not isinstance(linear.op.first_gemm, PackedGemm):
        pytest.skip("this oneDNN packs weights, or sums, in another way than the kernel")


HALF = pytest.param(torch.float16, marks=pytest.mark.slow)


@pytest.fixture(params=[torch.float32, torch.bfloat16, HALF], ids=["float32", "bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Outputs of kernels start as NaN, so that an element left unwritten shows. A test that does not ask for `ops` has
    operations of its own, which are no torch's, and runs once."""
    name = request.getfixturevalue("ops").name if "ops" in request.fixturenames else ""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(x: torch.Tensor) -> torch.Tensor:
        return x.fill_(torch.nan if x.is_floating_point() else -7)

    with monkeypatch.context() as patch:
        if name != "torch":
            patch.setattr(torch, "empty", lambda *args, **kw: poison(empty(*args, **kw)))
            patch.setattr(torch, "empty_like", lambda x: poison(empty_like(x)))
        yield
