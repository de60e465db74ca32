"""Triton kernels that store activations in fp8: the values of those that store them as they are, quantised."""

from __future__ import annotations

import pytest
import torch
from delta_steps import DeltaSteps
from torch import Tensor

from draftwing.kv.pool import DeltaSpec
from draftwing.ops.fp8_blocks import Fp8Rows, quantised

pytest.importorskip("triton")
layers = pytest.importorskip("draftwing.ops.triton.layers")
norms = pytest.importorskip("draftwing.ops.triton.norms")
TritonOps = pytest.importorskip("draftwing.ops.triton.ops").TritonOps

GPU = torch.cuda.is_available()
pytestmark = pytest.mark.usefixtures("mended_interpreter")
SIZES = [(1, 128), (5, 384), (17, 640), (9, 2048), *([(64, 5120), (300, 6144)] if GPU else [])]


def check(found: Fp8Rows, plain: Tensor) -> None:
    """The same scales and codes; the interpreter cuts where a GPU rounds to e4m3."""
    (codes, scales), expected = found.plain(), quantised(plain)
    assert found.rows == len(plain) and torch.equal(scales, expected[1])
    same = codes.view(torch.uint8) == expected[0].view(torch.uint8)
    assert bool(same.all()) if GPU else float(same.float().mean()) > 0.9


def values(rows: int, columns: int, device: torch.device, seed: int) -> Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-2, 2, columns)
    x[-1, -128:] = 0
    return x.bfloat16().to(device)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_norms(rows: int, columns: int, wide: bool, device: torch.device) -> None:
    x, delta = values(rows, columns, device, 1), values(rows, columns, device, 2)
    weight = values(1, columns, device, 3)[0].to(torch.float32 if wide else torch.bfloat16)
    total, plain = norms.add_rms_norm(x, delta, weight, 1e-6)
    same_total, found = norms.add_rms_norm_fp8(x, delta, weight, 1e-6)
    assert torch.equal(same_total, total) and torch.equal(found.x, plain)
    check(found, plain)
    alone, plain = norms.rms_norm_fp8(x, weight, 1e-6), norms.rms_norm(x, weight, 1e-6)
    assert torch.equal(alone.x, plain)
    check(alone, plain)


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_gates(rows: int, columns: int, device: torch.device) -> None:
    both = values(rows, 2 * columns, device, 1)
    gate, x = both[:, :columns], values(rows, columns, device, 2)
    check(layers.gate_fp8(gate, x), layers.gate(gate, x))


@pytest.mark.parametrize("heads", [2, 6])
def test_delta_nets(heads: int, device: torch.device) -> None:
    spec, found = DeltaSpec(2, heads, 16, 128, 4), []
    for fp8 in (False, True):
        generator = torch.Generator().manual_seed(3)
        made = DeltaSteps(
            TritonOps(device), spec, torch.bfloat16,
            lambda *shape: torch.randn(shape, generator=generator).bfloat16().to(device),  # noqa: B023
        )  # fmt: skip
        made.weights = made.weights._replace(fp8=fp8)
        batch = made.chunks((3, 5))
        found.append(made.run(batch, made.inputs(8)))
    plain, rows = found
    assert isinstance(rows, Fp8Rows)  # type: ignore[unreachable]
    check(rows, plain)  # type: ignore[unreachable]
