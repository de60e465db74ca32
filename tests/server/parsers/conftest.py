"""A compiler of grammars with the markers of the families as tokens."""

from __future__ import annotations

import pytest
import tokenizers
from fake_engine import EOS, byte_tokenizer

from draftwing.grammar.compiler import GrammarCompiler
from draftwing.text.tokenizer import Tokenizer

MARKERS = (
    "[TOOL_CALLS]", "<|python_tag|>", "[/THINK]", "[THINK]", "<|channel|>", "<|message|>", "<|end|>", "<|start|>",
    "<|constrain|>",
)  # fmt: skip


@pytest.fixture(scope="session")
def compiler() -> GrammarCompiler:
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_special_tokens([tokenizers.AddedToken(marker, special=True) for marker in MARKERS])
    other = Tokenizer(tokenizer.backend, tokenizer.special_tokens)  # which knows them
    return GrammarCompiler(other, other.vocab_size, [EOS])
