"""The one decoder, of all families: these differ by the values of a `ModelConfig`.

Queries are a flat list of M tokens. Which tokens see which is not known here: attention is the injected `attend`, so
serving binds the paged pool, and a test or a trainer a dense mask.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.layers.adapters import AdaptedGroups, AdaptedWeight
from draftwing.layers.altup import AltUpLast, AltUpLayer, AltUpStart, Laurel
from draftwing.layers.attention import Attention
from draftwing.layers.config import LayerConfig, Mixer
from draftwing.layers.decoder_layer import DecoderLayer, whole_layers
from draftwing.layers.embedding import Embedding, LayerEnd, PerLayerEmbedding
from draftwing.layers.encoder import Encoder
from draftwing.layers.experts import ExpertLinear, ExpertMLP
from draftwing.layers.latent import HeadLinear, LatentAttention
from draftwing.layers.linear import Linear, vocab_parallel
from draftwing.layers.linear_ops.base import PackMode
from draftwing.layers.linear_ops.groups import dequantise_beside_attention
from draftwing.layers.linear_ops.mapped import Mapped
from draftwing.layers.norm import ByOps, RMSNorm, norm_of
from draftwing.layers.part_configs import AltUpConfig
from draftwing.layers.rope import Rope
from draftwing.layers.streams import StreamedLayer, Streams
from draftwing.models.config import ModelConfig, pool_layers
from draftwing.models.quantised.read import KVScales
from draftwing.models.towers.base import Tower
from draftwing.ops.adapters.spec import AdapterWeights, QueryAdapters
from draftwing.ops.attention.attend import Attend
from draftwing.ops.attention.batch import HeadShape, ImageRows
from draftwing.ops.fp8.spec import Fp8Rows
from draftwing.ops.table import PLAIN, LayerOps
from draftwing.ops.whole_layers.contract import WholeLayers
from draftwing.parallel.ranks import ALONE, Ranks

# Matrices that are several in one, whose slots of adapters take much memory: of experts, and latents' `kv_b_proj`.
EXPERTS, HEADS = WIDE = "experts", "kv_b_proj"
SHARED = "shared experts"  # which devices may have among the others


class Narrowed(NamedTuple):
    """Queries whose hidden states are wanted, of a forward of more, and the attention of these alone."""

    queries: Tensor  # [F] int64
    attend: Attend


class DecoderModel(nn.Module):
    """Embedding, layers, final norm and head; an ordinary trainable module as long as it is not packed."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str, ranks: Ranks = ALONE
    ) -> None:
        """Weights are allocated and not filled; on device "meta" they take no memory (the loader's way). ranks: over
        which the model is spread; it is to be packed then before it runs. Raises ConfigError for too many."""
        super().__init__()
        device = torch.device(device)
        self.config, self.ranks = config, ranks
        layers, pool_layer = config.spread(ranks), pool_layers(config.layers)
        self.embed = Embedding(_vocab_matrix(config, dtype, device, ranks))
        self.per_layer = _per_layer(config, dtype, device, ranks.size) if config.per_layer else None
        self.layers = nn.ModuleList(
            _kind(layer)(layer, at, dtype, device) for layer, at in zip(layers, pool_layer, strict=True)
        )
        self.start = _start(config, dtype, device)
        self.positions = _positions(config, dtype, device) if config.learned_positions else None
        self._position_rows: Tensor | None = None  # the same, once packed
        self.embed_norm = norm_of(config.norm, config.hidden_size, dtype, device) if config.normed_embeddings else None
        self.norm = _last_norm(config, dtype, device)
        self.encoder = None if config.encoder is None else Encoder(config.encoder, config.hidden_size, dtype, device)
        self.lm_head = self.embed.table if config.tie_embeddings else _vocab_matrix(config, dtype, device, ranks)
        if config.head_bias:
            self.lm_head.bias = nn.Parameter(torch.empty(config.vocab_size, dtype=dtype, device=device), False)
        self.kv_scales = KVScales()
        # Which layer writes each pool layer, and what it keeps there of this rank.
        self.pool_owners = [pool_layer.index(at) for at in range(len({*pool_layer} - {None}))]
        self.keepers = max(self.pool_owners, default=-1) + 1  # layers behind so many read what earlier ones kept
        self.kv_layers = [spec for i in self.pool_owners if (spec := layers[i].keeps()) is not None]
        # A table for each way in which layers turn their heads; one at least, which has the model's dtype.
        rotates = [layer.mixer.rotates for layer in layers]
        kinds = list(dict.fromkeys(kind for kind in rotates if kind is not None)) or [(0, 2)]
        self.ropes = nn.ModuleList(Rope(config.ropes[rope], head_dim, dtype) for rope, head_dim in kinds)
        self._rope_of = [0 if kind is None else kinds.index(kind) for kind in rotates]  # of each layer
        self._ops = PLAIN
        self._queries = QueryAdapters()
        # Rounded as the embedding is.
        self.embed_scale = torch.tensor(config.embed_scale, dtype=dtype).item()
        self._scatter: Tensor | None = None  # of its experts
        self.inexact: list[str] = []  # once packed: weights whose rows may have other bits in another batch, and why
        self.tower: Tower | None = None  # what reads images; no part of the decoder
        self._suppressed: Tensor | None = None  # tokens that are never drawn, int64
        self._norms: list[
            RMSNorm
        ] = []  # of all layers and the last, where layers give results under the next norm, too
        self._whole: dict[tuple[int, ...], WholeLayers | None] = {}  # by the auxiliary hidden states that are wanted
        if ranks.invariant and ranks.size > 1:
            _note_whole(self, DecoderModel(config, dtype, "meta"))

    @property
    def ops(self) -> LayerOps:
        """Returns what `pack` was given."""
        return self._ops

    @property
    def dtype(self) -> torch.dtype:
        """Returns the type of activations."""
        return cast(Rope, self.ropes[0]).table.dtype

    @property
    def final_aux_layer(self) -> int:
        return self.config.num_layers + 1

    @property
    def stream_layers(self) -> tuple[int, ...]:
        """Returns what the residual streams before the last norm are called among `aux_layers`; nothing where there is
        but one."""
        count = 0 if self.config.streams is None else self.config.streams.count
        return tuple(range(self.final_aux_layer + 1, self.final_aux_layer + 1 + count))

    def head_shapes(self) -> list[HeadShape]:
        """Returns the different shapes of its attention, of this rank."""
        mixers = [part for part in self.layers.modules() if isinstance(part, Attention | LatentAttention)]
        return list(dict.fromkeys(mixer.shape for mixer in mixers))

    @property
    def needs_chunks(self) -> bool:
        """Returns whether some layer does, see `Mixer`."""
        return any(layer.mixer.needs_chunks for layer in self.layers if isinstance(layer, DecoderLayer))

    def set_max_positions(self, positions: int, context: int = 0) -> None:
        """Makes the rotary tables; every position of a later `forward` must be below `positions`. context: that texts
        have at most, 0: so many positions."""
        device, ids = self.norm.weight.device, self.config.suppressed
        for rope in self.ropes:
            cast(Rope, rope).make(positions, self.dtype, device, context)
        self._suppressed = torch.tensor(ids, device=device) if ids else None
        if self.positions is not None:  # drafts at the end of a context may stand behind the last
            missing = max(0, positions - len(self.positions))
            self.positions.data = F.pad(self.positions.data, (0, 0, 0, missing))
            self._position_rows = None if self._position_rows is None else self.positions.data

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        aux_layers: Sequence[int] = (),
        narrowed: Narrowed | None = None,
        images: ImageRows | None = None,
        adapted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """ids, positions [M] int64, positions perhaps in three axes, [3, M] -> hidden states after the final norm [M,
        hidden], and the auxiliary hidden states.

        aux_layers: layers whose input (the residual stream before them, `num_layers` for that before the final norm) is
        wanted, `final_aux_layer` for what comes after the final norm, and `stream_layers`; they come concatenated in
        the order given, [M, len(aux_layers) * hidden], or None when there are none.

        narrowed: without auxiliary hidden states; those of other queries are zeros, for layers from `keepers` on, which
        leave nothing to later ones, do not see them.

        images: rows of features in place of embeddings.  adapted: slots of the queries' adapters [M] int64, see
        `QueryAdapters`.
        """
        assert narrowed is None or not aux_layers
        if adapted is None:
            return self._run(ids, positions, attend, aux_layers, narrowed, images)
        with self._queries.of(adapted, self._ops.adapter_plan(adapted)):
            return self._run(ids, positions, attend, aux_layers, narrowed, images)

    def _run(
        self, ids: Tensor, positions: Tensor, attend: Attend, aux_layers: Sequence[int], narrowed: Narrowed | None,
        images: ImageRows | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        # Attention may read its batch ahead of what runs before it (`AttnBackend.bind`, inputs_ready). That is right as
        # long as this, the first operation, is one of torch's: no kernel that may begin early can come first.
        turns: list[tuple[Tensor, Tensor]] = [rope(positions, self._ops) for rope in self.ropes]
        deep = 0 if images is None else images.deep
        whole = self._whole_layers(aux_layers) if not deep else None
        x = self.embedded(ids, images)
        if self.positions is not None:
            table = self.positions if self._position_rows is None else self._position_rows
            x = self._ops.add_scaled(x, self._ops.take_rows(table, positions), 1.0)
        if self.encoder is not None:
            x = self.encoder.embedded(x, ids, positions, attend)
        outs = None if whole is None else whole(x, None, *turns[0], attend)
        if whole is not None and outs is not None:
            x = self.norm(outs[whole.last])
            return x, self._joined(aux_layers, x, whole.joined(outs))
        count = 1 if self.config.streams is None else self.config.streams.count
        embeddings = None
        if self.per_layer is not None:
            embeddings = self.per_layer(self._blanked(ids, images), x, self._ops)  # [M, layers, size]
        x = self.start(x) if self.start is not None else x if count == 1 else x.repeat(1, count)
        streams = {0: x} if 0 in aux_layers else {}
        normed = self._norms[0](x) if self._norms else None
        under: Tensor | Fp8Rows | None = None  # x under the norm that comes next
        for i, (layer, rope) in enumerate(zip(self.layers, self._rope_of, strict=True), 1):
            if narrowed is not None and i == self.keepers + 1:
                at, attend = narrowed
                x, turns = x[at], [(cos[at], sin[at]) for cos, sin in turns]
                embeddings, normed = (None if every is None else every[at] for every in (embeddings, normed))
                self._queries.narrow(at)
                if not len(at):
                    break
            cos, sin = turns[rope]
            if isinstance(layer, StreamedLayer) and layer.ngram is not None:
                x = layer.ngram(x, ids, attend)
            if normed is None:
                x = layer(x, cos, sin, attend) if under is None else layer(x, cos, sin, attend, under)
                under = cast(DecoderLayer, layer).take_normed()
                if narrowed is not None or i <= deep:  # rows are left out or changed before the next norm
                    under = None
            else:
                x, normed = cast(DecoderLayer, layer).under(self._norms[i], normed, x, cos, sin, attend)
            if (end := cast(DecoderLayer, layer).end) is not None:
                x = end(x, None if embeddings is None else embeddings[:, i - 1])
            if images is not None and i <= deep:
                images.add(x, i)
                normed = None if normed is None else self._norms[i](x)
            if i in aux_layers:
                streams[i] = x
        normed = cast(Tensor | None, under) if normed is None else normed
        last, x = x, self.norm(x) if normed is None else normed
        if self.encoder is not None:
            return self.encoder.pooled(x, attend), None
        if narrowed is not None:
            return x.new_zeros(len(ids), x.shape[1]).index_copy_(0, narrowed.queries, x), None
        streams = {i: one if count == 1 else one.unflatten(1, (count, -1)).mean(1) for i, one in streams.items()}
        streams[self.final_aux_layer] = x
        streams |= dict(zip(self.stream_layers, last.chunk(count, 1), strict=False))
        if len(aux_layers) < 2:
            return x, streams[aux_layers[0]] if aux_layers else None
        return x, self._ops.concat_columns(*(streams[i] for i in aux_layers))

    def embedded(self, ids: Tensor, images: ImageRows | None = None) -> Tensor:
        """ids [M] -> [M, hidden]: embeddings, times the factor or under the norm that the model has for them, or rows
        of features, which have none."""
        x = self.embed(ids)
        x = x if self.embed_scale == 1 else self._ops.add_scaled(x, None, self.embed_scale)
        x = x if self.embed_norm is None else self.embed_norm(x)
        if images is not None:
            images.put(x)
        return x

    def _blanked(self, ids: Tensor, images: ImageRows | None) -> Tensor:
        """ids [M] -> the same with `TowerConfig.blank` where there are images, for embeddings by layer."""
        if images is None or self.config.tower is None:
            return ids
        return images.blanked(ids, self.config.tower.blank)

    def take_adapters(self, weights: Mapping[str, AdapterWeights]) -> None:
        """Lets adapters add to products from now on, in forwards that say which. weights: of `Linear`s by name, all of
        which `adaptable` has."""
        linears = self.adaptable(WIDE)
        for name, own in weights.items():
            linear = linears[name]
            if isinstance(linear, ExpertLinear):
                linear.grouped = AdaptedGroups(self._queries, own, self._ops, linear.groups)
                continue
            linear.adapted = AdaptedWeight(self._queries, own, self._ops, linear.op.sums_over)
        for layer in self.layers:
            if isinstance(layer, DecoderLayer):
                layer.take_adapters(self._queries)
        self._whole.clear()

    def adaptable(self, wide: Collection[str] = ()) -> dict[str, Linear]:
        """Returns the matrices by name that may have adapters: of mixers, MLPs and what is around them, and of `WIDE`
        those asked for."""
        layers = [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
        found = {id(one) for layer in layers for one in layer.linears()}
        for part in self.modules():
            if isinstance(part, ExpertMLP) and part.shared is not None:
                found |= {id(one) for one in part.shared.linears()}
            if isinstance(part, ExpertMLP | LayerEnd | Laurel | PerLayerEmbedding):
                found |= {id(one) for one in part.children() if type(one) is Linear}
            if isinstance(part, ExpertLinear) and (HEADS if isinstance(part, HeadLinear) else EXPERTS) in wide:
                found.add(id(part))
        return {name: one for name, one in self.named_modules() if isinstance(one, Linear) and id(one) in found}

    def _whole_layers(self, aux_layers: Sequence[int]) -> WholeLayers | None:
        """Returns all layers in one call, where the auxiliary hidden states are outputs of them, and perhaps before or
        behind these what comes after the final norm."""
        kept, final = tuple(aux_layers), self.final_aux_layer
        kept = kept[1:] if kept[:1] == (final,) else kept[:-1] if kept[-1:] == (final,) else kept
        if kept not in self._whole:
            weights = [layer.weights() for layer in self.layers if isinstance(layer, DecoderLayer)]
            # The call has one rotary embedding.
            self._whole[kept] = whole_layers(self._ops, weights, kept) if len(self.ropes) == 1 else None
        return self._whole[kept]

    def _joined(self, aux_layers: Sequence[int], final: Tensor, kept: Tensor | None) -> Tensor | None:
        """Returns the auxiliary hidden states of `_whole_layers`. final: what comes after the final norm; kept: those
        that are outputs of layers, side by side."""
        names = [layer == self.final_aux_layer for layer in (*aux_layers[:1], *aux_layers[-1:])]
        if kept is None:
            return final if any(names) else None
        parts = [final] * names[0] + [kept] + [final] * names[1]
        return parts[0] if len(parts) == 1 else self._ops.concat_columns(*parts)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, hidden] after the final norm -> [M, vocab] in the model's dtype."""
        logits = self._capped(self.lm_head(hidden))
        if self._suppressed is None:
            return logits
        fill = logits.index_fill if logits.requires_grad else logits.index_fill_
        return fill(-1, self._suppressed, torch.finfo(logits.dtype).min)  # finite, for clients may ask for it

    def exact_logits(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """hidden [..., hidden] after the final norm, ids [..., K] -> the logits of those ids, [..., K] float32.

        A half-precision GEMM rounds logits to 8 or 11 bits, 0.125 at a logit of 25 in bfloat16: near ties come out
        as ties or reversed. A few candidates computed again from the same weights, summed in float32, decide them.
        """
        logits = self._capped(self.lm_head.exact_logits(hidden, ids))
        if self._suppressed is None:
            return logits
        never = (ids.unsqueeze(-1) == self._suppressed).any(-1)
        return logits.masked_fill(never, torch.finfo(self.dtype).min)  # as in `logits`

    def _capped(self, logits: Tensor) -> Tensor:
        cap, scale = self.config.soft_cap, self.config.logit_scale
        if scale != 1:
            logits = self._ops.add_scaled(logits.view(-1, logits.shape[-1]), None, scale).view(logits.shape)
        return self._ops.soft_cap(logits, cap) if cap else logits

    @property
    def rescored_by(self) -> Tensor | None:
        """Returns the head's weight [vocab, hidden] where its products are `exact_logits`, and it lies as such."""
        config = self.config
        changes = config.soft_cap or config.logit_scale != 1 or config.suppressed or config.head_bias
        return None if changes else self.lm_head.op.stored

    def weight_bytes(self) -> dict[str, int]:
        """Returns bytes of the matrices that a forward of one token with logits reads, by type: `bfloat16`, `int4`,
        `Q8_0`, ... Of experts, as many as a token chooses; where ranks have some of them whole, on average."""
        sizes: Counter[str] = Counter()
        dense = self.dtype
        for part in self.modules():  # a tied head once
            if not isinstance(part, Linear) or (part is self.embed.table and part is not self.lm_head):
                continue
            if isinstance(part.op, Mapped):  # single rows
                continue
            values = part.out_features * part.in_features
            found = part.op.sizes or Counter({str(dense).removeprefix("torch."): values * dense.itemsize})
            experts = self.config.experts
            if isinstance(part, ExpertLinear) and not part.takes_all and experts is not None:
                read = experts.routing.top_k * (part.count - part.shared) / experts.count + part.shared
                found = Counter({k: int(size * read / part.count) for k, size in found.items()})
            sizes += found
        return dict(sizes)

    def merged(self) -> dict[str, tuple[str, int]]:
        """Returns as `Mixer.merged` of all of them, by the names of modules."""
        return {
            f"{name}.{own}": (f"{name}.{into}", first)
            for name, part in self.named_modules()
            if isinstance(part, Mixer)
            for own, (into, first) in part.merged.items()
        }

    def pack(self, ops: LayerOps, deterministic: bool = False, strict: bool = True, shared_apart: bool = False) -> None:
        """Lets every layer prepare for inference, weights and kernels; the model is not trainable afterwards.

        ops: of the device that the parameters are on.  deterministic, shared_apart: as `PackMode` has them.  strict:
        raises ConfigError for a weight that kernels of that mode do not take; else `inexact` says which they are.
        """
        self._ops = ops
        self._position_rows = None if self.positions is None else self.positions.data
        mode = PackMode(deterministic, shared_apart=shared_apart)
        mode = mode if strict else mode._replace(refuse=self.inexact.append)
        pack_layers(self, ops, mode, keep=self.lm_head)  # `exact_logits` reads its rows
        self._whole.clear()
        layers = [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
        dequantise_beside_attention([parts for layer in layers if (parts := layer.around_attention())[0]])
        kinds = [(layer.out_norms, layer.norm.centred) for layer in self.config.layers]
        if self.config.experts is not None and ops.mixes_under_norms and not any(map(any, kinds)):
            first = [layer.attn_norm or layer.mlp_norm for layer in layers]  # of one that is an MLP alone the second
            if self.config.streams is None and all(first):
                self._norms = [norm for norm in (*first, self.norm) if isinstance(norm, RMSNorm)]
        self._lead_sums_to_norms(layers)
        if self.config.experts is not None:
            self._scatter = torch.zeros(1, dtype=torch.int32, device=self.norm.weight.device)
            for part in self.modules():
                if isinstance(part, ExpertMLP):
                    part.scatter = self._scatter

    def _lead_sums_to_norms(self, layers: Sequence[DecoderLayer]) -> None:
        """Has sums over ranks that layers end with made together with the norms that come next."""
        if not isinstance(self.norm, RMSNorm) or self.config.norm.centred:
            return
        following: list[tuple[RMSNorm | None, bool]]
        if self._norms:  # which layers hand on as they are
            following = [(norm, False) for norm in self._norms[1:]]
        else:
            following = [*(layer.first_norm for layer in layers[1:]), (self.norm, False)]
        for layer, (norm, quantises) in zip(layers, following, strict=True):
            layer.lead_to(norm, quantises)

    def scatter_routes(self, on: bool) -> None:
        """Sends tokens to experts at random from now on, or not: what they give is worth nothing then, and takes the
        time of tokens that have nothing in common. For a packed model; graphs know of it, too."""
        if self._scatter is not None:
            self._scatter.fill_(int(on))


def _per_layer(config: ModelConfig, dtype: torch.dtype, device: torch.device, ranks: int) -> PerLayerEmbedding:
    sizes = config.hidden_size, config.per_layer, config.num_layers, config.per_layer_rows
    made = PerLayerEmbedding(*sizes, config.norm, dtype, device, config.weight_format, ranks)
    made.some = config.per_layer_rows < config.vocab_size
    return made


def _kind(layer: LayerConfig) -> type[DecoderLayer]:
    return (
        DecoderLayer
        if layer.streams is None
        else AltUpLayer
        if isinstance(layer.streams, AltUpConfig)
        else StreamedLayer
    )


def _start(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> AltUpStart | None:
    """Returns what makes streams of embeddings; None where they are these, or there is one."""
    if not isinstance(config.streams, AltUpConfig):
        return None
    return AltUpStart(config.streams.count, config.hidden_size, dtype, device, config.weight_format)


def _positions(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(config.learned_positions, config.hidden_size, dtype=dtype, device=device))


def _last_norm(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> RMSNorm | Streams | AltUpLast:
    """Returns what stands before the head: of several streams what makes one of them."""
    hidden, norm = config.hidden_size, config.norm
    if config.streams is None:
        return norm_of(norm, hidden, dtype, device)
    if isinstance(config.streams, AltUpConfig):
        return AltUpLast(config.streams.count, hidden, norm, dtype, device, config.weight_format)
    return Streams(config.streams, hidden, norm, dtype, device, config.weight_format, adds=False)


def _vocab_matrix(config: ModelConfig, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> Linear:
    rows = ranks.share(config.vocab_size).size
    linear = Linear(config.hidden_size, rows, False, dtype, device, config.vocab_format)
    return vocab_parallel(linear, ranks, config.vocab_size)


def _note_whole(share: DecoderModel, whole: DecoderModel) -> None:
    """Has matrices know how many outputs those of all ranks have together."""
    both = zip(share.modules(), whole.modules(), strict=True)
    for one, other in both:
        if isinstance(one, Linear) and isinstance(other, Linear):
            one.whole_features = other.out_features


def use_between(module: nn.Module, ops: LayerOps) -> None:
    """Lets `ops` do norms and activations of a model or head that is not packed. Weights stay as they are, and may be
    trained where what `ops` does is differentiable."""
    for part in module.modules():
        if isinstance(part, Linear | DecoderLayer):
            part.use(ops)
        elif isinstance(part, RMSNorm | ByOps):
            part.pack(ops)


def pack_layers(module: nn.Module, ops: LayerOps, mode: PackMode, keep: Linear | None = None) -> None:
    """Packs all layers inside a model or head, parts before what is made of them. keep: whose weight is kept."""
    for part in [part for part in module.modules() if isinstance(part, ExpertMLP | Mixer)]:
        if isinstance(part, Mixer) or not mode.shared_apart:
            part.merge(ops)
    # What has two names, a tied head, is called by the last.
    names = {part: name for name, part in module.named_modules(remove_duplicate=False)}
    tables = {part.table for part in names if isinstance(part, Embedding)}
    mixtures, layers = [], []
    for part, name in names.items():
        if isinstance(part, Linear):
            rows_only = part in tables and part is not keep
            part.pack(ops, mode._replace(name=name, keep_weight=part is keep, rows_only=rows_only))
        elif isinstance(part, RMSNorm | Embedding | ByOps):
            part.pack(ops)
        elif isinstance(part, ExpertMLP):
            mixtures.append(part)
        elif isinstance(part, DecoderLayer):
            layers.append(part)
    for mixture in mixtures:
        mixture.pack(ops, mode)
    for layer in layers:
        layer.pack(ops)
