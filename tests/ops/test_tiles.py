"""GEMMs of blocks as AMX computes them, its instructions being functions (tiles.h): the bits are those of this CPU's
set. What only such a CPU can tell is in test_isa.py."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from block_ops import blocks
from torch import Tensor

from draftwing.ops import make_ops
from draftwing.ops.cpu import isa
from draftwing.ops.cpu.blocks import BlockedGemm
from draftwing.ops.cpu.extension import load_extension, usable_sets
from draftwing.ops.cpu.ops import CpuOps
from draftwing.ops.types import BlockRows

HERE = Path(__file__).parent
CSRC = Path(isa.__file__).parent / "csrc"
# Everything but the tiles is as the set has it, so the CPU must run the one before.
BEFORE = {one.name: one for one in isa.known_sets("x86_64")}["avx512_bf16"]
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
ROWS = 40  # more than are computed together

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(load_extension() is None or BEFORE not in usable_sets(), reason=f"needs {BEFORE.name}"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.PyDLL:
    made = tmp_path_factory.mktemp("tiles") / "tiles.so"
    includes = [f"-I{CSRC}", f"-I{sysconfig.get_path('include')}", f'-DTILES="{HERE / "tiles.h"}"']
    flags = ["-shared", "-fPIC", "-O1", "-ffp-contract=off", "-Wno-psabi", *BEFORE.flags]
    subprocess.run(["gcc", *flags, *includes, HERE / "tiles_host.c", "-lm", "-o", made], check=True)
    found = ctypes.PyDLL(str(made))
    found.multiply.restype = ctypes.c_int64
    return found


def gemm_of(*parts: BlockRows) -> BlockedGemm:
    """Of this CPU's set."""
    ops = make_ops(torch.device("cpu"))
    assert isinstance(ops, CpuOps)
    gemm = ops.block_gemm(parts, torch.float32)
    assert isinstance(gemm, BlockedGemm)
    return gemm


def by_tiles(library: ctypes.PyDLL, gemm: BlockedGemm, x: Tensor) -> tuple[Tensor, int]:
    """x @ weight.T, and how many products of tiles it took."""
    out, spare = torch.empty(x.shape[0], gemm.outputs), torch.empty(x.shape[0] * gemm.rounded, dtype=torch.uint8)
    numbers = (out.data_ptr(), x.data_ptr(), *x.shape, gemm.outputs, gemm.parts, spare.data_ptr())
    count = library.multiply(*(ctypes.c_int64(number) for number in numbers))
    return out, count


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_compute_the_same_bits(library: ctypes.PyDLL, kind: str) -> None:
    gemm = gemm_of(blocks(kind, 37, 512, seed=3))
    x = torch.randn(ROWS, 512, generator=torch.Generator().manual_seed(4)) * torch.logspace(-3, 2, ROWS)[:, None]
    x[5, :64], x[6, 100] = 0, torch.inf
    expected = gemm(x, None, None)
    assert expected[6].isnan().all() and expected[7:].isfinite().all()
    for rows in (1, 7, 8, 15, 16, 17, 31, 32, 33, ROWS):
        found, count = by_tiles(library, gemm, x[:rows])
        assert torch.equal(found[:6], expected[: min(rows, 6)]) and torch.equal(found[7:], expected[7:rows])
        assert rows <= 6 or found[6].isnan().all()
        tiles = -(-rows // 16) if rows > 1 else 0  # of 16 rows and 16 outputs
        assert count == tiles * 3 * (512 // 32) * (2 if kind == "Q6_K" else 1)


def test_parts_of_other_kinds_set_other_tiles(library: ctypes.PyDLL) -> None:
    """Q6_K has two scales in a block, so tiles that are half as long."""
    parts = [blocks("Q4_1", 48, 256, 1), blocks("Q6_K", 16, 256, 2), blocks("Q8_0", 37, 256, 3)]
    gemm, x = gemm_of(*parts), torch.randn(ROWS, 256, generator=torch.Generator().manual_seed(5))
    assert torch.equal(by_tiles(library, gemm, x)[0], gemm(x, None, None))
