"""Decoder layers in one call: ops/cpu/csrc/layer.c, where all four GEMMs of each have our kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from draftwing.ops.adapters.cpu import numbers_of_adapters, takes
from draftwing.ops.attention.attend import Attend
from draftwing.ops.attention.batch import AttentionKind
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.gemm.contract import FEW_ROWS
from draftwing.ops.gemm.cpu import PackedGemm, numbers_of
from draftwing.ops.gemm.cpu_blocks import BlockedGemm
from draftwing.ops.runtime import RECORDED_ROWS
from draftwing.ops.whole_layers.contract import LayerWeights

_HEAD_UNIT = 32  # threads share the outputs of qkv by heads, and a GEMM makes so many at a time
_ANY = 1 << 30


def can_run(layers: Sequence[LayerWeights], kept: Sequence[int]) -> bool:
    """Returns whether the kernel runs these layers, each after the other, and can keep these outputs."""
    for layer in layers:
        packed = all(isinstance(gemm, PackedGemm) for gemm in layer.gemms)
        blocked = all(isinstance(gemm, BlockedGemm) and gemm.shared for gemm in layer.gemms)
        if not (packed or blocked) or layer.shape.head_dim % _HEAD_UNIT or layer.mlp_norm.shape[0] % _HEAD_UNIT:
            return False
    together = len(layers) == 1 or all(layer.attn_norm is not None for layer in layers)
    first = layers[0].pool_layer
    follow = [layer.pool_layer for layer in layers] == list(range(first, first + len(layers)))
    alike = len({_sizes(layer) for layer in layers}) == 1
    return together and follow and alike and all(1 <= layer <= len(layers) for layer in kept)


def _sizes(layer: LayerWeights) -> tuple[Any, ...]:
    """Returns what is the same in all layers of one call."""
    gemms = [gemm for gemm in layer.gemms if isinstance(gemm, (PackedGemm, BlockedGemm))]
    outer = gemms[0].dtype, isinstance(gemms[0], BlockedGemm)
    return layer.shape, layer.eps, *outer, *((gemm.inputs, gemm.outputs) for gemm in gemms)


def numbers_of_kind(kind: AttentionKind) -> tuple[int, int, int]:
    """Returns what the kernels get of an attention layer: window, where its sinks lie, scalar."""
    assert not kind.chunk  # whose batch is another one, see `CpuAttend`
    assert kind.sinks is None or (kind.sinks.dtype == torch.float32 and kind.sinks.is_contiguous())
    return kind.window, 0 if kind.sinks is None else kind.sinks.data_ptr(), kind.scalar


class _Layer:
    """The weights of a layer, as the kernel takes them."""

    def __init__(self, weights: LayerWeights) -> None:
        qkv, o, gate_up, down = gemms = [gemm for gemm in weights.gemms if isinstance(gemm, (PackedGemm, BlockedGemm))]
        self.eps, self.inputs, self.hidden, self.dtype = weights.eps, qkv.inputs, o.outputs, qkv.dtype
        self.blocked = isinstance(qkv, BlockedGemm)
        self.norms_input = weights.attn_norm is not None
        assert self.inputs == self.hidden or not self.norms_input
        assert gate_up.inputs == down.outputs == self.hidden and gate_up.outputs == 2 * down.inputs
        assert o.inputs == weights.shape.heads * weights.shape.head_dim
        norms = weights.head_norms
        assert norms is None or norms.eps == weights.eps
        # Addresses go stale where a module's weights are moved, so what holds their memory is not the modules' tensors.
        heads = (None, None) if norms is None else (norms.q, norms.k)
        tensors = (weights.attn_norm, weights.mlp_norm, *heads, *weights.biases)
        own = [None if tensor is None else tensor.detach() for tensor in tensors]
        sinks = weights.kind.sinks
        kind = weights.kind._replace(sinks=None if sinks is None else sinks.detach())
        adapters = [None if one is None else numbers_of_adapters(one) for one in weights.adapters or [None] * 4]
        self.held = own, gemms, kind, weights.adapters, adapters
        self.adapts = all(one is None or takes(self.dtype, one) for one in weights.adapters)
        *numbers, b0, b1, b2, b3 = (0 if tensor is None else tensor.data_ptr() for tensor in own)
        numbers += [self.hidden, down.inputs, *numbers_of_kind(kind)]
        for gemm, bias in zip(gemms, (b0, b1, b2, b3), strict=True):
            numbers += numbers_of(gemm, bias)
        numbers += [0 if one is None else one.data_ptr() for one in adapters]
        self.numbers = torch.tensor(numbers)


class NativeLayers:
    """`WholeLayers` of one size."""

    def __init__(
        self, weights: Sequence[LayerWeights], kept: Sequence[int], take_rows: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """weights: of layers that `can_run`. kept: layers whose outputs the caller wants, besides the last, counted
        from 1; a layer may be among them twice. take_rows: `LayerOps.take_rows`."""
        self.layers = [_Layer(layer) for layer in weights]
        self.first, self.count, some = weights[0].pool_layer, len(self.layers), self.layers[0]
        self.shape = weights[0].shape
        self.raw: Any = load_extension()
        self.eps, self.hidden, self.inputs, self.norms_input = some.eps, some.hidden, some.inputs, some.norms_input
        self.dtype, self.max_rows = some.dtype, _ANY if some.blocked else FEW_ROWS
        self._addresses = torch.tensor([layer.numbers.data_ptr() for layer in self.layers])
        self.address = self._addresses.data_ptr()
        # Where each layer's output goes: to 0, one after the other, or to a place of its own.
        self.kept = tuple(kept)
        self.place = {layer: place for place, layer in enumerate(dict.fromkeys(kept), 1)}
        self._places = torch.tensor([self.place.get(layer, 0) for layer in range(1, self.count + 1)])
        self.places = self._places.data_ptr()
        self.last = self.place.get(self.count, 0)
        self._take_rows = take_rows
        self._queries, self._adapts = weights[0].queries, all(layer.adapts for layer in self.layers)
        self._row_of: dict[int, Tensor] = {}  # see `joined`, by the number of rows

    def __call__(self, x: Tensor, normed: Tensor | None, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor | None:
        takes = x.shape[0] <= self.max_rows and (normed is not None or self.norms_input)
        if self.slots is not None:  # of more rows threads share what adapters do
            takes = takes and self._adapts and x.shape[0] <= RECORDED_ROWS
        return attend.run_layers(self, x, normed, cos, sin) if takes else None

    @property
    def slots(self) -> Tensor | None:
        """Returns those of the rows' adapters; None: none has any."""
        return None if self._queries is None else self._queries.slots

    @property
    def width(self) -> int:
        """Returns the most inputs of what is normed."""
        return max(self.inputs, self.hidden)

    def spare(self, rows: int, threads: int) -> int:
        """Returns bytes of memory that so many rows take besides the outputs."""
        half, numbers = self.dtype == torch.bfloat16, self.layers[0].numbers.data_ptr()
        size: int = self.raw.layers_spare(rows, half, numbers, self.width, threads, self.slots is not None)
        return size

    def joined(self, outs: Tensor) -> Tensor | None:
        """outs [1 + kept, M, hidden]: of these layers -> the kept ones concatenated, [M, kept * hidden]."""
        places, rows, _ = outs.shape
        if not self.kept:
            return None
        index = self._row_of.get(rows)
        if index is None:
            first = torch.tensor([self.place[layer] for layer in self.kept]) * rows
            index = (first + torch.arange(rows).unsqueeze(1)).flatten()  # [M * kept]
            if rows <= RECORDED_ROWS:  # those of recorded steps
                self._row_of[rows] = index
        return self._take_rows(outs.view(places * rows, -1), index).view(rows, -1)


def native_layers(
    take_rows: Callable[[Tensor, Tensor], Tensor], layers: Sequence[LayerWeights], kept: Sequence[int] = ()
) -> NativeLayers | None:
    """Returns layers whose four GEMMs are all `PackedGemm`, for up to `FEW_ROWS` rows, or of `block_gemm`; or None."""
    return NativeLayers(layers, kept, take_rows) if can_run(layers, kept) else None
