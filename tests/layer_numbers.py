"""Inputs of the operations of layers, and how far from float64 their results may be."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from draftwing.ops.table import TorchOps

SIZES = [100, 576, 4096]
# Units of one rounding of the result. Triton's interpreter cuts bfloat16 off instead of rounding it.
UNIT = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
CUTS = os.environ.get("TRITON_INTERPRET") == "1"


def made(ops: TorchOps, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(ops.device, dtype)


def norm64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def close(found: Tensor, expected: Tensor, ops: TorchOps, roundings: float = 1.05, floor: float = 1e-2) -> None:
    """roundings: units that the result may be off by; of what is near 0, this share of that."""
    unit = roundings * UNIT[found.dtype] * (2 if cuts(ops) and found.dtype == torch.bfloat16 else 1)
    torch.testing.assert_close(found.double(), expected, rtol=unit, atol=unit * floor)


def cuts(ops: TorchOps) -> bool:
    """Whether results are cut off where a GPU rounds."""
    return CUTS and ops.name == "triton"
