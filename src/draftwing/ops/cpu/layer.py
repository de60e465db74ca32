"""Decoder layers of few rows in one call: ops/cpu/csrc/layer.c, where all four products of each have our kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwing.ops.cpu.gemm import PackedProduct
from draftwing.ops.pick import take_rows

HEAD_UNIT = 32  # threads share the outputs of qkv by heads, and a product is made of so many at a time


class NativeLayer:
    """The weights of a `DecoderLayer` in bfloat16 without norms of heads, as the kernel wants to be told of them."""

    def __init__(
        self,
        norms: tuple[Tensor | None, Tensor],
        eps: float,
        products: Sequence[PackedProduct],
        biases: Sequence[Tensor | None],
    ) -> None:
        """norms: weights before attention, None where that is left to the caller, and before the MLP; products, and
        their biases: qkv, o, gate_up, down."""
        qkv, o, gate_up, down = products
        self.raw, self.eps = qkv.raw, eps
        self.inputs, self.hidden = qkv.inputs, o.outputs
        assert norms[0] is None or self.inputs == self.hidden
        assert gate_up.inputs == down.outputs == self.hidden and gate_up.outputs == 2 * down.inputs
        self.attended = o.inputs  # heads * head_dim
        self.norms_input = norms[0] is not None
        # What it takes of spare memory for a row: the results of all parts but norms and the last.
        self.spare = self.hidden + qkv.outputs + o.inputs + gate_up.outputs + down.inputs
        # Addresses go stale where a module's weights are moved, so what holds their memory is not the modules' tensors.
        own = [None if tensor is None else tensor.detach() for tensor in (*norms, *biases)]
        self._held = own, products
        numbers = [0 if norm is None else norm.data_ptr() for norm in norms] + [self.hidden, down.inputs]
        for product, bias in zip(products, biases, strict=True):
            address = 0 if bias is None else bias.data_ptr()
            numbers += [product.address, address, product.inputs, product.outputs, product.block, *product.scales]
        self._numbers = torch.tensor(numbers)
        self.address = self._numbers.data_ptr()


class NativeLayers:
    """Layers of one size that follow each other, the first of which is number `first` of its model."""

    def __init__(self, layers: Sequence[NativeLayer], first: int = 0, kept: Sequence[int] = ()) -> None:
        """kept: layers whose outputs the caller wants, counted from 1, beside that of the last;
        a layer may be among them twice."""
        self.layers, self.first, self.count = tuple(layers), first, len(layers)
        some = self.layers[0]
        self.raw, self.eps, self.hidden, self.inputs = some.raw, some.eps, some.hidden, some.inputs
        self.norms_input = all(layer.norms_input for layer in layers)
        assert self.count == 1 or self.norms_input
        assert all((layer.eps, layer.hidden, layer.spare) == (some.eps, some.hidden, some.spare) for layer in layers)
        self._addresses = torch.tensor([layer.address for layer in layers])
        self.address = self._addresses.data_ptr()
        # Where each layer's output goes: to 0, one after the other, or to a place of its own.
        self.kept = tuple(kept)
        self.place = {layer: place for place, layer in enumerate(dict.fromkeys(kept), 1)}
        self._places = torch.tensor([self.place.get(layer, 0) for layer in range(1, self.count + 1)])
        self.places = self._places.data_ptr()
        self.last = self.place.get(self.count, 0)
        self._row_of: dict[int, Tensor] = {}  # see `joined`, by the number of rows

    def heads(self, dim: int) -> int:
        """Of the queries, each of size `dim`."""
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
        return take_rows(outs.view(places * rows, -1), index).view(rows, -1)
