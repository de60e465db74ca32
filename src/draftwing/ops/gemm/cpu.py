"""GEMMs of few rows with a weight that oneDNN has packed: ops/cpu/csrc/gemm.c, where this CPU can run it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from draftwing.ops.cpu.arguments import addresses
from draftwing.ops.cpu.extension import DTYPES, MAX_TOPK, load_extension
from draftwing.ops.cpu.runtime import CpuRuntime
from draftwing.ops.cpu.workers import Workers
from draftwing.ops.fp8.spec import Fp8Blocks
from draftwing.ops.gemm import onednn
from draftwing.ops.gemm.contract import FEW_ROWS, Gemm
from draftwing.ops.gemm.cpu_blocks import TYPES, BlockedGemm, BlockReader, quantize
from draftwing.ops.gemm.cpu_heads import HeadBlocks, HeadGemm
from draftwing.ops.gemm.gemms import OneDnnGemm
from draftwing.ops.gemm.groups import PackedGroups
from draftwing.ops.gemm.spec import GemmOps
from draftwing.ops.gemm.stored import BlockRows
from draftwing.ops.rows.spec import RowOps
from draftwing.ops.sampling.cpu import CpuLogitEditor
from draftwing.ops.types import LogitEditor, NoiseKey

_INPUTS, _OUTPUTS = 32, 64  # multiples of these fill the layout that the kernel reads
_BLOCKS = (1024, 512, 2048, 4096, 256, 128, 64)  # inputs that oneDNN may sum together


def has_gemm() -> bool:
    """Returns whether the extension is there, and this CPU runs its GEMM."""
    raw = load_extension()
    return raw is not None and bool(raw.has_product)


class PackedGemm:
    """x @ weight.T + bias + residual, rounded once, for a weight [outputs, inputs] in bfloat16."""

    max_rows = FEW_ROWS
    dtype = torch.bfloat16
    parts = rounded = 0  # of a weight in blocks

    def __init__(self, packed: Tensor, block: int, workers: Workers) -> None:
        """packed: by `onednn.pack`, of which `takes` is true; block: inputs that are summed together, even."""
        assert self.takes(packed) and block > 0 and block % 2 == 0
        self.raw: Any = load_extension()
        self.block, self.workers = block, workers
        self.outputs, self.inputs = packed.shape
        self._packed = packed  # whose memory this is
        self.address: int = torch.ops.mkldnn.data_ptr(packed)

    @staticmethod
    def takes(packed: Tensor) -> bool:
        """Returns whether this may be the layout that the kernel reads; that it is one has to be tried."""
        outputs, inputs = packed.shape
        if not has_gemm() or packed.dtype != torch.bfloat16 or outputs % _OUTPUTS or inputs % _INPUTS:
            return False
        return bool(torch.ops.mkldnn._nbytes(packed) == 2 * outputs * inputs)

    def gated(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        return None

    def linear(self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False) -> Tensor:
        """x [M, inputs], bias [outputs], residual [M, outputs] -> [M, outputs], all bfloat16 on the CPU."""
        rows, outputs = x.shape[0], self.outputs
        assert x.shape[1] == self.inputs and x.dtype == torch.bfloat16
        x = x.contiguous()
        out = x.new_empty(rows, outputs)
        if residual is not None:
            assert residual.shape == out.shape and residual.dtype == out.dtype
            residual = residual.contiguous()
        self.raw.product(
            out, x, residual, rows, *numbers_of(self, 0 if bias is None else bias.data_ptr()), self.workers.address
        )
        return out


def numbers_of(gemm: PackedGemm | BlockedGemm, bias: int) -> tuple[int, ...]:
    """Returns how a GEMM is passed to the C kernels (`product_of`). bias: its address, or 0."""
    return gemm.address, bias, gemm.inputs, gemm.outputs, gemm.block, gemm.parts


class HeadTopK:
    """The end of a draft head for few rows, in one call: norm, GEMM, and the best of its outputs."""

    max_topk = MAX_TOPK

    def __init__(
        self,
        gemm: PackedGemm | BlockedGemm,
        bias: Tensor | None,
        norm: tuple[Tensor, float] | None,
        names: Tensor | None,
    ) -> None:
        """norm: weight and eps, None where states come normed; names [outputs] int64: what the outputs are called,
        None: 0, 1, .. The number of outputs is a multiple of 32."""
        assert names is None or (names.is_contiguous() and names.shape == (gemm.outputs,))
        own = [None if part is None else part.detach() for part in (bias, names, norm[0] if norm else None)]
        self._held = own, gemm  # addresses go stale where a module's weights are moved
        bias_at, self._names, self._norm = (0 if part is None else part.data_ptr() for part in own)
        self._gemm, self._eps = gemm, norm[1] if norm else 0.0
        self._numbers = numbers_of(gemm, bias_at)

    @staticmethod
    def takes(gemm: object) -> TypeGuard[PackedGemm | BlockedGemm]:
        blocked = isinstance(gemm, BlockedGemm) and gemm.outputs % 32 == 0 and gemm.shared
        return blocked or isinstance(gemm, PackedGemm)

    def best(
        self, states: Tensor, places: Tensor | None, ids: Tensor, logp: Tensor, noise: NoiseKey | None = None,
        editor: LogitEditor | None = None,
    ) -> None:  # fmt: skip
        """states [.., inputs] with adjacent columns, in the GEMM's dtype -> ids [.., K] int64 and their log
        probabilities [.., K] float32, contiguous, K at most 16: best first, of equals the earlier output.

        places [M] int64: the rows of all three that are worked on, None: all. At most 8. noise, editor: of B rows,
        M / B of these each; the editor is one of `CpuOps`.
        """
        (every, inputs), count = states.shape, ids.shape[1]
        rows, gemm = every if places is None else places.shape[0], self._gemm
        assert rows <= FEW_ROWS and inputs == gemm.inputs and count <= min(MAX_TOPK, gemm.outputs)
        assert states.dtype == gemm.dtype and states.stride(1) == 1
        assert ids.is_contiguous() and logp.is_contiguous() and ids.shape == logp.shape == (every, count)
        places = None if places is None else places.contiguous()
        width = states.element_size()
        size = 4 * gemm.outputs + rows * (gemm.outputs * width + gemm.workers.most * (inputs * width + gemm.rounded))
        edits: tuple[int, ...] = ()
        if editor is not None:
            assert isinstance(editor, CpuLogitEditor) and (noise is None or len(noise.seed) == editor.batch)
            edits, size = editor.numbers(rows), size + 8 * gemm.outputs
        key: tuple[int, ...] = (0, 0, 0)
        nodes = 1
        if noise is not None:
            assert all(part.is_contiguous() for part in noise)
            key, nodes = addresses(noise), rows // noise.seed.shape[0]
        elif editor is not None:
            nodes = rows // editor.batch
        spare = states.new_empty(size, dtype=torch.uint8)
        gemm.raw.following(
            ids, logp, states, states.stride(0), places, self._names, count, self._norm, states.dtype == torch.bfloat16,
            rows, *self._numbers, spare, gemm.workers.address, *key, nodes, self._eps, *edits,
        )  # fmt: skip


def packed_gemm_like_onednn(packed: Tensor, bias: Tensor | None, workers: Workers) -> PackedGemm | None:
    """Makes the GEMM of a weight that oneDNN has packed, if it gives oneDNN's bits: this weight may be laid out or cut
    in another way than most."""
    if not PackedGemm.takes(packed):
        return None
    outputs, inputs = packed.shape
    block = summed_in_blocks(inputs, min(outputs, onednn.MAX_TRIED), workers.most)
    if not block:
        return None
    own = PackedGemm(packed, block, workers)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(FEW_ROWS, inputs, generator=generator).bfloat16()
    residual = torch.randn(FEW_ROWS, outputs, generator=generator).bfloat16()
    same = all(
        torch.equal(own.linear(x, bias, added), onednn.gemm(x, packed, bias, added)) for added in (None, residual)
    )
    return own if same else None


@functools.cache
def summed_in_blocks(in_features: int, out_features: int, threads: int) -> int:
    """Inputs of a block, where oneDNN's sums of such a GEMM in bfloat16 are those of `PackedGemm`: in blocks of so
    many, which are added one after the other. 0 where they are not, or where that does not run.

    Tried out like `onednn.rows_summed_alike`, between rows of which there is no difference but for a row alone.
    """
    x, packed = onednn.order_probe(in_features, out_features, torch.bfloat16)
    if not PackedGemm.takes(packed):
        return 0
    workers, parts = Workers(), x[: 4 * FEW_ROWS].split(FEW_ROWS)
    expected = [onednn.gemm(part, packed, None, None) for part in parts]
    for block in _BLOCKS:
        own = PackedGemm(packed, block, workers)
        if all(torch.equal(own.linear(part, None), y) for part, y in zip(parts, expected, strict=True)):
            return block
    return 0


class CpuGemmOps(GemmOps):
    """Chooses among GEMMs in C and those of oneDNN."""

    block_kinds = frozenset(TYPES)

    def __init__(self, runtime: CpuRuntime, rows: RowOps) -> None:
        self._runtime, self._rows = runtime, rows

    def gemms(
        self, weight: Tensor | PackedGroups | Fp8Blocks, bias: Tensor | None = None, deterministic: bool = False,
        whole: int = 0,
    ) -> list[Gemm]:  # fmt: skip
        found = super().gemms(weight, bias, deterministic, whole)
        if isinstance(many := found[0], OneDnnGemm) and many.alike <= 2:
            few = packed_gemm_like_onednn(many.packed, bias, self._runtime.workers)
            return found if few is None else [few, many]
        return found

    def block_gemm(self, parts: Sequence[BlockRows], dtype: torch.dtype) -> BlockedGemm:
        return BlockedGemm(parts, dtype, self._runtime.workers, self._runtime.arena)

    def row_reader(self, source: BlockRows, dtype: torch.dtype) -> BlockReader | None:
        if source.kind not in TYPES:
            return None
        return BlockReader(source, dtype, self._runtime.workers, self._runtime.arena, self._rows.take_rows)

    def quantize(self, weight: Tensor, kind: str) -> BlockRows:
        """kind: Q8_0, Q4_0 or Q4_K."""
        return quantize(self._runtime.raw, self._runtime.workers, weight, kind)

    def head_products(
        self, weight: Tensor | Sequence[BlockRows], heads: int, dtype: torch.dtype
    ) -> HeadGemm | HeadBlocks | None:
        if isinstance(weight, Tensor):
            return HeadGemm(weight, heads, self._runtime.workers) if weight.dtype == dtype and dtype in DTYPES else None
        outputs = sum(len(part.data) for part in weight)
        alike = all(part.kind in TYPES and len(part.data) % heads == 0 for part in weight)
        if not alike or not HeadBlocks.takes(outputs, heads) or dtype not in DTYPES:
            return None
        return HeadBlocks(self.block_gemm(weight, dtype), heads, self._runtime.spare)

    def head_top_k(
        self, gemm: Gemm | None, bias: Tensor | None, norm: tuple[Tensor, float] | None, names: Tensor | None
    ) -> HeadTopK | None:
        return HeadTopK(gemm, bias, norm, names) if HeadTopK.takes(gemm) else None
