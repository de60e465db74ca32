"""Which rows of which of our parameters each Hugging Face tensor fills: the one table for loading and saving."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn

from draftwing.layers.altup import stored_altup, stored_around
from draftwing.layers.config import LayerConfig, StoredMatrix, StoredVector
from draftwing.layers.encoder import EncoderConfig
from draftwing.layers.linear_ops.base import ParamSlice, WeightFormat
from draftwing.layers.linear_ops.dense import DENSE, blocks_or_dense
from draftwing.layers.mlp import XIELU
from draftwing.layers.ngram import stored_ngram
from draftwing.layers.part_configs import AltUpConfig, ExpertConfig, NgramConfig
from draftwing.layers.streams import stored_streams
from draftwing.models.config import ModelConfig
from draftwing.models.family import own_name
from draftwing.parallel.cut import Cut, Order, ordered
from draftwing.parallel.ranks import ALONE, Ranks, Share
from draftwing.parallel.shares import width_share

# Multi-token prediction layers that are stored with the model; they belong to the drafter.
MTP_LAYERS = "model.mtp_layers."  # of which there may be several
MTP = "model.mtp."  # of the one that reads the embedding first
MTP_PREFIXES = MTP_LAYERS, MTP
# Of the tensors that models for images and sound read these with.
OTHER_SENSES = (
    "model.visual.", "model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.",
    "model.vision_embedder.", "model.multi_modal_projector.", "model.mm_projector.", "model.vision_model.",
    "model.connector.", "model.mlp1.", "model.vision_tokenizer.", "model.audio_tokenizer.",
    "model.vit_large_projector.",
)  # fmt: skip
# Of models that number a prediction layer behind their own: what it has below `model.layers.N` besides a layer, and
# below `model.mtp`, as this package names it.
_NEXTN_NAMES = {
    "eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head.norm": "norm",
    "final_layernorm": "norm",
}  # fmt: skip
PER_LAYER = "model.embed_tokens_per_layer"  # a table that stays in its file
POSITIONS = "model.embed_positions"
NGRAM_TABLE = "model.layers.{}.ple.ple_embedding.ngram_embedding"  # the same, of a layer
_NEXTN_COPIES = "embed_tokens", "shared_head.head"  # of the model's
_NO_FACTORS: Mapping[str, float] = {}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(\w+)")


def checkpoint_names(config: ModelConfig, ranks: Ranks = ALONE) -> dict[str, ParamSlice]:
    """Hugging Face tensor name -> slice, complete for this config. A tied head has no entry of its own. ranks: over
    which the model is spread."""
    vocab, form = ranks.share(config.vocab_size), config.vocab_format
    final_norm = config.family.final_norm.format(config.num_layers)
    some = ordered(0, [vocab[:2]], config.stored_rows) if config.stored_rows else None
    table = named(form, "model.embed_tokens", "embed.table", 0, vocab.size, Cut(0, vocab), some)
    if isinstance(config.streams, AltUpConfig):
        around = stored_around(config.streams, config.hidden_size, final_norm)
        table |= entries(config, config.layers[0], around, ranks=ranks)
    elif config.streams is None and not config.norm.bare:
        table[f"{final_norm}.weight"] = ParamSlice("norm.weight", 0, config.hidden_size, added=config.norm.offset)
    elif config.streams is not None:
        last = stored_streams(config.streams, config.hidden_size, final_norm, "norm", adds=False)
        table |= entries(config, config.layers[0], last, ranks=ranks)
    if config.norm.bias:
        table[f"{final_norm}.bias"] = ParamSlice("norm.bias", 0, config.hidden_size)
    if config.per_layer:
        rows, inner = config.num_layers * config.per_layer, "per_layer.norm.weight"
        table |= named(DENSE, PER_LAYER, "per_layer.embed.table", 0, config.per_layer_rows)
        table |= named(config.weight_format, "model.per_layer_model_projection", "per_layer.project", 0, rows)
        table["model.per_layer_projection_norm.weight"] = ParamSlice(inner, 0, config.per_layer)
    if not config.tie_embeddings:
        table |= named(form, "lm_head", "lm_head", 0, vocab.size, Cut(0, vocab))
    if config.head_bias:
        table["lm_head.bias"] = ParamSlice("lm_head.bias", 0, config.vocab_size)
    if config.learned_positions:
        table[f"{POSITIONS}.weight"] = ParamSlice("positions", 0, config.learned_positions)
    if config.encoder is not None:
        table |= _beside_layers(config.encoder, config.hidden_size)
    for i in range(config.num_layers):
        table |= layer_names(config, f"model.layers.{i}", f"layers.{i}", ranks=ranks, index=i)
    return table


def _beside_layers(encoder: EncoderConfig, hidden: int) -> dict[str, ParamSlice]:
    table = {
        "model.embeddings.position_embeddings.weight": ParamSlice("encoder.positions", 0, encoder.rows),
        "model.embeddings.token_type_embeddings.weight": ParamSlice("encoder.types", 0, encoder.types),
    }
    for name, rows in (("dense", hidden), ("out", 1)) if encoder.pooling.scores else ():
        table |= named(DENSE, f"model.score.{name}", f"encoder.{name}", 0, rows)
        table[f"model.score.{name}.bias"] = ParamSlice(f"encoder.{name}.bias", 0, rows)
    return table


def layer_names(
    config: ModelConfig,
    checkpoint: str,
    model: str,
    attn_norm: str | None = "input_layernorm",
    ranks: Ranks = ALONE,
    index: int = 0,
) -> dict[str, ParamSlice]:
    """Returns the entries of one `DecoderLayer`, with both prefixes. attn_norm: their name of it, None where it is
    missing. index: of the layer in its model."""
    whole, hidden = config.layers[index], config.hidden_size
    layer = whole.spread(ranks)
    inner, bias = width_share(ranks, whole.ffn, whole.block), layer.mlp_bias
    parts = [part._replace(param=f"mixer.{part.param}") for part in whole.mixer.stored(hidden, ranks)]
    gated_streams = layer.streams is not None and not isinstance(layer.streams, AltUpConfig)
    if isinstance(layer.streams, AltUpConfig):
        parts += stored_altup(layer.streams, hidden)
    elif layer.streams is not None:
        parts += stored_streams(layer.streams, hidden, "attn_hyper_connection", "before_mixer")
        parts += stored_streams(layer.streams, hidden, "mlp_hyper_connection", "before_mlp")
    if layer.streams is not None and layer.ngram is not None:
        parts += stored_ngram(layer.ngram, hidden, layer.streams.count)
    if layer.ffn and (layer.experts is None or layer.experts.beside):
        parts += (
            _mlp_parts(inner, hidden, bias, config.family.fused_mlp) if layer.gated else _ungated(inner, hidden, bias)
        )
    norms = {"post_attention_layernorm": "attn_out_norm" if layer.out_norms else "mlp_norm"}
    if layer.out_norms:
        norms |= {"pre_feedforward_layernorm": "mlp_norm", "post_feedforward_layernorm": "mlp_out_norm"}
    if (layer.parallel and not layer.own_norm) or not layer.has_mlp or gated_streams:
        norms.clear()
    if not layer.in_norms:
        norms.pop("pre_feedforward_layernorm", None)
    elif attn_norm is not None and layer.mixes:
        norms[attn_norm] = "attn_norm"
    if layer.per_layer:
        whole_matrix = Cut(0, Share(0, layer.per_layer, layer.per_layer))
        parts += (
            StoredMatrix("per_layer_input_gate", "end.gate", 0, layer.per_layer, False, whole_matrix),
            StoredMatrix("per_layer_projection", "end.out", 0, hidden, False, whole_matrix),
        )
        norms["post_per_layer_input_norm"] = "end.norm"
    if layer.scaled:
        parts.append(StoredVector("layer_scalar", "end.scalar", 1))
    if layer.experts is not None and layer.experts.beside:
        norms |= _BESIDE_NORMS
    if layer.norm.bare:
        norms.clear()
    parts += (StoredVector(f"{name}.weight", f"{own}.weight", hidden, is_norm=True) for name, own in norms.items())
    if layer.norm.bias:
        parts += (StoredVector(f"{name}.bias", f"{own}.bias", hidden) for name, own in norms.items())
    table = {} if whole.experts is None else _expert_names(config, whole, whole.experts, checkpoint, model, ranks)
    if layer.activation == "xielu":
        for i, (name, values) in enumerate(XIELU.items()):
            table[f"{checkpoint}.mlp.act_fn.{name}"] = ParamSlice(f"{model}.mlp.xielu", i, values)
    if layer.ngram is not None:
        table |= _ngram_table(layer.ngram, NGRAM_TABLE.format(index), f"{model}.ngram.embed.table")
    return table | entries(config, layer, parts, f"{checkpoint}.", f"{model}.", dict(config.factors), ranks)


def _ngram_table(ngram: NgramConfig, checkpoint: str, param: str) -> dict[str, ParamSlice]:
    """Returns the entries of a table of n-grams, which is stored in parts."""
    table: dict[str, ParamSlice] = {}
    each = -(-ngram.rows // ngram.parts)
    for part, first in enumerate(range(0, ngram.rows, each)):
        rows = min(each, ngram.rows - first)
        table |= named(DENSE, f"{checkpoint}.shard_{part}", param, first, rows)
    return table


def entries(
    config: ModelConfig,
    layer: LayerConfig,
    parts: Iterable[StoredMatrix | StoredVector],
    checkpoint: str = "",
    model: str = "",
    factors: Mapping[str, float] = _NO_FACTORS,
    ranks: Ranks = ALONE,
) -> dict[str, ParamSlice]:
    """Returns the entries of such tensors, with both prefixes."""
    table: dict[str, ParamSlice] = {}
    names, size = config.family.layer_names, ranks.size
    for part in parts:
        suffix = next((one for one in (".weight", ".bias") if part.checkpoint.endswith(one)), "")
        module = part.checkpoint.removesuffix(suffix)
        name, param = f"{checkpoint}{names.get(module, module)}{suffix}", f"{model}{part.param}"
        if isinstance(part, StoredVector):
            added = layer.norm.offset if part.is_norm else 0.0
            table[name] = ParamSlice(param, part.first, part.rows, 0, part.cut, added, part.order, part.is_log)
            continue
        part = part.by_outputs(ranks)
        form = blocks_or_dense(config.weight_format) if part.of_heads else config.weight_format
        own = named(form, name, param, part.first, part.rows, part.cut, part.order)
        times = factors.get(part.checkpoint, 1.0)
        table |= own if times == 1 else {key: value._replace(times=times) for key, value in own.items()}
        if part.bias:
            order = part.order if part.order is not None and part.order.axis == 0 else None
            of_outputs = part.cut if part.cut.axis == 0 and size > 1 and order is None else None
            table[f"{name}.bias"] = ParamSlice(f"{param}.bias", part.first, part.rows, cut=of_outputs, order=order)
    return table


def _mlp_parts(inner: Share, hidden: int, bias: bool, fused: bool) -> list[StoredMatrix]:
    """Returns the matrices of an MLP. inner: this rank's share of its width.  fused: whether gates and ups are one."""
    start, ffn, whole = inner
    out = StoredMatrix("mlp.down_proj", "mlp.down", 0, hidden, bias, Cut(1, inner))
    if fused:
        both = ordered(0, [(start, ffn), (whole + start, ffn)], 2 * whole)
        share = Cut(0, Share(0, 2 * whole, 2 * whole))
        return [StoredMatrix("mlp.gate_up_proj", "mlp.gate_up", 0, 2 * ffn, bias, share, both), out]
    return [
        StoredMatrix("mlp.gate_proj", "mlp.gate_up", 0, ffn, bias, Cut(0, inner)),
        StoredMatrix("mlp.up_proj", "mlp.gate_up", ffn, ffn, bias, Cut(0, inner)),
        out,
    ]


def _ungated(inner: Share, hidden: int, bias: bool) -> list[StoredMatrix]:
    """Returns the matrices of an MLP without a gate."""
    up = StoredMatrix("mlp.up_proj", "mlp.up", 0, inner.size, bias, Cut(0, inner))
    return [up, StoredMatrix("mlp.down_proj", "mlp.down", 0, hidden, bias, Cut(1, inner))]


def _expert_names(
    config: ModelConfig, layer: LayerConfig, whole: ExpertConfig, checkpoint: str, model: str, ranks: Ranks
) -> dict[str, ParamSlice]:
    """Returns the router and the experts of one layer. whole: these, with the sizes of the model, as the layer's."""
    experts, gated, block = whole.spread(ranks, layer.block), layer.gated, layer.block
    names, ffn, hidden = config.family.expert_names, experts.ffn, experts.latent or config.hidden_size
    inner = Share(0, ffn, ffn) if experts.own is not None else width_share(ranks, whole.ffn, block)
    joins = ranks.invariant and ranks.size > 1
    last = Cut(0, ranks.output_share(hidden)) if joins else Cut(1, inner)
    given = last.share.size if joins else hidden  # outputs
    own = f"{model}.beside.experts" if experts.beside else f"{model}.mlp"
    table = named(DENSE, f"{checkpoint}.{names.router}", f"{own}.router", 0, experts.count)
    if experts.beside:
        table[f"{checkpoint}.router.scale"] = ParamSlice(
            f"{model}.beside.router_norm.weight", 0, hidden, times=hidden**-0.5
        )
        some = None if experts.own is None else Cut(0, Share(experts.own.start, len(experts.own), experts.count))
        table[f"{checkpoint}.router.per_expert_scale"] = ParamSlice(f"{own}.scale", 0, len(experts.held), cut=some)
    made = ((names.gate, 0, 2 * ffn), (names.up, ffn, 2 * ffn)) if gated else ((names.up, 0, ffn),)
    for stored, linear, first, rows, every, cut in (
        *((stored, "gate_up", first, ffn, every, Cut(0, inner)) for stored, first, every in made),
        (names.down, "down", 0, given, given, last),
    ):
        parts = named(config.weight_format, stored, f"{own}.{linear}", first, rows, cut)  # of the first expert
        if experts.bias:
            of_outputs = cut if cut.axis == 0 and cut.share.size < cut.share.whole else None
            parts[f"{stored}.bias"] = ParamSlice(f"{own}.{linear}.bias", first, rows, cut=of_outputs)
        for name, part in parts.items():
            for place, expert in enumerate(experts.held):  # thousands of times: `_replace` would take twice as long
                at = f"{checkpoint}.{names.experts}.{expert}.{name}"
                table[at] = ParamSlice(part.param, first + place * every, part.size, part.axis, part.cut)
    if experts.shared:
        wide = experts.shared
        share, out = width_share(ranks, whole.shared, block), ranks.output_share(config.hidden_size)
        down = Cut(0, out) if joins else Cut(1, share)
        ups = ((names.gate, "gate_up", 0), (names.up, "gate_up", wide)) if gated else ((names.up, "up", 0),)
        for stored, linear, first, rows, cut in (
            *((stored, linear, first, wide, Cut(0, share)) for stored, linear, first in ups),
            (names.down, "down", 0, out.size if joins else config.hidden_size, down),
        ):
            matrix, param = f"{names.shared}.{stored}", f"{model}.mlp.shared.{linear}"
            own_parts = named(config.weight_format, f"{checkpoint}.{matrix}", param, first, rows, cut)
            times = dict(config.factors).get(matrix, 1.0)
            table |= {name: part._replace(times=times) for name, part in own_parts.items()}
    if experts.latent:
        for stored, linear, rows in ((names.into, "into", hidden), (names.back, "back", config.hidden_size)):
            table |= named(config.weight_format, f"{checkpoint}.{stored}", f"{model}.mlp.{linear}", 0, rows)
    if experts.shared_gate:
        table[f"{checkpoint}.{names.shared}_gate.weight"] = ParamSlice(f"{model}.mlp.shared_gate", 0, 1)
    if experts.routing.has_correction and not experts.uncorrected:
        table[f"{checkpoint}.{names.correction}"] = ParamSlice(f"{model}.mlp.correction", 0, experts.count)
    if experts.router_bias:
        table[f"{checkpoint}.{names.router}.bias"] = ParamSlice(f"{model}.mlp.router.bias", 0, experts.count)
    return table


def own_experts(config: ModelConfig, ranks: Ranks) -> range | None:
    """Returns the experts that this rank has, whole; None where it has something of each."""
    experts = None if config.experts is None or not ranks.expert_parallel else config.experts.spread(ranks)
    return None if experts is None else experts.own


def is_elsewhere(name: str, config: ModelConfig, own: range | None) -> bool:
    """Returns whether a canonical name is of an expert that another rank has."""
    if own is None:
        return False
    _, found, expert = name.partition(f".{config.family.expert_names.experts}.")
    number = expert.partition(".")[0]
    return bool(found) and number.isdecimal() and int(number) not in own


# Of experts beside an MLP.
_BESIDE_NORMS = {
    "post_feedforward_layernorm_1": "beside.mlp_out_norm",
    "pre_feedforward_layernorm_2": "beside.in_norm",
    "post_feedforward_layernorm_2": "beside.out_norm",
}


def named(
    form: WeightFormat,
    checkpoint: str,
    model: str,
    start: int,
    rows: int,
    cut: Cut | None = None,
    order: Order | None = None,
) -> dict[str, ParamSlice]:
    """Returns the entries of a stored matrix that is outputs `[start, start + rows)` of a `Linear`, with both names.
    cut: what of it is, which is nothing else where it is all.  order: of its rows or columns there, in place of a
    cut."""
    some = cut if order is None and cut is not None and cut.share.size < cut.share.whole else None
    slices = form.slices(model, start, rows).items()
    return {f"{checkpoint}.{suffix}": part._replace(cut=some, order=order) for suffix, part in slices}


def nextn_layer(name: str, config: ModelConfig) -> int | None:
    """Returns which prediction layer a canonical name is of, that is numbered behind the model's own; None: it is of
    none."""
    match = _LAYER.fullmatch(name) if config.family.predicts == "numbered" else None
    layer = -1 if match is None else int(match[1]) - config.num_layers
    return layer if layer >= 0 else None


def predicts(name: str, config: ModelConfig) -> bool:
    """Returns whether a canonical name is of a prediction layer that is served with such a model."""
    prefixes = MTP_PREFIXES if config.family.one_predicts else (MTP_LAYERS,)
    return name.startswith(prefixes) or nextn_layer(name, config) is not None


def nextn_name(name: str, config: ModelConfig) -> str | None:
    """Returns what such a tensor is called below `model.mtp`, others as they are; None: it is a copy of one of the
    model's."""
    layer, match = nextn_layer(name, config), _LAYER.fullmatch(name)
    if layer is None or match is None:
        return name
    part, suffix = match[2], match[3]
    if part in _NEXTN_COPIES:
        return None
    below = _NEXTN_NAMES.get(part, f"layers.{layer}.{part}")
    return f"{MTP}{below}.{suffix}"


def canonical(name: str) -> str:
    """Returns the name with the `model.` prefix, which some checkpoints leave out, and without that of a model around
    it."""
    name = own_name(name)
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


def stored_tensors(module: nn.Module, table: Mapping[str, ParamSlice]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every entry of `table`, which names parameters of `module`; mostly views of these."""
    params = dict(module.named_parameters(remove_duplicate=False))
    for name, part in table.items():
        yield name, part.stored(part.of(params[part.param]))
