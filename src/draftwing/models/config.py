"""`ModelConfig`: the arithmetic of a decoder as plain data, read from a Hugging Face `config.json`.

The families differ only in the values of this record, so one decoder module serves all of them. Keys that would
change the arithmetic in a way the decoder does not implement are refused by name; a silently ignored one would give
fluent but wrong text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from draftwing.errors import CheckpointError
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import NORM, ExpertConfig, LayerConfig, NormConfig
from draftwing.layers.latent import LatentAttentionConfig
from draftwing.layers.linear_ops.base import WeightFormat
from draftwing.layers.linear_ops.formats import DENSE, FORMATS
from draftwing.layers.rope import RopeConfig
from draftwing.models import expert_fields
from draftwing.models.fields import MAX_LAYERS, WIDEST, Fields
from draftwing.models.gemma4 import gemma4_keys, gemma4_layers
from draftwing.models.hybrids import QWEN_HYBRID, lfm2_keys, lfm2_layers, qwen_layers
from draftwing.models.language_model import language_model
from draftwing.models.latents import LATENT
from draftwing.models.neutral import refuse_unread
from draftwing.models.positions import WindowSwitch, context, ropes, rotary_dims, windows
from draftwing.models.quantised.config import METHODS, Quantization
from draftwing.models.unserved import nearest, unserved_part
from draftwing.parallel.ranks import Ranks
from draftwing.plugins import import_installed
from draftwing.requests.refusals import show


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one decoder.

    layers: of each its own spec, with the sizes of the whole model.  ropes: the rotary embeddings that their mixers
    name.  norm: of layers, heads and the last one.  embed_scale: what embeddings are multiplied with.  soft_cap: logits
    x are soft_cap * tanh(x / soft_cap), 0: as they are.  dtype: what the checkpoint was saved in, None where it does
    not say.  stop_ids: end-of-text ids that the model's own config names.  suppressed: ids that are never drawn.
    max_positions: the context length.
    weight_format: of the layers' matrices.  vocab_format: of the embedding and the head.  quantization: how matrices
    are stored that are quantised in a way which any format takes, None: none are.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    max_positions: int
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...] = (RopeConfig(),)
    norm: NormConfig = NORM
    embed_scale: float = 1.0
    soft_cap: float = 0.0
    tie_embeddings: bool = False
    dtype: torch.dtype | None = None
    stop_ids: tuple[int, ...] = ()
    suppressed: tuple[int, ...] = ()
    weight_format: WeightFormat = DENSE
    vocab_format: WeightFormat = DENSE
    quantization: Quantization | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> AttentionConfig:
        """Returns attention of the first layer that has it: whose sizes draft heads take. Of latent attention what its
        heads would be without latents."""
        mixers = [layer.mixer for layer in self.layers]
        latent = next((mixer for mixer in mixers if isinstance(mixer, LatentAttentionConfig)), None)
        if latent is not None:
            return AttentionConfig(latent.heads, latent.heads, latent.plain + latent.turned)
        return next(mixer for mixer in mixers if isinstance(mixer, AttentionConfig))

    @property
    def per_layer(self) -> int:
        """Returns the size of the embedding that each layer has of its own, 0 where they have none."""
        return self.layers[0].per_layer

    @property
    def experts(self) -> ExpertConfig | None:
        """Experts of the first layer that has them; None where none has."""
        return next((layer.experts for layer in self.layers if layer.experts is not None), None)

    def spread(self, ranks: Ranks) -> tuple[LayerConfig, ...]:
        """Returns what one rank builds its layers from. Raises ConfigError for what cannot be spread over so many."""
        return tuple(replace(layer, weight_format=self.weight_format).spread(ranks) for layer in self.layers)

    @property
    def layer_weights(self) -> int:
        """Returns values in the matrices of the layers."""
        return sum(layer.weights for layer in self.layers)

    @property
    def matrix_weights(self) -> int:
        """Returns values in all matrices that memory must hold: of the layers, the embedding and the head."""
        vocab = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.layer_weights + vocab + self.hidden_size * self.per_layer * self.num_layers

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "vocab_size"):
            if getattr(self, name) < 1:
                raise CheckpointError(f"{name} must be at least 1, found {getattr(self, name)}")
        for layer in dict.fromkeys(self.layers):  # mostly they are alike
            layer.check()
            if layer.mixer.rotates is None:
                continue
            rope, head_dim = layer.mixer.rotates
            assert not isinstance(layer.mixer, AttentionConfig) or self.ropes[rope].dims == layer.mixer.rotary
            divisors = len(self.ropes[rope].divisors)
            if divisors and divisors != head_dim // 2:
                raise CheckpointError(f"expected {head_dim // 2} rope frequency factors, found {divisors}")
        if any(token >= self.vocab_size for token in self.suppressed):
            raise CheckpointError(
                f"suppress_tokens: expected ids below {self.vocab_size}, found {max(self.suppressed)}"
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


class Family(NamedTuple):
    """What an architecture name implies. `True` / `False` for a bias is fixed, "key" reads `attention_bias`."""

    model_type: str
    qkv_bias: bool | Literal["key"] = "key"
    o_bias: bool | Literal["key"] = "key"
    qk_norm: bool | Literal["key", "whole"] = False  # "key": `use_qk_norm`, "whole": of whole projections
    head_dim: int | None = None  # when the config has none; None: hidden_size / heads
    sliding_window: int | None = None  # when the config has no such key, 0: none; None: the key is a leftover
    window_switch: WindowSwitch = ""
    window_pattern: int = 0  # without `layer_types` one in so many layers has no window, 0: none of them
    theta: float = 10000.0  # `rope_theta` when the config has none
    eps: float = 1e-6  # `rms_norm_eps` when the config has none
    bias: bool = False  # `attention_bias` when the config has none
    scaled: bool = False  # whether a config without a rotary embedding means a scaled one, which is refused
    local_theta: float | None = None  # the same of `rope_local_base_freq`; None: all layers have one rotary embedding
    sinks: bool = False
    wide_norms: bool = False
    norm_offset: float = 0.0
    out_norms: bool = False
    activation: Literal["silu", "gelu"] = "silu"
    scaled_embeddings: bool = False  # whether they are multiplied with the root of the hidden size
    attention_scalar: int = 0  # `query_pre_attn_scalar` when the config has none, 0: there is no such key
    tied: bool = False  # `tie_word_embeddings` when the config has none
    experts: expert_fields.Kind = ""
    # Where layers differ in more than windows: makes so many of the config and of what all have in common.
    layers: Callable[[Fields, LayerConfig, int], tuple[LayerConfig, ...]] | None = None
    soft_cap: bool = False  # whether it reads `final_logit_softcapping`
    keys: Callable[[Fields], dict[str, Any]] | None = None  # what its config says in keys of others
    gated: bool = False  # whether attention has gates
    turns_parts: bool = False  # whether a part of each head may be turned
    rotary: float = 1.0  # that share, `partial_rotary_factor` when the config has none
    shared: bool = False  # whether experts have one more, for all rows, with a gate of its own


# The group in which installed packages name the module that adds to `FAMILIES` or `FORMATS`: an entry point's name is
# the architecture or the `quant_method`.
ENTRY_POINTS = "draftwing.models"

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family("mistral", qkv_bias=False, o_bias=False, sliding_window=4096),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, o_bias=False, sliding_window=4096, window_switch="upper"),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, head_dim=128, sliding_window=4096, window_switch="upper"),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", qk_norm=True, sliding_window=4096, window_switch="all", experts="qwen"),
    "MixtralForCausalLM": Family(
        "mixtral", qkv_bias=False, o_bias=False, sliding_window=0, theta=1e6, eps=1e-5, experts="mixtral"
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        head_dim=64,
        sliding_window=128,
        window_pattern=2,
        theta=150000.0,
        eps=1e-5,
        bias=True,
        scaled=True,
        sinks=True,
        wide_norms=True,
        experts="gpt_oss",
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        qk_norm=True,
        head_dim=256,
        sliding_window=4096,
        window_pattern=6,
        theta=1e6,
        local_theta=1e4,
        wide_norms=True,
        norm_offset=1.0,
        out_norms=True,
        activation="gelu",
        scaled_embeddings=True,
        attention_scalar=256,
        tied=True,
    ),
    "Gemma4ForCausalLM": Family(
        "gemma4_text",
        qk_norm=True,
        head_dim=256,
        theta=1e6,
        local_theta=1e4,
        wide_norms=True,
        out_norms=True,
        activation="gelu",
        scaled_embeddings=True,
        tied=True,
        experts="gemma",
        layers=gemma4_layers,
        keys=gemma4_keys,
        soft_cap=True,
    ),
    "MiMoForCausalLM": Family("mimo", qkv_bias=True, o_bias=False, sliding_window=4096, window_switch="upper"),
    "Qwen3_5ForCausalLM": Family("qwen3_5_text", **QWEN_HYBRID),
    "Qwen3_5MoeForCausalLM": Family("qwen3_5_moe_text", experts="qwen", shared=True, **QWEN_HYBRID),
    "Qwen3NextForCausalLM": Family(
        "qwen3_next", experts="qwen", shared=True, **QWEN_HYBRID | {"layers": partial(qwen_layers, by_key_head=True)}
    ),
    "Glm4MoeForCausalLM": Family(
        "glm4_moe",
        o_bias=False,
        qk_norm="key",
        eps=1e-5,
        rotary=0.5,
        experts="deepseek",
        turns_parts=True,
    ),
    "DeepseekV2ForCausalLM": Family("deepseek_v2", **{**LATENT, "experts": "deepseek_v2"}),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", **LATENT),
    "Glm4MoeLiteForCausalLM": Family("glm4_moe_lite", **{**LATENT, "eps": 1e-5}),
    "MiniMaxM2ForCausalLM": Family(
        "minimax_m2",
        qkv_bias=False,
        o_bias=False,
        qk_norm="whole",
        head_dim=128,
        theta=5e6,
        experts="minimax",
        keys=expert_fields.minimax_keys,
        turns_parts=True,
    ),
    "Lfm2ForCausalLM": Family(
        "lfm2",
        qkv_bias=False,
        o_bias=False,
        qk_norm=True,
        theta=1e6,
        eps=1e-5,
        tied=True,
        layers=lfm2_layers,
        keys=lfm2_keys,
    ),
}


def from_hf(config: Mapping[str, Any], head: bool = False) -> ModelConfig:
    """Returns the `ModelConfig` of a parsed `config.json`; raises CheckpointError for what cannot be served. head: of a
    draft head's layers, whose config has keys of others."""
    config = language_model(config)
    name, family = _family(Fields(config, "config"))
    fields = Fields(config, f"config of {name}")
    if family.keys is not None:
        fields = fields.overruled(family.keys(fields))
    key, known = _ACTIVATIONS[family.activation]
    activation = fields.text(key, known[0])
    if activation not in known:
        raise fields.unsupported(key, activation)
    trained, layers = fields.whole("max_position_embeddings"), fields.whole("num_hidden_layers", high=MAX_LAYERS)
    hidden = fields.whole("hidden_size", high=WIDEST)
    attention = _attention(fields, family, hidden)
    weight_format, quantization = _stored_as(fields, family)
    if family.scaled and all(fields.get(key) is None for key in ("rope_parameters", "rope_scaling")):
        raise fields.unlike("rope_parameters", "an object")
    rope, local_rope = ropes(fields, family.theta, family.local_theta, trained, family.turns_parts)
    max_positions = context(rope, trained)
    norm = NormConfig(fields.number("rms_norm_eps", 0, 1, family.eps), family.wide_norms, family.norm_offset)
    rope = replace(rope, dims=attention.rotary)
    layer = LayerConfig(
        hidden,
        attention,
        ffn=fields.whole("intermediate_size", high=WIDEST),
        norm=norm,
        mlp_bias=fields.flag("mlp_bias"),
        experts=expert_fields.experts(fields, family.experts, family.shared, layers),
        activation=family.activation,
        out_norms=family.out_norms,
    )
    dense = expert_fields.dense_layers(fields, family.experts, layers)
    if family.layers is not None:
        made = family.layers(fields, layer, layers)
        made = tuple(replace(one, experts=None) if i in dense else one for i, one in enumerate(made))
    else:
        reach = windows(
            fields, layers, max_positions, family.sliding_window, family.window_switch, family.window_pattern
        )
        made = layers_like(layer, attention, layers, reach, local_rope is not None, dense)
    found = ModelConfig(
        architecture=name,
        hidden_size=hidden,
        vocab_size=fields.whole("vocab_size"),
        max_positions=max_positions,
        layers=made,
        ropes=(rope,) if local_rope is None else (rope, local_rope),
        norm=norm,
        embed_scale=hidden**0.5 if family.scaled_embeddings else 1.0,
        soft_cap=fields.number("final_logit_softcapping", 0, 1e6, 0.0) if family.soft_cap else 0.0,
        tie_embeddings=fields.flag("tie_word_embeddings", family.tied),
        dtype=_dtype(config),
        stop_ids=fields.ids("eos_token_id"),
        weight_format=weight_format,
        quantization=quantization,
    )
    refuse_unread(fields, name, known_alone=head)
    return found


def _attention(fields: Fields, family: Family, hidden: int) -> AttentionConfig:
    """Returns attention without a window, with the sizes of the whole model. hidden: the model's size."""
    heads, scalar = fields.whole("num_attention_heads", high=WIDEST), family.attention_scalar
    head_dim = fields.whole("head_dim", high=WIDEST, default=family.head_dim or hidden // heads)
    bias = fields.flag("attention_bias", family.bias)
    return AttentionConfig(
        heads,
        kv_heads=fields.whole("num_key_value_heads", high=WIDEST, default=heads),
        head_dim=head_dim,
        sinks=family.sinks,
        scalar=fields.whole("query_pre_attn_scalar", default=scalar) if scalar else 0,
        qkv_bias=bias if family.qkv_bias == "key" else bool(family.qkv_bias),
        o_bias=bias if family.o_bias == "key" else bool(family.o_bias),
        qk_norm=fields.flag("use_qk_norm") if family.qk_norm == "key" else bool(family.qk_norm),
        whole_norms=family.qk_norm == "whole",
        gated=family.gated,
        rotary=rotary_dims(fields, head_dim, family.rotary) if family.turns_parts else 0,
    )


def layers_like(
    layer: LayerConfig,
    attention: AttentionConfig,
    count: int,
    windows: Sequence[int] = (),
    local_rope: bool = False,
    dense: Collection[int] = (),
) -> tuple[LayerConfig, ...]:
    """Returns so many layers like one, with its attention, as families have them whose layers differ in little.

    windows: of each layer, 0: none; empty where no layer has one.  local_rope: whether layers with a window are turned
    by the second rotary embedding.  dense: which layers have an MLP in place of experts.
    """
    windows = windows or (0,) * count
    of_window = {window: replace(attention, window=window, rope=int(local_rope and window > 0)) for window in windows}
    made = [replace(layer, mixer=of_window[window]) for window in windows]
    return tuple(replace(one, experts=None) if i in dense else one for i, one in enumerate(made))


def _family(config: Fields) -> tuple[str, Family]:
    architectures = config.texts("architectures")
    for name in architectures:
        if name not in FAMILIES:
            import_installed(ENTRY_POINTS, name)
        if name in FAMILIES:
            return name, FAMILIES[name]
    if not architectures:
        for name, family in FAMILIES.items():
            if family.model_type == config.get("model_type"):
                return name, family
    found = ", ".join(architectures)[:200] if architectures else f"model_type {show(config.get('model_type'))}"
    missing = unserved_part(architectures, config.get("model_type"), dict(config.items()))
    if missing is not None:
        raise CheckpointError(f"{found} has {missing}, which is not served yet; {nearest(found, FAMILIES)}")
    raise CheckpointError(f"unknown architecture {found}; {nearest(found, FAMILIES)}")


# The key that names an MLP's activation, and its names.
_ACTIVATIONS = {
    "silu": ("hidden_act", ("silu", "swish")),
    "gelu": ("hidden_activation", ("gelu_pytorch_tanh", "gelu_new")),
}


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
    known = {name: read for name, read in METHODS.items() if name != "mxfp4" or family.experts == "gpt_oss"}
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
