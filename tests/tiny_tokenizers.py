"""Tokenizers that are made in the tests."""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from draftwing.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


def byte_level(*specials: str) -> tokenizers.Tokenizer:
    """A token for each byte, and then special ones, from id 256 on."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(characters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(special, special=True) for special in specials])
    return backend


def sentencepiece(decoder: Any = None) -> Tokenizer:
    """Pieces with a visible leading space, byte fallback, two special tokens, an empty and a replacement piece."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    names += ["▁", "▁the", "the", "▁a", "a", "b", "▁▁", "é", "日", "\n", REPLACEMENT, "stop", "▁stop", "er", ""]
    backend = tokenizers.Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoder or decoders.Sequence(parts)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})
