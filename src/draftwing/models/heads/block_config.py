"""What a checkpoint says of a head that drafts a block: z-lab's DFlash and Domino, DeepSpec's DSpark, and both as the
speculators library writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from draftwing.config.trees import from_anchor
from draftwing.errors import CheckpointError
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderModel
from draftwing.models.fields import Fields
from draftwing.models.heads.config import aux_count, layer_ids, matrix, streams
from draftwing.requests.refusals import show

Markov = Literal["", "vanilla", "gated", "rnn", "domino"]
Confidence = Literal["", "plain", "markov"]

MAX_ROWS = 64  # of a block
MARKOV: tuple[Markov, ...] = ("vanilla", "gated", "rnn")
_GRU, _DOMINO_IN, _MARKOV_IN = "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "markov_head.markov_w1.weight"
# Scalars that change the arithmetic, with the values at which they do not.
_NEUTRAL = {
    "input_embedding_scale": 1,
    "output_multiplier": 1,
    "attention_value_scale": 1,
    "attention_sink_bias": False,
}


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
    anchored = from_anchor(raw)
    windows, causal = _reach(fields, raw, config.num_layers)
    lm_head, d2t = (weights.get(name) for name in ("lm_head.weight", "d2t"))
    rows = raw.get("draft_vocab_size") or (vocab if d2t is None else len(d2t))
    if rows != vocab and lm_head is None and d2t is None:
        raise CheckpointError(
            f"tensors missing from the checkpoint: lm_head.weight, or d2t, the {rows} tokens that are drafted with "
            "rows of the target's"
        )
    return BlockConfig(
        aux_layers=_aux_layers(raw, weights, target.config),
        rows=fields.whole("block_size", 1 if anchored else 2, MAX_ROWS),
        mask=fields.whole("mask_token_id", 0, vocab - 1),
        from_anchor=anchored,
        windows=windows,
        causal=causal,
        draft_vocab=rows if rows != vocab else 0,
        tied=rows != vocab and lm_head is None,
        markov=markov,
        rank=_rank(weights, markov),
        confidence=_confidence(weights, config.hidden_size, markov in MARKOV),
        memory=weights[_GRU].shape[0] // 3 if markov == "domino" else 0,
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
    said = [fields.flag(key) for key in ("is_causal", "causal") if raw.get(key) is not None]
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
