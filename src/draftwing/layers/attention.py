"""The attention part of a decoder layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.errors import CheckpointError, ConfigError
from draftwing.kv.pool import KVSpec
from draftwing.layers.block_indexer import BlockIndexConfig, BlockIndexer
from draftwing.layers.config import Mixer, MixerConfig, Placement, StoredMatrix, StoredVector
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.parallel import joined
from draftwing.layers.norm import BareNorm, RMSNorm, row_squares
from draftwing.layers.part_configs import check_sizes
from draftwing.ops.attention.attend import Attend
from draftwing.ops.attention.batch import AttentionKind, HeadNorms, HeadShape
from draftwing.ops.fp8.spec import Fp8Rows
from draftwing.ops.rope.spec import rotate
from draftwing.parallel.columns import Columns, every_rank
from draftwing.parallel.cut import Cut, Order, ordered
from draftwing.parallel.ranks import Ranks, Share
from draftwing.parallel.shares import own_heads


@dataclass(frozen=True)
class AttentionConfig(MixerConfig):
    """Grouped-query attention of one layer, with the sizes of this rank.

    rope: which of `ModelConfig.ropes` turns its heads.  window, chunk, scalar, cap: as `AttentionKind` has them.
    sinks: whether heads have them.  qk_norm: whether heads of queries and keys have norms.  whole_norms: whether
    these norms are of all queries and of all keys of a token, each by one mean, over all ranks.  kv_from: as
    `MixerConfig` has it; then it makes queries alone.  gated: whether what comes out is multiplied with the sigmoid
    of a gate, which the matrix of queries makes behind each head's; softplus: with its softplus.  gate_rows: those
    of a head in a checkpoint's own matrix of gates, one for all elements or one for each; 0: gates are in that of
    queries.  rotary: the first elements of a head so many of which are turned, 0: all. They are paired among
    themselves, and lie in the order of `rotate`, element i of the first half and of the second. v_norm: whether
    heads of values have norms, too, without weights.  values_are_keys: whether a checkpoint has one matrix for
    keys, before their norm, and values. interleaved: whether elements that are turned lie in pairs in a
    checkpoint.  fused: whether it has one matrix for queries, keys and values; by_head: in which those of a head
    lie together.  scaled_queries: whether the rotary embedding scales queries by their position, see
    `RopeConfig.query_beta`.  norms_after: whether heads are normed when they are turned, not before.  bare_norms:
    whether norms of heads have no weights.  reversed: whether heads are turned the other way round in a
    checkpoint.  clip: what queries, keys and values are kept within, 0: nothing.  index: what picks the blocks of
    tokens that a query attends to, None: it attends to all.  normed: where `whole_norms` are taken of what is
    gathered of all ranks, which columns each has of queries, and of keys, and the first of this one.  values: elements
    of a head of values, 0: as many as of keys; fewer are kept with zeros behind them.  value_scale: what such
    values are multiplied with.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: int = 0
    window: int = 0
    sinks: bool = False
    scalar: int = 0
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    kv_from: int | None = None
    gated: bool = False
    gate_rows: int = 0
    softplus: bool = False
    rotary: int = 0
    whole_norms: bool = False
    v_norm: bool = False
    values_are_keys: bool = False
    interleaved: bool = False
    fused: bool = False
    by_head: bool = False
    scaled_queries: bool = False
    cap: float = 0.0
    norms_after: bool = False
    bare_norms: bool = False
    reversed: bool = False
    clip: float = 0.0
    chunk: int = 0
    index: BlockIndexConfig | None = None
    normed: tuple[tuple[Columns, int], ...] = ()
    values: int = 0
    value_scale: float = 1.0

    @property
    def rotates(self) -> tuple[int, int] | None:
        return self.rope, self.head_dim

    @property
    def shape(self) -> HeadShape:
        return HeadShape(self.heads, self.kv_heads, self.head_dim)

    @property
    def value_dim(self) -> int:
        return self.values or self.head_dim

    def keeps(self) -> KVSpec:
        return KVSpec(self.kv_heads, self.head_dim, index_size=0 if self.index is None else self.index.kept)

    def weights(self, hidden: int) -> int:
        size, own = self.head_dim, self.value_dim
        made = 0 if self.kv_from is not None else self.kv_heads * (size + (0 if self.values_are_keys else own))
        index = 0 if self.index is None else self.index.weights(hidden)
        return hidden * (((1 + self.gated) * size + own) * self.heads + made) + index

    def check(self) -> None:
        check_sizes(self, ("heads", "kv_heads", "head_dim"))
        if self.heads % self.kv_heads:
            raise CheckpointError(
                f"the number of heads must be a multiple of the number of key/value heads, "
                f"found {self.heads} and {self.kv_heads}"
            )
        if self.gate_rows not in (0, 1, self.head_dim):
            raise CheckpointError(f"expected gates of whole heads or of all their elements, found {self.gate_rows}")
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim must be even for rotary embeddings, found {self.head_dim}")
        if self.rotary % 2 or not 0 <= self.rotary <= self.head_dim:
            raise CheckpointError(
                f"expected an even number of a head's {self.head_dim} elements that are turned, found {self.rotary}"
            )

        if not 0 <= self.values <= self.head_dim:
            raise CheckpointError(f"expected values of at most {self.head_dim} elements, as keys, found {self.values}")
        if self.index is not None:
            self.index.check()

    def spread(self, ranks: Ranks) -> AttentionConfig:
        """Returns the sizes of one rank, which may have a key/value head more than others; one may be on several."""
        size = ranks.size
        if size == 1:
            return self
        heads, keys = self._own(ranks)
        if self.whole_norms and (self.heads % size or (self.kv_heads % size and size % self.kv_heads)):
            raise ConfigError(
                f"--tp-size {size}: expected a number that divides the model's {self.heads} attention heads, over all "
                f"of which it has norms, and divides its {self.kv_heads} key/value heads or is a multiple of them; "
                f"found {size}"
            )
        normed = self._gathered(ranks) if self.whole_norms and ranks.invariant else ()
        return replace(self, heads=len(heads), kv_heads=len(keys), normed=normed)

    def _gathered(self, ranks: Ranks) -> tuple[tuple[Columns, int], ...]:
        """Returns `normed` of so many ranks."""
        size, every = self.head_dim, [self._own(each) for each in every_rank(ranks)]
        return tuple(
            (
                Columns.of_shares([Share(part[at].start * size, len(part[at]) * size, count * size) for part in every]),
                every[ranks.rank][at].start * size,
            )
            for at, count in enumerate((self.heads, self.kv_heads))
        )

    def _own(self, ranks: Ranks) -> tuple[range, range]:
        """Returns the heads of queries, and of keys and values, that one rank has."""
        return own_heads(ranks, self.heads, self.kv_heads, "attention heads")

    def stored(self, hidden: int, ranks: Ranks) -> Sequence[StoredMatrix | StoredVector]:
        (heads, keys), size = self._own(ranks), self.head_dim
        q_rows, kv_rows = len(heads) * size, len(keys) * size
        q, own = Share(heads.start * size, q_rows, self.heads * size), self.value_dim
        out = Share(heads.start * own, len(heads) * own, self.heads * own)
        kv = Cut(0, Share(keys.start * size, kv_rows, self.kv_heads * size))
        made = q_rows * (1 + self.gated)
        q_order, k_order = self._q_order(heads), self._order(keys, self.kv_heads)
        parts: list[StoredMatrix | StoredVector] = []
        if self.fused:
            as_one = (q, q_order), (kv.share, k_order)
            parts.append(self._stored_by_head(heads, keys) if self.by_head else self._stored_as_one(*as_one))
        elif self.gate_rows:
            parts.append(self._stored_gates(heads))
            parts.append(StoredMatrix("self_attn.q_proj", "qkv", q_rows, q_rows, self.qkv_bias, Cut(0, q), q_order))
        else:
            parts.append(StoredMatrix("self_attn.q_proj", "qkv", 0, made, self.qkv_bias, Cut(0, q), q_order))
        if self.kv_from is None and not self.fused:
            parts.append(StoredMatrix("self_attn.k_proj", "qkv", made, kv_rows, self.qkv_bias, kv, k_order))
            if not self.values_are_keys:
                v, at = Share(keys.start * own, len(keys) * own, self.kv_heads * own), made + kv_rows
                parts.append(StoredMatrix("self_attn.v_proj", "qkv", at, v.size, self.qkv_bias, Cut(0, v)))
        parts.append(StoredMatrix("self_attn.o_proj", "o", 0, hidden, self.o_bias, Cut(1, out)))
        if self.sinks:
            cut = Cut(0, Share(heads.start, len(heads), self.heads)) if ranks.size > 1 else None
            parts.append(StoredVector("self_attn.sinks", "sinks", len(heads), cut))
        if self.qk_norm and not self.bare_norms:
            all_heads = self.whole_norms and ranks.invariant
            parts += self._stored_norms(*((range(self.heads), range(self.kv_heads)) if all_heads else (heads, keys)))
        return parts if self.index is None else [*parts, *self.index.stored()]

    def _stored_as_one(self, queries: tuple[Share, Order | None], keys: tuple[Share, Order | None]) -> StoredMatrix:
        """Returns the matrix of queries, keys and values. queries, keys: what this rank has of each, in which order."""
        (q, _), (kv, _) = queries, keys
        runs, at = [], 0
        for share, order in (queries, keys, (kv, None)):
            runs += [(at + start, rows) for start, rows in ([share[:2]] if order is None else order.runs)]
            at += share.whole
        order, rows = ordered(0, runs, at), q.size + 2 * kv.size
        return StoredMatrix("self_attn.qkv_proj", "qkv", 0, rows, self.qkv_bias, Cut(0, Share(0, at, at)), order)

    def _stored_gates(self, heads: range) -> StoredMatrix:
        """Returns the matrix of gates alone, whose rows are repeated where a head has one. heads: of this rank."""
        rows, whole = len(heads) * self.head_dim, self.heads * self.gate_rows
        share = Cut(0, Share(heads.start * self.gate_rows, len(heads) * self.gate_rows, whole))
        each = ((head, 1) for head in heads for _ in range(self.head_dim))
        order = ordered(0, each, whole) if self.gate_rows == 1 else None
        return StoredMatrix("self_attn.gate_proj", "qkv", 0, rows, False, share, order)

    def _stored_by_head(self, heads: range, keys: range) -> StoredMatrix:
        """Returns the matrix of queries, keys and values that has those of a key head together, its queries first.
        heads, keys: of this rank."""
        size, each = self.head_dim, self.heads // self.kv_heads
        group = (each + 2) * size
        starts = [head // each * group + head % each * size for head in heads]
        starts += [key * group + each * size for key in keys]
        runs = [(start + at, rows) for start in starts for at, rows in self._turned_first()]
        runs += [(key * group + (each + 1) * size, size) for key in keys]
        rows, whole = (len(heads) + 2 * len(keys)) * size, self.kv_heads * group
        order = ordered(0, runs, whole)
        return StoredMatrix("self_attn.qkv_proj", "qkv", 0, rows, self.qkv_bias, Cut(0, Share(0, whole, whole)), order)

    def _stored_norms(self, queries: range, keys: range) -> list[StoredVector]:
        """queries, keys: heads of this rank."""
        found = []
        for name, heads, count in (("q_norm", queries, self.heads), ("k_norm", keys, self.kv_heads)):
            heads, count = (heads, count) if self.whole_norms else (range(1), 1)
            order = self._order(heads, count)
            share = Share(heads.start * self.head_dim, len(heads) * self.head_dim, count * self.head_dim)
            cut = Cut(0, share) if order is None and share.size < share.whole else None
            found.append(StoredVector(f"self_attn.{name}.weight", f"{name}.weight", share.size, cut, True, order))
        return found if self.kv_from is None else found[:1]

    def _order(self, heads: Iterable[int], count: int, every: int = 1) -> Order | None:
        """Of the rows of these of `count` heads, `every` of which lie beside each other; None where nothing moves."""
        runs, size = self._turned_first(), every * self.head_dim
        if len(runs) == 1 and every == 1:
            return None
        return ordered(0, [(head * size + at, rows) for head in heads for at, rows in runs], count * size)

    def _turned_first(self) -> list[tuple[int, int]]:
        """Returns in which order the rows of a head lie here, as `ordered` has it."""
        turned = self.rotary or self.head_dim
        half, rest = turned // 2, (self.head_dim - turned) // 2
        if self.reversed:
            return [(half, half), (0, half)]
        if self.interleaved:
            first, second = ([(at, 1) for at in range(start, turned, 2)] for start in (0, 1))
            return [*first, (turned, rest), *second, (turned + rest, rest)]
        if turned < self.head_dim:
            return [(0, half), (turned, rest), (half, half), (turned + rest, rest)]
        return [(0, self.head_dim)]

    def _q_order(self, heads: range) -> Order | None:
        """Of the rows of queries of these heads: all gates, then all queries."""
        if not self.gated or self.gate_rows:
            return self._order(heads, self.heads)
        size, queries = 2 * self.head_dim, self._order(heads, self.heads, 2)
        assert queries is not None
        gates = [(head * size + self.head_dim, self.head_dim) for head in heads]
        return ordered(0, (*gates, *queries.runs), self.heads * size)

    def build(self, place: Placement) -> Attention:
        return Attention(self, place)


class Attention(Mixer):
    """Grouped-query attention; q, k and v are one GEMM. Who attends to whom is the injected `attend`'s."""

    needs_chunks = False
    takes_fp8 = True

    def __init__(self, config: AttentionConfig, place: Placement) -> None:
        super().__init__()
        layer, dtype, device = place.layer, place.dtype, place.device
        self.pool_layer, self.shape = place.pool_layer, config.shape
        self.heads, self.kv_heads, self.head_dim = config.shape
        self.reads_others = config.kv_from is not None  # keys and values, and makes none
        self.gated, self._softplus = config.gated, config.softplus
        self.clip = config.clip
        assert not self.clip or not self.gated
        self.values_are_keys = config.values_are_keys
        k_rows = self.kv_heads * self.head_dim
        self._values, self._value_scale = config.values, config.value_scale
        v_rows = 0 if config.values_are_keys else self.kv_heads * config.value_dim
        self._kv_rows = 0 if self.reads_others else k_rows + v_rows  # of `qkv`
        assert not config.values or not (config.fused or config.gated or self.reads_others)
        q_rows = self.heads * self.head_dim
        self._gates = q_rows if config.gated else 0  # the first outputs
        self.qkv = place.linear(self._gates + q_rows + self._kv_rows, bias=config.qkv_bias)
        wide, eps = layer.norm.dtype(dtype), layer.norm.eps
        has_k_norm = config.qk_norm and not self.reads_others
        q_size, k_size = (q_rows, k_rows) if config.whole_norms else (self.head_dim, self.head_dim)
        self._normed = config.normed
        if config.normed:
            q_size, k_size = (columns.whole for columns, _ in config.normed)
        norm = BareNorm if config.bare_norms else RMSNorm
        self.q_norm = norm(q_size, eps, wide, device) if config.qk_norm else None
        self.k_norm = norm(k_size, eps, wide, device) if has_k_norm else None
        self.whole_norms, self._ranks = config.whole_norms, layer.ranks
        self.v_norm = config.v_norm and not self.reads_others
        assert not (self.whole_norms and (self.reads_others or self.gated))
        assert not (config.gate_rows and config.qkv_bias)  # nobody would fill those of gates
        assert not self.v_norm or (has_k_norm and not self.whole_norms)
        assert not self.values_are_keys or self.v_norm or self.reads_others
        self.o = place.out("o", self.heads * config.value_dim, config.o_bias)
        # In float32: they join scores, which are.
        self.sinks = nn.Parameter(torch.zeros(self.heads, dtype=torch.float32, device=device)) if config.sinks else None
        self._window, self._chunk, self._scalar, self._cap = config.window, config.chunk, config.scalar, config.cap
        self._own_window = config.window
        self.scaled_queries, self.norms_after = config.scaled_queries, config.norms_after
        assert not self.norms_after or not (self.whole_norms or self.v_norm or self.reads_others)
        self.index: BlockIndexer | None = None
        if config.index is not None:
            assert not (self.reads_others or self.whole_norms or self.scaled_queries)
            self.index, self.needs_chunks = BlockIndexer(config.index, place), True  # which picks read
            self.before_attention = 2

    @property
    def padded(self) -> bool:
        """Returns whether values are shorter than keys."""
        return self._values > 0

    @property
    def kind(self) -> AttentionKind:
        """Returns what the injected attention is told of this layer."""
        return AttentionKind(
            self._window, self.sinks, self._scalar, self._cap, reads=self.reads_others, chunk=self._chunk
        )

    @property
    def takes_window(self) -> bool:
        """Returns whether `see_at_most` may be called."""
        return not (self._chunk or self.index is not None or self.reads_others)

    def see_at_most(self, positions: int | None) -> None:
        """Lets queries see no further back than so many positions, their own among them; None: than the config says."""
        assert self.takes_window
        own = self._own_window
        self._window = own if positions is None else min(own or positions, positions)

    def linears(self) -> list[Linear]:
        return [self.qkv, *([] if self.index is None else self.index.linears()), self.o]

    def forward(
        self, x: Tensor | Fp8Rows, cos: Tensor, sin: Tensor, attend: Attend, residual: Tensor | None = None
    ) -> Tensor:
        made = self._with_values(self.qkv(x))
        if self.whole_norms:
            made = self._with_whole_norms(made)
        qkv = (made[:, self._gates :] if self.gated else made).view(
            made.shape[0], -1, self.head_dim
        )  # [M, heads + 2 * kv_heads, head_dim]
        out = self._attend(qkv, cos, sin, attend) if self.index is None else self._picked(x, qkv, cos, sin, attend)
        if self._values:
            out = out.view(len(out), -1, self.head_dim)[..., : self._values].flatten(1)
        if not self.gated:
            return self.o(out, residual)
        gate = self.ops.gate_fp8 if self.o.takes_fp8 else self.ops.gate
        return self.o(gate(made[:, : self._gates], out, self._softplus), residual)

    def write(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> None:
        """Writes what `forward` leaves for later queries: keys and values of x [M, in_size]."""
        if self.reads_others:
            return
        if self.index is not None:
            self.index.write(self.pool_layer, x, cos, sin, attend)
        kv = self._with_values(self.qkv.last(x, self._kv_rows))
        if self.whole_norms:
            kv = self._with_whole_norms(kv[:, -2 * self.kv_heads * self.head_dim :])
        self.write_heads(kv.view(x.shape[0], -1, self.head_dim), cos, sin, attend)

    def write_heads(self, qkv: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> None:
        """Writes what `qkv` makes, [M, heads + 2 * kv_heads, head_dim], where queries may be missing."""
        norms, cos, sin = self.head_norms(), cos[:, :1], sin[:, :1]
        if (norms is None or attend.norms_heads) and attend.fused_write(self.pool_layer, qkv, cos, sin, norms):
            return
        k, v = qkv[:, -2 * self.kv_heads :].split(self.kv_heads, 1)
        k_norm = None if self.whole_norms else self.k_norm
        attend.write(self.pool_layer, self._turned(k, cos, sin, k_norm), self._normed_values(v))

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm

    def _with_values(self, made: Tensor) -> Tensor:
        """made [M, ..] by `qkv` -> the same within the limit, with values behind keys, where they are the keys, and as
        long as keys."""
        made = made.clamp(-self.clip, self.clip) if self.clip else made
        if self._values:
            rest, values = made.split((made.shape[1] - self.kv_heads * self._values, self.kv_heads * self._values), 1)
            scaled = values.view(len(made), -1, self._values) * self._value_scale
            padded = F.pad(scaled, (0, self.head_dim - self._values)).flatten(1)
            return self.ops.concat_columns(rest, padded)
        if not self.values_are_keys or self.reads_others:
            return made
        return self.ops.concat_columns(made, made[:, -self._kv_rows :])

    def _with_whole_norms(self, made: Tensor) -> Tensor:
        """made [M, ..], queries, keys and values of all heads, queries perhaps missing -> the same with both normed."""
        kv_rows, copied = self.kv_heads * self.head_dim, self.ops.concat_columns  # kernels read rows without gaps
        q, k, v = made[:, : -2 * kv_rows], copied(made[:, -2 * kv_rows : -kv_rows]), made[:, -kv_rows:]
        assert self.q_norm is not None and self.k_norm is not None
        both = [(self.k_norm, k)] if q.shape[1] == 0 else [(self.q_norm, copied(q)), (self.k_norm, k)]
        if self._ranks.size == 1:
            return self.ops.concat_columns(*(norm(x) for norm, x in both), v)
        if self._normed:
            own = []
            for (norm, x), (columns, first) in zip(both, self._normed[-len(both) :], strict=True):
                own.append(norm(joined(self._ranks, x, columns, self.ops))[:, first : first + x.shape[1]])
            return copied(*own, v)
        squares = torch.cat([row_squares(self.ops, x) for _, x in both], 1)  # [M, 1 or 2]
        sums = self.ops.sum_parts(self._ranks.gather(squares), None, None)
        normed = []
        for (norm, x), total in zip(both, sums.split(1, 1), strict=True):
            # Heads that several ranks have count as often in the sum as in what it is divided by.
            mean = total / (self._ranks.size * x.shape[1])
            scaled, weight = x.float() / (mean + norm.eps).sqrt(), norm.weight
            narrow = weight.dtype == x.dtype  # wide weights are multiplied before anything is rounded
            normed.append(scaled.to(x.dtype) * weight if narrow else (scaled * weight).to(x.dtype))
        return self.ops.concat_columns(*normed, v)

    def head_norms(self) -> HeadNorms | None:
        """Returns the norms of heads of queries and keys, where they have any."""
        if self.q_norm is None or self.whole_norms:
            return None
        k_norm = self.q_norm if self.k_norm is None else self.k_norm  # there are no keys where there is no norm of them
        assert self.q_norm.eps == k_norm.eps
        return HeadNorms(self.q_norm.weight, k_norm.weight, self.q_norm.eps, self.v_norm, self.norms_after)

    def _normed_values(self, v: Tensor) -> Tensor:
        """v [M, kv_heads, head_dim] -> the same"""
        if not self.v_norm or self.k_norm is None:
            return v
        return self.ops.rms_norm(v, torch.ones_like(self.k_norm.weight), self.k_norm.eps)

    def _attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """qkv [M, heads + 2 * kv_heads, head_dim], or the queries alone of a layer that reads what another one wrote;
        may be overwritten -> [M, heads * head_dim]"""
        norms = self.head_norms()
        if (norms is None or attend.norms_heads) and cos.shape[1] == 1:
            out = attend.fused(self.pool_layer, qkv, cos, sin, norms, self.kind)
            if out is not None:
                return out
        q_norm, k_norm = (None, None) if self.whole_norms else (self.q_norm, self.k_norm)
        if cos.shape[1] > 1:
            return self._attend_scaled(qkv, cos, sin, attend)
        if self.reads_others:
            return attend.read(self.pool_layer, self._turned(qkv, cos, sin, q_norm), self.kind)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)
        q, k = self._turned(q, cos, sin, q_norm), self._turned(k, cos, sin, k_norm)
        return attend(self.pool_layer, q, k, self._normed_values(v), self.kind)

    def _picked(self, x: Tensor | Fp8Rows, qkv: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Does what `_attend` does of what the indexer picks, x [M, in_size]. Keys are made in one way, whether there
        is something to pick or not: they have the same bits then."""
        assert self.index is not None and isinstance(x, Tensor)
        self.index.write(self.pool_layer, x, cos, sin, attend)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)
        q, k = self._turned(q, cos, sin, self.q_norm), self._turned(k, cos, sin, self.k_norm)
        if not attend.sees_at_most(self.index.config.width):
            self.index.pick(self.pool_layer, x, cos, sin, attend)
            attend = attend.picked
        return attend(self.pool_layer, q, k, self._normed_values(v), self.kind)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor, norm: RMSNorm | None) -> Tensor:
        """x [M, some heads, head_dim] -> the same, turned, and before or after that normed"""
        if norm is None:
            return rotate(x, cos, sin)
        return norm(rotate(x, cos, sin)) if self.norms_after else rotate(norm(x), cos, sin)

    def _attend_scaled(self, qkv: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Attends as `_attend`, where queries are turned by other factors than keys: cos, sin [M, 2, head_dim]."""
        assert self.q_norm is None and not self.reads_others
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)
        (k_cos, q_cos), (k_sin, q_sin) = cos.split(1, 1), sin.split(1, 1)
        return attend(self.pool_layer, rotate(q, q_cos, q_sin), rotate(k, k_cos, k_sin), v, self.kind)
