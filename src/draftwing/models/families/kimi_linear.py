"""Kimi Linear: Kimi Delta Attention in three of four layers, latent attention that turns nothing in the others, and the
experts of DeepSeek-V3 under names of their own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from draftwing.gguf_file import GGUFFile
from draftwing.layers.config import LayerConfig
from draftwing.layers.kda import KdaConfig
from draftwing.layers.latent import LatentAttentionConfig
from draftwing.models.families.deepseek import (
    IN_GGUF,
    LATENT_NAMES,
    dense_layers,
    experts,
    latent_in_gguf,
    turned,
)
from draftwing.models.family import (
    ATTENTION,
    MOST_TAPS,
    RECURRENT,
    ExpertNames,
    Family,
    InGGUF,
    attends_by_heads,
    layers_by_attention,
    layers_by_kind,
)
from draftwing.models.fields import WIDEST, Fields
from draftwing.parallel.cut import Stored

_NET = "linear_attn_config"
# Our names of keys, and theirs.
NAMES = {
    "max_position_embeddings": "model_max_length",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
}
_MLP = re.compile(r"(.*)\.block_sparse_moe\.(shared_experts\.)?((?:gate|up|down)_proj)\.(\w+)")
_PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}  # of experts
_A_LOG, _FLAT = "self_attn.A_log", "self_attn.flat.A_log"  # as it is stored, and of one dimension
_USUAL = {"routed_scaling_factor": 2.446, "max_position_embeddings": 1 << 20}


def _keys(fields: Fields) -> dict[str, Any]:
    """Reads experts under the names that they have elsewhere."""
    fields.check("mla_use_nope", (True,))
    fields.check("tie_word_embeddings", (False,))  # which transformers does not read
    fields.check("moe_router_activation_func", ("sigmoid",))
    found = {key: value for key, value in _USUAL.items() if fields.get(key) is None}
    return found | fields.renamed(NAMES)


def _kinds(fields: Fields, net: Fields, count: int) -> list[str]:
    """Returns what each layer is. net: of delta nets, in whose lists of layers the first is 1."""
    if not (net.has("full_attn_layers") and net.has("kda_layers")):
        return [ATTENTION if i and i % 4 == 0 else RECURRENT for i in range(count)]
    named = {ATTENTION: net.get("full_attn_layers"), RECURRENT: net.get("kda_layers")}
    for key, layers in (("full_attn_layers", named[ATTENTION]), ("kda_layers", named[RECURRENT])):
        if not isinstance(layers, list) or not all(type(one) is int for one in layers):
            raise net.unlike(key, "a list of numbers of layers")
    kinds = {layer: kind for kind, layers in named.items() for layer in layers}
    if sum(map(len, named.values())) != len(kinds) or not kinds.keys() >= set(range(1, count + 1)):
        raise net.unlike("kda_layers", f"with full_attn_layers each of the layers 1 to {count} once")
    return [kinds[i + 1] for i in range(count)]


def _layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    net = fields.inner(_NET)

    def size(key: str, default: int) -> int:
        return fields.whole(key, high=WIDEST, default=default)

    def of_net(key: str, other: str, high: int, default: int) -> int:
        return net.whole(key, high=high, default=fields.whole(other, high=high, default=default))

    latent = LatentAttentionConfig(
        size("num_attention_heads", 32),
        size("qk_nope_head_dim", 128),
        size("qk_rope_head_dim", 64),
        size("v_head_dim", 128),
        size("kv_lora_rank", 512),
        fields.whole("q_lora_rank", 0, WIDEST, 0),
        interleaved=False,
        bias=fields.flag("attention_bias"),
    )
    delta = KdaConfig(
        of_net("num_heads", "linear_num_heads", WIDEST, 32),
        of_net("head_dim", "linear_head_dim", WIDEST, 128),
        of_net("short_conv_kernel_size", "linear_conv_kernel_dim", MOST_TAPS, 4),
    )
    return layers_by_kind(fields, layer, _kinds(fields, net, count), {ATTENTION: latent, RECURRENT: delta})


def _apart(name: str, value: Stored) -> Iterable[tuple[str, Stored]]:
    """The expert of all rows has names of an MLP, the MLP of a layer without experts may have theirs, and decays of
    heads are in four dimensions."""
    match = _MLP.fullmatch(name)
    if match is not None:
        layer, shared, part, suffix = match.groups()
        yield (
            f"{layer}.block_sparse_moe.{shared}{_PARTS[part]}.{suffix}" if shared else f"{layer}.mlp.{part}.{suffix}",
            value,
        )
    elif name.endswith(_A_LOG) and isinstance(value, Tensor):
        yield name.replace(_A_LOG, _FLAT), value.flatten()
    else:
        yield name, value


# ---- GGUF files ------------------------------------------------------------------------------------------------------


def nets_in_gguf(
    file: GGUFFile, fields: Fields, layer: LayerConfig, count: int, floor: float = 0.0, **more: Any
) -> tuple[LayerConfig, ...]:
    """Returns latent attention, and delta nets where no heads of keys are listed. floor: of decays, below 0: there is
    one matrix of these, and of gates.  more: of latents."""
    attends, head_dim = attends_by_heads(fields, count), fields.whole("kda.head_dim", high=WIDEST)
    biases = [file.tensors.get(f"blk.{i}.ssm_dt.bias") for i in range(count)]
    wide = next((one.shape[-1] for one in biases if one is not None), 0)  # no key says how many heads there are
    if not wide or wide % head_dim:
        raise fields.unlike("kda.head_dim", f"a divisor of the {wide} decays of a delta net")
    # The length of a value is that of heads as a config has it, or of latents.
    latent_fields = fields.overruled({"attention.value_length": fields.get("attention.kv_lora_rank")})
    latent = latent_in_gguf(file, latent_fields, attends.index(True) if True in attends else 0)
    taps = fields.whole("ssm.conv_kernel", high=MOST_TAPS)
    delta = KdaConfig(wide // head_dim, head_dim, taps, direct=floor < 0, floor=floor)
    return layers_by_attention(file, replace(layer, mixer=replace(latent, **more)), attends, delta)


NAMES_IN_GGUF = {
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
    **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": _A_LOG,
    "ssm_dt": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}
FAMILIES = {
    "KimiLinearForCausalLM": Family(
        "kimi_linear",
        eps=1e-5,
        turns=False,
        experts=experts,
        dense_layers=dense_layers,
        layers=_layers,
        keys=_keys,
        neutral={
            "head_dim": None,
            "qk_head_dim": None,  # the sum of both parts
            "first_k_dense_replace": None,  # beside `mlp_layer_types`
            "use_grouped_topk": (True,),
            "rope_theta": None,
            "rope_scaling": None,
        },
        expert_names=ExpertNames(
            "block_sparse_moe.gate",
            "block_sparse_moe.experts",
            "w1",
            "w3",
            "w2",
            "block_sparse_moe.shared_experts",
            "block_sparse_moe.gate.e_score_correction_bias",
        ),
        layer_names={_A_LOG: _FLAT},
        apart=_apart,
        gguf=InGGUF(
            "kimi-linear",
            names=LATENT_NAMES | NAMES_IN_GGUF,
            fields=turned,
            layers=partial(nets_in_gguf, interleaved=False),
            experts=IN_GGUF,
            turns=False,
        ),
    ),
}
