"""The operations of layers, in C. Each takes real tensors in float32 or bfloat16, all of one dtype; others go to torch.

Ids are not checked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftwing.ops.contracts import RECORDED_ROWS, Gemm, LayerWeights, MixtureWeights
from draftwing.ops.cpu.arena import Arena
from draftwing.ops.cpu.blocks import TYPES, BlockedGemm, BlockReader, quantize
from draftwing.ops.cpu.experts import NativeMixture, Spare, can_mix
from draftwing.ops.cpu.extension import DTYPES
from draftwing.ops.cpu.gemm import HeadTopK, packed_gemm_like_onednn
from draftwing.ops.cpu.latent import HeadBlocks, HeadGemm
from draftwing.ops.cpu.layer import NativeLayers, can_run
from draftwing.ops.cpu.tree import with_rows
from draftwing.ops.cpu.workers import Workers
from draftwing.ops.fp8_blocks import Fp8Blocks
from draftwing.ops.gemms import OneDnnGemm
from draftwing.ops.groups import PackedGroups
from draftwing.ops.torch.layer_ops import LayerOps
from draftwing.ops.types import BlockRows


@functools.cache
def _steps(count: int) -> Tensor:
    return torch.arange(count)


def _counted(rows: int) -> Tensor:
    """0, 1, ..: a view of what is kept, for what is recorded makes no such tensor again."""
    return _steps(1 << rows.bit_length())[:rows]


@functools.cache
def _of_few(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns, for `put_rows`, queries of each row, and a place for what nobody reads. Kept for the same reason."""
    return torch.ones(RECORDED_ROWS, dtype=torch.int64), torch.empty(RECORDED_ROWS, width, dtype=dtype)


class CpuLayerOps(LayerOps):
    """Overrides those of `LayerOps` that the extension has."""

    raw: Any  # the extension module
    spare: Spare
    workers: Workers
    arena: Arena  # of weights

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Computes what torch does, with the same roundings."""
        if x.dtype not in DTYPES or weight.dtype not in (x.dtype, torch.float32):
            return super().rms_norm(x, weight, eps)
        x = x if x.is_contiguous() or x.dim() != 2 else self.concat_columns(x)  # which is no operation of torch's
        x = x.contiguous()
        out = torch.empty_like(x)
        size = weight.shape[0]
        assert x.shape[-1] == size
        self.raw.rms_norm(
            out, x, weight, x.numel() // size, size, x.dtype == torch.bfloat16, self.workers.address,
            weight.dtype != x.dtype, eps,
        )  # fmt: skip
        return out

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = self.add_scaled(x, delta)
        return total, self.rms_norm(total, weight, eps)

    def add_scaled(self, x: Tensor, y: Tensor | None, scale: Tensor | float = 1.0) -> Tensor:
        if x.dtype not in DTYPES or type(x) is not Tensor:
            return super().add_scaled(x, y, scale)
        x, y = x.contiguous(), None if y is None else y.contiguous()
        assert y is None or (y.shape == x.shape and y.dtype == x.dtype)
        assert not isinstance(scale, Tensor) or (scale.dtype == x.dtype and scale.numel() == 1)
        rows, size = x.shape
        out = x.new_empty(rows, size)
        at, factor = (scale, 0.0) if isinstance(scale, Tensor) else (None, scale)
        self.raw.add_scaled(out, x, y, rows, size, x.dtype == torch.bfloat16, self.workers.address, at, factor)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, False) if gate_up.dtype in DTYPES else super().silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, True) if gate_up.dtype in DTYPES else super().gelu_mul(gate_up)

    def _gated(self, gate_up: Tensor, gelu: bool) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, both = gate_up.shape
        out = gate_up.new_empty(rows, both // 2)
        self.raw.silu_mul(out, gate_up, rows, both // 2, out.dtype == torch.bfloat16, self.workers.address, gelu)
        return out

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        if x.dtype not in DTYPES or type(x) is not Tensor:
            return super().soft_cap(x, cap)
        x = x.contiguous()
        size = x.shape[-1]
        self.raw.soft_cap(x, x, x.numel() // max(size, 1), size, x.dtype == torch.bfloat16, self.workers.address, cap)
        return x

    def fuse_inputs(
        self,
        ids: Tensor | None,
        table: Tensor,
        feature: Tensor,
        norms: tuple[Tensor, Tensor] | None = None,
        eps: float = 0.0,
        positions: Tensor | None = None,
        feature_first: bool = False,
    ) -> Tensor:
        if table.dtype not in DTYPES or table.dtype != feature.dtype:
            return super().fuse_inputs(ids, table, feature, norms, eps, positions, feature_first)
        rows, size = feature.shape
        ids = _counted(rows) if ids is None else ids
        assert ids.shape == (rows,) and table.shape[1] == size and table.is_contiguous() and ids.dtype == torch.int64
        assert norms is None or all(w.dtype == table.dtype and w.shape == (size,) and w.stride() == (1,) for w in norms)
        ids = ids.contiguous()
        feature = feature if feature.stride(1) == 1 else feature.contiguous()  # rows may be apart
        positions = None if positions is None else positions.contiguous()
        out = feature.new_empty(rows, 2 * size)
        self.raw.fuse(
            out, ids, table, feature, feature.stride(0), *(norms or (None, None)), positions, rows, size,
            out.dtype == torch.bfloat16, feature_first, eps,
        )  # fmt: skip
        return out

    def concat_columns(self, *parts: Tensor) -> Tensor:
        if len(parts) > 3 or any(type(part) is not Tensor for part in parts):
            return super().concat_columns(*parts)
        rows, size = len(parts[0]), parts[0].element_size()
        assert all(len(part) == rows and part.dtype == parts[0].dtype for part in parts)
        kept = [with_rows(part) for part in parts]
        out = parts[0].new_empty(rows, sum(part.shape[1] for part in parts))
        numbers = [n for x in kept for n in (x, x.stride(0) * size, x.shape[1] * size)]
        self.raw.beside(out, rows, *numbers, *[0] * (9 - len(numbers)))
        return out

    def concat_rope(self, plain: Tensor, turned: Tensor, cos: Tensor, sin: Tensor, factor: float = 1.0) -> Tensor:
        if plain.dtype not in DTYPES or type(plain) is not Tensor:
            return super().concat_rope(plain, turned, cos, sin, factor)
        (rows, heads, same), dim = plain.shape, turned.shape[2]
        assert turned.shape[:2] == (rows, heads) and all(part.dtype == plain.dtype for part in (turned, cos, sin))
        assert all(part.stride(2) == 1 for part in (plain, turned, cos, sin)) and cos.stride(0) == sin.stride(0)
        out = plain.new_empty(rows, heads, same + dim)
        self.raw.concat_rope(
            out, plain, turned, cos, sin, rows, heads, same, dim, *plain.stride()[:2], *turned.stride()[:2],
            cos.stride(0), plain.dtype == torch.bfloat16, self.workers.address, factor,
        )  # fmt: skip
        return out

    def gate(self, gate: Tensor, x: Tensor) -> Tensor:
        if x.dtype not in DTYPES or type(x) is not Tensor:
            return super().gate(gate, x)
        x = x.contiguous()
        gate = gate if gate.is_contiguous() else self.concat_columns(gate)  # which is no operation of torch's
        assert gate.shape == x.shape and gate.dtype == x.dtype
        out = torch.empty_like(x)
        self.raw.gate(out, gate, x, x.numel(), x.dtype == torch.bfloat16)
        return out

    def recur(self, made: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if made.dtype not in DTYPES or type(made) is not Tensor:
            return super().recur(made, state)
        made, state = made.contiguous(), state.contiguous()
        rows, size = state.shape
        assert made.shape == (rows, 3 * size) and made.dtype == state.dtype
        out, after = torch.empty_like(state), torch.empty_like(state)
        self.raw.recur(out, after, made, state, rows, size, made.dtype == torch.bfloat16)
        return out, after

    def gru(self, read: Tensor, kept: Tensor, state: Tensor) -> Tensor:
        if read.dtype not in DTYPES or type(read) is not Tensor:
            return super().gru(read, kept, state)
        read, kept, state = read.contiguous(), kept.contiguous(), state.contiguous()
        rows, size = state.shape
        assert read.shape == kept.shape == (rows, 3 * size) and read.dtype == kept.dtype == state.dtype
        after = torch.empty_like(state)
        self.raw.gru(after, read, kept, state, rows, size, read.dtype == torch.bfloat16)
        return after

    def take_rows(self, source: Tensor, index: Tensor) -> Tensor:
        """Torch starts slowly on few rows."""
        if type(source) is not Tensor or type(index) is not Tensor or not source.is_contiguous():
            return super().take_rows(source, index)
        assert index.dtype == torch.int64
        index, count = index.contiguous(), index.shape[0]
        out = source.new_empty(count, *source.shape[1:])
        size = math.prod(source.shape[1:]) * source.element_size()  # a row alone may have any stride
        self.raw.take_rows(out, source, source.shape[0], size, index, count)
        return out

    def put_rows(self, target: Tensor, index: Tensor, source: Tensor) -> None:
        """Copies few rows, which steps that are recorded have, by the call that keeps the newest query of each row, of
        one."""
        count, width = source.shape
        plain = type(target) is Tensor and type(source) is Tensor
        if count > RECORDED_ROWS or not plain or not target.is_contiguous():
            super().put_rows(target, index, source)
            return
        source, index = with_rows(source), index.contiguous()
        assert index.dtype == torch.int64 and index.shape[0] == count
        assert target.shape[1] == width and target.dtype == source.dtype
        (ones, nowhere), size = _of_few(width, source.dtype), source.element_size()
        self.raw.newest(nowhere, source, source.stride(0) * size, width * size, ones, 1, 1, index, count, target)

    def cluster_tokens(self, scores: Tensor, chosen: int, ordering: Tensor) -> Tensor:
        if type(scores) is not Tensor or scores.dtype not in DTYPES:
            return super().cluster_tokens(scores, chosen, ordering)
        scores, (rows, count), each = scores.contiguous(), scores.shape, len(ordering) // scores.shape[1]
        assert 0 < chosen <= count and ordering.is_contiguous() and ordering.dtype == torch.int64
        out, best = ordering.new_empty(rows, chosen * each), torch.empty(chosen, dtype=torch.float32)
        self.raw.cluster_tokens(out, scores, scores.dtype == torch.bfloat16, rows, count, chosen, ordering, each, best)
        return out

    def spread_logits(self, found: Tensor, ids: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
        if type(found) is not Tensor or dtype not in DTYPES:
            return super().spread_logits(found, ids, vocab, dtype)
        found, ids, (rows, count) = found.contiguous(), ids.contiguous(), found.shape
        assert found.dtype == torch.float32 and ids.shape == found.shape and count
        out = torch.empty(rows, vocab, dtype=dtype)
        self.raw.spread_logits(out, dtype == torch.bfloat16, found, ids, rows, count, vocab)
        return out

    def exact_logits(self, hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        """A logit's bits depend on its row of `hidden` and its id alone."""
        if type(hidden) is not Tensor or hidden.dtype not in DTYPES:
            return super().exact_logits(hidden, weight, ids)
        assert hidden.dtype == weight.dtype and weight.is_contiguous() and hidden.shape[-1] == weight.shape[1]
        assert hidden.shape[:-1] == ids.shape[:-1]
        hidden, ids = hidden.contiguous(), ids.contiguous()
        count, size = ids.shape[-1], weight.shape[1]
        out = torch.empty(ids.shape, dtype=torch.float32)
        self.raw.exact_logits(
            out, hidden, weight, ids, ids.numel() // max(count, 1), count, size, weight.dtype == torch.bfloat16
        )
        return out

    def gemms(
        self, weight: Tensor | PackedGroups | Fp8Blocks, bias: Tensor | None = None, deterministic: bool = False
    ) -> list[Gemm]:
        found = super().gemms(weight, bias, deterministic)
        if isinstance(many := found[0], OneDnnGemm) and many.alike <= 2:
            few = packed_gemm_like_onednn(many.packed, bias, self.workers)
            return found if few is None else [few, many]
        return found

    block_kinds = frozenset(TYPES)

    def block_gemm(self, parts: Sequence[BlockRows], dtype: torch.dtype) -> BlockedGemm:
        return BlockedGemm(parts, dtype, self.workers, self.arena)

    def row_reader(self, source: BlockRows, dtype: torch.dtype) -> BlockReader | None:
        if source.kind not in TYPES:
            return None
        return BlockReader(source, dtype, self.workers, self.arena, self.take_rows)

    def quantize(self, weight: Tensor, kind: str) -> BlockRows:
        """kind: Q8_0, Q4_0 or Q4_K."""
        return quantize(self.raw, self.workers, weight, kind)

    def head_products(
        self, weight: Tensor | Sequence[BlockRows], heads: int, dtype: torch.dtype
    ) -> HeadGemm | HeadBlocks | None:
        if isinstance(weight, Tensor):
            return HeadGemm(weight, heads, self.workers) if weight.dtype == dtype and dtype in DTYPES else None
        outputs = sum(len(part.data) for part in weight)
        alike = all(part.kind in TYPES and len(part.data) % heads == 0 for part in weight)
        if not alike or not HeadBlocks.takes(outputs, heads) or dtype not in DTYPES:
            return None
        return HeadBlocks(self.block_gemm(weight, dtype), heads, self.spare)

    def whole_layers(self, layers: Sequence[LayerWeights], kept: Sequence[int] = ()) -> NativeLayers | None:
        """Takes layers whose four GEMMs are all `PackedGemm`, for up to `FEW_ROWS` rows, or of `block_gemm`."""
        return NativeLayers(layers, kept, self.take_rows) if can_run(layers, kept) else None

    def whole_mixture(self, weights: MixtureWeights) -> NativeMixture | None:
        """Takes weights that are all of `block_gemm`."""
        return NativeMixture(weights, self.spare, self.workers) if can_mix(weights) else None

    def head_top_k(
        self, gemm: Gemm | None, bias: Tensor | None, norm: tuple[Tensor, float] | None, names: Tensor | None
    ) -> HeadTopK | None:
        return HeadTopK(gemm, bias, norm, names) if HeadTopK.takes(gemm) else None
