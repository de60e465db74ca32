"""What a `quantization_config` says of each module, and what is refused by its key."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import tiny_quantised as tiny
from reference.hf_configs import LLAMA32_1B, QWEN3_8B, QWEN35_9B

from draftwing.errors import CheckpointError
from draftwing.models.config import from_hf
from draftwing.models.quantised.config import FP8_CHANNEL, FP8_TENSOR, NVFP4, Quantization, Scheme

HOSTILE: tuple[Any, ...] = (
    None, True, 0, -1, 3, 2**64, 10**400, 0.5, float("nan"), "", "x", "\ud800", "a" * 9999, "re:(", "re:" + "(" * 3000,
    [], [[]], [None], ["x"] * 100, ["re:["], [128, 128], {}, {"x": 1}, {"x": {}}, {"group_0": {"targets": ["Linear"]}},
    {"-:(": {}}, {"weights": {}}, {"type": []},
)  # fmt: skip
Q_PROJ, DOWN = "model.layers.3.self_attn.q_proj", "model.layers.11.mlp.down_proj"


def parsed(config: Any) -> Quantization:
    found = from_hf({**LLAMA32_1B, "quantization_config": config}).quantization
    assert found is not None
    return found


def test_none_is_none() -> None:
    assert from_hf(LLAMA32_1B).quantization is None
    assert from_hf({**QWEN3_8B, "quantization_config": None}).quantization is None


# As published models have them, without what says nothing of weights.
DEEPSEEK_FP8 = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.3.self_attn"],
}  # fmt: skip
COMPRESSED_FP8 = {
    "config_groups": {"group_0": {
        "input_activations": {"actorder": None, "block_structure": None, "dynamic": True, "group_size": None,
                              "num_bits": 8, "observer": None, "observer_kwargs": {}, "strategy": "token",
                              "symmetric": True, "type": "float"},
        "output_activations": None, "targets": ["Linear"],
        "weights": {"actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
                    "observer": "minmax", "observer_kwargs": {}, "strategy": "channel", "symmetric": True,
                    "type": "float"}}},
    "format": "float-quantized", "global_compression_ratio": 1.46, "ignore": ["lm_head", "re:.*layers[.]3[.].*"],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
    "quant_method": "compressed-tensors", "quantization_status": "compressed", "sparsity_config": {},
    "transform_config": {}, "version": "0.12.2",
}  # fmt: skip
AWQ = {
    "bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
    "zero_point": True,
}  # fmt: skip
AUTO_GPTQ = {
    "bits": 4, "checkpoint_format": "gptq", "damp_percent": 0.01, "desc_act": True, "group_size": 128,
    "model_file_base_name": None, "model_name_or_path": None, "quant_method": "gptq", "static_groups": False,
    "sym": True, "true_sequential": True,
}  # fmt: skip
DYNAMIC = {
    "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "quant_method": "gptq", "pack_dtype": "int32",
    "dynamic": {"-:.*layers\\.3\\..*": {}, "+:.*\\.11\\..*down.*": {"bits": 8, "group_size": 64},
                ".*gate.*": {"sym": False}},
}  # fmt: skip
ONE_SCALE = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
FOR_CACHE = {"bias": None, "input_tensors": ONE_SCALE, "output_tensors": ONE_SCALE, "weight": ONE_SCALE}
QUARK = {
    "quant_method": "quark", "exclude": ["lm_head", "re:.*layers[.]2[.].*"], "algo_config": None,
    "export": {"kv_cache_group": ["*k_proj", "*v_proj"], "pack_method": "reorder", "weight_format": "real_quantized"},
    "global_quant_config": {**FOR_CACHE, "output_tensors": None}, "layer_type_quant_config": {},
    "layer_quant_config": {"*k_proj": FOR_CACHE, "*v_proj": FOR_CACHE},
}  # fmt: skip
MIXED = {
    **tiny.MODELOPT, "quant_algo": "MIXED_PRECISION", "ignore": ["mtp*", "model.language_model.layers.1.*"],
    "quantized_layers": {Q_PROJ: {"quant_algo": "FP8"}, DOWN: {"quant_algo": "W4A16_NVFP4", "group_size": 16}},
}  # fmt: skip


def test_published_configs() -> None:
    block = Scheme("plain", 8, 128, 128, "weight_scale_inv", real=True, dynamic=True)
    assert [parsed(DEEPSEEK_FP8).scheme_of(name) for name in (Q_PROJ, DOWN, "lm_head")] == [None, block, None]
    channel = Scheme("plain", 8, 1, 0, "weight_scale", real=True)
    assert [parsed(COMPRESSED_FP8).scheme_of(name) for name in (Q_PROJ, DOWN, "lm_head")] == [None, channel, None]
    assert parsed(AWQ).scheme_of(DOWN) == Scheme("awq", 4, 1, 128, symmetric=False)
    assert parsed(AUTO_GPTQ).scheme_of(DOWN) == Scheme("gptq", 4, 1, 128, act_order=True, zero_offset=1)
    dynamic = parsed(DYNAMIC)
    assert dynamic.scheme_of(Q_PROJ) is None
    assert dynamic.scheme_of(DOWN) == Scheme("gptq", 8, 1, 64, zero_offset=1)
    assert dynamic.scheme_of("model.layers.0.mlp.gate_proj") == Scheme(
        "gptq", 4, 1, 128, symmetric=False, zero_offset=1
    )
    assert dynamic.scheme_of("model.layers.0.mlp.up_proj") == Scheme("gptq", 4, 1, 128, zero_offset=1)


def test_what_modelopt_says_of_layers_and_of_names_with_stars() -> None:
    found = parsed(MIXED)
    assert (found.scheme_of(Q_PROJ), found.scheme_of(DOWN)) == (FP8_TENSOR, NVFP4)
    assert found.scheme_of("model.layers.3.mlp.up_proj") is None
    all_but = parsed({**MIXED, "quant_algo": "FP8", "quantized_layers": {}})
    names = ("mtp.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj", "lm_head")
    assert [all_but.scheme_of(name) for name in names] == [None, None, FP8_TENSOR, FP8_TENSOR]
    beside = {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    assert [parsed(beside).scheme_of(name) for name in (DOWN, "lm_head")] == [NVFP4, None]


def test_what_quark_says_of_layers() -> None:
    found = parsed(QUARK)
    names = (Q_PROJ, "model.layers.3.self_attn.k_proj", "model.layers.2.self_attn.k_proj", "lm_head")
    assert [found.scheme_of(name) for name in names] == [FP8_TENSOR, FP8_TENSOR, None, None]
    by_row = changed(QUARK, "layer_quant_config", "*k_proj", "weight", "qscheme", to="per_channel")
    assert [parsed(by_row).scheme_of(name) for name in names] == [FP8_TENSOR, FP8_CHANNEL, None, None]


def test_names_of_a_model_for_images_are_those_of_its_language_model() -> None:
    kept = "model.language_model.layers.0.linear_attn.in_proj_a"
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": [kept, "lm_head"]}
    quantization = from_hf({**QWEN35_9B, "quantization_config": fp8}).quantization
    assert quantization is not None and quantization.scheme_of("model.layers.0.linear_attn.in_proj_a") is None
    assert quantization.scheme_of("model.layers.0.linear_attn.in_proj_qkv") is not None


def test_names_that_only_look_alike_are_quantised() -> None:
    found = parsed({**DEEPSEEK_FP8, "modules_to_not_convert": ["layers.1", "mlp.gate", "re:.*q_pro$"]})
    names = ("model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj", "model.layers.0.mlp.gate_proj", Q_PROJ)
    assert [found.scheme_of(name) is None for name in names] == [True, False, False, False]


def test_formats_in_one_checkpoint() -> None:
    mixed = tiny.compressed(tiny.INT4, "mixed-precision")
    groups = mixed["config_groups"]
    groups["group_0"]["format"] = "pack-quantized"
    groups["group_1"] = {
        "targets": ["re:.*self_attn.*", DOWN], "format": "float-quantized",
        "weights": {**tiny.FP8, "strategy": "tensor"},
    }  # fmt: skip
    found = parsed(mixed)
    eight = Scheme("plain", 8, 0, 0, "weight_scale", real=True)
    assert [found.scheme_of(name) for name in (Q_PROJ, DOWN)] == [eight, eight]
    assert found.scheme_of("model.layers.3.mlp.down_proj") == Scheme("packed", 4, 1, 32, "weight_scale")


def changed(config: dict[str, Any], *path: str, to: Any) -> dict[str, Any]:
    first, *rest = path
    inner = config.get(first)
    return {**config, first: changed(inner if isinstance(inner, dict) else {}, *rest, to=to) if rest else to}


GROUP = ("config_groups", "group_0")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(AWQ, "bits", to=8), r"quantization_config.bits: expected 4, found 8"),
        (changed(AWQ, "version", to="gemv"), r"quantization_config.version: expected 'gemm', found 'gemv'"),
        (changed(AWQ, "zero_point", to=False), r"quantization_config.zero_point: expected True, found False"),
        (changed(AWQ, "group_size", to=0), r"quantization_config.group_size: expected -1 or an integer from 1 to"),
        (changed(AUTO_GPTQ, "bits", to=5), r"quantization_config.bits: expected 2 or 3 or 4 or 8, found 5"),
        (changed(AUTO_GPTQ, "checkpoint_format", to="marlin"), r"checkpoint_format: expected 'gptq' or"),
        (changed(DYNAMIC, "dynamic", to={"+:(": {}}), r"quantization_config.dynamic.*expected a regular expression"),
        (changed(DYNAMIC, "dynamic", to={"+:.*{99}": {}}), r"expected a regular expression, one without {"),
        (changed(DYNAMIC, "dynamic", to={"+:.*": {"bits": 5}}), r"dynamic.\+:.\*.bits: expected 2 or 3"),
        (changed(DEEPSEEK_FP8, "fmt", to="e5m2"), r"config.fmt: expected 'e4m3' or 'float8_e4m3fn', found 'e5m2'"),
        (changed(DEEPSEEK_FP8, "weight_block_size", to=[0, 128]), r"weight_block_size: expected two integers"),
        (changed(COMPRESSED_FP8, "format", to="mxfp4-pack-quantized"), r"config.format: expected 'pack-quan"),
        (changed(COMPRESSED_FP8, *GROUP, "weights", "num_bits", to=4),
         r"quantization_config.config_groups.group_0.weights.num_bits: expected 8, found 4"),
        (changed(COMPRESSED_FP8, *GROUP, "input_activations", "num_bits", to=2),
         r"config_groups.group_0.input_activations.num_bits: expected 4 or 8, found 2"),
        (tiny.compressed({**tiny.FP4, "group_size": 32}, "nvfp4-pack-quantized"), r"group_size: expected 16, found 32"),
        ({**tiny.MODELOPT, "quant_algo": "W4A16_AWQ"}, r"quant_algo: expected 'FP8' or .*, found 'W4A16_AWQ'"),
        ({**tiny.MODELOPT, "quant_algo": "NVFP4", "group_size": 32}, r"config.group_size: expected 16, found 32"),
        (changed(QUARK, "layer_quant_config", "*q_proj", "weight", "dtype", to="int4"),
         r"layer_quant_config.\*q_proj.weight.dtype: expected 'fp8_e4m3', found 'int4'"),
        (changed(QUARK, "layer_type_quant_config", to={"Linear": {}}), r"layer_type_quant_config: expected none"),
        (changed(QUARK, "global_quant_config", "weight", "dtype", to="fp4"), r"weight.dtype: expected 'fp8_e4m3'"),
        (changed(COMPRESSED_FP8, *GROUP, "weights", "strategy", to="tensor_group"), r"strategy: expected 'tensor' or"),
        (changed(COMPRESSED_FP8, *GROUP, "weights", "dynamic", to=True), r"weights.dynamic: expected False"),
        (changed(COMPRESSED_FP8, "sparsity_config", "format", to="sparse-24"), r"sparsity_config.format: expected"),
        (changed(COMPRESSED_FP8, "transform_config", "config_groups", to={"a": {}}), r"transform_config.config_groups"),
        (changed(COMPRESSED_FP8, "config_groups", to={}) | {"ignore": []}, r"config_groups: expected at least one"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, r"load_in_4bit: expected true, found None"),
        (changed(tiny.BNB, "bnb_4bit_quant_storage", to="bfloat16"), r"quant_storage: expected 'uint8', found 'bf"),
        ({"quant_method": "hqq"}, r"expected none or quant_method awq, .*, quark, found 'hqq'. Take the model's"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_its_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        parsed(config)
    assert "config of LlamaForCausalLM" in str(caught.value)


def test_patterns_that_take_forever_are_refused() -> None:
    found = parsed({**DEEPSEEK_FP8, "modules_to_not_convert": [r"re:(?:\w|\w\w|_|[.])+(?:!|:)"]})
    began = time.process_time()
    with pytest.raises(CheckpointError, match="takes too long to match"):
        found.scheme_of("model.layers.0.self_attn.q_proj.and_more_of_it_without_an_end_in_sight" * 3)
    assert time.process_time() - began < 5


def paths(config: Any, before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [before] if before else []
    if isinstance(config, dict):
        found += [path for key, value in config.items() for path in paths(value, (*before, key))]
    return found


EVERY = (
    DEEPSEEK_FP8, COMPRESSED_FP8, AWQ, AUTO_GPTQ, DYNAMIC, QUARK, MIXED, tiny.BNB,
    tiny.compressed(tiny.INT4, "pack-quantized"),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("config", EVERY)
def test_hostile_values_of_any_key_give_one_sentence(config: dict[str, Any]) -> None:
    began, refused, generator = time.process_time(), 0, random.Random(0)
    for path in paths(config):
        for value in HOSTILE:
            changes = changed(config, *path, to=value)
            if generator.random() < 0.2:
                changes = changed(changes, *generator.choice(paths(config)), to=generator.choice(HOSTILE))
            try:
                found = from_hf({**LLAMA32_1B, "quantization_config": changes}).quantization
                if found is not None:
                    found.scheme_of(DOWN)
            except CheckpointError as error:
                refused += 1
                message = str(error)
                assert len(message) < 700 and "\n" not in message and "expected" in message, message
                message.encode()
    assert refused > 30 and time.process_time() - began < 60
