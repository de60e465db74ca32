"""A pair of drafters, of parts that only note what is asked of them: who proposes, and what the pair says of itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftwing.config.trees import BOTH, LOOKUP, LOOKUP_ALONE, MAX_CONFIDENCE, MODEL, MODEL_ALONE, PLAIN, TreeShape
from draftwing.core import MAX_BACKLOG
from draftwing.kv.pool import KVSpec
from draftwing.ops.assign.spec import LEVELS
from draftwing.ops.table import TorchOps
from draftwing.ops.types import Draft
from draftwing.spec.drafter import DraftStep, SeenTokens, part_of
from draftwing.spec.pair_drafter import PairDrafter

GROWN, DEEP = TreeShape(3, 2, 7), TreeShape(8, 2, 12)
ROWS = torch.tensor([0, 1])
SEEN: Any = SeenTokens(*("table", "batch", "hidden", "ids", "count", "noisy"))  # type: ignore[arg-type]


class Part:
    """Proposes chains of 100, 101, ... or of 100, 201, 202, ...; a dead node where the shape has more."""

    def __init__(self, source: int) -> None:
        self.source = source
        self.asked: list[Any] = []
        self.ops = TorchOps(torch.device("cpu"))
        self.aux_layers, self.lookahead, self.tail = ((1, 2), 1, 1) if source == MODEL else ((), 0, 0)
        self.reads_images = source == MODEL
        self.kv_layers = (KVSpec(1, 2),) if source == MODEL else ()
        self.fixed_confidence = source == MODEL
        self.head = "head"

    def propose(self, step: DraftStep) -> Draft:
        rows, shape = step.rows, step.shape
        self.asked.append(shape)
        node = torch.arange(shape.nodes)
        other = 100 * (self.source == LOOKUP) * (node > 1)
        tokens = torch.where(node > 0, 99 + node + other, 9).expand(len(rows), -1)
        grade = torch.where(node > 0, LEVELS * self.source + 7 + self.source, 0).expand_as(tokens)
        alive = (node <= shape.depth).expand_as(tokens)
        return Draft(tokens, (node - 1).clamp(min=0).expand_as(tokens), alive, grade)

    def menu(self, shape: TreeShape) -> tuple[TreeShape, ...]:
        return shape, part_of(shape, 3), PLAIN

    def span(self, shape: TreeShape) -> int:
        return 20 if self.source == MODEL else shape.nodes

    def confidence(self, table: Any, rows: Tensor, max_kv_len: int, out: Tensor | None = None) -> Tensor:
        assert out is not None
        return out.copy_(torch.tensor([0, MAX_CONFIDENCE]))

    def extend(self, seen: SeenTokens) -> None:
        self.asked.append(seen)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.asked.append((name, *args))


@pytest.fixture
def pair() -> PairDrafter:
    return PairDrafter(Part(MODEL), Part(LOOKUP), GROWN, DEEP)  # type: ignore[arg-type]


def tokens_of(pair: PairDrafter, shape: TreeShape) -> list[int]:
    draft = pair.propose(DraftStep(SimpleNamespace(), ROWS, shape, 5, ROWS[:0]))  # type: ignore[arg-type]
    assert draft.tokens.shape == (2, shape.nodes) and torch.equal(draft.tokens[0], draft.tokens[1])
    return draft.tokens[0][draft.alive[0]].tolist()


def test_both_propose_and_the_best_stay(pair: PairDrafter) -> None:
    # The lookup is surer, 100 is both's. The model's third level is expected least.
    assert tokens_of(pair, TreeShape(3, 2, 5)) == [9, 100, 101, 201, 202]
    assert tokens_of(pair, TreeShape(3, 2, 7)) == [9, 100, 101, 102, 201, 202]
    assert pair.model.asked == [TreeShape(3, 2, 5), GROWN]  # type: ignore[attr-defined]


def test_the_lookup_may_be_deeper_than_the_model(pair: PairDrafter) -> None:
    assert tokens_of(pair, DEEP) == [9, 100, 101, 102, *range(201, 208)]
    assert pair.model.asked == [TreeShape(3, 2, 11)] and pair.lookup.asked == [DEEP]  # type: ignore[attr-defined]


def test_none_is_asked_for_more_than_it_has(pair: PairDrafter) -> None:
    large = TreeShape(9, 3, 20)
    assert tokens_of(pair, large) == [9, 100, 101, 102, *range(201, 208)]
    assert pair.model.asked == [TreeShape(3, 2, 11)] and pair.lookup.asked == [DEEP]  # type: ignore[attr-defined]


def test_one_alone(pair: PairDrafter) -> None:
    assert tokens_of(pair, GROWN._replace(proposer=MODEL_ALONE)) == [9, 100, 101, 102] and not pair.lookup.asked  # type: ignore[attr-defined]
    pair.model.asked.clear()  # type: ignore[attr-defined]
    assert tokens_of(pair, DEEP._replace(proposer=LOOKUP_ALONE)) == [9, 100, *range(201, 208)]
    assert pair.model.asked == [("unconstrain",)], "what the model got for this step is over"  # type: ignore[attr-defined]


def test_what_it_says_of_itself(pair: PairDrafter) -> None:
    assert (pair.aux_layers, pair.lookahead, pair.tail, pair.kv_layers) == ((1, 2), 1, 1, (KVSpec(1, 2),))
    assert pair.reads_images
    assert not pair.fixed_confidence and pair.initial_confidence == 1 and pair.head == "head"
    assert pair.span(GROWN) == pair.span(DEEP) == 20
    assert pair.span(DEEP._replace(proposer=LOOKUP_ALONE)) == 12
    assert pair.span(TreeShape(13, 1, 14, proposer=LOOKUP_ALONE)) == 15, "the model writes the root again"
    out = torch.full((2, 3), 7)
    assert pair.confidence(SimpleNamespace(), ROWS, 5, out[:, 1]).tolist() == [1, MAX_CONFIDENCE]  # type: ignore[arg-type]
    assert out.tolist() == [[7, 1, 7], [7, MAX_CONFIDENCE, 7]]


def test_the_menu_is_both_parts(pair: PairDrafter) -> None:
    copied = [one._replace(proposer=LOOKUP_ALONE) for one in pair.lookup.menu(DEEP)[:-1]]
    assert pair.menu(GROWN) == (DEEP, GROWN, part_of(GROWN, 3), *copied, PLAIN)
    wide = TreeShape(9, 1, 14)
    assert pair.menu(wide) == (wide, part_of(wide, 3), *copied, PLAIN)


def test_only_the_model_lags(pair: PairDrafter) -> None:
    shapes = (PLAIN, GROWN, DEEP._replace(proposer=LOOKUP_ALONE), GROWN._replace(proposer=MODEL_ALONE))
    assert [pair.skips_extend(shape) for shape in shapes] == [True, False, True, False]
    longest = [TreeShape(depth, 1, depth + 1, proposer=LOOKUP_ALONE) for depth in (MAX_BACKLOG - 2, MAX_BACKLOG - 1)]
    assert [pair.skips_extend(shape) for shape in longest] == [True, False], (
        "as many tokens as it sees in one pass are too many"
    )
    pair.kv_layers = ()
    assert not any(pair.skips_extend(shape) for shape in shapes), "who reads the target's keys and values sees all"
    pair.kv_layers = pair.model.kv_layers
    pair.watch(SEEN._replace(aux_hidden=None))
    pair.catch_up(SEEN, True)
    assert pair.lookup.asked == [SEEN._replace(aux_hidden=None)]  # type: ignore[attr-defined]
    assert pair.model.asked == [("catch_up", SEEN, True)]  # type: ignore[attr-defined]


def test_both_see_the_text(pair: PairDrafter) -> None:
    pair.extend(SEEN)
    pair.flush()
    assert pair.model.asked == [SEEN, ("flush",)]  # type: ignore[attr-defined]
    assert pair.lookup.asked == [SEEN._replace(aux_hidden=None), ("flush",)]  # type: ignore[attr-defined]
    pair.constrain("table", "rows", "banned", "noisy")  # type: ignore[arg-type]
    assert pair.model.asked[-1] == ("constrain", "table", "rows", "banned", "noisy")  # type: ignore[attr-defined]
    assert TreeShape(1, 1, 2).proposer == BOTH
