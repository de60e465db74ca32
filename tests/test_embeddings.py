"""Vectors and scores of texts vs transformers, in float32: alone, together, in chunks and beside generation."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_embedder import CLS, LAST, MEAN, NO, YES, ids_of, write_embedder, write_embedder_gguf
from transformers import Qwen3ForCausalLM, Qwen3Model

from draftwing import LLM, AsyncLLM, SamplingParams
from draftwing.errors import GenerationError, RequestError
from draftwing.text.pooler import INSTRUCTION

TEXTS = ["What is the capital of China?", "Gravity pulls.", "a", "The capital of China is Beijing, in the north. " * 3]
SMALL: dict[str, Any] = dict(
    context_length=1024, max_total_tokens=8192, dtype="float32", speculative_algorithm="none", random_seed=1
)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_embedder(tmp_path_factory.mktemp("models") / "embedder", LAST))


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_embedder(tmp_path_factory.mktemp("models") / "judge"))


def states(folder: str, ids: list[int]) -> np.ndarray[Any, Any]:
    """[P, H] of transformers"""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
    return np.asarray(found.numpy(), np.float64)


def unit(vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.asarray(vector / np.linalg.norm(vector))


def test_they_are_those_of_transformers(embedder: str) -> None:
    expected = [states(embedder, ids_of(text))[-1] for text in TEXTS]
    with LLM(embedder, **SMALL) as llm:
        found, short = llm.embed(TEXTS), llm.embed(TEXTS, dimensions=7)
        alone = [llm.embed(text)[0] for text in TEXTS]
        by_ids = llm.embed([ids_of(text) for text in TEXTS])
    np.testing.assert_allclose(found, [unit(one) for one in expected], atol=1e-4)
    np.testing.assert_allclose(short, [unit(one[:7]) for one in expected], atol=1e-4)
    assert found.dtype == np.float32 and np.array_equal(found, np.stack(alone)) and np.array_equal(found, by_ids)


@pytest.mark.slow
async def test_an_engine_in_another_process_makes_the_same(embedder: str) -> None:
    expected = [unit(states(embedder, ids_of(text))[-1]) for text in TEXTS]
    async with AsyncLLM(embedder, **SMALL) as llm:
        every = [llm.embed(TEXTS), *(llm.embed(text) for text in TEXTS)]
        found, *alone = await asyncio.gather(*every, llm.embed("a", dimensions=7))
        short = alone.pop()
        with pytest.raises(RequestError, match="at least one text"):
            await llm.embed([])
        with pytest.raises(RequestError, match="dimensions must be from 1"):
            await llm.embed("a", dimensions=0)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert found.dtype == np.float32 and np.array_equal(found, np.concatenate(alone))
    np.testing.assert_allclose(short[0], unit(expected[2][:7]), atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"chunked_prefill_size": 5, "disable_radix_cache": True},
        pytest.param({"chunked_prefill_size": 13}, marks=pytest.mark.exhaustive),
        {"speculative_algorithm": "NGRAM", "max_running_requests": 3},
    ],
)
def test_they_are_the_same_in_chunks_and_with_drafts(embedder: str, options: dict[str, Any]) -> None:
    with LLM(embedder, **SMALL | {"disable_radix_cache": True}) as llm:
        plain = llm.embed(TEXTS)
    with LLM(embedder, **SMALL | options) as llm:
        assert np.array_equal(llm.embed(TEXTS), plain)
        assert np.array_equal(llm.embed(TEXTS), plain), "from the prefix cache"


@pytest.mark.parametrize(("pooling", "modules"), [(MEAN, ("Normalize",)), (MEAN, ()), (CLS, ("Normalize",))])
def test_pooling_is_what_the_files_say(tmp_path: Path, pooling: dict[str, Any], modules: tuple[str, ...]) -> None:
    folder = str(write_embedder(tmp_path / "model", pooling, modules))
    with LLM(folder, **SMALL, chunked_prefill_size=16) as llm:
        found, again = llm.embed(TEXTS), llm.embed(TEXTS)
    expected = [states(folder, ids_of(text)) for text in TEXTS]
    pooled = [one[0] if pooling is CLS else one.mean(0) for one in expected]
    np.testing.assert_allclose(found, [unit(one) for one in pooled] if modules else pooled, atol=1e-4)
    assert np.array_equal(found, again)


def test_beside_generation_both_are_as_alone(embedder: str) -> None:
    params = SamplingParams(max_new_tokens=40, temperature=0, ignore_eos=True)
    with LLM(embedder, **SMALL, chunked_prefill_size=8) as llm:
        text, vectors = llm.generate("once upon", params)[0].token_ids, llm.embed(TEXTS)
        generating = llm._inputs.of_prompts("once upon", params, {})
        answers = llm._prepare([*generating, *llm._pooler.vector_requests(map(ids_of, TEXTS)), *generating], {})
        for _ in llm._session.stream(answers):
            pass
        assert answers[0].token_ids == answers[-1].token_ids == text
        assert np.array_equal([llm._pooler.vector(answer) for answer in answers[1:-1]], vectors)


def test_scores_of_vectors_are_cosines(embedder: str) -> None:
    with LLM(embedder, **SMALL) as llm:
        vectors = llm.embed(TEXTS).astype(np.float64)
        found = llm.score(TEXTS[0], TEXTS[1:])
        np.testing.assert_allclose(found, vectors[1:] @ vectors[0], atol=1e-6)
        assert llm.rerank(TEXTS[0], TEXTS[1:], top_n=2) == sorted(enumerate(found), key=lambda one: -one[1])[:2]


def test_a_model_without_vectors_judges(judge: str) -> None:
    """The prompt is that of the rerankers' model card."""
    documents = ["Beijing", "It pulls two bodies together.", "x" * 40]
    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    model = Qwen3ForCausalLM.from_pretrained(judge, dtype=torch.float32)
    with LLM(judge, **SMALL, chunked_prefill_size=100) as llm:
        found = llm.score("Why?", documents)
        other = llm.score("Why?", documents, instruction="Be wrong")
        encode = llm.tokenizer.encode
        for document, score in zip(documents, found, strict=True):
            ids = encode(f"{before}<Instruct>: {INSTRUCTION}\n\n<Query>: Why?\n<Document>: {document}{after}", False)
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1]
            assert score == pytest.approx(float(logits[[YES, NO]].softmax(0)[0]), abs=1e-4)
        assert [llm.score("Why?", one)[0] for one in documents] == found != other
        assert llm.embed(TEXTS).shape == (len(TEXTS), 48), "any model makes vectors, of its last token"


def test_long_texts_lose_their_end_where_that_is_asked_for(embedder: str, judge: str) -> None:
    long = "b" * 3000
    with LLM(embedder, **SMALL) as llm:
        with pytest.raises(RequestError, match=r"texts\.1 is too long: expected at most 1023 tokens, found 3001"):
            llm.embed(["a", long])
        cut = [*ids_of("b" * 1022)]
        assert np.array_equal(llm.embed(long, truncate=True), llm.embed([cut]))
    with LLM(judge, **SMALL) as llm:
        with pytest.raises(RequestError, match=r"text_2\.0 is too long"):
            llm.score("q", long)
        assert 0 < llm.score("q", long, truncate=True)[0] < 1


def test_what_cannot_be_is_refused(embedder: str, tmp_path: Path) -> None:
    with LLM(embedder, **SMALL) as llm:
        for dimensions in (0, 49):
            with pytest.raises(RequestError, match=f"dimensions must be from 1 to 48.*found {dimensions}"):
                llm.embed("a", dimensions)
        with pytest.raises(RequestError, match="text_1 must be one text, or 3 as text_2; found 2"):
            llm.score(["a", "b"], ["c", "d", "e"])
        with pytest.raises(RequestError, match="must not be empty"):
            llm.score("a", [])
    dense = str(write_embedder(tmp_path / "dense", LAST, ("Dense",)))
    with LLM(dense, **SMALL) as llm, pytest.raises(RequestError, match=r"makes no embeddings here: .*'Dense'"):
        llm.embed("a")


def test_a_folder_without_a_head_is_served(tmp_path: Path) -> None:
    """Larger embedding models are not tied, and come without an lm head and without `model.` in names."""
    from safetensors.torch import load_file, save_file

    folder = write_embedder(tmp_path / "model", LAST)
    with LLM(str(folder), **SMALL) as llm:
        expected = llm.embed(TEXTS)
    weights = {name.removeprefix("model."): value for name, value in load_file(folder / "model.safetensors").items()}
    save_file({name: v for name, v in weights.items() if name != "lm_head.weight"}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with LLM(str(folder), **SMALL) as llm:
        assert np.array_equal(llm.embed(TEXTS), expected)
        with pytest.raises(RequestError, match="writes no text: it makes vectors of texts"):
            llm.generate("a")


def test_a_model_that_was_saved_without_its_head(embedder: str, judge: str, tmp_path: Path) -> None:
    """As sentence-transformers saves them, and as `AutoModel` does, which does not say that it makes vectors."""
    for folder, named in ((embedder, True), (judge, False)):
        with LLM(folder, **SMALL) as llm:
            expected = llm.embed(TEXTS)
        saved = tmp_path / str(named)
        shutil.copytree(folder, saved)
        Qwen3Model.from_pretrained(folder, dtype=torch.float32).save_pretrained(saved)
        config = json.loads((saved / "config.json").read_text())
        assert config["architectures"] == ["Qwen3Model"]
        (saved / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
        with LLM(str(saved), **SMALL) as llm:
            assert np.array_equal(llm.embed(TEXTS), expected)
            np.testing.assert_allclose(llm.score(TEXTS[0], TEXTS), expected @ expected[0], atol=1e-6)
            with pytest.raises(RequestError, match="writes no text"):
                llm.generate("a")


def test_vectors_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_embedder(tmp_path / "model", LAST)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][ids_of("z")[0]] = torch.nan
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with LLM(str(folder), **SMALL) as llm:
        plain = llm.embed("a")
        with pytest.raises(GenerationError, match="not finite"):
            llm.embed(["a", "z"])
        assert np.array_equal(llm.embed("a"), plain)


def test_files_of_gguf(embedder: str, judge: str, tmp_path: Path) -> None:
    """Those of an embedding model (3: the last token) and of a reranker (4)."""
    texts = TEXTS[:3]  # in the other one the file's tokenizer finds "no" within a word
    with LLM(embedder, **SMALL) as llm:
        vectors = llm.embed(texts)
    with LLM(str(write_embedder_gguf(tmp_path / "vectors.gguf", Path(embedder), 3)), **SMALL) as llm:
        np.testing.assert_allclose(llm.embed(texts), vectors, atol=1e-4)
        assert llm.score("a", "a") == [pytest.approx(1.0)]
    with LLM(judge, **SMALL) as llm:
        scores = llm.score("Why?", texts)
    with LLM(str(write_embedder_gguf(tmp_path / "judge.gguf", Path(judge), 4, adds_eos=False)), **SMALL) as llm:
        np.testing.assert_allclose(llm.score("Why?", texts), scores, atol=1e-4)
