"""The heads that come with the package for the default model: complete, published in form, used by default, and worth
it. That they accept what their cards say takes minutes and is checked on demand: docs/train_a_draft.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwing import LLM
from draftwing.cli.card_check import read_report
from draftwing.config.drafters import DRAFTERS, find_drafter, shipped_head, token_map_in
from draftwing.config.trees import carried_shape, carried_window

MAX_FILE, MAX_ALL = 16_000_000, 45_000_000  # bytes
# Greedy tokens a step that (3, 1, 4) has to reach on the questions below: far from none, and no more than is sure.
MIN_ACCEPTED = {"EAGLE3": 1.5, "EAGLE": 1.4, "NEXTN": 1.4}
MT_BENCH = Path(__file__).parents[3] / "benchmarks/data/mt_bench.jsonl"
# On a GPU batches of other sizes round in other ways, unless they are asked not to.
ENGINE: dict[str, Any] = {
    "max_total_tokens": 4096, "max_running_requests": 8, "enable_deterministic_inference": torch.cuda.is_available(),
}  # fmt: skip

FOUND = {spec.name: head for spec in DRAFTERS if (head := shipped_head("smollm2", spec)) is not None}
SHIPPED = ("EAGLE3",)  # at least
every_head = pytest.mark.parametrize("algorithm", list(FOUND))


def test_the_default_is_there() -> None:
    assert set(SHIPPED) <= FOUND.keys(), "a head of this package is missing: was it installed without its data?"


def test_files_are_small_and_readable() -> None:
    files = [file for folder in FOUND.values() for file in folder.rglob("*") if file.is_file()]
    for file in files:
        assert file.stat().st_size <= MAX_FILE, f"{file} is too large for a repository"
        assert file.stat().st_mode & 0o444 == 0o444, f"{file} cannot be read by everybody"
        assert not file.name.endswith(".partial"), f"{file} was left by a run that was killed"
    assert sum(file.stat().st_size for file in files) <= MAX_ALL


@every_head
def test_the_config_is_as_published(algorithm: str) -> None:
    config = json.loads((FOUND[algorithm] / "config.json").read_text())
    sizes = {
        "model_type": "llama", "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "vocab_size": 49152, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "num_hidden_layers": 30 if algorithm == "NEXTN" else 1, "attention_bias": False, "rope_scaling": None,
    }  # fmt: skip
    assert sizes.items() <= config.items()
    if algorithm == "EAGLE3":
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert "cpu" in config["draftwing"]["shapes"], "the default has to be in the tree that was measured best"
    window = config["sliding_window"] if algorithm == "EAGLE3" else carried_window(FOUND[algorithm])
    assert window == 1024, "it knows no longer distances, and accepts up to a third less with them"
    carried_shape(FOUND[algorithm], "cpu")  # refuses what is malformed


def test_eagle_comes_with_its_token_map() -> None:
    head = shipped_head("smollm2", find_drafter("EAGLE"))
    if head is None:
        pytest.skip("there is no EAGLE head yet")
    assert token_map_in(head) is not None


@every_head
def test_the_card_says_all(algorithm: str) -> None:
    """What it is for, what was measured, on what it was trained and under which licences, how to make it again."""
    card = (FOUND[algorithm] / "README.md").read_text(encoding="utf-8")
    for title in ("# ", "## Acceptance", "## Data", "## Training"):
        assert re.search(f"^{title}", card, re.MULTILINE), f"no {title!r}"
    assert re.search(r"^\| mt[_-]?bench \| 0 \|( [1-9]\.\d\d \|)+$", card, re.MULTILINE | re.IGNORECASE)
    licences = card.partition("Sources and licences:")[2].partition("## ")[0]
    assert re.search(r"^- .*\b(Apache|MIT|CC|CDLA|ODC)", licences, re.MULTILINE) and "not stated" not in licences
    assert re.search(r"^Seed \d+", card, re.MULTILINE) and re.search(r"^draftwing train ", card, re.MULTILINE)
    report = read_report(FOUND[algorithm])
    assert report["algorithm"] == algorithm and "mt_bench" in report["prompts"]
    for record in report["records"]:
        assert f" {record['accept_length']:.2f} " in card, "card and report were written by different runs"


@pytest.fixture(scope="module")
def questions() -> list[list[dict[str, str]]]:
    lines = MT_BENCH.read_text(encoding="utf-8").splitlines()[::14][:3]
    return [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines]


PARAMS = {"temperature": 0, "max_new_tokens": 32}


@pytest.fixture(scope="module")
def expected(smollm2_path: Path, questions: list[list[dict[str, str]]]) -> Iterator[list[list[int]]]:
    """What the model answers alone."""
    with LLM("smollm2", **ENGINE, speculative_algorithm="none") as llm:
        yield [answer.token_ids for answer in llm.chat(questions, PARAMS)]


@pytest.mark.further(algorithm=["EAGLE", "NEXTN"])
@every_head
def test_nothing_is_changed_and_much_is_accepted(
    algorithm: str, questions: list[list[dict[str, str]]], expected: list[list[int]]
) -> None:
    """In the model's own dtype. EAGLE-3 is what runs if nothing is said."""
    chain = {
        "speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4,
        "speculative_fixed_shape": True,
    }  # fmt: skip
    asked = {} if algorithm == "EAGLE3" else {"speculative_algorithm": algorithm}
    with LLM(model="smollm2", **ENGINE, **chain, **asked) as llm:
        options = llm.engine.info.options
        assert (options.drafter, options.speculative_draft_model_path) == (algorithm, str(FOUND[algorithm]))
        answers = llm.chat(questions, PARAMS)
    assert [answer.token_ids for answer in answers] == expected
    correct, steps = (sum(a.meta_info[f"spec_{name}"] for a in answers) for name in ("num_correct_drafts", "verify_ct"))
    assert 1 + correct / steps > MIN_ACCEPTED[algorithm]
