"""`ModelConfig`: the arithmetic of a decoder as plain data, read from a Hugging Face `config.json`.

The families differ only in the values of this record, so one decoder module serves all of them. Keys that would
change the arithmetic in a way the decoder does not implement are refused by name; a silently ignored one would give
fluent but wrong text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from draftwing.errors import CheckpointError
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig
from draftwing.layers.encoder import EncoderConfig
from draftwing.layers.hybrid import HybridConfig
from draftwing.layers.latent import LatentAttentionConfig
from draftwing.layers.linear_ops.base import WeightFormat
from draftwing.layers.linear_ops.dense import DENSE, FORMATS
from draftwing.layers.part_configs import NORM, Activation, ExpertConfig, NormConfig, StreamsConfig, check_sizes
from draftwing.layers.rope import NOPE, RopeConfig
from draftwing.models.families import FAMILIES, language_model, sight
from draftwing.models.families.unserved import nearest, refused_head, unserved_part
from draftwing.models.family import Family, layers_like
from draftwing.models.fields import MAX_LAYERS, WIDEST, Fields, refuse_unread
from draftwing.models.hub_files import HEAD
from draftwing.models.positions import context, first_chunk, ropes, rotary_dims, sections_of, window_ahead, windows
from draftwing.models.quantised.config import METHODS, Quantization
from draftwing.models.towers.base import TowerConfig
from draftwing.parallel.ranks import Ranks
from draftwing.plugins import import_installed
from draftwing.requests.refusals import show


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one decoder.

    layers: of each its own spec, with the sizes of the whole model.  ropes: the rotary embeddings that their mixers
    name.  norm: of layers, heads and the last one.  embed_scale, logit_scale: what embeddings and logits are multiplied
    with.  soft_cap: logits x are soft_cap * tanh(x / soft_cap), 0: as they are.  dtype: what the checkpoint was saved
    in, None where it does not say.  stop_ids: end-of-text ids that the model's own config names.  suppressed: ids that
    are never drawn.  max_positions: the context length.  headless: whether it was saved without a head, so that
    logits mean nothing.  head_bias: whether logits have a bias.
    weight_format: of the layers' matrices.  vocab_format: of the embedding and the head.  quantization: how matrices
    are stored that are quantised in a way which any format takes, None: none are.  factors: what matrices of layers are
    multiplied with when they are loaded, by their names below a layer.  tower: of what reads images, None:
    nothing does.  encoder: what it has in front of its layers and behind them if these see whole texts, None: it is a
    decoder.  ahead: what its prediction layer is, where the family knows that by itself, else empty.  own_rows: how
    many tokens have embeddings by layer, 0: all.  normed_embeddings: whether the first layer reads them under a norm.
    stored_rows: of the embedding in checkpoints, of which those of tokens without logits, behind the others, are left
    out; 0: there are none.  learned_positions: which have a row each that is added to embeddings, 0: none.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    max_positions: int
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...] = (RopeConfig(),)
    norm: NormConfig = NORM
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    soft_cap: float = 0.0
    tie_embeddings: bool = False
    headless: bool = False
    head_bias: bool = False
    dtype: torch.dtype | None = None
    stop_ids: tuple[int, ...] = ()
    suppressed: tuple[int, ...] = ()
    weight_format: WeightFormat = DENSE
    vocab_format: WeightFormat = DENSE
    quantization: Quantization | None = None
    factors: tuple[tuple[str, float], ...] = ()
    tower: TowerConfig | None = None
    encoder: EncoderConfig | None = None
    ahead: tuple[LayerConfig, ...] = ()
    own_rows: int = 0
    normed_embeddings: bool = False
    stored_rows: int = 0
    learned_positions: int = 0

    @property
    def family(self) -> Family:
        return FAMILIES[self.architecture]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> AttentionConfig:
        """Returns attention of the first layer that has it: whose sizes draft heads take. Of latent attention what its
        heads would be without latents; of a model without attention heads of 128 elements."""
        mixers = [layer.mixer for layer in self.layers]
        mixers = [mixer.attention if isinstance(mixer, HybridConfig) else mixer for mixer in mixers]
        latent = next((mixer for mixer in mixers if isinstance(mixer, LatentAttentionConfig)), None)
        if latent is not None:
            return AttentionConfig(latent.heads, latent.heads, latent.plain + latent.turned)
        found = next((mixer for mixer in mixers if isinstance(mixer, AttentionConfig)), None)
        size = math.gcd(self.hidden_size, 128)
        return found or AttentionConfig(self.hidden_size // size, self.hidden_size // size, size)

    @property
    def mlp_size(self) -> int:
        """Returns the width of the first layer's MLP that there is, which draft heads take; of a model without one
        four times the hidden size."""
        return next((layer.ffn for layer in self.layers if layer.ffn), 4 * self.hidden_size)

    @property
    def image_token(self) -> int:
        """Returns the token that stands for images, -1 where none does."""
        return -1 if self.tower is None else self.tower.token

    @property
    def per_layer(self) -> int:
        """Returns the size of the embedding that each layer has of its own, 0 where they have none."""
        return self.layers[0].per_layer

    @property
    def streams(self) -> StreamsConfig | None:
        """Returns what its residual streams are; None where there is one."""
        return self.layers[0].streams

    @property
    def experts(self) -> ExpertConfig | None:
        """Experts of the first layer that has them; None where none has."""
        return next((layer.experts for layer in self.layers if layer.experts is not None), None)

    def for_texts(self, most: int) -> ModelConfig:
        """Returns the config for texts of at most so many tokens: without indexers that would pick all of them, and
        without chunks in which all of them are."""

        def without(layer: LayerConfig) -> LayerConfig:
            mixer = layer.mixer
            if isinstance(mixer, AttentionConfig) and mixer.chunk >= most:
                return replace(layer, mixer=replace(mixer, chunk=0))
            if isinstance(mixer, LatentAttentionConfig) and mixer.index is not None and mixer.index.topk >= most:
                return replace(layer, mixer=replace(mixer, index=None))
            if isinstance(mixer, AttentionConfig) and mixer.index is not None and mixer.index.width >= most:
                return replace(layer, mixer=replace(mixer, index=None))
            return layer

        return replace(self, layers=tuple(map(without, self.layers)))

    def spread(self, ranks: Ranks) -> tuple[LayerConfig, ...]:
        """Returns what one rank builds its layers from. Raises ConfigError for what cannot be spread over so many."""
        return tuple(replace(layer, weight_format=self.weight_format).spread(ranks) for layer in self.layers)

    def in_blocks(self, block: int) -> ModelConfig:
        """Returns the config of one whose ranks have whole blocks of so many columns, as `LayerConfig.block` has it."""
        if block == 1:
            return self
        layers, ahead = (tuple(replace(one, block=block) for one in some) for some in (self.layers, self.ahead))
        return replace(self, layers=layers, ahead=ahead)

    @property
    def layer_weights(self) -> int:
        """Returns values in the matrices of the layers."""
        return sum(layer.weights for layer in self.layers)

    @property
    def products(self) -> int:
        """Returns about how many products of the layers a token takes."""
        return sum(layer.products for layer in self.layers)

    @property
    def matrix_weights(self) -> int:
        """Returns values in all matrices that memory must hold: of the layers, the embedding and the head."""
        vocab = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        last = 0 if self.streams is None else self.streams.around(self.hidden_size)
        tables = 0 if self.encoder is None else (self.encoder.rows + self.encoder.types) * self.hidden_size
        tables += self.learned_positions * self.hidden_size
        return self.layer_weights + vocab + last + tables + self.hidden_size * self.per_layer * self.num_layers

    @property
    def per_layer_rows(self) -> int:
        """Returns how many tokens have embeddings by layer."""
        return self.own_rows or self.vocab_size

    def __post_init__(self) -> None:
        check_sizes(self, ("hidden_size", "num_layers", "vocab_size"))
        for layer in dict.fromkeys(self.layers):  # mostly they are alike
            layer.check()
            if layer.mixer.rotates is None:
                continue
            rope, head_dim = layer.mixer.rotates
            assert not isinstance(layer.mixer, AttentionConfig) or self.ropes[rope].dims == layer.mixer.rotary
            pairs = (self.ropes[rope].dims or head_dim) // 2
            for divisors in (self.ropes[rope].divisors, self.ropes[rope].long_divisors):
                if divisors and len(divisors) != pairs:
                    raise CheckpointError(f"expected {pairs} rope frequency factors, found {len(divisors)}")
        if any(token >= self.vocab_size for token in self.suppressed):
            raise CheckpointError(
                f"suppress_tokens or bad_words_ids: expected ids below {self.vocab_size}, found {max(self.suppressed)}"
            )
        if len({layer.per_layer for layer in self.layers}) > 1:
            raise CheckpointError("expected embeddings of one size for all layers")
        pool_layers(self.layers)


def pool_layers(layers: Sequence[LayerConfig]) -> list[int | None]:
    """Returns for each layer where its entries lie in the pool, counted from the model's first; None for layers that
    keep nothing. Those that read another layer's have that one's. Raises CheckpointError where there is no such one."""
    found: list[int | None] = []
    count = 0
    for i, mixer in enumerate(layer.mixer for layer in layers):
        of = mixer.kv_from
        if of is None:
            found.append(None if mixer.keeps() is None else count)
            count += found[-1] is not None
        elif not 0 <= of < i or layers[of].mixer.kv_from is not None or layers[of].mixer.keeps() != mixer.keeps():
            raise CheckpointError(
                f"layer {i} reads what layer {of} keeps: expected an earlier one with its own, of the same sizes"
            )
        else:
            found.append(found[of])
    return found


# The group in which installed packages name the module that adds to `FAMILIES` or `FORMATS`: an entry point's name is
# the architecture or the `quant_method`.
ENTRY_POINTS = "draftwing.models"


def from_hf(config: Mapping[str, Any], head: bool = False) -> ModelConfig:
    """Returns the `ModelConfig` of a parsed `config.json`; raises CheckpointError for what cannot be served. head: of a
    draft head's layers, whose config has keys of others."""
    (tower, sections), config = (None, ()) if head else sight(config), language_model(config)
    name, family = _family(Fields(config, "config"))
    headless = name not in (config.get("architectures") or (name,))
    fields = Fields(config, f"config of {name}")
    if family.keys is not None:
        fields = fields.overruled(family.keys(fields))
    trained, layers = fields.whole("max_position_embeddings"), fields.whole("num_hidden_layers", high=MAX_LAYERS)
    hidden = fields.whole("hidden_size", high=WIDEST)
    turns_parts = head or family.turns_parts  # heads of families that do turn as their targets
    attention = _attention(fields, family, hidden, turns_parts)
    weight_format, quantization = _stored_as(fields, family)
    if family.scaled and all(fields.get(key) is None for key in ("rope_parameters", "rope_scaling")):
        raise fields.unlike("rope_parameters", "an object")
    share = family.rotary if turns_parts else None
    rope, local_rope = ropes(fields, family.theta, family.local_theta, trained, share, family.query_scale)
    max_positions = min(context(rope, trained), first_chunk(fields))
    if not (family.turns if isinstance(family.turns, bool) else family.turns(fields)):
        rope = NOPE
    encoder = None if family.encoder is None else family.encoder(fields)
    if encoder is not None:
        max_positions = encoder.context
    eps = fields.number(family.eps_key, 0, 1, family.eps)
    norm = NormConfig(eps, family.wide_norms, family.norm_offset, family.centred, family.norm_bias, family.bare_norms)
    rope = replace(rope, dims=attention.rotary)
    if sections:
        rope = replace(rope, sections=sections_of(fields, sections))
    attention = replace(attention, scaled_queries=rope.query_beta > 0)
    layer = LayerConfig(
        hidden,
        attention,
        ffn=fields.whole("intermediate_size", high=WIDEST),
        norm=norm,
        mlp_bias=fields.flag(family.mlp_bias) if isinstance(family.mlp_bias, str) else family.mlp_bias,
        experts=None if family.experts is None else family.experts(fields, layers),
        activation=_activation(fields, family),
        in_norms=family.in_norms,
        out_norms=family.out_norms,
        parallel=family.parallel,
        residual_scale=_multiplier(fields, family, "residual_multiplier"),
    )
    dense = () if family.dense_layers is None else family.dense_layers(fields, layers)
    if family.layers is not None:
        made = family.layers(fields, layer, layers)
        local_rope = local_rope if family.other_rope is None else family.other_rope(fields)
        made = tuple(replace(one, experts=None) if i in dense else one for i, one in enumerate(made))
    else:
        pattern = family.window_pattern
        if pattern and family.pattern_key:
            pattern = fields.whole("sliding_window_pattern", 1, default=pattern)
        reach = windows(fields, layers, max_positions, family.sliding_window, family.window_switch, pattern)
        reach = reach or (0,) * layers
        if family.predicts_kind:
            reach = (*reach, window_ahead(fields, family.predicts_kind, family.sliding_window))
        nope = () if family.nope is None else family.nope(fields, reach)
        made = layers_like(layer, attention, reach, local_rope is not None, dense, nope)
        local_rope = NOPE if nope else local_rope
    vocab = fields.whole("vocab_size")
    found = ModelConfig(
        architecture=name,
        hidden_size=hidden,
        vocab_size=fields.whole("output_vocab_size", 1, vocab, vocab),
        stored_rows=vocab if fields.get("output_vocab_size") is not None else 0,
        max_positions=max_positions,
        layers=made[:layers],
        ropes=(rope,) if local_rope is None else (rope, local_rope),
        norm=norm,
        embed_scale=hidden**0.5 if family.scaled_embeddings else _multiplier(fields, family, "embedding_multiplier"),
        logit_scale=1 / _multiplier(fields, family, "logits_scaling"),
        soft_cap=fields.number("final_logit_softcapping", 0, 1e6, 0.0) if family.soft_cap else 0.0,
        tie_embeddings=fields.flag("tie_word_embeddings", family.tied) or headless,
        headless=headless,
        head_bias=fields.flag(family.head_bias) if isinstance(family.head_bias, str) else family.head_bias,
        dtype=_dtype(config),
        stop_ids=fields.ids("eos_token_id"),
        weight_format=weight_format,
        quantization=quantization,
        tower=tower,
        encoder=encoder,
        ahead=made[layers:],
        normed_embeddings=family.normed_embeddings,
        learned_positions=trained if family.learned_positions else 0,
        own_rows=fields.whole("vocab_size_per_layer_input", default=0) if made[0].per_layer else 0,
        factors=() if family.factors is None else tuple(family.factors(fields).items()),
    )
    refuse_unread(fields, family.neutral, known_alone=head)
    return found


def _multiplier(fields: Fields, family: Family, key: str) -> float:
    return fields.number(key, 1e-3, 1e3, 1.0) if family.multipliers else 1.0


def _attention(fields: Fields, family: Family, hidden: int, turns_parts: bool) -> AttentionConfig:
    """Returns attention without a window, with the sizes of the whole model. hidden: the model's size.  turns_parts:
    whether a part of each head may be turned."""
    heads, scalar = fields.whole("num_attention_heads", high=WIDEST), family.attention_scalar
    head_dim = fields.whole("head_dim", high=WIDEST, default=family.head_dim or hidden // heads)
    usual = fields.flag("attention_bias", family.bias)  # families whose biases are fixed may have the key, too

    def bias(said: bool | str) -> bool:
        if isinstance(said, bool):
            return said
        return usual if said == "attention_bias" else fields.flag(said, family.bias and said == family.qkv_bias)

    return AttentionConfig(
        heads,
        kv_heads=fields.whole("num_key_value_heads", high=WIDEST, default=heads),
        head_dim=head_dim,
        sinks=family.sinks,
        scalar=fields.whole("query_pre_attn_scalar", default=scalar) if scalar else 0,
        qkv_bias=bias(family.qkv_bias),
        o_bias=bias(family.o_bias),
        qk_norm=fields.flag("use_qk_norm") if family.qk_norm == "key" else bool(family.qk_norm),
        whole_norms=family.qk_norm == "whole",
        norms_after=family.norms_after,
        bare_norms=family.bare_norms,
        reversed=family.reversed,
        clip=fields.number("clip_qkv", 0, 1e6, 0.0) if family.clips else 0.0,
        gated=family.gated,
        gate_rows=family.rows_of_gate(head_dim),
        rotary=rotary_dims(fields, head_dim, family.rotary) if turns_parts else 0,
        interleaved=family.rope_interleaved,
        fused=bool(family.fused_qkv),
        by_head=family.fused_qkv == "heads",
        cap=fields.number("attn_logit_softcapping", 0, 1e6, 0.0) if family.score_cap else 0.0,
    )


def _family(config: Fields) -> tuple[str, Family]:
    architectures = config.texts("architectures")
    without_head = [f"{name.removesuffix('Model')}ForCausalLM" for name in architectures if name.endswith("Model")]
    for name in (*architectures, *without_head):
        if name not in FAMILIES:
            import_installed(ENTRY_POINTS, name)
        if name in FAMILIES:
            return name, FAMILIES[name]
    if not architectures:
        for name, family in FAMILIES.items():
            if family.model_type == config.get("model_type"):
                return name, family
    found = ", ".join(architectures)[:200] if architectures else f"model_type {show(config.get('model_type'))}"
    if HEAD.search(found):
        raise CheckpointError(refused_head(found))
    missing = unserved_part(architectures, config.get("model_type"), dict(config.items()))
    if missing is not None:
        raise CheckpointError(f"{found} has {missing}, which is not served yet; {nearest(found, FAMILIES)}")
    raise CheckpointError(f"unknown architecture {found}; {nearest(found, FAMILIES)}")


# The key that names an MLP's activation, and its names.
_ACTIVATIONS: dict[Activation, tuple[str, tuple[str, ...]]] = {
    "silu": ("hidden_act", ("silu", "swish")),
    "gelu": ("hidden_activation", ("gelu_pytorch_tanh", "gelu_new")),
    "relu2": ("hidden_act", ("relu2",)),
    "xielu": ("hidden_act", ("xielu",)),
    "ungated_gelu": ("hidden_act", ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")),
    "ungated_exact_gelu": ("hidden_act", ("gelu",)),
}
_EITHER: tuple[Activation, ...] = ("ungated_gelu", "ungated_exact_gelu")


def _activation(fields: Fields, family: Family) -> Activation:
    """Returns that of the MLPs: a family whose MLPs have GELU without a gate may have either."""
    key, usual = _ACTIVATIONS[family.activation]
    name = fields.text(key, usual[0])
    for kind in _EITHER if family.activation in _EITHER else (family.activation,):
        if name in _ACTIVATIONS[kind][1]:
            return kind
    raise fields.unsupported(key, name)


def _stored_as(fields: Fields, family: Family) -> tuple[WeightFormat, Quantization | None]:
    """Returns what `quantization_config` says: a format of its own, or one that is read into any other."""
    quantization = fields.get("quantization_config")
    if quantization is None:
        quantization = fields.get("quantization")  # as MLX has it
    if quantization is None:
        return DENSE, None
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if method is None and isinstance(quantization, Mapping) and isinstance(quantization.get("producer"), Mapping):
        method = quantization["producer"].get("name")  # as ModelOpt has it
    if isinstance(method, str) and method not in METHODS.keys() | FORMATS.keys():
        import_installed(ENTRY_POINTS, method)
    if isinstance(method, str) and method in FORMATS:
        return FORMATS[method](quantization), None
    known = {name: read for name, read in METHODS.items() if name != "mxfp4" or family.interleaved}
    if isinstance(method, str) and method in known:
        return DENSE, known[method](fields.inner("quantization_config"))
    raise CheckpointError(
        f"{fields.where}: quantization_config: expected none or quant_method {', '.join((*known, *FORMATS))}, found "
        f"{show(quantization if method is None else method)}. Take the model's checkpoint that is not quantised, or a "
        ".gguf file"
    )


def _dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """`dtype` is the key since transformers 5, `torch_dtype` before."""
    name = config.get("dtype", config.get("torch_dtype"))
    if name is None or name == "auto":
        return None
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CheckpointError(f"expected a floating point dtype in the config, found {show(name)}")
    return dtype
