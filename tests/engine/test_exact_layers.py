"""A model's text is the same with drafts as without them, whatever its layers are: attention of several sizes and
rotary embeddings, layers that read another's keys and values, recurrences and convolutions with states in the pool."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from exactness import CHAIN, Exactness, case_of
from layer_kinds import KINDS, config_of, dense_logits

from draftwing.layers.linear_ops.dense import DENSE
from draftwing.ops.attention.batch import Batch, ChunkSpan

BLOCKS = pytest.param("blocks", marks=pytest.mark.slow)  # layers in one call each, where they can be
pytestmark = [
    pytest.mark.slow,
    pytest.mark.further(harness="blocks", case="mixed"),
    pytest.mark.further(harness="torch", case=["mixed", "recurrent"]),
    pytest.mark.further(harness="cpu", chunk=1),
    pytest.mark.further(harness="cpu", case=["mixed", "shared"], shape=CHAIN),
    pytest.mark.parametrize("harness", ["cpu", "torch", BLOCKS], indirect=True, scope="session"),
]


@pytest.fixture(scope="session", params=list(KINDS))
def case(request, harness, one_thread):
    return case_of(harness, partial(harness.model_of, config_of(KINDS[request.param], harness.CONTEXT)))


def test_logits_are_those_of_a_dense_computation(harness, case):
    """In chunks, the second of which reads what the first left."""
    if case[0].config.weight_format != DENSE:
        pytest.skip("its weights are quantised")
    model, ids = case[0], torch.tensor([5, 9, 2, 7, 7, 1, 30, 4, 8, 11, 3])
    rig = harness.Rig(model)
    rows, slots = torch.tensor([0]), torch.tensor([17, 3, 9, 4, 12, 8, 1, 2, 20, 30, 25])
    table = torch.zeros(1, 16, dtype=torch.int64)
    table[0, : len(ids)] = slots
    found = []
    for begin, end in ((0, 4), (4, 11)):
        here, length = slice(begin, end), end - begin
        batch = Batch(
            rows, ids[here], torch.arange(begin, end), slots[here], table, torch.tensor([begin]),
            chunks=(ChunkSpan(0, 0, begin, length),), bound=end,
        )  # fmt: skip
        with torch.inference_mode():
            found.append(model.logits(model(ids[here], batch.positions, rig.executor.attn.bind(batch, 0))[0]))
    torch.testing.assert_close(torch.cat(found).double(), dense_logits(model, ids.tolist()), rtol=1e-4, atol=2e-4)


class TestLayers(Exactness):
    slots = 90
