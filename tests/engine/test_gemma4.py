"""The text of Gemma 4 is the same with drafts as without: trees and chains of lookups."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.test_hybrid_models import texts
from gemma4_models import KINDS, reference
from tiny_checkpoint import VOCAB, write_tokenizer

pytestmark = pytest.mark.slow


@pytest.mark.further(kind="dense", dtype=["float32", "auto"])
@pytest.mark.further(kind=["per-layer", "experts"], dtype="float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_token(tmp_path: Path, kind: str, dtype: str) -> None:
    """auto: weights in blocks."""
    reference(kind, vocab_size=VOCAB, max_position_embeddings=512, tie_word_embeddings=False).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    plain = texts(tmp_path, "none", dtype)
    assert all(len(set(ids)) > (3 if i % 2 else 10) for i, ids in enumerate(plain)), [len(set(i)) for i in plain]
    for algorithm in ("NGRAM", "SUFFIX"):
        assert texts(tmp_path, algorithm, dtype) == plain, algorithm
