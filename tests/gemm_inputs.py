"""How the kernels that run on the CPU (ops/gemm_host.cpp) are compiled, and what they are given."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from draftwing.ops.cuda.gemm import KINDS, Shape
from draftwing.ops.cuda.gemm_groups import Width
from draftwing.ops.types import QuantizedRows


def compiled(folder: Path, source: str, *flags: str) -> ctypes.CDLL:
    """What gemm.py and its like compile from where their PTX ends. Fused multiply-adds as instructions are most of the
    speed, and have the same bits as calls of them; more than -O1 takes longer to compile than it saves."""
    (folder / "gemm.inc").write_text(
        source.replace("extern __shared__ float sums[];", "float* const sums = shared_memory();")
    )
    library, host = folder / "gemm.so", Path(__file__).parent / "ops/gemm_host.cpp"
    options = ["-std=c++17", "-O1", "-march=native", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
    command = ["g++", *options, *flags, f'-DSOURCE="{folder / "gemm.inc"}"', str(host), "-o", str(library)]
    subprocess.run(command, check=True)
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
