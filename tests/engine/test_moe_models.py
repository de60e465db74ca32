"""The text of models whose experts are chosen by sigmoids is the same with drafts as without: trees of lookups, of
their own prediction layer, and of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.test_hybrid_models import TREE, plain, texts
from moe_models import predicting, published, reference, with_layer
from reference.checkpoints import Checkpoint, eagle3_head
from reference.learnable import ENGINE
from tiny_checkpoint import VOCAB, write_tokenizer

from draftwing import LLM, SamplingParams
from draftwing.engine.graphs import RecordedStages

pytestmark = pytest.mark.slow


KINDS = [
    "glm4-moe", "glm4-moe-groups", "minimax-m2", "deepseek-v2-groups", "deepseek-v3", "glm4-moe-lite", "deepseek-v3.2",
    "glm-5", "hunyuan-v3", "ling2", "exaone-moe", "mellum",
]  # fmt: skip

# Of latents, in multiples of 64 wherever they are outputs: other sizes have no exact kernels on a GPU.
WIDE = {"kv_lora_rank": 56, "qk_nope_head_dim": 24, "v_head_dim": 32}


def written(folder: Path, kind: str, **changes: Any) -> list[str]:
    """Writes a checkpoint with its prediction layer, if transformers has it -> what can draft for it."""
    theirs = reference(kind, vocab_size=VOCAB, max_position_embeddings=512, **changes)
    predicts = kind not in ("minimax-m2", "deepseek-v2-groups", "deepseek-v2")
    with_layer(folder, theirs, published(theirs, predicting(theirs)) if predicts else {})
    write_tokenizer(folder)
    return ["NGRAM", *(("NEXTN", "NEXTN+SUFFIX") if predicts else ())]


@pytest.mark.further(kind=[kind for kind in KINDS if kind != "minimax-m2"], dtype="float32")
@pytest.mark.further(kind=[kind for kind in KINDS if kind not in ("deepseek-v3", "exaone-moe")], dtype="bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_token(tmp_path: Path, kind: str, dtype: str) -> None:
    drafters = written(tmp_path, kind)
    expected = texts(tmp_path, "none", dtype)
    assert all(len(set(ids)) > (2 if i % 2 else 8) for i, ids in enumerate(expected)), "greedy ones repeat themselves"
    for algorithm in drafters:
        assert texts(tmp_path, algorithm, dtype) == expected, algorithm


@pytest.mark.parametrize("name", ["kv_lora_rank", pytest.param("v_head_dim", marks=pytest.mark.exhaustive)])
def test_latents_of_one_element(tmp_path: Path, name: str) -> None:
    written(tmp_path, "deepseek-v3", **{name: 1})
    assert texts(tmp_path, "NGRAM", "bfloat16") == texts(tmp_path, "none", "bfloat16")


@pytest.mark.further(kind=[kind for kind in KINDS if kind != "glm4-moe"])
@pytest.mark.parametrize("kind", KINDS)
def test_eagle3_heads_draft_for_them(tmp_path: Path, kind: str) -> None:
    """Heads are dense layers with keys and values, whatever the target's layers are."""
    written(tmp_path / "model", kind)
    check_eagle3(tmp_path / "model", tmp_path)


def check_eagle3(model: Path, folder: Path) -> None:
    """A head for a model that is 64 wide, written to the folder, changes no token of its text: trees."""
    sizes = {"hidden_size": 64, "vocab_size": VOCAB, "head_dim": 16, "max_position_embeddings": 512}
    target = Checkpoint({}, {"hidden_size": 64})
    eagle3_head(target, rows=None, num_attention_heads=4, num_key_value_heads=2, **sizes).write(folder / "head")
    own = {"speculative_draft_model_path": str(folder / "head"), "speculative_fixed_shape": True}
    assert texts(model, "EAGLE3", "float32", **own, **TREE) == plain(model, "float32")


# Rows of matrices fill blocks.
EVEN = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32}
EVEN_LATENTS = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}


@pytest.mark.further(kind=["glm4-moe", "minimax-m2", "glm4-moe-lite"])
@pytest.mark.parametrize(
    "kind", ["glm4-moe", "minimax-m2", "deepseek-v2", "deepseek-v3", "glm4-moe-lite", "deepseek-v3.2", "glm-5"]
)
def test_steps_of_weights_in_blocks_are_recorded(tmp_path: Path, kind: str) -> None:
    """Those of indexers, too, which pick 16 tokens here."""
    sizes = EVEN | (EVEN_LATENTS if kind.startswith("deepseek") or kind in ("glm4-moe-lite", "glm-5") else {})
    if kind in ("deepseek-v3", "glm4-moe-lite", "deepseek-v3.2", "glm-5"):
        sizes["q_lora_rank"] = 64
    if kind == "minimax-m2":
        del sizes["moe_intermediate_size"]
    *_, drafter = written(tmp_path, kind, **sizes)[:2]
    params = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
    options = {**ENGINE, "speculative_algorithm": drafter, "quantization": "q8_0"}
    with LLM(str(tmp_path), **options) as llm:
        stages = llm.engine.parts.executor.graphs
        if not isinstance(stages, RecordedStages):
            pytest.skip("nothing is recorded here")
        llm.generate([[5, 6, 7, 8, 9, 5, 6, 7]], params)
        assert stages.replays > 5 and not stages.refused


def test_texts_that_indexers_would_pick_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is picked of them with `--context-length`, and the text is the same."""
    written(tmp_path, "glm-5", **EVEN, **EVEN_LATENTS, q_lora_rank=64, index_topk=64)
    params = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
    options, found = {**ENGINE, "speculative_algorithm": "NEXTN", "quantization": "q8_0"}, []
    for context in (64, 65):
        with LLM(str(tmp_path), **options, context_length=context) as llm:
            assert "not used" not in caplog.text
            found.append(llm.generate([list(range(5, 35))], params)[0].token_ids)
    assert found[0] == found[1] and len(set(found[0])) > 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [*KINDS, "exaone-moe-window", "mellum-full"])
def test_on_a_gpu(tmp_path: Path, kind: str) -> None:
    """In float32 the text is a CPU's; in the deterministic mode drafts change nothing."""
    sizes = {"intermediate_size": 192} | ({} if kind == "minimax-m2" else {"moe_intermediate_size": 64})
    if kind.startswith("deepseek") or kind in ("glm4-moe-lite", "glm-5"):
        sizes |= WIDE | ({} if kind == "deepseek-v2" else {"q_lora_rank": 64})
    drafters = written(tmp_path, kind, **sizes)
    assert texts(tmp_path, "none", "float32", device="cuda") == texts(tmp_path, "none", "float32")
    exact = {"device": "cuda", "enable_deterministic_inference": True}
    expected = texts(tmp_path, "none", "bfloat16", **exact)
    for algorithm in drafters:
        assert texts(tmp_path, algorithm, "bfloat16", **exact) == expected, algorithm
