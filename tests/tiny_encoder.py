"""Complete random checkpoints of encoders, with tokenizers of words, and what transformers makes of texts with them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_embedder import write_modules
from tiny_gguf import finish
from tokenizers import models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

BERT, ROBERTA, XLM = "Bert", "Roberta", "XLMRoberta"
WORDS = "the a capital of china is beijing what gravity pull ##s two body ##ies together one three four five , . ? !"
SIZES: dict[str, Any] = dict(
    hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, initializer_range=0.3
)


def write_encoder(
    folder: Path, kind: str = BERT, scores: bool = False, pooling: dict[str, Any] | None = None, **config: Any
) -> Path:
    """Writes one with 40 positions for tokens. scores: with a head for one label.  pooling: the config of that module,
    None: no file says how vectors are made."""
    torch.manual_seed(7)
    padded = kind != BERT
    special = words(kind)
    cls, sep, pad, unknown = special[:4]
    vocabulary = [*special, *WORDS.split(), *"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijklmnop")]
    sizes = {**SIZES, "vocab_size": len(vocabulary), "max_position_embeddings": 40 + 3 * padded, "pad_token_id": 2}
    types = {"type_vocab_size": 1 if padded else 2}
    labels = {"num_labels": 1} if scores else {}
    made = getattr(transformers, f"{kind}Config")(**sizes | types | labels | config)
    model = getattr(transformers, f"{kind}{'ForSequenceClassification' if scores else 'Model'}")(made)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "LayerNorm" in name or name.endswith("bias"):
                value.add_(torch.empty_like(value).uniform_(-0.4, 0.4))
    model.save_pretrained(folder)
    backend = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(vocabulary)}, unk_token=unknown))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens([*special])
    pair = f"{cls} $A {sep} {sep} $B {sep}" if padded else f"{cls} $A {sep} $B:1 {sep}:1"
    backend.post_processor = TemplateProcessing(
        single=f"{cls} $A {sep}", pair=pair, special_tokens=[(word, vocabulary.index(word)) for word in (cls, sep)]
    )
    backend.enable_truncation(8)  # as published files have it
    backend.enable_padding(length=8, pad_token=pad)
    backend.save(str(folder / "tokenizer.json"))
    names = dict(zip(("cls_token", "sep_token", "pad_token", "unk_token", "mask_token"), special, strict=True))
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    if pooling is not None:
        write_modules(folder, pooling)
    return folder


_IN_GGUF = {
    "embeddings.word_embeddings": "token_embd", "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types", "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q", "attention.self.key": "attn_k", "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output", "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up", "output.dense": "ffn_down", "output.LayerNorm": "layer_output_norm",
}  # fmt: skip


def write_gguf(
    folder: Path,
    pooling: int = 1,
    edit: Callable[[gguf.GGUFWriter, dict[str, np.ndarray[Any, Any]]], None] | None = None,
) -> Path:
    """Writes the BERT of a folder as converters do, its matrices in float16, to which the folder's own are rounded,
    too. edit: may change metadata and tensors."""
    rounded = {name: value.half().float() for name, value in load_file(folder / "model.safetensors").items()}
    save_file(rounded, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    known, special = {i: word for word, i in vocabulary.items()}, words(BERT)
    every = [known.get(i, f"[unused{i}]") for i in range(config["vocab_size"])]
    writer = gguf.GGUFWriter(path := folder.with_suffix(".gguf"), "bert")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(pooling))
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    spelt = [word if word in special else word[2:] if word.startswith("##") else "\u2581" + word for word in every]
    writer.add_token_list(spelt)
    writer.add_token_types([gguf.TokenType.CONTROL if word in special else gguf.TokenType.NORMAL for word in every])
    writer.add_token_type_count(config["type_vocab_size"])
    for name, add in zip(
        special,
        (
            writer.add_bos_token_id,
            writer.add_sep_token_id,
            writer.add_pad_token_id,
            writer.add_unk_token_id,
            writer.add_mask_token_id,
        ),
        strict=True,
    ):
        add(vocabulary[name])
    tensors = {}
    for name, value in rounded.items():
        layer = re.match(r"encoder\.layer\.(\d+)\.", name)
        part, _, suffix = name[layer.end() if layer else 0 :].rpartition(".")
        if part in _IN_GGUF:
            tensors[f"blk.{layer[1]}.{_IN_GGUF[part]}.{suffix}" if layer else f"{_IN_GGUF[part]}.{suffix}"] = (
                value.numpy()
            )
    if edit is not None:
        edit(writer, tensors)
    for name, one in tensors.items():
        small = one.ndim == 1 or name.startswith(("position_embd", "token_types"))
        writer.add_tensor(name, one if small else one.astype(np.float16))
    finish(writer)
    return path


def words(kind: str) -> tuple[str, str, str, str, str]:
    """The beginning, the separator, padding, what is unknown, and the mask."""
    if kind == BERT:
        return "[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]"
    return "<s>", "</s>", "<pad>", "<unk>", "<mask>"


def theirs(folder: Path | str, *texts: str, scores: bool = False) -> np.ndarray[Any, Any]:
    """Of transformers, in float32: the hidden states of a text [T, H], or the logits of a pair [1]."""
    tokenizer, model = _theirs(Path(folder), scores)
    found = tokenizer(*texts, return_token_type_ids=True)
    types = torch.tensor([found["token_type_ids"]]) if model.config.type_vocab_size > 1 else None
    with torch.no_grad():
        out = model(torch.tensor([found["input_ids"]]), token_type_ids=types)
    return np.asarray((out.logits if scores else out.last_hidden_state)[0].numpy(), np.float64)


@lru_cache(maxsize=1)
def _theirs(folder: Path, scores: bool) -> tuple[Any, Any]:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    name = transformers.AutoModelForSequenceClassification if scores else transformers.AutoModel
    return tokenizer, name.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
