"""The default model with its weights in blocks, as a CPU runs it: drafts of its head change no token, whatever else
happens. (`test_exact.py` has tiny models in blocks, and all that can happen.)"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.hf_configs import GPT_OSS_20B, QWEN3_30B

from draftwing import LLM, SamplingParams
from draftwing.engine.graphs import RecordedStages
from draftwing.models.heads.config import BlockConfig
from draftwing.ops import make_ops
from draftwing.ops.cpu.extension import usable_sets
from draftwing.train.checkpoint import save_head
from draftwing.train.heads import load_target_ends, new_block_head

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not make_ops(torch.device("cpu")).block_kinds, reason="needs GEMMs of weights in blocks"),
]

FURTHER = pytest.mark.exhaustive
FIXED = {"speculative_fixed_shape": True}
CHAIN = {"speculative_num_steps": 4, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 5, **FIXED}
TREE = {"speculative_num_steps": 4, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16, **FIXED}
PROBE = Path(__file__).with_name("text_probe.py")
ASKED = [
    "What is the capital of France?", "Tell me a very short story about a fox and a crow.",
    'Repeat this JSON exactly:\n{"a": [1, 2, 3], "b": {"c": "d"}}', "Why is the sky blue?", "Count to twenty.",
]  # fmt: skip
CONVERSATIONS = [[{"role": "user", "content": text}] for text in ASKED]
TOKENS = 20  # of each answer
PARAMS = [
    SamplingParams(temperature=0.0, max_new_tokens=TOKENS) if i % 2 else
    SamplingParams(temperature=0.7, top_p=0.9, sampling_seed=i, max_new_tokens=TOKENS)
    for i in range(len(ASKED))
]  # fmt: skip


def answers(llm: LLM, together: bool = True) -> list[list[int]]:
    if together:
        return [answer.token_ids for answer in llm.chat(CONVERSATIONS, PARAMS)]
    return [llm.chat(one, params)[0].token_ids for one, params in zip(CONVERSATIONS, PARAMS, strict=True)]


def engine(**options: Any) -> LLM:
    sizes = {"max_total_tokens": 4096, "max_running_requests": 6}
    return LLM("smollm2", device="cpu", sampling_defaults="openai", **{**sizes, **options})


@pytest.fixture(scope="module")
def expected(smollm2_path: Path) -> Iterator[list[list[int]]]:
    """One request at a time, without drafts."""
    with engine(speculative_algorithm="none") as llm:
        yield answers(llm, together=False)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="default", marks=FURTHER),  # tests/models/heads/test_bundled.py has it with a fixed tree
        pytest.param(CHAIN, id="chain", marks=FURTHER),
        pytest.param(TREE, id="tree", marks=FURTHER),
        pytest.param({"chunked_prefill_size": 7}, id="chunks", marks=FURTHER),
        pytest.param(
            {"max_total_tokens": 230, "speculative_num_steps": 2, "speculative_eagle_topk": 2, **FIXED},
            id="preemption",
            marks=FURTHER,
        ),
        pytest.param({"enable_overlap": True}, id="overlap", marks=FURTHER),
        pytest.param({"num_threads": 1}, id="one thread", marks=FURTHER),
        pytest.param({"enable_mixed_chunk": True, "max_running_requests": 3}, id="mixed", marks=FURTHER),
    ],
)
def test_drafts_change_no_token(expected: list[list[int]], options: dict[str, Any]) -> None:
    with engine(**options) as llm:
        assert answers(llm) == expected
        assert answers(llm) == expected, "from the cache of prefixes"


@pytest.mark.exhaustive  # test_graphs_cpu.py replays their steps
@pytest.mark.parametrize(
    ("algorithm", "markov", "topk"),
    [
        ("DSPARK", "vanilla", 2),
        ("DSPARK", "gated", 2),
        ("DSPARK", "rnn", 2),
        ("DFLASH", "domino", 2),
        ("DFLASH", "", 1),
    ],
)
def test_heads_that_draft_blocks(
    expected: list[list[int]], smollm2_path: Path, tmp_path: Path, algorithm: str, markov: Any, topk: int
) -> None:
    """Untrained ones: no token changes, and all that their steps do are calls of the kernels, which are replayed."""
    spark = algorithm == "DSPARK"
    sure: Any = "markov" * spark
    windows, causal = ((32, 0), (True, False)) if markov == "rnn" else ((), ())
    memory = 64 * (markov == "domino")
    block = BlockConfig(
        (2, 15, 28), 5, 49151, spark, windows, causal, 0, markov, 64 * bool(markov), sure, memory=memory
    )
    target = load_target_ends(smollm2_path, torch.float32, "cpu")
    head = save_head(new_block_head(target, block, torch.arange(0, 49152, 8) if spark else None, 2), tmp_path / "head")
    tree = {"speculative_num_steps": 3, "speculative_eagle_topk": topk, "speculative_num_draft_tokens": 4}
    options = {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(head), **tree}
    with engine(speculative_fixed_shape=True, **options) as llm:
        assert answers(llm, together=False) == expected
        stages = llm.engine.parts.executor.graphs
        assert isinstance(stages, RecordedStages) and not stages.refused and stages.replays > 50


SMALL = {"vocab_size": 49152, "hidden_size": 96, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
MIXTURES = {
    "qwen3": QWEN3_30B | SMALL | {"num_hidden_layers": 2, "num_experts": 24, "moe_intermediate_size": 64},
    "gpt-oss": GPT_OSS_20B | SMALL | {
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "intermediate_size": 64,
        "num_local_experts": 12, "sliding_window": 16,
    },
}  # fmt: skip


@pytest.mark.further(family="qwen3")
@pytest.mark.parametrize("family", MIXTURES)
def test_steps_of_mixtures_are_replayed(smollm2_path: Path, tmp_path: Path, family: str) -> None:
    """With experts in blocks all that they do are calls of the kernels, too, routes included; in MXFP4 where they are
    stored so. Drafts change no token."""
    (tmp_path / "config.json").write_text(json.dumps(MIXTURES[family] | {"eos_token_id": 2}))
    options = {"load_format": "dummy", "tokenizer_path": str(smollm2_path), "context_length": 512, "device": "cpu"}
    params, found = [one.model_copy(update={"ignore_eos": True}) for one in PARAMS], []
    for drafts in ({"speculative_algorithm": "none"}, {"speculative_algorithm": "NGRAM", **CHAIN}):
        with LLM(str(tmp_path), quantization="q8_0", max_total_tokens=4096, **options, **drafts) as llm:
            first = [one.token_ids for one in llm.chat(CONVERSATIONS, params)]
            asked = zip([2 * tokens for tokens in first], params, strict=True)
            found.append([first, [llm.generate([tokens], one)[0].token_ids for tokens, one in asked]])
            stages = llm.engine.parts.executor.graphs
            assert isinstance(stages, RecordedStages) and not stages.refused and stages.replays > 20
            stored = llm.engine.parts.executor.model.weight_bytes()
            assert ("MXFP4" in stored) == (family == "gpt-oss")
    assert found[0] == found[1]


@pytest.mark.exhaustive
def test_the_types_of_blocks_have_their_own_text(expected: list[list[int]]) -> None:
    """So that the test above is one of blocks."""
    with engine(speculative_algorithm="none", quantization="none") as llm:
        assert answers(llm) != expected


@pytest.mark.exhaustive  # tests/ops/cpu/test_extension.py has their bits
def test_all_instruction_sets_write_the_same_text(smollm2_path: Path) -> None:
    """A process for each: the set is chosen when the extension is loaded."""
    texts = {}
    for isa in usable_sets():
        environ = {**os.environ, "DRAFTWING_CPU_ISA": isa.name}
        out = subprocess.run([sys.executable, PROBE, "12"], env=environ, capture_output=True, text=True)
        assert out.returncode == 0, f"{isa.name}: {out.stderr}"
        texts[isa.name] = json.loads(out.stdout)
    assert texts["plain"]["greedy, no drafts"] != texts["plain"]["seeded, no drafts"]
    for name, found in texts.items():
        for case, tokens in found.items():
            how = case.partition(",")[0]
            assert tokens == texts["plain"][f"{how}, no drafts"], f"{name}: {case}"
