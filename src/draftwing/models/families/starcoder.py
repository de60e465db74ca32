"""StarCoder2: Llama with LayerNorm, biases, a window, and MLPs without a gate."""

from __future__ import annotations

from typing import Any

from draftwing.models.family import Family, InGGUF
from draftwing.models.fields import Fields

_KEY = "use_bias"
_LEFT_OVER = (  # of another class, which transformers does not read
    "activation_function", "attention_softmax_in_fp32", "layer_norm_epsilon", "scale_attention_softmax_in_fp32",
)  # fmt: skip


def _keys(fields: Fields) -> dict[str, Any]:
    return {_KEY: fields.flag(_KEY, True)}


FAMILIES = {
    "Starcoder2ForCausalLM": Family(
        "starcoder2",
        qkv_bias=_KEY,
        o_bias=_KEY,
        mlp_bias=_KEY,
        eps=1e-5,
        eps_key="norm_epsilon",
        centred=True,
        norm_bias=True,
        activation="ungated_gelu",
        tied=True,
        sliding_window=0,
        keys=_keys,
        neutral={
            "norm_type": ("layer_norm",),
            "mlp_type": ("default",),
            "scale_attn_weights": (True,),
            **dict.fromkeys(_LEFT_OVER),
        },
        layer_names={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
        gguf=InGGUF("starcoder2"),
    ),
}
