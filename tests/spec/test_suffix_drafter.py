"""The suffix drafter through the lives of requests; what its index does is compared in tests/ops/test_suffix.py."""

import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from draftwing.config.options import Options
from draftwing.core import PLAIN, TreeShape
from draftwing.errors import ConfigError
from draftwing.ops import make_ops
from draftwing.ops.attention import Batch, ChunkSpan
from draftwing.ops.torch.ops import TorchOps
from draftwing.spec.drafter import Draft, DraftStep, SeenTokens
from draftwing.spec.suffix_drafter import SuffixDrafter

NONE = torch.empty(0, dtype=torch.int64)
SHAPE = TreeShape(15, 4, 16)
EMPTY = torch.empty(0, dtype=torch.int64)


@pytest.fixture(params=["torch", "cpu"])
def ops(request):
    if request.param == "torch":
        return TorchOps(torch.device("cpu"))
    found = make_ops(torch.device("cpu"))
    return found if found.name == "cpu" else pytest.skip("the C extension was not built, or is not wanted")


class Slots(NamedTuple):
    tokens: Tensor
    kv_len: Tensor
    last: Tensor
    salt: Tensor


def make_slots(rows: int, context: int) -> Slots:
    return Slots(
        torch.zeros(rows + 1, context, dtype=torch.int64), *torch.zeros(3, rows + 1, dtype=torch.int64).unbind(0)
    )


def fill(slots: Slots, row: int, text: list[int], salt: int = 0) -> None:
    slots.tokens[row] = 10**6 + torch.arange(slots.tokens.shape[1])  # garbage past the text
    slots.tokens[row, : len(text)] = torch.tensor(text)
    slots.kv_len[row], slots.last[row], slots.salt[row] = len(text) - 1, text[-1], salt


def decoded(rows: Tensor, prefix_len: Tensor) -> Batch:
    return Batch(rows, EMPTY, EMPTY, EMPTY, EMPTY, prefix_len)


def prefill(drafter: SuffixDrafter, slots: Slots, row: int, final: bool = True) -> None:
    rows, length = torch.tensor([row]), int(slots.kv_len[row])
    batch = Batch(rows, EMPTY, EMPTY, EMPTY, EMPTY, rows, chunks=(ChunkSpan(0, 0, 0, length, final),))
    drafter.extend(SeenTokens(slots, batch, None, torch.zeros(length, dtype=torch.int64), None, NONE))


def accepted(draft: Draft, following: list[int]) -> int:
    """Draft tokens that a target which says `following` accepts, of the first row."""
    tokens, parent, alive = draft.tokens[0].tolist(), draft.parent[0].tolist(), draft.alive[0].tolist()
    node = count = 0
    for token in following:
        hits = [i for i in range(1, len(tokens)) if alive[i] and parent[i] == node and tokens[i] == token]
        if not hits:
            break
        node, count = hits[0], count + 1
    return count


def replay(drafter: SuffixDrafter, slots: Slots, row: int, prompt: list[int], answer: list[int], salt: int = 0) -> int:
    """Generates `answer` with drafts; returns the steps taken."""
    everything, rows, steps = prompt + answer, torch.tensor([row]), 0
    length = len(prompt)
    fill(slots, row, everything[: length + 1], salt)
    prefill(drafter, slots, row)
    while length < len(everything) - 1:
        confidence = int(drafter.confidence(slots, rows, length))
        draft = drafter.propose(DraftStep(slots, rows, SHAPE, length, NONE))
        assert (draft.alive.sum() > 1) == (confidence > 0)
        count = min(accepted(draft, everything[length + 1 :]) + 1, len(everything) - 1 - length)
        before, length = length, length + count
        fill(slots, row, everything[: length + 1], salt)
        ids = torch.zeros(SHAPE.max_commit, dtype=torch.int64)
        drafter.extend(SeenTokens(slots, decoded(rows, torch.tensor([before])), None, ids, torch.tensor([count]), NONE))
        steps += 1
    return steps


def test_copying_a_prompt_accepts_whole_chains(ops):
    rng = random.Random(5)
    frame = list(range(100, 120))
    records = [x for _ in range(12) for x in [*frame, *(rng.randrange(50) for _ in range(4))]]
    drafter = SuffixDrafter(3, ops, capacity=1 << 14)
    steps = replay(drafter, make_slots(2, 700), 0, [1, 2, *records, 3], records)
    assert len(records) / steps > 0.7 * SHAPE.max_commit


@pytest.mark.slow
def test_an_answer_helps_later_requests_of_its_salt_only(ops):
    answer = list(range(100, 140))
    drafter, slots = SuffixDrafter(4, ops, capacity=1 << 14), make_slots(3, 300)
    assert replay(drafter, slots, 0, [1, 2, 3], answer, salt=5) == 39
    assert replay(drafter, slots, 1, [4, 5], answer, salt=6) == 39
    assert replay(drafter, slots, 1, [4, 5], answer, salt=0) == 39
    assert replay(drafter, slots, 1, [4, 5], answer, salt=5) < 39 / 4
    drafter.flush()
    assert replay(drafter, slots, 2, [4, 5], answer, salt=5) == 39


def test_a_prompt_is_learnt_at_its_end_and_forgotten_with_its_row(ops):
    drafter, slots, rows = SuffixDrafter(2, ops, capacity=1 << 14), make_slots(1, 50), torch.tensor([0])
    fill(slots, 0, [1, 2, 3, 1, 2])
    prefill(drafter, slots, 0, final=False)
    assert drafter.confidence(slots, rows, 4).tolist() == [0]
    prefill(drafter, slots, 0)
    assert drafter.confidence(slots, rows, 4).tolist() == [1]
    assert drafter.propose(DraftStep(slots, rows, SHAPE, 4, NONE)).alive.sum() > 1
    fill(slots, 0, [7, 1, 2])
    prefill(drafter, slots, 0)
    assert drafter.propose(DraftStep(slots, rows, SHAPE, 2, NONE)).alive.sum() == 1, "the former request's draft"
    assert drafter.confidence(slots, rows, 2).tolist() == [0]


def test_plain_shape_and_span(ops):
    drafter, slots = SuffixDrafter(2, ops, capacity=1 << 14), make_slots(1, 50)
    fill(slots, 0, [1, 2, 1])
    draft = drafter.propose(DraftStep(slots, torch.tensor([0]), PLAIN, 2, NONE))
    assert draft.tokens.tolist() == [[1]] and draft.alive.tolist() == [[True]] and draft.parent.tolist() == [[0]]
    assert drafter.span(SHAPE) == SHAPE.nodes and drafter.span(PLAIN) == 1
    assert drafter.aux_layers == () and drafter.lookahead == 0 and drafter.kv_layers == ()


@pytest.mark.slow
def test_reads_nothing_on_the_host():
    with FakeTensorMode():
        slots = make_slots(4, 100)
        drafter = SuffixDrafter(5, TorchOps(torch.device("cpu")), TreeShape(5, 3, 8), capacity=1_000)
        rows = torch.zeros(3, dtype=torch.int64)
        for shape in (PLAIN, TreeShape(5, 3, 8), TreeShape(30, 2, 50)):
            prefix = torch.zeros(3, dtype=torch.int64)
            ids = torch.zeros(3 * min(shape.max_commit, 5), dtype=torch.int64)
            drafter.extend(SeenTokens(slots, decoded(rows, prefix), None, ids, torch.ones(3, dtype=torch.int64), NONE))
            assert drafter.confidence(slots, rows, 50).shape == (3,)
            draft = drafter.propose(DraftStep(slots, rows, shape, 50, NONE))
            assert draft.tokens.shape == draft.parent.shape == draft.alive.shape == (3, shape.nodes)
        chunks = ChunkSpan(0, 0, 0, 4), ChunkSpan(1, 4, 0, 5), ChunkSpan(2, 9, 2, 5, False)
        drafter.extend(SeenTokens(slots, decoded(rows, rows)._replace(chunks=chunks), None, rows, None, NONE))
        drafter.flush()


@pytest.mark.parametrize(
    "options", [{"max_context": 0}, {"max_context": 33}, {"min_prob": 0.0}, {"capacity": 0}], ids=str
)
def test_options_that_cannot_work_are_refused(options):
    with pytest.raises(ConfigError, match="expected"):
        SuffixDrafter(2, TorchOps(torch.device("cpu")), **options)


@pytest.mark.parametrize(
    ("given", "shape"),
    [({}, SHAPE), ({"num_draft_tokens": 25}, TreeShape(24, 4, 25)), ({"num_steps": 6}, TreeShape(6, 4, 16))],
)
def test_shapes(given, shape):
    fields = {f"speculative_{name}": value for name, value in given.items()}
    options = Options(speculative_algorithm="suffix", **fields).resolve()
    assert options.speculative_algorithm == "SUFFIX" and options.speculative_shape == shape
