"""Configs of draft heads, in every published layout."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from torch import Tensor

from draftwing.config.trees import MASK_IDS, from_anchor
from draftwing.errors import CheckpointError
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import MixerConfig
from draftwing.models.config import ModelConfig, from_hf
from draftwing.models.decoder import DecoderModel
from draftwing.models.families import PLAIN_FAMILY
from draftwing.models.fields import Fields
from draftwing.models.heads.eagle import Eagle3Config
from draftwing.models.heads.gguf_heads import gguf_config
from draftwing.models.weight_files import read_json
from draftwing.requests.refusals import show

logger = logging.getLogger(__name__)

AuxLayerIds = Literal["auto", "output", "boundary"]
Weights = Mapping[str, Tensor]

_SPECULATORS = ("eagle3", "peagle", "dflash", "dflash2", "dspark")  # of its kinds
_INNER = ("eagle_config", "dflash_config", "dspark_config", "model")  # objects whose keys are those of the head
# Perhaps the target's keys; the head's weights tell.
_BY_WEIGHTS = ("use_qk_norm", "qk_norm", "num_experts", "num_local_experts", "n_routed_experts", "mlp_only_layers")
_LAYER = re.compile(r"layers\.(\d+)\.")
MASK = "mask_hidden"  # of heads for parallel drafting: what stands for the hidden states of the target


def read_config(path: Path) -> dict[str, Any]:
    """Returns `flatten_config` of the config.json in a head's folder, or what a `.gguf` file says in its place."""
    if path.suffix == ".gguf":
        return gguf_config(path)
    return flatten_config(read_json(path / "config.json"))


def flatten_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a config.json on one level: those of `eagle_config` and the like, and, in the
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
    if MASK in weights:  # no block, though some of them name the mask as blocks do
        raw = {key: value for key, value in raw.items() if key not in MASK_IDS}
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
    windows = [0] * config.num_layers
    if "mask_token_id" not in raw:  # of blocks: `block_config`
        kinds = Fields(raw, "config").texts("layer_types")[: config.num_layers]  # perhaps those of the target
        windows = list(_reach(Fields({**raw, "layer_types": kinds}, "config"), raw, config.num_layers)[0])
    return replace(config, layers=tuple(replace(layer, mixer=replace(attention, window=window)) for window in windows))


def within_known(config: ModelConfig, raw: Mapping[str, Any], target: ModelConfig) -> ModelConfig:
    """Returns the config with layers that see no further back than the positions that the head knows, where the target
    has more: what it makes of distances that it was not trained on costs drafts (docs/dev/block_heads.md)."""
    known = _known_positions(config, raw, target)
    if not known:
        return config

    def near(mixer: MixerConfig) -> MixerConfig:
        assert isinstance(mixer, AttentionConfig)
        return replace(mixer, window=min(mixer.window or known, known))

    return replace(config, layers=tuple(replace(layer, mixer=near(layer.mixer)) for layer in config.layers))


def block_within_known(
    block: BlockConfig, config: ModelConfig, raw: Mapping[str, Any], target: ModelConfig
) -> BlockConfig:
    """Returns the config of a block with layers that see no further back, as `within_known`."""
    known = _known_positions(config, raw, target)
    return replace(block, windows=tuple(min(one or known, known) for one in block.windows)) if known else block


def _known_positions(config: ModelConfig, raw: Mapping[str, Any], target: ModelConfig) -> int:
    """Returns how many positions a head knows of those that the target has; 0 where it knows all, or does not say."""
    known = config.max_positions
    return 0 if known >= target.max_positions or raw.get("max_position_embeddings") is None else known


def with_positions(config: ModelConfig, raw: Mapping[str, Any], target: ModelConfig) -> ModelConfig:
    """Returns the config of a head to be trained further: one that does not say how many positions it knows is served
    for all of the target's (`within_known`), and is still when its config says some."""
    known = raw.get("max_position_embeddings") is not None
    return config if known else replace(config, max_positions=target.max_positions)


def config_of_layers(raw: Mapping[str, Any], layers: int) -> ModelConfig:
    """Returns the config of so many layers with these flat keys."""
    elsewhere = [*_BY_WEIGHTS]
    if "mask_token_id" in raw:  # of blocks: `block_config`
        elsewhere += ["is_causal", "final_logit_softcapping"]
    if raw.get("layer_types"):  # each of which says it
        elsewhere += ["use_sliding_window"]
    return from_hf(
        {
            "max_position_embeddings": 2048,  # transformers' default for the family
            **{key: value for key, value in raw.items() if key not in elsewhere},
            "architectures": [PLAIN_FAMILY],
            "num_hidden_layers": layers,
            "tie_word_embeddings": False,
        },
        head=True,
    )


def eagle3_config(
    config: ModelConfig, raw: Mapping[str, Any], weights: Weights, target: DecoderModel, convention: AuxLayerIds
) -> Eagle3Config:
    aux_size, vocab = target.config.hidden_size, target.config.vocab_size
    # Else what it reads is the target's state after its final norm, as it is.
    fused = raw.get("use_aux_hidden_state") is not False
    if fused:
        count = aux_count(weights, aux_size)
        same("num_aux_hidden_states", count, raw.get("num_aux_hidden_states") or count)
        aux_layers = resolve_aux_layers(raw, count, target.config.num_layers, convention)
    elif "fc.weight" in weights:
        raise CheckpointError("use_aux_hidden_state = false is not supported beside fc.weight")
    else:
        same("hidden_size", aux_size, config.hidden_size)
        aux_layers = (target.final_aux_layer,)
    mask = _mask(Fields(raw, "config"), vocab) if MASK in weights else None
    other_size = aux_size != config.hidden_size
    lm_head, draft_vocab = weights.get("lm_head.weight"), raw.get("draft_vocab_size")
    rows = draft_vocab or (vocab if lm_head is None else lm_head.shape[0])
    if lm_head is None and (rows != vocab or other_size):
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
        aux_layers=aux_layers,
        aux_size=aux_size,
        fused=fused,
        draft_vocab=0 if lm_head is None else rows,
        fc_bias="fc.bias" in weights,
        # That of a mask is trained with the head; other exports carry the target's, or random values.
        own_embedding=other_size or (mask is not None and "embed_tokens.weight" in weights),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        norm_output=bool(raw.get("norm_output", False)),
        later_norm="hidden_norm" if second in weights else "input_layernorm",
        mask=mask,
    )


def _mask(fields: Fields, vocab: int) -> int:
    """Returns the token of the rows that draft further ahead."""
    named = next((key for key in MASK_IDS if fields.get(key) is not None), None)
    if named is None:
        raise CheckpointError(
            f"config: expected {' or '.join(MASK_IDS)}, the id of the mask beside {MASK}, found none: add the one "
            "that the head was trained with"
        )
    return fields.whole(named, 0, vocab - 1)


def resolve_aux_layers(raw: Mapping[str, Any], count: int, layers: int, convention: AuxLayerIds) -> tuple[int, ...]:
    """Returns residual streams that an EAGLE-3 head reads, numbered as `DecoderModel.forward` does.

    count: how many fc has columns for.  layers: of the target.

    Ids are written in two ways: k for the output of layer k, or k for the stream after k layers. DeepSpec's key has the
    first. Else files say nothing of it, but the first and last ids that trainers choose by default do. The speculators
    library trains with the second, and converts heads of others as they are, whose first id is mostly 1.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    ids = layer_ids(raw, key)
    if not ids:
        key, ids = "target_layer_ids", layer_ids(raw, "target_layer_ids")
    if not ids:
        ids, boundary = [2, layers // 2, layers - 3], True
    elif convention != "auto":
        boundary = convention == "boundary"
    elif key == "target_layer_ids":
        boundary = False
    else:
        boundary = max(ids) == layers or ids[0] == 2 or ("speculators_model_type" in raw and ids[0] != 1)
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


Markov = Literal["", "vanilla", "gated", "rnn", "domino"]
Confidence = Literal["", "plain", "markov"]

# ---- blocks: DFlash, DFlash2, Domino, DSpark, and as the speculators library writes them -----------------------------

MAX_ROWS = 64  # of a block
MAX_CANDIDATES = 64
_MOST = 1e6  # of a factor
MARKOV: tuple[Markov, ...] = ("vanilla", "gated", "rnn")
_GRU, _DOMINO_IN, _MARKOV_IN = "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "markov_head.markov_w1.weight"
_CONV, _SELECTOR = "layers.0.attention_conv.base_kernel", "candidate_selector.predecessor_codebook"
# Scalars that change the arithmetic and are not served, with the values at which they do not.
_NEUTRAL = {"attention_value_scale": 1, "attention_sink_bias": False}


@dataclass(frozen=True)
class BlockConfig:
    """What block heads differ in besides the sizes of their layers.

    aux_layers: what the target is asked for (`DecoderModel.forward`).  rows: of a block, the newest token and masks.
    mask: the token id of a mask.  from_anchor: whether row j predicts the token after position p + j, p that of the
    newest token; else the token at it, and row 0 predicts nothing.
    windows: of each layer, how far back it attends from the newest token, which counts; 0: to everything.  causal: of
    each layer, whether rows of a block do without those after them.
    draft_vocab: tokens that the head may draft, 0 where these are all of the target's, whose lm_head it then shares.
    markov: how the tokens above a node correct the node's logits, "" where they do not.  rank: of that product.
    memory: of "domino", size of what a node hands down.
    confidence: what a head that estimates acceptance reads, the row's state alone or the embedding of the token above,
    too; "" where there is none.  tied: of a draft_vocab, whether its lm_head is so many rows of the target's.
    taps, group: of convolutions around attention and MLP, and how many channels share factors; 0 where there are none.
    candidates: most likely tokens of a row among which pairs with the token above choose, 0 where none do.
    embed_scale, logit_scale: what embeddings and logits are multiplied with.  logit_cap: c of logits c tanh(x / c), 0
    for none.
    """

    aux_layers: tuple[int, ...]
    rows: int
    mask: int
    from_anchor: bool
    windows: tuple[int, ...]
    causal: tuple[bool, ...]
    draft_vocab: int = 0
    markov: Markov = ""
    rank: int = 0
    confidence: Confidence = ""
    tied: bool = False
    memory: int = 0
    taps: int = 0
    group: int = 0
    candidates: int = 0
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0

    @property
    def steps(self) -> int:
        """Returns tokens that a block predicts."""
        return self.rows - (not self.from_anchor)


def block_config(
    config: ModelConfig, raw: Mapping[str, Any], weights: Mapping[str, Any], target: DecoderModel
) -> BlockConfig:
    """Reads the config of a block head. raw: flat keys (`flatten_config`).  weights: by name. Raises CheckpointError
    for what cannot be served."""
    fields, vocab = Fields(raw, "config"), target.config.vocab_size
    for key, neutral in _NEUTRAL.items():
        fields.check(key, (neutral,))
    markov = _markov(raw, weights)
    candidates = _candidates(fields, weights, vocab)
    if candidates and markov:
        raise CheckpointError(f"{_SELECTOR} beside another correction of the same logits is not supported")
    anchored = from_anchor(raw)
    windows, causal = _reach(fields, raw, config.num_layers)
    lm_head, d2t = (weights.get(name) for name in ("lm_head.weight", "d2t"))
    rows = raw.get("draft_vocab_size") or (vocab if d2t is None else len(d2t))
    if rows != vocab and lm_head is None and d2t is None:
        raise CheckpointError(
            f"tensors missing from the checkpoint: lm_head.weight, or d2t, the {rows} tokens that are drafted with "
            "rows of the target's"
        )
    block = fields.whole("block_size", 1 if anchored else 2, MAX_ROWS)
    taps, group = _convolutions(fields, weights, config.hidden_size, block)
    return BlockConfig(
        aux_layers=_aux_layers(raw, weights, target.config),
        rows=block,
        mask=fields.whole("mask_token_id", 0, vocab - 1),
        from_anchor=anchored,
        windows=windows,
        causal=causal,
        draft_vocab=rows if rows != vocab else 0,
        tied=rows != vocab and lm_head is None,
        markov=markov,
        rank=matrix(weights, _SELECTOR).shape[1] if candidates else _rank(weights, markov),
        confidence=_confidence(weights, config.hidden_size, markov in MARKOV),
        memory=weights[_GRU].shape[0] // 3 if markov == "domino" else 0,
        taps=taps,
        group=group,
        candidates=candidates,
        embed_scale=fields.number("input_embedding_scale", 0, _MOST, 1.0),
        logit_scale=fields.number("output_multiplier", 0, _MOST, 1.0),
        logit_cap=fields.number("final_logit_softcapping", 0, _MOST, 0.0),
    )


def _markov(raw: Mapping[str, Any], weights: Mapping[str, Any]) -> Markov:
    """Returns what the weights have; where these say nothing, that they are not there."""
    if _GRU in weights or raw.get("projector_type") == "domino":
        _check_domino(raw, weights)
        return "domino"
    if _MARKOV_IN not in weights:
        return ""
    matrix(weights, _MARKOV_IN)
    parts = (("gated", "gate_proj"), ("rnn", "joint_proj"))
    stored = [kind for kind, name in parts if f"markov_head.{name}.weight" in weights]
    kind = raw.get("markov_head_type") or (stored or ["vanilla"])[0]
    if kind not in MARKOV:
        raise CheckpointError(f"config: markov_head_type: expected {', '.join(MARKOV)}, found {show(kind)}")
    return cast(Markov, kind)


def _check_domino(raw: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    matrix(weights, _DOMINO_IN)
    rows, memory = matrix(weights, _GRU).shape
    if not memory or rows != 3 * memory:
        raise CheckpointError(f"{_GRU}: expected three times as many rows as columns, found the shape {[rows, memory]}")
    alone = raw.get("pure_draft_prefix_len")
    if alone not in (None, 1):
        raise CheckpointError(f"config: pure_draft_prefix_len: expected 1, found {show(alone)}")


def _rank(weights: Mapping[str, Any], markov: Markov) -> int:
    if not markov:
        return 0
    name, of = (_DOMINO_IN, 0) if markov == "domino" else (_MARKOV_IN, 1)
    return int(weights[name].shape[of])


def _candidates(fields: Fields, weights: Mapping[str, Any], vocab: int) -> int:
    if _SELECTOR not in weights:
        return 0
    fields.check("selector_vocab_size", (vocab,))
    rank = matrix(weights, _SELECTOR).shape[1]
    fields.whole("selector_rank", rank, rank, rank)
    return fields.whole("selector_top_k", 2, min(MAX_CANDIDATES, vocab))


def _convolutions(fields: Fields, weights: Mapping[str, Any], hidden: int, rows: int) -> tuple[int, int]:
    """Returns taps and channels of a group; zeros where there are no convolutions."""
    if _CONV not in weights:
        return 0, 0
    shape = list(weights[_CONV].shape)
    if len(shape) != 3 or shape[0] != 2 or not 1 <= shape[1] <= rows:
        raise CheckpointError(f"{_CONV}: expected [2, 1 to {rows} taps, {hidden}], found the shape {shape}")
    fields.whole("conv_kernel_size", shape[1], shape[1], shape[1])
    group = fields.whole("conv_group_size", 1, hidden)
    if hidden % group:
        raise CheckpointError(f"config: conv_group_size: expected a divisor of the hidden size {hidden}, found {group}")
    return shape[1], group


def _confidence(weights: Mapping[str, Any], hidden: int, markov: bool) -> Confidence:
    """Returns what the weights have, by what it reads."""
    weight = weights.get("confidence_head.proj.weight")
    if weight is None:
        return ""
    return "markov" if markov and weight.shape[-1] > hidden else "plain"


def _reach(fields: Fields, raw: Mapping[str, Any], layers: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Windows of the layers, and whether each is causal inside a block."""
    kinds = fields.texts("layer_types")
    if kinds and len(kinds) != layers:
        raise fields.unlike("layer_types", f"one for each of {layers} layers")
    sliding = [kind == "sliding_attention" for kind in kinds] or [fields.flag("use_swa")] * layers
    window = 0
    if any(sliding):
        window = fields.whole("swa_window_size" if raw.get("swa_window_size") else "sliding_window", 2)
    said = [fields.flag(key) for key in ("is_causal", "causal", "causal_head") if raw.get(key) is not None]
    by_kind = bool(kinds) and not fields.flag("sliding_window_non_causal")
    causal = tuple(said[0] if said else by_kind and slides for slides in sliding)
    return tuple(window if slides else 0 for slides in sliding), causal


def _aux_layers(raw: Mapping[str, Any], weights: Mapping[str, Any], target: ModelConfig) -> tuple[int, ...]:
    """Residual streams that the head reads, numbered as `DecoderModel.forward` does."""
    count, layers = aux_count(weights, target.hidden_size), target.num_layers
    # The speculators library counts boundaries, the others name layers whose output is meant.
    boundary = raw.get("target_layer_ids") is None and raw.get("aux_hidden_state_layer_ids") is not None
    key = "aux_hidden_state_layer_ids" if boundary else "target_layer_ids"
    ids = layer_ids(raw, key)
    if ids is None:
        ids = [layers // 2] if count == 1 else [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]
    return streams(key, ids, count, layers, boundary, from_embedding=True)
