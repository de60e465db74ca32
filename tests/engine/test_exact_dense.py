"""Text is the same with drafts as without, of families whose arithmetic no other has: over trees and chains, chunks,
cached prefixes and preemption."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_rig import RANKS
from exactness import OWN_CUDA, Exactness, case_of
from models.test_decoder import FAMILIES, SIZES, architecture, random_reference
from published import published
from tiny_checkpoint import VOCAB, write_tokenizer

from draftwing import LLM
from draftwing.engine.graphs import RecordedStages
from draftwing.models.config import from_hf

# Of each family what another harness would show as well is left out.
PLACES: dict[str, tuple[Any, ...]] = {
    "granite": ("cpu", "blocks", RANKS), "olmo3": ("cpu", RANKS), "exaone4": ("cpu",), "smollm3": ("blocks",),
    "phi3": ("blocks",), "phi3-longrope": (RANKS,), "glm4": ("cpu", RANKS), "ministral3": ("cpu", "blocks"),
    "gemma2": ("cpu", "blocks", RANKS), "cohere2": ("cpu", "blocks", RANKS),
    "granite-moe": ("cpu",), "ling2": ("cpu",),
    "stablelm-parallel": ("cpu",), "starcoder2": ("cpu",), "phi": ("cpu", "blocks", RANKS),
    "neox": ("cpu", "blocks", RANKS), "nemotron": ("blocks",),
    "minicpm3": ("cpu", "blocks", RANKS),
    "afmoe": ("cpu", "blocks", RANKS),
    "laguna": ("cpu", "blocks", RANKS),
    "cohere2-moe": ("cpu", "blocks", RANKS), "olmo": ("cpu", "blocks"), "nanochat": ("cpu", "blocks", RANKS),
    "falcon-grouped": ("cpu", "blocks", RANKS), "gpt2": ("cpu", "blocks", RANKS), "falcon": ("cpu",),
    "gpt-bigcode": ("cpu", "blocks", RANKS),
    "mimo-v2": ("cpu", "blocks", RANKS),
    "step3": ("cpu", "blocks", RANKS),
    "DeciLM": ("cpu", "blocks"), "Gemma3n": ("cpu", "blocks"), "phimoe": ("cpu", "blocks", RANKS),
    "hunyuan": ("cpu", "blocks", RANKS), "apertus": ("cpu", "blocks", RANKS), "arcee": ("cpu", "blocks"),
    "llama4": ("cpu", "blocks", RANKS), "llama4-plain": ("cpu",),
}  # fmt: skip
# Which the tests of whole decoders have not.
OF_PUBLISHED = {"DeciLM": "llama-3.3-nemotron-super-49b", "Gemma3n": "gemma-3n-e2b-it"}
WHOLE = {"granite", "minicpm3", "llama4"}  # of the others all places but the first are exhaustive


def pairs() -> Iterator[Any]:
    for family, places in PLACES.items():
        for at, place in enumerate((*places, OWN_CUDA)):
            values, marks = getattr(place, "values", (place,)), getattr(place, "marks", ())
            more = (pytest.mark.exhaustive,) if at and family not in WHOLE else ()
            yield pytest.param(*values, family, marks=(*marks, *more))


# Else logits are nearly equal: of heads the rig makes larger ones, but not of one that is the embedding.
MORE: dict[str, dict[str, Any]] = {
    "minicpm3": {"dim_model_base": 256},
    "stablelm-parallel": {"tie_word_embeddings": False},
    "starcoder2": {"tie_word_embeddings": False, "use_bias": False},
    "neox": {"attention_bias": False},
    "granite": {"logits_scaling": 0.5},
    "falcon-grouped": {"tie_word_embeddings": False, "bias": False},
    "gpt2": {"tie_word_embeddings": False},
    "gpt-bigcode": {"tie_word_embeddings": False, "n_inner": 32},
    "falcon": {"tie_word_embeddings": False},
    "mimo-v2": {"attention_bias": False},
    "apertus": {"attention_bias": False},
    "arcee": {"attention_bias": False, "mlp_bias": False},
    "smollm3": {"tie_word_embeddings": False},
    "cohere2-moe": {"tie_word_embeddings": False, "logit_scale": 2.0},
    "cohere2": {"tie_word_embeddings": False, "logit_scale": 2.0},
    "gemma2": {"tie_word_embeddings": False, "final_logit_softcapping": 30.0},
    "olmo": {"attention_bias": False},
    "nanochat": {"attention_bias": False, "final_logit_softcapping": 30.0},
    "Gemma3n": {"tie_word_embeddings": False, "vocab_size_per_layer_input": 40, "sliding_window": 6},
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def case(harness, family, one_thread):
    own = {"vocab_size": harness.VOCAB, "max_position_embeddings": harness.CONTEXT, **MORE.get(family, {})}
    if family in OF_PUBLISHED:
        found = published(OF_PUBLISHED[family])
        config = from_hf({**found.get("text_config", found), **own, "architectures": [f"{family}ForCausalLM"]})
    else:
        prefix, settings = FAMILIES[family]
        config = from_hf({**SIZES, **settings, **own, "architectures": [architecture(prefix)]})
    return case_of(harness, partial(harness.model_of, config))


@pytest.mark.parametrize(("harness", "family"), [*pairs()], indirect=True, scope="session")
class TestDense(Exactness):
    slots = 90


def test_the_pool_does_not_choose_the_factors_of_longrope(tmp_path: Path) -> None:
    """It has room for fewer tokens with drafts than without, here on both sides of the length that decides."""
    random_reference("phi3-longrope", vocab_size=VOCAB, max_position_embeddings=128).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    params, texts, contexts = {"max_new_tokens": 16, "ignore_eos": True, "temperature": 0}, [], []
    for algorithm in ("none", "NGRAM"):
        with LLM(str(tmp_path), dtype="float32", max_total_tokens=85, speculative_algorithm=algorithm) as llm:
            texts.append(llm.generate([[1, 2, 3, 1, 2, 3, 1, 2]], params)[0].token_ids)
            contexts.append(llm.engine.info.context_length)
    assert contexts[1] <= 64 < contexts[0] and texts[0] == texts[1]


@pytest.mark.further(
    family=["cohere2", "arcee", "phi", "neox", "ernie4.5-moe", "granite-moe", "ling2", "nanochat", "olmo-defaults"]
)
@pytest.mark.parametrize(
    "family",
    [
        "hunyuan",
        "gemma2",
        "cohere2",
        "apertus",
        "arcee",
        "phi",
        "neox",
        "falcon",
        "gpt2",
        "ernie4.5-moe",
        "granite-moe",
        "ling2",
        "laguna",
        "cohere2-moe",
        "nanochat",
        "olmo-defaults",
    ],
)
def test_steps_of_weights_in_blocks_are_recorded(tmp_path: Path, family: str) -> None:
    sizes = {"intermediate_size": 32 if family == "granite-moe" else 128}
    random_reference(family, vocab_size=VOCAB, max_position_embeddings=128, **sizes).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    options = {"dtype": "float32", "max_total_tokens": 400, "quantization": "q8_0", "speculative_algorithm": "NGRAM"}
    params = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 0}
    with LLM(str(tmp_path), **options) as llm:
        stages = llm.engine.parts.executor.graphs
        if not isinstance(stages, RecordedStages):
            pytest.skip("nothing is recorded here")
        llm.generate([[5, 6, 7, 8, 9, 5, 6, 7]], params)
        assert stages.replays > 5 and not stages.refused
