"""The text of models whose experts are chosen by sigmoids is the same with drafts as without: trees of lookups, of
their own prediction layer, and of both."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.test_hybrid_models import texts
from moe_models import predicting, published, reference, with_layer
from tiny_checkpoint import VOCAB, write_tokenizer

pytestmark = pytest.mark.slow


KINDS = ["glm4-moe", "glm4-moe-groups", "minimax-m2", "deepseek-v2-groups", "deepseek-v3", "glm4-moe-lite"]


@pytest.mark.further(kind=["glm4-moe", "deepseek-v2-groups", "deepseek-v3"], dtype="float32")
@pytest.mark.further(kind=[kind for kind in KINDS if kind not in ("glm4-moe", "deepseek-v3")], dtype="bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_token(tmp_path: Path, kind: str, dtype: str) -> None:
    theirs = reference(kind, vocab_size=VOCAB, max_position_embeddings=512)
    predicts = kind in ("glm4-moe", "glm4-moe-groups", "deepseek-v3")  # transformers knows no such layer of others
    with_layer(tmp_path, theirs, published(theirs, predicting(theirs)) if predicts else {})
    write_tokenizer(tmp_path)
    plain = texts(tmp_path, "none", dtype)
    assert all(len(set(ids)) > (3 if i % 2 else 10) for i, ids in enumerate(plain)), (
        "greedy ones soon repeat themselves"
    )
    for algorithm in ("NGRAM", *(("NEXTN", "NEXTN+SUFFIX") if predicts else ())):
        assert texts(tmp_path, algorithm, dtype) == plain, algorithm
