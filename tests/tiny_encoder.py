"""Complete random checkpoints of encoders, with tokenizers of words, and what transformers makes of texts with them."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from tiny_embedder import write_modules
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
