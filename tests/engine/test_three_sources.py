"""Two heads and a lookup in one tree: the text is that without drafts, whoever proposes and whatever else happens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_rig import Cycle
from reference.block_heads import dflash2_head
from reference.draft_cases import load_head
from reference.exact_heads import disturbed, exact_eagle3
from toy_grammar import ToyGrammar

from draftwing import LLM
from draftwing.config.trees import LOOKUP_ALONE, MODEL_ALONE, PLAIN, TreeShape
from draftwing.config.trees import TREE as TREE_OPTIONS
from draftwing.errors import ConfigError
from draftwing.models.heads.loader import load_draft_head
from draftwing.models.loader import load_model
from draftwing.ops import make_ops
from draftwing.spec.build import make_model_drafter
from draftwing.spec.heads_drafter import HeadsDrafter
from draftwing.spec.lookup_drafter import SuffixDrafter
from draftwing.spec.pair_drafter import PairDrafter

pytestmark = pytest.mark.slow

TREE, BLOCK, COPIED = TreeShape(6, 3, 12), TreeShape(5, 3, 12), TreeShape(7, 3, 10)


class Case:
    """A target with an EAGLE-3 head, which is mostly right, and a DFlash2 head, which is not trained."""

    def __init__(self, folder: Path, harness: Any) -> None:
        exact = exact_eagle3()
        self.h, self.folder, self.head = harness, folder, exact.head
        self.path = disturbed(exact.target, 0.65).write(folder / "target")
        self.target = load_model(self.path, torch.float32, harness.device)
        self.block = dflash2_head(exact.target).write(folder / "block")
        self.prompts = harness.prompts_for(7, seed=3, longest=20)
        self.params = [harness.greedy(30) if i % 3 else harness.seeded(30, seed=i) for i in range(7)]
        self.expected = harness.plain_answers(self.target, self.prompts, self.params)

    def drafter(self, lookup: bool, block_first: bool = False, rows: int = 6) -> Any:
        ops = make_ops(torch.device(self.h.device))
        heads = [
            load_head(self.head, "EAGLE3", self.folder, self.target, device=self.h.device),
            load_draft_head(self.block, self.target, "DFLASH2", torch.float32, self.h.device),
        ]
        eagle, block = ((make_model_drafter(head, rows, 3, torch.float32, ops), own)
                        for head, own in zip(heads, (TREE, BLOCK), strict=True))  # fmt: skip
        both = HeadsDrafter(*block, *eagle) if block_first else HeadsDrafter(*eagle, *block)
        if not lookup:
            return both
        return PairDrafter(both, SuffixDrafter(rows, ops, COPIED, capacity=4096, secret=1), TREE, COPIED)

    def answer(self, drafter: Any, **kw: Any) -> Any:
        rig = self.h.Rig(self.target, shapes=(TREE,), drafter=drafter, rows=5, **kw)
        for _ in range(2):  # the lookup knows the answers the second time
            assert rig.answer(self.prompts, self.params).tokens == self.expected.tokens
        assert rig.accept_length > 1.5
        return rig


@pytest.fixture(scope="module")
def case(harness: Any, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("three"), harness)


class Turns(Cycle):
    """All three draft, then nobody, the lookup alone, the heads alone."""

    def __init__(self) -> None:
        alone = COPIED._replace(proposer=LOOKUP_ALONE), TREE._replace(proposer=MODEL_ALONE)
        super().__init__(TREE, PLAIN, *alone, TreeShape(7, 3, 14))


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("lag", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_no_token_is_changed(case: Case, lag: int, lookup: bool) -> None:
    rig = case.answer(case.drafter(lookup), lag=lag)
    assert rig.stats.moved, "no later child was accepted"


def test_with_turns_chunks_preemption_and_prefix_hits(case: Case) -> None:
    rig = case.answer(case.drafter(True), policy=Turns(), slots=150, chunk=5)
    assert rig.sched.retractions > 0


@pytest.mark.exhaustive
def test_the_block_first_and_from_graphs(case: Case) -> None:
    case.answer(case.drafter(True, block_first=True), lag=1, graph_size=6, ahead=16)


def test_grammars_and_penalties(case: Case) -> None:
    def submit(rig: Any) -> Any:
        for i, (prompt, param) in enumerate(zip(case.prompts, case.params, strict=True)):
            grammar = ToyGrammar(i, case.h.VOCAB) if i % 3 == 0 else None
            if i % 3 == 1:
                param = param.replace(frequency_penalty=0.6, repetition_penalty=1.2)
            rig.submit(str(i), prompt, param, grammar=grammar)
        return rig.run().tokens

    expected = submit(case.h.Rig(case.target, rows=1, radix=False))
    rig = case.h.Rig(case.target, shapes=(TREE,), drafter=case.drafter(True), rows=5)
    assert submit(rig) == expected and rig.accept_length > 1.3


SHAPE = {"speculative_num_steps": 4, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 12}
ASKED = ["What is the capital of France?", "Repeat this exactly: a, b, c, d, e, f, g, a, b, c, d, e, f, g."]


@pytest.mark.exhaustive  # as those of a tiny model; and tests/models/heads/test_bundled.py
@pytest.mark.parametrize(
    "algorithm", ["EAGLE3+NEXTN+SUFFIX", pytest.param("NEXTN+EAGLE", marks=pytest.mark.exhaustive)]
)
def test_heads_that_come_with_the_default_model(algorithm: str, smollm2_path: Path) -> None:
    """All that small steps do is recorded, too."""

    def answers(**options: Any) -> list[list[int]]:
        with LLM("smollm2", device="cpu", max_total_tokens=2048, sampling_defaults="openai", **options) as llm:
            params = [
                {"temperature": 0, "max_new_tokens": 24},
                {"temperature": 0.7, "sampling_seed": 1, "max_tokens": 24},
            ]
            found = llm.chat([[{"role": "user", "content": text}] for text in ASKED], params)
            if llm.engine.options.drafts:
                stages = llm.engine.parts.executor.graphs
                assert not stages.refused and stages.replays > 5  # type: ignore[attr-defined]
            return [one.token_ids for one in found]

    expected = answers(speculative_algorithm="none")
    assert answers(speculative_algorithm=algorithm, speculative_fixed_shape=True, **SHAPE) == expected


@pytest.mark.further(algorithm=["EAGLE3+SUFFIX", "EAGLE3+NGRAM"])
@pytest.mark.parametrize("algorithm", ["EAGLE3+SUFFIX", "EAGLE3+NGRAM", "EAGLE3+NEXTN+SUFFIX"])
def test_a_fixed_tree_is_as_deep_as_the_lookups(algorithm: str, smollm2_path: Path) -> None:
    """Whatever the head's is: a text that repeats itself is copied further than the head drafts."""
    tree = dict(zip(TREE_OPTIONS, (2, 1, 3), strict=True)) | {"speculative_fixed_shape": True}
    with LLM("smollm2", device="cpu", max_total_tokens=1024, speculative_algorithm=algorithm, **tree) as llm:
        (said,) = llm.generate(["Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, " * 6], {
            "temperature": 0, "dry_multiplier": 0, "max_new_tokens": 40, "ignore_eos": True,
        })  # fmt: skip
    accepted = [drafts for drafts, steps in enumerate(said.meta_info["spec_correct_drafts_histogram"]) if steps]
    assert max(accepted) > 8


def test_heads_in_folders(case: Case, tmp_path: Path) -> None:
    """By options, each with a folder; without the second one it is asked for."""
    from tiny_checkpoint import write_tokenizer

    write_tokenizer(case.path)
    head = case.head.write(tmp_path / "head")
    made: Callable[..., LLM] = lambda **more: LLM(  # noqa: E731
        str(case.path), device="cpu", dtype="float32", max_total_tokens=1024, num_threads=1, **more
    )
    params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    with made(speculative_algorithm="none") as llm:
        expected = [one.token_ids for one in llm.generate(case.prompts, params)]
    options = {"speculative_algorithm": "EAGLE3+DFLASH2+SUFFIX", "speculative_draft_model_path": str(head)}
    with made(**options, speculative_second_draft_model_path=str(case.block)) as llm:
        assert [one.token_ids for one in llm.generate(case.prompts, params)] == expected
    with pytest.raises(ConfigError, match="needs speculative_second_draft_model_path, the folder of the DFLASH2 head"):
        made(**options)
