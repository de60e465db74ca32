"""Models with recurrent layers in GGUF files: what the metadata say of layers, and the names of their tensors.

Converters have done some of the arithmetic: norms have 1 added, decays are -exp(A_log), Qwen3.5's value heads are tiled
(`DeltaSpec`). The prediction layers are blocks behind the model's own, counted in `block_count`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.gguf_file import GGUFFile
from draftwing.layers.config import LayerConfig
from draftwing.layers.delta_net import DeltaNetConfig
from draftwing.layers.mixer import MixerConfig
from draftwing.layers.short_conv import ShortConvConfig
from draftwing.models.fields import WIDEST, Fields
from draftwing.models.hybrids import EVERY, MOST_TAPS
from draftwing.ops.types import BlockRows
from draftwing.parallel.cut import Cut
from draftwing.parallel.ranks import Share

Stored = Tensor | BlockRows
QWEN35, QWEN35_MOE, QWEN3_NEXT, LFM2 = "qwen35", "qwen35moe", "qwen3next", "lfm2"
ARCHITECTURES = {
    QWEN35: "Qwen3_5ForCausalLM",
    QWEN35_MOE: "Qwen3_5MoeForCausalLM",
    QWEN3_NEXT: "Qwen3NextForCausalLM",
    LFM2: "Lfm2ForCausalLM",
}
DELTA_NAMES = {  # besides those of attention and MLP
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
# The rest is named as in Llama first (`weight_map.LAYER_NAMES`).
LFM2_NAMES = {"shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj", "shortconv.conv": "conv.conv"}
LFM2_TOP_NAMES = {f"{name}.weight": "model.embedding_norm.weight" for name in ("token_embd_norm", "output_norm")}
# Of a prediction layer, below `model.mtp`; the rest of it is named as a layer's.
NEXTN_NAMES = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
}
NEXTN_COPIES = ".nextn.embed_tokens.weight", ".nextn.shared_head_head.weight"
_JOINED = re.compile(r"(blk\.\d+\.)(ssm_ba|ssm_in)\.weight")  # of Qwen3-Next, by key head


def own_layers(fields: Fields, blocks: int) -> int:
    """Returns how many of a file's blocks are layers of the model; the others are prediction layers."""
    return blocks - fields.whole("nextn_predict_layers", 0, blocks - 1, 0)


def layers(file: GGUFFile, fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    """Returns the layers of a hybrid; layer: one with attention."""
    arch = fields.prefix.removesuffix(".")
    other = _conv(fields, layer) if arch == LFM2 else _net(fields, arch)
    made = [replace(layer, mixer=layer.mixer if attends else other) for attends in _attention(fields, arch, count)]
    if not any(one.mixer == layer.mixer for one in made):
        raise CheckpointError(f"{file.path}: expected a layer with attention, found none")
    return tuple(made)


def _attention(fields: Fields, arch: str, count: int) -> list[bool]:
    """Returns for each layer whether it has attention."""
    key = "attention.head_count_kv" if arch == LFM2 else "attention.recurrent_layers"
    named = fields.get(key)
    if isinstance(named, np.ndarray):
        if len(named) < count:
            raise fields.unlike(key, f"one for each of {count} layers")
        return [bool(one) == (arch == LFM2) for one in named[:count].tolist()]
    every = 1 if arch == LFM2 else fields.whole("full_attention_interval", default=EVERY)
    return [not (i + 1) % every for i in range(count)]


def kv_heads(fields: Fields, heads: int) -> int:
    """Returns the key/value heads of layers with attention; others may be listed with 0."""
    named = fields.get("attention.head_count_kv")
    if not isinstance(named, np.ndarray):
        return fields.whole("attention.head_count_kv", high=WIDEST, default=heads)
    different = {int(one) for one in named.tolist()} - {0} if named.dtype.kind in "iu" else set()
    if len(different) != 1 or not 0 < min(different) <= WIDEST:
        raise fields.unlike("attention.head_count_kv", "one number for all layers with attention")
    return different.pop()


def _net(fields: Fields, arch: str) -> DeltaNetConfig:
    value_heads = fields.whole("ssm.time_step_rank", high=WIDEST)
    inner = fields.whole("ssm.inner_size", high=WIDEST)
    if inner % value_heads:
        raise fields.unlike("ssm.inner_size", f"a multiple of the {value_heads} value heads")
    return DeltaNetConfig(
        fields.whole("ssm.group_count", high=WIDEST),
        value_heads,
        fields.whole("ssm.state_size", high=WIDEST),
        inner // value_heads,
        fields.whole("ssm.conv_kernel", high=MOST_TAPS),
        tiled=arch != QWEN3_NEXT,
    )


def _conv(fields: Fields, layer: LayerConfig) -> MixerConfig:
    return ShortConvConfig(layer.hidden, fields.whole("shortconv.l_cache", high=MOST_TAPS))


def made(name: str, values: Tensor) -> Tensor:
    """Returns a tensor as a folder's checkpoint has it. name: there."""
    if name.endswith(".A_log"):
        return (-values).log()
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return values.unsqueeze(1)
    return values.view(1, -1) if name.endswith("shared_expert_gate.weight") else values


def taken_apart(name: str, value: Stored, net: DeltaNetConfig) -> Iterator[tuple[str, Stored]]:
    """Yields (name, value) of a tensor, or of two in place of Qwen3-Next's, in which those of a key head lie
    together."""
    match = _JOINED.fullmatch(name)
    if match is None:
        yield name, value
        return
    whole = replace(net, by_key_head=True)
    if match[2] == "ssm_ba":
        parts, order = ("ssm_beta", "ssm_alpha"), whole.ba_order()
        sizes = net.value_heads, net.value_heads
    else:
        parts, order = ("attn_qkv", "attn_gate"), whole.qkvz_order()
        sizes = net.keeps().channels, net.made
    joined, first = value if order is None else order.of(name, value), 0
    for part, size in zip(parts, sizes, strict=True):
        own = Cut(0, Share(first, size, sum(sizes))).of(name, joined)
        assert isinstance(own, Tensor | BlockRows)
        yield f"{match[1]}{part}.weight", own
        first += size
