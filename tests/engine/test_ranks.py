"""Whoever drafts, on two or four ranks: the texts of one rank without drafts, and the same results on all ranks.

(The suites of `test_exact.py` and `test_requests.py` run on two ranks, too, with drafters that need no model.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference.draft_cases import load_head
from reference.exact_heads import MAKERS, disturbed, exact_eagle3
from thread_ranks import shares_of
from toy_grammar import ToyGrammar

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.core import DraftDeferral
from draftwing.engine.executor import Executor
from draftwing.engine.startup.warm_up import try_prompts
from draftwing.models.heads import base
from draftwing.models.heads.base import DraftLM
from draftwing.models.heads.loader import load_draft_head, load_mtp_head
from draftwing.models.heads.swap import HeadSwap
from draftwing.models.loader import load_model
from draftwing.ops import make_ops
from draftwing.requests.request import LogprobParams
from draftwing.spec.build import make_model_drafter
from draftwing.spec.lookup_drafter import NGramDrafter
from draftwing.spec.model_drafter import ModelDrafter
from draftwing.spec.pair_drafter import PairDrafter

TREE, COPIED = TreeShape(4, 3, 12), TreeShape(7, 3, 10)
KINDS = ["EAGLE", "EAGLE3", "NEXTN", "NEXTN 3 layers", "DSPARK", "DFLASH", "DFLASH2", "STANDALONE", "EAGLE3+NGRAM"]
KINDS += [pytest.param(f"{kind} on 4", marks=pytest.mark.exhaustive) for kind in ("EAGLE3", "NEXTN", "DFLASH")]
CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("harness", ["ranks"], indirect=True, scope="session"),
    pytest.mark.further(case=["EAGLE", "EAGLE3", "NEXTN"]),  # as EAGLE3 of a pair, and as NEXTN of more layers
]


class Case:
    """A target's shares on two ranks, or four, and drafters for each of them."""

    def __init__(self, kind: str, folder: Path, harness: Any) -> None:
        kind, _, four = kind.partition(" on ")
        self.kind, self.h = kind.partition("+")[0], harness
        self.pair = "+" in kind
        make, scale = MAKERS.get(self.kind, (exact_eagle3, 0.65))
        exact = make()
        self.head, self.folder = exact.head, folder
        whole = load_model(disturbed(exact.target, scale).write(folder / "target"), torch.float32, CPU)
        self.target, *others = shares_of(whole, make_ops(CPU), int(four or 2))
        self.target.others, self.target.whole = others, (whole,)
        self.prompts = harness.prompts_for(5, seed=3)
        self.params = [harness.greedy(24) if i % 3 else harness.seeded(24, seed=i) for i in range(5)]
        self.expected = harness.plain_answers(self.target, self.prompts, self.params)

    def drafter(self, target: Any) -> Any:
        ops, rows = make_ops(CPU), 6
        if self.kind == "STANDALONE":
            draft = load_model(self.folder / "target", torch.float32, CPU)
            draft.pack(ops)
            return ModelDrafter(DraftLM(draft, draft.config.vocab_size), rows, TREE.topk, torch.float32, ops)
        head = load_head(self.head, self.kind, self.folder, target)
        head.pack(ops)
        drafter = make_model_drafter(head, rows, TREE.topk, torch.float32, ops)
        if self.pair:
            return PairDrafter(drafter, NGramDrafter(rows=rows, ops=ops, capacity=4096), TREE, COPIED)
        return drafter

    def answer(self, **kw: Any) -> Any:
        rig = self.h.Rig(self.target, shapes=(TREE,), drafter=self.drafter, rows=5, **kw)
        assert rig.answer(self.prompts, self.params).tokens == self.expected.tokens
        assert rig.accept_length > 1.4
        return rig


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, harness: Any, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("ranks"), harness)


@pytest.mark.further(case=["STANDALONE", "NEXTN 3 layers", "EAGLE3+NGRAM", "DFLASH"])
def test_speculation_changes_no_token(case: Case) -> None:
    case.answer(lag=1)


@pytest.mark.further(case=["NEXTN 3 layers", "DSPARK", "STANDALONE"])
def test_with_chunks_preemption_prefix_hits_and_steps_that_do_not_draft(case: Case) -> None:
    rig = case.answer(slots=130, chunk=5, policy=case.h.Cycle(TREE, PLAIN), deferral=DraftDeferral(24, 12))
    assert rig.sched.retractions > 0


@pytest.mark.further(case=["NEXTN 3 layers", "EAGLE3+NGRAM", "DFLASH"])
def test_a_large_head_is_spread(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "SPREAD", 0)
    rig = case.answer(lag=1)
    own = rig.drafter.kv_layers[0].kv_heads
    assert own == (2 if case.kind == "STANDALONE" else 1), "of two key/value heads"


@pytest.mark.further(case=["NEXTN 3 layers", "STANDALONE"])
def test_grammars_and_log_probabilities(case: Case) -> None:
    """The host's answers reach both ranks, in the order in which they are asked for."""
    found = []
    for model, drafter in ((case.target, case.drafter), (case.target.whole[0], None)):
        rig = (case.h.Rig if drafter else case.h.one_rank)(model, shapes=(TREE if drafter else PLAIN,), drafter=drafter)
        for i, prompt in enumerate(case.prompts[:3]):
            grammar = ToyGrammar(i, case.h.VOCAB) if i else None
            rig.submit(str(i), prompt, case.h.greedy(20), grammar=grammar, logprobs=LogprobParams(2, (3,), 0))
        found.append(rig.run())
    spread, whole = found
    assert spread.tokens == whole.tokens
    for uid, every in whole.logprobs.items():  # of logits up to 80, where float32 has steps of 8e-6
        for mine, theirs in zip(spread.logprobs[uid], every, strict=True):
            assert mine.value == pytest.approx(theirs.value, rel=1e-4, abs=1e-4)
            assert mine.wanted == pytest.approx(theirs.wanted, rel=1e-4, abs=1e-4)


@pytest.mark.further(case=["NEXTN 3 layers", "EAGLE3+NGRAM"])
def test_heads_that_are_swapped_between_steps_change_no_token(case: Case) -> None:
    """The folder's name is the seed of how far a head is from the one that the engine started with."""
    if case.kind in ("STANDALONE", "DSPARK", "DFLASH", "DFLASH2"):
        pytest.skip("not swapped")

    def load(target: Any, folder: Path) -> Any:
        if case.head is None:
            head: Any = load_mtp_head(case.folder / "target", target, torch.float32, "cpu")
        else:  # which the drafter was made of
            head = load_draft_head(case.folder / "draft", target, case.kind, torch.float32, "cpu")
        noise = torch.Generator().manual_seed(int(folder.name))
        with torch.no_grad():
            for param in head.parameters():
                param += 0.02 * int(folder.name) * torch.randn(param.shape, generator=noise)
        head.pack(make_ops(CPU))
        return head

    def drafter(target: Any) -> Any:
        made = case.drafter(target)
        model = made.model if isinstance(made, PairDrafter) else made
        model.swap = HeadSwap(model.head, lambda folder: load(target, folder))
        return made

    rig, turns = case.h.Rig(case.target, shapes=(TREE,), drafter=drafter, rows=5, lag=1), iter(range(1000))

    def swap(*args: Any) -> None:
        if (turn := next(turns)) % 4 == 2:
            for executor in (rig.executor, *(other.executor for other in rig.executor.broadcast.others)):
                executor.heads.load(turn, Path(f"{turn % 3}"))
            rig.executor.run_on_all_ranks(Executor.take_head, turn)

    assert rig.answer(case.prompts, case.params, between=swap).tokens == case.expected.tokens
    assert next(turns) > 7 and rig.accept_length > 1.2, "heads were swapped once or never"


def meet(executor: Any) -> None:
    executor.model.ranks.gather(torch.zeros(1))


def test_steps_before_the_first_request_leave_ranks_alike(case: Case) -> None:
    rig = case.h.Rig(case.target, shapes=(TREE,), drafter=case.drafter, rows=5)
    try_prompts(rig.executor, (TREE, PLAIN))
    rig.executor.run_on_all_ranks(meet)
    for other in rig.executor.broadcast.others:
        kept = zip(rig.executor.calibration, other.executor.calibration, strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in kept)
