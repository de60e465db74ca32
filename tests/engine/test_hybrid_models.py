"""The text of models with recurrent layers is the same with drafts as without: trees of their own prediction layer, of
lookups and of both."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import moe_models
import pytest
import torch
from hybrid_gguf import write
from hybrid_models import LAYERS, layer_weights, reference, saved, with_layer
from reference.block_heads import dflash_head
from reference.checkpoints import Checkpoint, eagle3_head
from reference.learnable import ENGINE
from tiny_checkpoint import VOCAB, write_tokenizer

from draftwing import LLM, SamplingParams
from draftwing.config.trees import PLAIN
from draftwing.engine.graphs import RecordedStages
from draftwing.engine.startup.warm_up import try_prompts

pytestmark = pytest.mark.slow

TOKENS = 24


def texts(
    folder: Path, algorithm: str | None, dtype: str, lengths: Sequence[int] = (5, 40, 130, 7), **more: Any
) -> list[list[int]]:
    """Of prompts shorter and longer than a chunk, greedy and seeded."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 256, (count,), generator=generator).tolist() for count in lengths]
    params = [
        SamplingParams(temperature=0.0 if i % 2 else 0.8, sampling_seed=i, max_new_tokens=TOKENS, ignore_eos=True)
        for i in range(len(prompts))
    ]
    options = {**ENGINE, "dtype": dtype, "chunked_prefill_size": 64, **more}
    with LLM(str(folder), **options, speculative_algorithm=algorithm) as llm:
        return [done.token_ids for done in llm.generate(prompts, params)]


def written(folder: Path, kind: str, **changes: Any) -> tuple[Path, list[str]]:
    """A checkpoint with its prediction layer, if the kind has one, and what can draft for it. changes: of its sizes."""
    theirs = reference(kind, vocab_size=VOCAB, max_position_embeddings=512, **changes)
    predicts = kind.startswith(("qwen3", "qwen4", "nemotron-h-"))
    if kind.startswith("ling3"):
        moe_models.with_layer(folder, theirs, moe_models.published(theirs, moe_models.predicting(theirs)))
        write_tokenizer(folder)
        return folder, ["NEXTN"]
    if predicts:
        with_layer(folder, theirs, layer_weights(theirs))
    else:
        saved(folder, theirs)
    write_tokenizer(folder)
    return folder, ["NGRAM", *(("NEXTN", "NEXTN+SUFFIX") if predicts else ())]


@cache
def plain(folder: Path, dtype: str, **more: Any) -> list[list[int]]:
    """The texts without drafts, made once."""
    return texts(folder, "none", dtype, **more)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[str]]]:
    """`written`, once of each kind."""
    return cache(lambda kind: written(tmp_path_factory.mktemp("hybrid") / kind, kind))


Made = Callable[[str], tuple[Path, list[str]]]


@pytest.mark.further(kind=["qwen3.5-even", "qwen3.5-moe", "qwen3-next", "falcon-h1"])
@pytest.mark.further(kind=["qwen3.5", "lfm2", "nemotron-h-moe"], dtype="bfloat16")
@pytest.mark.further(
    kind=["granite4", "falcon-h1", "kimi-linear", "qwen4", "ling3", "lfm3", "jamba", "minimax"], dtype="float32"
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "kind",
    [
        "qwen3.5",
        "qwen3.5-even",
        "qwen3.5-moe",
        "qwen3-next",
        "qwen4",
        "lfm2",
        "granite4",
        "nemotron-h-moe",
        "falcon-h1",
        "kimi-linear",
        "ling3",
        "lfm3",
        "jamba",
        "minimax",
    ],
)
def test_drafts_change_no_token(made: Made, kind: str, dtype: str) -> None:
    folder, drafters = made(kind)
    expected = plain(folder, dtype)
    assert all(len(set(ids)) > 8 for ids in expected)
    for algorithm in drafters:
        assert texts(folder, algorithm, dtype) == expected, algorithm


EVEN: dict[str, dict[str, int]] = {  # sizes of whole blocks
    "granite4": {"shared_intermediate_size": 96, "intermediate_size": 64},
    "nemotron-h-moe": {"moe_shared_expert_intermediate_size": 64},
    "nemotron-h-latent": {"moe_shared_expert_intermediate_size": 64, "moe_latent_size": 64},
    "ling3": {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "moe_intermediate_size": 64},
}


@pytest.mark.further(kind=["qwen3.5", "lfm2", "granite4", "nemotron-h-moe", "kimi-linear"])
@pytest.mark.parametrize(
    "kind",
    [
        "qwen3.5", "lfm2", "granite4", "nemotron-h-moe", "nemotron-h-latent", "falcon-h1", "kimi-linear", "ling3",
        "lfm3", "minimax",
    ],
)  # fmt: skip
def test_steps_of_weights_in_blocks_are_recorded(tmp_path: Path, kind: str) -> None:
    folder, drafters = written(tmp_path, kind, **EVEN.get(kind, {}))
    with LLM(str(folder), **ENGINE, speculative_algorithm=drafters[:2][-1], quantization="q8_0") as llm:
        stages = llm.engine.parts.executor.graphs
        if not isinstance(stages, RecordedStages):
            pytest.skip("nothing is recorded here")
        llm.generate([[5, 6, 7, 8, 9, 5, 6, 7]], SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True))
        assert stages.replays > 5 and not stages.refused


CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}


@pytest.mark.further(kind=["qwen3.5-moe", "qwen3-next", "lfm2", "granite4"], algorithm="EAGLE3")
@pytest.mark.further(kind=["qwen3.5-moe", "qwen3-next"], algorithm="DFLASH")
@pytest.mark.further(shape=CHAIN, algorithm="EAGLE3")
@pytest.mark.further(shape=CHAIN, kind=["lfm2", "granite4", "qwen4"])
@pytest.mark.further(shape=TREE, kind="qwen3.5", algorithm="DFLASH")
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("algorithm", ["EAGLE3", "DFLASH"])
@pytest.mark.parametrize("kind", ["qwen3.5", "qwen3.5-moe", "qwen3-next", "qwen4", "lfm2", "granite4"])
def test_published_heads_draft_for_it(
    made: Made, tmp_path: Path, kind: str, algorithm: str, shape: dict[str, int]
) -> None:
    """Heads have dense layers with keys and values, and read the outputs of layers of either kind."""
    folder, _ = made(kind)
    sizes = {"hidden_size": 64, "vocab_size": VOCAB, "head_dim": 16, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    target = Checkpoint({}, {"hidden_size": 64, "vocab_size": VOCAB, "num_hidden_layers": LAYERS})
    if algorithm == "EAGLE3":
        head = eagle3_head(target, rows=None, **heads, **sizes, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    else:
        head = dflash_head(target, **heads, **sizes)
    own = {"speculative_draft_model_path": str(head.write(tmp_path / "head")), "speculative_fixed_shape": True}
    assert texts(folder, algorithm, "float32", **own, **shape) == plain(folder, "float32")


@pytest.mark.exhaustive  # tests/engine/test_exact_states.py and tests/parallel have the parts of it
@pytest.mark.further(kind=["qwen3.5-moe", "qwen3-next", "qwen4", "lfm2", "nemotron-h-moe", "kimi-linear", "ling3"])
@pytest.mark.parametrize(
    "kind",
    ["qwen3.5", "qwen3.5-moe", "qwen3-next", "qwen4", "lfm2", "nemotron-h-moe", "kimi-linear", "ling3", "minimax"],
)
def test_two_ranks(made: Made, kind: str) -> None:
    folder, drafters = made(kind)
    own = {"tp_size": 2, "max_running_requests": 3, "speculative_fixed_shape": True}
    assert texts(folder, drafters[-1], "float32", **own, **TREE) == plain(folder, "float32")


SPREAD: dict[str, dict[str, int]] = {  # over four ranks; others have two key heads
    "granite4": {}, "nemotron-h-moe": {}, "falcon-h1": {}, "lfm2": {}, "lfm3": {}, "jamba": {},
    "qwen3-next": {"linear_num_key_heads": 6, "linear_num_value_heads": 12},
    "kimi-linear": {"linear_num_heads": 6, "num_attention_heads": 6, "num_key_value_heads": 6},
}  # fmt: skip


@pytest.mark.exhaustive  # tests/parallel/test_shares.py has their logits
@pytest.mark.parametrize("kind", SPREAD)
def test_four_ranks(tmp_path: Path, kind: str) -> None:
    """With a group of heads, or an expert, on some of them."""
    folder, drafters = written(tmp_path, kind, **SPREAD[kind])
    own: dict[str, Any] = {"tp_size": 4, "max_running_requests": 3, "speculative_fixed_shape": True}
    own["enable_expert_parallel"] = kind in ("granite4", "nemotron-h-moe")
    assert texts(folder, drafters[-1], "float32", **own, **TREE) == plain(folder, "float32")


@pytest.mark.parametrize("kind", ["qwen3.5", "qwen4", "minimax"])
def test_what_is_cached_is_what_steps_would_make(made: Made, kind: str) -> None:
    """The same prompts again and again, then conversations that go on, in a pool that is too small for two of them; one
    writes JSON. Rows of the prediction layer are cached, too."""
    folder, drafters = made(kind)
    generator = torch.Generator().manual_seed(1)
    system = torch.randint(0, 256, (90,), generator=generator).tolist()
    prompts = [[*system, *torch.randint(0, 256, (count,), generator=generator).tolist()] for count in (3, 70, 20)]
    asked = ({}, {"temperature": 0.8, "sampling_seed": 1}, {"regex": r'(\{"a": [0-9]{1,3}\}\n)+'})
    params: list[dict[str, Any]] = [{"temperature": 0.0, "max_new_tokens": 24, **one} for one in asked]
    options = {**ENGINE, "max_total_tokens": 320, "max_running_requests": 2, "chunked_prefill_size": 64}
    options |= {"dtype": "auto", "kv_cache_dtype": "float32"}

    def answers(algorithm: str, **more: Any) -> list[Any]:
        with LLM(str(folder), **options, **more, speculative_algorithm=algorithm) as llm:
            found = [answer for _ in range(2) for answer in llm.generate(prompts, params)]
            more_turns = [prompt + answer.token_ids + [5, 6] for prompt, answer in zip(prompts, found, strict=False)]
            found += llm.generate(more_turns, params)
            assert algorithm != "none" or llm.engine.stats()["retractions"] > 0
            return found

    expected = answers("none", disable_radix_cache=True)
    assert expected[2].text.startswith('{"a": ') and not any(answer.meta_info["cached_tokens"] for answer in expected)
    found = answers(drafters[-1], speculative_fixed_shape=True)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert sum(answer.meta_info["cached_tokens"] >= 64 for answer in found) > 4, "many begin with what was cached"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "kind",
    [
        "qwen3.5",
        "qwen3.5-even",
        "qwen3.5-moe",
        "qwen3-next",
        "qwen4",
        "lfm2",
        "granite4",
        "nemotron-h-moe",
        "nemotron-h-latent",
        "falcon-h1-behind",
        "kimi-linear",
        "ling3",
        "lfm3",
        "minimax",
    ],
)
def test_on_a_gpu(tmp_path: Path, kind: str) -> None:
    """In float32 the text is a CPU's; in the deterministic mode drafts change nothing."""
    ffn = {"intermediate_size": 192}  # exact kernels take multiples of 64
    if kind == "granite4":
        ffn |= {"shared_intermediate_size": 128}
    if kind.startswith("nemotron"):
        ffn |= {"moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 128}
    if kind == "nemotron-h-latent":
        ffn |= {"moe_latent_size": 64}
    if kind in ("qwen3.5-moe", "qwen3-next", "qwen4"):
        ffn |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    folder, drafters = written(tmp_path, kind, **ffn | ({"block_multiple_of": 64} if kind == "lfm2" else {}))
    assert texts(folder, "none", "float32", device="cuda") == texts(folder, "none", "float32")
    exact = {"device": "cuda", "enable_deterministic_inference": True}
    expected = texts(folder, "none", "bfloat16", **exact)
    for algorithm in drafters:
        assert texts(folder, algorithm, "bfloat16", **exact) == expected, algorithm


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["qwen3.5", "lfm2"])
def test_prompts_from_graphs_on_a_gpu(tmp_path: Path, kind: str) -> None:
    """And beside rows that decode, launched until there are graphs of them, and twice, the second time from what is
    cached: the text is that of steps and prompts that take turns and are launched."""
    own = {"block_multiple_of": 64} if kind == "lfm2" else {}
    folder, drafters = written(tmp_path, kind, intermediate_size=192, **own)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 256, (20 + 17 * i % 290,), generator=generator).tolist() for i in range(32)]
    params = [
        SamplingParams(
            temperature=0.0 if i % 2 else 0.8, sampling_seed=i, max_new_tokens=10 + i % 5 * 9, ignore_eos=True
        )
        for i in range(len(prompts))
    ]
    options = {**ENGINE, "dtype": "bfloat16", "device": "cuda", "enable_deterministic_inference": True}
    options |= {"max_running_requests": 8, "max_total_tokens": 8192, "chunked_prefill_size": 512}

    def answers(algorithm: str, mixes: bool, **more: Any) -> list[list[int]]:
        with LLM(str(folder), **options, speculative_algorithm=algorithm, **more) as llm:
            found = [done.token_ids for _ in range(2) for done in llm.generate(prompts, params)]
            prefills = llm.engine.parts.executor.prefills
            assert (prefills.replays == 0) == ("disable_cuda_graph" in more)
            # A policy may have none of the steps that were captured.
            assert algorithm != "none" or (prefills.mixed_replays > 0) == mixes
            return found

    expected = answers("none", False, disable_cuda_graph=True, disable_mixed_chunk=True)
    assert expected[: len(prompts)] == expected[len(prompts) :]
    assert answers("none", False, disable_mixed_chunk=True) == expected
    for algorithm in ("none", *drafters[:2]):
        assert answers(algorithm, True) == expected, algorithm


def test_a_prediction_layer_in_a_file_of_its_own(made: Made, tmp_path: Path) -> None:
    theirs = reference("qwen3.5", vocab_size=VOCAB, max_position_embeddings=512)
    folder = saved(tmp_path / "model", theirs)
    write_tokenizer(folder)
    state = {**theirs.state_dict(), **layer_weights(theirs)}
    file = write(tmp_path / "mtp-model.gguf", theirs.config, state, only_mtp=True)
    found = texts(folder, "NEXTN", "float32", speculative_draft_model_path=str(file))
    assert found == plain(made("qwen3.5")[0], "float32")


def test_what_nobody_s_rows_left_does_not_fail_the_first_prompts(made: Made) -> None:
    with LLM(str(made("qwen3.5")[0]), **ENGINE, speculative_algorithm="none") as llm:
        executor = llm.engine.parts.executor
        for layer in executor.table.states.layers.values():
            layer.state[-1].fill_(math.nan)
            layer.conv[-1].fill_(math.nan)
        try_prompts(executor, (PLAIN,))


def test_no_more_requests_run_than_have_states(made: Made) -> None:
    """And the engine says so; the others wait."""
    options = {**ENGINE, "state_memory_fraction": 0.15, "speculative_algorithm": "NGRAM"}
    with LLM(str(made("qwen3.5")[0]), **options) as llm:
        slots, rows = llm.engine.stats()["state_slots"], llm.engine.info.options.max_running_requests
        assert 1 < rows == slots // 2 < ENGINE["max_running_requests"]
        done = llm.generate([[i] * 9 for i in range(3 * rows)], {"temperature": 0, "max_new_tokens": 4})
    assert all(answer.meta_info["finish_reason"]["type"] == "length" for answer in done)


def test_a_prediction_layer_drafts_by_itself(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = made("qwen3.5")
    with caplog.at_level(logging.INFO, "draftwing"):
        found = texts(folder, None, "float32", log_level="info")
    assert "NEXTN (prediction layers of the checkpoint)" in caplog.text and found == plain(folder, "float32")


def test_of_a_large_vocabulary_a_cpu_drafts_the_first_tokens(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwing.engine.startup.models.LARGE", VOCAB - 1)
    monkeypatch.setattr("draftwing.engine.startup.models.FIRST", 100)
    for given, rows in (({}, 102), ({"speculative_token_map": "all"}, VOCAB), ({"speculative_token_map": "50"}, 52)):
        with LLM(str(made("qwen3.5")[0]), **ENGINE, **given) as llm:
            drafter = llm.engine.parts.executor.drafter
            assert drafter.head.vocab == rows, "with <eos> and <pad>"


@pytest.mark.parametrize("kind", ["qwen3.5", "lfm2"])
def test_prompts_beside_rows_that_decode(made: Made, kind: str) -> None:
    folder, drafters = made(kind)
    found = texts(folder, drafters[-1], "float32", enable_mixed_chunk=True, max_running_requests=2)
    assert found == plain(folder, "float32")
