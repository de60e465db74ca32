"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), in its absorbed form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.kv.pool import KVSpec
from draftwing.layers.config import Mixer, MixerConfig, Placement, StoredMatrix, StoredVector
from draftwing.layers.experts import ExpertLinear
from draftwing.layers.indexer import IndexConfig, Indexer
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import LinearOp, PackMode, WeightFormat, sizes_of
from draftwing.layers.linear_ops.dense import blocks_or_dense
from draftwing.layers.norm import RMSNorm
from draftwing.layers.part_configs import check_sizes
from draftwing.ops.attention.attend import Attend
from draftwing.ops.attention.batch import AttentionKind, HeadShape
from draftwing.ops.experts.routing import Routed
from draftwing.ops.gemm.contract import HeadProducts
from draftwing.ops.table import LayerOps
from draftwing.parallel.cut import Cut, Order, ordered
from draftwing.parallel.ranks import Ranks, Share
from draftwing.parallel.shares import own_heads

_EPS = 1e-6  # of the norms of latents, whatever a config says of the others


@dataclass(frozen=True)
class LatentAttentionConfig(MixerConfig):
    """Attention over one latent for each token, with the sizes of this rank.

    heads: of queries.  plain, turned: elements of a query or key that are not turned by the rotary embedding, and that
    are; the latter are one for all heads.  values: elements of a value.  latent: size of what keys and values are made
    of.  query_latent: of what queries are made of, 0: of the hidden state.  rope: which of `ModelConfig.ropes`.
    interleaved: whether elements that are turned lie in pairs in a checkpoint.  bias: of the matrices that read or make
    hidden states.  factor: what scores are multiplied with besides the root of a key's size.  gated: whether
    what a head gives is multiplied with the sigmoid of a gate, one for each head.  index: what picks the tokens that a
    query attends to, None: it attends to all.
    """

    heads: int
    plain: int
    turned: int
    values: int
    latent: int
    query_latent: int = 0
    rope: int = 0
    interleaved: bool = True
    bias: bool = False
    factor: float = 1.0
    gated: bool = False
    index: IndexConfig | None = None

    @property
    def rotates(self) -> tuple[int, int] | None:
        return self.rope, self.turned

    @property
    def width(self) -> int:
        """Returns the width of what a token keeps."""
        return self.latent + self.turned

    @property
    def shape(self) -> HeadShape:
        return HeadShape(self.heads, 1, self.width)

    def keeps(self) -> KVSpec:
        return KVSpec(1, self.width, shared=True, index_size=0 if self.index is None else self.index.kept)

    def weights(self, hidden: int) -> int:
        queries = self.heads * (self.plain + self.turned)
        made = hidden * (self.query_latent + self.width) + (self.query_latent or hidden) * queries
        made += 0 if self.index is None else self.index.weights(hidden, self.query_latent)
        made += hidden * self.heads if self.gated else 0
        return made + self.heads * (self.latent * (self.plain + self.values) + self.values * hidden)

    def check(self) -> None:
        check_sizes(self, ("heads", "plain", "turned", "values", "latent"))
        if self.turned % 2:
            raise CheckpointError(f"expected an even number of elements that are turned, found {self.turned}")
        if self.index is not None:
            self.index.check(self.turned)
            if not self.query_latent:
                raise CheckpointError("q_lora_rank: expected at least 1, for an indexer reads such latents, found 0")

    def spread(self, ranks: Ranks) -> LatentAttentionConfig:
        """Each rank has a share of the heads, and the latents of all tokens."""
        return replace(self, heads=len(self._own(ranks)))

    def _own(self, ranks: Ranks) -> range:
        return own_heads(ranks, self.heads, self.heads, "attention heads")[0]

    def stored(self, hidden: int, ranks: Ranks) -> Sequence[StoredMatrix | StoredVector]:
        heads = self._own(ranks)

        def share(each: int) -> Share:
            """Returns the share of rows or columns, of which a head has so many."""
            return Share(heads.start * each, len(heads) * each, self.heads * each)

        def all_of(rows: int) -> Cut:
            return Cut(0, Share(0, rows, rows))

        key = self.plain + self.turned
        of_queries = self._order([head * key for head in heads], self.plain, self.heads * key)
        made = StoredMatrix(
            "self_attn.q_b_proj" if self.query_latent else "self_attn.q_proj",
            "query", 0, len(heads) * key, False, Cut(0, share(key)), of_queries,
        )  # fmt: skip
        kept = StoredMatrix(
            "self_attn.kv_a_proj_with_mqa", "down", self.query_latent, self.width, self.bias, all_of(self.width),
            self._order([0], self.latent, self.width),
        )  # fmt: skip
        out = StoredMatrix("self_attn.o_proj", "o", 0, hidden, self.bias, Cut(1, share(self.values)))
        parts: list[StoredMatrix | StoredVector] = [made, kept, out]
        if self.query_latent:
            wide = self.query_latent
            parts += [
                StoredMatrix("self_attn.q_a_proj", "down", 0, wide, self.bias, all_of(wide)),
                StoredVector("self_attn.q_a_layernorm.weight", "query_norm.weight", wide, None, True),
            ]
        if self.gated:
            parts.append(StoredMatrix("self_attn.g_proj", "gate", 0, len(heads), False, Cut(0, share(1))))
        up, values = share(self.latent), share(self.values)
        return [
            *parts,
            *(() if self.index is None else self.index.stored(self.turned)),
            StoredVector("self_attn.kv_a_layernorm.weight", "norm.weight", self.latent, None, True),
            # Two parts of `kv_b_proj` (`models.latents`).
            StoredMatrix("self_attn.k_b_proj", "key_up", 0, up.size, False, Cut(0, up), of_heads=True),
            StoredMatrix("self_attn.v_b_proj", "value_up", 0, values.size, False, Cut(0, values), of_heads=True),
        ]

    def _order(self, starts: Sequence[int], plain: int, whole: int) -> Order | None:
        """Of rows of which `plain` and then those that are turned begin at each of `starts`: of the latter the first of
        all pairs, then the second."""
        runs = []
        for start in starts:
            first = start + plain
            runs.append((start, plain))
            if self.interleaved:
                runs += [(first + i, 1) for at in (0, 1) for i in range(at, self.turned, 2)]
            else:
                runs.append((first, self.turned))
        return ordered(0, runs, whole)

    def build(self, place: Placement) -> LatentAttention:
        return LatentAttention(self, place)


class HeadLinear(ExpertLinear):
    """A matrix for each head. Where the device has no products of heads they are experts, which all rows go to."""

    takes_all = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        heads: int,
        dtype: torch.dtype,
        device: torch.device,
        weight_format: WeightFormat,
    ) -> None:
        """out_features: of one head."""
        super().__init__(in_features, out_features, heads, False, dtype, device, weight_format)
        self._outputs = out_features

    def pack(self, ops: LayerOps, mode: PackMode | None = None) -> None:
        blocks = None if self._packed else self.op.stored_rows(0, self.out_features)
        rows = None if blocks is None else [part for _, part in blocks]
        make = None if self._packed else ops.head_products
        products = make and make(rows or self.weight, self.count, self._dtype)
        if products is None:
            super().pack(ops, mode)
            return
        self._ops, self._packed, self.op = ops, True, HeadsOp(self, products, sizes_of(rows or ()))
        if rows is None:
            del self.weight

    def routed(self, x: Tensor) -> Routed | None:
        """Returns what `forward` is given of x [M, ..]."""
        return None if isinstance(self.op, HeadsOp) else self._ops.every_expert(len(x), self.count, x.device)

    def forward(self, x: Tensor, routed: Routed | None) -> Tensor:  # type: ignore[override]
        """x [M, heads, in_features] -> [M, heads, out_features of a head]"""
        if isinstance(self.op, HeadsOp):
            return self.op.products(x)
        assert routed is not None
        return self._products(x.flatten(0, 1), routed, None).view(*x.shape[:2], -1)

    def adapt(self, y: Tensor, x: Tensor, factor: float = 1.0) -> None:
        """x [M, heads, in_features] of the products y [M, heads, out_features or more], which were multiplied with
        `factor`, and to which adapters are added."""
        if self.grouped is None or not self.grouped.queries.adds:
            return
        heads = torch.arange(self.count, device=x.device).expand(len(x), -1)
        x = x if factor == 1 else x * factor
        self.grouped.add(y.view(-1, y.shape[2])[:, : self._outputs], x.flatten(0, 1), heads)

    __call__ = forward  # type: ignore[assignment]


class HeadsOp(LinearOp):
    """The device's products of heads."""

    def __init__(self, layer: Linear, products: HeadProducts, sizes: Counter[str]) -> None:
        """sizes: of blocks, by their kind."""
        super().__init__(layer)
        self.products, self._sizes = products, sizes

    @property
    def sizes(self) -> Counter[str]:
        return self._sizes

    def dense_weight(self) -> Tensor:
        return self.products.weight


class LatentAttention(Mixer):
    """Keys and values of all heads are products of one latent, [latent | turned], which is all that a token keeps.

    Keys and values are not made. A head's query is multiplied with the matrix of its keys instead, and meets latents;
    and its sum over latents is multiplied with the matrix of its values. Prompts, decoding and trees all do it so, and
    have the same bits.
    """

    needs_chunks = False
    before_attention = 2

    def __init__(self, config: LatentAttentionConfig, place: Placement) -> None:
        super().__init__()
        self.config, self.pool_layer, self.shape = config, place.pool_layer, config.shape
        layer, dtype, device = place.layer, place.dtype, place.device
        heads, wide, form = config.heads, config.query_latent, blocks_or_dense(layer.weight_format)
        self.down = place.linear(wide + config.width, bias=config.bias)
        self.query: Linear | None = place.linear(heads * (config.plain + config.turned), wide)
        self.query_norm = RMSNorm(wide, _EPS, layer.norm.dtype(dtype), device) if wide else None
        self.norm = RMSNorm(config.latent, _EPS, layer.norm.dtype(dtype), device)
        self.key_up = HeadLinear(config.plain, config.latent, heads, dtype, device, form)
        self.value_up = HeadLinear(config.latent, config.values, heads, dtype, device, form)
        self.gate = place.linear(heads) if config.gated else None
        self.o = place.out("o", heads * config.values, config.bias)
        self.kind = AttentionKind(scalar=config.plain + config.turned, values=config.latent)
        self.index: Indexer | None = None
        if config.index is not None:
            self.needs_chunks = True  # which `picks` reads
            if not config.index.shared:
                self.index = Indexer(config.index, config.turned, wide, place)
                self.before_attention += len(self.index.linears())

    def merge(self, ops: LayerOps) -> None:
        """Has queries and latents of the same input made at once; latents come last."""
        query, down = self.query, self.down
        apart = self.query_norm is not None or not ops.merges_matrices or down.bias is not None
        if query is None or apart or not query.op.can_append(down.op):
            return
        self.merged = {"query": ("down", 0), "down": ("down", query.out_features)}
        query.append(down, ops)
        self.down, self.query, self.before_attention = query, None, 1

    def linears(self) -> list[Linear]:
        queries = [] if self.query is None else [self.query]
        gate = [] if self.gate is None else [self.gate]
        return [self.down, *queries, *([] if self.index is None else self.index.linears()), *gate, self.o]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, residual: Tensor | None = None) -> Tensor:
        config, rows, scale = self.config, len(x), None
        if cos.shape[1] > 1:  # queries have a factor of their position
            (cos, scale), sin = cos.split(1, 1), sin[:, :1]
        made = self.down(x)
        written = self._written(made, cos, sin, attend, self.query_norm)
        latents = self._query_latents(x, made, written)
        queries = made[:, : -config.width] if self.query is None else self.query(latents)
        queries = queries.unflatten(1, (config.heads, -1))
        if scale is not None:
            queries = queries * scale[..., :1]
        if self.index is not None:
            self.index.write(self.pool_layer, x, cos, sin, attend, self.ops)
        picks = config.index is not None and not attend.sees_at_most(config.index.topk)
        if picks and self.index is not None:
            self.index.pick(self.pool_layer, x, latents, cos, sin, attend, self.ops)
        picked = attend.picked if picks else attend
        plain, turned = queries.split((config.plain, config.turned), 2)
        routed = self.key_up.routed(x) or self.value_up.routed(x)
        if isinstance(self.key_up.op, HeadsOp):
            q = self.ops.head_queries(self.key_up.op.products, plain, turned, cos, sin, config.factor)
        else:
            q = self.ops.concat_rope(self.key_up(plain, routed), turned, cos, sin, config.factor)  # [M, heads, width]
        self.key_up.adapt(q, plain, config.factor)
        if written is not None:
            out = picked.read(self.pool_layer, q, self.kind)
        else:
            keys = self._latents(made, cos, sin)
            out = picked(self.pool_layer, q, keys, keys[..., : config.latent], self.kind)
        out = out.view(rows, config.heads, -1)
        values = self.value_up(out, routed)
        self.value_up.adapt(values, out)
        values = values.view(rows, -1)
        if self.gate is not None:
            of_heads = values.view(-1, config.values)
            values = self.ops.gate(self.gate(x).reshape(-1, 1), of_heads).view(rows, -1)
        return self.o(values, residual)

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm

    def _query_latents(self, x: Tensor, made: Tensor, written: Tensor | None) -> Tensor:
        """x [M, in_size], made [M, ..] of it by `down`, written: of `_written` -> what queries are made of, [M, ..]"""
        if self.query_norm is None:
            return x
        return self.query_norm(made[:, : self.config.query_latent]) if written is None else written

    def write(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> None:
        made, cos, sin = self.down.last(x, self.config.width), cos[:, :1], sin[:, :1]
        if self._written(made, cos, sin, attend) is None:
            keys = self._latents(made, cos, sin)
            attend.write(self.pool_layer, keys, keys)
        if self.index is not None:
            self.index.write(self.pool_layer, x, cos, sin, attend, self.ops)

    def _written(
        self, made: Tensor, cos: Tensor, sin: Tensor, attend: Attend, norm: RMSNorm | None = None
    ) -> Tensor | None:
        """made [M, ..] of `down`. Returns what queries are made of, by their norm, where `attend` has written what the
        tokens keep, else None."""
        kept, query = made[:, -self.config.width :], None
        if norm is not None:
            query = made[:, : self.config.query_latent], norm.weight
        return attend.write_latents(self.pool_layer, kept, self.norm.weight, self.norm.eps, cos, sin, query)

    def _latents(self, made: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """made [M, ..] of `down` -> what the tokens keep, [M, 1, width]"""
        latent, turned = made[:, -self.config.width :].split((self.config.latent, self.config.turned), 1)
        return self.ops.concat_rope(self.norm(latent).unsqueeze(1), turned.unsqueeze(1), cos, sin)
