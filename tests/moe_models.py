"""Small random models of transformers whose experts are chosen by sigmoids, with prediction layers, and their files."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf as gguf_package
import pytest
import torch
import transformers
from gguf import GGML_QUANT_SIZES, ExpertGatingFuncType
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize
from safetensors.torch import load_file, save_file
from tiny_gguf import finish
from torch import Tensor
from transformers.modeling_layers import MtpModel

from draftwing.ops import make_ops

VOCAB, LAYERS = 101, 3
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": VOCAB, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": None, "num_experts_per_tok": 3, "rms_norm_eps": 1e-5,
}  # fmt: skip
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
GLM = {
    "n_routed_experts": 8, "moe_intermediate_size": 32, "routed_scaling_factor": 1.5, "attention_bias": True,
    "rope_parameters": PARTIAL,
}  # fmt: skip
LATENT = {
    "n_routed_experts": 8, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "kv_lora_rank": 48,
    "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24, "num_key_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "head_dim": 8,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
OTHERS = {"num_experts": 8, "moe_intermediate_size": 32, "pad_token_id": None}
WINDOWS = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 5}
# Prefix of transformers' classes, and what is not in `SIZES`.
INDEX = {"index_topk": 16, "index_n_heads": 24, "index_head_dim": 32}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4-moe": ("Glm4Moe", GLM),
    "glm4-moe-groups": ("Glm4Moe", {**GLM, "n_group": 4, "topk_group": 2, "use_qk_norm": True}),
    "deepseek-v3": ("DeepseekV3", {**LATENT, "n_group": 4, "topk_group": 2, "rope_parameters": YARN}),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": None,
            "routed_scaling_factor": 1.0,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
    "deepseek-v2-groups": (
        "DeepseekV2",
        {
            **LATENT,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
            "attention_bias": True,
        },
    ),
    "glm4-moe-lite": ("Glm4MoeLite", LATENT),
    "youtu": (
        "Youtu",
        {
            **{key: value for key, value in LATENT.items() if "moe" not in key and "expert" not in key},
            "num_experts_per_tok": None,
            "tie_word_embeddings": False,
        },
    ),
    "glm4-moe-lite-halves": ("Glm4MoeLite", {**LATENT, "q_lora_rank": None, "rope_interleave": False}),
    "deepseek-v3.2": ("DeepseekV32", {**LATENT, **INDEX, "n_group": 4, "topk_group": 2, "rope_parameters": YARN}),
    "glm-5": ("GlmMoeDsa", {**LATENT, **INDEX, "indexer_types": ["full", "shared", "full"]}),
    "hunyuan-v3": ("HYV3", {**OTHERS, "router_scaling_factor": 1.5}),
    "ling2": ("SarvamMoE", {**OTHERS, "first_k_dense_replace": 1, "rope_parameters": PARTIAL}),
    "exaone-moe": ("ExaoneMoe", {**OTHERS, **WINDOWS, "rope_parameters": PLAIN}),
    "exaone-moe-window": (
        "ExaoneMoe",
        {
            **OTHERS,
            **WINDOWS,
            "sliding_windows": [5, 5, 0],
            "mtp_layer_types": ["sliding_attention"],
            "mtp_sliding_windows": [5],
            "rope_parameters": PLAIN,
        },
    ),
    "mellum": ("Mellum", {**OTHERS, **WINDOWS, "num_mtp_layers": 1}),
    "mellum-upside-down": (
        "Mellum",
        {**OTHERS, **WINDOWS, "layer_types": WINDOWS["layer_types"][::-1], "num_mtp_layers": 1},
    ),
    "mellum-full": ("Mellum", {**OTHERS, **WINDOWS, "num_mtp_layers": 1, "mtp_layer_types": ["full_attention"]}),
    "minimax-m2": (
        "MiniMaxM2",
        {"num_local_experts": 8, "intermediate_size": 32, "rotary_dim": 16, "rope_parameters": {**PARTIAL}},
    ),
}


def reference(kind: str, **overrides: Any) -> Any:
    """Of transformers, in float32, with random weights, and corrections that change who is chosen."""
    prefix, settings = copy.deepcopy(KINDS[kind])  # some configs write into their objects
    if not hasattr(transformers, f"{prefix}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {prefix}")
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **settings, **overrides})
    torch.manual_seed(0)
    made = getattr(transformers, f"{prefix}ForCausalLM", None)  # of Ling 2.0 transformers has the names alone
    made = made or type("BailingMoeV2ForCausalLM", (transformers.Glm4MoeForCausalLM,), {})
    model = made(config).float().eval()
    return filled(model)


def filled(model: Any) -> Any:
    with torch.no_grad():
        for name, values in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("inv_freq"):
                continue
            if "norm" in name:
                values.uniform_(0.5, 1.5)
            else:
                values.normal_(0, 0.3 if name.endswith("bias") else 0.15)
    return model


def predicting(theirs: Any) -> Any:
    """Transformers' prediction layer of a model: it shares embedding and head."""
    if theirs.config.model_type in ("glm4_moe_lite", "deepseek_v32", "glm_moe_dsa"):
        # Of which it has none; this is one of its layers with experts.
        theirs.config.num_mtp_layers, theirs.config.mtp_mlp_layer_types = 1, ["sparse"]
        theirs.config.mtp_layer_types = ["indexed_attention"]
    elif theirs.config.model_type in AS_LAYERS:
        attention, theirs.config.mtp_mlp_layer_types = AS_LAYERS[theirs.config.model_type]
        theirs.config.mtp_layer_types = getattr(theirs.config, "mtp_layer_types", None) or attention
        theirs.config.num_mtp_layers = 1
    kept = {name: value.clone() for name, value in theirs.state_dict().items()}
    torch.manual_seed(7)
    layer = filled(MtpModel(theirs, 1).float().eval())
    if theirs.config.model_type not in AS_LAYERS:
        vars(theirs.config).pop("mtp_layer_types", None)  # which files do not have
    theirs.load_state_dict(kept)
    return layer


def published(theirs: Any, layer: Any) -> dict[str, Tensor]:
    """The tensors of a prediction layer in a checkpoint, with its copies of embedding and head, which nobody reads."""
    if theirs.config.model_type in AS_LAYERS:
        return as_a_layer(theirs, layer)
    own = f"model.layers.{theirs.config.num_hidden_layers}"
    found = {f"{own}.embed_tokens.weight": torch.zeros(3), f"{own}.shared_head.head.weight": torch.zeros(3)}
    for name, value in layer.state_dict().items():
        if not name.startswith("layers.0."):
            continue
        part = name.removeprefix("layers.0.").removeprefix("mtp_block.")
        found[f"{own}.{part.replace('post_norm', 'shared_head.norm')}"] = value
    return {name: value.clone() for name, value in by_expert(found).items()}


# Whose checkpoints call tensors otherwise than transformers, and whose prediction layers are of a kind of their own: of
# attention, where the config does not say, and of MLP.
AS_LAYERS: dict[str, tuple[list[str], list[str]]] = {
    "hy_v3": (["full_attention"], ["sparse"]),
    "sarvam_moe": (["full_attention"], ["sparse"]),
    "bailing_hybrid": (["full_attention"], ["sparse"]),
    "exaone_moe": (["full_attention"], ["dense"]),
    "mellum": (["sliding_attention"], ["sparse"]),
}
NUMBERED = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "post_norm": "final_layernorm"}
BELOW = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}


def as_a_layer(theirs: Any, layer: Any) -> dict[str, Tensor]:
    """The tensors of a prediction layer, its block as transformers stores one more layer of the model."""
    config, own, count = copy.deepcopy(theirs.config), theirs.config.get_mtp_config(), theirs.config.num_hidden_layers
    config.num_hidden_layers = count + 1
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(config, name, None) is not None:
            setattr(config, name, [*getattr(config, name), *getattr(own, name)])
    deeper, block = type(theirs)(config), layer.layers[0]
    deeper.model.layers[count].load_state_dict(block.mtp_block.state_dict())
    with TemporaryDirectory() as folder:
        deeper.save_pretrained(folder)
        stored = {name: value.clone() for name, value in load_file(Path(folder) / "model.safetensors").items()}
    numbered, at = theirs.config.model_type not in ("exaone_moe", "mellum"), f"model.layers.{count}."
    prefix, names, inner = (at, NUMBERED, at) if numbered else ("mtp.", BELOW, "mtp.layers.0.")
    found = {name.replace(at, inner): value for name, value in stored.items() if name.startswith(at)}
    beside = {f"{prefix}{name}.weight": getattr(block, part).weight.detach().clone() for part, name in names.items()}
    return by_expert({**found, **beside})


def by_expert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, of those that hold a matrix of all experts the part of each, under the names of a checkpoint."""
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        experts, _, matrix = name.rpartition(".")
        if not experts.endswith(".experts"):
            found[name] = value
        elif matrix == "gate_up_proj":
            for i, both in enumerate(value):
                gate, up = both.chunk(2)
                found |= {f"{experts}.{i}.gate_proj.weight": gate, f"{experts}.{i}.up_proj.weight": up}
        else:
            found |= {f"{experts}.{i}.{matrix}.weight": one for i, one in enumerate(value)}
    return found


def with_layer(folder: Path, theirs: Any, weights: Mapping[str, Tensor], **more: Any) -> Path:
    """A checkpoint with its prediction layer."""
    theirs.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, **weights}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **more}))
    return folder


NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp", "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm", "shared_head.head": "nextn.shared_head_head",
    "embed_tokens": "nextn.embed_tokens", "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b", "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.wq_b": "indexer.attn_q_b", "self_attn.indexer.weights_proj": "indexer.proj",
    "self_attn.indexer.k_norm": "indexer.k_norm",
}  # fmt: skip
TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


ARCHITECTURES = {
    "glm4_moe": "glm4moe", "minimax_m2": "minimax-m2", "deepseek_v32": "deepseek32", "glm_moe_dsa": "glm-dsa",
}  # fmt: skip


def write_gguf(
    path: Path,
    config: Any,
    tensors: Mapping[str, Tensor],
    kind: Type = Type.F32,
    joined: bool = False,
    apart: bool | None = None,
    only_mtp: bool = False,
) -> Path:
    """A file as llama.cpp's converter lays it out. tensors: of a model of transformers and, with other names, of a
    prediction layer.  kind: of matrices.  joined: as files of old have latent attention.  apart: whether it has the
    two parts of its matrix, None: if it has not the whole.  only_mtp: the layer, embedding and head alone."""
    arch = ARCHITECTURES.get(config.model_type, "deepseek2")
    writer = gguf_package.GGUFWriter(path, arch)
    predicts = any(name.endswith("eh_proj.weight") for name in tensors)
    _metadata(writer, config, predicts)
    if arch in ("glm4moe", "minimax-m2"):
        _attention_metadata(writer, config)
    else:
        _latent_metadata(writer, config, joined)
    if hasattr(config, "index_topk"):
        writer.add_indexer_head_count(config.index_n_heads)
        writer.add_indexer_key_length(config.index_head_dim)
        writer.add_indexer_top_k(config.index_topk)
    experts: dict[str, list[Tensor]] = {}
    for name, value in tensors.items():
        if only_mtp and name.startswith("model.layers.") and int(name.split(".")[2]) < config.num_hidden_layers:
            continue
        stored = value.detach().float()
        if name.endswith("kv_b_proj.weight") and (not joined if apart is None else apart):
            block = f"blk.{name.split('.')[2]}"
            keys, values = stored.unflatten(0, (config.num_attention_heads, -1)).split(
                (config.qk_nope_head_dim, config.v_head_dim), 1
            )
            _add(writer, f"{block}.attn_k_b.weight", keys.transpose(1, 2), kind)
            _add(writer, f"{block}.attn_v_b.weight", values, kind)
            if not joined:
                continue
        for theirs, made in _converted(name, stored, "post_attention_norm" if arch == "glm4moe" else "ffn_norm"):
            if theirs.endswith("_exps.weight") and made.dim() == 2:
                experts.setdefault(theirs, []).append(made)
                continue
            _add(writer, theirs, made, kind)
    for theirs, each in experts.items():
        _add(writer, theirs, torch.stack(each), kind)
    finish(writer)
    return path


def _add(writer: gguf_package.GGUFWriter, name: str, value: Tensor, kind: Type) -> None:
    block = GGML_QUANT_SIZES[kind][0]
    whole = value.dim() == 1 or value.shape[-1] % block or any(part in name for part in ("gate_inp", "_embd"))
    own = Type.F32 if whole else kind
    writer.add_tensor(name, quantised(value.contiguous().numpy(), own), raw_dtype=own)


def quantised(values: Any, kind: Type) -> Any:
    """An array as its rows are stored. The gguf package makes none of K-quants."""
    try:
        return quantize(values, kind)
    except NotImplementedError:
        rows = torch.from_numpy(values).reshape(-1, values.shape[-1])
        return make_ops(torch.device("cpu")).quantize(rows, kind.name).data.view(*values.shape[:-1], -1).numpy()


def _metadata(writer: gguf_package.GGUFWriter, config: Any, predicts: bool) -> None:
    writer.add_block_count(config.num_hidden_layers + predicts)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list(["a", "<|im_end|>", *(f"t{i}" for i in range(config.vocab_size - 2))])
    writer.add_eos_token_id(1)
    if config.model_type == "youtu":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_shared_count(0)
        writer.add_leading_dense_block_count(config.num_hidden_layers)
        return
    writer.add_expert_count(getattr(config, "n_routed_experts", 0) or config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    softmax = config.model_type == "deepseek_v2"
    writer.add_expert_gating_func(ExpertGatingFuncType.SOFTMAX if softmax else ExpertGatingFuncType.SIGMOID)
    if config.model_type == "minimax_m2":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        return
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.norm_topk_prob:
        writer.add_expert_weights_norm(True)
    if config.n_group is not None:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if predicts:
        writer.add_nextn_predict_layers(1)


def _attention_metadata(writer: gguf_package.GGUFWriter, config: Any) -> None:
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    add_yarn(writer, config.rope_parameters)


def _latent_metadata(writer: gguf_package.GGUFWriter, config: Any, joined: bool) -> None:
    key, latent = config.qk_nope_head_dim + config.qk_rope_head_dim, config.kv_lora_rank
    writer.add_head_count_kv(config.num_attention_heads if joined else 1)
    writer.add_key_length(key if joined else latent + config.qk_rope_head_dim)
    writer.add_value_length(config.v_head_dim if joined else latent)
    if not joined:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(config.v_head_dim)
    writer.add_kv_lora_rank(latent)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    add_yarn(writer, config.rope_parameters)


def add_yarn(writer: gguf_package.GGUFWriter, rope: Mapping[str, Any]) -> None:
    if rope["rope_type"] == "yarn":
        assert rope.get("mscale") == rope.get("mscale_all_dim"), "files have one of them"
        writer.add_rope_scaling_type(gguf_package.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _converted(name: str, value: Tensor, mlp_norm: str) -> list[tuple[str, Tensor]]:
    parts = name.split(".")
    if "layers" not in parts:
        return [(f"{TOP[parts[-2]]}.weight", value)]
    block, suffix = f"blk.{parts[2]}", parts[-1]
    part = ".".join(parts[3:] if "experts" in parts and suffix != "weight" else parts[3:-1])
    if name.endswith("e_score_correction_bias"):
        return [(f"{block}.exp_probs_b.bias", value)]
    if part.endswith("experts.gate_up_proj"):
        gate, up = value.chunk(2, 1)
        return [(f"{block}.ffn_gate_exps.weight", gate), (f"{block}.ffn_up_exps.weight", up)]
    if part.endswith("mlp.experts.down_proj"):
        return [(f"{block}.ffn_down_exps.weight", value)]
    if ".experts." in name:  # of one, in a prediction layer
        return [(f"{block}.ffn_{part.rpartition('.')[2].removesuffix('_proj')}_exps.weight", value)]
    return [(f"{block}.{(NAMES | {'post_attention_layernorm': mlp_norm})[part]}.{suffix}", value)]
