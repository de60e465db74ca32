"""Drafts of rows with penalties or a grammar from graphs: their first level knows of these, as the target does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_rig import VOCAB, InTurn, Rig, greedy, tiny_model
from toy_grammar import ToyGrammar

from draftwing.config.trees import LOOKUP_ALONE, TreeShape
from draftwing.engine.devices import pick_device
from draftwing.models.heads.base import DraftLM
from draftwing.ops.attention.spec import TorchAttention
from draftwing.ops.expansion.spec import ExpansionOps
from draftwing.ops.sampling.spec import SamplingOps
from draftwing.ops.table import TorchOps
from draftwing.spec.build import make_model_drafter
from draftwing.spec.drafter import Drafter
from draftwing.spec.lookup_drafter import NGramDrafter
from draftwing.spec.model_drafter import HeadDrafter
from draftwing.spec.pair_drafter import PairDrafter

ONE = TreeShape(1, 1, 2)
ROWS = 7


class Early(ExpansionOps):
    """What may follow a root is row state, as on a GPU."""

    reads_root_late = False


def answered(pair: bool, graph_size: int, grammar: bool, penalty: float, *shapes: TreeShape) -> tuple[Any, float]:
    """What requests are answered where the target drafts for itself, and tokens a step."""
    sampling = SamplingOps()
    ops = TorchOps(sampling=sampling, expansion=Early(sampling))
    model: HeadDrafter = make_model_drafter(DraftLM(tiny_model(), VOCAB), ROWS, 1, torch.float32, ops)
    drafter: Drafter = model
    if pair:
        drafter = PairDrafter(model, NGramDrafter(ROWS, ops, capacity=4096), ONE, ONE)
    rig = Rig(
        tiny_model(), policy=InTurn(*shapes), drafter=drafter, graph_size=graph_size, attn=TorchAttention,
        fake_device=pick_device("cpu", ops=ops),
    )  # fmt: skip
    for number in range(3):
        more = {"grammar": ToyGrammar(number, VOCAB)} if grammar else {}
        rig.submit(str(number), [number + 1, 5, 3], greedy(20 + number, repetition_penalty=penalty), **more)
    return rig.run().tokens, rig.accept_length


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize(("grammar", "penalty"), [(False, 1.5), (True, 1.0), (True, 1.5)])
def test_every_first_draft_is_right(grammar: bool, penalty: float, pair: bool) -> None:
    expected, without_graphs = answered(pair, 0, grammar, penalty, ONE)
    found, accept_length = answered(pair, 8, grammar, penalty, ONE)
    assert found == expected
    assert accept_length == pytest.approx(without_graphs) and accept_length > 1.8


def test_a_lookup_alone_leaves_nothing_behind() -> None:
    """What a grammar wants of a step that the model does not draft for is not that of the next one."""
    shapes = ONE._replace(proposer=LOOKUP_ALONE), ONE
    assert answered(True, 8, True, 1.0, *shapes)[0] == answered(True, 0, True, 1.0, ONE)[0]
