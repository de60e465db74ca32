"""Bytes of single tokens add up to the bytes of the text."""

from __future__ import annotations

from pathlib import Path

from tiny_tokenizers import sentencepiece

from draftwing.text.token_text import TokenTexts
from draftwing.text.tokenizer import load_tokenizer

TEXT = "The  größte 日本語 😀👩‍👩‍👧\n\tüber\u0000 \ufffd"


def test_byte_level(smollm2_path: Path) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(TEXT)
    assert b"".join(map(texts.raw, ids)) == TEXT.encode()
    parts = tokenizer.encode("日")
    if len(parts) > 1:
        assert texts.text(parts[0]) == "\ufffd" and texts.key(parts[0]).startswith("bytes:\\xe6")
    end = tokenizer.eos_id
    assert end is not None and texts.text(end) == tokenizer.piece(end)
    assert texts.raw(tokenizer.vocab_size + 3) == b""
    # Keys tell all tokens of a vocabulary apart.
    keys = [texts.key(token) for token in range(2000)]
    assert len(set(keys)) == len(keys)


def test_sentencepiece() -> None:
    tokenizer = sentencepiece()
    texts, ids = TokenTexts(tokenizer), tokenizer.backend.get_vocab()
    raw = {name: texts.raw(ids[name]) for name in ("▁the", "the", "<0xE6>", "</s>", "▁", "é")}
    expected = {"▁the": b" the", "the": b"the", "<0xE6>": b"\xe6", "</s>": b"</s>", "▁": b" ", "é": "é".encode()}
    assert raw == expected
