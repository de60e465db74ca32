"""The text of a family in every format is the same with drafts as without, as an engine on a CPU has the weights: in
blocks. Drafts are those of its prediction layer or assistant, else of lookups."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.test_hybrid_models import CHAIN, TREE, texts
from family_files import FAMILIES, FORMS, PREDICTING, written
from tiny_checkpoint import VOCAB

from draftwing.ops import make_ops

KINDS = make_ops(torch.device("cpu")).block_kinds
SOME = [
    ("glm4-moe-lite", "fp8 block"),
    ("deepseek-v3", "Q8_0"),
    ("minimax-m2", "awq"),
    ("glm4-moe", "compressed int4"),
    ("gemma4-per-layer", "gptq"),
    ("gemma4-experts", "Q4_K"),
    ("qwen3.5", "Q4_K"),
    ("qwen3.5-moe", "fp8 block"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "form"),
    [pytest.param(*case, marks=() if case in SOME else pytest.mark.exhaustive) for case in product(FAMILIES, FORMS)],
)
def test_drafts_change_no_token(tmp_path: Path, family: str, form: str) -> None:
    if form == "Q4_K" and form not in KINDS:
        pytest.skip("the gguf package writes no such blocks")
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 512}
    if family.startswith("gemma4"):
        sizes["tie_word_embeddings"] = form.startswith("Q")  # files have no head then; greedy text repeats itself
    _, path = written(tmp_path, family, form, **sizes)
    own: dict[str, Any] = {"tokenizer_path": str(path.with_name("tokenizer") if path.suffix else path)}
    plain = texts(path, "none", "auto", **own)
    drafter = "NEXTN" if family in PREDICTING else "NGRAM"
    if family.startswith("gemma4"):
        drafter, assistant = "FROZEN_KV_MTP", path.with_name("assistant.gguf" if path.suffix else "assistant")
        own["speculative_draft_model_path"] = str(assistant)
    for shape in (CHAIN, TREE):
        found = texts(path, drafter, "auto", speculative_fixed_shape=True, **own, **shape)
        assert found == plain, shape
