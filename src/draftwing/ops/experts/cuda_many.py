"""GEMMs of many pairs with the weights of experts in 16 bits, for compute capability 9.0: the Python side of
gemm_experts_many.cu. They have the bits of the kernels for few pairs.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.ops.cuda.nvrtc import Kernel, Module, compile_source, tensor_map
from draftwing.ops.experts.cuda import KINDS
from draftwing.ops.experts.routing import Routed
from draftwing.ops.gemm.cuda import options_for, read_files, wgmma
from draftwing.ops.gemm.shapes import CHUNK

FILES = (
    *("gemm.cu", "gemm_groups.cu", "gemm_experts.cu", "gemm_bulk.cu", "gemm_wgmma.cu", "gemm_dense.cu"),
    "gemm_experts_many.cu",
)
_ROWS = 128  # of weights, that a block has of a tile
_SHARED = 227 << 10  # bytes of a block
_STAGED = 64 * 128 * 2  # bytes of results of two warp groups
_MOST_STAGES, _LEAST = 8, 4  # of the ring; chunks of K, for copies are ahead by no more than two tiles
_WORKS = 4  # tiles whose expert, pairs and rows a block has in shared memory: those that copies may be ahead, and more
_STEP = 8  # features, by which results differ
_INSTRUCTIONS = {torch.bfloat16: "k16.f32.bf16.bf16", torch.float16: "k16.f32.f16.f16"}


class Size(NamedTuple):
    """Of kernels, which has no influence on their results."""

    pairs: int  # of a tile at most, a multiple of 16
    each: tuple[int, ...]  # as many as instructions have: the first of these that suffice
    registers: tuple[int, int]  # of a thread that multiplies, and of one that copies

    @property
    def threads(self) -> int:
        return 384

    @property
    def stages(self) -> int:
        """Returns those of the ring: all that there is room for."""
        before = 1024 + 128 + _WORKS * (4 + 2 * self.pairs) * 4  # what the ring is aligned to, barriers, and works
        return min((_SHARED - before - _STAGED) // ((_ROWS + self.pairs) * CHUNK * 2), _MOST_STAGES)

    def lines(self) -> str:
        """Returns lines of the source."""
        sizes = ", ".join(map(str, (*self.registers, *self.each)))
        template = f"{self.pairs}, {{}}, {sizes}"
        return "".join(f"MANY_PAIRS_KERNEL({name}, {template.format(kind)})\n" for name, kind in KINDS.items())


SIZE = Size(176, (64, 176), (232, 40))  # of 128, 160 and 176 the least time in mean (docs/dev/gpu_kernels.md)


def takes(weight: Tensor, rows: int, dtype: torch.dtype) -> bool:
    """Returns whether the kernels multiply activations of `dtype` with this weight, of which an expert has so many
    rows, also where they are gates and ups."""
    fits = weight.dtype == dtype and dtype in _INSTRUCTIONS and rows % (2 * _STEP) == 0
    fits = fits and weight.shape[1] % CHUNK == 0 and weight.shape[1] >= _LEAST * CHUNK and weight.is_contiguous()
    return fits and (weight.is_meta or (weight.is_cuda and weight.data_ptr() % 16 == 0))


class ManyPairs:
    """The kernels of one type on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, size: Size = SIZE) -> None:
        self._size = size
        module = Module(read_source(size, dtype), options_for(dtype), device)
        self._kernels: dict[str, Kernel] = {kind: module.kernel(kind, size.threads, _SHARED) for kind in KINDS}
        self._at_once = self._kernels["plain"].clusters_at_once(1)

    def __call__(
        self, kind: str, x: Tensor, weight: Tensor, bias: Tensor | None, routed: Routed, width: int, limit: float = 0.0
    ) -> Tensor:
        """x [M or pairs, K], columns as `triton_order.in_order` puts 32, weight [count * N, K], bias [count * N] ->
        [pairs, width], as `cuda.multiply` has them."""
        tiles, x, parts, size = routed.tiles, x.contiguous(), 1 if kind == "plain" else 2, self._size
        assert tiles is not None and tiles.rows <= size.pairs and tiles.tiles.is_contiguous()
        depth, count = x.shape[1], tiles.tiles.shape[1]
        out = x.new_empty(routed.pairs, width)
        box = (CHUNK, _ROWS // 2 // parts, parts)
        w_map = tensor_map(weight.data_ptr(), (depth, width, routed.count * parts), box)
        own = _ROWS // parts
        self._kernels[kind](
            (min(count * -(-width // own), self._at_once),), w_map, x, bias, tiles.order, tiles.tiles,
            out, count, routed.choices(x), width, depth, size.stages, limit, cluster=1,
        )  # fmt: skip
        return out


def read_source(size: Size, dtype: torch.dtype) -> str:
    """Returns what is compiled."""
    products = "".join(from_registers(pairs, _INSTRUCTIONS[dtype]) for pairs in size.each)
    return "".join([*read_files(FILES), f"#ifndef ON_HOST\n{products}#endif\n", size.lines()])


def from_registers(pairs: int, instruction: str) -> str:
    """Returns `FromRegisters` of so many pairs."""
    count, words = pairs // 2, ("a0", "a1", "a2", "a3")
    statement = wgmma(
        f"{pairs}{instruction}", [f"d[{i}]" for i in range(count)], "{{{}, {}, {}, {}}}, {}, more, 1, 1, 0",
        {**dict.fromkeys(words, "r"), "b": "l", "more": "r"},
    )  # fmt: skip
    # A predicate says whether d is added to.
    predicate = f"{{.reg .pred more; setp.ne.s32 more, %{count + 5}, 0; "
    statement = statement.replace('asm volatile("', f'asm volatile("{predicate}').replace(';" :', ';}" :')
    arguments = f"float (&d)[{count}], {', '.join(f'u32 {word}' for word in words)}, u64 b, int more"
    return (
        f"template <>\nstruct FromRegisters<{pairs}> {{\n"
        f"    static __device__ __forceinline__ void add({arguments}) {{\n        {statement}    }}\n}};\n"
    )


def compile_ahead(dtype: torch.dtype, capability: tuple[int, int], size: Size = SIZE) -> bytes:
    """Puts what `ManyPairs` compiles into the user's cache folder, for devices of this compute capability."""
    return compile_source(read_source(size, dtype), options_for(dtype), capability)


def multiply(
    kind: str, x: Tensor, weight: Tensor, bias: Tensor | None, routed: Routed, width: int, limit: float
) -> Tensor:
    """As `cuda.multiply`, in tiles of up to `SIZE.pairs`."""
    if x.is_meta or not routed.pairs:
        return x.new_empty(routed.pairs, width)
    return many_pairs(x.device, x.dtype)(kind, x, weight, bias, routed, width, limit)


@functools.cache
def many_pairs(device: torch.device, dtype: torch.dtype) -> ManyPairs:
    """Compiles on first use. Raises OSError without NVRTC."""
    return ManyPairs(device, dtype)
