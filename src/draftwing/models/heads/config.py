"""Configs of draft heads, in every published layout."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.models.config import ModelConfig, from_hf
from draftwing.models.decoder import DecoderModel
from draftwing.models.fields import Fields
from draftwing.models.folder import read_json
from draftwing.models.heads.eagle3 import Eagle3Config
from draftwing.requests.refusals import show

logger = logging.getLogger(__name__)

AuxLayerIds = Literal["auto", "output", "boundary"]
Weights = Mapping[str, Tensor]

_SPECULATORS = ("eagle3", "dflash", "dspark")  # of its kinds
_INNER = ("eagle_config", "dflash_config", "dspark_config")  # objects whose keys are those of the head
_LAYER = re.compile(r"layers\.(\d+)\.")


def read_config(path: Path) -> dict[str, Any]:
    """Returns `flatten_config` of the config.json in a head's folder."""
    return flatten_config(read_json(path / "config.json"))


def flatten_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a config.json on one level: those of `eagle_config` or `dflash_config`, and, in the
    speculators layout, of the layers' own config, which the outer keys overrule."""
    flat = {key: value for key, value in raw.items() if key not in (*_INNER, "transformer_layer_config")}
    if "transformer_layer_config" in raw or "speculators_model_type" in raw:
        kind = raw.get("speculators_model_type", "eagle3")
        if kind not in _SPECULATORS:
            raise CheckpointError(f"speculators_model_type: expected {', '.join(_SPECULATORS)}, found {show(kind)}")
        inner = raw.get("transformer_layer_config") or {}
        if not isinstance(inner, dict):
            raise CheckpointError(f"transformer_layer_config: expected an object, found {show(inner)}")
        flat = {**inner, **{key: value for key, value in flat.items() if value is not None}}
        flat.setdefault("norm_before_residual", True)
    for name in _INNER:
        own = raw.get(name) or {}
        if not isinstance(own, dict):
            raise CheckpointError(f"{name}: expected an object, found {show(own)}")
        for key, value in own.items():
            flat.setdefault(key, value)
    fields = Fields(flat, "config")
    for key in ("draft_vocab_size", "target_hidden_size", "num_aux_hidden_states"):
        fields.whole(key, default=0)
    return flat


def draft_config(raw: Mapping[str, Any], weights: Weights) -> ModelConfig:
    """Returns sizes of the draft layers, from flat keys; layers, biases and head norms as the weights have them.

    `bias` speaks of fc in these configs. The rotary base is the draft's own, 10000 where its config has none.
    """
    later = [int(match[1]) for match in map(_LAYER.match, weights) if match]
    config = config_of_layers(raw, 1 + max(later, default=0))
    first = "midlayer" if any(name.startswith("midlayer.") for name in weights) else "layers.0"
    attention = replace(
        config.attention,
        qkv_bias=f"{first}.self_attn.q_proj.bias" in weights,
        o_bias=f"{first}.self_attn.o_proj.bias" in weights,
        qk_norm=f"{first}.self_attn.q_norm.weight" in weights,
    )
    layer = replace(config.layers[0], mixer=attention, mlp_bias=f"{first}.mlp.down_proj.bias" in weights)
    return replace(config, layers=(layer,) * config.num_layers)


def config_of_layers(raw: Mapping[str, Any], layers: int) -> ModelConfig:
    """Returns the config of so many layers with these flat keys."""
    return from_hf(
        {
            "max_position_embeddings": 2048,  # transformers' default for the family
            **raw,
            "is_causal": None,  # of blocks (`block_config`)
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": layers,
            "tie_word_embeddings": False,
        },
        head=True,
    )


def eagle3_config(
    config: ModelConfig, raw: Mapping[str, Any], weights: Weights, target: DecoderModel, convention: AuxLayerIds
) -> Eagle3Config:
    aux_size, vocab = target.config.hidden_size, target.config.vocab_size
    count = aux_count(weights, aux_size)
    same("num_aux_hidden_states", count, raw.get("num_aux_hidden_states") or count)
    own_embedding = aux_size != config.hidden_size
    lm_head, draft_vocab = weights.get("lm_head.weight"), raw.get("draft_vocab_size")
    rows = draft_vocab or (vocab if lm_head is None else lm_head.shape[0])
    if lm_head is None and (rows != vocab or own_embedding):
        raise CheckpointError("tensors missing from the checkpoint: lm_head.weight")
    if raw.get("norm_output"):
        logger.info(
            "norm_output: the head's output is normalised before it is fed back; some trainers mean another thing"
        )
    norm_before_fc = has_part(raw, ("norm_before_fc",), "input_norm.weight" in weights)
    fc_norm = has_part(raw, ("fc_norm", "use_aux_norm"), "fc_norm.0.weight" in weights)
    if norm_before_fc and fc_norm:
        raise CheckpointError("norm_before_fc and fc_norm together are not supported: their order is not defined")
    second = "layers.1.hidden_norm.weight"
    return Eagle3Config(
        aux_layers=resolve_aux_layers(raw, count, target.config.num_layers, convention),
        aux_size=aux_size,
        draft_vocab=0 if lm_head is None else rows,
        fc_bias="fc.bias" in weights,
        own_embedding=own_embedding,
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        norm_output=bool(raw.get("norm_output", False)),
        later_norm="hidden_norm" if second in weights else "input_layernorm",
    )


def resolve_aux_layers(raw: Mapping[str, Any], count: int, layers: int, convention: AuxLayerIds) -> tuple[int, ...]:
    """Returns residual streams that an EAGLE-3 head reads, numbered as `DecoderModel.forward` does.

    count: how many fc has columns for.  layers: of the target.

    Ids are written in two ways: k for the output of layer k, or k for the stream after k layers. Files say nothing of
    it, but the first and last ids that trainers choose by default do.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    ids = layer_ids(raw, key)
    if raw.get("use_aux_hidden_state") is False:
        raise CheckpointError("use_aux_hidden_state = false is not supported")
    if not ids:
        ids, boundary = [2, layers // 2, layers - 3], True
    elif convention != "auto":
        boundary = convention == "boundary"
    else:
        boundary = max(ids) == layers or ids[0] == 2
        meaning = "boundaries between layers" if boundary else "layers whose output is meant"
        logger.info("aux layer ids %s are taken as %s", ids, meaning)
    return streams(key, ids, count, layers, boundary)


def matrix(weights: Weights, name: str) -> Tensor:
    """Returns a tensor of two dimensions; raises CheckpointError for none."""
    if name not in weights:
        raise CheckpointError(f"tensors missing from the checkpoint: {name}")
    if weights[name].dim() != 2:
        raise CheckpointError(f"{name}: expected a matrix, found the shape {list(weights[name].shape)}")
    return weights[name]


def aux_count(weights: Weights, size: int) -> int:
    """Returns how many of the target's hidden states fc reads. size: of each."""
    columns = matrix(weights, "fc.weight").shape[1]
    if columns % size:
        raise CheckpointError(
            f"fc.weight: expected a multiple of the target's hidden size {size} as columns, found {columns}"
        )
    return columns // size


def layer_ids(raw: Mapping[str, Any], key: str) -> list[int] | None:
    ids = raw.get(key)
    if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
        raise CheckpointError(f"{key}: expected a list of integers, found {show(ids)}")
    return ids


def streams(
    key: str, ids: list[int], count: int, layers: int, boundary: bool, from_embedding: bool = False
) -> tuple[int, ...]:
    """Returns the ids of so many layers as `DecoderModel.forward` numbers them. layers: of the target.  boundary:
    whether they count boundaries between layers, else outputs.  from_embedding: whether the output before the first has
    one, -1."""
    if len(ids) != count:
        raise CheckpointError(f"fc.weight has columns for {count} hidden states, {key} names the layers {show(ids)}")
    highest = layers if boundary else layers - 1
    if not all((-1 if from_embedding and not boundary else 0) <= i <= highest for i in ids):
        raise CheckpointError(f"{key}: expected 0 to {highest} for a target of {layers} layers, found {show(ids)}")
    return tuple(i if boundary else i + 1 for i in ids)


def has_part(raw: Mapping[str, Any], keys: tuple[str, ...], stored: bool) -> bool:
    """Returns a part that the config asks for or forbids; where it says nothing, the part is there if its weights
    are."""
    said = [raw[key] for key in keys if raw.get(key) is not None]
    return any(said) if said else stored


def check_target(config: ModelConfig, raw: Mapping[str, Any], target: DecoderModel, eagle3: bool) -> None:
    same("vocab_size", target.config.vocab_size, config.vocab_size)
    hidden = (raw.get("target_hidden_size") if eagle3 else None) or config.hidden_size
    same("hidden_size of the target it was trained for", target.config.hidden_size, hidden)


def same(what: str, expected: int, found: int) -> None:
    if found != expected:
        raise CheckpointError(f"{what}: expected {expected}, found {found}")
