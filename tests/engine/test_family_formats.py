"""The text of a family in every format is the same with drafts as without, as an engine on a CPU has the weights: in
blocks. Drafts are those of its prediction layer or assistant, else of lookups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gemma4_models
import pytest
import torch
from engine import test_moe_models
from engine.test_hybrid_models import TREE, texts
from family_files import CASES, HYBRIDS, PREDICTING, written
from tiny_checkpoint import VOCAB

from draftwing.ops import make_ops

pytestmark = pytest.mark.slow

KINDS = make_ops(torch.device("cpu")).block_kinds
SOME = [
    ("glm4-moe-lite", "fp8 block"),
    ("deepseek-v3", "Q8_0"),
    ("glm-5", "fp8 block"),
    ("minimax-m2", "awq"),
    ("glm4-moe", "compressed int4"),
    ("gemma4-per-layer", "gptq"),
    ("gemma4-experts", "Q4_K"),
    ("qwen3.5", "Q4_K"),
    ("qwen3.5-moe", "fp8 block"),
    ("granite4-rope", "compressed int4"),
    ("kimi-linear", "Q8_0"),
    ("nemotron-h-moe", "Q8_0"),
    ("falcon-h1-behind", "awq"),
]


EACH = [pytest.param(*case, marks=() if case in SOME else pytest.mark.exhaustive) for case in CASES]


@pytest.mark.parametrize(("family", "form"), EACH)
def test_drafts_change_no_token(tmp_path: Path, family: str, form: str) -> None:
    check(tmp_path, family, form, {}, dtype="auto")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("family", "form"), [case for case in EACH if case.values[0] not in HYBRIDS])
def test_on_a_gpu(tmp_path: Path, family: str, form: str) -> None:
    """Codes and scales stay as they are there, blocks of GGUF files become bfloat16."""
    exact = {"device": "cuda", "enable_deterministic_inference": True}
    check(tmp_path, family, form, on_a_gpu(family, form), dtype="bfloat16", **exact)


def on_a_gpu(family: str, form: str) -> dict[str, Any]:
    """Sizes of which the GEMMs of the deterministic mode take all matrices."""
    sizes: dict[str, Any] = {"intermediate_size": 192, "moe_intermediate_size": 64}
    if family.startswith("gemma4"):
        sizes = gemma4_models.ON_GPU
    elif family.startswith("deepseek") or family in ("glm4-moe-lite", "glm-5"):
        sizes |= {**test_moe_models.WIDE, "q_lora_rank": None if family == "deepseek-v2" else 64}
    if form != "Q4_K":
        return sizes
    return {name: size for name, size in sizes.items() if "intermediate" not in name}  # which are wide already


def check(folder: Path, family: str, form: str, sizes: dict[str, Any], **options: Any) -> None:
    """The text without drafts, and that with a tree."""
    if form == "Q4_K" and form not in KINDS:
        pytest.skip("the gguf package writes no such blocks")
    sizes = {**sizes, "vocab_size": VOCAB, "max_position_embeddings": 512}
    if family.startswith("gemma4"):
        sizes["tie_word_embeddings"] = form.startswith("Q")  # files have no head then; greedy text repeats itself
    _, path = written(folder, family, form, **sizes)
    options["tokenizer_path"] = str(path.with_name("tokenizer") if path.suffix else path)
    plain = texts(path, "none", **options)
    drafter = "NEXTN" if family in PREDICTING else "NGRAM"
    if family.startswith("gemma4"):
        drafter, assistant = "FROZEN_KV_MTP", path.with_name("assistant.gguf" if path.suffix else "assistant")
        options["speculative_draft_model_path"] = str(assistant)
    assert texts(path, drafter, speculative_fixed_shape=True, **options, **TREE) == plain
