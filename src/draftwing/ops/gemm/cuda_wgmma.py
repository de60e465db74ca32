"""What cuda_dense.py, cuda_many.py and cuda_fp8.py share: the source of gemm_wgmma.cu, and how K is cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from draftwing.ops.gemm.cuda import read_files, wgmma
from draftwing.ops.gemm.shapes import WARP_GROUPS

RANGES = (4, 2, 1)  # of K, a cluster's blocks
PANEL = 64  # columns in 16 bits, as in gemm_dense.cu: a stage
FILES = ("gemm.cu", "gemm_bulk.cu", "gemm_wgmma.cu")


def read_source(files: Sequence[str], instruction: str, features: Iterable[int], kernels: Iterable[str]) -> str:
    """Returns a source. instruction: what is behind the size of one, up to its operands; features: of those that the
    kernels have; kernels: lines."""
    return "".join(
        [*read_files((*FILES, *files)), *(_product(each, instruction) for each in sorted(set(features))), *kernels]
    )


def _product(features: int, instruction: str) -> str:
    """Returns `Product` for so many features."""
    count, untransposed = features // 2, ", 0, 0" if "f16" in instruction else ""
    sums = [f"d[{i}]" for i in range(count)]
    functions = [
        f"    static __device__ __forceinline__ void {name}(float (&d)[{count}], u64 a, u64 b) {{\n        "
        + wgmma(f"{features}{instruction}", sums, f"{{}}, {{}}, {more}, 1, 1{untransposed}", {"a": "l", "b": "l"})
        + "    }\n"
        for name, more in (("set", "0"), ("add", "1"))
    ]
    return f"template <>\nstruct Product<{features}> {{\n{''.join(functions)}}};\n"


def runs_on(capability: tuple[int, int]) -> bool:
    """Returns whether such devices have the instructions."""
    return capability[0] == WARP_GROUPS


def ranges_of(rows: int, columns: int, most_rows: int, least_columns: int) -> int:
    """Returns into how many ranges the columns of a weight of this shape are cut: so many that a block has many rows,
    for each block reads x. The order of sums depends on it. most_rows: of a weight, times ranges; least_columns: of a
    range."""
    return next(r for r in RANGES if r == 1 or (rows * r <= most_rows and columns >= r * least_columns))
