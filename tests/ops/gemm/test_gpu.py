"""Which GEMMs a GPU has for a weight: gates have the bits of those that an operation makes of its product."""

from __future__ import annotations

import pytest
import torch
from gemm_inputs import device, on_gpu
from torch import Tensor

from draftwing.ops.gemm.contract import Gemm

ROWS = (1, 2, 7, 8, 16, 17, 33, 64, 65, 128, 192, 193, 300, 1024)
SHAPES = [(512, 640), (2048, 1024), (12288, 2048), (28672, 4096)]


def made(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)  # a large matrix of a CPU's takes seconds
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_numbers_as_gates(dtype: torch.dtype) -> None:
    from draftwing.ops.elementwise.triton import silu_mul
    from draftwing.ops.gemm.gpu import GpuGemmOps

    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).short().view(dtype)
    gates = numbers[numbers.isfinite()].cuda()
    gates = gates[: len(gates) // 64 * 64]
    ups = made(len(gates), seed=1, dtype=dtype)
    x = torch.zeros(3, 64, dtype=dtype, device="cuda")
    x[:, 0] = 1
    for some, its in zip(gates.chunk(4), ups.chunk(4), strict=True):
        weight = torch.zeros(2 * len(some), 64, dtype=dtype, device="cuda")
        weight[:, 0] = torch.cat((some, its))
        gemm = GpuGemmOps(device()).gemms(weight, None, True)[0]
        found = gemm.gated(x, None)
        assert found is not None and torch.equal(found, silu_mul(gemm.linear(x, None)))


@on_gpu
@pytest.mark.parametrize("form", ["bfloat16", "float16", "fp8", "dynamic", "w4a16"])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_gates_of_products(form: str, outputs: int, inputs: int) -> None:
    from draftwing.ops.elementwise.triton import silu_mul
    from draftwing.ops.gemm.gpu import GpuGemmOps

    ops, dtype = GpuGemmOps(device()), torch.float16 if form == "float16" else torch.bfloat16
    weight, bias = made(outputs, inputs, seed=2, dtype=dtype) * inputs**-0.5, made(outputs, seed=4, dtype=dtype)
    gemms: list[Gemm]
    if form == "dynamic":
        if ops.fp8_from is None:
            pytest.skip("needs a GPU that multiplies in fp8")
        gemms = ops.gemms(ops.pack_fp8(ops.quantize_groups(weight, "fp8", True)), bias, True)
    elif form in ("fp8", "w4a16"):
        gemms = ops.gemms(ops.pack_groups(ops.quantize_groups(weight, form), dtype), bias, True)
    else:
        gemms = ops.gemms(weight, bias, True)
    fused = 0
    for rows in ROWS:
        gemm = next(one for one in gemms if rows <= one.max_rows)
        x = made(rows, inputs, seed=3, dtype=dtype)
        for own in (None, bias):
            if (found := gemm.gated(x, own)) is not None:  # else the caller makes them
                assert torch.equal(found, silu_mul(gemm.linear(x, own))), rows
                fused += 1
    assert fused, "nothing was compared"
