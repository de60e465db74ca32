"""Latent attention in GGUF files: what the metadata say of it, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from draftwing.gguf_file import GGUFFile
from draftwing.layers.config import LayerConfig
from draftwing.layers.latent import LatentAttentionConfig
from draftwing.layers.rope import yarn_attention_factor
from draftwing.models.fields import WIDEST, Fields
from draftwing.models.gguf_experts import SIGMOID

ARCH = "deepseek2"  # of DeepSeek-V2 and V3, and of GLM-4.7-Flash
YARN_LOG = "rope.scaling.yarn_log_multiplier"  # 0.1 * mscale_all_dim; mscale is the same then
NAMES = {  # besides those of other layers
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}


def architecture(file: GGUFFile, fields: Fields) -> str:
    """Returns whose router a file has: DeepSeek-V3's, as GLM-4.7-Flash has it, or V2's. Files need not say."""
    function = fields.whole("expert_gating_func", 0, 255, 0)
    corrected = any(name.endswith(".exp_probs_b.bias") for name in file.tensors)
    return "DeepseekV3ForCausalLM" if function == SIGMOID or (corrected and not function) else "DeepseekV2ForCausalLM"


def is_copy(name: str, names: Container[str]) -> bool:
    """Returns whether a tensor is the matrix of keys and values, of which the file has both parts, too."""
    parts = (name.replace("attn_kv_b", part) for part in ("attn_k_b", "attn_v_b"))
    return name.endswith(".attn_kv_b.weight") and all(part in names for part in parts)


def of_turned(fields: Fields) -> Fields:
    """Returns the metadata with heads of the elements that are turned: what is said of heads is of latents, or not."""
    turned = fields.whole("rope.dimension_count", 2, WIDEST)
    return fields.overruled({f"attention.{part}_length": turned for part in ("key", "value")})


def layers(file: GGUFFile, fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    """Returns the layers, like one but for their mixers. fields: as they are in the file."""

    def size(key: str, low: int = 1, high: int = WIDEST) -> int:
        return fields.whole(f"attention.{key}", low, high)

    latent, turned = size("kv_lora_rank"), fields.whole("rope.dimension_count", 2, WIDEST)
    key = "key_length"
    if fields.has("attention.key_length_mla"):  # and then these are of what a token keeps
        size(key, latent + turned, latent + turned)
        size("value_length", latent, latent)
        key = "key_length_mla"
    factor, all_dim = 1.0, round(10 * fields.number(YARN_LOG, 0, 1e3, 0.0), 6)  # it was rounded to float32
    if fields.text("rope.scaling.type", "none") == "yarn":
        factor = yarn_attention_factor(fields.number("rope.scaling.factor", 1e-3, 1e6), all_dim) ** 2
    mixer = LatentAttentionConfig(
        size("head_count"),
        size(key, turned + 1) - turned,
        turned,
        size(key.replace("key", "value")),
        latent,
        0 if "blk.0.attn_q.weight" in file.tensors else size("q_lora_rank"),
        bias="blk.0.attn_kv_a_mqa.bias" in file.tensors,
        factor=factor,
    )
    return (replace(layer, mixer=mixer),) * count
