"""Qwen4-Exp (Qwen3.8-Flash-Next): gated delta nets and attention as Qwen3.5, over several residual streams, with an
indexer that picks blocks of tokens, and embeddings of n-grams in some layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np

from draftwing.errors import CheckpointError
from draftwing.gguf_file import GGUFFile
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.block_indexer import INDEXER, BlockIndexConfig
from draftwing.layers.config import LayerConfig
from draftwing.layers.delta_net import DeltaNetConfig
from draftwing.layers.part_configs import NgramConfig, StreamsConfig
from draftwing.models.families.qwen import shared_experts
from draftwing.models.families.qwen_hybrid import EXPERTS_IN_GGUF, NAMES_IN_GGUF, hybrid_layers, nets_in_gguf
from draftwing.models.family import ATTENTION, MOST_TAPS, Family, InGGUF, Whole
from draftwing.models.fields import WIDEST, Fields, Values

_INDEXED = "indexed_attention"  # what libraries call attention here
_MOST_ORDER, _MOST_HEADS, _MOST_PARTS = 8, 64, 1 << 16
_MOST_ROWS = 1 << 31  # of one head
# Of a generator of 64 bits (SplitMix64), which makes the multipliers of hashes.
_MASK, _GAMMA, _FIRST, _SECOND = (1 << 64) - 1, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
PER_LAYER = "per_layer_token_embd.weight"  # the table of n-grams in a GGUF file
_STEP = 10007  # of seeds, from one table to the next


def _mixed(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _multipliers(vocab: int, order: int, seed: int) -> tuple[int, ...]:
    """Returns an odd number for each token of an n-gram, whose products with tokens stay below 2^63."""
    most = max(1, ((1 << 63) - 1) // vocab // 2)
    return tuple(2 * (_mixed((seed + _GAMMA * i) & _MASK) % most) + 1 for i in range(1, order + 1))


@cache
def _primes(low: int, count: int) -> tuple[int, ...]:
    """Returns the first so many primes from `low` on."""
    size = 40 * count + 1000
    while True:
        is_prime = np.ones(size, bool)
        is_prime[: max(0, 2 - low)] = False
        for by in range(2, int((low + size) ** 0.5) + 1):
            is_prime[max(by * by - low, -low % by) :: by] = False
        found = np.flatnonzero(is_prime)
        if len(found) >= count:
            return tuple(int(one) + low for one in found[:count])
        size *= 2


def _index(fields: Fields, attention: AttentionConfig) -> BlockIndexConfig:
    ratio, budget = fields.whole("indexer_compress_ratio", high=4096), fields.whole("indexer_budget")
    if budget % ratio:
        raise fields.unlike("indexer_budget", f"a multiple of the {ratio} tokens of a block (indexer_compress_ratio)")
    if fields.whole("indexer_kv_heads") != 1:
        raise fields.unlike("indexer_kv_heads", "1")
    return BlockIndexConfig(
        fields.whole("indexer_n_heads", high=4096),
        fields.whole("indexer_head_dim", high=WIDEST),
        attention.rotary or attention.head_dim,
        budget // ratio,
        ratio,
    )


def _with_ngrams(fields: Fields, count: int) -> list[int]:
    """Returns which layers have embeddings of n-grams."""
    named = fields.get("ple_layer_ids") or []
    if not isinstance(named, list) or not all(type(one) is int and 1 <= one <= count for one in named):
        raise fields.unlike("ple_layer_ids", f"a list of numbers of layers, from 1 to {count}")
    return sorted({one - 1 for one in named})


def _ngrams(fields: Fields, hidden: int, tables: int) -> list[NgramConfig]:
    """Returns what each of so many layers has."""
    order, each = fields.whole("ngram_size", 2, _MOST_ORDER, 3), fields.whole("heads_per_ngram", 1, _MOST_HEADS, 8)
    heads, size = (order - 1) * each, fields.whole("ple_embed_dim", high=WIDEST, default=hidden)
    if size % heads:
        raise fields.unlike("ple_embed_dim", f"a multiple of the {heads} heads of n-grams")
    taps = fields.whole("ple_conv_kernel_size", 2, MOST_TAPS, 4)
    low = fields.whole("ngram_vocab_size_base", high=_MOST_ROWS, default=20_000_000)
    pad = fields.whole("make_ngram_vocab_size_divisible_by", default=128)
    parts = fields.whole("split_ngram_parts", high=_MOST_PARTS, default=512)
    seed, vocab, ends = (
        fields.whole("seed", low=0, default=1234),
        fields.whole("vocab_size"),
        fields.ids("eos_token_id"),
    )
    if not tables:
        return []
    if not ends:
        raise fields.unlike("eos_token_id", "a token id, for texts begin with it in n-grams")
    primes = _primes(low, tables * heads)
    made = []
    for at in range(tables):
        own = primes[at * heads : (at + 1) * heads]
        multipliers = _multipliers(vocab, order, seed + _STEP * at)
        made.append(NgramConfig(order, size, own, multipliers, ends[0], taps, -(-sum(own) // pad) * pad, parts, tables))
    return made


_GATES = {"silu": False, "swish": False, "sigmoid": True}


def _gated(layers: Iterable[LayerConfig], sigmoid: bool) -> list[LayerConfig]:
    nets = ((layer, layer.mixer) for layer in layers)
    return [
        replace(layer, mixer=replace(net, sigmoid=sigmoid)) if isinstance(net, DeltaNetConfig) else layer
        for layer, net in nets
    ]


def _layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    assert isinstance(layer.mixer, AttentionConfig)
    streams = StreamsConfig(fields.whole("hc_count", 2, 64, 4), fields.whole("hc_lowrank", high=WIDEST, default=320))
    indexed = replace(layer.mixer, index=_index(fields, layer.mixer))
    kinds = [ATTENTION if kind == _INDEXED else kind for kind in fields.texts("layer_types")]
    named = fields.overruled({"layer_types": kinds}) if kinds else fields
    gate = fields.text("output_gate_type", "silu")  # else it is `hidden_act`, which is SiLU
    if gate not in _GATES:
        raise fields.unsupported("output_gate_type", gate)
    made = _gated(hybrid_layers(named, replace(layer, mixer=indexed, streams=streams), count), _GATES[gate])
    where = _with_ngrams(fields, count)
    for i, ngram in zip(where, _ngrams(fields, layer.hidden, len(where)), strict=True):
        if isinstance(made[i].mixer, AttentionConfig):
            raise fields.unlike("ple_layer_ids", f"numbers of layers with delta nets, which layer {i + 1} has not")
        made[i] = replace(made[i], ngram=ngram)
    return tuple(made)


# ---- GGUF files ------------------------------------------------------------------------------------------------------


def _numbers(fields: Fields, key: str, count: int) -> tuple[int, ...]:
    """Returns an array of so many numbers."""
    value = fields.get(key)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or len(value) != count or value.min() < 0:
        raise fields.unlike(key, f"{count} whole numbers")
    return tuple(value.tolist())


def _ngrams_in_gguf(file: GGUFFile, fields: Fields) -> dict[int, NgramConfig]:
    """Returns what a layer adds of n-grams, by its number: a file has one table."""
    if not fields.has("ple.layers"):
        return {}
    order = fields.whole("ple.ngram_size", 2, _MOST_ORDER)
    heads = (order - 1) * fields.whole("ple.heads_per_ngram", 1, _MOST_HEADS)
    tables, (layer,) = _numbers(fields, "ple.head_vocab_sizes", heads), _numbers(fields, "ple.layers", 1)
    firsts = (0, *accumulate(tables[:-1]))
    if _numbers(fields, "ple.head_offsets", heads) != firsts or min(tables) < 1:
        raise fields.unlike("ple.head_offsets", "the sums of the sizes before each (ple.head_vocab_sizes)")
    found = file.tensors.get(PER_LAYER)
    rows = 0 if found is None else found.shape[0]
    if rows < sum(tables):
        raise CheckpointError(f"{file.path}: {PER_LAYER}: expected at least {sum(tables)} rows, found {rows}")
    fields.get("ple.image_token_id")  # which stands where pictures are
    size = heads * fields.whole("embedding_length_per_layer_input", high=WIDEST)
    multipliers, end = _numbers(fields, "ple.layer_multipliers", order), fields.whole("ple.eos_token_id", 0)
    taps = fields.whole("ple.conv_kernel", 2, MOST_TAPS)
    return {layer: NgramConfig(order, size, tables, multipliers, end, taps, rows, 1)}


def _in_gguf(file: GGUFFile, fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    attention = layer.mixer
    assert isinstance(attention, AttentionConfig)
    blocks, key = fields.whole("block_count"), "attention.compress_ratios"
    ratios = {one for one in _numbers(fields, key, blocks)[:count] if one}
    budget, ratio = fields.whole("attention.indexer.top_k"), min(ratios, default=0)
    if len(ratios) != 1 or budget % ratio:
        raise fields.unlike(key, f"0 or one number for all layers, which divides the {budget} of indexer.top_k")
    index = BlockIndexConfig(
        fields.whole("attention.indexer.head_count", high=4096),
        fields.whole("attention.indexer.key_length", high=WIDEST),
        attention.rotary or attention.head_dim,
        budget // ratio,
        ratio,
        apart=True,
    )
    count_of = fields.whole("hyper_connection.count", 2, 64)
    streams = StreamsConfig(count_of, fields.whole("hyper_connection.low_rank", high=WIDEST))
    fields.whole("embedding_length_out", default=count_of * layer.hidden)
    whole = replace(layer, mixer=replace(attention, index=index), streams=streams)
    made = _gated(nets_in_gguf(file, fields, whole, count), True)  # as of published models; files do not say
    for i, ngram in _ngrams_in_gguf(file, fields).items():
        if i >= count or isinstance(made[i].mixer, AttentionConfig):
            raise fields.unlike("ple.layers", "the number of a layer with a delta net")
        made[i] = replace(made[i], ngram=ngram)
    return tuple(made)


_STREAMS = {
    "norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up", "inject": "block_inject_weight",
}  # fmt: skip
_IN_GGUF = {
    **{f"hc_attn_{part}": f"attn_hyper_connection.{own}" for part, own in _STREAMS.items()},
    **{f"hc_ffn_{part}": f"mlp_hyper_connection.{own}" for part, own in _STREAMS.items()},
    **{f"indexer.{part}_proj": f"{INDEXER}.{part}_proj" for part in "qk"},
    **{f"indexer.{part}_norm": f"{INDEXER}.{part}_layernorm" for part in "qk"},
    **{f"ple_norm_{part}": f"ple.norm_{part}" for part in ("key", "query", "conv")},
    "ple_key": "ple.key_proj",
    "ple_value": "ple.value_proj",
    "ple_conv1d": "ple.conv1d",
}


def _keys(fields: Fields) -> dict[str, Any]:
    """Returns the width of an MLP, of which there is none beside experts, and counts that have defaults."""
    usual = {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
    shared = fields.whole("shared_expert_intermediate_size", high=WIDEST, default=512)
    usual |= {"shared_expert_intermediate_size": 512, "intermediate_size": shared}
    return {key: value for key, value in usual.items() if fields.get(key) is None}


_NEUTRAL: dict[str, Values] = {
    "mamba_ssm_dtype": ("float32",),  # as states are here
    "number_of_conv_states": None,
}
_SIZES = {
    "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
    "num_key_value_heads": 2, "max_position_embeddings": 32768,
}  # fmt: skip
FAMILIES = {
    "Qwen4ExpForCausalLM": Family(
        "qwen4_exp_text",
        qk_norm=True,
        head_dim=256,
        wide_norms=True,
        norm_offset=1.0,
        in_norms=False,
        gated=True,
        turns_parts=True,
        layers=_layers,
        keys=_keys,
        experts=shared_experts,
        final_norm="model.hyper_connection_mixer",
        predicts="mtp",
        neutral=_NEUTRAL,
        gguf=InGGUF(
            "qwen4exp",
            names=NAMES_IN_GGUF | _IN_GGUF,
            top_names={
                f"output_hc_{part}.weight": f"model.hyper_connection_mixer.{own}.weight"
                for part, own in _STREAMS.items()
            },
            experts=EXPERTS_IN_GGUF,
            layers=_in_gguf,
        ),
        wholes={"Qwen4ExpForConditionalGeneration": Whole("qwen4_exp", _SIZES)},
    ),
}
