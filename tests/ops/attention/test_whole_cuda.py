"""Attention to all of a picture's patches by Hopper's instructions: whole.cu in C++ on the CPU (gemm_host.cpp) and on a
GPU, against float64; a query has the same bits among any."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import pytest
import torch
from gemm_inputs import COPIES_EARLY, EARLY, LATE, compiled, device, launch, on_hopper, on_host
from torch import Tensor

from draftwing.ops.attention import whole_cuda
from draftwing.ops.attention.whole_cuda import Form
from draftwing.ops.gemm.cuda import read_files

# Each size; with queries in shared memory and in registers.
FORMS = [Form(64, 32, 3, 2), Form(72, 48, 3, 2), Form(72, 64, 2, 2), Form(80, 32, 2, 3)]


def made(count: int, heads: int, size: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """Queries, keys and values [count, heads, size] of one product; weights are between all and none."""
    generator = torch.Generator().manual_seed(seed)
    every = torch.randn(count, 3, heads, size, generator=generator)
    every[:, 0] *= (1, 4, 0)[seed % 3]
    return every.to(dtype).unbind(1)


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In float64."""
    scores = torch.einsum("nhd,mhd->hnm", q.double(), k.double()) * q.shape[2] ** -0.5
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v.double()).flatten(1)


def off_by(found: Tensor, expected: Tensor) -> float:
    """Returns how far a result in bfloat16 is off, in what rounding it and its weights once may add."""
    return float(((found.double() - expected).abs() / (expected.abs() * 2**-8 + 2**-8)).max())


class Host:
    """The kernel of a form in C++."""

    def __init__(self, folder: Path, form: Form) -> None:
        self.form = form
        own = (Path(whole_cuda.__file__).parent / "whole.cu").read_text()
        files = read_files(["gemm_bulk.cu", "gemm_wgmma.cu", "gemm_dense.cu"])
        self._library = compiled(
            folder, "".join([*files, own, form.line]), "-DDENSE", "-DEXPERTS", "-DMANY_PAIRS", "-DPICTURES"
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, early: int = EARLY) -> Tensor:
        (rows, heads, size), form = q.shape, self.form
        q, k, v = (x.contiguous() for x in (q, k, v))
        out = torch.full((rows, heads * size), torch.nan, dtype=q.dtype)
        scale = ctypes.c_float(size**-0.5 * math.log2(math.e))
        self._library.whole_sizes(size, heads, form.keys, scale)
        self._library.source(None, 0)
        sizes = rows, len(k), heads * size, -(-rows // (form.groups * 64)), heads
        launch(self._library, form.name, (form.threads, 1, form.shared), (q, k, v, None, out), sizes, early)
        return out


@on_host
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_in_cpp(form: Form, tmp_path: Path) -> None:
    host = Host(tmp_path, form)
    for i, count in enumerate((1, form.keys, form.keys + 1, 5 * form.keys - 3, form.groups * 64 + 5)):
        q, k, v = made(count, 2, form.size, i)
        expected = exact(q, k, v)
        for early in (EARLY, LATE, COPIES_EARLY):
            found = host(q, k, v, early)
            assert off_by(found, expected) < 1.5, (count, early)
    some = host(q[9:11], k, v)
    assert torch.equal(some, found[9:11])


def test_forms() -> None:
    """There is room for them, and a query's sums have one order."""
    for size, forms in whole_cuda.FORMS.items():
        assert len({form.keys for form in forms.values()}) == 1
        for groups, form in forms.items():
            assert (form.size, form.groups) == (size, groups) and form.shared <= 227 << 10
            assert form.keys * 3 // 4 + size // 2 < {3: 140, 2: 200}[groups]  # registers of scores, weights and sums


@pytest.mark.parametrize(
    ("rows", "heads", "groups"),
    [(256, 16, 2), (1196, 16, 3), (1196, 12, 2), (2048, 16, 2), (2048, 12, 3), (4096, 16, 3), (15552, 16, 3)],
)
def test_groups_of_a_block(rows: int, heads: int, groups: int) -> None:
    """As they were measured: see docs/dev/gpu_kernels.md."""
    assert whole_cuda.groups_for(rows, heads, 132) == groups


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", whole_cuda.SIZES)
def test_on_a_gpu(size: int, dtype: torch.dtype) -> None:
    """Of slices of one product; each time the same bits, of some queries and with blocks of any size, too."""
    kernels = whole_cuda.whole_kernels(size, dtype, device())
    for i, count in enumerate((*range(1, 300, 13), 383, 384, 385, 1196, 4097)):
        q, k, v = torch.stack([x.to(device()) for x in made(count, 3, size, i, dtype)], 1).unbind(1)
        assert whole_cuda.takes(q, k, v)
        expected, attend = exact(q, k, v), whole_cuda.hopper_whole(k, v)
        torch.full((count * 3 * size,), torch.nan, dtype=dtype, device=device())  # in whose memory the result will be
        found = attend(q)
        assert off_by(found, expected) < 1.5, count
        for groups in (2, 3):
            assert torch.equal(kernels(q, k, v, size**-0.5, groups), found)
        assert torch.equal(attend(q[count // 2 :]), found[count // 2 :])


@on_hopper
def test_what_kernels_do_not_take() -> None:
    """Heads of other sizes and types, and places that copies cannot begin at, are torch's or copied."""
    q, k, v = (x.to(device()) for x in made(70, 2, 64, 1))
    apart = torch.zeros(70 * 2 * 64 + 1, dtype=q.dtype, device=device())[1:].view_as(q).copy_(q)
    attend = whole_cuda.hopper_whole(k, v)
    assert not whole_cuda.takes(apart) and torch.equal(attend(apart), attend(q))
    for some in ([x[:, :, :48] for x in (q, k, v)], [x.float() for x in (q, k, v)]):
        assert not whole_cuda.takes(*some)
        assert off_by(whole_cuda.hopper_whole(*some[1:])(some[0]), exact(*some)) < 1.5
