"""What the tensors of GGUF files are called in a folder's checkpoint."""

from __future__ import annotations

import re

from draftwing.models import gguf_gemma4, gguf_hybrids, gguf_latents
from draftwing.models.config import ModelConfig
from draftwing.models.weight_map import LAYER_NAMES, QWEN_MTP_PREFIX, expert_names

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    **gguf_gemma4.TOP_NAMES,
}
BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
GEMMA_NAMES = BLOCK_NAMES | {  # of layers with norms before and after each part
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LATENT_NAMES = BLOCK_NAMES | gguf_latents.NAMES
# Names that an architecture has besides, or in place of these.
OTHER_NAMES = {
    "Gemma3ForCausalLM": GEMMA_NAMES,
    "Gemma4ForCausalLM": GEMMA_NAMES | gguf_gemma4.NAMES,
    "GptOssForCausalLM": BLOCK_NAMES | {"post_attention_norm": "post_attention_layernorm"},
    "Glm4MoeForCausalLM": BLOCK_NAMES | {"post_attention_norm": "post_attention_layernorm"},
    "DeepseekV2ForCausalLM": LATENT_NAMES,
    "DeepseekV3ForCausalLM": LATENT_NAMES,
    "Lfm2ForCausalLM": BLOCK_NAMES | gguf_hybrids.LFM2_NAMES,
    **{
        gguf_hybrids.ARCHITECTURES[arch]: BLOCK_NAMES | gguf_hybrids.DELTA_NAMES
        for arch in (gguf_hybrids.QWEN35, gguf_hybrids.QWEN35_MOE, gguf_hybrids.QWEN3_NEXT)
    },
}
# Without what their names end with.
WHOLE_NAMES = {
    "attn_sinks": "self_attn.sinks", "ssm_a": "linear_attn.A_log", "ssm_dt": "linear_attn.dt_bias",
    "layer_output_scale": "layer_scalar",
}  # fmt: skip


def layer_name(block: int, own: int) -> str:
    """Returns what a block's names begin with. own: layers of the model itself."""
    return f"model.layers.{block}" if block < own else f"{QWEN_MTP_PREFIX}layers.{block - own}"


def hf_name(name: str, config: ModelConfig, own: int) -> str:
    """Returns the Hugging Face name of a GGUF tensor; one that has none keeps its own. own: layers of the model
    itself."""
    match = re.fullmatch(r"blk\.(\d+)\.([\w.]+?)(\.weight|\.bias|)", name)
    if match is None:
        tops = gguf_hybrids.LFM2_TOP_NAMES if config.architecture == "Lfm2ForCausalLM" else {}
        return tops.get(name, TOP_NAMES.get(name, name))
    layer, part, suffix = layer_name(int(match[1]), own), match[2], match[3]
    names, of_experts, experts = OTHER_NAMES.get(config.architecture, BLOCK_NAMES), expert_names(config), config.experts
    if part == "ffn_gate_inp" and experts is not None:
        return f"{layer}.{of_experts.router}{suffix}"
    if part == "exp_probs_b" and experts is not None and experts.routing.sigmoid:
        return f"{layer}.{of_experts.correction}"
    shared = re.fullmatch("ffn_(gate|up|down)_shexp", part)
    if shared is not None and experts is not None and experts.shared:
        return f"{layer}.{of_experts.shared}.{getattr(of_experts, shared[1])}{suffix}"
    if part in WHOLE_NAMES:
        return f"{layer}.{WHOLE_NAMES[part]}"
    if part in gguf_hybrids.NEXTN_NAMES:
        return f"{QWEN_MTP_PREFIX}{gguf_hybrids.NEXTN_NAMES[part]}{suffix}"
    if part not in names:
        return name
    return f"{layer}.{LAYER_NAMES.get(config.architecture, {}).get(names[part], names[part])}{suffix}"
