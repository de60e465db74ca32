"""BERT, RoBERTa and XLM-RoBERTa: encoders, which make vectors of texts or score pairs of them, and write no text.

A norm stands behind each sum, and the residual stream goes on with what it gives. So the norm of a layer's MLP is the
first norm of the next layer, that of the embeddings is the first layer's, and the last layer's is the model's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from draftwing.errors import CheckpointError
from draftwing.gguf_file import GGUFFile
from draftwing.layers.config import LayerConfig
from draftwing.layers.encoder import EncoderAttentionConfig, EncoderConfig
from draftwing.models.family import Family, InGGUF
from draftwing.models.fields import Fields, Values
from draftwing.requests.pooling import Pooling, Scores

_OUT_NORM = re.compile(r"encoder\.layer\.(\d+)\.output\.LayerNorm\.")
_NAMES = {
    "encoder.layer.": "layers.",
    "embeddings.word_embeddings.": "embed_tokens.",
    "embeddings.LayerNorm.": "layers.0.input_layernorm.",
    "pooler.dense.": "score.dense.",
    "classifier.dense.": "score.dense.",
    "classifier.out_proj.": "score.out.",
    "classifier.": "score.out.",
}
_ACTIVATIONS: dict[str, Scores] = {"Sigmoid": "sigmoid", "Identity": "raw"}
_LABELS, _SAID, _SAID_OF_OLD = "id2label", "sentence_transformers", "sbert_ce_default_activation_function"
# What the first BERT's own code noted, and what older libraries did.
_NEUTRAL: dict[str, Values] = {
    "position_embedding_type": ("absolute",), "directionality": ("bidi",), "pooler_type": ("first_token_transform",),
    **dict.fromkeys(("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head")),
    **dict.fromkeys(("output_past", _SAID, _SAID_OF_OLD)),
}  # fmt: skip


def _layers(
    fields: Fields, layer: LayerConfig, count: int, heads: str = "num_attention_heads"
) -> tuple[LayerConfig, ...]:
    """heads: the key that says how many there are."""
    number = fields.whole(heads)
    mixer = EncoderAttentionConfig(number, layer.hidden // number)
    return (replace(layer, mixer=mixer, normed_residual=True),) * count


def _encoder(padded: bool, scores: bool, fields: Fields) -> EncoderConfig:
    """padded: whether positions are counted from behind the padding token's id."""
    first = fields.whole("pad_token_id", 0, default=1) + 1 if padded else 0
    fields.check("is_decoder", (False,))
    pooling = Pooling("mean", stated=True)
    if scores:
        pooling = Pooling(
            "cls", refused="it scores pairs of texts, by /v1/rerank or /score", scores=_activation(fields)
        )
    rows = fields.whole("max_position_embeddings", first + 1)
    return EncoderConfig(rows, first, rows - first, fields.whole("type_vocab_size", high=16, default=2), pooling)


def _activation(fields: Fields) -> Scores:
    """Returns what is made of the one label's logit."""
    labels = fields.get(_LABELS)
    if fields.whole("num_labels", 0, default=len(labels) if isinstance(labels, dict) else 2) != 1:
        raise fields.unlike(_LABELS, "one label, of a model that scores how well a text answers another")
    said, of_old = fields.get(_SAID), fields.text(_SAID_OF_OLD, "Sigmoid")
    name = str(said.get("activation_fn", of_old) if isinstance(said, dict) else of_old).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise fields.unsupported(f"{_SAID}.activation_fn", name)
    return _ACTIVATIONS[name]


def _apart(scores: bool, name: str, value: Any) -> Iterable[tuple[str, Any]]:
    """Gives tensors the names that they have in Llama, and leaves out what nobody reads."""
    own = name.removeprefix("model.").removeprefix("bert.").removeprefix("roberta.")
    if own == "embeddings.position_ids" or (not scores and own.startswith("pooler.")):
        return []
    if (found := _OUT_NORM.match(own)) is not None:
        return [(f"model.layers.{int(found[1]) + 1}.input_layernorm.{own[found.end() :]}", value)]
    before = next((before for before in _NAMES if own.startswith(before)), "")
    return [(f"model.{_NAMES.get(before, '')}{own.removeprefix(before)}", value)]


def _encoder_in_gguf(file: GGUFFile, fields: Fields) -> EncoderConfig:
    """Of a reranker of BERT's a file lacks half of the head, and of the others' the tokenizer is not read."""
    if any(name.startswith("cls.") for name in file.tensors):
        raise CheckpointError(f"{file.path}: a reranker is served from its Hugging Face folder alone")
    fields.check("attention.causal", (False,))
    fields.get("classifier.output_labels")  # of a head that is not there
    rows, types = (_rows(file, name) for name in ("position_embd.weight", "token_types.weight"))
    return EncoderConfig(rows, 0, fields.whole("context_length", high=rows), types, Pooling("mean", stated=True))


def _rows(file: GGUFFile, name: str) -> int:
    if name not in file.tensors:
        raise CheckpointError(f"{file.path}: {name} is missing")
    file.raw(name)  # its shape is believed, so its values must be there
    return file.tensors[name].shape[0]


_IN_GGUF = InGGUF(
    "bert",
    names={"attn_output_norm": "post_attention_layernorm"},
    next_norm="layer_output_norm",
    top_names={
        "token_embd_norm.weight": "model.layers.0.input_layernorm.weight",
        "token_embd_norm.bias": "model.layers.0.input_layernorm.bias",
        "position_embd.weight": "model.embeddings.position_embeddings.weight",
        "token_types.weight": "model.embeddings.token_type_embeddings.weight",
    },
    layers=lambda file, fields, layer, count: _layers(fields, layer, count, "attention.head_count"),
    turns=False,
    encoder=_encoder_in_gguf,
)


def _family(model_type: str, padded: bool, scores: bool) -> Family:
    return Family(
        model_type,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        eps=1e-12,
        eps_key="layer_norm_eps",
        centred=True,
        norm_bias=True,
        activation="ungated_exact_gelu",
        sliding_window=None,
        turns=False,
        keys=lambda fields: {"tie_word_embeddings": True},
        layers=_layers,
        encoder=partial(_encoder, padded, scores),
        neutral=_NEUTRAL,
        final_norm="model.layers.{}.input_layernorm",
        layer_names={
            "self_attn.q_proj": "attention.self.query",
            "self_attn.k_proj": "attention.self.key",
            "self_attn.v_proj": "attention.self.value",
            "self_attn.o_proj": "attention.output.dense",
            "post_attention_layernorm": "attention.output.LayerNorm",
            "mlp.up_proj": "intermediate.dense",
            "mlp.down_proj": "output.dense",
        },
        apart=partial(_apart, scores),
        gguf=None if padded or scores else _IN_GGUF,
    )


_KINDS = {"Bert": ("bert", False), "Roberta": ("roberta", True), "XLMRoberta": ("xlm-roberta", True)}
FAMILIES = {
    f"{name}{'ForSequenceClassification' if scores else 'Model'}": _family(*kind, scores)
    for name, kind in _KINDS.items()
    for scores in (False, True)
}
