"""Attention to all of a picture's patches: the Python side of whole.cu, for compute capability 9.0."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from importlib import resources
from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.ops.attention.whole import WholeAttention, whole_attention
from draftwing.ops.cuda.nvrtc import Kernel, Module, TensorMap, tensor_map
from draftwing.ops.gemm import cuda_wgmma
from draftwing.ops.gemm.cuda import options_for, wgmma

SIZES = (64, 72, 80)  # of heads
_COLUMNS, _ENDS, _SLAB = 64, 16, 32  # of boxes, as whole.cu has them
_BEFORE = 1536  # bytes of shared memory at most: barriers, and up to what copies are aligned to


class Form(NamedTuple):
    """Of a kernel."""

    size: int  # of a head
    keys: int  # at a time, a multiple of 16: the order of a query's sums depends on it
    groups: int  # of warps, each for 64 queries
    stages: int  # of rings of keys and of values

    @property
    def name(self) -> str:
        return "whole_" + "_".join(str(int(each)) for each in self)

    @property
    def threads(self) -> int:
        """Returns those of a block: one more warp group, of which a thread asks for copies."""
        return self.groups * 128 + 128

    @property
    def line(self) -> str:
        """Returns a line of the source: the kernel."""
        return f"WHOLE_KERNEL({self.name}, {', '.join(str(int(each)) for each in self)})\n"

    @property
    def shared(self) -> int:
        """Returns bytes of a block's shared memory, with what is lost to alignment."""
        more = _ENDS if self.size > _COLUMNS else 0
        key, value = _COLUMNS + more, -(-self.size // _SLAB) * _SLAB
        return 2 * (self.groups * 64 * key + self.stages * self.keys * (key + value)) + _BEFORE


# By groups of a block. As many keys as the registers of three groups have scores for.
FORMS = {
    size: {groups: Form(size, keys, groups, 4) for groups in (3, 2)}
    for size, keys in {64: 128, 72: 128, 80: 112}.items()
}
# Time of a block with two groups, in that of one with three: 0.74 to 0.82 on an H200.
_OF_TWO = 0.8


def read_source(forms: Collection[Form], dtype: torch.dtype) -> str:
    """Returns what is compiled for these kernels."""
    own = resources.files(__package__).joinpath("whole.cu").read_text(encoding="utf-8")
    kind = "bf16.bf16" if dtype == torch.bfloat16 else "f16.f16"
    lines = [own]
    for size in sorted({form.size for form in forms}):
        lines.append(_by_registers("Weighted", size, kind, {"add": 1}, 1))
    for keys in sorted({form.keys for form in forms}):
        lines.append(_by_registers("Scores", keys, kind, {"set": 0, "add": 1}, 0))
    lines += [form.line for form in forms]
    return cuda_wgmma.read_source(["gemm_dense.cu"], f"k16.f32.{kind}", {form.keys for form in forms}, lines)


def _by_registers(name: str, features: int, kind: str, functions: dict[str, int], transposed: int) -> str:
    """Returns products whose first operand is in registers."""
    count = features // 2
    sums, first = [f"d[{i}]" for i in range(count)], {f"a[{i}]": "r" for i in range(4)}
    text = "".join(
        f"    static __device__ __forceinline__ void {function}(float (&d)[{count}], const u32* a, u64 b) {{\n        "
        + wgmma(
            f"{features}k16.f32.{kind}", sums, f"{{{{{{}}, {{}}, {{}}, {{}}}}}}, {{}}, {more}, 1, 1, {transposed}",
            {**first, "b": "l"},
        )
        + "    }\n"
        for function, more in functions.items()
    )  # fmt: skip
    return f"template <>\nstruct {name}<{features}> {{\n{text}}};\n"


class WholeKernels:
    """The kernels of one device, for heads of one size. A query of a picture has the same bits among any number."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._size = size
        self._at_once = torch.cuda.get_device_properties(device).multi_processor_count  # a block has one for itself
        module = Module(read_source(FORMS[size].values(), dtype), options_for(dtype), device)
        self._kernels: dict[Form, Kernel] = {
            form: module.kernel(form.name, form.threads, form.shared) for form in FORMS[size].values()
        }

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, groups: int = 0) -> Tensor:
        """Queries [n, heads, size], keys and values [N, heads, size], as `takes` wants them -> [n, heads * size].
        scale: of scores.  groups: of a block, 0: what takes least time."""
        rows, heads, size = q.shape
        assert rows and size == self._size and k.shape == v.shape == (len(k), heads, size)
        form = FORMS[size][groups or groups_for(rows, heads, self._at_once)]
        out = q.new_empty(rows, heads * size)
        queries, keys = (_boxes(x, (_COLUMNS, _ENDS), n) for x, n in ((q, 64), (k, form.keys)))
        (values,) = _boxes(v, (_SLAB,), form.keys)
        self._kernels[form](
            (-(-rows // (form.groups * 64)), heads), *queries, *keys, values, out, rows, len(k), heads,
            scale * math.log2(math.e),
        )  # fmt: skip
        return out


def groups_for(rows: int, heads: int, at_once: int) -> int:
    """Returns how many groups take least time for so many queries. at_once: blocks that run at once."""

    def time(groups: int) -> float:
        return -(-heads * -(-rows // (groups * 64)) // at_once) * (_OF_TWO if groups == 2 else 1)

    return min((3, 2), key=time)


def _boxes(x: Tensor, columns: tuple[int, ...], rows: int) -> list[TensorMap]:
    """Returns maps of x [n, heads, size] whose boxes have so many columns of so many rows of a head."""
    assert x.stride(2) == 1
    n, heads, size = x.shape
    strides = (2 * x.stride(1), 2 * x.stride(0))
    return [tensor_map(x.data_ptr(), (size, heads, n), (each, 1, rows), strides) for each in columns]


@functools.cache
def whole_kernels(size: int, dtype: torch.dtype, device: torch.device) -> WholeKernels:
    """Compiles. That raises OSError without NVRTC."""
    return WholeKernels(size, dtype, device)


def takes(*tensors: Tensor) -> bool:
    """Returns whether kernels read such queries, keys or values [n, heads, size]."""
    first = tensors[0]
    fits = first.is_cuda and first.dtype in (torch.bfloat16, torch.float16) and first.shape[2] in SIZES
    aligned = fits and all(
        x.stride(2) == 1 and not (x.stride(0) % 8 or x.stride(1) % 8 or x.data_ptr() % 16) for x in tensors
    )
    return aligned and cuda_wgmma.runs_on(torch.cuda.get_device_capability(first.device))


def hopper_whole(k: Tensor, v: Tensor, scalar: int = 0) -> WholeAttention:
    """Returns what `whole_attention` does, by kernels for tensors that they take."""
    if not takes(k, v):
        return whole_attention(k, v, scalar)
    scale, kernels = (scalar or k.shape[2]) ** -0.5, whole_kernels(k.shape[2], k.dtype, k.device)
    return lambda q: kernels(q if takes(q) else q.contiguous(), k, v, scale)
