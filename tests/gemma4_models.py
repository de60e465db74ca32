"""Small random Gemma 4 models of transformers, as the 31B, as E2B, and as the 26B-A4B, and GGUF files of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import torch
import transformers
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from moe_models import quantised
from tiny_gguf import finish
from torch import Tensor

VOCAB = 101
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 64, "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 0, "max_position_embeddings": 256,
    "sliding_window": 20, "final_logit_softcapping": 3.0, "bos_token_id": None, "eos_token_id": None,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
ALIKE = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
KINDS: dict[str, dict[str, Any]] = {
    "dense": ALIKE,
    "per-layer": {
        "num_key_value_heads": 1, "hidden_size_per_layer_input": 64, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True, "num_hidden_layers": 5, "final_logit_softcapping": None,
        "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
    },
    "experts": {
        **ALIKE, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32,
        "num_hidden_layers": 3, "layer_types": None,
    },
}  # fmt: skip


# Of which the GEMMs of a GPU's deterministic mode take all matrices, with heads as the models have them.
ON_GPU = {
    "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 256, "global_head_dim": 512, "vocab_size": 320,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


def reference(kind: str, **overrides: Any) -> Any:
    """Of transformers, in float32, with random weights, and values of norms and factors that matter."""
    settings = {**SIZES, **copy.deepcopy(KINDS[kind]), **overrides}
    if "vocab_size" in overrides:
        settings["vocab_size_per_layer_input"] = overrides["vocab_size"]
    torch.manual_seed(0)
    return filled(transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**settings)).float().eval())


def filled(model: Any) -> Any:
    with torch.no_grad():
        for name, values in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("inv_freq", "embed_scale", "token_ordering")):
                continue
            if any(part in name for part in ("norm", "scale", "scalar")):
                values.uniform_(0.5, 1.5)
            else:
                values.normal_(0, 0.15)
    return model


TOP = {
    "embed_tokens": "token_embd", "norm": "output_norm", "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj", "per_layer_projection_norm": "per_layer_proj_norm",
    "pre_projection": "nextn.pre_projection", "post_projection": "nextn.post_projection",
}  # fmt: skip
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1", "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2", "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm", "router.proj": "ffn_gate_inp",
}  # fmt: skip
WHOLE = {
    "layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip


def write_gguf(
    path: Path,
    theirs: Any,
    kind: Type = Type.F32,
    table: Type = Type.F32,
    stored: Any = None,
    suppressed: Sequence[int] = (),
    split: int = 0,
    edit: Callable[[gguf_package.GGUFWriter], None] | None = None,
) -> Path:
    """A file as llama.cpp's converter lays it out. theirs: a model or an assistant.  kind: of matrices.  table, stored:
    type and bytes of the embeddings by layer, None: theirs.  suppressed: tokens that are never drawn.  split:
    tensors of a part, whose file has a name of its own.  edit: adds metadata."""
    config, target_hidden = theirs.config.get_text_config(), getattr(theirs.config, "backbone_hidden_size", None)
    arch = "gemma4" if target_hidden is None else "gemma4-assistant"
    writer = gguf_package.GGUFWriter(path, arch, split_max_tensors=split)
    _metadata(writer, config)
    if target_hidden is not None:
        writer.add_embedding_length_out(target_hidden)
        writer.add_nextn_predict_layers(config.num_hidden_layers)
    if edit is not None:
        edit(writer)
    if suppressed:
        writer.add_array("tokenizer.ggml.suppress_tokens", suppressed)
    pairs = head_dim(config, "full_attention") // 2
    factors = [1.0] * (pairs // 4) + [1e30] * (pairs - pairs // 4)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    for name, value in theirs.state_dict().items():
        parts = name.split(".")
        if parts[0] in ("lm_head", "masked_embedding"):
            continue
        if "layers" not in parts:
            made = f"{TOP[parts[-2]]}.weight"
        else:
            inner = ".".join(parts[3:])
            made = f"blk.{parts[2]}.{WHOLE.get(inner) or NAMES[inner.removesuffix('.weight')] + '.weight'}"
        whole = value.dim() == 1 or any(part in made for part in ("gate_inp", "token_embd"))
        own = Type.F32 if whole or value.shape[-1] % GGML_QUANT_SIZES[kind][0] else kind
        if stored is not None and made.startswith("per_layer_token"):
            writer.add_tensor(made, stored, raw_dtype=table)
            continue
        writer.add_tensor(made, quantised(value.float().contiguous().numpy(), own), raw_dtype=own)
    finish(writer)
    return path


def head_dim(config: Any, kind: str) -> int:
    """Of layers of this type."""
    return int(config.per_layer_config[config.layer_types.index(kind)].head_dim)


def _metadata(writer: gguf_package.GGUFWriter, config: Any) -> None:
    windowed = [kind == "sliding_attention" for kind in config.layer_types]
    own = config.num_hidden_layers - config.num_kv_shared_layers
    wide = config.use_double_wide_mlp
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    widths = [config.intermediate_size * (2 if i >= own else 1) for i in range(config.num_hidden_layers)]
    writer.add_feed_forward_length(widths if wide else config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    each = [config.per_layer_config[i] for i in range(config.num_hidden_layers)]
    heads = [one.num_key_value_heads for one in each]
    writer.add_head_count_kv(heads if config.attention_k_eq_v else heads[0])
    far, near = (head_dim(config, f"{kind}_attention") for kind in ("full", "sliding"))
    writer.add_key_length(far)
    writer.add_value_length(far)
    writer.add_key_length_swa(near)
    writer.add_value_length_swa(near)
    writer.add_rope_dimension_count(far)
    writer.add_rope_dimension_count_swa(near)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_freq_base_swa(1e4)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(windowed)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_token_list(["a", "<turn|>", *(f"t{i}" for i in range(config.vocab_size - 2))])
    writer.add_eos_token_id(0)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def assistant_for(theirs: Any, clusters: int = 0) -> Any:
    """An assistant of transformers for such a model, with random weights. clusters: of tokens, of which it looks at
    three."""
    config = theirs.config
    more = {"use_ordered_embeddings": True, "num_centroids": clusters, "centroid_intermediate_top_k": 3}
    kinds = "sliding_attention", "full_attention"
    each = [config.per_layer_config[config.layer_types.index(kind)] for kind in kinds]
    text = {
        **SIZES, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": config.vocab_size,
        "vocab_size_per_layer_input": 0, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_key_value_heads": each[0].num_key_value_heads, "attention_k_eq_v": True,
        "num_global_key_value_heads": each[1].num_key_value_heads, "num_kv_shared_layers": 3,
        "head_dim": each[0].head_dim, "global_head_dim": each[1].head_dim,
        "sliding_window": config.sliding_window, "max_position_embeddings": config.max_position_embeddings,
    }  # fmt: skip
    torch.manual_seed(3)
    text_config = transformers.Gemma4TextConfig(**text)
    own = transformers.Gemma4AssistantConfig(
        text_config=text_config, backbone_hidden_size=config.hidden_size, **(more if clusters else {})
    )
    made = filled(transformers.Gemma4AssistantForCausalLM(own).float().eval())
    if clusters:
        made.masked_embedding.token_ordering.copy_(torch.randperm(config.vocab_size))
    return made


@torch.inference_mode()
def drafted(theirs: Any, helper: Any, ids: Tensor, steps: int) -> list[Tensor]:
    """Logits of transformers' assistant, which drafts the best tokens; ids: the last of them is not in the cache."""
    out = theirs.model(ids[None, :-1], return_shared_kv_states=True)
    window = theirs.config.sliding_window
    shared = {
        kind: tuple(part[:, :, -window:] if kind.startswith("sliding") else part for part in both)
        for kind, both in out.shared_kv_states.items()
    }
    state, token, found = out.last_hidden_state[:, -1:], ids[None, -1:], []
    for _ in range(steps):
        made = helper(
            inputs_embeds=torch.cat((theirs.model.embed_tokens(token), state), -1), shared_kv_states=shared,
            position_ids=torch.tensor([[len(ids) - 1]]),
        )  # fmt: skip
        state, token = made.last_hidden_state, made.logits.argmax(-1)
        found.append(made.logits[0, 0])
    return found
