"""The CUDA sources compile for GPUs that are not there. NVRTC needs none; it comes with torch for GPUs, and beside
another torch with `pip install nvidia-cuda-nvrtc`."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from draftwing.ops.attention import whole_cuda
from draftwing.ops.cuda import nvrtc
from draftwing.ops.experts import cuda as gemm_experts
from draftwing.ops.experts import cuda_many as experts_many
from draftwing.ops.experts.cuda import DENSE, Layout
from draftwing.ops.experts.rows import FP8, INT4, INT8, MX
from draftwing.ops.gemm import cuda as gemm
from draftwing.ops.gemm import cuda_dense, cuda_fp8, cuda_groups, cuda_many
from draftwing.ops.gemm.cuda_groups import Width

HOPPER, OLDER = (9, 0), [(8, 0), (8, 9)]
WIDTHS = [Width(4, False, 1), Width(4, True, -1), Width(8, False, 1, True), Width(8, False, -1)]
# With the chunks of gpt-oss, of Qwen3-30B-A3B and, short rows, of Qwen3.5-35B-A3B; the last one has no stream.
EXPERTS = [
    Layout(MX, 4, chunks=45), Layout(FP8, 1, chunks=12), Layout(FP8, 1, chunks=8), Layout(DENSE, chunks=32),
    Layout(INT4, 2, True, chunks=32), Layout(INT8, 0, chunks=64), Layout(INT4, 4),
]  # fmt: skip


def disassembler() -> Path | None:
    """Triton brings one along."""
    found = importlib.util.find_spec("triton")
    folders = [] if found is None else [Path(folder) for folder in found.submodule_search_locations or ()]
    programs = [folder / "backends/nvidia/bin/cuobjdump" for folder in folders]
    return next((program for program in programs if program.exists()), None)


def has_compiler() -> bool:
    try:
        nvrtc.library()
    except OSError:
        return False
    return True


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_compiler(), reason="needs NVRTC: pip install nvidia-cuda-nvrtc"),
    pytest.mark.further(capability=OLDER),
    pytest.mark.further(capability=HOPPER, dtype=torch.float16),
    pytest.mark.further(capability=(12, 0)),
    pytest.mark.further(width=WIDTHS[1:]),
    pytest.mark.further(layout=EXPERTS[1:]),
]


@pytest.fixture(autouse=True)
def nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


Kernels = TypeVar("Kernels")


def some(shapes: Mapping[tuple[str, int], Kernels]) -> dict[tuple[str, int], Kernels]:
    """By kind and tile: each kind and each tile once, for they are apart."""
    kinds, tiles, found = set[str](), set[int](), dict[tuple[str, int], Kernels]()
    for (kind, tile), shape in shapes.items():
        if kind not in kinds or tile not in tiles:
            found[kind, tile] = shape
        kinds.add(kind)
        tiles.add(tile)
    return found


@pytest.mark.further(every=True)
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("capability", [HOPPER, *OLDER, (12, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_rows(dtype: torch.dtype, capability: tuple[int, int], every: bool, tmp_path: Path) -> None:
    shapes = gemm.shapes_for(capability, dtype)
    gemm.compile_ahead(dtype, capability, shapes if every else some(shapes))
    assert list(tmp_path.rglob("*.cubin"))


@pytest.mark.further(every=True)
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_groups_on_hopper(width: Width, every: bool, tmp_path: Path) -> None:
    shapes = cuda_groups.shapes_for(width.bits, HOPPER)
    shapes = shapes if every else some(shapes)
    cuda_groups.compile_ahead(torch.bfloat16, width, HOPPER, shapes)
    assert len(list(tmp_path.rglob("*.cubin"))) == len(gemm.programs(shapes))


@pytest.mark.further(every=True)
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("many", [False, True])
def test_fp8(many: bool, every: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest and the largest; the others are compiled for a CPU."""
    for name in ("SIZES", "MANY_SIZES") if not every else ():
        sizes = getattr(cuda_fp8, name)
        monkeypatch.setattr(cuda_fp8, name, [sizes[0], sizes[-1]])
    cuda_fp8.compile_ahead(HOPPER, many)
    assert list(tmp_path.rglob("*.cubin"))


@pytest.mark.further(groups=2)
@pytest.mark.further(every=True)
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.further(groups=1)
@pytest.mark.parametrize("groups", cuda_dense.GROUPS)
def test_more_than_few_rows(groups: int, every: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = cuda_dense.PARTS[groups]
    monkeypatch.setitem(cuda_dense.PARTS, groups, parts if every else [parts[0], parts[-1]])
    cuda_dense.compile_ahead(groups, HOPPER)
    assert list(tmp_path.rglob("*.cubin"))


@pytest.mark.exhaustive  # a compiler of the host compiles it for its emulator
@pytest.mark.further(dtype=torch.float16)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("program", cuda_many.PROGRAMS, ids=str)
def test_many_rows(
    program: cuda_many.Program, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [size for size in cuda_many.SIZES if size[1:] == program]
    monkeypatch.setattr(cuda_many, "SIZES", [sizes[0], sizes[-1]])
    cuda_many.compile_ahead(program, dtype, HOPPER)
    (image,) = tmp_path.rglob("*.cubin")
    # Where a branch depends on what is not known, ptxas lets each product end before the next begins, without a word.
    if (tool := disassembler()) is not None:
        code = subprocess.run([tool, "-sass", image], capture_output=True, text=True, check=True).stdout
        products, waits = code.count("HGMMA"), code.count("WARPGROUP.DEPBAR")
        assert 0 < waits < products / 3, f"{products} products, {waits} waits"


@pytest.mark.parametrize("capability", OLDER)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_groups_on_older_devices(dtype: torch.dtype, capability: tuple[int, int], tmp_path: Path) -> None:
    cuda_groups.compile_ahead(dtype, WIDTHS[0], capability)
    assert list(tmp_path.rglob("*.cubin"))


@pytest.mark.parametrize("layout", EXPERTS)
def test_experts(layout: Layout, tmp_path: Path) -> None:
    gemm_experts.compile_ahead(torch.bfloat16, layout, HOPPER)
    assert list(tmp_path.rglob("*.cubin"))


@pytest.mark.further(dtype=torch.float16)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_of_many_pairs(dtype: torch.dtype, tmp_path: Path) -> None:
    image = tmp_path / "many.cubin"
    image.write_bytes(experts_many.compile_ahead(dtype, HOPPER))
    if (tool := disassembler()) is not None:  # as above: two products of four are under way at a time
        code = subprocess.run([tool, "-sass", image], capture_output=True, text=True, check=True).stdout
        products, waits = code.count("HGMMA"), code.count("WARPGROUP.DEPBAR")
        assert 0 < waits < products, f"{products} products, {waits} waits"


@pytest.mark.further(size=64)
@pytest.mark.further(size=80)
@pytest.mark.further(dtype=torch.float16)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", whole_cuda.SIZES)
def test_attention_of_towers(size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    image = tmp_path / "whole.cubin"
    source = whole_cuda.read_source(whole_cuda.FORMS[size].values(), dtype)
    image.write_bytes(nvrtc.compile_source(source, gemm.options_for(dtype), HOPPER))
    if (tool := disassembler()) is not None:
        code = subprocess.run([tool, "-sass", image], capture_output=True, text=True, check=True).stdout
        for kernel in code.split("Function : ")[1:]:
            first, _, loop, *rest = kernel.split("WARPGROUP.DEPBAR")
            assert "HGMMA" in first and len(rest) == 2 and "STL" not in kernel
            # Weights are made while values of the keys before are multiplied, not behind the wait for these.
            assert loop.count("MUFU.EX2") >= whole_cuda.FORMS[size][3].keys // 2


@pytest.mark.exhaustive
def test_experts_on_older_devices(tmp_path: Path) -> None:
    """Without bulk copies."""
    gemm_experts.compile_ahead(torch.float16, EXPERTS[2], OLDER[0])
    assert list(tmp_path.rglob("*.cubin"))


def test_older_compilers_take_it() -> None:
    """NVRTC of CUDA 13.0, which torch 2.11 comes with, takes lambdas with `auto` for functions of the host; 13.5 does
    not."""
    for file in Path(gemm.__file__).parent.glob("*.cu"):
        assert not re.search(r"\]\s*\([^)]*\bauto\b", file.read_text()), file


def test_what_does_not_compile_is_said() -> None:
    with pytest.raises(RuntimeError, match=r"NVRTC[^!]*nothing_known"):
        nvrtc.compile_source("__global__ void f() { nothing_known(); }", [], HOPPER)
