"""The text of Gemma 4 is the same with drafts as without: trees and chains of lookups."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.test_hybrid_models import plain, texts
from engine.test_moe_models import check_eagle3
from gemma4_models import KINDS, ON_GPU, reference
from reference.learnable import ENGINE
from tiny_checkpoint import VOCAB, write_tokenizer
from torch import Tensor

from draftwing import LLM, SamplingParams
from draftwing.engine import target
from draftwing.layers.mlp import GatedMLP
from draftwing.ops.attention.attend import MixedAttend

pytestmark = pytest.mark.slow


Made = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A checkpoint of a kind, and transformers' model of it; once of each kind."""

    def write(kind: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("gemma4") / "model"
        theirs = reference(kind, vocab_size=VOCAB, max_position_embeddings=512, tie_word_embeddings=False)
        theirs.save_pretrained(folder)
        write_tokenizer(folder)
        return folder, theirs

    return cache(write)


@pytest.mark.further(kind="dense")  # as per-layer, with less
@pytest.mark.further(kind="experts", dtype="bfloat16")
@pytest.mark.further(kind=["per-layer", "experts"], dtype="float32")
@pytest.mark.further(kind="per-layer", dtype="auto")  # below
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_token(made: Made, kind: str, dtype: str) -> None:
    """auto: weights in blocks."""
    folder, _ = made(kind)
    expected = plain(folder, dtype)
    assert all(len(set(ids)) > (2 if i % 2 else 8) for i, ids in enumerate(expected))
    for algorithm in ("NGRAM", "SUFFIX"):
        assert texts(folder, algorithm, dtype) == expected, algorithm


@pytest.mark.parametrize("kind", ["per-layer", "experts"])
def test_prompts_beside_rows_that_decode(made: Made, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one forward, of which no layer leaves queries out."""
    mixed: list[MixedAttend] = []

    def noted(*parts: Any) -> MixedAttend:
        mixed.append(MixedAttend(*parts))
        return mixed[-1]

    folder, _ = made(kind)
    expected = plain(folder, "auto")
    monkeypatch.setattr(target, "MixedAttend", noted)
    assert texts(folder, "NGRAM", "auto", enable_mixed_chunk=True) == expected and mixed


@pytest.mark.further(kind="experts")
@pytest.mark.parametrize("kind", ["per-layer", "experts"])
def test_eagle3_heads_draft_for_it(made: Made, tmp_path: Path, kind: str) -> None:
    """Of prompts no layer leaves queries out then: heads read what layers in the middle make of all of them."""
    check_eagle3(made(kind)[0], tmp_path)


def test_keys_in_int8(tmp_path: Path) -> None:
    """Of heads as large as the models'."""
    reference("dense", **ON_GPU).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    expected = texts(tmp_path, "none", "auto", kv_cache_dtype="int8")
    assert texts(tmp_path, "NGRAM", "auto", kv_cache_dtype="int8") == expected


@pytest.mark.further(dtype="float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_suppressed_tokens_are_not_drawn_where_few_others_are_left(tmp_path: Path, dtype: str) -> None:
    theirs = reference("dense", vocab_size=VOCAB, max_position_embeddings=512)
    theirs.generation_config.suppress_tokens = [90]
    theirs.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    params = SamplingParams(temperature=0.8, sampling_seed=1, max_new_tokens=20, allowed_token_ids=(7, 90))
    with LLM(str(tmp_path), **{**ENGINE, "dtype": dtype}, speculative_algorithm="none") as llm:
        assert llm.generate([[1, 2, 3]], params)[0].token_ids == [7] * 20


@pytest.mark.parametrize("kind", ["per-layer", "experts"])
def test_text_equals_transformers(made: Made, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, of whose queries the last layers see those alone whose results are wanted."""
    folder, theirs = made(kind)
    seen: list[int] = []
    forward = GatedMLP.forward

    def counted(self: GatedMLP, x: Tensor, residual: Tensor | None = None) -> Tensor:
        seen.append(len(x))
        return forward(self, x, residual)

    prompt = torch.randint(0, 256, (90,), generator=torch.Generator().manual_seed(3)).tolist()
    options = {**ENGINE, "dtype": "float32", "chunked_prefill_size": 40, "speculative_algorithm": "none"}
    with LLM(str(folder), **options) as llm:
        monkeypatch.setattr(GatedMLP, "__call__", counted)
        params = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
        found = llm.generate([prompt], params)[0].token_ids
    ids = torch.tensor([prompt + found])
    with torch.inference_mode():
        expected = theirs(ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
    assert found == expected.tolist()
    layers = theirs.config.num_hidden_layers
    own = layers - theirs.config.num_kv_shared_layers
    few = layers - own
    assert seen[: 3 * own + few] == [*[40] * own, *[40] * own, *[10] * own, *[1] * few]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(tmp_path: Path, kind: str) -> None:
    """In float32 the text is a CPU's; where bits are promised drafts change nothing of it."""
    reference(kind, **ON_GPU).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    assert texts(tmp_path, "none", "float32", device="cuda") == texts(tmp_path, "none", "float32")
    exact = {"device": "cuda", "enable_deterministic_inference": True}
    expected = texts(tmp_path, "none", "bfloat16", **exact)
    for algorithm in ("NGRAM", "SUFFIX"):
        assert texts(tmp_path, algorithm, "bfloat16", **exact) == expected, algorithm
