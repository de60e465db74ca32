"""GPT-2: learned positions, LayerNorm, and an MLP without a gate; folders have its matrices transposed.
GPT-BigCode (StarCoder 1, SantaCoder): the same with one key head, and matrices as others have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor

from draftwing.models.family import Family, InGGUF
from draftwing.models.fields import WIDEST, Fields, Values

_KEYS = {
    "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions", "hidden_act": "activation_function",
}  # fmt: skip
_TOP = {"wte": "embed_tokens", "wpe": "embed_positions", "ln_f": "norm"}
_MASKS = ".attn.bias", ".attn.masked_bias"


def _keys(fields: Fields, one_key_head: bool) -> dict[str, Any]:
    found = fields.renamed(_KEYS)
    hidden = fields.overruled(found).whole("hidden_size", high=WIDEST)
    found["intermediate_size"] = fields.whole("n_inner", high=WIDEST, default=4 * hidden)
    shared = one_key_head and fields.flag("multi_query", True)
    return found | {"num_key_value_heads": 1 if shared else None}


def _apart(name: str, value: Any, transposed: bool) -> Iterable[tuple[str, Any]]:
    """Gives tensors the names that they have in Llama, and leaves masks out. transposed: whether matrices of layers are
    [inputs, outputs]."""
    if name.endswith(_MASKS):
        return []
    own, _, suffix = name.removeprefix("model.").removeprefix("transformer.").rpartition(".")
    if own.startswith("h."):
        if transposed and ".c_" in own and isinstance(value, Tensor) and value.dim() == 2:
            value = value.t()
        return [(f"model.layers.{own.removeprefix('h.')}.{suffix}", value)]
    return [(f"model.{_TOP[own]}.{suffix}" if own in _TOP else name, value)]


def _family(model_type: str, transposed: bool, gguf: str, own: Callable[[Fields], dict[str, Any]]) -> Family:
    neutral: dict[str, Values] = {
        "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "n_ctx": None,
        "reorder_and_upcast_attn": None, "attention_softmax_in_fp32": None, "scale_attention_softmax_in_fp32": None,
        "summary_activation": None, "summary_first_dropout": None, "summary_proj_to_labels": None,
        "summary_type": None, "summary_use_proj": None, "inference_runner": (0,), "validate_runner_input": None,
        "pre_allocate_kv_cache": None, "pad_key_length": None, "max_batch_size": None, "max_sequence_length": None,
    }  # fmt: skip
    return Family(
        model_type,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        eps=1e-5,
        eps_key="layer_norm_epsilon",
        centred=True,
        norm_bias=True,
        activation="ungated_gelu",
        tied=True,
        learned_positions=True,
        turns=False,
        sliding_window=None,
        fused_qkv=True if transposed else "heads",
        keys=own,
        neutral=neutral,
        layer_names={
            "self_attn.qkv_proj": "attn.c_attn",
            "self_attn.o_proj": "attn.c_proj",
            "mlp.up_proj": "mlp.c_fc",
            "mlp.down_proj": "mlp.c_proj",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
        },
        apart=partial(_apart, transposed=transposed),
        gguf=InGGUF(gguf, names={"attn_qkv": "self_attn.qkv_proj"}, turns=False),
    )


FAMILIES = {
    "GPT2LMHeadModel": _family("gpt2", True, "gpt2", partial(_keys, one_key_head=False)),
    "GPTBigCodeForCausalLM": _family("gpt_bigcode", False, "starcoder", partial(_keys, one_key_head=True)),
}
