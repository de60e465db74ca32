"""The CUDA sources compile for GPUs that are not there. NVRTC needs none; it comes with torch for GPUs, and beside
another torch with `pip install nvidia-cuda-nvrtc`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftwing.ops.cuda import gemm, gemm_groups, gemm_tall, nvrtc
from draftwing.ops.cuda.gemm_groups import Width

HOPPER, OLDER = (9, 0), [(8, 0), (8, 9)]
WIDTHS = [Width(4, False, 1), Width(4, True, -1), Width(8, False, 1, True), Width(8, False, -1)]


def has_compiler() -> bool:
    try:
        nvrtc._nvrtc()
    except OSError:
        return False
    return True


pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not has_compiler(), reason="needs NVRTC: pip install nvidia-cuda-nvrtc"),
]


@pytest.fixture(autouse=True)
def nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("capability", [HOPPER, *OLDER])
def test_few_rows(capability: tuple[int, int]) -> None:
    gemm.compile_ahead(torch.bfloat16, capability)


@pytest.mark.parametrize("width", WIDTHS)
def test_groups_on_hopper(width: Width, tmp_path: Path) -> None:
    """With the kernels of many rows, which share files with them."""
    gemm_groups.compile_ahead(torch.bfloat16, width, HOPPER)
    gemm_tall.compile_ahead(torch.bfloat16, width, HOPPER)
    assert len(list(tmp_path.rglob("*.cubin"))) == 2


@pytest.mark.parametrize("capability", OLDER)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_groups_on_older_devices(dtype: torch.dtype, capability: tuple[int, int], tmp_path: Path) -> None:
    gemm_groups.compile_ahead(dtype, WIDTHS[0], capability)
    assert list(tmp_path.rglob("*.cubin"))


def test_what_does_not_compile_is_said() -> None:
    with pytest.raises(RuntimeError, match=r"NVRTC[^!]*nothing_known"):
        nvrtc.compile_source("__global__ void f() { nothing_known(); }", [], HOPPER)
