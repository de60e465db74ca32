"""Config parsing: the published configs, and what is refused by name."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from published import published
from reference.hf_configs import (
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    EXAONE4_32B,
    GEMMA3_1B,
    GEMMA4_26B,
    GEMMA4_31B,
    GEMMA4_E2B,
    GLM5,
    GLM45,
    GLM47_FLASH,
    GLM52,
    GPT_OSS_20B,
    GRANITE33_8B,
    KIMI_LINEAR_48B,
    LFM2_12B,
    LING3_FLASH,
    LLAMA2_7B,
    LLAMA4_MAVERICK,
    LLAMA32_1B,
    MINIMAX_M2,
    MINISTRAL3_8B,
    MISTRAL_7B_V01,
    OLMO3_7B,
    PHI4_MINI,
    PHI_2,
    PYTHIA_14B,
    QWEN2_57B,
    QWEN3_8B,
    QWEN3_30B,
    QWEN25_7B,
    QWEN25_15B_TRANSFORMERS5,
    QWEN35_9B,
    QWEN35_35B,
    QWEN35_TEXT,
    SMOLLM3_3B,
    STABLELM2_16B,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from draftwing.errors import CheckpointError
from draftwing.kv.pool import KVSpec
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig
from draftwing.layers.delta_net import DeltaNetConfig
from draftwing.layers.indexer import IndexConfig
from draftwing.layers.latent import LatentAttentionConfig
from draftwing.layers.part_configs import ExpertConfig, NormConfig
from draftwing.layers.rope import RopeConfig
from draftwing.layers.short_conv import ShortConvConfig
from draftwing.models.config import ModelConfig, from_hf
from draftwing.models.families import FAMILIES
from draftwing.ops.experts.routing import Routing

LLAMA4 = {"architectures": ["Llama4ForCausalLM"], **LLAMA4_MAVERICK["text_config"]}


def windows(config: ModelConfig) -> tuple[int, ...]:
    return tuple(layer.mixer.window for layer in config.layers if isinstance(layer.mixer, AttentionConfig))


def test_llama2() -> None:
    assert from_hf(LLAMA2_7B) == ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=4096,
        vocab_size=32000,
        max_positions=4096,
        layers=(LayerConfig(4096, AttentionConfig(32, 32, 128), 11008, NormConfig(1e-5)),) * 32,
        ropes=(RopeConfig(10000.0),),
        norm=NormConfig(1e-5),
        dtype=torch.float16,
        stop_ids=(2,),
    )


def test_qwen35() -> None:
    config = from_hf(QWEN35_9B)
    attention, net = config.layers[3].mixer, config.layers[0].mixer
    assert attention == AttentionConfig(16, 4, 256, qk_norm=True, gated=True, rotary=64)
    assert net == DeltaNetConfig(16, 32, 128, 128, 4) and config.norm == NormConfig(1e-6, True, 1.0)
    assert [layer.mixer for layer in config.layers] == [net, net, net, attention] * 8
    assert config.ropes == (RopeConfig(1e7, dims=64, sections=(11, 11, 10)),) and not config.tie_embeddings
    assert config.attention.keeps() == KVSpec(4, 256) and config.architecture == "Qwen3_5ForCausalLM"
    experts = from_hf(QWEN35_35B).experts
    assert experts == ExpertConfig(256, Routing(8), 512, shared=512, shared_gate=True)


def test_lfm2() -> None:
    config = from_hf(LFM2_12B)
    kinds = "".join("a" if isinstance(layer.mixer, AttentionConfig) else "c" for layer in config.layers)
    assert kinds == "ccaccaccacacacac" and config.layers[0].mixer == ShortConvConfig(2048, 3)
    assert config.layers[0].ffn == 8192 and config.tie_embeddings and config.norm.eps == 1e-5
    assert from_hf({**LFM2_12B, "block_auto_adjust_ff_dim": False}).layers[0].ffn == 12288
    assert from_hf({**LFM2_12B, "block_ffn_dim_multiplier": 1.05}).layers[0].ffn == 8704


def test_transformers5_keys() -> None:
    config = from_hf(QWEN25_15B_TRANSFORMERS5)
    assert (config.ropes, config.dtype, config.tie_embeddings) == ((RopeConfig(1e6),), torch.float16, True)


def test_glm45() -> None:
    config = from_hf(GLM45)
    assert [layer.experts is None for layer in config.layers] == [True] * 3 + [False] * 89
    assert config.experts == ExpertConfig(160, Routing(8, sigmoid=True, scale=2.5), 1536, shared=1536, wide_router=True)
    mixer = config.attention
    assert mixer.qk_norm and mixer.qkv_bias and not mixer.o_bias and not mixer.whole_norms and mixer.rotary == 64
    assert 351e9 < config.matrix_weights < 355e9  # published as 355B, with the prediction layer
    for changes, message in (
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy' is not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported"),
        ({"n_group": 7}, "expected groups of one size, found 160 experts in 7 groups"),
        ({"n_group": 40, "topk_group": 1}, "expected at most the 4 experts of 1 groups for a row, found 8"),
        ({"topk_group": 2}, "topk_group: expected 1, found 2"),
    ):
        with pytest.raises(CheckpointError, match=message):
            from_hf({**GLM45, **changes})


def test_latent_attention() -> None:
    config = from_hf(DEEPSEEK_V3)
    mixer = config.layers[0].mixer
    assert isinstance(mixer, LatentAttentionConfig) and mixer.keeps() == KVSpec(1, 576, shared=True)
    assert abs(mixer.factor - 1.8738) < 1e-4 and config.ropes[0].attention_factor == 1
    assert config.experts == ExpertConfig(256, Routing(8, True, True, 8, 4, 2.5), 2048, shared=2048, wide_router=True)
    assert [layer.experts is None for layer in config.layers] == [True] * 3 + [False] * 58
    assert 670e9 < config.matrix_weights < 672e9  # published as 671B
    flash = from_hf(GLM47_FLASH)
    assert flash.layers[0].mixer == LatentAttentionConfig(20, 192, 64, 256, 512, 768)
    assert 29e9 < flash.matrix_weights < 31e9  # published as 30B
    index = IndexConfig(64, 128, 2048)
    sparse = from_hf(DEEPSEEK_V32)
    assert [layer.mixer for layer in sparse.layers] == [replace(mixer, index=index)] * 61
    assert sparse.layers[0].mixer.keeps() == KVSpec(1, 576, shared=True, index_size=128)
    assert from_hf(GLM5).layers[70].mixer.index == IndexConfig(32, 128, 2048, interleaved=True)
    shared = [layer.mixer.index.shared for layer in from_hf(GLM52).layers]
    assert shared == [i not in (0, 1, *range(2, 78, 4)) for i in range(78)]
    assert from_hf({**GLM52, "indexer_types": ["full", "shared"] * 39}).layers[3].mixer.index.shared
    assert from_hf({**GLM52, "index_topk_pattern": "FSS" * 26}).layers[3].mixer.keeps().index_size == 128
    # Libraries take something else for granted in each of these families.
    for key in ("routed_scaling_factor", "topk_group", "first_k_dense_replace"):
        with pytest.raises(CheckpointError, match=f"{key}: expected .*, found None"):
            from_hf({name: value for name, value in DEEPSEEK_V3.items() if name != key})


def test_deepseek_v2() -> None:
    config = from_hf(DEEPSEEK_V2_LITE)
    assert config.experts == ExpertConfig(64, Routing(6, renormalise=False), 1408, shared=2816, wide_router=True)
    assert 15.6e9 < config.matrix_weights < 15.8e9  # published as 15.7B
    whole = {**DEEPSEEK_V2_LITE, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    experts = from_hf(whole).experts
    assert experts is not None and (experts.routing.groups, experts.routing.top_groups) == (8, 3)
    for changes, message in (
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' is not supported"),
        ({"norm_topk_prob": True}, "norm_topk_prob = True is not supported"),
        ({"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc' is not supported"),
        ({"n_group": None}, "n_group: expected an integer from 1 to 64, found None"),
    ):
        with pytest.raises(CheckpointError, match=message):
            from_hf({**whole, **changes})


def test_mlps_by_layer() -> None:
    layers = GLM47_FLASH["num_hidden_layers"]
    kinds = ["dense", "sparse", "dense"] + ["sparse"] * (layers - 3)
    config = from_hf({**GLM47_FLASH, "first_k_dense_replace": None, "mlp_layer_types": kinds})
    assert [i for i, layer in enumerate(config.layers) if layer.experts is None] == [0, 2]
    for wrong in (kinds[:-1], ["dense", "moe", *kinds[2:]]):
        with pytest.raises(CheckpointError, match="mlp_layer_types: expected dense or sparse for each of"):
            from_hf({**GLM47_FLASH, "mlp_layer_types": wrong})


@pytest.mark.parametrize("name", ["mellum2-12b-a2.5b", "hy3-preview", "laguna-m.1", "step-3.5-flash"])
def test_kinds_of_mlps_that_nobody_knows(name: str) -> None:
    config = published(name)
    count = config["num_hidden_layers"]
    kinds = ["dense", *["sparse"] * (count - 1)]
    config = {key: value for key, value in config.items() if key != "first_k_dense_replace"}
    found = from_hf(config | {"mlp_layer_types": kinds})
    assert [layer.experts is None for layer in found.layers] == [True] + [False] * (count - 1)
    for wrong in (["dense", "moe", *kinds[2:]], ["linear"] * count, kinds[:-1]):
        with pytest.raises(CheckpointError, match=f"mlp_layer_types: expected .* for each of {count} layers"):
            from_hf(config | {"mlp_layer_types": wrong})


@pytest.mark.parametrize(("name", "count"), [("mimo-v2-flash", 2), ("laguna-m.1", 2), ("step-3.5-flash", 0)])
def test_experts_for_all_rows_that_a_family_has_not(name: str, count: int) -> None:
    """Others read the key; these have none, or one by another key."""
    with pytest.raises(CheckpointError, match=f"n_shared_experts = {count} is not supported"):
        from_hf(published(name) | {"n_shared_experts": count})


@pytest.mark.parametrize(
    ("said", "scale"), [({}, 0.707), ({"attention_value_scale": None}, 1.0), ({"attention_value_scale": 0.5}, 0.5)]
)
def test_what_values_of_mimo_are_multiplied_with(said: dict[str, Any], scale: float) -> None:
    """As transformers' MiMoV2FlashConfig has it: 0.707 where a config does not say it, 1 where it says null."""
    config = {key: value for key, value in published("mimo-v2-flash").items() if key != "attention_value_scale"}
    mixers = [layer.mixer for layer in from_hf(config | said).layers]
    assert [getattr(mixer, "value_scale", None) for mixer in mixers] == [scale, scale]


def test_kinds_of_layers_of_mimo() -> None:
    config = published("mimo-v2-flash")
    given = "hybrid_layer_pattern", "moe_layer_freq"
    named = {"layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"]}
    assert from_hf({key: config[key] for key in config.keys() - given} | named).layers == from_hf(config).layers
    for key, wrong in {
        "layer_types": (["full_attention", "chunked_attention"], ["full_attention"]), "moe_layer_freq": ([0, 2], 1),
        "mlp_layer_types": (["dense", "moe"],), "hybrid_layer_pattern": ([0, "1"], [0, None], [{}, 1], [0, 1, 1]),
    }.items():  # fmt: skip
        for value in wrong:
            with pytest.raises(CheckpointError, match=f"{key}: expected .* for each of 2 layers, found"):
                from_hf(config | {key: value})


def test_minimax_m2() -> None:
    config = from_hf(MINIMAX_M2)
    assert config.experts == ExpertConfig(256, Routing(8, sigmoid=True), 1536, wide_router=True)
    mixer = config.attention
    assert mixer.qk_norm and mixer.whole_norms and not mixer.qkv_bias and mixer.rotary == 64
    assert config.ropes[0].theta == 5e6 and 228e9 < config.matrix_weights < 230e9  # published as 230B
    without = {key: value for key, value in MINIMAX_M2.items() if key not in ("head_dim", "partial_rotary_factor")}
    assert from_hf({**without, "rotary_dim": 64}).attention.rotary == 64, "of the 128 that a head has then"
    for changes in (
        {"attn_type_list": [1, 0] * 31}, {"use_qk_norm": False}, {"qk_norm_type": "per_head"},
        {"use_routing_bias": False}, {"shared_intermediate_size": 64}, {"layernorm_mlp_beta": 3.5},
        {"scoring_func": "softmax"},
    ):  # fmt: skip
        key, value = next(iter(changes.items()))
        with pytest.raises(CheckpointError, match=f"{key} = .* is not supported"):
            from_hf({**MINIMAX_M2, key: value})


def test_minimax_m1() -> None:
    config = published("minimax-m1-80k")
    assert [layer.normed_residual for layer in from_hf(config).layers] == [True] * 8
    for key, value in {"sliding_window": 64, "postnorm": False, "shared_intermediate_size": 64}.items():
        with pytest.raises(CheckpointError, match=f"{key} = .* is not supported"):
            from_hf({**config, key: value})


def test_qwen3_moe() -> None:
    config = from_hf(QWEN3_30B)
    assert {layer.experts for layer in config.layers} == {ExpertConfig(128, Routing(8), 768)}
    assert 30.4e9 < config.matrix_weights < 30.6e9  # published as 30.5B
    layers = from_hf({**QWEN3_30B, "decoder_sparse_step": 2, "mlp_only_layers": [3]}).layers
    assert [i for i, layer in enumerate(layers) if layer.experts is not None] == [i for i in range(1, 48, 2) if i != 3]


def test_gpt_oss() -> None:
    config = from_hf(GPT_OSS_20B)
    assert (
        config.experts == ExpertConfig(32, Routing(4), 2880, True, True, 7.0)
        and config.attention.sinks
        and config.norm.wide
    )
    assert windows(config) == (128, 0) * 12 and config.ropes[0].kind == "yarn"
    assert config.attention.qkv_bias and config.attention.o_bias
    assert config.quantization is not None and config.quantization.method == "mxfp4"
    assert 20.8e9 < config.matrix_weights < 21.0e9  # published as 20.9B
    with pytest.raises(CheckpointError, match=r"swiglu_alpha: expected 1[.]702, found 2"):
        from_hf({**GPT_OSS_20B, "swiglu_alpha": 2})
    with pytest.raises(CheckpointError, match=r"expected none or quant_method awq, gptq, fp8, .*, found 'mxfp4'"):
        from_hf({**QWEN3_30B, "quantization_config": GPT_OSS_20B["quantization_config"]})


def test_llama3_scaling_in_rope_parameters_is_that_of_rope_scaling() -> None:
    new = {k: v for k, v in LLAMA32_1B.items() if k not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = {**LLAMA32_1B["rope_scaling"], "rope_theta": 500000.0}
    assert from_hf(new).ropes == from_hf(LLAMA32_1B).ropes


def test_rope_theta_beside_rope_parameters_is_used_when_they_have_none() -> None:
    assert from_hf({**LLAMA2_7B, "rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}}).ropes[0].theta == 5e5


def test_legacy_linear_scaling() -> None:
    config = from_hf({**LLAMA2_7B, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert config.ropes == (RopeConfig(10000.0, "linear", 2.0),)


def test_model_type_stands_in_for_missing_architectures() -> None:
    config = {k: v for k, v in QWEN3_8B.items() if k != "architectures"}
    assert from_hf({**config, "model_type": "qwen3"}).architecture == "Qwen3ForCausalLM"


SLIDING, FULL = "sliding_attention", "full_attention"


def test_gemma3() -> None:
    config = from_hf(GEMMA3_1B)
    assert windows(config) == ((512,) * 5 + (0,)) * 4 + (512, 512) and config.tie_embeddings and config.norm.wide
    assert config.ropes == (RopeConfig(1e6), RopeConfig(1e4))
    assert [layer.mixer.rotates for layer in config.layers[4:7]] == [(1, 256), (0, 256), (1, 256)]
    larger = {**GEMMA3_1B, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    assert from_hf(larger).ropes == (RopeConfig(1e6, "linear", 8.0), RopeConfig(1e4))


def test_gemma4() -> None:
    config, small, mixture = map(from_hf, (GEMMA4_31B, GEMMA4_E2B, GEMMA4_26B))
    assert windows(config) == ((1024,) * 5 + (0,)) * 10 and config.soft_cap == 30 and config.tie_embeddings
    assert [layer.mixer.shape for layer in config.layers[4:6]] == [(32, 16, 256), (32, 4, 512)]
    assert [layer.mixer.rotates for layer in config.layers[4:6]] == [(1, 256), (0, 512)]
    assert config.ropes == (RopeConfig(1e6, "proportional", share=0.25), RopeConfig(1e4))
    assert 30.0e9 < config.matrix_weights < 31.5e9 and config.per_layer == 0 and config.experts is None
    assert small.per_layer == 256 and small.stop_ids == (1, 106)
    assert [layer.mixer.kv_from for layer in small.layers] == [None] * 15 + [13, 13, 13, 13, 14] * 4
    assert [layer.ffn for layer in small.layers] == [6144] * 15 + [12288] * 20
    assert 2.2e9 < small.matrix_weights < 2.5e9  # of the 5.1e9 of all
    assert 25e9 < mixture.matrix_weights < 26.5e9 and mixture.experts is not None and mixture.experts.beside


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MISTRAL_7B_V01, (4096,) * 32),
        ({k: v for k, v in MISTRAL_7B_V01.items() if k != "sliding_window"}, (4096,) * 32),  # transformers' default
        ({**MISTRAL_7B_V01, "layer_types": [SLIDING, FULL] * 16}, (4096, 0) * 16),
        ({**MISTRAL_7B_V01, "sliding_window": None}, ()),
        ({**MISTRAL_7B_V01, "sliding_window": 32768}, ()),  # as long as the context
        ({**LLAMA2_7B, "sliding_window": 100}, ()),  # a leftover
        (
            {**QWEN25_7B, "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 21},
            (0,) * 21 + (4096,) * 7,
        ),
        ({**QWEN25_7B, "use_sliding_window": True, "sliding_window": 64, "layer_types": [SLIDING] * 28}, (64,) * 28),
        ({**QWEN25_7B, "sliding_window": 64}, ()),  # use_sliding_window is false
        ({**QWEN25_7B, "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 28}, ()),
        ({**QWEN25_7B, "sliding_window": 4096, "use_sliding_window": True, "layer_types": [FULL] * 28}, ()),
    ],
)
def test_windows(config: dict[str, Any], expected: tuple[int, ...]) -> None:
    found = from_hf(config)
    assert windows(found) == (expected or (0,) * found.num_layers)


def test_harmless_values_are_accepted() -> None:
    from_hf({**LLAMA2_7B, "quantization_config": None, "num_experts": 0, "partial_rotary_factor": 1.0})
    from_hf({**LLAMA2_7B, "rope_scaling": {"rope_type": "default"}})


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**GEMMA3_1B, "attn_logit_softcapping": 30.0}, "attn_logit_softcapping = 30.0"),
        ({**GEMMA3_1B, "hidden_activation": "silu"}, "hidden_activation = 'silu'"),
        ({**GEMMA3_1B, "use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ({**GEMMA3_1B, "sliding_window": None}, "sliding_window: expected 1 or more"),
        ({**MISTRAL_7B_V01, "sliding_window": 0}, "sliding_window: expected 1 or more"),
        ({**MISTRAL_7B_V01, "layer_types": ["sliding_attention"] * 31}, "layer_types: expected one for each of 32"),
        ({**LLAMA2_7B, "layer_types": ["linear_attention"] * 32}, "linear_attention"),
        ({**QWEN3_8B, "rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor: expected a number"),
        (
            {**LLAMA2_7B, "rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 8.0}},
            "rope_scaling.rope_type = 'dynamic'",
        ),
        ({**LLAMA2_7B, "rope_parameters": {"rope_type": "ntk"}}, "rope_parameters.rope_type = 'ntk'"),
        ({**LLAMA2_7B, "rope_scaling": {"type": "longrope", "long_factor": [1.0] * 64}}, "rope_scaling.short_factor"),
        ({**LLAMA2_7B, "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 64}}, "long_factor"),
        (
            {**PHI4_MINI, "rope_scaling": {**PHI4_MINI["rope_scaling"], "long_factor": [1.0]}},
            "48 rope frequency",
        ),
        ({**SMOLLM3_3B, "no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({**SMOLLM3_3B, "layer_types": None, "use_sliding_window": True, "sliding_window": 9}, "use_sliding_window"),
        ({**QWEN2_57B, "use_sliding_window": True}, "use_sliding_window"),
        ({**PHI4_MINI, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
        (
            {**MINISTRAL3_8B, "text_config": {**MINISTRAL3_8B["text_config"], "model_type": "gpt_oss"}},
            "expected one of mistral, ministral3",
        ),
        (
            {**MINISTRAL3_8B, "text_config": {**MINISTRAL3_8B["text_config"], "rope_parameters": None}},
            "rope_parameters: expected an object",
        ),
        ({**EXAONE4_32B, "layer_types": None, "sliding_window_pattern": "LGLG"}, "sliding_window_pattern"),
        ({**LLAMA2_7B, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per layer type"),
        ({**LLAMA2_7B, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({**LLAMA2_7B, "rope_scaling": {"type": "linear"}}, "rope_scaling.factor: expected a number"),
        ({**LLAMA2_7B, "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({**LLAMA2_7B, "hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({**LLAMA2_7B, "is_causal": False}, "is_causal = False is not supported"),
        (
            {**DEEPSEEK_V3, "architectures": ["Glm5NextForConditionalGeneration"]},
            "hyper-connections that mix streams",
        ),
        ({**LLAMA2_7B, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({**LLAMA2_7B, "num_experts": 8}, "num_experts = 8"),
        ({**LLAMA2_7B, "residual_multiplier": 0.22}, "residual_multiplier = 0.22"),
        ({**GRANITE33_8B, "attention_multiplier": 0.3}, "attention_multiplier = 0.3"),
        ({**LLAMA2_7B, "quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        ({**LLAMA2_7B, "architectures": ["DeepseekV4ForCausalLM"]}, "DeepseekV4ForCausalLM has sparse"),
        ({**STABLELM2_16B, "qk_layernorm": True}, "qk_layernorm = True"),
        ({**PHI_2, "qk_layernorm": True}, "qk_layernorm = True"),
        ({**PHI_2, "hidden_act": "relu"}, "hidden_act = 'relu'"),
        ({**PYTHIA_14B, "use_parallel_residual": "x"}, "use_parallel_residual: expected true or false"),
        ({"model_type": "opt"}, "'opt' has learned positions that begin at 2, which is not"),
        ({**QWEN35_TEXT, "attn_output_gate": False}, "attn_output_gate = False"),
        ({**QWEN35_TEXT, "layer_types": ["linear_attention"] * 32}, "expected a layer with attention, found none"),
        ({**QWEN35_TEXT, "layer_types": ["sliding_attention"] * 32}, "layer_types = 'sliding_attention'"),
        ({**QWEN35_TEXT, "linear_num_value_heads": 24}, "found 24 and 16"),
        ({**QWEN35_TEXT, "partial_rotary_factor": 3 / 256, "rope_parameters": None}, "that are turned, found 3"),
        ({**QWEN35_TEXT, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0}}, "are turned, found 0"),
        ({**LLAMA2_7B, "attn_output_gate": True}, "attn_output_gate = True"),
        ({**LFM2_12B, "conv_bias": True}, "conv_bias = True"),
        ({**KIMI_LINEAR_48B, "mla_use_nope": False}, "mla_use_nope = False"),
        ({**KIMI_LINEAR_48B, "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [1]}}, "1 to 27 once"),
        ({**KIMI_LINEAR_48B, "linear_attn_config": {"gate_lower_bound": -5.0}}, "gate_lower_bound"),
        ({**MINIMAX_M2, "partial_rotary_factor": 0.25}, "partial_rotary_factor: expected 0.5, which rotary_dim says"),
        ({**LFM2_12B, "block_auto_adjust_ff_dim": None}, "ff_dim: expected true or false, found None"),
        ({**LING3_FLASH, "kda_lower_bound": 5.0}, "kda_lower_bound: expected a number from -1000 to -0.001, found 5.0"),
        ({**LING3_FLASH, "kda_safe_gate": None}, "kda_safe_gate: expected true or false, found None"),
        ({**LING3_FLASH, "layer_types": ["sliding_attention"] * 42}, "layer_types = 'sliding_attention'"),
        ({**LLAMA4, "num_experts_per_tok": 2}, "num_experts_per_tok = 2 is not supported"),
        ({**LLAMA4, "moe_layers": [48]}, "moe_layers: expected a list of numbers of layers below 48, found [48]"),
        ({**LLAMA4, "layer_types": ["sliding_attention"] * 48}, "layer_types: expected full_attention or chunked"),
        (
            {**LLAMA4, "layer_types": ["chunked_attention"] * 48, "attention_chunk_size": None},
            "attention_chunk_size: expected a number of positions",
        ),
        ({**LLAMA4, "attn_temperature_tuning": "x"}, "attn_temperature_tuning: expected true or false, found 'x'"),
        ({**LLAMA4, "use_qk_norm": None}, "use_qk_norm: expected true or false, found None"),
        ({**DEEPSEEK_V32, "index_topk": None}, "index_topk: expected an integer"),
        ({**DEEPSEEK_V32, "index_head_dim": 100}, "index_head_dim: expected a multiple of 32 from 64 to 512, found"),
        ({**DEEPSEEK_V32, "q_lora_rank": None}, "q_lora_rank: expected at least 1"),
        ({**GLM52, "indexer_types": ["shared"] * 78}, "indexer_types: expected full or shared for each of 78 layers"),
        ({**GLM52, "index_topk_pattern": "FSSX" * 20}, "index_topk_pattern: expected full or shared for each"),
        ({**GLM52, "num_experts": 8}, "num_experts: expected 256, as n_routed_experts says, found 8"),
        ({**DEEPSEEK_V3, "norm_topk_prob": None}, "norm_topk_prob: expected true or false, found None"),
        ({**OLMO3_7B, "rope_theta": 1e4}, "rope_theta = 10000.0"),
        ({**DEEPSEEK_V32, "rope_interleave": False}, "rope_interleave = False"),
        (
            {**LLAMA2_7B, "rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"rope_theta": 1e4}, "rope_theta": 9},
            "rope_theta: expected none beside both",
        ),
        ({**GEMMA3_1B, "tie_word_embeddings": None}, "tie_word_embeddings: expected true or false, found None"),
        ({**GLM45, "partial_rotary_factor": None}, "partial_rotary_factor: expected a number from 0 to 1, found None"),
        ({**LFM2_12B, "conv_L_cache": 1}, "must be at least 2, found 1"),
        ({"architectures": ["LlamaForSomething"]}, "the nearest that are served: LlamaForCausalLM"),
        (
            {**QWEN3_30B, "num_experts": 8, "num_experts_per_tok": 9},
            "num_experts_per_tok: expected an integer from 1 to 8, found 9",
        ),
        ({**QWEN3_30B, "mlp_only_layers": ["0"]}, "mlp_only_layers: expected a list of layer numbers"),
        ({k: v for k, v in LLAMA2_7B.items() if k != "hidden_size"}, "hidden_size: expected an integer"),
        ({**LLAMA2_7B, "num_key_value_heads": 5}, "found 32 and 5"),
        ({**LLAMA2_7B, "torch_dtype": "int8"}, "'int8'"),
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as error:
        from_hf(config)
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (QWEN3_8B, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
        (LLAMA2_7B, {"type": "dynamic", "factor": 2.0}), (GEMMA3_1B, {"rope_type": "linear", "factor": 8.0}),
    ],
)  # fmt: skip
def test_rope_scaling_that_is_added_beside_rope_parameters_is_not_passed_over(
    config: dict[str, Any], expected: dict[str, Any]
) -> None:
    saved = {k: v for k, v in config.items() if k not in ("rope_scaling", "rope_theta")}
    saved["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    with pytest.raises(CheckpointError, match="rope_scaling: expected none beside rope_parameters, or the same, found"):
        from_hf({**saved, "rope_scaling": expected})
    same = {"rope_theta": 1e6, **expected}
    if expected.get("type") != "dynamic" and config is not GEMMA3_1B:
        for more in ({"rope_scaling": same}, {"rope_scaling": expected, "rope_theta": 1e6}):
            assert from_hf({**saved, "rope_parameters": same, **more}).ropes[0].kind == "yarn"
        with pytest.raises(CheckpointError, match="rope_scaling: expected none"):  # others have another base then
            from_hf({**saved, "rope_parameters": same, "rope_scaling": expected})


def test_chunks_in_which_texts_are_whole_are_left_out() -> None:
    config = from_hf(LLAMA4)
    chunks = [layer.mixer.chunk for layer in config.layers if isinstance(layer.mixer, AttentionConfig)]
    assert chunks == [8192, 8192, 8192, 0] * 12 and config.for_texts(8193) == config
    assert all(layer.mixer.chunk == 0 for layer in config.for_texts(8192).layers)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "key"),
    [("nemotron-3-nano-30b-a3b", "moe_shared_expert_intermediate_size"), ("hy3-preview", "num_shared_experts")],
)
def test_no_shared_expert_is_one_as_wide_as_an_mlp(name: str, key: str) -> None:
    """In transformers, which takes 0 for what is not said."""
    config = published(name)
    experts = from_hf({**config, key: 0}).experts
    assert experts is not None and experts.shared == config["intermediate_size"]


def test_one_expert_is_none() -> None:
    config = published("jamba-1.5-mini")
    assert from_hf({**config, "num_experts": 1}).experts is None and from_hf(config).experts is not None


def test_keys_of_jamba_that_older_files_have() -> None:
    """Without norms of step sizes, B and C it is another model."""
    config = published("jamba-1.5-mini")
    older = {"mamba_inner_layernorms": True, "n_ctx": 262144, "calc_logits_for_entire_prompt": False}
    assert from_hf({**config, **older}) == from_hf(config)
    with pytest.raises(CheckpointError, match="mamba_inner_layernorms = False is not supported"):
        from_hf({**config, "mamba_inner_layernorms": False})


def test_what_a_config_leaves_out_is_as_its_family_has_it() -> None:
    bare = {k: v for k, v in GPT_OSS_20B.items() if k not in ("attention_bias", "rms_norm_eps")}
    assert from_hf(bare) == from_hf(GPT_OSS_20B)
    with pytest.raises(CheckpointError, match="rope_parameters: expected an object, found None"):
        from_hf({k: v for k, v in GPT_OSS_20B.items() if k not in ("rope_scaling", "rope_parameters")})
    mixtral = {
        **MISTRAL_7B_V01, "architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    found = from_hf({k: v for k, v in mixtral.items() if k not in ("rms_norm_eps", "rope_theta")})
    assert (found.norm.eps, found.ropes[0].theta) == (1e-5, 1e6)


def test_bases_of_rotary_embeddings_that_configs_leave_out() -> None:
    """Are those of transformers' classes."""
    found = {}
    for name, family in FAMILIES.items():
        if family.model_type not in CONFIG_MAPPING:
            continue
        config = CONFIG_MAPPING[family.model_type]().to_dict()
        rope = config.pop("rope_parameters", None) or {}
        if type(rope.get("rope_theta")) not in (int, float):
            continue
        with suppress(CheckpointError):  # of what their classes do not have by default
            found[name] = from_hf(config | {"architectures": [name]}).ropes[0].theta, rope["rope_theta"]
    assert len(found) > 40 and not {name: pair for name, pair in found.items() if pair[0] != pair[1]}
