"""Decoder layers of few rows in one call: ops/cpu/csrc/layer.c, where all four GEMMs of each have our kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from draftwing.ops.attention import Attend
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.cpu.gemm import PackedGemm
from draftwing.ops.torch.layer_ops import FEW_ROWS, LayerWeights

_HEAD_UNIT = 32  # threads share the outputs of qkv by heads, and a GEMM makes so many at a time


def can_run(layers: Sequence[LayerWeights], kept: Sequence[int]) -> bool:
    """Whether the kernel runs these layers, each after the other, and can keep these outputs."""
    for layer in layers:
        packed = all(isinstance(gemm, PackedGemm) for gemm in layer.gemms)
        if not packed or layer.norms_heads or layer.head_dim % _HEAD_UNIT:
            return False
    together = len(layers) == 1 or all(layer.attn_norm is not None for layer in layers)
    return together and all(1 <= layer <= len(layers) for layer in kept)


class _Layer:
    """The weights of a layer in bfloat16, as the kernel wants to be told of them."""

    def __init__(self, weights: LayerWeights) -> None:
        qkv, o, gate_up, down = gemms = [gemm for gemm in weights.gemms if isinstance(gemm, PackedGemm)]
        self.eps, self.inputs, self.hidden = weights.eps, qkv.inputs, o.outputs
        self.norms_input = weights.attn_norm is not None
        assert self.inputs == self.hidden or not self.norms_input
        assert gate_up.inputs == down.outputs == self.hidden and gate_up.outputs == 2 * down.inputs
        self.attended = o.inputs  # heads * head_dim
        # What it takes of spare memory for a row: the results of all parts but norms and the last.
        self.spare = self.hidden + qkv.outputs + o.inputs + gate_up.outputs + down.inputs
        # Addresses go stale where a module's weights are moved, so what holds their memory is not the modules' tensors.
        tensors = (weights.attn_norm, weights.mlp_norm, *weights.biases)
        own = [None if tensor is None else tensor.detach() for tensor in tensors]
        self.held = own, gemms
        attn_norm, mlp_norm, *biases = (0 if tensor is None else tensor.data_ptr() for tensor in own)
        numbers = [attn_norm, mlp_norm, self.hidden, down.inputs]
        for gemm, bias in zip(gemms, biases, strict=True):
            numbers += [gemm.address, bias, gemm.inputs, gemm.outputs, gemm.block, *gemm.scales]
        self.numbers = torch.tensor(numbers)


class NativeLayers:
    """`WholeLayers` of one size."""

    def __init__(
        self, weights: Sequence[LayerWeights], kept: Sequence[int], take_rows: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """weights: of layers that `can_run`. kept: layers whose outputs the caller wants beside the last one's, counted
        from 1; a layer may be among them twice. take_rows: `LayerOps.take_rows`."""
        self.layers = [_Layer(layer) for layer in weights]
        self.first, self.count, some = weights[0].number, len(self.layers), self.layers[0]
        self.raw: Any = load_extension()
        self.eps, self.hidden, self.inputs, self.norms_input = some.eps, some.hidden, some.inputs, some.norms_input
        same = (some.eps, some.hidden, some.spare)
        assert all((layer.eps, layer.hidden, layer.spare) == same for layer in self.layers)
        self._addresses = torch.tensor([layer.numbers.data_ptr() for layer in self.layers])
        self.address = self._addresses.data_ptr()
        # Where each layer's output goes: to 0, one after the other, or to a place of its own.
        self.kept = tuple(kept)
        self.place = {layer: place for place, layer in enumerate(dict.fromkeys(kept), 1)}
        self._places = torch.tensor([self.place.get(layer, 0) for layer in range(1, self.count + 1)])
        self.places = self._places.data_ptr()
        self.last = self.place.get(self.count, 0)
        self._take_rows = take_rows
        self._row_of: dict[int, Tensor] = {}  # see `joined`, by the number of rows

    def __call__(self, x: Tensor, normed: Tensor | None, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor | None:
        few = x.shape[0] <= FEW_ROWS and (normed is not None or self.norms_input)
        return attend.run_layers(self, x, normed, cos, sin) if few else None

    def heads(self, dim: int) -> int:
        """Returns the number of query heads of size `dim`."""
        return self.layers[0].attended // dim

    def spare(self, rows: int, threads: int) -> int:
        """Numbers of memory that so many rows take beside the outputs."""
        return rows * (self.layers[0].spare + threads * self.hidden)

    def joined(self, outs: Tensor) -> Tensor | None:
        """outs [1 + kept, M, hidden]: of these layers -> the kept ones beside each other, [M, kept * hidden]."""
        places, rows, _ = outs.shape
        if not self.kept:
            return None
        index = self._row_of.get(rows)
        if index is None:
            first = torch.tensor([self.place[layer] for layer in self.kept]) * rows
            index = self._row_of[rows] = (first + torch.arange(rows).unsqueeze(1)).flatten()  # [M * kept]
        return self._take_rows(outs.view(places * rows, -1), index).view(rows, -1)
