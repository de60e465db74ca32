"""One decoder layer: a mixer, in which tokens read of earlier ones, and an MLP."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from draftwing.layers.attention import Attention
from draftwing.layers.config import LayerConfig, Placement
from draftwing.layers.embedding import LayerEnd
from draftwing.layers.experts import ExpertMLP, ExpertsBeside
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import LinearOp
from draftwing.layers.linear_ops.parallel import NormedSum, RowParallel
from draftwing.layers.mlp import GatedMLP, UngatedMLP
from draftwing.layers.norm import RMSNorm, norm_of
from draftwing.ops.adapters.spec import QueryAdapters
from draftwing.ops.attention.attend import Attend
from draftwing.ops.fp8.spec import Fp8Rows
from draftwing.ops.table import PLAIN, LayerOps
from draftwing.ops.whole_layers.contract import LayerWeights, WholeLayers


class DecoderLayer(nn.Module):
    """Pre-norm mixer and MLP, one after the other or beside each other, each of which adds the residual stream to what
    it gives, some after a norm behind it."""

    def __init__(
        self,
        config: LayerConfig,
        pool_layer: int | None,
        dtype: torch.dtype,
        device: torch.device,
        in_size: int = 0,
        norms_input: bool = True,
    ) -> None:
        """pool_layer: where the mixer finds its entries, counted from the model's first (`pool_layers`).  in_size: of
        what the mixer reads, 0: the hidden size.  norms_input: whether there is a norm before it."""
        super().__init__()
        norm = partial(norm_of, config.norm, config.hidden, dtype, device)
        self.attn_norm = norm() if norms_input and config.in_norms and config.mixes else None
        at = -1 if pool_layer is None else pool_layer
        self.mixer = config.mixer.build(Placement(config, at, dtype, device, in_size or config.hidden))
        self.attn_out_norm = norm() if config.out_norms else None
        self.mlp_norm = (
            norm() if config.in_norms and config.has_mlp and (config.own_norm or not config.parallel) else None
        )
        self.mlp_out_norm = norm() if config.out_norms else None
        beside = config.experts is not None and config.experts.beside
        dense = GatedMLP if config.gated else UngatedMLP
        self.mlp: GatedMLP | UngatedMLP | ExpertMLP | None = None
        if config.has_mlp:
            self.mlp = (dense if config.experts is None or beside else ExpertMLP)(config, dtype, device)
        self.beside = ExpertsBeside(config, dtype, device) if beside else None
        self.end = LayerEnd(config, dtype, device) if config.per_layer or config.scaled else None
        self._wide_norms, self._scale = config.norm.wide, config.residual_scale
        self._normed_residual = config.normed_residual
        self._parallel, self._centred = config.parallel, config.norm.centred
        assert not self._parallel or (self._centred and self.attn_norm is not None and not config.out_norms)
        assert self._scale == 1 or not (config.out_norms or beside)
        self._mixes = config.mixes
        assert (self._mixes and config.has_mlp) or not (config.out_norms or self._parallel or self._scale != 1)
        self._ops = PLAIN
        self._whole: WholeLayers | None = None  # all of it, for few rows
        self._queries: QueryAdapters | None = None  # where there may be adapters
        self._quantises = False, False  # whether norms give activations in fp8: that of the mixer, and of the MLP
        self._mixer_sum: NormedSum | None = None  # over ranks, that the mixer ends with
        self._mlp_sum: NormedSum | None = None

    def pack(self, ops: LayerOps) -> None:
        """Lets the device do the layer in one call where it can; when the parts are packed."""
        self.use(ops)
        mixer, mlp = self.mixer, self.mlp
        if isinstance(mlp, UngatedMLP):
            mlp.pack(ops)
        self._mixer_sum = _sum_of(mixer.linears()[-1]) if mixer.linears() else None
        self._mlp_sum = mlp.sum if isinstance(mlp, ExpertMLP) else None if mlp is None else _sum_of(mlp.down)
        if self._centred:  # which gives no activations in fp8
            return
        first = mixer.linears()[: mixer.before_attention] if mixer.takes_fp8 else []
        if not self._normed_residual:  # nothing can be added to activations in fp8
            of_mlp = isinstance(mlp, GatedMLP) and mlp.gate_up.takes_fp8
            self._quantises = any(linear.takes_fp8 for linear in first), of_mlp
        self._whole = whole_layers(ops, [self.weights()])
        if self._sums_plainly and self._mixer_sum is not None and self.mlp_norm is not None:
            self._mixer_sum.lead_to(self.mlp_norm.of_next_sum(self._quantises[1]))

    def lead_to(self, norm: RMSNorm | None, quantises: bool) -> None:
        """Has a sum over ranks that the layer ends with made under this norm, too, which comes next: see `take_normed`.
        quantises: whether it gives activations in fp8. After `pack`."""
        if self._sums_plainly and self.end is None and self._mlp_sum is not None:
            self._mlp_sum.lead_to(None if norm is None else norm.of_next_sum(quantises))

    def take_normed(self) -> Tensor | Fp8Rows | None:
        """Returns what the layer gave under the norm of `lead_to`, once, if its sum was made so."""
        return None if self._mlp_sum is None else self._mlp_sum.take()

    @property
    def first_norm(self) -> tuple[RMSNorm | None, bool]:
        """Returns the norm before the mixer, and whether it gives activations in fp8."""
        return self.attn_norm, self._quantises[0]

    @property
    def _adds(self) -> bool:
        """Returns whether adapters add to products in the forward that runs."""
        return self._queries is not None and self._queries.adds

    @property
    def _sums_plainly(self) -> bool:
        """Returns whether what mixer and MLP give is added to the residual stream as it is, one after the other."""
        others = self.attn_out_norm, self.mlp_out_norm, self.beside
        apart = self._parallel or self._centred or self._scale != 1 or any(one is not None for one in others)
        return self._mixes and not apart

    def use(self, ops: LayerOps) -> None:
        """Lets the device add residuals as it does it best; without packing."""
        self._ops = ops
        self.mixer.use(ops)
        if self.end is not None:
            self.end.use(ops)

    def take_adapters(self, queries: QueryAdapters) -> None:
        """Asks these in each forward whether some have adapters: of what adapters add to no norm is made before, and
        nothing is quantised that they read."""
        self._queries = queries
        for made in (self._mixer_sum, self._mlp_sum):
            if made is not None:
                made.take_adapters(queries)
        self._tell_again()

    def see_at_most(self, positions: int | None) -> None:
        """Does as `Attention.see_at_most`, which the mixer is."""
        assert isinstance(self.mixer, Attention)
        self.mixer.see_at_most(positions)
        self._tell_again()

    def _tell_again(self) -> None:
        """Tells what runs the layer in one call what `weights` are now."""
        self._whole = None if self._whole is None else whole_layers(self._ops, [self.weights()])

    def _in_one_call(self, *given: Any) -> Tensor | None:
        """Returns what `WholeLayers` of it gives, or None."""
        outs = None if self._whole is None else self._whole(*given)
        return None if outs is None else outs[0]

    def linears(self) -> list[Linear]:
        """Returns those of mixer and MLP but for experts', in the order of their calls."""
        of_mlp = [] if self.mlp is None or isinstance(self.mlp, ExpertMLP) else self.mlp.linears()
        return [*self.mixer.linears(), *of_mlp]

    def around_attention(self) -> tuple[list[LinearOp], list[LinearOp]]:
        """Returns the operations of `linears`: those before the mixer's attention, and those behind it."""
        ops, before = [linear.op for linear in self.linears()], self.mixer.before_attention
        return ops[:before], ops[before:]

    def weights(self) -> LayerWeights | None:
        """Returns what `LayerOps.whole_layers` is told; None of a layer that no device does in one call: with experts
        or no gate, GELU, limits, wide norms, LayerNorm or four norms, capped scores, clipped queries, short values,
        chunks, a factor of what it adds, sums with what is read, something behind its MLP, products that ranks join,
        or a mixer that is no attention with keys and values of its own, no gate and no norms but those of heads of
        queries and keys."""
        attention, mlp = self.mixer, self.mlp
        if not isinstance(mlp, GatedMLP) or mlp.gelu or mlp.gates is not None or self._wide_norms or self._centred:
            return None
        if self.mlp_norm is None or self.mlp_out_norm is not None:
            return None
        if self.end is not None or self._scale != 1 or self._normed_residual or getattr(attention, "v_norm", False):
            return None
        if not isinstance(attention, Attention) or attention.reads_others or attention.gated or attention.whole_norms:
            return None
        kind = attention.kind
        if (
            attention.scaled_queries
            or attention.norms_after
            or attention.clip
            or attention.padded
            or kind.cap
            or kind.chunk
            or attention.index is not None
        ):
            return None
        linears = self.linears()
        if any(linear.joins is not None for linear in linears):
            return None
        own = self.attn_norm is not None and attention.qkv.in_features == attention.o.out_features
        return LayerWeights(
            pool_layer=attention.pool_layer,
            shape=attention.shape,
            attn_norm=self.attn_norm.weight if self.attn_norm is not None and own else None,
            mlp_norm=self.mlp_norm.weight,
            head_norms=attention.head_norms(),
            kind=attention.kind,
            eps=self.mlp_norm.eps,
            gemms=[linear.op.first_gemm for linear in linears],
            biases=[linear.bias for linear in linears],
            adapters=[None if linear.adapted is None else linear.adapted.weights for linear in linears],
            queries=self._queries,
        )

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, under: Tensor | Fp8Rows | None = None
    ) -> Tensor:
        """x [M, hidden] -> [M, hidden], without what `end` does; cos, sin [M, 1, head_dim]. under: x under the first
        norm, where the `take_normed` of the layer before had it."""
        if self.attn_norm is None:
            return self.mix(x, x, cos, sin, attend)
        if (out := self._in_one_call(x, None, cos, sin, attend)) is not None:
            return out
        normed = under
        if normed is None:
            normed = self.attn_norm.quantised(x) if self._quantises[0] and not self._adds else self.attn_norm(x)
        return self._mix(normed, normed if self._normed_residual else x, cos, sin, attend)  # type: ignore[arg-type]

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm

    def write(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> None:
        """Writes what `forward` leaves for later queries, without its result."""
        self.mixer.write(x if self.attn_norm is None else self.attn_norm(x), cos, sin, attend)

    def mix(self, normed: Tensor, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """`forward` behind its first norm: normed [M, in_size], residual stream x [M, hidden] -> [M, hidden]"""
        out = self._in_one_call(x, normed, cos, sin, attend)
        return self._mix(normed, x, cos, sin, attend) if out is None else out

    def under(
        self, norm: RMSNorm, normed: Tensor, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Does as `mix`, of an MLP alone behind its norm, and returns its result under the norm that comes next: in one
        kernel where the device has one for it."""
        mlp, scale = self.mlp, self._scale
        x = normed if self._normed_residual else x
        if mlp is not None and not self._mixes:
            if isinstance(mlp, ExpertMLP) and mlp.shared is None and mlp.mixes_under_norms(scale):
                return mlp.under(norm, normed, x)
            return norm.of_sum(x, mlp(normed))
        if isinstance(mlp, ExpertMLP) and self.mlp_out_norm is None and mlp.mixes_under_norms(scale):
            x, normed = self._before_mlp(normed, x, cos, sin, attend)
            return mlp.under(norm, normed, x, scale)
        if scale != 1:
            assert mlp is not None
            x, normed = self._before_mlp(normed, x, cos, sin, attend)
            return norm.of_sum(x, mlp(normed), scale)
        x = self.mix(normed, x, cos, sin, attend)
        under = self.take_normed()
        return x, norm(x) if under is None else under  # type: ignore[return-value]  # not asked for in fp8

    def _before_mlp(
        self, normed: Tensor | Fp8Rows, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Returns what the MLP adds to, and what it reads: what the mixer adds is added in the norm's kernel."""
        assert self.mlp_norm is not None
        x, under = self.mlp_norm.of_sum(x, self.mixer(normed, cos, sin, attend), self._scale)
        return under if self._normed_residual else x, under

    def _mix(self, normed: Tensor | Fp8Rows, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        if self.mlp is None:
            return self.mixer(normed, cos, sin, attend, residual=x)
        if not self._mixes:
            assert self.mlp_norm is not None
            return self._ops.add_scaled(x, self.mlp(self.mlp_norm(x)))
        if self.attn_out_norm is not None and self.mlp_out_norm is not None:
            out = self.attn_out_norm(self.mixer(normed, cos, sin, attend))
            if self.mlp_norm is None:
                x = normed = self._ops.add_scaled(x, out)
            else:
                x, normed = self.mlp_norm.of_sum(x, out)
            made = self.mlp(normed)
            return self._ops.add_scaled(x, self.mlp_out_norm(made if self.beside is None else self.beside(made, x)))
        if self._parallel:
            assert isinstance(normed, Tensor)
            read = normed if self.mlp_norm is None else self.mlp_norm(x)
            return self.mlp(read, residual=self.mixer(normed, cos, sin, attend, residual=x))
        quantises, norm = self._quantises[1] and not self._adds, self.mlp_norm
        assert norm is not None
        if self._scale != 1:
            x, normed = self._before_mlp(normed, x, cos, sin, attend)
            return self._ops.add_scaled(x, self._ops.add_scaled(self.mlp(normed), None, self._scale))
        ranks = self._mixer_sum
        if self._ops.norm_adds_residual and ranks is None:
            out = self.mixer(normed, cos, sin, attend)
            x, normed = norm.quantised_sum(x, out) if quantises else norm.of_sum(x, out)
        else:
            x = self.mixer(normed, cos, sin, attend, residual=x)
            under = None if ranks is None else ranks.take()
            normed = under if under is not None else norm.quantised(x) if quantises else norm(x)
        # Quantised for a `GatedMLP` alone.
        return self.mlp(normed, residual=normed if self._normed_residual else x)  # type: ignore[arg-type]


def _sum_of(last: Linear) -> NormedSum | None:
    """Returns the sum over ranks that a packed product is."""
    return last.op.sum if isinstance(last.op, RowParallel) else None


def whole_layers(ops: LayerOps, layers: Sequence[LayerWeights | None], kept: Sequence[int] = ()) -> WholeLayers | None:
    """Returns `LayerOps.whole_layers` of layers that all have weights for it, else None."""
    weights = [layer for layer in layers if layer is not None]
    if ops.whole_layers is None or len(weights) < len(layers):
        return None
    return ops.whole_layers(weights, kept)
