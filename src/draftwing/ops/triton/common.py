"""What Triton kernels here share: integers packed into one tensor, launch options, and programmatic dependent launch.

With it (Hopper and later) a kernel's blocks come up while the kernel before still runs, which hides the cost of a
launch. Each kernel calls `start`, or `let_next_come` and then `wait`, before it touches anything that an earlier kernel
wrote, and every kernel does, so that when one has finished all before it have. Before that it may read what a kernel of
torch's came after, or one with `ordinary_options`, since those are launched when all before them have finished. GEMMs
of experts wait first and let the next kernel come then: so that one may read the routes before it waits
(`gemm_experts.routes_known`).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import ctypes
import functools
import math
import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IS_INTERPRETED = tl.constexpr(INTERPRETED)
FEATURE_COLUMNS = 1024  # of a feature, copied by one program


@triton.jit
def start(PDL: tl.constexpr) -> None:
    """Lets the next kernel come up, then waits for the kernels before this one."""
    let_next_come(PDL)
    wait(PDL)


@triton.jit
def let_next_come(PDL: tl.constexpr) -> None:
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr) -> None:
    """Waits for the kernels before this one."""
    if PDL:
        gdc_wait()


@functools.cache
def is_hopper() -> bool:
    """Returns whether kernels run on compute capability 9.0, whose larger tiles have the bits of small ones."""
    if INTERPRETED:
        return False
    target = driver.active.get_current_target()
    return target.backend == "cuda" and target.arch == 90


_ABSENT_GPU = {"memory": 0}  # of the one for which this process compiles without having it


def leave_memory(memory: int) -> None:
    """Has tensors without data be those of a GPU with so many bytes from now on."""
    _ABSENT_GPU["memory"] = memory


def memory_of(device: torch.device) -> int:
    """Returns bytes of a GPU, also of the one for which kernels are compiled; 0 where there is none."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return _ABSENT_GPU["memory"] if device.type == "meta" else 0


@triton.jit
def rounded_product(x, y):
    """x * y, float32, rounded before anything is added to it, as it is where the product is a kernel of its own: a
    compiler makes one operation of a product and a sum, whose bits are others."""
    if IS_INTERPRETED:
        return x * y
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, is_pure=True, pack=1)


# By type of device, filled as they come. A dictionary, which torch.compile looks into while it traces; a launch that it
# could not trace up to would be traced alone, with the number of warps as a variable, which it refuses.
_LAUNCH: dict[str, dict[str, Any]] = {}


def launch_options(device: torch.device) -> dict[str, Any]:
    """Returns keyword arguments of every launch; the kernel takes PDL as a constexpr and begins with `start(PDL)`."""
    known = _LAUNCH.get(device.type)
    if known is None:
        known = _LAUNCH[device.type] = _options(device.type)
    return known


def ordinary_options(device: torch.device) -> dict[str, Any]:
    """Returns those of a launch that waits for all before it; the kernel is written as all others are."""
    options = launch_options(device)
    return options | {"launch_pdl": False} if options["PDL"] else options


def _options(kind: str) -> dict[str, Any]:
    if not INTERPRETED and kind != "cpu":
        target = driver.active.get_current_target()
        if target.backend == "cuda" and target.arch >= 90:
            return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def keep_cache(launched: Any) -> None:
    """launched: what a launch returned. For a kernel with more than 48 KB of shared memory Triton tells the driver to
    prefer shared memory to L1 cache. GEMMs of few rows, whose weights on their way land in that cache, were left
    with little of it after such kernels: a step of an 8B model took half as long again. This takes it back."""
    function = getattr(launched, "function", None)
    if function is not None and launched.metadata.shared > 48 << 10:
        _forget_preference(function)


@functools.cache
def _forget_preference(function: int) -> None:
    code = ctypes.CDLL("libcuda.so.1").cuFuncSetCacheConfig(ctypes.c_void_p(function), 0)  # CU_FUNC_CACHE_PREFER_NONE
    assert code == 0, f"cuFuncSetCacheConfig: CUDA error {code}"


def lanes(count: int) -> int:
    """Returns a block of at least `count`; two at least, for reductions over an axis of one are not worth a special
    case."""
    return max(2, triton.next_power_of_2(count))


def int_fields(count: int, like: Tensor, *shape: int) -> tuple[Tensor, list[Tensor]]:
    """Returns a launch's integers [count, pitch] int64 and its fields of this shape, padded so that each begins at 16
    bytes."""
    size = math.prod(shape)
    ints = torch.empty(count, size + size % 2, dtype=torch.int64, device=like.device)
    return ints, [field[:size].view(shape) for field in ints.unbind(0)]


@triton.jit
def field_pitch(size):
    return size + size % 2


@triton.jit
def softplus(x):
    """max(x, 0) + log1p(exp(-|x|)). A GPU's logarithm near 1 is too coarse for decays of thousands of tokens. So
    log1p(u) = 2 artanh(u / (2 + u)), whose series, of numbers up to 1/3, is short."""
    u = tl.exp(-tl.abs(x))
    y = u / (2.0 + u)
    square = y * y
    total = tl.zeros(x.shape, tl.float32) + 1.0 / 15
    for i in tl.static_range(7):
        total = tl.fma(total, square, 1.0 / (13 - 2 * i))
    return tl.maximum(x, 0.0) + 2.0 * y * total
