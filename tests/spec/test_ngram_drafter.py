"""The n-gram drafter: search of the own history, what it proposes, and how it follows rows through their lives."""

import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from draftwing.core import PLAIN, TreeShape
from draftwing.errors import ConfigError
from draftwing.ops import make_ops
from draftwing.ops.attention import Batch, ChunkSpan
from draftwing.ops.reference.ngram import OWN, STEADY
from draftwing.ops.torch.ops import TorchOps
from draftwing.spec.drafter import Draft, Drafter, DraftStep, SeenTokens
from draftwing.spec.ngram_drafter import NGramDrafter

NONE = torch.empty(0, dtype=torch.int64)
SHAPE = TreeShape(5, 3, 8)


@pytest.fixture(params=["torch", "cpu"])
def ops(request):
    """Triton's run in tests/ops/test_ngram.py, against torch's."""
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
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.int64)

    return Slots(zeros(rows + 1, context), zeros(rows + 1), zeros(rows + 1), zeros(rows + 1))


def fill(slots: Slots, row: int, history: list[int], salt: int = 0) -> None:
    slots.tokens[row] = 10**6 + torch.arange(slots.tokens.shape[1])  # garbage past the history
    slots.tokens[row, : len(history)] = torch.tensor(history)
    slots.kv_len[row], slots.last[row], slots.salt[row] = len(history) - 1, history[-1], salt


def decode_batch(rows: Tensor, prefix_len: Tensor) -> Batch:
    empty = torch.empty(0, dtype=torch.int64)
    return Batch(rows, empty, empty, empty, empty, prefix_len)


def prefill(drafter: NGramDrafter, slots: Slots, row: int) -> None:
    empty = torch.empty(0, dtype=torch.int64)
    rows = torch.tensor([row])
    length = int(slots.kv_len[row])
    batch = Batch(rows, empty, empty, empty, empty, rows, chunks=(ChunkSpan(0, 0, 0, length),))
    drafter.extend(SeenTokens(slots, batch, None, torch.zeros(length, dtype=torch.int64), None, NONE))


def accepted(draft: Draft, row: int, following: list[int]) -> int:
    """Draft tokens that a target which says `following` accepts."""
    tokens, parent, alive = (x[row].tolist() for x in draft[:3])
    node = count = 0
    for token in following:
        hits = [i for i in range(1, len(tokens)) if alive[i] and parent[i] == node and tokens[i] == token]
        if not hits:
            break
        node, count = hits[0], count + 1
    return count


def replay(
    drafter: NGramDrafter, slots: Slots, row: int, prompt: list[int], answer: list[int], salt: int = 0
) -> tuple[int, list[int]]:
    """Generates `answer` with drafts; returns the steps taken and the confidence before each."""
    everything, rows = prompt + answer, torch.tensor([row])
    length = len(prompt)
    fill(slots, row, everything[: length + 1], salt)
    prefill(drafter, slots, row)
    confidences = []
    while length < len(everything) - 1:
        confidences.append(int(drafter.confidence(slots, rows, length)))
        draft = drafter.propose(DraftStep(slots, rows, SHAPE, length, NONE))
        live = int(draft.alive.sum()) - 1
        assert (live > 0) == (confidences[-1] > 0)
        count = min(accepted(draft, 0, everything[length + 1 :]) + 1, len(everything) - 1 - length)
        before, length = length, length + count
        fill(slots, row, everything[: length + 1], salt)
        ids = torch.zeros(SHAPE.max_commit, dtype=torch.int64)
        drafter.extend(
            SeenTokens(slots, decode_batch(rows, torch.tensor([before])), None, ids, torch.tensor([count]), NONE)
        )
    return len(confidences), confidences


def brute_search(history: list[int], low: int, high: int, distance: int) -> list[tuple[int, int]]:
    """(match length, index of the last matched token) of the best `OWN` matches, best first."""
    newest = len(history) - 1
    found = []
    for end in range(newest):
        m = 0
        while m < high and end - m >= 0 and history[end - m] == history[newest - m]:
            m += 1
        if m >= low:
            found.append((m, distance > 0 and end == newest - distance, end))
    return [(m, end) for m, _, end in sorted(found, reverse=True)[:OWN]]


@pytest.mark.parametrize("low, high", [(1, 12), (2, 5), (3, 3), (1, 1)])
def test_own_history_search_is_exact(ops: TorchOps, low: int, high: int) -> None:
    rng = random.Random(low * 100 + high)
    slots = make_slots(6, 80)
    drafter = NGramDrafter(7, ops, min_window=low, max_window=high, branch_length=6, capacity=1)
    rows, distances, hits = torch.arange(6), [0] * 6, 0
    for _ in range(40):
        histories = [[rng.randrange(rng.choice((2, 4))) for _ in range(rng.randint(1, 70))] for _ in range(6)]
        for row, history in enumerate(histories):
            fill(slots, row, history)
        bound = max(len(h) for h in histories) - 1 + rng.randint(0, 5)
        best = drafter.confidence(slots, rows, bound).tolist()
        for row, history in enumerate(histories):
            expected = brute_search(history, low, high, distances[row])
            longest, end = expected[0] if expected else (0, 0)
            copying = longest > 0 and distances[row] > 0 and end == len(history) - 1 - distances[row]
            assert best[row] == longest + (high if copying else 0)
            assert drafter.index.match[row, : len(expected)].tolist() == [m for m, _ in expected]
            assert not drafter.index.match[row, len(expected) :].any()  # nothing shared
            for c, (_, end) in enumerate(expected):
                follow = history[end + 1 :]
                follow = (follow * 6)[:6]  # repeats itself past the newest token
                assert drafter.index.candidates[row, :, c].tolist() == follow
            if expected and expected[0][0] >= min(STEADY, high):
                distances[row] = len(history) - 1 - expected[0][1]
            hits += len(expected)
        for row in range(6):
            if rng.random() < 0.5:  # else the source carries over, as within a request
                prefill(drafter, slots, row)
                distances[row] = 0
    assert hits > 200


def test_copying_a_prompt_accepts_whole_chains(ops: TorchOps) -> None:
    """Records that share more than max_window tokens: the newest record must not win over the one being copied."""
    rng = random.Random(5)
    frame = list(range(100, 120))
    records = [x for _ in range(12) for x in [*frame, *(rng.randrange(50) for _ in range(4))]]
    drafter = NGramDrafter(3, ops, capacity=1)
    steps, confidences = replay(drafter, make_slots(2, 700), 0, [1, 2, *records, 3], records)
    assert len(records) / steps > 0.9 * SHAPE.max_commit
    assert max(confidences) == 12 + 12  # copying
    assert confidences.count(24) > 0.8 * steps


def test_novel_text_has_no_confidence(ops: TorchOps) -> None:
    drafter = NGramDrafter(3, ops, capacity=1)
    steps, confidences = replay(drafter, make_slots(2, 200), 0, list(range(50)), list(range(50, 120)))
    assert steps == 69 and not any(confidences)


def test_shared_memory_helps_later_requests_of_the_same_salt_only(ops: TorchOps) -> None:
    answer = list(range(100, 200))
    drafter, slots = NGramDrafter(4, ops, capacity=10_000), make_slots(3, 300)
    assert replay(drafter, slots, 0, [1, 2, 3], answer, salt=5)[0] == 99
    assert replay(drafter, slots, 1, [4, 5], answer, salt=6)[0] == 99
    assert replay(drafter, slots, 1, [4, 5], answer, salt=0)[0] == 99
    assert replay(drafter, slots, 1, [4, 5], answer, salt=5)[0] < 99 / 3
    drafter.flush()
    assert not drafter.index.match.any()
    assert replay(drafter, slots, 2, [4, 5], answer, salt=5)[0] == 99


def test_a_new_request_drops_the_former_ones_candidates(ops: TorchOps) -> None:
    drafter, slots = NGramDrafter(2, ops, capacity=1), make_slots(1, 50)
    fill(slots, 0, [1, 2, 3, 1, 2])
    rows = torch.tensor([0])
    assert drafter.confidence(slots, rows, 4).tolist() == [2]
    assert drafter.propose(DraftStep(slots, rows, SHAPE, 4, NONE)).alive.sum() > 1
    prefill(drafter, slots, 0)
    assert drafter.propose(DraftStep(slots, rows, SHAPE, 4, NONE)).alive.sum() == 1


def test_plain_shape_and_span(ops: TorchOps) -> None:
    drafter: Drafter = NGramDrafter(2, ops, capacity=1)
    slots = make_slots(1, 50)
    fill(slots, 0, [1, 2, 1])
    draft = drafter.propose(DraftStep(slots, torch.tensor([0]), PLAIN, 2, NONE))  # type: ignore[arg-type]
    assert draft.tokens.tolist() == [[1]] and draft.alive.tolist() == [[True]] and draft.parent.tolist() == [[0]]
    assert drafter.span(SHAPE) == SHAPE.nodes and drafter.span(PLAIN) == 1
    assert drafter.aux_layers == () and drafter.lookahead == 0 and drafter.kv_layers == ()


def random_life(drafter: NGramDrafter, together: bool) -> list[Draft]:
    """Random decoding of 4 rows, all in one batch (padded) or one by one."""
    rng = random.Random(9)
    slots = make_slots(4, 300)
    histories = [[rng.randrange(4) for _ in range(5)] for _ in range(4)]
    for row, history in enumerate(histories):
        fill(slots, row, history)
        prefill(drafter, slots, row)
    drafts = []
    for _ in range(30):
        before = [len(h) - 1 for h in histories]
        counts = [rng.randint(1, 6) for _ in range(4)]
        for row, history in enumerate(histories):
            history += [rng.randrange(4) for _ in range(counts[row])]
            fill(slots, row, history)
        bound = max(len(h) for h in histories) - 1
        batches = [[0, 1, 2, 3, 4, 4]] if together else [[0], [1], [2], [3]]
        for batch in batches:
            rows = torch.tensor(batch)
            prefix = torch.tensor([*before, 0])[rows]
            ids = torch.zeros(6 * len(batch), dtype=torch.int64)
            drafter.extend(
                SeenTokens(slots, decode_batch(rows, prefix), None, ids, torch.tensor([*counts, 1])[rows], NONE)
            )
        for batch in batches:
            drafter.confidence(slots, torch.tensor(batch), bound)
        parts = [drafter.propose(DraftStep(slots, torch.tensor(batch), SHAPE, bound, NONE)) for batch in batches]
        drafts.append(Draft(*(torch.cat(p)[:4] for p in zip(*parts, strict=True))))
    return drafts


def test_batched_single_and_repeated_runs_agree(ops: TorchOps) -> None:
    runs = [random_life(NGramDrafter(5, ops, capacity=100_000), together) for together in (True, True, False)]
    for batched, again, single in zip(*runs, strict=True):
        for one, two, three in zip(batched[:3], again[:3], single[:3], strict=True):
            assert torch.equal(one, two) and torch.equal(one, three)


def test_reads_nothing_on_the_host() -> None:
    with FakeTensorMode():
        slots = make_slots(4, 100)
        drafter = NGramDrafter(5, TorchOps(torch.device("cpu")), capacity=1_000)
        rows = torch.zeros(3, dtype=torch.int64)
        for shape in (PLAIN, SHAPE, TreeShape(30, 2, 200)):
            prefix = torch.zeros(3, dtype=torch.int64)
            ids = torch.zeros(3 * shape.max_commit, dtype=torch.int64)
            drafter.extend(
                SeenTokens(slots, decode_batch(rows, prefix), None, ids, torch.ones(3, dtype=torch.int64), NONE)
            )
            assert drafter.confidence(slots, rows, 50).shape == (3,)
            draft = drafter.propose(DraftStep(slots, rows, shape, 50, NONE))
            assert draft.tokens.shape == draft.parent.shape == draft.alive.shape == (3, shape.nodes)
        drafter.extend(SeenTokens(slots, decode_batch(rows, rows), None, rows, None, NONE))
        drafter.flush()


@pytest.mark.parametrize(
    "options",
    [
        {"min_window": 0},
        {"min_window": 5, "max_window": 4},
        {"max_window": 200},
        {"min_breadth": 3, "max_breadth": 2},
        {"branch_length": 0},
        {"capacity": 0},
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        NGramDrafter(2, TorchOps(torch.device("cpu")), **options)
