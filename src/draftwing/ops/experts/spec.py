"""The operations of mixtures of experts, in torch.

A row chooses `top_k` of the experts: row r with its choice j is pair r * top_k + j. GEMMs of experts give a row a pair,
so what a token gets does not depend on how pairs are grouped.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.ops.experts.routing import LARGE_TILE, EveryExpert, Routed, Routing
from draftwing.ops.norms.spec import NormOps

SWIGLU_ALPHA = 1.702  # of the clamped gate
TINY = 1e-20  # joins the sum of sigmoids, which may be 0

_PRIME, _SPREAD = 1_000_003, 618_033  # of numbers that look random
_ALIGNED = 16  # bytes: rows of matrices of torch's GEMM of groups are multiples of it


def _without_other_groups(scores: Tensor, routing: Routing) -> Tensor:
    """scores [M, count] -> the same, -inf in groups that a row does not choose among."""
    by_group = scores.unflatten(-1, (routing.groups, -1))
    best = by_group.topk(min(2 if routing.sigmoid else 1, by_group.shape[-1]), -1).values
    chosen = _sum_in_order(best).squeeze(-1).topk(routing.top_groups, -1).indices  # [M, top_groups]
    kept = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(-1, chosen, True)
    return by_group.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)


def _sum_in_order(x: Tensor) -> Tensor:
    """x [.., n] -> [.., 1], in an order that does not depend on how many rows there are."""
    first, *others = x.split(1, -1)
    for other in others:
        first = first + other
    return first


def _sigmoid(x: Tensor) -> Tensor:
    """By a softmax, which goes by row: of a tensor's end, which fills no vector, torch's sigmoid has other bits."""
    return torch.stack((x, torch.zeros_like(x)), -1).softmax(-1)[..., 0]


def _of_near(logits: Tensor, experts: Tensor, near: float) -> Tensor:
    """logits [M, count], experts [M, k] -> weights of `Routing.near`, [M, k]"""
    found, left = [], logits
    for expert in experts.split(1, -1):
        its = logits.gather(-1, expert)
        far = (its - logits) / logits.abs().clamp(min=its) > near
        found.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(-1, expert))
        left = left.scatter(-1, expert, float("-inf"))
    return torch.cat(found, -1)


def _grouped_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, routed: Routed) -> Tensor:
    """rows [pairs, in], weight [count, out, in], bias [count * out] -> [pairs, out]"""
    flat = routed.experts.flatten()
    order, counts = order_by_expert(flat, routed.count)
    gap = -weight.shape[2] * weight.element_size() % _ALIGNED // weight.element_size()
    rows, weight = (F.pad(x, (0, gap)) if gap else x for x in (rows, weight))
    outs = F.grouped_mm(rows[order], weight.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))
    outs = outs[order.argsort()]
    outs = outs if bias is None else outs + bias.view(routed.count, -1)[flat]
    return outs.where((flat >= 0).unsqueeze(1), 0) if routed.partial else outs


def order_by_expert(flat: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """flat [pairs], experts below `count` or -1 -> pairs in the order of experts, behind them those of -1, [pairs]
    int64; how many each expert has, [count] int64."""
    number = flat.remainder(count + 1)  # of -1: count
    counts = torch.zeros(count + 1, dtype=torch.int64, device=flat.device)
    return number.argsort(stable=True), counts.scatter_add_(0, number, torch.ones_like(flat))[:count]


class ExpertOps:
    """Routing, and what comes before and after the GEMMs of experts. Here with gradients, for tensors of any dtype."""

    mixes_under_norms = False  # whether `mix_norm` is one kernel
    reads_routes: bool  # whether the host may read which experts were chosen, for it shares the device's memory

    def __init__(self, norms: NormOps, reads_routes: bool = False) -> None:
        self._norms, self.reads_routes = norms, reads_routes

    def route(
        self,
        logits: Tensor,
        routing: Routing,
        correction: Tensor | None = None,
        exact: bool = False,
        scatter: Tensor | None = None,
        own: range | None = None,
        most_pairs: int = LARGE_TILE,
    ) -> Routed:
        """logits [M, count], [M, count + 1] of a gated `Routing.shared`, correction [count] of `has_correction` -> the
        best experts of each row with their weights, in float32 or wider, [M, `Routing.choices`]. A row chooses the same
        in any batch. exact: GEMMs are to give a row the same bits in any batch, too. scatter [1] int32: where it is not
        0, rows choose at random, whatever their logits are. own: the experts that this rank has; other pairs are left
        out (`Routed`). most_pairs: the least `DeviceExpertGemm.most_pairs` of these GEMMs."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        gate = wide[:, -1:]
        wide = wide[:, :-1] if routing.shared == "gated" else wide
        if scatter is not None and (not self.reads_routes or bool(scatter)):
            places = torch.arange(wide.numel(), device=wide.device)
            anything = (places * places % _PRIME * _SPREAD % _PRIME).view_as(wide) / _PRIME  # the same on all ranks
            wide = torch.where(scatter != 0, anything.to(wide.dtype), wide)
            correction = None if correction is None else torch.where(scatter != 0, 0, correction)
        scores, by = wide, wide
        if correction is not None:
            scores = _sigmoid(wide) if routing.sigmoid else wide.softmax(-1)
            by = scores.detach() + correction
        assert routing.has_correction == (correction is not None)
        experts = (_without_other_groups(by, routing) if routing.groups > 1 else by).topk(routing.top_k, -1).indices
        if correction is not None:
            weights = scores.gather(-1, experts)
            weights = weights / (_sum_in_order(weights) + TINY) if routing.renormalise else weights
        elif routing.near:
            weights = _of_near(wide, experts, routing.near)
        else:
            weights = by.gather(-1, experts).softmax(-1) if routing.renormalise else by.softmax(-1).gather(-1, experts)
        weights = weights * routing.scale if routing.scale != 1 else weights
        count = wide.shape[1]
        if routing.shared != "none":
            assert own is None
            more = _sigmoid(gate) if routing.shared == "gated" else torch.ones_like(gate)
            last = torch.arange(count, count + routing.shared_choices, device=experts.device).expand(len(experts), -1)
            experts, weights = torch.cat((experts, last), 1), torch.cat((weights, more.expand_as(last)), 1)
            count += routing.shared_choices
        if own is None:
            return Routed(experts, weights, count)
        here = (experts >= own.start) & (experts < own.stop)
        return Routed(torch.where(here, experts - own.start, -1), weights.where(here, 0), len(own), partial=True)

    def scaled_inputs(self, x: Tensor, logits: Tensor, routed: Routed, own: range | None) -> Tensor:
        """x [M, n], logits [M, count], of which each row chose one -> x times the sigmoid of that one, rounded as x is,
        [M, n]. own: as `route` has it."""
        first = 0 if own is None else own.start
        chosen = logits.gather(1, (routed.experts + first).clamp(min=0))
        return x * _sigmoid(chosen.to(torch.promote_types(chosen.dtype, torch.float32))).to(x.dtype)

    def every_expert(self, rows: int, count: int, device: torch.device) -> Routed:
        """Returns where rows go that all go to all `count` experts, as heads' matrices are."""
        experts = torch.arange(count, device=device).expand(rows, -1)
        return EveryExpert(experts, torch.ones(rows, count, device=device), count)

    def clamped_swiglu(self, gate_up: Tensor, limit: float) -> Tensor:
        """gate_up [M, 2 * ffn], gates and then ups -> gate * sigmoid(1.702 * gate) * (up + 1), [M, ffn], in float32
        and rounded once; gates are at most `limit` and ups within it before."""
        gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, -1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)).to(gate_up.dtype)

    def mix(self, y: Tensor, routed: Routed, residual: Tensor | None) -> Tensor:
        """y [pairs, n] by pair, residual [M, n] -> the sum over a row's choices times their weights, in their order in
        float32, + residual, rounded once: [M, n]."""
        parts = y.view(*routed.experts.shape, -1)
        total = parts[:, 0] * routed.weights[:, 0:1]
        for choice in range(1, parts.shape[1]):
            total = total + parts[:, choice] * routed.weights[:, choice : choice + 1]
        return (total if residual is None else total + residual).to(y.dtype)

    def experts_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, routed: Routed) -> Tensor:
        """`ExpertGemm.linear` by a weight [count * out, in], in plain torch; no shape depends on data."""
        count, choices = routed.count, routed.choices(x)
        rows = x.repeat_interleave(choices, 0) if choices > 1 else x  # [pairs, in]
        # On a GPU torch's GEMM of groups in float32 has the host wait for how many rows an expert has.
        grouped = x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and x.device.type == "cpu")
        if type(x) is Tensor and grouped and not x.is_meta:
            return _grouped_linear(rows, weight.view(count, -1, weight.shape[1]), bias, routed)
        flat = routed.experts.reshape(-1, 1)  # every expert with all rows
        out = x.new_zeros(routed.pairs, weight.shape[0] // count)
        for expert, part in enumerate(weight.chunk(count)):
            of = None if bias is None else bias.view(count, -1)[expert]
            out = torch.where(flat == expert, F.linear(rows, part, of), out)
        return out

    def mix_norm(
        self, y: Tensor, routed: Routed, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Returns `mix`, and `rms_norm` of it: [M, n] each. scale: of what is added to the residual stream: it is
        rounded before and behind."""
        x = self.mix(y, routed, residual) if scale == 1 else residual + self.mix(y, routed, None) * scale
        return x, self._norms.rms_norm(x, weight, eps)
