"""A complete checkpoint of a Qwen3 that makes vectors of texts, or judges them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny_tokenizers import byte_level
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import Qwen3Config, Qwen3ForCausalLM

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS, YES, NO = 256, 259, 260


def write_embedder(
    folder: Path, pooling: dict[str, Any] | None = None, modules: tuple[str, ...] = ("Normalize",)
) -> Path:
    """Writes a Qwen3 of two layers, whose tokenizer ends texts with EOS where it makes vectors."""
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=264, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, tie_word_embeddings=True,
        initializer_range=0.2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    backend = byte_level(*SPECIAL)
    backend.add_tokens([AddedToken(word, single_word=True) for word in ("yes", "no")])
    assert [backend.token_to_id(word) for word in (SPECIAL[0], "yes", "no")] == [EOS, YES, NO]
    if pooling is not None:
        backend.post_processor = TemplateProcessing(single="$A <|endoftext|>", special_tokens=[(SPECIAL[0], EOS)])
        kinds = ["Transformer", "Pooling", *modules]
        every = [
            {
                "idx": i,
                "name": str(i),
                "path": f"{i}_{kind}" if i else "",
                "type": f"sentence_transformers.models.{kind}",
            }
            for i, kind in enumerate(kinds)
        ]
        (folder / "modules.json").write_text(json.dumps(every))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **pooling}))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder


LAST, MEAN = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, {"pooling_mode_mean_tokens": True}
CLS = {"pooling_mode": "cls"}


def ids_of(text: str) -> list[int]:
    """The tokenizer of `write_embedder`, by hand: bytes in the order of their characters, then EOS."""
    backend = byte_level()
    return [*backend.encode(text).ids, EOS]
