"""How the kernels that run on the CPU (ops/gemm_host.cpp) are compiled, and what they are given."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftwing.files import cache_folder
from draftwing.ops.gemm.cuda import KINDS
from draftwing.ops.gemm.cuda_groups import Width
from draftwing.ops.gemm.shapes import Shape
from draftwing.ops.gemm.stored import QuantizedRows

LATE, EARLY, COPIES_EARLY = 0, 1, 2  # when copies and instructions are done, as gemm_host.cpp has them
HAS_GPU = torch.cuda.is_available()
HAS_HOPPER = HAS_GPU and torch.cuda.get_device_capability()[0] == 9
Test = Callable[..., None]


def on_host(test: Test) -> Test:
    """Kernels compiled as C++ run on the CPU."""
    return pytest.mark.slow(pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")(test))


def on_gpu(test: Test) -> Test:
    skip = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU: CUDA C++")
    return pytest.mark.slow(pytest.mark.gpu(skip(test)))


def on_hopper(test: Test) -> Test:
    skip = pytest.mark.skipif(not HAS_HOPPER, reason="needs a GPU of Hopper's: CUDA C++")
    return pytest.mark.slow(pytest.mark.gpu(skip(test)))


def device() -> torch.device:
    """The GPU that is in use."""
    return torch.device("cuda", torch.cuda.current_device())


def width_name(width: Width) -> str:
    return f"{'fp' * width.fp8}{width.bits}{'z' if width.zeros else ''}{width.shift}"


def compiled(folder: Path, source: str, *flags: str) -> ctypes.CDLL:
    """What gemm.py and its like compile from where their PTX ends; the same source is compiled once by a user. Fused
    multiply-adds as instructions are most of the speed, and have the same bits as calls of them; more than -O1 takes
    longer to compile than it saves."""
    source = source.replace("extern __shared__ float sums[];", "float* const sums = shared_memory();")
    host = Path(__file__).parent / "ops/gemm_host.cpp"
    options = ["-std=c++17", "-O1", "-march=native", "-ffp-contract=off", "-w", "-shared", "-fPIC", *flags]
    compiler = subprocess.run(
        ["g++", "-v", "-E", "-march=native", "-"], input="", capture_output=True, text=True
    ).stderr
    words = "\n".join([*options, compiler, host.read_text(), source])
    kept = cache_folder() / "kernels" / "host"
    library = kept / f"{hashlib.sha256(words.encode()).hexdigest()}.so"
    if not library.exists():
        kept.mkdir(parents=True, exist_ok=True)
        (folder / "gemm.inc").write_text(source)
        made = folder / "gemm.so"
        subprocess.run(["g++", *options, f'-DSOURCE="{folder / "gemm.inc"}"', str(host), "-o", str(made)], check=True)
        partly = library.with_suffix(f".{os.getpid()}")
        shutil.copy(made, partly)
        partly.replace(library)
        for old in sorted(kept.glob("*.so"), key=lambda one: one.stat().st_mtime)[:-100]:
            old.unlink(missing_ok=True)
    return ctypes.CDLL(str(library))


def without_ptx(source: str) -> str:
    """What kernels with weights in groups are compiled from, less what gemm_host.cpp has in its place."""
    _, begin, source = source.partition("enum { PLAIN")
    before, _, rest = source.partition("#if TYPE_BF16")
    return begin + before + rest[rest.index("// Weights as these are") :]


def stored_kernels(shapes: Mapping[str, Shape]) -> str:
    """By kind and tile: those of gemm.cu, as stored_*."""
    lines = []
    for name, shape in shapes.items():
        cut = f"stored_{name}, {shape.warps * 32}, {shape.blocks}, {shape.cluster}, {shape.call}"
        lines.append(f"KERNEL({cut}, {KINDS[name.partition('_')[0]]})\n")
    return "".join(lines)


def launch(
    library: ctypes.CDLL, name: str, cut: tuple[int, int, int], tensors: tuple[Tensor | None, ...],
    sizes: tuple[int, ...], early: int,
) -> None:  # fmt: skip
    """cut: threads, cluster, bytes of shared memory."""
    kernel = ctypes.cast(getattr(library, name), ctypes.c_void_p)
    assert library.run(kernel, *cut, *map(pointer, tensors), *sizes, early), "more shared memory than was asked for"


def exact(kind: str, x: Tensor, matrix: Tensor, bias: Tensor | None, extra: Tensor | None) -> Tensor:
    """In float64."""
    found = x.double() @ matrix.double().T
    found = found if bias is None else found + bias.double()
    if kind == "silu":
        gate, up = found.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up
    return found + extra.double() if extra is not None and kind == "add" else found


def off_by(kind: str) -> float:
    """Returns what a result may be off by, of itself. Results are rounded once, gates three times, and silu magnifies
    what a number far below 0 is off by."""
    return 2**-5 if kind == "silu" else 2**-7


def check_gates(found: Tensor, products: Tensor) -> None:
    """Asserts that gates are what an operation of its own makes of products as they are stored: silu of the first half,
    in float32 and rounded, times the second one."""
    gate, up = products.float().chunk(2, 1)
    silu = gate / ((-gate).double().exp().float() + 1)
    expected = (silu.to(found.dtype).double() * up).to(found.dtype)
    assert (found != expected).sum() <= 1  # which the exponential of a library may round


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


def quantized(width: Width, rows: int, columns: int, tall: int, wide: int, seed: int = 1) -> QuantizedRows:
    made = torch.Generator().manual_seed(seed)
    tall, wide = tall or rows, wide or columns
    down, across = -(-rows // tall), -(-columns // wide)
    scales = (torch.rand(down, across, generator=made) + 0.5) * columns**-0.5
    if width.bits == 8 and not width.fp8:
        codes = torch.randint(-128, 128, (rows, columns), generator=made).to(torch.int8)
        return QuantizedRows(codes, 8, scales / 64, None, tall, wide, None)
    if width.fp8:
        codes = torch.randint(0, 127, (rows, columns), generator=made) + 128 * torch.randint(
            0, 2, (rows, columns), generator=made
        )
        return QuantizedRows(codes.to(torch.uint8).view(torch.float8_e4m3fn), 8, scales / 64, None, tall, wide, None)
    codes = torch.randint(-8, 8, (rows, columns), generator=made).to(torch.int8)
    zeros = torch.randint(-9, 9, (down, across), generator=made).to(torch.int16) if width.zeros else None
    return QuantizedRows(codes, 4, scales / 4, zeros, tall, wide, None)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
