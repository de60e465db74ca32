"""`ModelConfig`: the arithmetic of a decoder as plain data, read from a Hugging Face `config.json`.

The families differ only in the values of this record, so one decoder module serves all of them. Keys that would
change the arithmetic in a way the decoder does not implement are refused by name; a silently ignored one would give
fluent but wrong text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from draftwing.errors import CheckpointError
from draftwing.layers.config import LayerConfig
from draftwing.layers.linear_ops.base import WeightFormat
from draftwing.layers.linear_ops.formats import DENSE, FORMATS
from draftwing.layers.rope import RopeConfig


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one decoder.

    dtype: what the checkpoint was saved in, None where it does not say.  stop_ids: end-of-text ids that the model's
    own config names.  max_positions: the trained context length.  weight_format: of the layers' matrices.
    vocab_format: of the embedding and the head.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    dtype: torch.dtype | None = None
    stop_ids: tuple[int, ...] = ()
    weight_format: WeightFormat = DENSE
    vocab_format: WeightFormat = DENSE

    def layer(self) -> LayerConfig:
        """What each of its layers is built from."""
        return LayerConfig(
            hidden=self.hidden_size,
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            ffn=self.ffn_size,
            eps=self.norm_eps,
            qkv_bias=self.qkv_bias,
            o_bias=self.o_bias,
            mlp_bias=self.mlp_bias,
            qk_norm=self.qk_norm,
            weight_format=self.weight_format,
        )

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "vocab_size"):
            if getattr(self, name) < 1:
                raise CheckpointError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"the number of heads must be a multiple of the number of key/value heads, "
                f"found {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim must be even for rotary embeddings, found {self.head_dim}")
        if self.rope.divisors and len(self.rope.divisors) != self.head_dim // 2:
            raise CheckpointError(
                f"expected {self.head_dim // 2} rope frequency factors, found {len(self.rope.divisors)}"
            )


class Family(NamedTuple):
    """What an architecture name implies. `True` / `False` for a bias is fixed, "key" reads `attention_bias`."""

    model_type: str
    qkv_bias: bool | Literal["key"] = "key"
    o_bias: bool | Literal["key"] = "key"
    qk_norm: bool = False
    head_dim: int | None = None  # when the config has none; None: hidden_size / heads
    sliding_window: int | None = None  # when the config has no such key
    window_switch: bool = False  # `use_sliding_window` and `max_window_layers` decide whether the window is active


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family("mistral", qkv_bias=False, o_bias=False, sliding_window=4096),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, o_bias=False, window_switch=True),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, head_dim=128, window_switch=True),
    "MiMoForCausalLM": Family("mimo", qkv_bias=True, o_bias=False, window_switch=True),
}

# Models with multi-token prediction layers whose bodies (experts, latent or linear attention) have no decoder here.
UNSERVED_WITH_MTP = {
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "MiMoV2FlashForCausalLM": "mimo_v2_flash",
}

# Keys that change the arithmetic, with the values (besides null) at which they do not.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "attention_chunk_size": (),
    "attention_k_eq_v": (False,),
    "attention_multiplier": (),
    "attention_sinks": (False,),
    "attn_logit_softcapping": (0,),
    "clip_qkv": (),
    "compression_config": (),
    "dual_chunk_attention_config": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (0,),
    "kv_lora_rank": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "n_routed_experts": (0,),
    "no_rope_layers": ([],),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "parallel_attn": (False,),
    "partial_rotary_factor": (1,),
    "q_lora_rank": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "rotary_pct": (1,),
    "scale_depth": (),
    "scale_emb": (1,),
    "use_mrope": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
}


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The `ModelConfig` of a parsed `config.json`; raises CheckpointError for what cannot be served."""
    name, family = _family(config)
    for key, neutral in NEUTRAL_VALUES.items():
        value = config.get(key)
        if value is not None and value not in neutral:
            raise _refused(key, value, name)
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise _refused("hidden_act", activation, name)
    max_positions = _required(config, "max_position_embeddings", name)
    layers = _required(config, "num_hidden_layers", name)
    _refuse_sliding_window(config, family, name, max_positions, layers)
    hidden, heads = _required(config, "hidden_size", name), _required(config, "num_attention_heads", name)
    attention_bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        architecture=name,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or family.head_dim or hidden // heads,
        ffn_size=_required(config, "intermediate_size", name),
        vocab_size=_required(config, "vocab_size", name),
        max_positions=max_positions,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config, name),
        qkv_bias=attention_bias if family.qkv_bias == "key" else bool(family.qkv_bias),
        o_bias=attention_bias if family.o_bias == "key" else bool(family.o_bias),
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=_dtype(config),
        stop_ids=id_tuple(config.get("eos_token_id")),
        weight_format=_weight_format(config, name),
    )


def id_tuple(value: int | list[int] | None) -> tuple[int, ...]:
    """An `eos_token_id` field, which may be absent, one id or a list of ids."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _family(config: Mapping[str, Any]) -> tuple[str, Family]:
    architectures = config.get("architectures") or []
    for name in architectures:
        if name in FAMILIES:
            return name, FAMILIES[name]
    if not architectures:
        for name, family in FAMILIES.items():
            if family.model_type == config.get("model_type"):
                return name, family
    found = ", ".join(architectures) or f"model_type {config.get('model_type')!r}"
    for name, model_type in UNSERVED_WITH_MTP.items():
        if name in architectures or (not architectures and model_type == config.get("model_type")):
            raise CheckpointError(
                f"{found} has multi-token prediction layers, but the model itself is not served yet; "
                f"expected one of {', '.join(FAMILIES)}"
            )
    raise CheckpointError(f"unknown architecture {found}; expected one of {', '.join(FAMILIES)}")


def _required(config: Mapping[str, Any], key: str, architecture: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"config of {architecture}: expected a positive integer {key}, found {value!r}")
    return value


def _refused(key: str, value: object, architecture: str) -> CheckpointError:
    shown = repr(value) if len(repr(value)) < 80 else repr(value)[:77] + "..."
    return CheckpointError(f"config of {architecture}: {key} = {shown} is not supported")


def _refuse_sliding_window(
    config: Mapping[str, Any], family: Family, name: str, max_positions: int, layers: int
) -> None:
    """A window at least as long as the context never cuts anything off, and some families switch it off."""
    layer_types = config.get("layer_types")
    for kind in set(layer_types or ()) - {"full_attention", "sliding_attention"}:
        raise _refused("layer_types", kind, name)
    window = config.get("sliding_window", family.sliding_window)
    if window is None or window >= max_positions:
        return
    if layer_types is not None and "sliding_attention" not in layer_types:
        return
    if family.window_switch:
        if not config.get("use_sliding_window", False):
            return
        if layer_types is None and config.get("max_window_layers", layers) >= layers:
            return  # only layers from max_window_layers up have the window
    elif name == "LlamaForCausalLM":
        return  # the architecture has none; the key is a leftover
    raise _refused("sliding_window", window, name)


def _rope(config: Mapping[str, Any], name: str) -> RopeConfig:
    """Reads `rope_theta` with `rope_scaling`, or `rope_parameters`, which holds both."""
    parameters = config.get("rope_parameters")
    scaling = parameters if parameters is not None else config.get("rope_scaling")
    key = "rope_parameters" if parameters is not None else "rope_scaling"
    scaling = scaling or {}
    theta = float(scaling.get("rope_theta", config.get("rope_theta") or 10000.0))
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise _refused(f"{key} per layer type", dict(scaling), name)
    if (scaling.get("partial_rotary_factor") or 1) != 1:
        raise _refused(f"{key}.partial_rotary_factor", scaling["partial_rotary_factor"], name)
    kind = scaling.get("rope_type", scaling.get("type")) or "default"
    try:
        if kind == "default":
            return RopeConfig(theta)
        if kind == "linear":
            return RopeConfig(theta, "linear", float(scaling["factor"]))
        if kind == "llama3":
            return RopeConfig(
                theta,
                "llama3",
                float(scaling["factor"]),
                float(scaling["low_freq_factor"]),
                float(scaling["high_freq_factor"]),
                int(scaling["original_max_position_embeddings"]),
            )
    except KeyError as error:
        raise CheckpointError(f"config of {name}: {key} of type {kind} lacks {error.args[0]}") from None
    raise _refused(f"{key}.rope_type", kind, name)


def _weight_format(config: Mapping[str, Any], name: str) -> WeightFormat:
    quantization = config.get("quantization_config")
    if quantization is None:
        return DENSE
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if method not in FORMATS:
        raise CheckpointError(
            f"{_refused('quantization_config', quantization, name)}: expected "
            f"{' or '.join(('none', *(f'quant_method {known!r}' for known in FORMATS)))}, found {method!r}. Take the "
            "model's checkpoint that is not quantised, or a .gguf file, which --quantization speaks of"
        )
    return FORMATS[method](quantization)


def _dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """`dtype` is the key since transformers 5, `torch_dtype` before."""
    name = config.get("dtype", config.get("torch_dtype"))
    if name is None or name == "auto":
        return None
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CheckpointError(f"expected a floating point dtype in the config, found {name!r}")
    return dtype
