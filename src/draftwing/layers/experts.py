"""The MLP part of a decoder layer as a mixture of experts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn

from draftwing.layers.adapters import AdaptedGroups
from draftwing.layers.config import LayerConfig
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import LinearOp, PackMode, ParamSlice, WeightFormat
from draftwing.layers.linear_ops.dense import DENSE, Dense, as_dense
from draftwing.layers.linear_ops.groups import dequantised
from draftwing.layers.linear_ops.parallel import JoinedOutputs, NormedSum
from draftwing.layers.mlp import GatedMLP, LimitedGates, UngatedMLP
from draftwing.layers.norm import RMSNorm
from draftwing.ops.experts.routing import LARGE_TILE, ExpertGemm, MixtureWeights, Routed, WholeMixture
from draftwing.ops.experts.rows import ExpertRows
from draftwing.ops.gemm.contract import Gemm
from draftwing.ops.table import PLAIN, LayerOps

logger = logging.getLogger(__name__)

ROUTER_ROWS = 16  # of which a wide router sums each logit by itself on a GPU; not swept
_MORE_OUTPUTS = 8  # of a router with the gate of an expert of all rows: libraries are slow with odd numbers of outputs


class ExpertMLP(nn.Module):
    """A router picks some experts for each row; each of them is an MLP, and the row gets their weighted sum. There
    may be one more that all rows go to, perhaps by a gate of their own.

    Gate and up are one GEMM. Spread over ranks, each of these has a share of every expert, or some experts whole.
    """

    unsaid: Mapping[str, float] = MappingProxyType({"correction": 0.0})

    def __init__(self, config: LayerConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        experts, hidden, form = config.experts, config.hidden, config.weight_format.of_experts
        assert experts is not None and (config.activation == "silu" or not experts.limit)
        assert not experts.silu_limit or (config.activation == "silu" and not experts.limit)
        self.gates = LimitedGates(experts.silu_limit) if experts.silu_limit else None
        assert not experts.scales_inputs or (experts.routing.top_k == 1 and experts.routing.renormalise)
        self.experts, self._ranks, self._gelu = experts, config.ranks, config.activation == "gelu"
        self._alone = config.ranks.size == 1 and not config.ranks.invariant  # no other ranks do the same in other ways
        self.router = Router(hidden, experts.count, experts.router_bias, dtype, device, experts.wide_router)
        self.correction: nn.Parameter | None = None
        if experts.routing.has_correction:
            wide = torch.promote_types(dtype, torch.float32)
            self.correction = nn.Parameter(torch.zeros(experts.count, dtype=wide, device=device), False)
        count = len(experts.held)
        made, self._gated, size = experts.ffn * (2 if config.gated else 1), config.gated, experts.latent or hidden
        self.gate_up = ExpertLinear(size, made, count, experts.bias, dtype, device, form)
        columns = dict(config.inputs).get("experts")
        joins = self._joins = None if columns is None else JoinedOutputs(config.ranks, columns, size)
        self.sum = NormedSum(config.ranks, PLAIN) if config.ranks.size > 1 and joins is None else None
        sizes = (experts.ffn, size) if joins is None else (joins.inputs, joins.share.size)
        self.down = ExpertLinear(*sizes, count, experts.bias, dtype, device, form)
        self.into, self.back = (
            Linear(*sizes, False, dtype, device, form) if experts.latent else None
            for sizes in ((hidden, size), (size, hidden))
        )
        # Factors of experts' weights.
        self.scale = nn.Parameter(torch.ones(count, dtype=dtype, device=device)) if experts.beside else None
        self.shared: GatedMLP | UngatedMLP | None = None
        if experts.shared:
            inputs = tuple(("mlp", found) for name, found in config.inputs if name == "shared")
            # Which it may join.
            beside = replace(config, experts=None, ffn=experts.shared, weight_format=form, inputs=inputs)
            self.shared = (GatedMLP if config.gated else UngatedMLP)(beside, dtype, device)
        self.shared_gate: nn.Parameter | None = None
        if experts.shared_gate:
            self.shared_gate = nn.Parameter(torch.zeros(1, hidden, dtype=dtype, device=device))
        self._ops: LayerOps = PLAIN
        self._exact, self._most_pairs = False, LARGE_TILE  # as `LayerOps.route` has them
        self._routing = experts.routing
        self.scatter: Tensor | None = None  # see `LayerOps.route`
        self._whole: WholeMixture | None = None  # all of it

    def merge(self, ops: LayerOps) -> None:
        """Makes the expert of all rows the last one of the others, or several where it has several times their width,
        and its gate an output of the router, where the device is faster then and weights lie alike; before the parts
        are packed."""
        shared, experts = self.shared, self.experts
        if shared is None or not ops.merges_matrices or not self._alone or experts.shared % experts.ffn:
            return
        bounded = self.gates is not None or (isinstance(shared, GatedMLP) and shared.gates is not None)
        if experts.latent or experts.scales_inputs or bounded:
            return
        linears = self.gate_up, self.down, *shared.linears()
        if experts.limit or self.scale is not None or any(part.bias is not None for part in linears):
            return
        every = shared_parts(shared, experts.ffn)
        pairs = [(self.gate_up, gate_up) for gate_up, _ in every] + [(self.down, down) for _, down in every]
        if not every or not all(own.op.can_append(one.op) for own, one in pairs):
            return
        for own, one in pairs:
            own.append_shared(one, ops)
        if self.shared_gate is not None:
            self.router.append_row(self.shared_gate)
        kind: Literal["whole", "gated"] = "whole" if self.shared_gate is None else "gated"
        self._routing = replace(self._routing, shared=kind, shared_count=len(every))
        self.shared = self.shared_gate = None

    def pack(self, ops: LayerOps, mode: PackMode) -> None:
        """Takes what the packed parts give."""
        self._ops, self._exact = ops, mode.deterministic
        if self._joins is not None:
            self._joins.use(ops)
        if self.sum is not None:
            self.sum.use(ops)
        self._most_pairs = min(self.gate_up.most_pairs, self.down.most_pairs)
        if isinstance(self.shared, UngatedMLP):
            self.shared.pack(ops)
        gate_up, down = self.gate_up.each_gemm(), self.down.each_gemm()
        known = self._alone and not self.experts.scales_inputs and self.gates is None
        if ops.whole_mixture is not None and gate_up and down and known:
            router = self.router.dense_weight(), self.router.bias, self.correction
            more = (self.gate_up.bias, self.down.bias), self.experts.routing, self.experts.limit
            scales = None if self.scale is None else self.scale.detach().float()
            self._whole = ops.whole_mixture(
                MixtureWeights(*router, gate_up, down, *more, scales, self._gelu, self._gated)
            )

    def forward(self, x: Tensor, residual: Tensor | None = None, by: Tensor | None = None) -> Tensor:
        """x [M, hidden]; residual [M, hidden] is added; by [M, hidden]: what experts are chosen by, None: x
        -> [M, hidden]"""
        residual = self._with_shared(x, residual)
        added = residual if self.sum is None else None
        if self.into is not None and self.back is not None:
            made = self.back(self._own_sum(self.into(x), x, None), added)
        else:
            made = self._own_sum(x, by, added)
        return made if self.sum is None else self.sum(made, None, residual)

    def _own_sum(self, x: Tensor, by: Tensor | None, residual: Tensor | None) -> Tensor:
        """x [M, size], by [M, hidden] or None, residual [M, size] -> [M, size]: of what this rank has of the experts,
        or of all of them."""
        if self._whole is not None and not (self.gate_up.adds or self.down.adds):
            return self._whole(x, residual, self.scatter, by)
        inner, routed = self._inner(x, by)
        if self._joins is not None:
            made = self.down(self._joins.all_inputs(inner), routed)
            return self._joins.all_outputs(self._ops.mix(made, routed, self._joins.own(residual)))
        # A sum over ranks has the bias once.
        outs = self.down(inner, routed, with_bias=self._ranks.rank == 0 or self.experts.own is not None)
        return self._ops.mix(outs, routed, residual)

    def mixes_under_norms(self, scale: float) -> bool:
        """Returns whether `under` takes such a scale: not where the expert of all rows is added by itself."""
        known = self._alone and self.into is None and self._ops.mixes_under_norms
        return known and (scale == 1 or self.shared is None)

    def under(self, norm: RMSNorm, x: Tensor, residual: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Does as `forward`, and returns its result under a norm, too; where `mixes_under_norms`. scale: of what is
        added to the residual stream."""
        inner, routed = self._inner(x)
        with_shared = self._with_shared(x, residual)
        assert with_shared is not None
        return self._ops.mix_norm(self.down(inner, routed), routed, with_shared, norm.weight, norm.eps, scale)

    def _with_shared(self, x: Tensor, residual: Tensor | None) -> Tensor | None:
        """Returns the residual stream and what the expert of all rows adds to it."""
        if self.shared is None:
            return residual
        if self.shared_gate is None:
            return self.shared(x, residual)
        # Sum and sigmoid have the same bits in any batch; torch's sigmoid has other ones at a tensor's end.
        gate = self._ops.exact_logits(x, self.shared_gate, torch.zeros_like(x[:, :1], dtype=torch.int64))
        made = self._ops.gate(gate, torch.ones_like(gate)).to(x.dtype) * self.shared(x)
        return made if residual is None else residual + made

    def _inner(self, x: Tensor, by: Tensor | None = None) -> tuple[Tensor, Routed]:
        """-> what the gates let through, [pairs, ffn]"""
        experts, routing = self.experts, self._routing
        if self._whole is not None:  # whose logits and shares have bits of their own
            routed = self._whole.routes(x, self.scatter, by)
            return self._through(x, routed), routed
        logits = self.router(x if by is None else by)[:, : experts.count + (routing.shared == "gated")]
        routed = self._ops.route(
            logits, routing, self.correction, self._exact, self.scatter, experts.own, self._most_pairs
        )
        if experts.scales_inputs:
            x = self._ops.scaled_inputs(x, logits, routed, experts.own)
        if self.scale is not None:
            routed = replace(routed, weights=routed.weights * self.scale[routed.experts])
        return self._through(x, routed), routed

    def _through(self, x: Tensor, routed: Routed) -> Tensor:
        if not self._gated:
            return self.gate_up.squared(x, routed)
        if self._gelu:
            return self._ops.gelu_mul(self.gate_up(x, routed))
        if self.gates is not None:
            return self.gates(self.gate_up(x, routed))
        return self.gate_up.gated(x, routed, self.experts.limit)

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm


def shared_parts(shared: GatedMLP | UngatedMLP, ffn: int) -> list[tuple[Linear, Linear]]:
    """Returns gates and ups, or ups alone, and the down projection, of experts of width `ffn` that make the MLP's
    result together; none where its weights are not cut so."""
    into, down = shared.linears()
    wide, found = down.in_features, list[tuple[Linear, Linear]]()
    if wide == ffn:
        return [(into, down)]
    for at in range(0, wide, ffn):
        rows = [range(part + at, part + at + ffn) for part in range(0, into.out_features, wide)]
        first = into.part(rows, range(into.in_features))
        second = down.part([range(down.out_features)], range(at, at + ffn))
        if first is None or second is None:
            return []
        found.append((first, second))
    return found


class ExpertsBeside(nn.Module):
    """A mixture of experts beside a layer's MLP, each with a norm behind it. It reads the residual stream by a norm of
    its own, and its router by another one."""

    def __init__(self, config: LayerConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        norm = partial(RMSNorm, config.hidden, config.norm.eps, config.norm.dtype(dtype), device)
        self.mlp_out_norm, self.in_norm, self.router_norm, self.out_norm = norm(), norm(), norm(), norm()
        self.experts = ExpertMLP(config, dtype, device)

    def forward(self, made: Tensor, x: Tensor) -> Tensor:
        """made [M, hidden] by the MLP, residual stream x [M, hidden] -> the sum of both, [M, hidden]"""
        mixed = self.experts(self.in_norm(x), by=self.router_norm(x))
        return self.mlp_out_norm(made) + self.out_norm(mixed)

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm


class Router(Linear):
    """Logits of experts. A wide one has its weight and logits in float32, whatever comes in."""

    def __init__(
        self,
        in_features: int,
        count: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        wide: bool,
        each: bool = False,
    ) -> None:
        """each: whether each logit is summed by itself where the device is as quick then."""
        dtype = torch.promote_types(dtype, torch.float32) if wide else dtype
        super().__init__(in_features, count, bias, dtype, device)
        self._dtype, self._each = dtype, each

    def pack(self, ops: LayerOps, mode: PackMode | None = None) -> None:
        if self._packed:
            return
        alike = ops.keeps_bits(self.weight)
        if self._each and ops.sums_logits:
            self._ops, self._packed, self.op = ops, True, EachLogit(self, ops, None)
            return
        if self._dtype == torch.float32 and mode is not None and not alike:
            self._ops, self._packed = ops, True
            self.op = EachLogit(self, ops, None if mode.deterministic else ROUTER_ROWS)
        super().pack(ops, mode)

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None, overwrite: bool = False
    ) -> Tensor:
        """x [M, in_features] -> [M, count]"""
        return super().forward(x if isinstance(self.op, EachLogit) else x.to(self._dtype))

    __call__ = forward  # type: ignore[assignment]

    def append_row(self, row: Tensor) -> None:
        """Makes row [1, in_features] the first of some more outputs, before it is packed."""
        weight = self.weight.new_zeros(_MORE_OUTPUTS, self.in_features)
        weight[:1] = row
        self.weight = nn.Parameter(torch.cat((self.weight, weight)), False)
        if self.bias is not None:
            self.bias = nn.Parameter(torch.cat((self.bias, self.bias.new_zeros(_MORE_OUTPUTS))), False)
        self.out_features += _MORE_OUTPUTS
        self.whole_features += _MORE_OUTPUTS


class EachLogit(Dense):
    """A product in float32 of which each number is summed by itself: a row has the same bits in any batch."""

    def __init__(self, layer: Linear, ops: LayerOps, most_rows: int | None) -> None:
        """most_rows: with more it is one product of matrices; None: never."""
        super().__init__(layer)
        self._ops, self._most_rows = ops, most_rows

    def __call__(
        self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False
    ) -> Tensor:
        if self._most_rows is not None and len(x) > self._most_rows:
            return super().__call__(x.to(self.layer.weight.dtype), bias)
        out = self._ops.every_logit(x, self.layer.weight)
        return out if bias is None else out + bias


class ExpertLinear(Linear):
    """The weights of `count` experts of one shape, one beneath the other: outputs of expert e are rows from e * out on.
    Rows are multiplied with those of the experts that they were routed to."""

    takes_all = False  # whether every row is routed to all of them
    shared = 0  # of them, the last, that every row is routed to besides those that it chooses

    def __init__(
        self,
        in_features: int,
        out_features: int,
        count: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        weight_format: WeightFormat = DENSE,
    ) -> None:
        """out_features: of one expert."""
        super().__init__(in_features, count * out_features, bias, dtype, device, weight_format)
        self.count = count
        self._dtype, self._format = dtype, weight_format
        self._gemm: ExpertGemm | None = None
        self.grouped: AdaptedGroups | None = None  # what adapters add, where there may be some
        self.device_weight: Tensor | ExpertRows | None = None  # as the device's kernels hold it, where they do
        self.most_pairs = LARGE_TILE  # of a tile, as these kernels say

    def pack(self, ops: LayerOps, mode: PackMode | None = None) -> None:
        if self._packed:
            return
        self._ops, self._packed = ops, True
        mode, groups = mode or PackMode(), self.op.groups()
        if groups is not None:
            gemm = self._gemm = ops.expert_gemm and ops.expert_gemm(groups, self.count)
            if gemm is not None:
                self.device_weight = gemm.weight
                self.most_pairs = gemm.most_pairs(self._dtype)
                self.op = ExpertWeights(self, gemm.weight, self._dtype)
                return
            what = f"{groups.rows} x {groups.columns}, {self._dtype}"
            logger.warning("%s: no kernel for its quantised weights; dequantised to %s", mode.name, what)
            self.weight = nn.Parameter(dequantised(groups, self._dtype), False)
            self.op = Dense(self)
        if ops.reads_routes:
            self.op = self._gemm = EachExpert(self._each(ops, mode), self)
            for name in [name for name, _ in self.named_parameters() if name != "bias"]:
                delattr(self, name)
            return
        weight = as_dense(self)
        gemm = self._gemm = ops.expert_gemm and ops.expert_gemm(weight, self.count)
        self.op = Dense(self)
        if gemm is not None:
            self.device_weight = gemm.weight
            self.most_pairs = gemm.most_pairs(self._dtype)
        mode.if_exact(
            gemm is not None or ops.keeps_bits(weight),
            f"expected {mode.name}.weight in a type and size that there are GEMMs of experts for; found "
            f"{weight.dtype}, {list(weight.shape)}",
        )

    def append_shared(self, one: Linear, ops: LayerOps) -> None:
        """Makes one more expert of a layer that every row is routed to, before either is packed."""
        self.append(one, ops)
        self.count, self.shared = self.count + 1, self.shared + 1

    def forward(self, x: Tensor, routed: Routed, with_bias: bool = True) -> Tensor:  # type: ignore[override]
        """x [M or pairs, in_features] -> [pairs, out_features]"""
        made = self._products(x, routed, self.bias if with_bias else None)
        if self.grouped is not None:
            self.grouped.add(made, x, routed.experts)
        return made

    def _products(self, x: Tensor, routed: Routed, bias: Tensor | None) -> Tensor:
        if self._gemm is None:
            return self._ops.experts_linear(x, self.op.dense_weight(), bias, routed)
        return self._gemm.linear(x, bias, routed)

    __call__ = forward  # type: ignore[assignment]

    def gated(self, x: Tensor, routed: Routed, limit: float = 0.0) -> Tensor:  # type: ignore[override]
        """x [M or pairs, in_features] -> [pairs, out_features / 2] of the product, whose first half are gates:
        silu(gate) times up, or, with a limit, `LayerOps.clamped_swiglu`."""
        out = None if self.adds or self._gemm is None else self._gemm.gated(x, self.bias, routed, limit)
        if out is not None:
            return out
        gate_up = self(x, routed)
        return self._ops.clamped_swiglu(gate_up, limit) if limit else self._ops.silu_mul(gate_up)

    def squared(self, x: Tensor, routed: Routed) -> Tensor:
        """x [M or pairs, in_features] -> relu(product)², [pairs, out_features]"""
        out = None if self.adds or self._gemm is None else self._gemm.squared(x, self.bias, routed)
        return self._ops.relu_squared(self(x, routed)) if out is None else out

    @property
    def adds(self) -> bool:
        """Returns whether adapters add to its products in the forward that runs."""
        return self.grouped is not None and self.grouped.queries.adds

    @property
    def groups(self) -> int:
        """Returns of how many matrices adapters may be."""
        return self.count - self.shared

    def each_gemm(self) -> list[Gemm | None]:
        """Returns the device's GEMM of each expert; none where it takes them together."""
        return [one.op.first_gemm for one in self.op.each] if isinstance(self.op, EachExpert) else []

    def _each(self, ops: LayerOps, mode: PackMode) -> list[Linear]:
        """Returns a packed layer for each expert."""
        rows, dense = self.out_features // self.count, None
        bias = None if self.bias is None else self.bias.view(self.count, -1)
        layers = []
        for expert in range(self.count):
            start = expert * rows
            stored = self.op.stored_rows(start, rows)
            form = DENSE if stored is None else self._format
            one = Linear(self.in_features, rows, False, self._dtype, torch.device("meta"), form)
            if stored is None:
                dense = self.op.dense_weight().detach() if dense is None else dense
                one.weight = nn.Parameter(dense[start : start + rows], False)
            else:
                for at, value in stored:
                    taken = one.op.keep(ParamSlice("weight", at - start, len(value.data)), value)
                    assert taken
            one.bias = None if bias is None else nn.Parameter(bias[expert], False)
            one.pack(ops, mode._replace(name=f"{mode.name}.{expert}"))
            layers.append(one)
        return layers


class ExpertWeights(LinearOp):
    """What is known of a weight that stays quantised beside its GEMM."""

    def __init__(self, layer: Linear, weight: Tensor | ExpertRows, dtype: torch.dtype) -> None:
        super().__init__(layer)
        assert isinstance(weight, ExpertRows)
        self._weight, self._dtype = weight, dtype

    @property
    def sizes(self) -> Counter[str]:
        return Counter({self._weight.label: self._weight.nbytes})

    def dense_weight(self) -> Tensor:
        return self._weight.dense(self._dtype)


class EachExpert(LinearOp):
    """A layer for each expert, of which those run that were chosen: where the host may read which those are."""

    def __init__(self, each: list[Linear], layer: Linear) -> None:
        super().__init__(layer)
        self.each = each

    @property
    def sizes(self) -> Counter[str]:
        return sum((one.op.sizes for one in self.each), Counter[str]())

    def dense_weight(self) -> Tensor:
        return torch.cat([one.dense_weight() for one in self.each])

    def linear(self, x: Tensor, bias: Tensor | None, routed: Routed) -> Tensor:
        choices, (order, places, chosen, counts) = routed.choices(x), routed.by_expert
        if not chosen:
            return x.new_zeros(routed.pairs, self.each[0].out_features)
        rows = x.index_select(0, order // choices if choices > 1 else order)
        parts = []
        for expert, part in zip(chosen, rows.split(counts), strict=True):
            one = self.each[expert]
            parts.append(one.op(part, None if bias is None else one.bias))
        made = torch.cat(parts)
        if len(order) == routed.pairs:
            return made.index_select(0, places)
        return made.new_zeros(routed.pairs, made.shape[1]).index_copy_(0, order, made)

    def gated(self, x: Tensor, bias: Tensor | None, routed: Routed, limit: float) -> Tensor | None:  # type: ignore[override]
        return None

    def squared(self, x: Tensor, bias: Tensor | None, routed: Routed) -> Tensor | None:
        return None
